"""Trains the GPT of the Modded-NanoGPT speedrun with its ReLU² activations saved compressed.

Model and recipe are those of the speedrun's record of 2025-07-12 (#26: 3.28 on FineWeb after 1750
steps of 393,216 tokens). What differs is how the MLP's hidden activation is kept for backward:

    --mlp bitsparse    bitmask + packed positive values (bitsparse_kernels.py), bit for bit lossless
    --mlp dense        relu(z)² only, in bf16
    --mlp checkpoint   not at all; backward computes it again
    --mlp eager        F.linear(relu(z).square()), left to torch.compile

    python train_gpt.py --preset tiny --data data/sample               # CPU, minutes
    torchrun --standalone --nproc_per_node=1 train_gpt.py --preset speedrun    # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset speedrun    # eight

The global batch is 8 microbatches whatever the number of GPUs (1, 2, 4 or 8): each GPU accumulates
over 8 / world_size of them. With --mlp bitsparse a step that overflows the buffer has no effect, which
the device decides; a step later the host sees it, enlarges the buffer and repeats from that step.
"""
import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import bitsparse_kernels
from bitsparse_kernels import ActivationBuffer, relu2_mlp

SOURCES = [Path(__file__).read_text(), Path(bitsparse_kernels.__file__).read_text()]  # for the log

# -----------------------------------------------------------------------------
# Config

MICROBATCHES = 8  # a global batch, over all ranks
BOS = 50256  # GPT-2's <|endoftext|>, which opens every document
VOCAB = 50304  # GPT-2's 50,257 tokens, rounded up to a multiple of 128
BLOCK = 128  # tokens; attention windows and masks are made of such blocks
# Tokens whose logits exist at a time, 100,608 bytes a token in bf16: on a GPU the memory that the last
# MLP's backward takes as well; on a CPU a size that malloc takes from its heap, not from fresh pages.
HEAD_CHUNK = {"cuda": 3072, "cpu": 128}
MLPS = ("bitsparse", "dense", "checkpoint", "eager")


def option(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    data: str = option("data/fineweb10B", "folder of fineweb_train_*.bin and fineweb_val_*.bin")
    epochs: int = option(1, "passes over the train shards that the run may make")
    steps: int = option(1750, "optimizer steps, each of 8 microbatches over all GPUs")
    microbatch_tokens: int = option(49152, "tokens of a microbatch, one packed sequence; "
                                           "a multiple of 128")
    val_tokens: int = option(10485760, "validation tokens, the first of the val shards")
    val_sequence: int = option(262144, "tokens of a validation sequence")
    val_every: int = option(125, "steps between validations (0: only at the end)")
    layers: int = option(12, "transformer blocks, an even number of 4 or more")
    dim: int = option(768, "width of the residual stream")
    heads: int = option(6, "attention heads")
    window_start: int = option(128, "attention window at the start, in tokens")
    window_end: int = option(1792, "attention window at the end, in tokens")
    cooldown: float = option(0.45, "fraction of the steps over which the learning rates fall")
    final_lr: float = option(0.1, "learning rates at the end, as a fraction of their value")
    muon_lr: float = option(0.05, "learning rate of the matrices of attention and MLP")
    muon_momentum: float = option(0.95, "momentum of Muon, reached from 0.85 over 300 steps")
    adam_lr: float = option(0.008, "learning rate of all else; embeddings x75, head x27.5, scalars x5")
    mlp: str = option("bitsparse", "how the MLP's hidden activation is saved for backward", MLPS)
    buffer_mib: int = option(0, "first size of the activation buffer in MiB "
                                "(0: for a density of 0.5 and a margin of 10 %%)")
    seed: int = option(0, "seed of the initial weights")
    log_dir: str = option("logs", "folder of the run's log")
    wandb: bool = option(True, "log to wandb (offline where nobody is logged in)")


PRESETS = {
    # one or eight H100s or H200s, FineWeb, 3.28
    "speedrun": {},
    # the same model on whatever shards --data names, 21 M tokens
    "offline": dict(steps=54, val_tokens=524288, val_every=0),
    # a CPU and a few minutes
    "tiny": dict(steps=80, microbatch_tokens=256, val_tokens=16384, val_sequence=1024, val_every=20,
                 layers=4, dim=128, heads=2, window_end=256),
}


def parse_config(arguments: list[str]) -> Config:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.replace("%", "%%"))
    default = "speedrun" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--preset", choices=PRESETS, default=default,
                        help=f"defaults of the other options (here: {default})")
    preset = PRESETS[parser.parse_known_args([a for a in arguments if a not in ("-h", "--help")])[0]
                     .preset]
    for f in fields(Config):
        default = preset.get(f.name, f.default)
        flag = "--" + f.name.replace("_", "-")
        text = f"{f.metadata['help']} (here: {default})"
        if f.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default,
                                help=text)
        else:
            parser.add_argument(flag, type=f.type, default=default, help=text,
                                choices=f.metadata["choices"])
    given = vars(parser.parse_args(arguments))
    config = Config(**{f.name: given[f.name] for f in fields(Config)})
    for wrong, expected in (
            (config.layers < 4 or config.layers % 2, "--layers: expected an even number from 4 on"),
            (config.microbatch_tokens < BLOCK or config.microbatch_tokens % BLOCK,
             f"--microbatch-tokens: expected a multiple of {BLOCK}"),
            (config.val_sequence < BLOCK or config.val_sequence % BLOCK,
             f"--val-sequence: expected a multiple of {BLOCK}"),
            (config.val_tokens < 1 or config.val_tokens % config.val_sequence,
             f"--val-tokens: expected a multiple of --val-sequence ({config.val_sequence})"),
            (config.heads < 1 or config.dim % (4 * config.heads),
             f"--dim: expected a multiple of 4 x --heads ({4 * config.heads})"),
            (config.steps < 1, "--steps: expected 1 or more"),
            (config.epochs < 1, "--epochs: expected 1 or more"),
            (config.buffer_mib < 0, "--buffer-mib: expected 0 or more")):
        if wrong:
            name = expected.split(":")[0].removeprefix("--").replace("-", "_")
            parser.error(f"{expected}, received {getattr(config, name)}")
    return config


