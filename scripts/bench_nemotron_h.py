"""Nemotron-H: what do its ReLU² MLPs cost in VRAM and time, by the way their activation is saved?

    python scripts/bench_nemotron_h.py                  # on a GPU; about 3 minutes on an H200
    python scripts/bench_nemotron_h.py --part ffn       # without transformers
    python scripts/bench_nemotron_h.py --json FILE      # the numbers, and a record of them:
    python scripts/bench_nemotron_h.py --from FILE --out records/YYYY-MM-DD_NemotronH

Part "ffn": ungated ReLU² FFNs alone, x = x + ffn(x) (8 layers, d 4096, h 21504, 16,000 tokens):
everything that is saved is theirs; then the same stack with 0 to all layers (0, 2, .. of the 8)
compressed or recomputed, the others "dense": the VRAM-time curve of each method, as a picture.
Part "model": NemotronHForCausalLM with the shape of the 8B, cut to its first 13 of 52 blocks
(6 Mamba, 6 MLP, 1 attention: the whole model's proportions), over several numbers of tokens.

Modes: "eager" is the model's own torch code, which saves relu(z) and its square; "dense" saves
post only (the strongest dense baseline); "checkpoint" saves nothing and repeats the first GEMM;
"raw", "sign" and "exponent" compress. Everything else is equal. Loss and all gradients of the modes
are compared, bit for bit; then peaks are read, and then the modes take turns step by step. ms is
the median, of forward and backward.

What is counted:
- ffn: gradients begin as None, and peak MiB is all that a step holds: weights (2,688 MiB), x,
  gradients as they appear (2,688 in the end), the buffer's capacity, and all else. A hidden
  activation is 656 MiB, x is 125. Dense modes peak when backward begins, with all activations and
  no gradient; compressed ones when it ends, with all gradients, and with the whole buffer still.
- model: weights and gradients stand before the step and are not counted. The buffer is.
- KiB/token: what the step adds, buffer included, over its tokens; and the slope of that from half
  as many tokens (model: from the next smaller number), free of what does not grow with the tokens.
  In part model the slope is right from 1,024 tokens on: at 256 the head has a single chunk, and no
  second gradient of its weights.
- The buffer's capacity is what this batch needs, measured in one forward, and 2 % more.

What to keep in mind:
- Weights are random (or --model's), so density is set, to imitate a trained model's: each up
  projection is shifted along the mean of its input, as a bias on its output would do, until the
  asked share of z is positive. "stored" is the density that was measured.
- model: logits and loss are computed in chunks of 256 tokens, recomputed in backward, in all modes,
  as 131,072 logits a token would hide everything else.
- model: transformers' torch code for the Mamba scan takes over 10 MB a token at once. In its place
  stands a scan that saves the input projection and one tensor of the inner width, and computes the
  rest again, as mamba_ssm's fused kernel does. It is slower than that kernel, which flatters the
  ratio of whole steps; part ffn shows the ratio of the MLPs alone.
- model: with few tokens a step waits for Python and not for the GPU; where the times of a mode lie
  far apart, "least – most", their ratios say nothing.

On a CPU sizes are tiny, and instead of peaks the bytes that autograd holds are counted.
"""
import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from pathlib import Path

import bench_record
import torch
import torch.nn.functional as F
from bench_record import stop, table
from hf_patch import Mlp, find_mlps, unpatch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bitsparse_kernels import CODECS, ActivationBuffer  # noqa: E402

SOURCES = ("bitsparse_kernels.py", "scripts/hf_patch.py", "scripts/bench_nemotron_h.py")
MODES = ("eager", "dense", "checkpoint", *CODECS)
SWEPT = ("checkpoint", "raw", "exponent")
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # of the 8B: 52 blocks
HEAD_CHUNK = 256  # tokens
MARGIN = 1.02
START = time.perf_counter()
# For deterministic GEMMs; before CUDA starts. It is the size that an H200 has anyway.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:5.0f} s  {text}", flush=True)


