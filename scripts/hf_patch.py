"""Let the ReLU and ReLU² MLPs of a Hugging Face model save their activation compressed.

    from scripts.hf_patch import patched
    with patched(model) as p:       # model: bf16, e.g. nemotron_h, nemotron, arcee, nanochat, opt
        loss = p.run(step)          # step(): zero_grad, forward, backward, return the loss

`python scripts/hf_patch.py MODEL` prints what would be patched in a model of the hub, a local
folder or a model type (nemotron_h), built from its config alone: no weights are read.

What is patched. Every ungated MLP down(act(up(x))) whose act is relu or relu² becomes one call of
relu_mlp or relu2_mlp, found by structure and not by name:
- a module whose only parameters are those of two nn.Linear that mirror each other. A small twin of
  it, in training mode, must give the outputs and gradients of down(act(up(x))), bit for bit, and
  the activation of every bf16 from 2^-63 on: dropout, a residual or another rounding is refused.
- a pair inside a larger block (OPT's fc1 and fc2): the source of the block's forward must call up,
  the activation and down on each other and nowhere else.
Weights may be frozen or tied, biases both present or both absent. What is not patched is reported
with its reason, and stays as it was.

Equality. Torch rounds relu(z) (exact) and square(relu(z)) = bf16(r * r), and in backward
bf16(dh * bf16(2r)), where 2r is exact: one rounding each, as in bitsparse_kernels. For contiguous x
nn.Linear reaches the same GEMM calls on [tokens, d] as the patched one. So outputs and gradients
are the same bits in bf16 as those of the unpatched model, if its MLP runs eagerly and a GEMM call
is repeatable. Where they may differ: torch.compile may fuse the unpatched MLP without its
roundings; a NaN in z may come back with other bits; with fp8 storage outputs are the same, and
gradients those of the rounded activation. fp16 and fp32, and autocast, are refused.

Gradient checkpointing. An MLP in a recomputed block stores in backward, once, and its gradients
are the same bits. But what it stores lives until the next forward, and a recomputed dense
activation only until its block is through: to save memory, recompute the other blocks alone, with
mlp.blocks' gradient_checkpointing = False. Compiled blocks store in both passes, which is right
and takes twice the room.

The buffer of patched() is reset before each forward of the model that records gradients, sized at
0.5 stored values an element plus a margin, and then follows the need that was observed. A second
forward before the first one's backward drops the values of the first.

Overflow. If a batch needs more, or a backward's values were dropped, its gradients are wrong and
must not be used. Three ways to act:
- p.run(step) waits for the device, grows the buffer and repeats step() from the same random state;
- p.check() before optimizer.step() waits, and raises BufferOverflow with needed and given bytes;
- without waiting: optimizer.found_inf = p.overflowed().float() before the step of a fused=True
  optimizer of torch leaves weights and state as they were. Then p.grow() when it was set.
Whoever does none of these gets the error from a later forward, or when the context ends.

torch.compile. patch_mlps() adds no graph break; reset the buffer outside of the compiled function.
patched() breaks the graph once, at the start, and its buffer keeps the size that run() gave it.
"""
import argparse
import ast
import copy
import inspect
import logging
import re
import sys
import textwrap
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bitsparse_kernels import (
    ActivationBuffer,
    _check_format,
    bits_per_element,
    relu2_mlp,
    relu_mlp,
)

MLPS = {1: relu_mlp, 2: relu2_mlp}
MARGIN = 0.05  # of a buffer, kept free beyond the expected need
SLACK = 1.25  # a buffer this much larger than needed is shrunk; below, resizing is not worth it


class BufferOverflow(RuntimeError):
    """Values did not fit into the buffer: the gradients of that backward are wrong."""


# -----------------------------------------------------------------------------
# Finding


