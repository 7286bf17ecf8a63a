"""Nemotron-H: what do its ReLU² MLPs cost in VRAM and time, by the way their activation is saved?

    python scripts/bench_nemotron_h.py                  # on a GPU; less than 4 minutes on an H200
    python scripts/bench_nemotron_h.py --part ffn       # without transformers

Part "ffn": a stack of ungated ReLU² FFNs alone (8 layers, d 4096, h 21504, 16,000 tokens), where
everything that is saved is theirs; then the same stack with 0 to all layers compressed or
checkpointed, the others saving post only: the VRAM-time curve of each method, as a picture.
Part "model": NemotronHForCausalLM with the shape of the 8B, cut to its first 13 of 52 blocks
(6 Mamba, 6 MLP, 1 attention: the whole model's proportions), over several numbers of tokens.

Modes: "eager" is the model's own torch code, which saves relu(z) and its square; "dense" saves
post only (the strongest dense baseline); "checkpoint" saves nothing and repeats the first GEMM;
"bitsparse" compresses. Everything else is equal. First loss and all gradients of each mode are
compared with eager's, bit for bit; then peaks are read and, modes taking turns, steps are timed.

Read the tables with this in mind:
- Weights are random (or --model's), so density is set: each up projection is shifted along the mean
  of its input until the asked share of z is positive. Table and JSON give what was then stored.
- ffn: gradients begin as None, and peak MiB counts all that the step has: weights, gradients,
  buffer. model: weights and gradients stand before the step and are not counted; the buffer is.
- KiB/token is the peak's slope from half as many tokens (model: from the next smaller number).
  "saved" is what is held between forward and backward, with the whole buffer (on a CPU: the
  tensors that autograd keeps, without parameters, and the used part of the buffer).
- model: logits and loss are computed in chunks of 256 tokens, recomputed in backward, in all modes,
  as 131,072 logits a token would hide everything else.
- model: transformers' torch code for the Mamba scan, used without the package mamba_ssm, takes over
  10 MB a token at once. In its place stands a scan here that, like mamba_ssm's fused kernel, saves
  the input projection and computes the rest again. It is slower than that kernel, which flatters
  the ratio of whole steps; part ffn shows the ratio of the MLPs alone.

The buffer has 5 % more than the run needs. On a CPU, sizes are tiny and no peaks are read.
"""
import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from hf_patch import ActivationBuffer, find_mlps, unpatch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODES = ("eager", "dense", "checkpoint", "bitsparse")
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # of the 8B: 52 blocks
HEAD_CHUNK = 256  # tokens
MARGIN = 1.05


# -----------------------------------------------------------------------------
# Models