def patchable(found: list[Mlp]) -> list[Mlp]:
    """Of find_mlps(model): once for each model, as an MLP takes the host up to half a second."""
    return [mlp for mlp in found if mlp.reason is None]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -----------------------------------------------------------------------------
# Models


class Ffn(nn.Module):
    """NemotronHMLP without transformers."""

    def __init__(self, d: int, h: int, device: str):
        super().__init__()
        self.up_proj = nn.Linear(d, h, bias=False, device=device, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(h, d, bias=False, device=device, dtype=torch.bfloat16)

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


@torch.no_grad()
def build_ffn_stack(layers: int, d: int, h: int, density: float, device: str) -> nn.Sequential:
    """FFNs of one density, for run_ffn_stack() from an x with mean 1 and deviation 1.

    An FFN adds a deviation of 0.1. Without x beside it, relu² would square a deviation from the
    expected scale in every layer, and the densities of later ones were not those asked for.
    """
    stack = nn.Sequential(*(Ffn(d, h, device) for _ in range(layers)))
    x = (torch.randn(512, d, device=device) + 1).bfloat16()
    for ffn in stack:
        ffn.up_proj.weight.normal_(std=d**-0.5)
        set_density(ffn.up_proj, x, density)
        post = F.relu(ffn.up_proj(x)).square().float()
        ffn.down_proj.weight.normal_(std=0.1 * (post.square().sum(1).mean() ** -0.5).item())
        x = x + ffn(x)
    return stack


def run_ffn_stack(stack: nn.Sequential, x: Tensor) -> Tensor:
    for ffn in stack:
        x = x + ffn(x)
    return x


def _running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1), which is not deterministic on a GPU."""
    return x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).triu()


def _mamba_group(gate, x, b, c, dt, conv_weight, conv_bias, dt_bias, a, d_skip, norm_weight, chunk,
                 eps, dt_limit):
    """One group of a Mamba-2 layer, from its input projection to its gated norm, in float32.

    gate and x [B, T, heads * p], b and c [B, T, n], dt [B, T, heads], conv_weight [heads * p + 2 n,
    1, kernel], dt_bias, a and d_skip [heads]. Returns [B, T, heads * p] in the dtype of gate.
    """
    tokens, heads, n = *dt.shape[1:], b.shape[-1]
    xbc = F.conv1d(torch.cat([x, b, c], -1).transpose(1, 2), conv_weight, conv_bias,
                   padding=conv_weight.shape[-1] - 1, groups=len(conv_weight))[..., :tokens]
    dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
    xbc, dt = (F.pad(t, (0, 0, 0, -tokens % chunk)).float().unflatten(1, (-1, chunk))
               for t in (F.silu(xbc).transpose(1, 2), dt))  # [B, k chunks, l in a chunk, ...]
    x, b, c = xbc.split([gate.shape[-1], n, n], -1)
    x = x.unflatten(-1, (heads, -1))
    skip = x * d_skip.float()[:, None]
    x = (x * dt[..., None]).permute(0, 3, 1, 2, 4)  # [B, h, k, l, p]
    decay = _running_sum((dt * a).permute(0, 3, 1, 2))  # [B, h, k, l]

    # Within a chunk: y_l = sum over s <= l of (c_l · b_s) exp(decay_l - decay_s) x_s.
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = (decay[..., :, None] - decay[..., None, :]).masked_fill(~past, -math.inf).exp()
    y = (weights * (c @ b.transpose(-1, -2))[:, None]) @ x

    # Between chunks: each one's state decays through those after it.
    to_end = (decay[..., -1:] - decay).exp()
    states = (x * to_end[..., None]).transpose(-1, -2) @ b[:, None]  # [B, h, k, p, n]
    total = _running_sum(F.pad(decay[..., -1], (1, 0)))  # [B, h, k + 1]: before each chunk
    past = torch.ones(states.shape[2], states.shape[2], dtype=torch.bool, device=x.device).tril(-1)
    between = (total[..., :-1, None] - total[..., None, 1:]).masked_fill(~past, -math.inf).exp()
    entering = (between @ states.flatten(3)).view(states.shape)
    y = y + (c[:, None] @ entering.transpose(-1, -2)) * decay.exp()[..., None]

    y = (y.permute(0, 2, 3, 1, 4) + skip).flatten(1, 2)[:, :tokens].flatten(2)
    y = y * F.silu(gate.float())
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (norm_weight * y).to(gate.dtype)


def lean_mamba(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, rmsnorm_weight,
               rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, dt_limit, **_):
    """In place of mamba_ssm's mamba_split_conv1d_scan_combined, called by transformers."""
    inner, heads = outproj_weight.shape[1], len(dt_bias)
    wide, state = inner // ngroups, (len(conv1d_weight) - inner) // (2 * ngroups)

    def groups(t, sizes, dim=0):  # t: the groups of each size after another; by group, all sizes
        pieces = t.split([size for size in sizes for _ in range(ngroups)], dim)
        return [pieces[g::ngroups] for g in range(ngroups)]

    parts = groups(zxbcdt, [wide, wide, state, state, heads // ngroups], -1)
    weights, biases = (groups(t, [wide, state, state]) for t in (conv1d_weight, conv1d_bias))
    by_group = zip(dt_bias.chunk(ngroups), A.chunk(ngroups), D.chunk(ngroups),
                   rmsnorm_weight.chunk(ngroups), strict=True)
    y = [checkpoint(_mamba_group, *parts[g], torch.cat(weights[g])[:, None], torch.cat(biases[g]),
                    *others, chunk_size, rmsnorm_eps, dt_limit, use_reentrant=False,
                    preserve_rng_state=False) for g, others in enumerate(by_group)]
    return F.linear(torch.cat(y, -1), outproj_weight, outproj_bias)


def build_nemotron_h(path: str | None, blocks: int, tiny: bool, density: float,
                     device: str) -> tuple[nn.Module, list[Mlp]]:
    """NemotronHForCausalLM, bf16, of the density, or with the weights (and density) at path.

    And its find_mlps().
    """
    import transformers
    from transformers.models.nemotron_h import modeling_nemotron_h

    transformers.logging.set_verbosity_error()
    modeling_nemotron_h.mamba2_split_conv1d_scan_combined = lean_mamba
    if path is not None:
        config = transformers.AutoConfig.from_pretrained(path)
        config.layers_block_type = config.layers_block_type[:blocks]
        model = transformers.NemotronHForCausalLM.from_pretrained(
            path, config=config, dtype=torch.bfloat16).to(device).train()
        return model, find_mlps(model)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 336, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 8,
             "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16}
    config = transformers.NemotronHConfig(
        hybrid_override_pattern=PATTERN[:blocks], use_cache=False, **sizes if tiny else {})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    found = find_mlps(model)
    hooks = [mlp.up.register_forward_pre_hook(lambda up, args: set_density(up, args[0], density))
             for mlp in patchable(found)]
    with torch.no_grad():  # layer by layer, in one forward
        model.get_input_embeddings().weight.add_(0.02)  # its own deviation: a mean to shift along
        model.model(input_ids=torch.randint(0, config.vocab_size, (1, 512), device=device))
    for hook in hooks:
        hook.remove()
    return model, found


# -----------------------------------------------------------------------------
# Steps


class FfnWork:
    """Forward and backward of the stack; gradients begin as None."""

    def __init__(self, stack: nn.Sequential, mlps: list[Mlp], tokens: int):
        self.model, self.mlps, self.tokens = stack, mlps, tokens
        weight = stack[0].up_proj.weight
        self.x = (torch.randn(tokens, weight.shape[1], device=weight.device) + 1).bfloat16()
        self.leaves = dict(stack.named_parameters()) | {"x": self.x.requires_grad_()}
        # What stands before the step and is counted in its peak.
        self.resident = sum(leaf.nbytes for leaf in self.leaves.values())

    def begin(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def loss(self) -> Tensor:
        return run_ffn_stack(self.model, self.x).square().sum()


class ModelWork:
    """Forward and backward of NemotronHForCausalLM; gradients stand before the step."""

    resident = 0

    def __init__(self, model: nn.Module, mlps: list[Mlp], tokens: int):
        self.model, self.mlps, self.tokens = model, mlps, tokens
        self.leaves = dict(model.named_parameters())
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, model.config.vocab_size, (1, tokens + 1), generator=generator)
        ids = ids.to(model.lm_head.weight.device)
        self.inputs, self.targets = ids[:, :-1], ids[0, 1:]

    def begin(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.zero_()

    def _head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")

    def loss(self) -> Tensor:
        hidden = self.model.model(input_ids=self.inputs, use_cache=False).last_hidden_state[0]
        losses = [checkpoint(self._head, *chunk, use_reentrant=False, preserve_rng_state=False)
                  for chunk in zip(hidden.split(HEAD_CHUNK), self.targets.split(HEAD_CHUNK),
                                   strict=True)]
        return torch.stack(losses).sum() / self.tokens


class Saving:
    """The work with each MLP's activation saved in a mode of its own (one mode: in all of them)."""

    def __init__(self, work: FfnWork | ModelWork, *modes: str):
        self.work = work
        mlps = work.mlps
        modes = modes if len(modes) > 1 else modes * len(mlps)
        self.patched = [
            dataclasses.replace(mlp, **{"codec" if mode in CODECS else "save": mode})
            for mlp, mode in zip(mlps, modes, strict=True) if mode != "eager"]
        compressed = [mlp for mlp in self.patched if mlp.save == "bitsparse"]
        device = mlps[0].up.weight.device
        self.buffer = ActivationBuffer(0, device, layers=max(1, len(compressed)))
        for layer, mlp in enumerate(compressed):
            mlp.buffer, mlp.layer = self.buffer, layer
        self.forward()  # counts, and has no room to store
        counted = self.buffer.snapshot()
        self.buffer.resize(int(counted.peak_bytes * MARGIN))
        self.densities = [nnz / (work.tokens * mlp.up.out_features) for nnz, mlp in
                          zip(counted.layer_nnz, compressed, strict=False)]

    def forward(self) -> Tensor:
        self.buffer.reset()
        for mlp in self.patched:
            mlp.install()
        try:
            return self.work.loss()
        finally:
            unpatch(self.work.model)

    def step(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def timed_step(self) -> float:
        """ms of forward and backward."""
        self.work.begin()
        synchronize()
        start = time.perf_counter()
        self.step()
        synchronize()
        return 1e3 * (time.perf_counter() - start)

    def measure_bytes(self) -> int:
        """Peak of a step, less what stands before it and is not counted; see the docstring."""
        counted = self.buffer.capacity_bytes + self.work.resident
        self.work.begin()
        if torch.cuda.is_available():
            self.step()  # allocates what then stays
            self.work.begin()
            synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            counted += torch.cuda.max_memory_allocated() - before
            self.work.begin()
            return counted
        own = {leaf.untyped_storage().data_ptr() for leaf in self.work.leaves.values()}
        held = {}

        def keep(tensor):
            storage = tensor.untyped_storage()  # kept, so that no address comes twice
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        return counted + sum(storage.nbytes() for storage in held.values())

    def check(self) -> None:
        counted = self.buffer.snapshot()
        if counted.overflowed or counted.stale:
            stop(f"the buffer of {counted.capacity_bytes:,} bytes overflowed: the same step needed "
                 f"{counted.needed_bytes:,} later")


# -----------------------------------------------------------------------------
# Measurements


def check_bits(savings: dict[str, Saving]) -> str:
    """Compare loss and gradients of all modes, bit for bit; returns a sentence, or exits.

    The modes of relu2_mlp must agree. Whether they also agree with eager, whose GEMM calls are
    torch's own, is told.
    """

    def results(mode):
        saving = savings[mode]
        saving.work.begin()
        return {"loss": saving.step()} | {name: leaf.grad
                                          for name, leaf in saving.work.leaves.items()}

    # Not warn_only: with it, attention's backward stays as it is, and differs from run to run.
    torch.use_deterministic_algorithms(True)
    eager, dense = ({name: tensor.clone() for name, tensor in results(mode).items()}
                    for mode in ("eager", "dense"))
    if wrong := [name for name, tensor in eager.items() if not tensor.isfinite().all()]:
        stop(f"eager's {wrong[0]} is not finite; nothing was measured")
    repeated = results("eager")
    unsteady = [name for name in eager if not torch.equal(repeated[name], eager[name])]
    steady = [name for name in eager if name not in unsteady]
    for mode in ("checkpoint", *CODECS):
        actual = results(mode)
        differing = [name for name in steady if not torch.equal(actual[name], dense[name])]
        if differing or not steady:
            stop(f"{mode}: {len(differing)} of {len(steady)} tensors differ from dense's, first "
                 f"{differing[:1]}; nothing was measured")
    torch.use_deterministic_algorithms(False)
    apart = {name: ((dense[name] - eager[name]).float().norm() / eager[name].float().norm()).item()
             for name in steady if not torch.equal(dense[name], eager[name])}
    return f"loss and gradients, {len(steady)} tensors, equal dense's in every mode, " + (
        f"but {len(apart)} are not eager's, by {max(apart.values()):.1e} of their norm at most"
        if apart else "and eager's") + (
        f"; not compared: {len(unsteady)} that eager itself does not repeat, first {unsteady[0]}"
        if unsteady else "")


def time_in_turns(savings: list[Saving], rounds: int) -> list[list[float]]:
    """ms of each, a step of each after another; the first round is not counted."""
    times = [[saving.timed_step() for saving in savings] for _ in range(rounds + 1)][1:]
    savings[0].work.begin()
    for saving in savings:
        saving.check()
    return [list(mine) for mine in zip(*times, strict=True)]


def added_by_mode(work: FfnWork | ModelWork) -> dict[str, int]:
    """Bytes that a step adds to what stands before it."""
    return {mode: Saving(work, mode).measure_bytes() - work.resident for mode in MODES}


def measure(part: str, work: FfnWork | ModelWork, fewer: tuple[int, dict[str, int]], rounds: int,
            asked: float | None) -> list[dict]:
    """A row for each mode. fewer: a smaller number of tokens and its added_by_mode()."""
    savings = {mode: Saving(work, mode) for mode in MODES}
    bits = check_bits(savings)
    say(f"{part}, {work.tokens:,} tokens: {bits}")
    held = {mode: saving.measure_bytes() for mode, saving in savings.items()}
    times = time_in_turns(list(savings.values()), rounds)
    return [{"part": part, "tokens": work.tokens, "asked": asked, "mode": mode, "bits": bits,
             "densities": savings["raw"].densities, "bytes": held[mode],
             "bytes_per_token": (held[mode] - work.resident) / work.tokens,
             "slope": (held[mode] - work.resident - fewer[1][mode]) / (work.tokens - fewer[0]),
             "times": mine, "ms": statistics.median(mine)}
            for mode, mine in zip(MODES, times, strict=True)]


def sweep(work: FfnWork, rounds: int) -> list[dict]:
    """Bytes and ms with 0 to all layers in each of SWEPT, the others dense."""
    count = len(work.model)
    swept = [*range(0, count, max(1, count // 4)), count]  # about 5 are a curve
    points = [{"method": method, "layers": k} for method in SWEPT for k in swept]
    savings = [Saving(work, *[p["method"]] * p["layers"], *["dense"] * (count - p["layers"]))
               for p in points]
    for point, saving in zip(points, savings, strict=True):
        point["bytes"] = saving.measure_bytes()
    say("sweep: bytes counted")
    for point, times in zip(points, time_in_turns(savings, rounds), strict=True):
        point |= {"times": times, "ms": statistics.median(times)}
    return points


# -----------------------------------------------------------------------------
# Output


def draw(record: dict) -> dict:
    if not record["sweep"]:
        return {}
    import matplotlib  # not where numbers alone are made

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for method, marker in zip(SWEPT, "so^", strict=True):
        mine = [p for p in record["sweep"] if p["method"] == method]
        axes.plot([p["bytes"] / 2**20 for p in mine], [p["ms"] for p in mine], marker=marker,
                  label=method)
        for p in mine:
            axes.annotate(p["layers"], (p["bytes"] / 2**20, p["ms"]), xytext=(4, 4),
                          textcoords="offset points", fontsize=7)
    axes.set(xlabel="peak MiB", ylabel="ms, forward and backward", title=record["sweep_title"])
    axes.legend(title="number at a point: layers so saved\n(the others: dense)", fontsize=8)
    return {"vram_time": figure}


def find(rows: list[dict], row: dict, mode: str) -> dict:
    """The row that differs from this one in its mode alone."""
    return next(r for r in rows if r["mode"] == mode
                and all(r[key] == row[key] for key in ("part", "tokens", "asked")))


def main_table(rows: list[dict]) -> list[str]:
    cells = [["part", "tokens", "stored", "mode", "peak MiB", "KiB/token", "slope", "of eager",
              "of dense", "ms", "least – most", "of eager", "of dense"]]
    for row in rows:
        eager, dense = (find(rows, row, mode) for mode in ("eager", "dense"))
        cells.append([
            row["part"], f"{row['tokens']:,}", f"{statistics.mean(row['densities']):.3f}",
            row["mode"], f"{row['bytes'] / 2**20:,.0f}", f"{row['bytes_per_token'] / 1024:,.1f}",
            f"{row['slope'] / 1024:,.1f}", *(f"{row['slope'] / r['slope']:.3f}"
                                             for r in (eager, dense)),
            f"{row['ms']:.2f}", f"{min(row['times']):,.0f} – {max(row['times']):,.0f}",
            *(f"{row['ms'] / r['ms']:.4f}" for r in (eager, dense))])
    return table(cells)


def claim(rows: list[dict]) -> str:
    """What codec raw takes of eager and dense, at the most tokens of each part and density."""
    most = {(row["part"], row["asked"]): row for row in rows if row["mode"] == "raw"}
    sentences = []
    for (part, asked), row in most.items():
        what, key = ("peak VRAM", "bytes") if part == "ffn" else ("VRAM per token", "slope")
        vram, ms = ([f"{row[key] / find(rows, row, mode)[key]:.3f}" for mode in ("eager", "dense")]
                    for key in (key, "ms"))
        density = "" if asked is None else f", density {asked:g}"
        sentences.append(f"{part}{density}, {row['tokens']:,} tokens: raw takes {vram[0]} of "
                         f"eager's {what} and {ms[0]} of its time, {vram[1]} and {ms[1]} of "
                         "dense's")
    return "; ".join(sentences) + "."


def measures(rows: list[dict]) -> dict[str, float]:
    """For update_tables.py: codec raw over the unpatched model, at the most tokens."""
    (*_, ours) = [None] + [r for r in rows if r["part"] == "model" and r["mode"] == "raw"]
    return {} if ours is None else {
        f"{name}_ratio_nemotron_h": ours[key] / find(rows, ours, "eager")[key]
        for name, key in (("vram", "slope"), ("step", "ms"))}


def page(record: dict) -> str:
    """The record's README.md."""
    densities = {(row["part"], row["tokens"], row["asked"]): row["densities"]
                 for row in record["rows"]}
    bits = {f"{row['part']}, {row['tokens']:,} tokens: {row['bits']}" for row in record["rows"]}
    lines = [
        *bench_record.head(record, f"transformers: {record['transformers']}", *sorted(bits)),
        "The docstring of scripts/bench_nemotron_h.py says what is counted, and what to keep in "
        "mind. Densities were set, not trained.", "", *main_table(record["rows"]), "",
        "| part | tokens | density by layer |", "|---|--:|---|",
        *(f"| {part} | {tokens:,} | {' '.join(f'{density:.3f}' for density in mine)} |"
          for (part, tokens, _), mine in densities.items())]
    if record["sweep"]:
        lines += ["", f"![VRAM and time of {record['sweep_title']}](vram_time.png)"]
    return "\n".join(lines) + "\n"


# -----------------------------------------------------------------------------
# Main


def between(least: float, most: float, kind: type = int):
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g}, received {text}")
        return value

    return parse


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["ffn", "model", "all"], default="all")
    parser.add_argument("--tokens", type=between(2, 2**20), nargs="+", help="of a microbatch")
    parser.add_argument("--layers", type=between(2, 52), help="of the stack; blocks of the model")
    parser.add_argument("--density", type=between(0.01, 0.99, float), nargs="+",
                        help="share of z to be positive")
    parser.add_argument("--model", help="a local Nemotron-H: its weights, with their own density")
    parser.add_argument("--recompute-others", action="store_true",
                        help="gradient checkpointing of the model's blocks without an MLP")
    parser.add_argument("--rounds", type=between(1, 1000), default=8 if cuda else 1,
                        help="timed steps of each mode (sweep and model: half of them)")
    bench_record.add_options(parser)
    args = parser.parse_args()
    if args.model and not (Path(args.model) / "config.json").is_file():
        stop(f"--model {args.model}: no config.json in there")
    if args.part != "ffn" and not args.earlier:
        try:
            import transformers
            args.transformers = transformers.__version__
        except ImportError as error:
            stop("part model needs transformers (pip install 'transformers>=5.3'), --part ffn "
                 f"does not: {str(error).partition(chr(10))[0]}")
    bench_record.check_options(parser, args, pictures=args.part != "model")
    return args


def measure_all(args: argparse.Namespace) -> dict:
    """The record, without its claim and measures."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    record = bench_record.begin(SOURCES) | {
        "transformers": getattr(args, "transformers", "not used"), "rows": [], "sweep": []}
    rows = record["rows"]

    if args.part != "model":
        layers = args.layers or (8 if cuda else 2)
        d, h = (4096, 21504) if cuda else (64, 336)
        for density in args.density or [0.2, 0.5]:
            stack = build_ffn_stack(layers, d, h, density, device)
            mlps = patchable(find_mlps(stack))
            for tokens in args.tokens or [16_000 if cuda else 256]:
                fewer = tokens // 2, added_by_mode(FfnWork(stack, mlps, tokens // 2))
                work = FfnWork(stack, mlps, tokens)
                rows += measure("ffn", work, fewer, args.rounds, density)
                if not record["sweep"]:
                    record["sweep_title"] = (f"{layers} ReLU² FFNs, d {d}, h {h}, {tokens:,} "
                                             f"tokens, density {density}")
                    record["sweep"] = sweep(work, args.rounds // 2 + 1)
            del stack, mlps, work
    if args.part != "ffn":
        asked = None if args.model else (args.density or [0.2])[0]
        model, found = build_nemotron_h(args.model, args.layers or (13 if cuda else 8), not cuda,
                                        asked, device)
        if args.recompute_others:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for mlp in found:
                for block in mlp.blocks:
                    block.gradient_checkpointing = mlp.reason is not None
        counts = sorted(set(args.tokens or ([512, 1024, 4096, 16_384] if cuda else [64, 96])))
        mlps = patchable(found)
        say("model built")
        fewer = counts[0] // 2, added_by_mode(ModelWork(model, mlps, counts[0] // 2))
        for tokens in counts:
            new = measure("model", ModelWork(model, mlps, tokens), fewer, args.rounds // 2 + 1,
                          asked)
            fewer = tokens, {row["mode"]: row["bytes"] for row in new}
            rows += new

    return record | {"seconds": round(time.perf_counter() - START)}


def main() -> None:
    args = parse_arguments()
    record = bench_record.read(args.earlier) if args.earlier else measure_all(args)
    rows = record["rows"]
    record |= {"claim": claim(rows), "measures": measures(rows)}
    bench_record.write(record, args, page, draw)
    print(f"{record['device']}, torch {record['torch']}, triton {record['triton']}, transformers "
          f"{record['transformers']}, commit {record['commit']}\n", *main_table(rows), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as error:
        stop(f"fewer --tokens or --layers: {str(error).splitlines()[0]}")