@dataclass(eq=False)
class Mlp:
    """A module that looks like an MLP; `reason` says why it is left alone (None: patched).

    up, down: its linear layers. act: its activation, where the three are called by a larger block
    and are therefore patched each by itself: then down computes all. power: 1 relu, 2 relu².
    blocks: the modules around it that have transformers' switch gradient_checkpointing. The rest:
    arguments of relu2_mlp.
    """

    name: str
    module: nn.Module
    reason: str | None = None
    up: nn.Linear | None = None
    down: nn.Linear | None = None
    act: nn.Module | None = None
    power: int = 0
    blocks: list[nn.Module] = field(default_factory=list)
    buffer: ActivationBuffer | None = None
    codec: str = "raw"
    storage: torch.dtype = torch.bfloat16
    save: str = "bitsparse"
    layer: int = 0

    @property
    def entry(self) -> nn.Module:
        """The module whose call runs the whole MLP when it is patched."""
        return self.module if self.act is None else self.down

    def install(self) -> None:
        # Methods of this object, not closures: a deep copy of the model then has its own.
        self.entry.forward = self.forward
        if self.act is not None:
            self.up.forward = self.act.forward = self.skip

    def skip(self, x: Tensor) -> Tensor:
        return x

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{self.name}: a patched MLP computes in bf16; turn autocast off")
        # nn.Linear makes the same copy where x is not contiguous.
        return MLPS[self.power](
            x.contiguous(), self.up.weight, self.down.weight, self.up.bias, self.down.bias,
            buffer=self.buffer, codec=self.codec, storage=self.storage, save=self.save,
            layer=self.layer)


def _power_of(activation) -> int | None:
    """1 or 2 if activation(x) is relu(x) or relu(x)² to the last bit.

    For every finite bf16 from 2^-63 on: smaller ones have a subnormal square, which the GEMMs of a
    CPU flush to 0.
    """
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & ((x.abs() >= 2.0**-63) | (x == 0))]
    try:
        y = activation(x.clone())
    except Exception:  # whatever a foreign module raises, it is neither
        return None
    for power, expected in ((1, x.relu()), (2, x.relu().square())):
        if y.shape == x.shape and torch.equal(y, expected):
            return power
    return None