class Ffn(nn.Module):
    """NemotronHMLP without transformers."""

    def __init__(self, d: int, h: int):
        super().__init__()
        self.up_proj = nn.Linear(d, h, bias=False)
        self.down_proj = nn.Linear(h, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


@torch.no_grad()
def set_density(up: nn.Linear, x: Tensor, density: float) -> None:
    """Shift up's weights along the mean of x, so that a share `density` of up(x) is positive."""
    x = x.reshape(-1, x.shape[-1])
    x = x[:: max(1, len(x) // 256)].float()
    direction = x.mean(0)
    direction = direction / direction.dot(direction)
    for _ in range(3):  # the shift's own noise and its rounding to bf16 change the quantile a bit
        z = F.linear(x, up.weight.float()).flatten()
        threshold = z.kthvalue(max(1, round((1 - density) * z.numel()))).values
        up.weight.sub_((threshold * direction).to(up.weight.dtype))


class FfnStack(nn.Module):
    """y = ffn(ffn(...(x))), every layer's input with mean 1 and deviation 1, at a given density."""

    @torch.no_grad()
    def __init__(self, layers: int, d: int, h: int, density: float, device: str):
        super().__init__()
        with torch.device(device):
            self.layers = nn.ModuleList(Ffn(d, h) for _ in range(layers)).bfloat16()
            x = (torch.randn(512, d) + 1).bfloat16()
        for ffn in self.layers:
            ffn.up_proj.weight.normal_(std=d**-0.5)
            set_density(ffn.up_proj, x, density)
            post = F.relu(ffn.up_proj(x)).square().float()
            ffn.down_proj.weight.normal_(std=(post.square().sum(1).mean() ** -0.5).item())
            ffn.down_proj.weight.add_(1 / post.sum(1).mean())
            x = ffn(x)

    def forward(self, x: Tensor) -> Tensor:
        for ffn in self.layers:
            x = ffn(x)
        return x


def _scan_heads(x, dt, a, b, c, d_skip, chunk):
    """Mamba-2's chunked scan of the heads of one group, in float32.

    x [B, T, heads, p], dt [B, T, heads], a and d_skip [heads], b and c [B, T, n]; T is a multiple
    of chunk. Returns [B, T, heads, p].
    """
    batch, tokens, heads, p = x.shape
    x, dt, b, c = (t.float() for t in (x, dt, b, c))
    skip = x * d_skip[:, None]
    x = (x * dt[..., None]).view(batch, -1, chunk, heads, p)
    b, c = (t.view(batch, -1, chunk, t.shape[-1]) for t in (b, c))
    decay = (dt * a).view(batch, -1, chunk, heads).permute(0, 3, 1, 2).cumsum(-1)  # [B, h, k, l]

    # Within a chunk: y_l = sum over s <= l of (c_l · b_s) exp(decay_l - decay_s) x_s.
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = (decay[..., :, None] - decay[..., None, :]).masked_fill(~past, -math.inf).exp()
    weights = weights * (c @ b.transpose(-1, -2))[:, None]
    x = x.permute(0, 3, 1, 2, 4)  # [B, h, k, l, p]
    y = weights @ x

    # Between chunks: each one's state decays through those after it.
    to_end = (decay[..., -1:] - decay).exp()
    states = (x * to_end[..., None]).transpose(-1, -2) @ b[:, None]  # [B, h, k, p, n]
    total = F.pad(decay[..., -1], (1, 0)).cumsum(-1)  # [B, h, k + 1]: before each chunk
    k = states.shape[2]
    past = torch.ones(k, k, dtype=torch.bool, device=x.device).tril(-1)
    between = (total[..., :-1, None] - total[..., None, 1:]).masked_fill(~past, -math.inf).exp()
    entering = (between @ states.flatten(3)).view(states.shape)
    y = y + (c[:, None] @ entering.transpose(-1, -2)) * decay.exp()[..., None]
    return y.permute(0, 2, 3, 1, 4).reshape(batch, tokens, heads, p) + skip


def _mamba(zxbcdt, conv_weight, conv_bias, dt_bias, a, d_skip, norm_weight, out_weight, out_bias,
           chunk, eps, head_dim, groups, dt_limit):
    """From a Mamba-2 layer's input projection to its output."""
    batch, tokens, width = zxbcdt.shape
    inner, channels, heads = out_weight.shape[1], conv_weight.shape[0], dt_bias.shape[0]
    gate, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    kernel = conv_weight.shape[1]
    xbc = F.conv1d(xbc.transpose(1, 2), conv_weight[:, None], conv_bias, padding=kernel - 1,
                   groups=channels)[..., :tokens]
    xbc = F.pad(F.silu(xbc).transpose(1, 2), (0, 0, 0, -tokens % chunk))
    dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
    dt = F.pad(dt, (0, 0, 0, -tokens % chunk))
    x, b, c = xbc.split([inner, (channels - inner) // 2, (channels - inner) // 2], -1)
    x = x.unflatten(-1, (groups, -1, head_dim))
    b, c = b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    dt = dt.unflatten(-1, (groups, -1))
    a, d_skip = a.view(groups, -1), d_skip.float().view(groups, -1)
    y = torch.stack([
        checkpoint(_scan_heads, x[:, :, g], dt[:, :, g], a[g], b[:, :, g], c[:, :, g], d_skip[g],
                   chunk, use_reentrant=False, preserve_rng_state=False) for g in range(groups)], 2)
    y = y[:, :tokens].reshape(batch, tokens, groups, -1)
    y = y * F.silu(gate.float()).view(y.shape)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = (norm_weight * y.flatten(2)).to(zxbcdt.dtype)
    return F.linear(y, out_weight, out_bias)


def mamba_saving_its_input(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size,
                           rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim,
                           ngroups, dt_limit, **_):
    """In place of mamba_ssm's mamba_split_conv1d_scan_combined, called by transformers."""
    return checkpoint(_mamba, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight,
                      outproj_weight, outproj_bias, chunk_size, rmsnorm_eps, headdim, ngroups,
                      dt_limit, use_reentrant=False, preserve_rng_state=False)


def use_lean_mamba() -> str:
    """Choose the scan of Mamba layers; returns its name."""
    from transformers.models.nemotron_h import modeling_nemotron_h

    try:
        import mamba_ssm  # noqa: F401
    except ImportError:
        modeling_nemotron_h.mamba2_split_conv1d_scan_combined = mamba_saving_its_input
        return "torch, saving its input projection"
    return "mamba_ssm"


def build_nemotron_h(path: str | None, blocks: int, tiny: bool, device: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    if path is not None:
        config = transformers.AutoConfig.from_pretrained(path)
        config.layers_block_type = config.layers_block_type[:blocks]
        model = transformers.NemotronHForCausalLM.from_pretrained(
            path, config=config, dtype=torch.bfloat16).to(device)
        return model.train()
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 336, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 8,
             "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16}
    config = transformers.NemotronHConfig(
        hybrid_override_pattern=PATTERN[:blocks], use_cache=False, **sizes if tiny else {})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def set_model_density(model: nn.Module, ids: Tensor, density: float) -> None:
    """Give every MLP that density on ids, layer by layer in one forward."""
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.02)  # its own deviation: a mean to shift along
    hooks = [mlp.up.register_forward_pre_hook(lambda up, args: set_density(up, args[0], density))
             for mlp in find_mlps(model) if mlp.reason is None]
    with torch.no_grad():
        model.model(input_ids=ids)
    for hook in hooks:
        hook.remove()


# -----------------------------------------------------------------------------
# Steps


class FfnWork:
    """Forward and backward of the stack; gradients begin as None."""

    def __init__(self, stack: FfnStack, tokens: int):
        self.model, self.tokens = stack, tokens
        weight = stack.layers[0].up_proj.weight
        self.x = (torch.randn(tokens, weight.shape[1], device=weight.device) + 1).bfloat16()
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x)
        # What stands before the step and is counted in its peak.
        self.resident = self.x.nbytes + self.dy.nbytes + sum(p.nbytes for p in stack.parameters())

    def forward(self) -> Tensor:
        return self.model(self.x)

    def begin(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None

    def backward(self, y: Tensor) -> None:
        y.backward(self.dy)


class ModelWork:
    """Forward and backward of NemotronHForCausalLM; gradients stand before the step."""

    def __init__(self, model: nn.Module, tokens: int):
        self.model, self.tokens = model, tokens
        self.resident = 0
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, model.config.vocab_size, (1, tokens + 1), generator=generator)
        ids = ids.to(model.lm_head.weight.device)
        self.inputs, self.targets = ids[:, :-1], ids[0, 1:]
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")

    def forward(self) -> Tensor:
        hidden = self.model.model(input_ids=self.inputs, use_cache=False).last_hidden_state[0]
        losses = [checkpoint(self._head, *chunk, use_reentrant=False, preserve_rng_state=False)
                  for chunk in zip(hidden.split(HEAD_CHUNK), self.targets.split(HEAD_CHUNK),
                                   strict=True)]
        return torch.stack(losses).sum() / self.tokens

    def begin(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Saving:
    """The work's MLPs, each saving its activation in its own mode, within the context."""

    def __init__(self, work, modes: list[str]):
        self.work = work
        self.mlps = [mlp for mlp in find_mlps(work.model) if mlp.reason is None]
        self.compressed = [mlp for mlp, mode in zip(self.mlps, modes, strict=True)
                           if mode == "bitsparse"]
        self.patched = []
        self.buffer = None
        if self.compressed:
            device = self.mlps[0].up.weight.device
            self.buffer = ActivationBuffer(0, device, layers=len(self.compressed))
        for mlp, mode in zip(self.mlps, modes, strict=True):
            if mode != "eager":
                mlp.save = mode
                self.patched.append(mlp)
        for layer, mlp in enumerate(self.compressed):
            mlp.buffer, mlp.layer = self.buffer, layer
        if self.buffer is not None:
            with self:
                self.forward()  # counts, and stores nothing
                self.buffer.resize(int(int(self.buffer.used_bytes()) * MARGIN))

    def __enter__(self) -> "Saving":
        for mlp in self.patched:
            mlp.install()
        return self

    def __exit__(self, *_) -> None:
        unpatch(self.work.model)

    def forward(self) -> Tensor:
        if self.buffer is not None:
            self.buffer.reset()
        return self.work.forward()

    def step(self) -> Tensor:
        y = self.forward()
        self.work.backward(y)
        return y.detach()

    def densities(self) -> list[float]:
        """Of the last step, by compressed layer."""
        self.buffer.snapshot()  # begins to count anew
        self.work.begin()
        self.step()
        return [nnz / (self.work.tokens * mlp.up.out_features)
                for nnz, mlp in zip(self.buffer.snapshot().layer_nnz, self.compressed, strict=True)]

    def check(self) -> None:
        if self.buffer is not None and (snapshot := self.buffer.snapshot()).overflowed:
            sys.exit(f"the buffer of {snapshot.capacity_bytes:,} bytes overflowed: the same step "
                     f"needed {snapshot.needed_bytes:,} later")


def check_bits(work) -> str:
    """Compare output and gradients of every mode with eager's; returns a sentence, or exits."""

    def results(mode):
        saving = Saving(work, [mode] * mlp_count(work))
        work.begin()
        with saving:
            yield "output", saving.step()
        saving.check()
        yield from ((n, p.grad) for n, p in work.model.named_parameters() if p.requires_grad)
        if isinstance(work, FfnWork):
            yield "x", work.x.grad

    expected = {name: tensor.clone() for name, tensor in results("eager")}
    unsteady = [n for n, tensor in results("eager") if not torch.equal(tensor, expected[n])]
    for mode in MODES[1:]:
        differing = [n for n, tensor in results(mode)
                     if n not in unsteady and not torch.equal(tensor, expected[n])]
        if differing:
            sys.exit(f"{mode}: {len(differing)} of {len(expected)} tensors differ from eager's, "
                     f"first {differing[0]}")
    steady = len(expected) - len(unsteady)
    sentence = f"bits: output and gradients equal eager's in every mode ({steady} tensors)"
    if unsteady:
        sentence += (f"; not compared: {len(unsteady)} that eager itself does not repeat, first "
                     f"{unsteady[0]}")
    return sentence


def mlp_count(work) -> int:
    return sum(mlp.reason is None for mlp in find_mlps(work.model))


# -----------------------------------------------------------------------------
# Measurements


def on_gpu(work) -> bool:
    return next(work.model.parameters()).is_cuda


def measure_memory(work, modes: list[str]) -> dict:
    """{"peak": bytes, "saved": bytes, "densities": [...]} of one step, after one to warm up."""
    saving = Saving(work, modes)
    capacity = saving.buffer.capacity_bytes if saving.buffer else 0
    memory = {"capacity": capacity}
    with saving:
        work.begin()
        saving.step()
        work.begin()
        if on_gpu(work):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = saving.forward()
            memory["saved"] = torch.cuda.memory_allocated() - before + capacity
            work.backward(y)
            peak = torch.cuda.max_memory_allocated()
            memory["peak"] = peak - before + capacity + work.resident
        else:
            held = {}
            parameters = {p.untyped_storage().data_ptr() for p in work.model.parameters()}

            def keep(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    held[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = saving.forward()
            memory["saved"] = sum(held.values())
            if saving.buffer is not None:
                memory["saved"] += int(saving.buffer.used_bytes())
            work.backward(y)
        del y
        work.begin()
        if saving.buffer is not None:
            memory["densities"] = saving.densities()
            work.begin()
        saving.check()
    return memory


def time_step(work, saving: Saving) -> float:
    """ms of forward and backward."""
    work.begin()
    if not on_gpu(work):
        start = time.perf_counter()
        saving.step()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    saving.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_in_turns(work, choices: list[list[str]], seconds: float) -> list[list[float]]:
    """ms of each choice of modes: they take turns for `seconds`, and at least three times."""
    savings = [Saving(work, modes) for modes in choices]
    times = [[] for _ in choices]
    start = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - start < seconds:
        for saving, mine in zip(savings, times, strict=True):
            with saving:
                time_step(work, saving)  # the allocator settles after the other mode's step
                mine.append(time_step(work, saving))
    work.begin()
    for saving in savings:
        saving.check()
    return times


def memory_by_mode(work) -> dict[str, dict]:
    count = mlp_count(work)
    return {mode: measure_memory(work, [mode] * count) for mode in MODES}


def measure(work, less: tuple[int, dict[str, dict]], seconds: float, row: dict) -> list[dict]:
    """A row for each mode; less: fewer tokens and their memory_by_mode(), for the slope."""
    row["bits"] = check_bits(work)
    print(f"{row['part']}, {work.tokens:,} tokens; {row['bits']}", flush=True)
    fewer, memories_of_fewer = less
    memories = memory_by_mode(work)
    times = time_in_turns(work, [[mode] * mlp_count(work) for mode in MODES], seconds)
    rows = []
    for mode, mine in zip(MODES, times, strict=True):
        key = "peak" if "peak" in memories[mode] else "saved"
        slope = (memories[mode][key] - memories_of_fewer[mode][key]) / (work.tokens - fewer)
        rows.append(row | memories[mode] | {
            "mode": mode, "tokens": work.tokens, "slope": slope, "times": mine,
            "ms": statistics.median(mine)})
    return rows


def sweep(work, seconds: float) -> list[dict]:
    """Peak and ms with 0 to all layers compressed or checkpointed, the others saving post only."""
    count = mlp_count(work)
    points = []
    for method in ("bitsparse", "checkpoint"):
        for k in range(count + 1):
            modes = [method] * k + ["dense"] * (count - k)
            memory = measure_memory(work, modes)
            (times,) = time_in_turns(work, [modes], seconds / (2 * count + 2))
            points.append(memory | {"method": method, "layers": k, "times": times,
                                    "ms": statistics.median(times)})
    return points


def plot_sweep(points: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    key = "peak" if "peak" in points[0] else "saved"
    for method, marker in (("bitsparse", "o"), ("checkpoint", "s")):
        mine = [p for p in points if p["method"] == method]
        axes.plot([p[key] / 2**20 for p in mine], [p["ms"] for p in mine], marker=marker,
                  label={"bitsparse": "compressed", "checkpoint": "checkpointed"}[method])
        for p in mine:
            axes.annotate(p["layers"], (p[key] / 2**20, p["ms"]), xytext=(4, 4),
                          textcoords="offset points", fontsize=8)
    axes.set(xlabel=f"{key} MiB", ylabel="ms, forward and backward", title=title)
    axes.legend(title="layers (number at the point)\nothers: post saved, dense")
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


# -----------------------------------------------------------------------------
# Main


def table(rows: list[dict]) -> str:
    heads = ["part", "tokens", "density", "mode", "peak MiB", "saved MiB", "KiB/token", "of eager",
             "of dense", "ms", "of eager", "of dense"]
    widths = [5, 7, 7, 10, 9, 9, 9, 8, 8, 8, 8, 8]

    def line(cells):
        return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines = [line(heads)]
    for row in rows:
        same = [r for r in rows if all(r[k] == row[k] for k in ("part", "tokens", "asked"))]
        eager, dense = (next(r for r in same if r["mode"] == mode) for mode in ("eager", "dense"))
        stored = statistics.mean(next(r for r in same if "densities" in r)["densities"])
        lines.append(line([
            row["part"], f"{row['tokens']:,}", f"{stored:.3f}", row["mode"],
            f"{row['peak'] / 2**20:,.0f}" if "peak" in row else "-",
            f"{row['saved'] / 2**20:,.1f}", f"{row['slope'] / 1024:,.1f}",
            *(f"{row['slope'] / other['slope']:.3f}" for other in (eager, dense)),
            f"{row['ms']:.2f}", *(f"{row['ms'] / other['ms']:.4f}" for other in (eager, dense))]))
    return "\n".join(lines)


def environment(device: str) -> dict:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                            capture_output=True, text=True).stdout.strip()
    try:
        import transformers

        version = transformers.__version__
    except ImportError:
        version = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__,
            "transformers": version, "commit": commit or "unknown"}


def at_least(least: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, received {text}")
        return int(text)

    return parse


def share(text: str) -> float:
    if not re.fullmatch(r"0?\.\d+", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, received {text}")
    return float(text)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", choices=["ffn", "model", "all"], default="all")
    parser.add_argument("--tokens", type=at_least(2), nargs="+", help="a microbatch has")
    parser.add_argument("--layers", type=at_least(2), help="of the stack, or blocks of the model")
    parser.add_argument("--density", type=share, nargs="+", help="share of z to be positive")
    parser.add_argument("--model", help="a local Nemotron-H: its weights, with their own density")
    parser.add_argument("--seconds", type=float, default=8 if cuda else 0,
                        help="to time one number of tokens for, all modes together")
    parser.add_argument("--out", type=Path, default=Path("logs"), help="folder of JSON and picture")
    args = parser.parse_args()
    with_model = args.part in ("model", "all")
    if with_model:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            sys.exit("part model needs transformers (pip install 'transformers>=5.3'), --part ffn "
                     f"does not: {str(error).partition(chr(10))[0]}")
    if args.model and not (Path(args.model) / "config.json").is_file():
        sys.exit(f"--model {args.model}: no config.json in there")
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    rows, points = [], []

    if args.part in ("ffn", "all"):
        layers = args.layers or (8 if cuda else 2)
        d, h = (4096, 21504) if cuda else (64, 336)
        for density in args.density or [0.2, 0.5]:
            for tokens in args.tokens or [16_000 if cuda else 256]:
                stack = FfnStack(layers, d, h, density, device)
                less = tokens // 2, memory_by_mode(FfnWork(stack, tokens // 2))
                work = FfnWork(stack, tokens)
                rows += measure(work, less, args.seconds, {"part": "ffn", "asked": density})
                if not points:
                    points = sweep(work, args.seconds)
                    plot_sweep(points, f"{layers} ReLU² FFNs, d {d}, h {h}, {tokens:,} tokens, "
                               f"density {density}", args.out / "bench_nemotron_h.png")
                del work, stack
    scan = None
    if with_model:
        scan = use_lean_mamba()
        model = build_nemotron_h(args.model, args.layers or (13 if cuda else 8), not cuda, device)
        counts = sorted(set(args.tokens or ([512, 2048, 4096, 8192, 16_384] if cuda else [64, 96])))
        asked = None
        if args.model is None:
            asked = (args.density or [0.2])[0]
            ids = torch.randint(0, model.config.vocab_size, (1, min(512, counts[-1])),
                                device=device)
            set_model_density(model, ids, asked)
        less = counts[0] // 2, memory_by_mode(ModelWork(model, counts[0] // 2))
        for tokens in counts:
            new = measure(ModelWork(model, tokens), less, args.seconds,
                          {"part": "model", "asked": asked})
            less = tokens, {row["mode"]: row for row in new}
            rows += new

    about = environment(device) | {"mamba scan": scan}
    path = args.out / "bench_nemotron_h.json"
    path.write_text(json.dumps({"environment": about, "rows": rows, "sweep": points}, indent=1))
    print(f"wrote {path}\n\n" + ", ".join(f"{k} {v}" for k, v in about.items()))
    print(table(rows))


if __name__ == "__main__":
    main()