def stop(sentence: str) -> None:
    """End the run for a reason that its user can mend."""
    sys.exit(f"train_gpt.py: {sentence}")


# -----------------------------------------------------------------------------
# Distributed: a process a GPU, started by torchrun; or one process, without


@dataclass
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def accumulation(self) -> int:
        return MICROBATCHES // self.world_size

    def sum_(self, x: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(x)

    def scatter_mean(self, x: Tensor) -> Tensor:
        """This rank's part along dimension 0 of the mean of x over the ranks."""
        if self.world_size == 1:
            return x
        x = x / self.world_size
        part = torch.empty_like(x[: x.shape[0] // self.world_size])
        dist.reduce_scatter_tensor(part, x)
        return part

    def gather(self, part: Tensor) -> Tensor:
        if self.world_size == 1:
            return part
        whole = part.new_empty((part.shape[0] * self.world_size, *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part)
        return whole

    def slice(self, x: Tensor) -> Tensor:
        return x.chunk(self.world_size)[self.rank]


def start_ranks() -> Ranks:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if MICROBATCHES % world_size:
        stop(f"the number of processes must divide {MICROBATCHES}: "
             f"expected 1, 2, 4 or 8, received {world_size}")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if torch.cuda.get_device_capability(device) < (8, 0):
            stop(f"a GPU with bf16 matrix units is needed (compute capability 8.0 or newer, Ampere); "
                 f"{torch.cuda.get_device_name(device)} is "
                 f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}")
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(rank, world_size, device)


def compiled(function):
    """torch.compile on a GPU; on a CPU as it is, since not every machine has a C++ compiler."""
    if not torch.cuda.is_available():
        return function
    return torch.compile(function, dynamic=False, fullgraph=True)


# -----------------------------------------------------------------------------
# Optimizers
#
# Both split their state over the ranks, and both take `ok`, a bool on the device: where it is false,
# parameters and state keep their bits.


@compiled
def orthogonalize(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest semi-orthogonal matrix of each of g [n, r, c]."""
    x = g.bfloat16()
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.775 * s + 2.0315 * s @ s) @ x
    return x.mT if transposed else x


@compiled
def muon_direction(g: Tensor, buffer: Tensor, momentum: Tensor, ok: Tensor) -> Tensor:
    """Nesterov momentum, in place in buffer; g, buffer [n, r, c] float32. Returns bf16."""
    new = buffer.lerp(g, 1 - momentum)
    buffer.copy_(torch.where(ok, new, buffer))
    return g.lerp(new, momentum).bfloat16()


@compiled
def muon_apply(params: list[Tensor], direction: Tensor, lr: Tensor, ok: Tensor) -> None:
    for p, u in zip(params, direction.unbind(), strict=True):
        p.copy_(torch.where(ok, p - lr * u, p))


class Muon:
    """Momentum, orthogonalized; for the matrices, here parameters of shape [..., rows, columns]."""

    def __init__(self, params: list[nn.Parameter], ranks: Ranks):
        self.ranks = ranks
        shapes = {}
        for p in params:
            shapes.setdefault(p.shape[-2:], []).extend(p.view(-1, *p.shape[-2:]).unbind())
        self.groups = []
        grads = {p.data_ptr(): p.grad for p in params}
        for (rows, columns), _ in shapes.items():
            own = [p for p in params if p.shape[-2:] == (rows, columns)]
            matrices = [m for p in own for m in p.data.view(-1, rows, columns).unbind()]
            gradients = [m for p in own
                         for m in grads[p.data_ptr()].view(-1, rows, columns).unbind()]
            padding = -len(matrices) % ranks.world_size
            part = (len(matrices) + padding) // ranks.world_size
            momentum = matrices[0].new_zeros((part, rows, columns))
            self.groups.append((matrices, gradients, padding, momentum))

    def state(self) -> list[Tensor]:
        return [momentum for *_, momentum in self.groups]

    @torch.no_grad()
    def step(self, lr: float, momentum: float, ok: Tensor) -> None:
        for matrices, gradients, padding, buffer in self.groups:
            g = torch.stack([*gradients, *[torch.zeros_like(matrices[0])] * padding])
            g = muon_direction(self.ranks.scatter_mean(g), buffer, torch.tensor(momentum), ok)
            update = self.ranks.gather(orthogonalize(g))
            shape_factor = max(1, matrices[0].shape[0] / matrices[0].shape[1]) ** 0.5
            muon_apply(matrices, update[: len(matrices)], torch.tensor(lr * shape_factor), ok)


@compiled
def adam_update(p: Tensor, g: Tensor, mean: Tensor, square: Tensor, rate: Tensor,
                betas: tuple[float, float], eps: float, ok: Tensor) -> None:
    """In place. rate: the learning rate with both bias corrections. All moments in p's dtype."""
    g = g.float()
    new_mean = mean.float().lerp(g, 1 - betas[0])
    new_square = square.float().lerp(g.square(), 1 - betas[1])
    new = p.float() - rate * new_mean / (new_square.sqrt() + eps)
    for old, value in ((mean, new_mean), (square, new_square), (p, new)):
        old.copy_(torch.where(ok, value.to(old.dtype), old))


class Adam:
    """Adam, for embeddings, head and scalars. params: (parameter, factor on the learning rate)."""

    betas, eps = (0.8, 0.95), 1e-10

    def __init__(self, params: list[tuple[nn.Parameter, float]], ranks: Ranks):
        self.ranks = ranks
        self.groups = []
        for p, factor in params:
            split = p.dim() > 1  # a table's rows are split over the ranks; scalars are not
            own = ranks.slice(p.data) if split else p.data
            self.groups.append((p, factor, split, torch.zeros_like(own), torch.zeros_like(own)))

    def state(self) -> list[Tensor]:
        return [moment for group in self.groups for moment in group[-2:]]

    @torch.no_grad()
    def step(self, lr: float, step: int, ok: Tensor) -> None:
        """step: counted from 1; the host's, as a step that was not ok is made again."""
        correction = (1 - self.betas[1] ** step) ** 0.5 / (1 - self.betas[0] ** step)
        for p, factor, split, mean, square in self.groups:
            rate = torch.tensor(lr * factor * correction)
            if not split:
                adam_update(p.data, p.grad, mean, square, rate, self.betas, self.eps, ok)
                continue
            own = self.ranks.slice(p.data)
            adam_update(own, self.ranks.scatter_mean(p.grad), mean, square, rate, self.betas,
                        self.eps, ok)
            if self.ranks.world_size > 1:
                p.data.copy_(self.ranks.gather(own))


# -----------------------------------------------------------------------------
# Model


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first half of the frequencies; x [tokens, heads, d], cos [tokens, d/4].

    Dimension i turns with dimension d/2 + i; the other half of the pairs stands still.
    """
    a, rest_a, b, rest_b = x.float().chunk(4, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos + b * sin, rest_a, b * cos - a * sin, rest_b], -1).to(x.dtype)


def attention_blocks(tokens: Tensor, window_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees: bool [q, k] (in part or whole), (whole).

    A token sees those before it in its own document, in blocks less than window_blocks back.
    """
    document = (tokens == BOS).cumsum(0).view(-1, BLOCK)
    first, last = document[:, 0], document[:, -1]
    block = torch.arange(len(document), device=tokens.device)
    back = block[:, None] - block
    seen = (back >= 0) & (back < window_blocks) & (last[None] >= first[:, None])
    whole = seen & (back > 0) & (first[None] == last[:, None])
    return seen, whole


def attention_mask(tokens: Tensor, window_blocks: Tensor) -> BlockMask | Tensor:
    """For FlexAttention a BlockMask; on the CPU a bool [tokens, tokens] for SDPA."""
    seen, whole = attention_blocks(tokens, window_blocks)
    document = (tokens == BOS).cumsum(0)

    def causal_in_document(b, h, q, k):
        return (q >= k) & (document[q] == document[k])

    if not tokens.is_cuda:
        i = torch.arange(len(tokens))
        in_window = seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return in_window & causal_in_document(0, 0, i[:, None], i)

    def ordered(blocks):  # the nearest first, in the order in which they are read
        indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(-1, dtype=torch.int32)[None, None], indices[None, None].contiguous()

    return BlockMask.from_kv_blocks(*ordered(seen & ~whole), *ordered(whole), BLOCK_SIZE=BLOCK,
                                    mask_mod=causal_in_document)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        bound = 3 ** 0.5 * 0.5 * config.dim ** -0.5
        self.qkv = nn.Parameter(torch.empty(3, config.dim, config.dim).uniform_(-bound, bound))
        self.project = nn.Parameter(torch.zeros(config.dim, config.dim))

    def forward(self, x, value_embedding, lambdas, rotary, mask):
        tokens, dim = x.shape
        qkv = F.linear(x, self.qkv.view(-1, dim).to(x.dtype))
        q, k, v = qkv.view(tokens, 3, self.heads, dim // self.heads).unbind(1)
        q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)
        v = lambdas[0] * v
        if value_embedding is not None:
            v = v + lambdas[1] * value_embedding.view_as(v)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        if x.is_cuda:
            y = flex_attention(q, k, v, block_mask=mask, scale=0.12)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.12)
        return F.linear(y[0].transpose(0, 1).reshape(tokens, dim), self.project.to(x.dtype))


class MLP(nn.Module):
    def __init__(self, config: Config, layer: int, buffer: ActivationBuffer | None):
        super().__init__()
        bound = 3 ** 0.5 * 0.5 * config.dim ** -0.5
        self.w1 = nn.Parameter(torch.empty(4 * config.dim, config.dim).uniform_(-bound, bound))
        self.w2 = nn.Parameter(torch.zeros(config.dim, 4 * config.dim))
        self.save, self.layer, self.buffer = config.mlp, layer, buffer

    def forward(self, x):
        w1, w2 = self.w1.to(x.dtype), self.w2.to(x.dtype)
        if self.save == "eager":
            return F.linear(F.linear(x, w1).relu().square(), w2)
        return relu2_mlp(x, w1, w2, buffer=self.buffer, save=self.save, layer=self.layer)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int, buffer: ActivationBuffer | None):
        super().__init__()
        # record #26 has no attention in layer 7 of 12
        self.attention = Attention(config) if layer != config.layers * 7 // 12 else None
        self.mlp = MLP(config, layer, buffer)

    def forward(self, x, x0, value_embedding, lambdas, rotary, mask):
        x = lambdas[0] * x + lambdas[1] * x0
        if self.attention is not None:
            x = x + self.attention(norm(x), value_embedding, lambdas[2:], rotary, mask)
        return x + self.mlp(norm(x))


@compiled
def softcapped_loss(z: Tensor, targets: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of 30 sigmoid(z / (7.5 √dim)) and its gradient to z.

    z [n, VOCAB] bf16, targets [n] int64. Returns float32 [] and [n, VOCAB] bf16.
    """
    scale = 1 / (7.5 * dim ** 0.5)
    s = torch.sigmoid(z.float() * scale)
    logits = 30 * s
    logsumexp = logits.logsumexp(-1, keepdim=True)
    loss = (logsumexp - logits.gather(-1, targets[:, None])).sum()
    one_hot = torch.arange(z.shape[-1], device=z.device) == targets[:, None]
    dz = ((logits - logsumexp).exp() - one_hot.float()) * (30 * scale) * s * (1 - s)
    return loss, dz.to(z.dtype)


# One operator, so that the compiler does not reorder the chunks and hold all logits after all.
@torch.library.custom_op("speedrun::head_loss", mutates_args=())
def head_loss(x: Tensor, w: Tensor, targets: Tensor, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The loss head, a chunk of tokens at a time, so that all logits never exist at once.

    x [tokens, d], w [VOCAB, d] bf16. Returns the summed loss, float32 [], and, if grads, its
    gradients dx and dw, made here since a chunk's logits are at hand.
    """
    loss = x.new_zeros((), dtype=torch.float32)
    dx = torch.empty_like(x if grads else x[:0])
    dw = torch.zeros_like(w if grads else w[:0], dtype=torch.float32)
    chunk = HEAD_CHUNK[x.device.type]
    for i in range(0, len(x), chunk):
        part, target = x[i: i + chunk], targets[i: i + chunk]
        part_loss, dz = softcapped_loss(F.linear(part, w), target, x.shape[-1])
        loss += part_loss
        if grads:
            torch.mm(dz, w, out=dx[i: i + chunk])
            dw += dz.t() @ part
    return loss, dx, dw.to(w.dtype)


@head_loss.register_fake
def _(x, w, targets, grads):
    return (x.new_empty((), dtype=torch.float32), torch.empty_like(x if grads else x[:0]),
            torch.empty_like(w if grads else w[:0]))


def _head_backward(ctx, grad, *_):
    dx, dw = ctx.saved_tensors
    return dx * grad, dw * grad, None, None


head_loss.register_autograd(
    _head_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output[1:]))


class GPT(nn.Module):
    def __init__(self, config: Config, buffer: ActivationBuffer | None):
        super().__init__()
        n, dim = config.layers, config.dim
        self.embed = nn.Parameter(torch.randn(VOCAB, dim).bfloat16())
        self.value_embeds = nn.ParameterList(
            nn.Parameter(torch.randn(VOCAB, dim).bfloat16()) for _ in range(min(3, n // 2)))
        self.blocks = nn.ModuleList(Block(config, i, buffer) for i in range(n))
        self.head = nn.Parameter(torch.zeros(VOCAB, dim))
        # skip weights [n/2]; then by layer: x, x0, value, value embedding
        self.scalars = nn.Parameter(torch.cat([torch.ones(n // 2),
                                               torch.tensor([1, 0, 0.5, 0.5]).repeat(n)]))
        self.long = {n * i // 12 for i in (0, 4, 7, 11)}  # layers with the whole window
        frequency = (1 / 1024) ** torch.linspace(0, 1, dim // config.heads // 4)
        length = max(config.microbatch_tokens, config.val_sequence)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, window_blocks: Tensor) -> Tensor:
        """Summed loss, float32 []. tokens int32 [n], targets int64 [n], window_blocks int32 []."""
        n = len(self.blocks)
        rotary = self.cos[: len(tokens)], self.sin[: len(tokens)]
        short = attention_mask(tokens, (window_blocks + 1) // 2)
        long = attention_mask(tokens, window_blocks)
        values = [F.embedding(tokens, table) for table in self.value_embeds]
        values = values + [None] * (n - 2 * len(values)) + values
        lambdas = self.scalars[n // 2:].view(n, 4)
        x = x0 = norm(F.embedding(tokens, self.embed))
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= n // 2:
                x = x + self.scalars[i - n // 2] * skips.pop()
            mask = long if i in self.long else short
            x = block(x, x0, values[i], lambdas[i], rotary, mask)
            if i < n // 2:
                skips.append(x)
        loss, *_ = head_loss(norm(x), self.head.to(x.dtype), targets, torch.is_grad_enabled())
        return loss


# -----------------------------------------------------------------------------
# Data


def read_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, uint16, memory-mapped: 256 int32 (20240520, 1, count, 0...), tokens."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        stop(f"{path} is not a token shard: expected 20240520, 1 at its start, "
             f"received {header[:2].tolist()}")
    if size != 1024 + 2 * int(header[2]):
        stop(f"{path} is damaged: its header says {header[2]} tokens, {1024 + 2 * int(header[2])} "
             f"bytes, and it has {size} bytes; fetch it again")
    return np.memmap(path, dtype=np.uint16, mode="r", offset=1024)


def find_shards(folder: str, split: str) -> list[Path]:
    paths = sorted(Path(folder).glob(f"fineweb_{split}_*.bin"))
    if not paths:
        stop(f"no fineweb_{split}_*.bin in {folder}: fetch FineWeb with "
             f"python data/cached_fineweb10B.py, or make the sample with python data/sample.py "
             f"and pass --data data/sample")
    return paths


class TrainData:
    """Global batches: 8 microbatches of packed documents, the same whatever the number of ranks.

    Microbatches begin with documents, picked greedily in the order of the shards, at least a
    microbatch apart; within a document only where it goes on for a whole microbatch. A shard's end
    that does not fill a global batch is not used.
    """

    def __init__(self, config: Config):
        self.tokens = config.microbatch_tokens
        self.shards, self.batches = [], []  # a batch: (shard, 8 first tokens)
        paths = find_shards(config.data, "train")
        for path in paths * config.epochs:
            if len(self.batches) >= config.steps:
                break
            self._plan_shard(path, paths)
        if len(self.batches) < config.steps:
            batch = MICROBATCHES * self.tokens
            stop(f"{config.data} has {len(self.batches)} global batches of {batch} tokens in "
                 f"{len(paths)} train shards and {config.epochs} epochs, and --steps {config.steps} "
                 f"needs {config.steps}; fetch more shards, lower --steps or raise --epochs")

    def _plan_shard(self, path: Path, paths: list[Path]) -> None:
        shard = len(self.shards)
        if shard >= len(paths):  # a further epoch: the same plan
            first = shard % len(paths)
            self.shards.append(self.shards[first])
            self.batches += [(shard, starts) for s, starts in self.batches if s == first]
            return
        self.shards.append(read_shard(path))
        end = len(self.shards[-1])
        documents = np.append(np.flatnonzero(self.shards[-1] == BOS), end)
        starts, at = [], int(documents[0])
        while True:
            document = int(documents[np.searchsorted(documents, at)])
            start = document if document - at < self.tokens else at
            at = start + self.tokens
            if at >= end:  # the last target is the token at `at`
                break
            starts.append(start)
        for i in range(0, len(starts) - MICROBATCHES + 1, MICROBATCHES):
            self.batches.append((shard, starts[i: i + MICROBATCHES]))

    def microbatch(self, step: int, i: int) -> Tensor:
        """Tokens and the one after, int32 [microbatch_tokens + 1]."""
        shard, starts = self.batches[step]
        tokens = self.shards[shard][starts[i]: starts[i] + self.tokens + 1]
        return torch.from_numpy(tokens.astype(np.int32))


class ValData:
    """The first val_tokens of the val shards, in sequences of val_sequence that need not begin a
    document."""

    def __init__(self, config: Config):
        parts, wanted = [], config.val_tokens + 1
        for path in find_shards(config.data, "val"):
            parts.append(read_shard(path)[:wanted])
            wanted -= len(parts[-1])
            if not wanted:
                break
        if wanted:
            stop(f"{config.data} has {config.val_tokens + 1 - wanted} val tokens, and --val-tokens "
                 f"{config.val_tokens} needs one more than that; lower --val-tokens")
        self.tokens = np.concatenate(parts)
        self.sequence = config.val_sequence

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def sequence_at(self, i: int) -> Tensor:
        tokens = self.tokens[i * self.sequence: (i + 1) * self.sequence + 1]
        return torch.from_numpy(tokens.astype(np.int32))


def to_device(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(inputs int32, targets int64), each [len(tokens) - 1]."""
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:-1], tokens[1:].long()


# -----------------------------------------------------------------------------
# Schedules


def lr_factor(config: Config, step: int) -> float:
    left = (1 - step / config.steps) / config.cooldown
    return 1.0 if left >= 1 else left + (1 - left) * config.final_lr


def window_blocks(config: Config, step: int) -> int:
    tokens = config.window_start + (config.window_end - config.window_start) * step / config.steps
    return max(1, -int(-tokens // BLOCK))


def muon_momentum(config: Config, step: int) -> float:
    return config.muon_momentum - (config.muon_momentum - 0.85) * max(0, 1 - step / 300)


# Room above what was needed: density moves by some percent between batches once it has settled, and
# an overflow costs two steps.
MARGIN = 1.1
RESIZE_STEP = 16 * 2 ** 20  # bytes; and no shrinking by less than a tenth: no thrashing


def first_capacity(config: Config) -> int:
    """Bytes for the values of a microbatch at density 0.5, that of the first step."""
    if config.buffer_mib:
        return config.buffer_mib * 2 ** 20
    values = 0.5 * config.layers * config.microbatch_tokens * 4 * config.dim
    return round_capacity(2 * values)


def round_capacity(needed_bytes: float) -> int:
    return int(-(-needed_bytes * MARGIN // RESIZE_STEP)) * RESIZE_STEP


# -----------------------------------------------------------------------------
# Logging


class HostCopy:
    """A device tensor on its way to the host; tolist() waits for it."""

    def __init__(self, x: Tensor):
        self.event = None
        if x.is_cuda:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = x.clone()

    def tolist(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


class Log:
    """The run's log file in the speedrun's format, its console and its wandb run; silent but on rank 0."""

    def __init__(self, config: Config, ranks: Ranks):
        self.master = ranks.rank == 0
        self.wandb = None
        if not self.master:
            return
        self.run_id = str(uuid.uuid4())
        self.path = Path(config.log_dir) / f"{self.run_id}.txt"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("x")
        except OSError as error:
            stop(f"--log-dir {config.log_dir} cannot be written: {error.strerror}")
        for source in SOURCES:
            self.file.write(source + "=" * 100 + "\n")
        import triton
        self.print(f"Python {platform.python_version()}, torch {torch.__version__}, "
                   f"triton {triton.__version__}, numpy {np.__version__}", console=False)
        self.print(f"config: {json.dumps(asdict(config) | {'world_size': ranks.world_size})}",
                   console=False)
        smi = shutil.which("nvidia-smi")
        self.print(subprocess.run([smi], capture_output=True, text=True).stdout if smi
                   else "no nvidia-smi on this machine", console=False)
        self.file.write("=" * 100 + "\n")
        self.print(describe_device(ranks))
        if config.wandb:
            self.start_wandb(config)

    def start_wandb(self, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            stop("wandb is not installed: pip install -r requirements.txt, or pass --no-wandb")
        mode = os.environ.get("WANDB_MODE")
        if mode is None:
            login = os.environ.get("WANDB_API_KEY") or wandb.setup().settings.api_key
            mode = "online" if login else "offline"
        self.wandb = wandb.init(
            project="bitsparse-speedrun", name=f"{config.mlp}-{self.run_id[:8]}", mode=mode,
            config=asdict(config) | {"run_id": self.run_id},
            settings=wandb.Settings(silent=True, console="off"))
        self.print(f"wandb: {mode}, {self.wandb.dir}")

    def print(self, line: str, console: bool = True) -> None:
        if self.master:
            self.file.write(line + "\n")
            self.file.flush()
            if console:
                print(line, flush=True)

    def metrics(self, values: dict, step: int) -> None:
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    def finish(self) -> None:
        if self.master:
            self.file.close()
            if self.wandb is not None:
                self.wandb.finish()


def describe_device(ranks: Ranks) -> str:
    if ranks.device.type == "cpu":
        return f"CPU only, {torch.get_num_threads()} threads: no kernel of Triton runs, the " \
               f"reference does"
    return f"{ranks.world_size} x {torch.cuda.get_device_name(ranks.device)}, Triton kernels"


# -----------------------------------------------------------------------------
# Training


def saved_bytes(model: GPT, buffer: ActivationBuffer | None, tokens: Tensor, targets: Tensor,
                blocks: Tensor) -> int:
    """Bytes held for backward after a forward: saved tensors, each storage once, and the buffer's use.

    Parameters are not counted: they are there anyway.
    """
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return t

    if buffer is not None:
        buffer.reset()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, targets, blocks)
    held = sum(storage.nbytes() for storage in storages.values())
    del loss
    return held + (int(buffer.used_bytes()) if buffer is not None else 0)


class Trainer:
    def __init__(self, config: Config, ranks: Ranks, log: Log):
        self.config, self.ranks, self.log = config, ranks, log
        self.train, self.val = TrainData(config), ValData(config)
        self.buffer = None
        if config.mlp == "bitsparse":
            self.buffer = ActivationBuffer(first_capacity(config), ranks.device, config.layers)
        torch.manual_seed(config.seed)
        self.model = GPT(config, self.buffer).to(ranks.device)
        self.forward = compiled(self.model)
        for p in self.model.parameters():  # kept from step to step, and so not counted as activation
            p.grad = torch.zeros_like(p)
        matrices = list(self.model.blocks.parameters())
        self.muon = Muon(matrices, ranks)
        self.adam = Adam([(self.model.embed, 75), *((t, 75) for t in self.model.value_embeds),
                          (self.model.head, 27.5), (self.model.scalars, 5)], ranks)
        self.bytes_per_token = 0.0  # of a microbatch, the most in the last step

    def blocks(self, step: int) -> Tensor:
        blocks = torch.tensor(window_blocks(self.config, step), dtype=torch.int32)
        return blocks.pin_memory().to(self.ranks.device, non_blocking=True) \
            if self.ranks.device.type == "cuda" else blocks

    def step(self, step: int) -> tuple[HostCopy, object]:
        """One optimizer step, enqueued. Returns (loss sum, overflow) over ranks, and the snapshot."""
        ranks, config = self.ranks, self.config
        cuda = ranks.device.type == "cuda"
        loss_sum = torch.zeros((), device=ranks.device)
        blocks = self.blocks(step)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for i in range(ranks.accumulation):
            tokens, targets = to_device(
                self.train.microbatch(step, i * ranks.world_size + ranks.rank), ranks.device)
            if self.buffer is not None:
                self.buffer.reset()
            loss = self.forward(tokens, targets, blocks)
            loss.backward()
            loss_sum += loss.detach()
            del loss
        if cuda:
            held = self.buffer.capacity_bytes if self.buffer is not None else 0
            peak = torch.cuda.max_memory_allocated()
            self.bytes_per_token = (peak - before + held) / config.microbatch_tokens

        overflow = (self.buffer.overflowed().float() if self.buffer is not None
                    else torch.zeros_like(loss_sum))
        # the one reduction of small things: the scalars' gradient, the loss, the overflow
        small = torch.cat([self.model.scalars.grad, loss_sum[None], overflow[None]])
        ranks.sum_(small)
        self.model.scalars.grad.copy_(small[:-2] / ranks.world_size)
        ok = small[-1] == 0
        factor = lr_factor(config, step)
        self.muon.step(config.muon_lr * factor, muon_momentum(config, step), ok)
        self.adam.step(config.adam_lr * factor, step + 1, ok)
        torch._foreach_zero_([p.grad for p in self.model.parameters()])
        snapshot = self.buffer.snapshot() if self.buffer is not None else None
        return HostCopy(small[-2:]), snapshot

    @torch.no_grad()
    def validate(self, step: int) -> float:
        """Mean loss of the val tokens, over all ranks."""
        loss = torch.zeros((), device=self.ranks.device)
        blocks = self.blocks(step)
        for i in range(self.ranks.rank, len(self.val), self.ranks.world_size):
            loss += self.forward(*to_device(self.val.sequence_at(i), self.ranks.device), blocks)
        self.ranks.sum_(loss)
        return loss.item() / self.config.val_tokens

    def warm_up(self) -> None:
        """Compile and tune everything, then restore the state."""
        state = [*self.model.parameters(), *self.muon.state(), *self.adam.state()]
        initial = [t.detach().clone() for t in state]
        for _ in range(2):
            self.step(0)
        self.validate(0)
        with torch.no_grad():
            for t, value in zip(state, initial, strict=True):
                t.copy_(value)

    def handle_overflow(self, step: int, snapshot) -> None:
        """After an overflow on any rank: room for what this rank needed, and the flag cleared."""
        if snapshot.overflowed:
            needed, had = snapshot.needed_bytes, self.buffer.capacity_bytes
            capacity = round_capacity(needed)
            try:
                self.buffer.resize(capacity)
            except torch.cuda.OutOfMemoryError:
                stop(f"step {step} needs {needed} bytes of activation buffer, it has {had}, and "
                     f"{capacity} bytes are not free on the GPU; lower --microbatch-tokens, or use "
                     f"--mlp checkpoint")
            self.log.print(f"buffer overflow in step {step + 1}: {needed} bytes needed, {had} there; "
                           f"now {capacity}, repeating from that step")


def count_saved(trainer: Trainer) -> dict[str, float]:
    """Bytes a token held for backward, with --mlp dense and as it is: the slope between two lengths.

    The slope leaves out what does not grow with the tokens (weights in bf16, the head's gradient).
    """
    tokens, targets = to_device(trainer.train.microbatch(0, 0), trainer.ranks.device)
    half = len(tokens) // 2
    blocks = trainer.blocks(trainer.config.steps)
    result = {}
    mlps = [block.mlp for block in trainer.model.blocks]
    for save in dict.fromkeys(["dense", trainer.config.mlp]):
        for mlp in mlps:
            mlp.save = save
        buffer = trainer.buffer if save == "bitsparse" else None
        long, short = (saved_bytes(trainer.model, buffer, tokens[:n], targets[:n], blocks)
                       for n in (2 * half, half))
        result[save] = (long - short) / half
    return result


def main() -> None:
    config = parse_config(sys.argv[1:])
    ranks = start_ranks()
    log = Log(config, ranks)
    trainer = Trainer(config, ranks, log)
    buffer = trainer.buffer
    tokens_per_step = MICROBATCHES * config.microbatch_tokens
    parameters = sum(p.numel() for p in trainer.model.parameters())
    log.print(f"{parameters} parameters, {config.steps} steps of {tokens_per_step} tokens from "
              f"{config.data}, --mlp {config.mlp}")
    trainer.warm_up()

    train_ms, first_val, val_loss = 0.0, None, None
    losses: list[float] = []
    bytes_per_token = 0.0
    overflows, resized_at = 0, 0
    pending = None  # (step, loss and overflow, snapshot) of the step before, still on its way
    step, resume_clock = 0, None

    def synchronize():
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def settle() -> int | None:
        """Read the pending step. Returns the step to go back to if it overflowed."""
        nonlocal pending, overflows, resized_at, bytes_per_token
        if pending is None:
            return None
        at, values, snapshot, vram = pending
        pending = None
        loss_sum, overflow = values.tolist()
        if overflow:
            overflows += 1
            trainer.handle_overflow(at, snapshot)
            resized_at = at
            return at
        losses.append(loss_sum / tokens_per_step)
        bytes_per_token = max(bytes_per_token, vram)
        elapsed = train_ms + 1000 * (time.perf_counter() - resume_clock)
        log.print(f"step:{at + 1}/{config.steps} train_loss:{losses[-1]:.6f} "
                  f"train_time:{elapsed:.0f}ms step_avg:{elapsed / (at + 1):.2f}ms")
        metrics = {"loss": losses[-1], "lr": config.muon_lr * lr_factor(config, at),
                   "step_ms": elapsed / (at + 1),
                   "tokens_per_second": tokens_per_step * (at + 1) / elapsed * 1000,
                   "vram/bytes_per_token": vram}
        if ranks.device.type == "cuda":
            metrics["vram/peak_mib"] = torch.cuda.max_memory_allocated() / 2 ** 20
        if buffer is not None:
            elements = ranks.accumulation * config.microbatch_tokens * 4 * config.dim
            density = [nnz / elements for nnz in snapshot.layer_nnz]
            metrics |= {"bitsparse/density": sum(density) / len(density),
                        "bitsparse/buffer_used": snapshot.peak_bytes,
                        "bitsparse/buffer_capacity": snapshot.capacity_bytes,
                        "bitsparse/overflows": overflows}
            metrics |= {f"bitsparse/density/{i}": d for i, d in enumerate(density)}
            wanted = round_capacity(snapshot.peak_bytes)
            if not config.buffer_mib and at >= resized_at + 10 and wanted < 0.9 * buffer.capacity_bytes:
                buffer.resize(wanted)
                resized_at = at
        log.metrics(metrics, at + 1)
        return None

    synchronize()
    resume_clock = time.perf_counter()
    while True:
        last = step == config.steps
        if last or step == 0 or (config.val_every and step % config.val_every == 0):
            back = settle()
            if back is not None:
                step = back
                continue
            synchronize()
            train_ms += 1000 * (time.perf_counter() - resume_clock)  # the clock stops
            val_loss = trainer.validate(step)
            first_val = val_loss if first_val is None else first_val
            log.print(f"step:{step}/{config.steps} val_loss:{val_loss:.4f} train_time:{train_ms:.0f}ms "
                      f"step_avg:{train_ms / max(step, 1):.2f}ms")
            log.metrics({"val_loss": val_loss}, step)
            synchronize()
            resume_clock = time.perf_counter()  # and goes on
            if last:
                break
        enqueued = (step, *trainer.step(step), trainer.bytes_per_token)
        back = settle()
        pending = enqueued
        step += 1
        if back is not None:
            pending, step = None, back
    finish(trainer, log, dict(first_val=first_val, val_loss=val_loss, train_ms=train_ms,
                              bytes_per_token=bytes_per_token, overflows=overflows))


def finish(trainer: Trainer, log: Log, run: dict) -> None:
    config, ranks = trainer.config, trainer.ranks
    cuda = ranks.device.type == "cuda"
    tokens = config.steps * MICROBATCHES * config.microbatch_tokens
    digest = hashlib.sha256()
    for p in trainer.model.parameters():
        digest.update(p.detach().view(torch.uint8).cpu().numpy().tobytes())
    log.print(f"weights sha256: {digest.hexdigest()}")
    if cuda:
        log.print(f"peak memory allocated: {torch.cuda.max_memory_allocated() // 2 ** 20} MiB "
                  f"reserved: {torch.cuda.max_memory_reserved() // 2 ** 20} MiB")
        log.print(f"bytes/token: {run['bytes_per_token']:.0f} (VRAM of a microbatch, "
                  f"--mlp {config.mlp})")
    else:
        saved = count_saved(trainer)
        log.print("saved for backward, bytes/token:")
        for save, size in saved.items():
            log.print(f"  --mlp {save:<10} {size:9.0f}  {size / saved['dense']:6.3f} of dense")
    log.print(f"val loss: {run['first_val']:.4f} at the start, {run['val_loss']:.4f} at the end")
    log.print(f"tokens/s: {tokens / run['train_ms'] * 1000:.0f}")
    if log.master:
        print(f"log: {log.path}")
        if log.wandb is not None:
            print(f"wandb: {log.wandb.dir}")
    log.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