def _probe(module: nn.Module, up: nn.Linear, down: nn.Linear) -> int | None:
    """The power for which the module's own forward is down(act(up(x))) in training, or None."""

    def small_twin(d, h, make):
        shapes = {up: {"weight": (h, d), "bias": (h,)}, down: {"weight": (d, h), "bias": (d,)}}
        # deepcopy takes from memo what it would copy, and leaves there what it copied.
        memo = {id(parameter): nn.Parameter(make(shapes[layer][key]).bfloat16())
                for layer in shapes for key, parameter in layer.named_parameters()}
        twin = copy.deepcopy(module, memo).train()
        return twin, memo[id(up)], memo[id(down)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # One hidden element with weight 1 and bias 0: the twin is then its activation.
        scalar, _, _ = small_twin(1, 1, lambda shape: torch.full(shape, float(len(shape) == 2)))
        with torch.no_grad():
            power = _power_of(lambda x: scalar(x[:, None])[:, 0])
        if power is None:
            return None
        twin, up, down = small_twin(8, 24, torch.randn)
        x, dy = torch.randn(2, 5, 8).bfloat16()
        x.requires_grad_()
        try:
            y = twin(x)
        except Exception:  # a wrong order
            return None
        expected = down(up(x).relu().pow(power))
        if y.shape != expected.shape or not torch.equal(y, expected):
            return None
        dx, expected_dx = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
        return power if torch.equal(dx, expected_dx) else None


def _calls_in_a_row(block: nn.Module, up: str, act: str, down: str) -> bool:
    """Whether block.forward says self.down(self.act(self.up(..))) and names the three only there.

    Either nested, or in three statements that follow each other and reuse one variable.
    """
    try:
        source = textwrap.dedent(inspect.getsource(type(block).forward))
        source = ast.unparse(ast.parse(source))  # without comments, blank lines and line breaks
    except (OSError, TypeError, SyntaxError):
        return False
    if any(len(re.findall(rf"\bself\.{name}\b", source)) != 1 for name in (up, act, down)):
        return False
    for name in (act, down):  # h = ..; h = self.act(h) becomes h = self.act(..)
        source = re.sub(rf"^( *)(\w+) = (.+)\n\1\2 = self\.{name}\(\2\)$",
                        rf"\1\2 = self.{name}(\3)", source, flags=re.MULTILINE)

    def argument(call: ast.AST | None, name: str) -> ast.AST | None:
        called = isinstance(call, ast.Call) and ast.unparse(call.func) == f"self.{name}"
        return call.args[0] if called and len(call.args) == 1 and not call.keywords else None

    return any(argument(argument(argument(node, down), act), up) is not None
               for node in ast.walk(ast.parse(source)))


def _is_linear(module: nn.Module) -> bool:
    # Quantized and LoRA layers too, which are reported as such.
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")


def _mirror(a: nn.Module, b: nn.Module) -> bool:
    return a.in_features == b.out_features and a.out_features == b.in_features


def _describe(mlp: Mlp, model: nn.Module) -> str | None:
    """Fill in up, down, act and power; returns the reason why it cannot be patched, or None."""
    children = dict(mlp.module.named_children())
    linears = {name: child for name, child in children.items() if _is_linear(child)}
    if any("forward" in vars(part) for part in (mlp.module, *children.values())):
        return "a forward in it is already replaced (a patch, or hooks of accelerate)"
    if not linears:
        return "routed experts: their weights are stacked in one tensor"
    for name, child in linears.items():
        if type(child) is not nn.Linear:
            return f"its {name} is a {type(child).__name__}, not a plain torch.nn.Linear"
    pairs = [(a, b) for a in linears for b in linears if a < b and _mirror(linears[a], linears[b])]
    if len(linears) == 3 and len(pairs) >= 2:
        return "gated: " + ", ".join(linears)
    if len(pairs) != 1:
        return "no pair of linear layers, one undoing the other's shape"

    orders = [pairs[0], pairs[0][::-1]]  # which of the two is up is not known: both are tried
    owned = {id(p) for name in pairs[0] for p in linears[name].parameters()}
    if {id(p) for p in mlp.module.parameters()} == owned and not list(mlp.module.buffers()):
        found = [(power, *order) for order in orders
                 if (power := _probe(mlp.module, *(linears[name] for name in order)))]
        if not found:
            others = ", ".join(repr(child) for name, child in children.items()
                               if name not in linears)
            return f"not down(relu(up(x))) or its square in training; it has {others or 'no more'}"
        mlp.power, up, down = found[0]
    else:
        acts = {name: child for name, child in children.items() if _is_activation(child)}
        powers = {name: power for name, child in acts.items()
                  if (power := _power_of(copy.deepcopy(child).train()))}
        if not powers:
            return "its activation is " + (", ".join(repr(act) for act in acts.values())
                                           or "no module of its own")
        chains = [(up, act, down) for up, down in orders for act in powers
                  if _calls_in_a_row(mlp.module, up, act, down)]
        if not chains:
            return "its forward has more than down(act(up(x))) between its linear layers"
        up, act, down = chains[0]
        mlp.power, mlp.act = powers[act], acts[act]
        holders = Counter(id(child) for module in model.modules() for child in module.children())
        if any(holders[id(children[name])] > 1 for name in chains[0]):
            return "its activation or a linear layer is shared with another module"

    mlp.up, mlp.down = linears[up], linears[down]
    if (mlp.up.bias is None) != (mlp.down.bias is None):
        return "only one of its linear layers has a bias"
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
           or part._backward_pre_hooks for part in (mlp.up, mlp.down, mlp.act) if part is not None):
        return "hooks are registered on its layers, which would not run"
    return None


