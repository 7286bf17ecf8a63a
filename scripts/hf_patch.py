"""Let the ReLU and ReLU² MLPs of a Hugging Face model save their activation compressed.

    from scripts.hf_patch import patched
    with patched(model) as p:       # model: bf16, e.g. nemotron_h, nemotron, arcee, nanochat, opt
        loss = p.run(step)          # step(): zero_grad, forward, backward, return the loss

`python scripts/hf_patch.py MODEL` prints what would be patched in a model of the hub, a local
folder or a model type (nemotron_h), built from its config alone: no weights are read.

What is patched. Every ungated MLP down(act(up(x))) whose act is relu or relu² becomes one call of
relu_mlp or relu2_mlp, found by structure and not by name. Either all of a module is one, and a
small twin of it in training mode gives the same outputs and gradients, bit for bit (with dropout, a
residual or another rounding it does not). Or a larger block has one (OPT's fc1 and fc2), and the
source of its forward calls up, the activation and down on each other and nowhere else. Weights may
be frozen or tied. What is not patched is reported with its reason, and stays as it was.

Equality. Torch rounds relu(z) (exact) and square(relu(z)) = bf16(r * r), and in backward
bf16(dh * bf16(2r)), where 2r is exact: one rounding each, as in bitsparse_kernels. For contiguous x
nn.Linear reaches the same GEMM calls on [tokens, d] as the patched one. So outputs and gradients
are the same bits in bf16 as those of the unpatched model, if its MLP runs eagerly and a GEMM call
is repeatable. Where they may differ: torch.compile may fuse the unpatched MLP without its
roundings; a NaN in z may come back with other bits; with fp8 storage outputs are the same, and
gradients those of the rounded activation; save="dense" may add up in another order (relu2_mlp).
fp16 and fp32, and autocast, are refused.

Gradient checkpointing. An MLP in a recomputed block stores in backward, once (compiled: twice). But
what it stores lives until the next forward, and a recomputed dense activation only until its block
is through: to save memory, set gradient_checkpointing = False on the `blocks` of each patched Mlp.

The buffer of patched() is reset before each forward of the model that records gradients, which
drops the values of the one before. It begins at 0.5 stored values an element and a margin, and then
follows the need. If a batch needs more, or a backward's values were dropped, its gradients are
wrong and must not be used. Three ways to act:
- p.run(step) waits for the device, grows the buffer and repeats step() from the same random state;
- p.check() before optimizer.step() waits, and raises BufferOverflow with needed and given bytes;
- without waiting: optimizer.found_inf = p.buffer.overflowed().float() before the step of a
  fused=True optimizer of torch leaves weights and state as they were. p.grow() when it was set.
Whoever does none of these gets the error from a later forward, or when the context ends.

torch.compile. patch_mlps() adds no graph break; reset the buffer outside of the compiled function.
patched() breaks the graph once, at the start, and its buffer keeps the size that run() gave it.
"""
import argparse
import ast
import contextlib
import copy
import inspect
import re
import sys
import textwrap
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bitsparse_kernels import ActivationBuffer, _check_format, bits_per_element, relu2_mlp, relu_mlp

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

    blocks: the modules around it that have transformers' switch gradient_checkpointing. up, down:
    its linear layers. act: its activation, where the three are called by a larger block and are
    therefore patched each by itself: then down computes all. power: 1 relu, 2 relu². The rest:
    arguments of relu2_mlp.
    """

    name: str
    module: nn.Module
    blocks: list[nn.Module]
    reason: str | None = None
    up: nn.Linear | None = None
    act: nn.Module | None = None
    down: nn.Linear | None = None
    power: int | None = None
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


def _probe(module: nn.Module, up: nn.Linear, down: nn.Linear) -> int | None:
    """The power for which module(x) is down(relu(up(x))**power) in training, or None.

    Output and dx of a small twin must be the same bits. Its weights are random but for a first
    channel, apart from the others, that shows what act makes of every bf16 with a normal square
    (GEMMs of a CPU flush subnormals to 0).
    """
    # Whatever a foreign module raises (of a wrong order of up and down, too), it is none.
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed: it seeds GPUs too
        memo = {}  # deepcopy takes from it what it would copy, and leaves there what it copied
        for layer, rows, columns in ((up, 23, 7), (down, 7, 23)):
            weight = torch.block_diag(torch.ones(1, 1), torch.randn(rows, columns))
            memo[id(layer.weight)] = nn.Parameter(weight.bfloat16())
            if layer.bias is not None:
                bias = torch.cat([torch.zeros(1), torch.randn(rows)])
                memo[id(layer.bias)] = nn.Parameter(bias.bfloat16())
        twin = copy.deepcopy(module, memo).train()
        up, down = memo[id(up)], memo[id(down)]
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
        values = values[(values == 0) | (values.abs() >= 2.0**-63) & (values.abs() < 2.0**64)]
        x, dy = torch.randn(2, len(values), 8).bfloat16()
        x[:, 0] = values
        x.requires_grad_()
        outputs = [twin(x), *(down(up(x).relu().pow(power)) for power in MLPS)]
        actual, *expected = [(y, *torch.autograd.grad(y, x, dy)) for y in outputs]
        for power, results in zip(MLPS, expected, strict=True):
            if all(map(torch.equal, actual, results)):
                return power
    return None


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
    ups = [ast.unparse(node) for node in ast.walk(ast.parse(source))
           if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{up}"]
    return any(f"self.{down}(self.{act}({call}))" in source for call in ups)


def _is_linear(module: nn.Module) -> bool:
    # Quantized and LoRA layers too, which are reported as such.
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")


def _mirror(a: nn.Module, b: nn.Module) -> bool:
    return a.in_features == b.out_features and a.out_features == b.in_features


def _describe(mlp: Mlp, model: nn.Module) -> str | None:
    """Fill in up, act, down and power; returns the reason why it cannot be patched, or None."""
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
    if len(pairs) != 1:
        kind = "gated" if len(linears) == 3 and len(pairs) > 1 else "not two mirrored linear layers"
        return f"{kind}: {', '.join(linears)}"
    orders = [pairs[0], pairs[0][::-1]]  # which of the two is up is not known
    owned = {id(p) for name in pairs[0] for p in linears[name].parameters()}
    if {id(p) for p in mlp.module.parameters()} == owned and not list(mlp.module.buffers()):
        tried = [(mlp.module, up, None, down) for up, down in orders]
    else:
        tried = [(nn.Sequential(*(children[name] for name in (up, act, down))), up, act, down)
                 for up, down in orders for act in children if _is_activation(children[act])
                 and _calls_in_a_row(mlp.module, up, act, down)]
    for module, up, act, down in tried:
        mlp.up, mlp.act, mlp.down = linears[up], children.get(act), linears[down]
        mlp.power = _probe(module, mlp.up, mlp.down)
        if mlp.power is not None:
            break
    else:
        others = [repr(child) for name, child in children.items()
                  if name not in linears and not list(child.children())]
        return f"more or other than down(relu(up(x))) or its square: it has {', '.join(others)}"
    parts = [part for part in (mlp.up, mlp.act, mlp.down) if part is not None]
    held = [child for module in model.modules() for child in module.children()]
    if mlp.act is not None and any(held.count(part) > 1 for part in parts):
        return "its activation or a linear layer is shared with another module"
    if (mlp.up.bias is None) != (mlp.down.bias is None):
        return "only one of its linear layers has a bias"
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
           or part._backward_pre_hooks for part in parts):
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
            around = [block for prefix, block in modules.items()
                      if prefix in ("", name) or name.startswith(f"{prefix}.")]
            mlp = Mlp(name, module, [b for b in around if hasattr(b, "gradient_checkpointing")])
            mlp.reason = _describe(mlp, model)
            found.append(mlp)
    return found


# -----------------------------------------------------------------------------
# Patching


def patch_mlps(model: nn.Module, buffer: ActivationBuffer, codec: str = "raw",
               storage: torch.dtype = torch.bfloat16) -> list[Mlp]:
    """Patch every MLP of model that can be, in place. Returns what was found: see report().

    buffer: you reset it before each forward and watch it for overflow; patched() does both. It
    counts patched MLP i as its layer i % buffer.layers. codec, storage: as in relu2_mlp.
    """
    found = find_mlps(model)
    for i, mlp in enumerate(mlp for mlp in found if mlp.reason is None):
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

    codec, storage: as in relu2_mlp. Raises ValueError if there is nothing to patch.
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

    def check(self, snapshot=None) -> None:
        """Wait for the device; raise if anything did not fit or was dropped too early."""
        snapshot = snapshot or self.buffer.snapshot()
        if snapshot.stale:
            raise RuntimeError("a backward needed values that a later forward (or grow) had "
                               "dropped: its gradients are wrong")
        if snapshot.inexact:
            raise BufferOverflow("activations are too small or too large to be told from their "
                                 "squares: use run(), or grow() and repeat the batch")
        if snapshot.overflowed:
            raise BufferOverflow(
                f"the activations needed {snapshot.needed_bytes:,} bytes and the buffer has "
                f"{snapshot.capacity_bytes:,}: use run(), or grow() and repeat the batch")

    def grow(self) -> None:
        """After an overflow: make room for what was asked for, and forget the overflow. Waits."""
        snapshot = self.buffer.snapshot()
        self.buffer.fuses &= not snapshot.inexact
        with contextlib.suppress(BufferOverflow):  # but not what was dropped too early
            self.check(snapshot)
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
        while self.buffer.overflowed():
            self.grow()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            result = step()
        return result

    @torch.compiler.disable  # a traced reset would write its zeros after the MLPs have counted
    def _begin(self, model, args) -> None:
        if not torch.is_grad_enabled():
            return
        while self._ended and self._ended[0][0].ready():
            snapshot, tokens = self._ended.popleft()
            self.check(snapshot)  # in a loop that checks nothing, this ends it
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
        if not fits and not self.buffer.overflowed():
            self.buffer.resize(want)


# -----------------------------------------------------------------------------
# Command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="of the hub, a folder, or a model type such as nemotron_h")
    name = parser.parse_args().model
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        config, auto = transformers.AutoConfig, transformers.AutoModelForCausalLM
        known = name in transformers.CONFIG_MAPPING
        config = config.for_model(name) if known else config.from_pretrained(name)
        if type(config) not in auto._model_mapping:
            auto = transformers.AutoModel
        with torch.device("meta"):  # without weights
            model = auto.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # of the import, the hub, the file, or the model's own constructor
        sys.exit(f"{name}: cannot build this model, which needs transformers (pip install "
                 f"'transformers>=5.3'): {type(error).__name__}: "
                 f"{str(error).strip().partition(chr(10))[0]}")
    print(report(find_mlps(model)))


if __name__ == "__main__":
    main()
