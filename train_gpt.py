"""Trains the GPT of the Modded-NanoGPT speedrun with its ReLU² activations saved compressed.

Model and recipe are those of the speedrun's record of 2025-07-12 (#26: 3.28 on FineWeb after 1750
steps of 393,216 tokens). What differs is how the MLP's hidden activation is kept for backward:

    --mlp bitsparse    bitmask + packed positive values (bitsparse_kernels.py), lossless
    --mlp dense        relu(z)² only, in bf16
    --mlp checkpoint   not at all; backward computes it again
    --mlp eager        F.linear(relu(z).square()), left to torch.compile

    python train_gpt.py --preset tiny --data data/sample                      # CPU, minutes
    torchrun --standalone --nproc_per_node=1 train_gpt.py --preset speedrun   # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset speedrun   # eight

The global batch is 8 microbatches whatever the number of GPUs (1, 2, 4 or 8): each accumulates over
8 / world_size of them. With --mlp bitsparse a step that overflows the buffer has no effect, which
the device decides; a step later the host sees it, enlarges the buffer and repeats from that step.
"""
import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
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
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import bitsparse_kernels
from bitsparse_kernels import ActivationBuffer, BufferSnapshot, relu2_mlp

SOURCES = [Path(__file__).read_text(), Path(bitsparse_kernels.__file__).read_text()]  # for the log

# -----------------------------------------------------------------------------
# Config

MICROBATCHES = 8  # a global batch, over all ranks
BOS = 50256  # GPT-2's <|endoftext|>, which opens every document
VOCAB = 50304  # GPT-2's 50,257 tokens, rounded up to a multiple of 128
BLOCK = 128  # tokens; attention windows and masks are made of such blocks
# Tokens whose logits exist at a time, 100,608 bytes a token in bf16: on a GPU about what the last
# MLP's backward takes too; on a CPU what malloc takes from its heap and not from fresh pages.
HEAD_CHUNK = {"cuda": 3072, "cpu": 128}
# Room above what the buffer was seen to need: density moves by some percent between batches, and an
# overflow costs two steps. It shrinks only by more than a tenth, and not within SETTLE steps.
MARGIN, SETTLE, MIB = 1.1, 10, 2 ** 20


def option(default, help: str, choices: tuple[str, ...] | None = None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    data: str = option("data/fineweb10B", "folder of fineweb_train_*.bin and fineweb_val_*.bin")
    epochs: int = option(1, "passes over the train shards that the run may make")
    steps: int = option(1750, "optimizer steps, each of 8 microbatches over all GPUs")
    microbatch_tokens: int = option(49152, "tokens of a microbatch, a multiple of 128")
    val_tokens: int = option(10485760, "validation tokens, the first of the val shards")
    val_sequence: int = option(262144, "tokens of a validation sequence, a multiple of 128")
    val_every: int = option(125, "steps between validations (0: only at the end)")
    layers: int = option(12, "transformer blocks, an even number from 4 on")
    dim: int = option(768, "width of the residual stream")
    heads: int = option(6, "attention heads")
    window_start: int = option(128, "attention window at the start, in tokens")
    window_end: int = option(1792, "attention window at the end, in tokens")
    cooldown: float = option(0.45, "fraction of the steps over which the learning rates fall")
    final_lr: float = option(0.1, "learning rates at the end, as a fraction of their value")
    muon_lr: float = option(0.05, "learning rate of the matrices of attention and MLP")
    muon_momentum: float = option(0.95, "momentum of Muon, reached from 0.85 over 300 steps")
    adam_lr: float = option(0.008, "learning rate of the rest (embeddings x75, head x27.5, "
                                   "scalars x5)")
    mlp: str = option("bitsparse", "how the MLP's hidden activation is saved for backward",
                      ("bitsparse", "dense", "checkpoint", "eager"))
    buffer_mib: int = option(0, "first and least size of the activation buffer in MiB (0: for a "
                                "density of 0.5 with a margin of a tenth, then as needed)")
    seed: int = option(0, "seed of the initial weights")
    log_dir: str = option("logs", "folder of the run's log")
    wandb: bool = option(True, "log to wandb (offline where nobody is logged in)")


PRESETS = {
    "speedrun": {},  # FineWeb to 3.28
    "offline": dict(steps=54, val_tokens=524288, val_every=0),  # the same model on 21 M tokens
    "tiny": dict(steps=80, microbatch_tokens=256, val_tokens=16384, val_sequence=1024, val_every=20,
                 layers=4, dim=128, heads=2, window_end=256),  # a CPU and minutes
}


def parse_config(arguments: list[str]) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "speedrun" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--preset", choices=PRESETS, default=default,
                        help=f"the other options' defaults (here: {default})")
    asked = [a for a in arguments if a not in ("-h", "--help")]
    preset = PRESETS[parser.parse_known_args(asked)[0].preset]
    for f in fields(Config):
        default = preset.get(f.name, f.default)
        how = {"action": argparse.BooleanOptionalAction} if f.type is bool else \
            {"type": f.type, "choices": f.metadata["choices"]}
        parser.add_argument("--" + f.name.replace("_", "-"), default=default, **how,
                            help=f"{f.metadata['help']} (here: {default})")
    given = vars(parser.parse_args(arguments))
    c = Config(**{f.name: given[f.name] for f in fields(Config)})
    for name, right, expected in (
            ("layers", c.layers >= 4 and c.layers % 2 == 0, "an even number from 4 on"),
            ("heads", c.heads >= 1, "1 or more"),
            ("dim", c.heads < 1 or (c.dim > 0 and c.dim % (4 * c.heads) == 0),
             f"a multiple of 4 x --heads ({4 * c.heads})"),
            ("microbatch_tokens", c.microbatch_tokens > 0 and c.microbatch_tokens % BLOCK == 0,
             f"a multiple of {BLOCK}"),
            ("val_sequence", c.val_sequence > 0 and c.val_sequence % BLOCK == 0,
             f"a multiple of {BLOCK}"),
            ("val_tokens", c.val_sequence < 1 or
             (c.val_tokens > 0 and c.val_tokens % c.val_sequence == 0),
             f"a multiple of --val-sequence ({c.val_sequence})"),
            ("steps", c.steps >= 1, "1 or more"), ("epochs", c.epochs >= 1, "1 or more"),
            ("val_every", c.val_every >= 0, "0 or more"),
            ("buffer_mib", c.buffer_mib >= 0, "0 or more"),
            ("cooldown", 0 < c.cooldown <= 1, "a number above 0, at most 1")):
        if not right:
            parser.error(f"argument --{name.replace('_', '-')}: expected {expected}, "
                         f"received {getattr(c, name)}")
    return c