def find_mlps(model: nn.Module) -> list[Mlp]:
    """Everything in model that looks like an MLP, with the reason where it cannot be patched."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        linears = [child for child in module.children() if _is_linear(child)]
        acts = any(_is_activation(child) for child in module.children())
        stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
        # A pair of square layers without an activation is rather a part of an attention.
        pair = any(_mirror(a, b) and a.in_features != a.out_features
                   for a in linears for b in linears)
        if pair or acts and (len(linears) >= 2 or stacked):
            blocks = [block for prefix, block in modules.items()
                      if hasattr(block, "gradient_checkpointing")
                      and (prefix in ("", name) or name.startswith(f"{prefix}."))]
            mlp = Mlp(name, module, blocks=blocks)
            mlp.reason = _describe(mlp, model)
            found.append(mlp)
    return found


# -----------------------------------------------------------------------------
# Patching


def patch_mlps(model: nn.Module, buffer: ActivationBuffer, codec: str = "raw",
               storage: torch.dtype = torch.bfloat16) -> list[Mlp]:
    """Patch every MLP of model that can be, in place. Returns what was found: see report().

    buffer: you reset it before each forward and watch it for overflow; patched() does both.
    codec, storage: as in relu2_mlp. Raises ValueError for those that do not exist, for weights that
    are not bf16 or not on the buffer's device, and for a buffer of another number of layers than 1
    or that of patched MLPs.
    """
    _check_format(codec, storage)
    found = find_mlps(model)
    patchable = [mlp for mlp in found if mlp.reason is None]
    for mlp in patchable:
        for weight in (*mlp.up.parameters(), *mlp.down.parameters()):
            if weight.dtype != torch.bfloat16:
                raise ValueError(f"{mlp.name}: expected bf16 weights, received {weight.dtype}; "
                                 "load the model with dtype=torch.bfloat16")
            if weight.device != buffer.device:
                raise ValueError(f"{mlp.name}: expected weights on the buffer's {buffer.device}, "
                                 f"received them on {weight.device}")
    if buffer.layers not in (1, len(patchable)):
        raise ValueError(f"buffer: expected layers=1 or layers={len(patchable)}, one for each "
                         f"patched MLP, received {buffer.layers}")
    for i, mlp in enumerate(patchable):
        mlp.buffer, mlp.codec, mlp.storage = buffer, codec, storage
        mlp.layer = i % buffer.layers
        mlp.install()
    return found


def unpatch(model: nn.Module) -> None:
    """Give every patched module of model its own forward back."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__self__", None), Mlp):
            del module.forward


def report(found: list[Mlp]) -> str:
    """One line for each kind of MLP found: how many, the first one's name, and the reason."""
    kinds: dict[tuple, list[Mlp]] = {}
    for mlp in found:
        note = f"not patched: {mlp.reason}" if mlp.reason else (
            f"patched: {'relu²' if mlp.power == 2 else 'relu'}, {mlp.up.in_features} -> "
            f"{mlp.up.out_features}")
        kinds.setdefault((type(mlp.module).__name__, note), []).append(mlp)
    return "\n".join(f"{len(mlps):4} x {kind}, first {mlps[0].name or 'the model itself'}: {note}"
                     for (kind, note), mlps in kinds.items()) or "no MLP found"