def stop(sentence: str) -> None:
    """End the run for a reason that its user can mend."""
    sys.exit(f"train_gpt.py: {sentence}")


# -----------------------------------------------------------------------------
# Ranks: a process a GPU, started by torchrun; or one process, without


@dataclass
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    def sum_(self, x: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(x)

    def scatter_mean(self, x: Tensor) -> Tensor:
        """This rank's part along dimension 0 of the mean of x over the ranks."""
        if self.world_size == 1:
            return x
        part = torch.empty_like(self.part(x))
        dist.reduce_scatter_tensor(part, x / self.world_size)
        return part

    def gather(self, part: Tensor) -> Tensor:
        if self.world_size == 1:
            return part
        whole = part.new_empty((part.shape[0] * self.world_size, *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part)
        return whole

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.world_size)[self.rank]


def start_ranks() -> Ranks:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if MICROBATCHES % world_size:
        stop(f"expected 1, 2, 4 or 8 processes, received {world_size}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            stop(f"expected a GPU of compute capability 8.0 or more, for bf16; "
                 f"received {torch.cuda.get_device_name()}, {capability[0]}.{capability[1]}")
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
# Both split their state over the ranks, and both take `ok`, a bool on the device: where it is
# false, parameters and state keep their bits.


@compiled
def muon_momentum_(g: Tensor, momentum: Tensor, beta: Tensor, ok: Tensor) -> Tensor:
    """Nesterov's direction, bf16; updates momentum in place. g, momentum [n, r, c] float32."""
    new = momentum.lerp(g, 1 - beta)
    momentum.copy_(torch.where(ok, new, momentum))
    return g.lerp(new, beta).bfloat16()


@compiled
def orthogonalize(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest semi-orthogonal matrix; x [n, r, c] bf16."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.775 * s + 2.0315 * s @ s) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalized; for the matrices in parameters of shape [..., rows, columns]."""

    def __init__(self, params: list[nn.Parameter], ranks: Ranks):
        self.ranks = ranks
        self.groups = []  # by shape: matrices, their gradients, padding, this rank's momentum
        for shape in dict.fromkeys(p.shape[-2:] for p in params):
            own = [p for p in params if p.shape[-2:] == shape]
            matrices = [m for p in own for m in p.data.view(-1, *shape).unbind()]
            gradients = [m for p in own for m in p.grad.view(-1, *shape).unbind()]
            padding = -len(matrices) % ranks.world_size
            part = (len(matrices) + padding) // ranks.world_size
            self.groups.append((matrices, gradients, padding, matrices[0].new_zeros(part, *shape)))
        self.state = [momentum for *_, momentum in self.groups]

    @torch.no_grad()
    def step(self, lr: float, beta: float, ok: Tensor) -> None:
        for matrices, gradients, padding, momentum in self.groups:
            g = torch.stack([*gradients, *[torch.zeros_like(matrices[0])] * padding])
            g = muon_momentum_(self.ranks.scatter_mean(g), momentum, torch.tensor(beta), ok)
            update = self.ranks.gather(orthogonalize(g))[: len(matrices)]
            rows, columns = update.shape[1:]
            update = update.float() * (lr * max(1, rows / columns) ** 0.5)
            torch._foreach_sub_(matrices, torch.where(ok, update, 0).unbind())


@compiled
def adam_(p: Tensor, g: Tensor, mean: Tensor, square: Tensor, lr: Tensor, ok: Tensor) -> None:
    """In place; moments in p's dtype. lr: with both bias corrections."""
    g = g.float()
    new_mean = mean.float().lerp(g, 1 - Adam.betas[0])
    new_square = square.float().lerp(g.square(), 1 - Adam.betas[1])
    new = p.float() - lr * new_mean / (new_square.sqrt() + Adam.eps)
    for old, value in ((mean, new_mean), (square, new_square), (p, new)):
        old.copy_(torch.where(ok, value.to(old.dtype), old))


class Adam:
    """For embeddings, head and scalars: (parameter, factor on the learning rate)."""

    betas, eps = (0.8, 0.95), 1e-10

    def __init__(self, params: list[tuple[nn.Parameter, float]], ranks: Ranks):
        self.ranks = ranks
        self.groups = []  # parameter, factor, this rank's part of it and of its moments
        for p, factor in params:  # a table's rows are split over the ranks; scalars are not
            part = ranks.part(p.data) if p.dim() > 1 else p.data
            self.groups.append((p, factor, part, torch.zeros_like(part), torch.zeros_like(part)))
        self.state = [moment for *_, mean, square in self.groups for moment in (mean, square)]

    @torch.no_grad()
    def step(self, lr: float, number: int, ok: Tensor) -> None:
        """number: from 1. The host counts, as a step that was not ok is made again."""
        lr *= (1 - self.betas[1] ** number) ** 0.5 / (1 - self.betas[0] ** number)
        for p, factor, part, mean, square in self.groups:
            g = self.ranks.scatter_mean(p.grad) if p.dim() > 1 else p.grad
            adam_(part, g, mean, square, torch.tensor(lr * factor), ok)
            if part.numel() < p.numel():
                p.data.copy_(self.ranks.gather(part))


# -----------------------------------------------------------------------------
# Model


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, x [tokens, heads, d], cos and sin [tokens, d / 4].

    Dimension i turns with dimension d / 2 + i, for i < d / 4; the other pairs stand still.
    """
    a, still_a, b, still_b = x.float().chunk(4, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos + b * sin, still_a, b * cos - a * sin, still_b], -1).to(x.dtype)


def attention_mask(tokens: Tensor, window_blocks: Tensor) -> BlockMask | Tensor:
    """A token sees those before it in its own document, in blocks less than window_blocks back.

    tokens [n], window_blocks []. For FlexAttention; on a CPU a bool [n, n] for SDPA.
    """
    document = (tokens == BOS).cumsum(0)
    first, last = document[::BLOCK], document[BLOCK - 1::BLOCK]
    block = torch.arange(len(first), device=tokens.device)
    back = block[:, None] - block
    seen = (back >= 0) & (back < window_blocks) & (last >= first[:, None])  # [queries, keys]
    whole = seen & (back > 0) & (first == last[:, None])

    def causal_in_document(b, h, q, k):
        return (q >= k) & (document[q] == document[k])

    if not tokens.is_cuda:
        i = torch.arange(len(tokens))
        in_window = seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return in_window & causal_in_document(0, 0, i[:, None], i)

    def listed(blocks):  # how many, and which ones first
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None].contiguous()

    return BlockMask.from_kv_blocks(*listed(seen & ~whole), *listed(whole), BLOCK_SIZE=BLOCK,
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
        q, k, v = rotate(norm(q), *rotary), rotate(norm(k), *rotary), lambdas[0] * norm(v)
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


@triton.jit
def _softcapped_loss_kernel(z_ptr, target_ptr, loss_ptr, inverse_ptr, scale, columns,
                            BLOCK: tl.constexpr):
    """Cross entropy of one token's logits, 30 sigmoid(scale z), and its gradient, in one pass.

    z_ptr [n, columns] bf16, replaced by gradient * sum(exp(logits - 30)): that sum is known only at
    the end, and the caller puts its inverse, inverse_ptr [n] float32, into the small operands of
    the GEMMs that follow. target_ptr [n] int64, loss_ptr [n] float32. Grid: n. No logit passes 30,
    so no maximum is needed.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * columns
    target = tl.load(target_ptr + row)
    target_s = tl.sigmoid(tl.load(z_ptr + target).to(tl.float32) * scale)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        s = tl.sigmoid(tl.load(z_ptr + i, mask=i < columns, other=0.0).to(tl.float32) * scale)
        e = tl.where(i < columns, tl.exp(30 * s - 30), 0.0)
        sums += e
        dz = e * (30 * scale) * s * (1 - s)
        tl.store(z_ptr + i, dz.to(tl.bfloat16), mask=(i < columns) & (i != target))
    total = tl.sum(sums)
    dz = (tl.exp(30 * target_s - 30) - total) * (30 * scale) * target_s * (1 - target_s)
    tl.store(z_ptr + target, dz.to(tl.bfloat16))
    tl.store(loss_ptr + row, tl.log(total) - (30 * target_s - 30))
    tl.store(inverse_ptr + row, 1 / total)


def softcapped_loss_(z: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(loss, inverse), float32 [n]; z becomes its gradient / inverse: _softcapped_loss_kernel."""
    if z.is_cuda:
        loss, inverse = torch.empty((2, len(z)), dtype=torch.float32, device=z.device)
        _softcapped_loss_kernel[(len(z),)](z, targets, loss, inverse, scale, z.shape[1], BLOCK=4096,
                                           num_warps=8)
        return loss, inverse
    s = torch.sigmoid(z.float() * scale)
    e = torch.exp(30 * s - 30)
    total = e.sum(-1, keepdim=True)
    loss = total.log() - (30 * s.gather(-1, targets[:, None]) - 30)
    e.scatter_add_(-1, targets[:, None], -total)
    z.copy_(e * (30 * scale) * s * (1 - s))
    return loss[:, 0], 1 / total[:, 0]


# One operator, so that the compiler does not reorder the chunks and hold all logits after all.
@torch.library.custom_op("speedrun::head_loss", mutates_args=())
def head_loss(x: Tensor, w: Tensor, targets: Tensor, grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross entropy of 30 sigmoid(z / (7.5 √d)), z = x wᵀ, HEAD_CHUNK tokens at a time.

    x [tokens, d], w [VOCAB, d] bf16. Returns the loss, float32 [], and, if grads, its gradients dx
    and dw, made here since a chunk's logits are at hand: all of them never exist at once.
    """
    losses = []
    dx = torch.empty_like(x if grads else x[:0])
    dw = torch.zeros_like(w if grads else w[:0], dtype=torch.float32)
    chunk = HEAD_CHUNK[x.device.type]
    for i in range(0, len(x), chunk):
        part = x[i: i + chunk]
        z = F.linear(part, w)
        loss, inverse = softcapped_loss_(z, targets[i: i + chunk], 1 / (7.5 * x.shape[-1] ** 0.5))
        losses.append(loss.sum())
        if grads:
            torch.mm(z, w, out=dx[i: i + chunk])
            dx[i: i + chunk] *= inverse[:, None]
            part = (part * inverse[:, None]).to(x.dtype)
            if z.is_cuda:
                torch.addmm(dw, z.t(), part, out_dtype=torch.float32, out=dw)
            else:
                dw += z.t() @ part
    return torch.stack(losses).sum(), dx, dw.to(w.dtype)


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
        self.value_embeds = nn.ParameterList(  # of the first and of the last layers
            nn.Parameter(torch.randn(VOCAB, dim).bfloat16()) for _ in range(min(3, n // 2)))
        self.blocks = nn.ModuleList(Block(config, i, buffer) for i in range(n))
        self.head = nn.Parameter(torch.zeros(VOCAB, dim))
        # skip weights [n / 2]; then for each layer the factors of x, x0, value, value embedding
        self.scalars = nn.Parameter(torch.cat([torch.ones(n // 2),
                                               torch.tensor([1, 0, 0.5, 0.5]).repeat(n)]))
        self.long = {n * i // 12 for i in (0, 4, 7, 11)}  # layers with the whole window
        frequency = (1 / 1024) ** torch.linspace(0, 1, dim // config.heads // 4)
        length = max(config.microbatch_tokens, config.val_sequence)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, window_blocks: Tensor) -> Tensor:
        """Summed loss, float32 []. tokens int32 [t], targets int64 [t], window_blocks int32 []."""
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
        return head_loss(norm(x), self.head.to(x.dtype), targets, torch.is_grad_enabled())[0]


# -----------------------------------------------------------------------------
# Data


def read_shards(folder: str, split: str) -> list[np.ndarray]:
    """The tokens of each shard in order, uint16, memory-mapped.

    A shard: 256 int32 (20240520, 1, number of tokens, 0, ...), then the tokens.
    """
    paths = sorted(Path(folder).glob(f"fineweb_{split}_*.bin"))
    if not paths:
        stop(f"no fineweb_{split}_*.bin in {folder}; fetch FineWeb with python "
             f"data/cached_fineweb10B.py, or make the sample with python data/sample.py and pass "
             f"--data data/sample")
    shards = []
    for path in paths:
        header, size = np.fromfile(path, dtype=np.int32, count=256), path.stat().st_size
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            stop(f"{path} is no shard of tokens: expected it to begin with 20240520, 1, "
                 f"received {header[:2].tolist()}")
        expected = 1024 + 2 * int(header[2])
        if size != expected:
            stop(f"{path} is damaged: expected {expected} bytes for the {header[2]} tokens of its "
                 f"header, received {size}; fetch or make it again")
        shards.append(np.memmap(path, dtype=np.uint16, mode="r", offset=1024)
                      if header[2] else np.empty(0, np.uint16))
    return shards


class TrainData:
    """Global batches: 8 microbatches of packed documents, the same whatever the number of ranks.

    Microbatches begin with documents, picked greedily in the order of the shards, at least a
    microbatch apart; within a document only where it goes on for a whole microbatch. A shard's end
    that does not fill a global batch is not used.
    """

    def __init__(self, config: Config):
        self.tokens = config.microbatch_tokens
        self.shards = read_shards(config.data, "train")
        self.batches = []  # (shard, first token of each microbatch)
        for shard, tokens in enumerate(self.shards):
            if len(self.batches) < config.steps:
                starts = self.find_starts(tokens)
                self.batches += [(shard, starts[i: i + MICROBATCHES])
                                 for i in range(0, len(starts) - MICROBATCHES + 1, MICROBATCHES)]
        if len(self.batches) * config.epochs < config.steps:
            stop(f"{config.data} has {len(self.batches)} batches of {MICROBATCHES} x {self.tokens} "
                 f"tokens, {config.epochs} times (--epochs), and --steps is {config.steps}; fetch "
                 f"more shards, lower --steps or raise --epochs")

    def find_starts(self, tokens: np.ndarray) -> list[int]:
        documents = np.append(np.flatnonzero(tokens == BOS), len(tokens))
        starts, at = [], int(documents[0])
        while True:
            document = int(documents[np.searchsorted(documents, at)])
            start = document if document - at < self.tokens else at
            at = start + self.tokens
            if at >= len(tokens):  # where the last target stands
                return starts
            starts.append(start)

    def microbatch(self, step: int, i: int) -> Tensor:
        """int32 [microbatch_tokens + 1]: the tokens and the one after."""
        shard, starts = self.batches[step % len(self.batches)]
        return torch.from_numpy(
            self.shards[shard][starts[i]: starts[i] + self.tokens + 1].astype(np.int32))


class ValData:
    """The first val_tokens of the val shards, cut into sequences wherever they come to be cut."""

    def __init__(self, config: Config):
        self.sequence, wanted = config.val_sequence, config.val_tokens + 1
        self.tokens = np.concatenate(read_shards(config.data, "val"))[:wanted]
        if len(self.tokens) < wanted:
            stop(f"{config.data} has {len(self.tokens)} val tokens, and --val-tokens "
                 f"{config.val_tokens} needs {wanted}, the last target among them; lower it")

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def __getitem__(self, i: int) -> Tensor:
        return torch.from_numpy(
            self.tokens[i * self.sequence: (i + 1) * self.sequence + 1].astype(np.int32))


# -----------------------------------------------------------------------------
# Schedules


def lr_factor(config: Config, step: int) -> float:
    left = min(1, (1 - step / config.steps) / config.cooldown)
    return left + (1 - left) * config.final_lr


def window_blocks(config: Config, step: int) -> int:
    tokens = config.window_start + (config.window_end - config.window_start) * step / config.steps
    return max(1, -int(-tokens // BLOCK))


def muon_beta(config: Config, step: int) -> float:
    return config.muon_momentum - (config.muon_momentum - 0.85) * max(0, 1 - step / 300)


def buffer_capacity(config: Config, needed_bytes: float) -> int:
    """What was needed and the margin, in steps of 16 MiB; --buffer-mib at least."""
    return max(config.buffer_mib * MIB, -int(-needed_bytes * MARGIN // (16 * MIB)) * 16 * MIB)


# -----------------------------------------------------------------------------
# Logging


class HostCopy:
    """A device tensor on its way to the host; tolist() waits for it."""

    def __init__(self, x: Tensor):
        self.event = None
        if x.is_cuda:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.host = x.clone()

    def tolist(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


class Log:
    """The run's log file in the speedrun's format, the console, the wandb run; on rank 0 only."""

    def __init__(self, config: Config, ranks: Ranks):
        self.master, self.wandb, self.run_id = ranks.rank == 0, None, str(uuid.uuid4())
        if not self.master:
            return
        self.path = Path(config.log_dir) / f"{self.run_id}.txt"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("x")
        except OSError as error:
            stop(f"--log-dir {config.log_dir} cannot be written: {error.strerror}")
        smi = shutil.which("nvidia-smi")
        self.write(*(source + "=" * 100 for source in SOURCES),
                   f"Python {platform.python_version()}, torch {torch.__version__}, "
                   f"triton {triton.__version__}, numpy {np.__version__}",
                   "config: " + json.dumps(asdict(config) | {"world_size": ranks.world_size}),
                   subprocess.run([smi], capture_output=True, text=True).stdout if smi
                   else "no nvidia-smi on this machine", "=" * 100)
        if ranks.device.type == "cuda":
            self.print(f"{ranks.world_size} x {torch.cuda.get_device_name()}: Triton kernels")
        else:
            self.print(f"CPU only, {torch.get_num_threads()} threads: the kernels' torch reference")
        if config.wandb:
            self.start_wandb(config)

    def start_wandb(self, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            stop("wandb is not installed: pip install -r requirements.txt, or pass --no-wandb")
        mode = os.environ.get("WANDB_MODE")
        if mode is None:  # never a prompt
            login = os.environ.get("WANDB_API_KEY") or wandb.setup().settings.api_key
            mode = "online" if login else "offline"
        self.wandb = wandb.init(
            project="bitsparse-speedrun", name=f"{config.mlp}-{self.run_id[:8]}", mode=mode,
            config=asdict(config) | {"run_id": self.run_id},
            settings=wandb.Settings(silent=True, console="off"))
        self.print(f"wandb: {mode}")

    def write(self, *lines: str) -> None:
        """To the file only."""
        if self.master:
            self.file.write("".join(line + "\n" for line in lines))
            self.file.flush()

    def print(self, line: str) -> None:
        self.write(line)
        if self.master:
            print(line, flush=True)

    def metrics(self, values: dict[str, float], step: int) -> None:
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    def close(self) -> None:
        if self.master:
            print(f"log: {self.path}")
            if self.wandb is not None:
                print(f"wandb: {Path(self.wandb.dir).parent}")
                self.wandb.finish()
            self.file.close()


# -----------------------------------------------------------------------------
# Training


def saved_bytes(model: GPT, buffer: ActivationBuffer | None, *batch: Tensor) -> int:
    """Bytes held for backward: saved tensors, each storage once, and the buffer's use.

    Parameters are not counted: they are there anyway.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(t):
        storage = t.untyped_storage()  # kept, so that no address comes twice
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return t

    if buffer is not None:
        buffer.reset()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(*batch)
    del loss
    used = 0 if buffer is None else int(buffer.used_bytes())
    return sum(storage.nbytes() for storage in held.values()) + used


@dataclass
class Step:
    """A step that the device may still be at work on."""
    number: int  # from 0
    started: torch.cuda.Event | float
    sums: HostCopy  # loss and overflow, over all ranks
    snapshot: BufferSnapshot | None
    bytes_per_token: float  # VRAM of a microbatch

    def milliseconds(self) -> float:
        if self.sums.event is None:
            return 1000 * (time.perf_counter() - self.started)
        return self.started.elapsed_time(self.sums.event)


class Trainer:
    def __init__(self, config: Config, ranks: Ranks, log: Log):
        self.config, self.ranks, self.log = config, ranks, log
        self.cuda = ranks.device.type == "cuda"
        self.train, self.val = TrainData(config), ValData(config)
        self.buffer = None
        if config.mlp == "bitsparse":  # half of the bf16 elements of a microbatch, all layers
            needed = config.layers * config.microbatch_tokens * 4 * config.dim
            capacity = config.buffer_mib * MIB or buffer_capacity(config, needed)
            self.buffer = ActivationBuffer(capacity, ranks.device, config.layers)
        torch.manual_seed(config.seed)
        self.model = GPT(config, self.buffer).to(ranks.device)
        self.forward = compiled(self.model)
        for p in self.model.parameters():  # kept from step to step: no part of a step's growth
            p.grad = torch.zeros_like(p)
        self.muon = Muon(list(self.model.blocks.parameters()), ranks)
        self.adam = Adam([(self.model.embed, 75), *((t, 75) for t in self.model.value_embeds),
                          (self.model.head, 27.5), (self.model.scalars, 5)], ranks)
        self.tokens_per_step = MICROBATCHES * config.microbatch_tokens
        self.pending: Step | None = None
        self.done: list[dict[str, float]] = []  # a finished step's metrics
        self.overflows, self.resized, self.train_ms = 0, 0, 0.0

    def to_device(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.ranks.device, non_blocking=True) if self.cuda else x

    def batch(self, tokens: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs int32 [n] and targets int64 [n] from n + 1 tokens, and the attention window."""
        tokens = self.to_device(tokens)
        blocks = torch.tensor(window_blocks(self.config, step), dtype=torch.int32)
        return tokens[:-1], tokens[1:].long(), self.to_device(blocks)

    def step(self, number: int) -> Step:
        """Enqueue one optimizer step, without waiting for the device anywhere."""
        config, ranks, buffer = self.config, self.ranks, self.buffer
        started, before, bytes_per_token = time.perf_counter(), 0, 0.0
        loss_sum = torch.zeros((), device=ranks.device)
        if self.cuda:
            started = torch.cuda.Event(enable_timing=True)
            started.record()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for i in range(ranks.rank, MICROBATCHES, ranks.world_size):
            batch = self.batch(self.train.microbatch(number, i), number)
            if buffer is not None:
                buffer.reset()
            loss = self.forward(*batch)
            loss.backward()
            loss_sum += loss.detach()
            del loss
        if self.cuda:  # the buffer was there before, and is held for the microbatch all the same
            held = 0 if buffer is None else buffer.capacity_bytes
            bytes_per_token = ((torch.cuda.max_memory_allocated() - before + held)
                               / config.microbatch_tokens)

        overflow = torch.zeros_like(loss_sum) if buffer is None else buffer.overflowed().float()
        # what is small is reduced together: the scalars' gradient, the loss, the overflow
        small = torch.cat([self.model.scalars.grad, loss_sum[None], overflow[None]])
        ranks.sum_(small)
        self.model.scalars.grad.copy_(small[:-2] / ranks.world_size)
        ok = small[-1] == 0
        factor = lr_factor(config, number)
        self.muon.step(config.muon_lr * factor, muon_beta(config, number), ok)
        self.adam.step(config.adam_lr * factor, number + 1, ok)
        torch._foreach_zero_([p.grad for p in self.model.parameters()])
        snapshot = None if buffer is None else buffer.snapshot()
        return Step(number, started, HostCopy(small[-2:]), snapshot, bytes_per_token)

    @torch.no_grad()
    def validate(self, number: int) -> float:
        """Mean loss of the val tokens, over all ranks."""
        loss = torch.zeros((), device=self.ranks.device)
        for i in range(self.ranks.rank, len(self.val), self.ranks.world_size):
            loss += self.forward(*self.batch(self.val[i], number))
        self.ranks.sum_(loss)
        return loss.item() / self.config.val_tokens

    def warm_up(self) -> None:
        """Compile and tune everything, then restore the state."""
        state = [*self.model.parameters(), *self.muon.state, *self.adam.state]
        initial = [t.detach().clone() for t in state]
        for _ in range(2):
            self.step(0)
        self.validate(0)
        with torch.no_grad():
            torch._foreach_copy_(state, initial)

    def settle(self) -> int | None:
        """Read the pending step and log it. Returns where to go on if it overflowed on any rank.

        The device has the next step to work on meanwhile. Every rank comes here with the same step
        pending, so all go back together.
        """
        step, self.pending = self.pending, None
        if step is None:
            return None
        loss_sum, overflow = step.sums.tolist()
        if overflow:
            self.overflows += 1
            self.resized = step.number
            if step.snapshot.overflowed:  # on this rank
                self.grow(step)
            return step.number
        row = {"loss": loss_sum / self.tokens_per_step, "step_ms": step.milliseconds(),
               "lr": self.config.muon_lr * lr_factor(self.config, step.number),
               "vram/bytes_per_token": step.bytes_per_token}
        row["tokens_per_second"] = 1000 * self.tokens_per_step / row["step_ms"]
        if self.cuda:
            row["vram/peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        if self.buffer is not None:
            row |= self.read_snapshot(step)
        self.done.append(row)
        elapsed = self.train_ms + 1000 * (time.perf_counter() - self.clock)
        n = step.number + 1
        self.log.print(f"step:{n}/{self.config.steps} train_loss:{row['loss']:.6f} "
                       f"train_time:{elapsed:.0f}ms step_avg:{elapsed / n:.2f}ms")
        self.log.metrics(row, n)
        return None

    def read_snapshot(self, step: Step) -> dict[str, float]:
        """The buffer's part of a step's metrics; shrinks the buffer where the need has fallen."""
        snapshot, config = step.snapshot, self.config
        elements = self.tokens_per_step // self.ranks.world_size * 4 * config.dim
        density = [nnz / elements for nnz in snapshot.layer_nnz]
        self.log.write(f"buffer:{step.number + 1}/{config.steps} used:{snapshot.peak_bytes} "
                       f"capacity:{snapshot.capacity_bytes} "
                       f"density:{','.join(f'{d:.4f}' for d in density)}")
        wanted = buffer_capacity(config, snapshot.peak_bytes)
        if step.number >= self.resized + SETTLE and wanted < 0.9 * self.buffer.capacity_bytes:
            self.buffer.resize(wanted)
            self.resized = step.number
        return {"bitsparse/density": sum(density) / len(density),
                **{f"bitsparse/density/layer_{i}": d for i, d in enumerate(density)},
                "bitsparse/buffer_used": snapshot.peak_bytes,
                "bitsparse/buffer_capacity": snapshot.capacity_bytes,
                "bitsparse/bits_per_value": 16, "bitsparse/overflows": self.overflows}

    def grow(self, step: Step) -> None:
        needed, had = step.snapshot.needed_bytes, step.snapshot.capacity_bytes
        capacity = buffer_capacity(self.config, needed)
        try:
            self.buffer.resize(capacity)
        except torch.cuda.OutOfMemoryError:
            stop(f"step {step.number + 1} needs {needed} bytes of activation buffer, it has {had}, "
                 f"and {capacity} are not free on {self.ranks.device}; lower --microbatch-tokens "
                 f"or pass --mlp checkpoint")
        self.log.print(f"step {step.number + 1} overflowed the buffer: {needed} bytes needed, "
                       f"{had} there; now {capacity}, and again from that step")

    def run(self) -> tuple[float, float]:
        """Train. Returns the val loss at the start and at the end."""
        steps, every = self.config.steps, self.config.val_every
        first, number = None, 0
        self.start_clock()
        while True:
            if number in (0, steps) or (every and number % every == 0):
                back = self.settle()
                if back is not None:
                    number = back
                    continue
                self.stop_clock()
                loss = self.validate(number)
                self.log.print(f"step:{number}/{steps} val_loss:{loss:.4f} "
                               f"train_time:{self.train_ms:.0f}ms "
                               f"step_avg:{self.train_ms / max(number, 1):.2f}ms")
                self.log.metrics({"val_loss": loss}, number)
                first = loss if first is None else first
                if number == steps:
                    return first, loss
                self.start_clock()
            step = self.step(number)
            back = self.settle()  # of the step before
            self.pending = step if back is None else None
            number = number + 1 if back is None else back

    def start_clock(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.clock = time.perf_counter()

    def stop_clock(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.train_ms += 1000 * (time.perf_counter() - self.clock)

    def summarize(self, first_val: float, last_val: float) -> None:
        config, last, print_ = self.config, self.done[-1], self.log.print
        digest = hashlib.sha256()
        for p in self.model.parameters():
            digest.update(p.detach().view(torch.uint8).cpu().numpy().tobytes())
        tokens_per_second = 1000 * config.steps * self.tokens_per_step / self.train_ms
        most = max(row["vram/bytes_per_token"] for row in self.done)
        peak = max(row.get("vram/peak_mib", 0) for row in self.done)
        self.log.write("summary: " + json.dumps({
            "run_id": self.log.run_id, "mlp": config.mlp, "steps": config.steps,
            "tokens": config.steps * self.tokens_per_step, "world_size": self.ranks.world_size,
            "device": torch.cuda.get_device_name() if self.cuda else "CPU",
            "torch": torch.__version__, "triton": triton.__version__,
            "first_val_loss": first_val, "val_loss": last_val, "train_ms": self.train_ms,
            "step_ms_median": statistics.median(row["step_ms"] for row in self.done),
            "tokens_per_second": tokens_per_second, "bytes_per_token": most,
            "bytes_per_token_last": last["vram/bytes_per_token"], "peak_mib": peak,
            "density": [last[k] for k in last if k.startswith("bitsparse/density/")],
            "overflows": self.overflows, "weights_sha256": digest.hexdigest()}))
        if self.cuda:
            print_(f"peak memory allocated: {peak:.0f} MiB "
                   f"reserved: {torch.cuda.max_memory_reserved() / MIB:.0f} MiB")
            print_(f"VRAM of a microbatch, the buffer included: {most:.0f} bytes/token at most, "
                   f"{last['vram/bytes_per_token']:.0f} in the last step")
        else:
            print_("held for backward, weights apart:")
            for mlp, total, hidden in self.compare_saved():
                print_(f"  --mlp {mlp:<10} {total:7.0f} bytes/token, {hidden:5.0f} of them the "
                       f"MLP's hidden activation")
        print_(f"weights sha256: {digest.hexdigest()}")
        print_(f"val loss: {first_val:.4f} at the start, {last_val:.4f} at the end")
        print_(f"tokens/s: {tokens_per_second:.0f}")

    def compare_saved(self) -> list[tuple[str, float, float]]:
        """(mlp, bytes a token held for backward, the same less those of --mlp checkpoint).

        The slope between one length and twice that, which leaves out what does not grow with the
        tokens. Torch without a compiler, as here, holds more than a compiled model does.
        """
        tokens = self.train.microbatch(0, 0)
        half = max(1, self.config.microbatch_tokens // BLOCK // 2) * BLOCK
        totals = {}
        for mlp in dict.fromkeys(["checkpoint", "dense", self.config.mlp]):
            for block in self.model.blocks:
                block.mlp.save = mlp
            buffer = self.buffer if mlp == "bitsparse" else None
            short, long = (saved_bytes(self.model, buffer,
                                       *self.batch(tokens[:n + 1], self.config.steps))
                           for n in (half, 2 * half))
            totals[mlp] = (long - short) / half
        return [(mlp, total, total - totals["checkpoint"]) for mlp, total in totals.items()]


def main() -> None:
    config = parse_config(sys.argv[1:])
    ranks = start_ranks()
    log = Log(config, ranks)
    trainer = Trainer(config, ranks, log)
    log.print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters, {config.steps} "
              f"steps of {trainer.tokens_per_step} tokens from {config.data}, --mlp {config.mlp}")
    trainer.warm_up()
    trainer.summarize(*trainer.run())
    log.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