class patched:  # noqa: N801, a context manager, named like contextlib's
    """Patch model's MLPs within a `with`, with a buffer of its own; see the module's docstring.

    codec, storage: as in relu2_mlp. Raises ValueError as patch_mlps, and if there is nothing to do.
    """

    def __init__(self, model: nn.Module, codec: str = "raw", storage: torch.dtype = torch.bfloat16):
        _check_format(codec, storage)
        found = find_mlps(model)
        patchable = [mlp for mlp in found if mlp.reason is None]
        if not patchable:
            raise ValueError(f"{type(model).__name__} has no MLP to patch: {report(found)}")
        self.model, self.codec, self.storage = model, codec, storage
        self.buffer = ActivationBuffer(0, patchable[0].up.weight.device, layers=len(patchable))
        hidden = sum(mlp.up.out_features for mlp in patchable)
        self.bytes_per_token = hidden / 8 * bits_per_element(0.5 + MARGIN, codec, storage)
        self.max_tokens = 0
        self._tokens = 0  # of the last forward, from its first MLP on
        self._ended = deque()  # (snapshot, tokens) of forwards whose backward may still run

    def __enter__(self) -> "patched":
        self.found = patch_mlps(self.model, self.buffer, self.codec, self.storage)
        self._hooks = [self.model.register_forward_pre_hook(self._begin)] + [
            mlp.entry.register_forward_pre_hook(self._size, with_kwargs=True)
            for mlp in self.found if mlp.reason is None]
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for hook in self._hooks:
            hook.remove()
        unpatch(self.model)
        if kind is None:
            self.check()

    def report(self) -> str:
        return report(self.found)

    def overflowed(self) -> Tensor:
        """bool on the device: whether the gradients since the last grow() must not be used."""
        return self.buffer.overflowed()

    def check(self) -> None:
        """Wait for the device; raise if anything did not fit or was dropped too early."""
        self._raise_if(self.buffer.snapshot())

    def grow(self) -> None:
        """After an overflow: make room for what was asked for, and forget the overflow. Waits."""
        snapshot = self.buffer.snapshot()
        self._raise_if(snapshot, overflowed=False)
        self._ended.clear()
        needed = snapshot.needed_bytes * (1 + MARGIN)
        if self._tokens:  # of the batch that overflowed, or a later one
            self.bytes_per_token = max(self.bytes_per_token, needed / self._tokens)
        self.buffer.resize(max(int(needed), self.buffer.capacity_bytes))

    def run(self, step):
        """step()'s result; step does everything from zeroing the gradients to backward.

        Waits for the device, and repeats step() with a larger buffer if this one overflowed.
        """
        generators = [torch.default_generator]
        if self.buffer.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.buffer.device.index])
        states = [generator.get_state() for generator in generators]
        result = step()
        while self.overflowed():
            self.grow()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            result = step()
        return result

    def _raise_if(self, snapshot, overflowed: bool = True) -> None:
        if snapshot.stale:
            raise RuntimeError("a backward ran after a later forward (or grow) had dropped the "
                               "values that it needed, and its gradients are wrong; run backward "
                               "before the next forward of the model")
        if overflowed and snapshot.overflowed:
            raise BufferOverflow(
                f"the activations needed {snapshot.needed_bytes:,} bytes and the buffer has "
                f"{snapshot.capacity_bytes:,}: the gradients of that backward are wrong; use "
                "run(), or grow() and repeat the batch")

    @torch.compiler.disable  # a traced reset would write its zeros after the MLPs have counted
    def _begin(self, model, args) -> None:
        if not torch.is_grad_enabled():
            return
        while self._ended and self._ended[0][0].ready():
            snapshot, tokens = self._ended.popleft()
            self._raise_if(snapshot)  # in a loop that checks nothing, this ends it
            if tokens and snapshot.peak_bytes:
                self.bytes_per_token = snapshot.peak_bytes / tokens * (1 + MARGIN)
        self._ended.append((self.buffer.snapshot(), self._tokens))
        self._tokens = 0

    def _size(self, module, args, kwargs) -> None:
        """Before the first MLP of a forward, when nothing is stored: fit the buffer to its x."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._tokens:
            return
        (x,) = (*args, *kwargs.values())
        self._tokens = x.shape[:-1].numel()
        self.max_tokens = max(self.max_tokens, self._tokens)
        want = int(self.bytes_per_token * self.max_tokens)
        fits = want <= self.buffer.capacity_bytes <= SLACK * want
        # A resize would forget an overflow that nobody has seen yet.
        if not fits and not self.overflowed():
            self.buffer.resize(want)


# -----------------------------------------------------------------------------
# Command


def build_from_config(name: str) -> nn.Module:
    """The model of that name, folder or model type on the meta device, without weights."""
    import transformers

    if name in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(name)
    else:
        config = transformers.AutoConfig.from_pretrained(name)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModel
    with torch.device("meta"):
        return auto.from_config(config, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="of the hub, a folder, or a model type such as nemotron_h")
    name = parser.parse_args().model
    try:
        import transformers
        import transformers.models.auto  # a broken installation fails here, and not lazily later
    except ImportError as error:
        sys.exit("hf_patch.py needs transformers (pip install 'transformers>=5.3'): "
                 f"{str(error).partition(chr(10))[0]}")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        model = build_from_config(name)
    except Exception as error:  # of the hub, the file, or the model's own constructor
        sys.exit(f"{name}: transformers {transformers.__version__} cannot build this model "
                 f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})")
    found = find_mlps(model)
    print(report(found))
    hidden = sum(mlp.up.out_features for mlp in found if mlp.reason is None)
    if hidden:
        print(f"{hidden:,} patched hidden elements a token, saved for backward in KiB a token: "
              f"{2 * hidden / 1024:.0f} dense, "
              f"{bits_per_element(0.5) / 8 * hidden / 1024:.0f} compressed at density 0.5, "
              f"{bits_per_element(0.2) / 8 * hidden / 1024:.0f} at 0.2")


if __name__ == "__main__":
    main()
