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
    python train_gpt.py --resume latest     # where a stopped or killed run was saved, bit for bit

The global batch is 8 microbatches whatever the number of GPUs (1, 2, 4 or 8): each accumulates over
8 / world_size of them. With --mlp bitsparse a step that overflows the buffer has no effect, which
the device decides; a step later the host sees it, enlarges the buffer and repeats from that step.
SIGTERM or Ctrl-C end a run after the step under way, with a checkpoint; a second one at once.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

if sys.platform != "linux":
    sys.exit("train_gpt.py: Linux is needed, as Triton has no other build; on Windows use WSL 2")

# On a CPU, GNU OpenMP's threads would spin for long where they wait for one that another program
# keeps from its core: beside a single busy one, steps took 3 to 15 times as long, now twice.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

import bitsparse_kernels
from bitsparse_kernels import ActivationBuffer, BufferSnapshot, bits_per_element, relu2_mlp

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
E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max
HEAD_LARGEST = 24  # of the head's weight, as --head fp8 can tell it; the speedrun's choice
# Room above what the buffer was seen to need: density moves by some percent between batches, and an
# overflow costs two steps. It shrinks only by more than a twentieth, to the most of SETTLE steps.
MARGIN, SETTLE, MIB = 1.05, 5, 2 ** 20
# Of each token, layer and channel (of dim), with every --mlp: 6.7 bytes that are kept for backward
# and 2.3 that backward takes beside them, counted in the compiled graphs
KEPT_BYTES = 9


def option(default, help: str, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    data: str = option("data/fineweb10B", "folder of fineweb_train_*.bin and fineweb_val_*.bin")
    epochs: int = option(1, "passes over the train shards that the run may make")
    steps: int = option(1750, "optimizer steps, each of 8 microbatches over all GPUs")
    microbatch_tokens: int = option(49152, "tokens of a microbatch; fewer need less VRAM")
    val_sequence: int = option(262144, "tokens of a validation sequence")
    val_tokens: int = option(10485760, "validation tokens, the first of the val shards")
    val_every: int = option(125, "steps between validations (0: only at the end)")
    layers: int = option(12, "transformer blocks")
    heads: int = option(6, "attention heads")
    dim: int = option(768, "width of the residual stream")
    window_end: int = option(1792, "attention window at the end, in tokens; a block at the start")
    cooldown: float = option(0.45, "fraction of the steps over which the learning rates fall")
    final_lr: float = option(0.1, "learning rates at the end, as a fraction of their value")
    muon_lr: float = option(0.05, "learning rate of the matrices of attention and MLP")
    muon_momentum: float = option(0.95, "momentum of Muon, reached from 0.85 over 300 steps")
    adam_lr: float = option(0.008, "learning rate of embeddings (x75), head (x27.5), scalars (x5)")
    mlp: str = option("bitsparse", "how the MLP's hidden activation is saved for backward",
                      ("bitsparse", "dense", "checkpoint", "eager"))
    codec: str = option("raw", "how --mlp bitsparse packs its values", bitsparse_kernels.CODECS)
    storage: str = option("bfloat16", "what --mlp bitsparse keeps of a value; fp8 is not lossless",
                          tuple(str(t)[6:] for t in bitsparse_kernels.STORAGES))
    head: str = option("bf16", "what the head's logits are made of in training, not in validation",
                       ("bf16", "fp8"))
    buffer_mib: int = option(0, "least MiB of the activation buffer (0: at first for a density of "
                                "0.5 and some more, then as needed)")
    seed: int = option(0, "seed of the initial weights; nothing after them is random")
    deterministic: bool = option(False, "only deterministic algorithms, slower: for proofs of "
                                        "bit-identity")
    log_dir: str = option("logs", "folder of the run's log, and of its checkpoints in <run id>/")
    save_every: int = option(0, "steps between checkpoints, besides the one at the run's end")
    keep: int = option(2, "checkpoints of the run that stay, the newest (0: none is written)")
    resume: str = option("", "checkpoint to go on from, with its options and in its log; or "
                             "latest: the newest of --log-dir")
    wandb: bool = option(True, "log to wandb (offline if not logged in, or if it does not answer)")
    dry_run: bool = option(False, "print sizes, predicted VRAM and time, and end")


def limits(c: Config) -> dict[str, tuple[str, Callable]]:
    """What an option may be, and the test of that, which may rely on the ones before."""
    def multiple_of(n):
        return lambda v: v > 0 and v % n == 0

    return {name: limit for names, *limit in (
        ("epochs steps heads window_end", "1 or more", lambda v: v >= 1),
        ("val_every buffer_mib save_every", "0 or more", lambda v: v >= 0),
        ("microbatch_tokens val_sequence", f"a multiple of {BLOCK}", multiple_of(BLOCK)),
        ("val_tokens", f"a multiple of --val-sequence ({c.val_sequence})",
         multiple_of(c.val_sequence)),
        ("layers", "an even number from 4 on", lambda v: v >= 4 and v % 2 == 0),
        ("dim", f"a multiple of 4 x --heads ({4 * c.heads})", multiple_of(4 * c.heads)),
        ("cooldown", "a number above 0, at most 1", lambda v: 0 < v <= 1),
        ("final_lr muon_momentum", "a number from 0 to 1", lambda v: 0 <= v <= 1),
        ("muon_lr adam_lr", "a number above 0", lambda v: 0 < v < math.inf),
        ("seed", "0 to 2^63 - 1", lambda v: 0 <= v < 2 ** 63),
        ("keep", "1 or more with --save-every, else 0 too", lambda v: v >= (c.save_every > 0)),
    ) for name in names.split()}


# What a resumed run may set anew. (--data: its batches are compared.)
FREE = ("data", "val_every", "buffer_mib", "log_dir", "save_every", "keep", "resume", "wandb",
        "dry_run")
PRESETS = {
    "speedrun": {},  # FineWeb to 3.28
    "offline": dict(steps=54, val_tokens=524288, val_every=0),  # the same model on 21 M tokens
    "tiny": dict(steps=80, microbatch_tokens=256, val_tokens=16384, val_sequence=1024, val_every=20,
                 layers=4, dim=128, heads=2, window_end=256),  # a CPU and minutes
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        if os.environ.get("RANK", "0") != "0":  # rank 0 has the same arguments, and says it
            sys.exit(2)
        super().error(message)


def parse_config(arguments: list[str]) -> Config:
    parser = Parser(
        allow_abbrev=False, description=__doc__, usage="%(prog)s [--OPTION VALUE ...] (see --help)",
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "speedrun" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--preset", choices=PRESETS,
                        help=f"the other options' defaults (here: {default})")
    asked = [a for a in arguments if a not in ("-h", "--help")]
    preset = PRESETS[getattr(parser.parse_known_args(asked)[0], "preset", default)]
    allowed = limits(Config(**preset))
    for f in fields(Config):
        how = {"action": argparse.BooleanOptionalAction} if f.type is bool else \
            {"type": f.type, "choices": f.metadata["choices"]}
        about = f.metadata["help"] + (f": {allowed[f.name][0]}" if f.name in allowed else "")
        parser.add_argument(flag(f.name), **how,
                            help=f"{about} (here: {preset.get(f.name, f.default)})")
    given = vars(parser.parse_args(arguments))
    if given.pop("preset", None) or not given.get("resume"):
        given = asdict(Config()) | preset | given
    if given.get("resume"):
        path = find_checkpoint(given["resume"], given.get("log_dir", Config.log_dir))
        saved = read_checkpoint(path)["config"]
        for name in given.keys() - FREE:
            if given[name] != saved[name]:
                parser.error(f"argument {flag(name)}: expected {saved[name]}, which the run of "
                             f"{path} has, received {given[name]}")
        given = saved | given | {"resume": str(path)}
    c = Config(**given)
    for name, (words, right) in limits(c).items():
        if not right(value := getattr(c, name)):
            parser.error(f"argument {flag(name)}: expected {words}, received {value}")
    if c.buffer_mib and c.mlp != "bitsparse":
        parser.error(f"argument --buffer-mib: --mlp {c.mlp} has no buffer; leave it out")
    if c.head == "fp8" and c.dim % 16:
        parser.error(f"argument --dim: expected a multiple of 16 for --head fp8, received {c.dim}")
    return c


def stop(sentence: str) -> None:
    """End this process for a reason that its user can mend; torchrun then ends the other ranks."""
    rank = os.environ.get("RANK", "0")
    sys.exit(f"train_gpt.py: {'' if rank == '0' else f'rank {rank}: '}{sentence}")


# -----------------------------------------------------------------------------
# Ranks: a process a GPU, started by torchrun; or one process, without

# torch 2.13 warns of the names of 2.11
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Ranks:
    rank: int
    world_size: int
    device: torch.device
    signal: int = 0  # that told this rank to end, if any

    def sum_(self, x: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(x)

    def scatter_mean(self, x: Tensor) -> Tensor:
        """This rank's part along dimension 0 of the mean of x over the ranks."""
        if self.world_size == 1:
            return x
        part = torch.empty_like(self.part(x))
        _reduce_scatter(part, x / self.world_size)
        return part

    def gather(self, part: Tensor) -> Tensor:
        if self.world_size == 1:
            return part
        whole = part.new_empty((part.shape[0] * self.world_size, *part.shape[1:]))
        _all_gather(whole, part)
        return whole

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.world_size)[self.rank]

    def leave(self) -> None:
        """Before the process ends: of gloo, threads that are left may abort it."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    def describe(self) -> str:
        if self.device.type == "cuda":
            return f"{self.world_size} x {self.device_name()}: Triton kernels"
        return f"CPU only, {torch.get_num_threads()} threads: the kernels' torch reference"

    def catch_signals(self) -> None:
        def catch(number, frame):
            self.signal = number
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process
            os.write(2, f"{signal.Signals(number).name}: ending after the step under way; once "
                        "more ends at once\n".encode() if self.rank == 0 else b"")

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, catch)


def start_ranks(head: str = "bf16") -> Ranks:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if MICROBATCHES % world_size:
        stop(f"expected 1, 2, 4 or 8 processes, received {world_size}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            stop(f"expected a process a GPU, at most {torch.cuda.device_count()} here, received "
                 f"number {device.index + 1}")
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability()
        needed = (8, 9) if head == "fp8" else (8, 0)
        if capability < needed:
            stop("expected a GPU of compute capability {}.{} or more, for {}; received {}, {}.{}"
                 .format(*needed, head, torch.cuda.get_device_name(), *capability))
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(rank, world_size, device)


# It would merge equal expressions of two parts of the model that backward makes again each for
# itself, and keep what it has merged.
torch._functorch.config.cse = False
# Inductor would keep a buffer that nobody needs any more until one of its size is asked for, while
# operators whose inner memory it does not know, as the MLP's backward, take more; the allocator
# gives it to both.
torch._inductor.config.allow_buffer_reuse = False


# Inductor may else round where one of its kernels ends, choose between kernels by their time, and
# add a sum to a GEMM before it rounds: all of it unlike in two models.
DETERMINISTIC_INDUCTOR = {"emulate_precision_casts": True, "deterministic": True,
                          "pattern_matcher": False}


def compiled(function, **inductor):
    """torch.compile on a GPU, with these of Inductor's options; on a CPU as it is, since not every
    machine has a C++ compiler.
    """
    if not torch.cuda.is_available():
        return function
    return torch.compile(function, dynamic=False, fullgraph=True, options=inductor or None)


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

    def whole_state(self) -> Iterator[Tensor]:
        """Without the padding, so that it serves any number of ranks."""
        for matrices, *_, momentum in self.groups:
            yield self.ranks.gather(momentum)[: len(matrices)]

    def load(self, whole: list[Tensor]) -> None:
        for (_, _, padding, momentum), t in zip(self.groups, whole, strict=True):
            momentum.copy_(self.ranks.part(F.pad(t, (0, 0, 0, 0, 0, padding))))

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

    def whole_state(self) -> Iterator[Tensor]:
        for p, _, _, *moments in self.groups:
            for moment in moments:
                yield self.ranks.gather(moment) if p.dim() > 1 else moment

    def load(self, whole: list[Tensor]) -> None:
        for moment, t in zip(self.state, whole, strict=True):
            moment.copy_(self.ranks.part(t) if t.dim() > 1 else t)

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


def recompute(function, *inputs):
    """function(*inputs), of which backward keeps the inputs alone and makes the rest again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


# In place, as torch.addmm would copy x first; an operator, as the compiler would take torch.addmm.
@torch.library.custom_op("speedrun::add_product_", mutates_args=("x",))
def add_product_(x: Tensor, y: Tensor, w: Tensor) -> None:
    """x += y wᵀ, rounded once. x [n, d], y [n, c], w [d, c]."""
    x.addmm_(y, w.t())


class AddLinear(torch.autograd.Function):
    """x + F.linear(y, w), on a GPU rounded once and where x was, if nobody else reads it."""

    @staticmethod
    def forward(ctx, x, y, w):
        ctx.save_for_backward(y, w)
        if not x.is_cuda:
            return x + F.linear(y, w)
        out = x.clone()  # which the compiler leaves out where it may
        add_product_(out, y, w)
        return out

    @staticmethod
    def backward(ctx, grad):
        y, w = ctx.saved_tensors
        return grad, grad @ w, grad.t() @ y


class SameGradient(torch.autograd.Function):
    """again, which is x made once more: its gradient is x's. [n, d] of each."""

    @staticmethod
    def forward(ctx, x, again):
        return again.view_as(again)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TableGradient(torch.autograd.Function):
    """Zeros [n, d]: added to rows of table.detach(), they bring the table its gradient.

    tokens [n], which rows; table [rows, d]. So the gradients of what several layers looked up,
    [n, d], are added up before they become one of the table's shape: that one would be more to hold
    from one layer to another, and to add.
    """

    @staticmethod
    def forward(ctx, tokens, table):
        ctx.save_for_backward(tokens)
        ctx.rows = len(table)
        return table.new_zeros(()).expand(len(tokens), table.shape[1])

    @staticmethod
    def backward(ctx, grad):
        tokens, = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.rows, -1, False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: dimension i of x [tokens, heads, d] turns with dimension d / 2 + i.

    cos, sin [tokens, d / 2].
    """
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1).to(x.dtype)


@triton.jit
def _head_place(cos_ptr, sin_ptr, n, width, half, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a program's heads: their tokens; where their first halves are in [n, width]; which of
    ROWS x COLUMNS are inside; the angles' cos and sin.

    A token's heads follow on each other, so that memory is read in order, and angles once.
    """
    head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row = (head // (width // (2 * half))).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < n) & (column < half)
    cos = tl.load(cos_ptr + row * half + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + column, mask=inside, other=0.0)
    return row, head.to(tl.int64) * 2 * half + column, inside, cos, sin


@triton.jit
def _load_halves(ptr, half, inside):
    return tl.load(ptr, mask=inside, other=0.0), tl.load(ptr + half, mask=inside, other=0.0)


@triton.jit
def _store_halves(ptr, a, b, half, inside):
    tl.store(ptr, a.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + half, b.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed(halves, half, eps):
    """The halves of heads, float32 after RMSNorm, and what they were multiplied by."""
    a, b = halves[0].to(tl.float32), halves[1].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] / (2 * half) + eps)
    return a * rstd, b * rstd, rstd


# Both kernels load everything before they store anything: the compiler does not know that what is
# stored is not loaded afterwards, and would wait for one load after the other.


@triton.jit
def _heads_kernel(qkv_ptr, token_ptr, table_ptr, lambda_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
                  n, width, half, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """heads_reference() of ROWS heads. Grid: ceil(n * heads / ROWS).

    qkv_ptr [n, 3 width]; token_ptr [n] int32 and table_ptr [VOCAB, width], or None; lambda_ptr [2],
    cos_ptr, sin_ptr [n, half], float32; written: q_ptr, k_ptr, v_ptr [n, width]. COLUMNS: half or
    more.
    """
    row, at, inside, cos, sin = _head_place(cos_ptr, sin_ptr, n, width, half, ROWS, COLUMNS)
    qkv_ptr += at + row * 2 * width
    if table_ptr is not None:
        token = tl.load(token_ptr + row, mask=row < n, other=0)
    q = _load_halves(qkv_ptr, half, inside)
    k = _load_halves(qkv_ptr + width, half, inside)
    v = _load_halves(qkv_ptr + 2 * width, half, inside)
    va = tl.load(lambda_ptr) * v[0].to(tl.float32)
    vb = tl.load(lambda_ptr) * v[1].to(tl.float32)
    if table_ptr is not None:
        value = _load_halves(table_ptr + at + (token - row) * width, half, inside)
        va += tl.load(lambda_ptr + 1) * value[0].to(tl.float32)
        vb += tl.load(lambda_ptr + 1) * value[1].to(tl.float32)
    a, b, _ = _normed(q, half, eps)
    _store_halves(q_ptr + at, a * cos + b * sin, b * cos - a * sin, half, inside)
    a, b, _ = _normed(k, half, eps)
    _store_halves(k_ptr + at, a * cos + b * sin, b * cos - a * sin, half, inside)
    _store_halves(v_ptr + at, va, vb, half, inside)


@triton.jit
def _normed_gradient(halves, grads, cos, sin, half, eps):
    """Of the halves before RMSNorm and rotation, from grads after them."""
    a, b, rstd = _normed(halves, half, eps)
    c, d = grads[0].to(tl.float32), grads[1].to(tl.float32)
    da, db = c * cos - d * sin, c * sin + d * cos
    mean = tl.sum(da * a + db * b, axis=1)[:, None] / (2 * half)
    return rstd * (da - a * mean), rstd * (db - b * mean)


@triton.jit
def _heads_backward_kernel(qkv_ptr, token_ptr, table_ptr, lambda_ptr, cos_ptr, sin_ptr, dq_ptr,
                           dk_ptr, dv_ptr, dqkv_ptr, dvalue_ptr, dlambda_ptr, n, width, half, eps,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradients of _heads_kernel, of the shapes of what they are the gradients of.

    dvalue_ptr [n, width]: of what was looked up. dlambda_ptr [programs, 2] float32: each program's
    share.
    """
    row, at, inside, cos, sin = _head_place(cos_ptr, sin_ptr, n, width, half, ROWS, COLUMNS)
    qkv_ptr += at + row * 2 * width
    dqkv_ptr += at + row * 2 * width
    if table_ptr is not None:
        token = tl.load(token_ptr + row, mask=row < n, other=0)
    q = _load_halves(qkv_ptr, half, inside)
    dq = _load_halves(dq_ptr + at, half, inside)
    k = _load_halves(qkv_ptr + width, half, inside)
    dk = _load_halves(dk_ptr + at, half, inside)
    v = _load_halves(qkv_ptr + 2 * width, half, inside)
    dv = _load_halves(dv_ptr + at, half, inside)
    dva, dvb = dv[0].to(tl.float32), dv[1].to(tl.float32)
    factor, value_factor = tl.load(lambda_ptr), tl.load(lambda_ptr + 1)
    # of each head; over them at the end, since warps wait for one another there
    dlambda = tl.sum(dva * v[0].to(tl.float32) + dvb * v[1].to(tl.float32), axis=1)
    dlambda_value = tl.zeros_like(dlambda)
    if table_ptr is not None:
        value = _load_halves(table_ptr + at + (token - row) * width, half, inside)
        dlambda_value = tl.sum(dva * value[0].to(tl.float32) + dvb * value[1].to(tl.float32),
                               axis=1)
        _store_halves(dvalue_ptr + at, value_factor * dva, value_factor * dvb, half, inside)
    a, b = _normed_gradient(q, dq, cos, sin, half, eps)
    _store_halves(dqkv_ptr, a, b, half, inside)
    a, b = _normed_gradient(k, dk, cos, sin, half, eps)
    _store_halves(dqkv_ptr + width, a, b, half, inside)
    _store_halves(dqkv_ptr + 2 * width, factor * dva, factor * dvb, half, inside)
    tl.store(dlambda_ptr + 2 * tl.program_id(0), tl.sum(dlambda))
    tl.store(dlambda_ptr + 2 * tl.program_id(0) + 1, tl.sum(dlambda_value))


HEADS_ROWS = 16  # heads of a program, of one or more tokens


def _heads_arguments(qkv: Tensor, cos: Tensor) -> tuple[tuple[int], tuple, dict]:
    """Grid; n, width, half and eps; constants of the two kernels."""
    (n, width), half = qkv.shape, cos.shape[1]
    return ((triton.cdiv(n * (width // (6 * half)), HEADS_ROWS),),
            (n, width // 3, half, torch.finfo(torch.float32).eps),  # F.rms_norm's own
            dict(ROWS=HEADS_ROWS, COLUMNS=triton.next_power_of_2(half), num_warps=4))


def heads_reference(qkv: Tensor, tokens: Tensor | None, table: Tensor | None, zeros: Tensor | None,
                    lambdas: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, normed and rotated, and v, mixed with the value embedding, for attention.

    qkv [tokens, 3 d] bf16; tokens int32, table [VOCAB, d] bf16 and TableGradient's zeros, all or
    none; lambdas [2], cos and sin [tokens, d / heads / 2] float32. Returns three of [tokens, heads,
    d / heads] bf16.
    """
    q, k, v = qkv.view(len(qkv), 3, -1, 2 * cos.shape[1]).unbind(1)
    q, k, v = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin), lambdas[0] * v
    if table is not None:
        v = v + lambdas[1] * (F.embedding(tokens, table) + zeros).view_as(v)
    return q, k, v


# One operator: Inductor makes of its backward several passes, with float32 tensors between them.
@torch.library.custom_op("speedrun::heads", mutates_args=(), device_types="cuda")
def heads(qkv: Tensor, tokens: Tensor | None, table: Tensor | None, zeros: Tensor | None,
          lambdas: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """heads_reference on a GPU, rounded once."""
    grid, sizes, constants = _heads_arguments(qkv, cos)
    d = 2 * cos.shape[1]
    out = [qkv.new_empty((len(qkv), qkv.shape[1] // (3 * d), d)) for _ in range(3)]
    _heads_kernel[grid](qkv, tokens, table, lambdas, cos, sin, *out, *sizes, **constants)
    return tuple(out)


@heads.register_fake
def _(qkv, tokens, table, zeros, lambdas, cos, sin):
    d = 2 * cos.shape[1]
    return tuple(qkv.new_empty((len(qkv), qkv.shape[1] // (3 * d), d)) for _ in range(3))


@torch.library.custom_op("speedrun::heads_backward", mutates_args=(), device_types="cuda")
def heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, tokens: Tensor | None,
                   table: Tensor | None, lambdas: Tensor, cos: Tensor,
                   sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, of what was looked up (empty where that is nothing) and of lambdas."""
    grid, sizes, constants = _heads_arguments(qkv, cos)
    dqkv = torch.empty_like(qkv)
    dvalue = qkv.new_empty(0 if table is None else (len(qkv), qkv.shape[1] // 3))
    dlambdas = lambdas.new_empty((*grid, 2))
    _heads_backward_kernel[grid](qkv, tokens, table, lambdas, cos, sin, dq.contiguous(),
                                 dk.contiguous(), dv.contiguous(), dqkv, dvalue, dlambdas, *sizes,
                                 **constants)
    return dqkv, dvalue, dlambdas.sum(0)


@heads_backward.register_fake
def _(dq, dk, dv, qkv, tokens, table, lambdas, cos, sin):
    return (torch.empty_like(qkv),
            qkv.new_empty(0 if table is None else (len(qkv), qkv.shape[1] // 3)),
            torch.empty_like(lambdas))


def _heads_context(ctx, inputs, output):
    qkv, tokens, table, _, *others = inputs
    ctx.save_for_backward(qkv, tokens, table, *others)


def _heads_grads(ctx, *grads):
    saved = ctx.saved_tensors  # once: where recompute made them, a second time is an error
    dqkv, dvalue, dlambdas = heads_backward(*grads, *saved)
    return dqkv, None, None, None if saved[2] is None else dvalue, dlambdas, None, None


heads.register_autograd(_heads_grads, setup_context=_heads_context)


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
        bound = 3 ** 0.5 * 0.5 * config.dim ** -0.5
        self.qkv = nn.Parameter(torch.empty(3, config.dim, config.dim).uniform_(-bound, bound))
        self.project = nn.Parameter(torch.zeros(config.dim, config.dim))
        # a tenth faster than FlexAttention's own on an H200
        self.kernel_options = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4,
                               "fwd_num_stages": 3}
        # whose own need more shared memory than the 100 KiB of consumer GPUs
        if (torch.cuda.is_available() and
                torch.cuda.get_device_properties().shared_memory_per_block_optin < 160 * 1024):
            self.kernel_options = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64,
                                   "BLOCK_M2": 64, "BLOCK_N2": 32}

    def prepare(self, normed, lookup, lambdas, cos, sin):
        qkv = F.linear(normed, self.qkv.view(-1, normed.shape[-1]).to(normed.dtype))
        return (heads if qkv.is_cuda else heads_reference)(qkv, *lookup, lambdas, cos, sin)

    def forward(self, q, k, v, mask):
        """[tokens, heads, d / heads] of each, and so is the result."""
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        if q.is_cuda:
            y = flex_attention(q, k, v, block_mask=mask, scale=0.12,
                               kernel_options=self.kernel_options)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.12)
        return y.squeeze(0).transpose(0, 1)  # y[0] would cost backward a pass over its gradient


class MLP(nn.Module):
    def __init__(self, config: Config, layer: int, buffer: ActivationBuffer | None):
        super().__init__()
        bound = 3 ** 0.5 * 0.5 * config.dim ** -0.5
        self.w1 = nn.Parameter(torch.empty(4 * config.dim, config.dim).uniform_(-bound, bound))
        self.w2 = nn.Parameter(torch.zeros(config.dim, 4 * config.dim))
        self.save, self.layer, self.buffer = config.mlp, layer, buffer
        self.codec, self.storage = config.codec, getattr(torch, config.storage)

    def forward(self, x):
        w1, w2 = self.w1.to(x.dtype), self.w2.to(x.dtype)
        if self.save == "eager":
            return F.linear(F.linear(x, w1).relu().square(), w2)
        return relu2_mlp(x, w1, w2, buffer=self.buffer, codec=self.codec, storage=self.storage,
                         save=self.save, layer=self.layer)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int, buffer: ActivationBuffer | None):
        super().__init__()
        # record #26 has no attention in layer 7 of 12
        self.attention = Attention(config) if layer != config.layers * 7 // 12 else None
        self.mlp = MLP(config, layer, buffer)

    def mix(self, x, skip, weight, x0, lambdas):
        if skip is not None:
            x = x + weight * skip
        return lambdas[2] * x + lambdas[3] * x0

    def enter(self, x, streams, *more):
        # mix again, so that the compiler makes x and its norm at once
        again = self.mix(*(t if t is None else t.detach() for t in streams))
        return self.attention.prepare(norm(SameGradient.apply(x, again)), *more)

    def forward(self, x, skip, weight, x0, lambdas, lookup, rotary, mask):
        """For backward stay x, y, x + y and what the MLP saves; the rest is made again.

        Not compiled, as on a CPU, x stays as mixed too, since recompute keeps its inputs.
        """
        streams = x, skip, weight, x0, lambdas
        x = recompute(self.mix, *streams)
        if self.attention is not None:
            q, k, v = recompute(self.enter, x, streams, lookup, lambdas[:2], *rotary)
            y = self.attention(q, k, v, mask).reshape(x.shape)
            x = AddLinear.apply(x, y, self.attention.project.to(x.dtype))
        return x + self.mlp(recompute(norm, x))


@triton.jit
def _softcapped_loss_kernel(z_ptr, target_ptr, x_ptr, loss_ptr, inverse_ptr, scaled_ptr, scale,
                            columns, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Cross entropy of one token's logits, 30 sigmoid(scale z), and its gradient, in one pass.

    z_ptr [n, columns] bf16, replaced by gradient * sum(exp(logits - 30)): that sum is known only at
    the end, and its inverse, inverse_ptr [n] float32, goes into small tensors of the GEMMs that
    follow, one of them here: scaled_ptr [n, width] = x_ptr * inverse. target_ptr [n] int64,
    loss_ptr [n] float32. Grid: n. WIDTH: width or more. No logit passes 30, so no maximum is
    needed. The target's gradient, which is another, is written over the rest, so that all accesses
    are vectors where columns is a multiple of 16.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * columns
    target = tl.load(target_ptr + row)
    target_s = 1 / (1 + tl.exp2(tl.load(z_ptr + target).to(tl.float32) * (-LOG2E * scale)))
    tl.debug_barrier()  # all threads have read it
    sums = tl.zeros((BLOCK,), tl.float32)
    i = tl.arange(0, BLOCK)
    ahead = tl.load(z_ptr + i, mask=i < columns, other=0.0)
    for first in range(0, columns, BLOCK):
        z = ahead.to(tl.float32)
        after = first + BLOCK + i
        ahead = tl.load(z_ptr + after, mask=after < columns, other=0.0)
        s = 1 / (1 + tl.exp2(z * (-LOG2E * scale)))
        e = tl.where(first + i < columns, tl.exp2(s * (30 * LOG2E) - 30 * LOG2E), 0.0)
        sums += e
        dz = e * (30 * scale) * (s - s * s)
        tl.store(z_ptr + first + i, dz.to(tl.bfloat16), mask=first + i < columns)
    total = tl.sum(sums)
    dz = (tl.exp2(target_s * (30 * LOG2E) - 30 * LOG2E) - total) * (30 * scale) * (
        target_s - target_s * target_s)
    tl.debug_barrier()
    tl.store(z_ptr + target, dz.to(tl.bfloat16))
    tl.store(loss_ptr + row, tl.log(total) - (30 * target_s - 30))
    inverse = 1 / total
    tl.store(inverse_ptr + row, inverse)
    j = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * width + j, mask=j < width, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * width + j, (x * inverse).to(tl.bfloat16), mask=j < width)


def softcapped_loss_(z: Tensor, targets: Tensor, x: Tensor,
                     scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, inverse, x * inverse); z becomes its gradient / inverse: _softcapped_loss_kernel.

    loss, inverse float32 [n]; x bf16 [n, d].
    """
    if z.is_cuda:
        loss, inverse = torch.empty((2, len(z)), dtype=torch.float32, device=z.device)
        scaled, d = torch.empty_like(x), x.shape[1]
        _softcapped_loss_kernel[(len(z),)](z, targets, x, loss, inverse, scaled, scale, z.shape[1],
                                           d, BLOCK=2048, WIDTH=triton.next_power_of_2(d),
                                           num_warps=4)
        return loss, inverse, scaled
    s = (z.float() * scale).sigmoid_()
    e = (30 * s - 30).exp_()
    total = e.sum(-1, keepdim=True)
    loss = total.log() - (30 * s.gather(-1, targets[:, None]) - 30)
    e.scatter_add_(-1, targets[:, None], -total)
    z.copy_(e.mul_(30 * scale).mul_(s).mul_(1 - s))
    inverse = 1 / total
    return loss[:, 0], inverse[:, 0], (x * inverse).to(x.dtype)


def head_units(d: int) -> tuple[float, float]:
    """What 1 in e4m3 stands for in the head's x and in its weight.

    Constants, as the speedrun's: after RMSNorm no element of x passes √d, and to look for the
    weight's largest would be one more pass over it.
    """
    return d ** 0.5 / E4M3_LARGEST, HEAD_LARGEST / E4M3_LARGEST


def head_operands(x: Tensor, w: Tensor) -> list[Tensor]:
    """[x8, w8], both e4m3, for head_loss; x bf16 [tokens, d], w float32 [VOCAB, d].

    Before that operator, so that the compiler makes x8 where it makes x, and w8 once a microbatch,
    as w in bf16 and in the same pass.
    """
    # clamped, as x rounded to bf16 may pass √d, and beyond its largest e4m3 has only NaN
    return [(t.detach().float() / unit).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
            for t, unit in zip((x, w), head_units(x.shape[1]), strict=True)]


# One operator, so that the compiler does not reorder the chunks and hold all logits after all.
@torch.library.custom_op("speedrun::head_loss", mutates_args=())
def head_loss(x: Tensor, w: Tensor, targets: Tensor, grads: bool, x8: Tensor | None = None,
              w8: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed cross entropy of 30 sigmoid(z / (7.5 √d)), z = x wᵀ, HEAD_CHUNK tokens at a time.

    x [tokens, d], w [VOCAB, d] bf16. Returns the loss, float32 [], and, if grads, its gradients as
    dx / inverse, inverse, float32 [tokens], and dw, made here since a chunk's logits are at hand:
    all of them never exist at once.

    x8, w8: head_operands(x, w), if z is to be made of them; the gradients are made of x and w. On a
    CPU, torch makes the same products of the same fp8 values, and takes longer.
    """
    losses, inverses = [], []
    dx = torch.empty_like(x if grads else x[:0])
    dw = torch.zeros_like(w if grads else w[:0], dtype=torch.float32)
    chunk, d = HEAD_CHUNK[x.device.type], x.shape[1]
    logits = x.new_empty(min(chunk, len(x)), len(w))
    if x8 is not None:
        units = [torch.full((), unit, device=x.device) for unit in head_units(d)]
    if not x.is_cuda:  # most CPUs take several times as long for products of bf16
        w32 = w.float()
    for i in range(0, len(x), chunk):
        part, z = x[i: i + chunk], logits[: len(x) - i]
        if x8 is not None:
            torch._scaled_mm(x8[i: i + chunk], w8.t(), *units, use_fast_accum=True, out=z)
        elif z.is_cuda:
            torch.mm(part, w.t(), out=z)
        else:
            z.copy_(part.float() @ w32.t())
        loss, inverse, scaled = softcapped_loss_(z, targets[i: i + chunk], part,
                                                 1 / (7.5 * d ** 0.5))
        losses.append(loss)
        inverses.append(inverse)
        if grads and z.is_cuda:
            torch.mm(z, w, out=dx[i: i + chunk])
            torch.addmm(dw, z.t(), scaled, out_dtype=torch.float32, out=dw)
        elif grads:
            z32 = z.float()
            dx[i: i + chunk] = z32 @ w32
            dw.addmm_(z32.t(), scaled.float())
    return torch.cat(losses).sum(), dx, torch.cat(inverses), dw.to(w.dtype)


@head_loss.register_fake
def _(x, w, targets, grads, x8=None, w8=None):
    return (x.new_empty((), dtype=torch.float32), torch.empty_like(x if grads else x[:0]),
            x.new_empty(len(x), dtype=torch.float32), torch.empty_like(w if grads else w[:0]))


def _head_backward(ctx, grad, *_):
    dx, inverse, dw = ctx.saved_tensors
    return (dx * (inverse * grad)[:, None]).to(dx.dtype), dw * grad, None, None, None, None


head_loss.register_autograd(
    _head_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output[1:]))


class GPT(nn.Module):
    def __init__(self, config: Config, buffer: ActivationBuffer | None):
        super().__init__()
        n, dim = config.layers, config.dim
        self.fp8_head = config.head == "fp8"
        self.embed = nn.Parameter(torch.randn(VOCAB, dim).bfloat16())
        self.value_embeds = nn.ParameterList(  # of the first and of the last layers
            nn.Parameter(torch.randn(VOCAB, dim).bfloat16()) for _ in range(min(3, n // 2)))
        self.blocks = nn.ModuleList(Block(config, i, buffer) for i in range(n))
        self.head = nn.Parameter(torch.zeros(VOCAB, dim))
        # For each layer the factors of value, value embedding, x and x0; then skip weights [n / 2].
        # The first two go to an operator: given what does not begin at a multiple of 16 bytes, the
        # compiler expects the same of its results, and attention would load them value by value.
        self.scalars = nn.Parameter(torch.cat([torch.tensor([0.5, 0.5, 1, 0]).repeat(n),
                                               torch.ones(n // 2)]))
        self.long = {n * i // 12 for i in (0, 4, 7, 11)}  # layers with the whole window
        frequency = (1 / 1024) ** torch.linspace(0, 1, dim // config.heads // 4)
        frequency = torch.cat([frequency, torch.zeros_like(frequency)])  # half stands still
        length = max(config.microbatch_tokens, config.val_sequence)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, window_blocks: Tensor) -> Tensor:
        """Summed loss, float32 []. tokens int32 [t], targets int64 [t], window_blocks int32 []."""
        x, grads = self.hidden(tokens, window_blocks), torch.is_grad_enabled()
        fp8 = head_operands(x, self.head) if self.fp8_head and grads else ()
        return head_loss(x, self.head.to(x.dtype), targets, grads, *fp8)[0]

    def hidden(self, tokens: Tensor, window_blocks: Tensor) -> Tensor:
        """What the head reads, bf16 [t, d]."""
        n = len(self.blocks)
        rotary = self.cos[: len(tokens)], self.sin[: len(tokens)]
        short = attention_mask(tokens, (window_blocks // 2).clamp(min=1))
        long = attention_mask(tokens, window_blocks)
        lookups = [(tokens, table.detach(), TableGradient.apply(tokens, table))
                   for table in self.value_embeds]
        lookups = lookups + [(None, None, None)] * (n - 2 * len(lookups)) + lookups
        # Unbound once: of slices, the compiled backward would add up the gradients in one kernel,
        # for which it ran through all layers before it came to the gradients of their weights.
        lambdas, skip_weights = self.scalars.split([4 * n, n // 2])
        lambdas, skip_weights = lambdas.view(n, 4).unbind(), skip_weights.unbind()
        x = x0 = norm(F.embedding(tokens, self.embed))
        skips = []
        for i, block in enumerate(self.blocks):
            late = i >= n // 2
            skip, weight = (skips.pop(), skip_weights[i - n // 2]) if late else (None, None)
            mask = long if i in self.long else short
            x = block(x, skip, weight, x0, lambdas[i], lookups[i], rotary, mask)
            if not late:
                skips.append(x)
        return norm(x)


# -----------------------------------------------------------------------------
# Data


def read_shards(folder: str, split: str) -> list[np.ndarray]:
    """The tokens of each shard in order, uint16, memory-mapped.

    A shard: 256 int32 (20240520, 1, number of tokens, 0, ...), then the tokens.
    """
    paths = sorted(Path(folder).glob(f"fineweb*_{split}_*.bin"))  # finewebedu_ too
    if not paths:
        stop(f"no fineweb_{split}_*.bin in {folder}; fetch FineWeb with python data/"
             f"cached_fineweb10B.py, or run python data/sample.py and pass --data data/sample")
    shards = []
    for path in paths:
        try:
            header, size = np.fromfile(path, dtype=np.int32, count=256), path.stat().st_size
        except OSError as error:
            stop(f"{path} cannot be read: {error.strerror}")
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            stop(f"{path} is no shard of tokens: expected it to begin with 20240520, 1, "
                 f"received {header[:2].tolist()}")
        if size != 1024 + 2 * int(header[2]):
            stop(f"{path} is damaged: expected {1024 + 2 * int(header[2])} bytes for the "
                 f"{header[2]} tokens of its header, received {size}; fetch or make it again")
        shards.append(np.memmap(path, dtype=np.uint16, mode="r", offset=1024)
                      if header[2] else np.empty(0, np.uint16))  # which mmap refuses
    return shards


def check_tokens(shard: np.ndarray) -> None:
    if len(shard) and shard.max() > BOS:
        stop(f"{shard.filename} has a token {shard.max()}: expected GPT-2's, at most {BOS}; make "
             "it again with data/fineweb.py")


class TrainData:
    """Global batches: 8 microbatches of packed documents, the same whatever the number of ranks.

    Microbatches begin with documents, picked greedily in order, at least a microbatch apart; within
    a document only where it goes on for a whole one. A shard's end that fills no batch is not used.
    """

    def __init__(self, config: Config):
        self.tokens = config.microbatch_tokens
        self.shards = read_shards(config.data, "train")
        self.batches = []  # (shard, first token of each microbatch)
        for shard, tokens in enumerate(self.shards):
            if len(self.batches) < config.steps:
                check_tokens(tokens)
                starts = self.find_starts(tokens)
                self.batches += [(shard, starts[i: i + MICROBATCHES])
                                 for i in range(0, len(starts) - MICROBATCHES + 1, MICROBATCHES)]
        if len(self.batches) * config.epochs < config.steps:
            stop(f"{config.data} has {len(self.batches)} batches of {MICROBATCHES} x {self.tokens} "
                 f"tokens, {config.epochs} times (--epochs), and --steps is {config.steps}; fetch "
                 "more shards, lower --steps or raise --epochs")

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
        tokens = self.shards[shard][starts[i]: starts[i] + self.tokens + 1]
        return torch.from_numpy(tokens.astype(np.int32))


class ValData:
    """The first val_tokens of the val shards, cut into sequences wherever they come to be cut."""

    def __init__(self, config: Config):
        self.sequence, wanted = config.val_sequence, config.val_tokens + 1
        shards = read_shards(config.data, "val")
        for shard in shards:
            check_tokens(shard)
        self.tokens = np.concatenate(shards)[:wanted]
        if len(self.tokens) < wanted:
            stop(f"{config.data} has {len(self.tokens)} val tokens, and --val-tokens "
                 f"{config.val_tokens} needs {wanted}, the last target among them; lower it")

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def __getitem__(self, i: int) -> Tensor:
        tokens = self.tokens[i * self.sequence: (i + 1) * self.sequence + 1]
        return torch.from_numpy(tokens.astype(np.int32))


# -----------------------------------------------------------------------------
# Schedules


def lr_factor(config: Config, step: int) -> float:
    left = min(1, (1 - step / config.steps) / config.cooldown)
    return left + (1 - left) * config.final_lr


def window_blocks(config: Config, step: int) -> int:
    """Record #26: linear, 1728 tokens at the end, in whole blocks, which are then 1792 tokens."""
    return max(1, -(-(config.window_end - BLOCK // 2) * step // (BLOCK * config.steps)))


def muon_beta(config: Config, step: int) -> float:
    return config.muon_momentum - (config.muon_momentum - 0.85) * max(0, 1 - step / 300)


def buffer_capacity(config: Config, needed_bytes: float) -> int:
    """What was needed and the margin, in CUDA's steps of 2 MiB; --buffer-mib at least."""
    return max(config.buffer_mib * MIB, -int(-needed_bytes * MARGIN // (2 * MIB)) * 2 * MIB)


def first_capacity(config: Config) -> int:
    """For half of the elements of a microbatch, all layers, unless --buffer-mib is given."""
    elements = config.layers * config.microbatch_tokens * 4 * config.dim
    # initial weights give bf16 a mean of 3.3 exponent bits, the mask and heads stand elsewhere
    exponent_bits = 4 if config.storage == "bfloat16" else None
    bits = (bits_per_element(0.5, config.codec, getattr(torch, config.storage), exponent_bits)
            - bits_per_element(0))
    return config.buffer_mib * MIB or buffer_capacity(config, elements * bits / 8)


# -----------------------------------------------------------------------------
# Checkpoints: LOG_DIR/<run id>/step-00000125.pt, a dict of plain values and tensors
#
# "config", "model" by name, the state of "muon" and "adam" gathered from the ranks, whose number
# may therefore change, and "run": where the run stands. The step tells the data, a plan by step;
# no state of a random generator is needed, as nothing after the initial weights is random.

PARTS = ("config", "model", "muon", "adam", "run")


def find_checkpoint(name: str, log_dir: str) -> Path:
    if name != "latest":
        return Path(name)
    newest = max(Path(log_dir).glob("*/step-*.pt"), key=os.path.getmtime, default=None)
    if newest is None:
        stop(f"there is no latest checkpoint: no step-*.pt in a folder of {log_dir}; name the "
             "run's --log-dir, or start one without --resume")
    return newest


def read_checkpoint(path: Path | str, parts: tuple[str, ...] = PARTS) -> dict:
    """Tensors are mapped from the file, so that what is not used is not read."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        stop(f"checkpoint {path} cannot be read: {error.strerror}")
    except Exception:  # torch and pickle raise a dozen kinds
        stop(f"{path} is no checkpoint, or a damaged one: it is not a file of plain values and "
             "tensors that torch.load(weights_only=True) reads; take an earlier one")
    lacking = [part for part in parts if not isinstance(checkpoint, dict) or part not in checkpoint]
    if lacking:
        stop(f"checkpoint {path} has no {', '.join(lacking)}: expected {', '.join(parts)} in it, "
             "as train_gpt.py writes it; config and model alone serve scripts/sample.py")
    unlike = {f.name for f in fields(Config)} ^ checkpoint["config"].keys()
    if unlike:
        stop(f"checkpoint {path} is of another version of train_gpt.py: one of the two has no "
             f"{', '.join(map(flag, sorted(unlike)))}; check out the commit that wrote it")
    return checkpoint


def write_checkpoint(path: Path, checkpoint: dict, keep: int) -> str:
    """And keep the newest of its folder, so many. Returns why it was not written, or nothing."""
    unfinished = path.with_name("unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)  # at once: a file of this name is a whole one
        for old in sorted(path.parent.glob("step-*.pt"), key=os.path.getmtime)[:-keep]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch.save's own, with that of the file within
        unfinished.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        return f"{path} was not written: {getattr(cause, 'strerror', error)}"
    return ""


# -----------------------------------------------------------------------------
# Logging


def hash_of(*parts: str | np.ndarray) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part.tobytes())
    return digest.hexdigest()


class Log:
    """The run's log file in the speedrun's format, the console, the wandb run; on rank 0 only.

    A resumed run goes on in its own log, from where that stood at the checkpoint: the lines after
    it are of steps that will be made again. With other sources the log gets them anew, as a second
    run. Lines that a full disk does not take wait in memory.
    """

    def __init__(self, config: Config, ranks: Ranks):
        run = read_checkpoint(config.resume)["run"] if config.resume else {}
        self.run_id, self.unwritten = run.get("run_id", str(uuid.uuid4())), b""
        self.master, self.wandb = ranks.rank == 0, None
        if not self.master:
            return
        self.path = Path(config.log_dir) / f"{self.run_id}.txt"
        self.goes_on = run.get("sources") == hash_of(*SOURCES) and self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("ab" if config.resume else "xb", buffering=0)
        except OSError as error:
            stop(f"--log-dir {config.log_dir} cannot be written: {error.strerror}")
        if not self.goes_on:
            self.write(*(source + "=" * 100 for source in SOURCES),
                       f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
                       f"triton {triton.__version__}, numpy {np.__version__}",
                       "config: " + json.dumps(asdict(config) | {"world_size": ranks.world_size}),
                       subprocess.getoutput("nvidia-smi"), "=" * 100)
        self.print(ranks.describe())
        if config.wandb:
            self.start_wandb(config)

    def start_wandb(self, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            stop("wandb is not installed: pip install -r requirements.txt, or pass --no-wandb")
        login = os.environ.get("WANDB_API_KEY") or wandb.setup().settings.api_key
        mode = os.environ.get("WANDB_MODE", "online" if login else "offline")  # never a prompt
        how = dict(project="bitsparse-speedrun", name=f"{config.mlp}-{self.run_id[:8]}",
                   id=self.run_id, resume="allow" if config.resume else None,
                   config=asdict(config) | {"run_id": self.run_id},
                   settings=wandb.Settings(silent=True, console="off", finish_timeout=300))  # s
        try:
            self.wandb = wandb.init(mode=mode, **how)
        except wandb.Error as error:
            self.print(f"wandb does not answer: {str(error).splitlines()[0]}")
            mode = "offline"
            wandb.teardown()  # its service still has the run's id
            self.wandb = wandb.init(mode=mode, **how)
        self.print(f"wandb: {mode}")

    def write(self, *lines: str) -> None:
        """To the file only."""
        if not self.master:
            return
        told = bool(self.unwritten)
        self.unwritten += "".join(line + "\n" for line in lines).encode()
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
        except OSError as error:
            if not told:
                print(f"{self.path} takes no more: {error.strerror}; its lines wait in memory",
                      flush=True)

    def rewind(self, length: int) -> None:
        """To where the log stood at the checkpoint, once that has been read without a fault."""
        if self.master and self.goes_on:
            self.file.truncate(min(length, self.file.tell()))

    def print(self, line: str) -> None:
        self.write(line)
        if self.master:
            print(line, flush=True)

    def metrics(self, values: dict[str, float], step: int) -> None:
        try:
            if self.wandb is not None:
                self.wandb.log(values, step=step)
        except Exception as error:  # OSError and others, where its service process is gone
            self.wandb = None
            self.print(f"wandb ended ({error}): the run goes on, with its log alone")

    def close(self, status: int = 0) -> None:
        if not self.master:
            return
        print(f"log: {self.path}")
        if self.wandb is not None:
            print(f"wandb: {Path(self.wandb.dir).parent}", flush=True)
            with contextlib.suppress(Exception):  # as in metrics
                self.wandb.finish(exit_code=status)
        self.write()
        self.file.close()
        if self.unwritten and not status:
            stop(f"{self.path} lacks its last {len(self.unwritten)} bytes, which the disk did not "
                 "take")


# -----------------------------------------------------------------------------
# Training


@dataclass
class Step:
    """A step that the device may still be at work on."""
    number: int  # from 0
    started: torch.cuda.Event | float  # on a CPU: time in s
    ended: torch.cuda.Event | float
    # on the host once ended: loss; overflows, signals, ranks whose loss is not finite (as bits)
    sums: Tensor
    snapshot: BufferSnapshot | None
    row: dict[str, float]  # metrics, as far as known


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within it, counts what autograd keeps: each storage once, and not the model's own."""

    def __init__(self, model: nn.Module):
        super().__init__(self.keep, lambda kept: kept)
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.held = {}  # the storages, so that no address comes twice

    def keep(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.held[storage.data_ptr()] = storage
        return t.detach()  # with t itself, the graph would hold what holds the graph

    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.held.values())


class Trainer:
    # where the run stands, as a checkpoint tells; set in __init__ for a new one
    STANDING = ("number", "train_ms", "vals", "done", "overflows", "needs")

    def __init__(self, config: Config, ranks: Ranks, log: Log):
        self.config, self.ranks, self.log = config, ranks, log
        self.cuda = ranks.device.type == "cuda"
        self.train, self.val = TrainData(config), ValData(config)
        self.buffer = None
        if config.mlp == "bitsparse":
            capacity = first_capacity(config)
            try:
                self.buffer = ActivationBuffer(capacity, ranks.device, config.layers)
            except RuntimeError:  # torch's for any memory, of which CUDA's is one
                stop(f"{capacity} bytes of activation buffer are not free on {ranks.device}; lower "
                     "--buffer-mib or --microbatch-tokens")
        torch.manual_seed(config.seed)
        self.model = GPT(config, self.buffer).to(ranks.device)
        # In bytes, one and a half of what is [tokens, dim]: what has less to read in common is not
        # made at once. For x0 alone, backward would make the inputs of two layers again at once.
        self.forward = compiled(
            self.model, score_fusion_memory_threshold=3 * config.microbatch_tokens * config.dim)
        for p in self.model.parameters():  # kept from step to step: no part of a step's growth
            p.grad = torch.zeros_like(p)
        self.muon = Muon(list(self.model.blocks.parameters()), ranks)
        self.adam = Adam([(self.model.embed, 75), *((t, 75) for t in self.model.value_embeds),
                          (self.model.head, 27.5), (self.model.scalars, 5)], ranks)
        self.tokens_per_step = MICROBATCHES * config.microbatch_tokens
        self.ending = False  # some rank was told to end
        self.number, self.saved = 0, 0  # steps: the next one, the one of the last checkpoint
        self.train_ms, self.overflows = 0.0, 0
        self.vals: dict[int, float] = {}  # val losses, by step
        self.done: list[dict[str, float]] = []  # a finished step's metrics
        self.needs: list[int] = []  # bytes of buffer, in the steps since a resize
        self.writer = ThreadPoolExecutor(1)  # writes checkpoints while training goes on
        self.writing: tuple[Path, Future] | None = None
        self.newest = config.resume  # the newest checkpoint that is known to be whole
        if config.resume:
            self.restore(config.resume)

    def batch(self, tokens: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs int32 [n] and targets int64 [n] from n + 1 tokens, and the attention window."""
        window = torch.tensor(window_blocks(self.config, step), dtype=torch.int32)
        if self.cuda:
            tokens, window = (t.pin_memory().to(self.ranks.device, non_blocking=True)
                              for t in (tokens, window))
        return tokens[:-1], tokens[1:].long(), window

    def now(self) -> torch.cuda.Event | float:
        """When the device has done what was enqueued so far; on a CPU the time in s."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, number: int) -> Step:
        """Enqueue one optimizer step, without waiting for the device anywhere."""
        config, ranks, buffer = self.config, self.ranks, self.buffer
        started, loss_sum = self.now(), torch.zeros((), device=ranks.device)
        factor = lr_factor(config, number)
        row = {"lr": config.muon_lr * factor}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            # the buffer is there before, and is held for the microbatch all the same
            before = torch.cuda.memory_allocated() - (buffer.capacity_bytes if buffer else 0)
        for i in range(ranks.rank, MICROBATCHES, ranks.world_size):
            batch = self.batch(self.train.microbatch(number, i), number)
            if buffer is not None:
                buffer.reset()
            saved = contextlib.nullcontext() if self.cuda else SavedBytes(self.model)
            with saved:
                loss = self.forward(*batch)
            loss.backward()
            loss_sum += loss.detach()
            del loss
        if self.cuda:
            held = torch.cuda.max_memory_allocated() - before
        else:  # a CPU's allocator does not tell
            held = saved.total() + (int(buffer.used_bytes()) if buffer else 0)
        row["vram/bytes_per_token"] = held / config.microbatch_tokens

        overflowed = torch.zeros_like(loss_sum) if buffer is None else buffer.overflowed()
        not_finite = (~loss_sum.isfinite()).float() * 2 ** ranks.rank
        # what is small is reduced together: the scalars' gradient, then a Step's sums
        small = torch.cat([self.model.scalars.grad, torch.stack([
            loss_sum, overflowed.float(), torch.full_like(loss_sum, ranks.signal), not_finite])])
        ranks.sum_(small)
        self.model.scalars.grad.copy_(small[:-4] / ranks.world_size)
        ok = small[-3] == 0
        self.muon.step(config.muon_lr * factor, muon_beta(config, number), ok)
        self.adam.step(config.adam_lr * factor, number + 1, ok)
        torch._foreach_zero_([p.grad for p in self.model.parameters()])
        if self.cuda:
            row["vram/peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        snapshot, sums = buffer and buffer.snapshot(), small[-4:].to("cpu", non_blocking=True)
        return Step(number, started, self.now(), sums, snapshot, row)

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

    def settle(self, step: Step | None) -> bool:
        """Read a step and log it. False, and back to it, if it overflowed on any rank.

        The device has the next step to work on meanwhile. Every rank comes here with the same step,
        so all go back together.
        """
        if step is None:
            return True
        if self.cuda:
            step.ended.synchronize()
        loss_sum, overflow, signals, not_finite = step.sums.tolist()
        self.ending |= signals > 0
        if step.snapshot and step.snapshot.stale:
            stop(f"step {step.number + 1} read activations that were dropped before: a "
                 "microbatch's backward must end before the next one's forward begins")
        if overflow:
            self.overflows += 1
            self.needs.clear()
            if step.snapshot.overflowed:  # on this rank
                self.grow(step)
            self.number = step.number
            return False
        if not_finite:
            ranks = [str(i) for i in range(self.ranks.world_size) if int(not_finite) >> i & 1]
            self.end(1, f"the loss of step {step.number + 1} is not finite on rank "
                        f"{', '.join(ranks)}; lower --muon-lr and --adam-lr")
        ms = (step.started.elapsed_time(step.ended) if self.cuda
              else 1000 * (step.ended - step.started))
        row = step.row | {"loss": loss_sum / self.tokens_per_step, "step_ms": ms,
                          "tokens_per_second": 1000 * self.tokens_per_step / ms}
        if self.buffer is not None:
            row |= self.read_snapshot(step)
        self.done.append(row)
        self.log_step(step.number + 1, f"train_loss:{row['loss']:.6f}", row,
                      self.train_ms + 1000 * (time.perf_counter() - self.clock))
        return True

    def log_step(self, number: int, loss: str, metrics: dict[str, float], ms: float) -> None:
        """In the speedrun's format. number: steps made. ms: of training until now."""
        self.log.print(f"step:{number}/{self.config.steps} {loss} train_time:{ms:.0f}ms "
                       f"step_avg:{ms / max(number, 1):.2f}ms")
        self.log.metrics(metrics, number)

    def read_snapshot(self, step: Step) -> dict[str, float]:
        """The buffer's part of a step's metrics; shrinks the buffer where the need has fallen."""
        snapshot, config = step.snapshot, self.config
        elements = self.tokens_per_step // self.ranks.world_size * 4 * config.dim
        density = [nnz / elements for nnz in snapshot.layer_nnz]
        self.log.write(f"buffer:{step.number + 1}/{config.steps} used:{snapshot.peak_bytes} "
                       f"capacity:{snapshot.capacity_bytes} "
                       f"density:{','.join(f'{d:.4f}' for d in density)}")
        self.needs.append(snapshot.peak_bytes)
        wanted = buffer_capacity(config, max(self.needs[-SETTLE:]))
        if len(self.needs) >= SETTLE and wanted < 0.95 * self.buffer.capacity_bytes:
            self.buffer.resize(wanted)
            self.needs.clear()
        return {"bitsparse/density": sum(density) / len(density),
                **{f"bitsparse/density/layer_{i}": d for i, d in enumerate(density)},
                "bitsparse/buffer_used": snapshot.peak_bytes,
                "bitsparse/buffer_capacity": snapshot.capacity_bytes,
                "bitsparse/bits_per_value":
                    8 * snapshot.stored_bytes / max(1, sum(snapshot.layer_nnz)),
                "bitsparse/overflows": self.overflows}

    def grow(self, step: Step) -> None:
        needed, had = step.snapshot.needed_bytes, step.snapshot.capacity_bytes
        capacity = buffer_capacity(self.config, needed)
        why = f"overflowed the buffer: {needed} bytes needed, {had} there; now {capacity}"
        if step.snapshot.inexact:
            self.buffer.fuses = False
            why = "had activations whose squares do not tell them; now they are not fused"
        try:
            self.buffer.resize(capacity)
        except torch.cuda.OutOfMemoryError:
            stop(f"step {step.number + 1} needs {needed} bytes of activation buffer, it has {had}, "
                 f"and {capacity} are not free on {self.ranks.device}; lower --microbatch-tokens "
                 "or pass --mlp checkpoint")
        self.log.print(f"step {step.number + 1} {why}, and again from that step")

    def start_clock(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.clock = time.perf_counter()

    def stop_clock(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.train_ms += 1000 * (time.perf_counter() - self.clock)

    def run(self) -> tuple[float, float]:
        """Train, one step ahead of the one read. Returns the first and the last val loss."""
        config, steps, pending = self.config, self.config.steps, None
        self.start_clock()
        while True:
            number = self.number
            # at the start, every so many steps, and at the end
            validate = number == steps or number % (config.val_every or steps) == 0
            save = number == steps or number % (config.save_every or steps) == 0
            if validate or save or self.ending:
                settled, pending = self.settle(pending), None
                if not settled:
                    continue
                self.stop_clock()
                if validate and number not in self.vals and not self.ending:
                    loss = self.vals[number] = self.validate(number)
                    self.log_step(number, f"val_loss:{loss:.4f}", {"val_loss": loss}, self.train_ms)
                if (save or self.ending) and number != self.saved and config.keep:
                    self.save()
                if self.ending:
                    self.end(128 + (self.ranks.signal or signal.SIGTERM),
                             f"told to end, after step {number} of {steps}")
                if number == steps:
                    return self.vals[0], self.vals[steps]
                self.start_clock()
            step = self.step(number)
            self.number += 1
            pending = step if self.settle(pending) else None

    def batch_hash(self) -> str:
        """Of the tokens of the next step, if there is one."""
        slots = range(MICROBATCHES if self.number < self.config.steps else 0)
        return hash_of(*(self.train.microbatch(self.number, i).numpy() for i in slots))

    def save(self) -> None:
        """Begin to write a checkpoint; between settled steps only."""
        def on_host(t: Tensor) -> Tensor | None:
            finite.append(t.isfinite().all())
            return t.detach().to("cpu", copy=True) if self.log.master else None

        finite, buffer, self.saved = [], self.buffer, self.number
        checkpoint = {
            "config": asdict(self.config),
            "model": {name: on_host(p) for name, p in self.model.named_parameters()},
            "muon": [on_host(t) for t in self.muon.whole_state()],
            "adam": [on_host(t) for t in self.adam.whole_state()],
            "run": {name: getattr(self, name) for name in self.STANDING} | {
                "buffer_bytes": buffer and buffer.capacity_bytes,
                "run_id": self.log.run_id, "sources": hash_of(*SOURCES)}}
        if not torch.stack(finite).all():  # what all ranks see
            self.end(1, f"the weights or moments after step {self.number} are not finite; lower "
                        "--muon-lr and --adam-lr")
        if self.log.master:
            checkpoint["run"] |= {"log_bytes": self.log.file.tell(), "batch": self.batch_hash()}
            self.finish_saving()
            path = Path(self.config.log_dir, self.log.run_id, f"step-{self.number:08}.pt")
            written = self.writer.submit(write_checkpoint, path, checkpoint, self.config.keep)
            self.writing = path, written

    def finish_saving(self) -> bool:
        """Wait for the checkpoint under way. False, and said in the log, if it was not written."""
        if self.writing is None:
            return True
        (path, written), self.writing = self.writing, None
        if failure := written.result():
            self.log.print(f"{failure}; the last checkpoint is {self.newest or 'none'}")
            return False
        self.newest = str(path)
        return True

    @torch.no_grad()
    def restore(self, path: str) -> None:
        checkpoint = read_checkpoint(path)
        run = checkpoint["run"]
        damaged = zipfile.ZipFile(path).testzip()  # torch.load does not compare the checksums
        if damaged:
            stop(f"checkpoint {path} is damaged in {damaged}; take an earlier one")
        try:
            self.model.load_state_dict(checkpoint["model"])
            self.muon.load(checkpoint["muon"])
            self.adam.load(checkpoint["adam"])
        except (RuntimeError, ValueError) as error:
            stop(f"checkpoint {path} does not fit this version of train_gpt.py: "
                 f"{' '.join(str(error).split())}")
        for name in self.STANDING:
            setattr(self, name, run[name])
        self.saved = self.number
        if self.buffer is not None:
            self.buffer.resize(max(run["buffer_bytes"], self.config.buffer_mib * MIB))
        if run["batch"] != self.batch_hash():
            stop(f"--data {self.config.data}: the next batch is not the one that the run of {path} "
                 "would have had; expected the shards that it began with")
        self.log.rewind(run["log_bytes"])
        self.log.print(f"resumed from {path}, at step {self.number} of {self.config.steps}")

    def end(self, status: int, sentence: str) -> None:
        """End all ranks, which come here together, when rank 0 has put everything away."""
        if self.log.master:
            self.finish_saving()
            sentence += "; " + (f"resume from {self.newest}" if self.newest
                                else "there is no checkpoint")
            self.log.write(sentence)
            print(f"train_gpt.py: {sentence}", file=sys.stderr, flush=True)
            self.log.close(status)
        self.ranks.sum_(torch.zeros(1, device=self.ranks.device))  # a rank that ends, ends the rest
        self.ranks.leave()
        sys.exit(status)

    def summarize(self, first_val: float, last_val: float) -> None:
        config, rows, last = self.config, self.done, self.done[-1]
        speed = 1000 * config.steps * self.tokens_per_step / self.train_ms
        most = max(row["vram/bytes_per_token"] for row in rows)
        peak = max(row.get("vram/peak_mib", 0) for row in rows)
        weights = hash_of(*(p.detach().view(torch.uint8).cpu().numpy()
                            for p in self.model.parameters()))
        self.log.write("summary: " + json.dumps({
            "run_id": self.log.run_id, "mlp": config.mlp, "steps": config.steps,
            "tokens": config.steps * self.tokens_per_step, "world_size": self.ranks.world_size,
            "device": self.ranks.device_name(), "torch": torch.__version__,
            "triton": triton.__version__, "first_val_loss": first_val, "val_loss": last_val,
            "train_ms": self.train_ms, "tokens_per_second": speed,
            "step_ms_median": statistics.median(row["step_ms"] for row in rows),
            "bytes_per_token": most, "bytes_per_token_last": last["vram/bytes_per_token"],
            "peak_mib": peak, "overflows": self.overflows, "weights_sha256": weights,
            "density": [last[k] for k in last if k.startswith("bitsparse/density/")]}))
        if self.cuda:
            self.log.print(f"peak memory allocated: {peak:.0f} MiB "
                           f"reserved: {torch.cuda.max_memory_reserved() / MIB:.0f} MiB")
            self.log.print(f"VRAM of a microbatch, the buffer included: {most:.0f} bytes/token at "
                           f"most, {last['vram/bytes_per_token']:.0f} in the last step")
        self.log.print(f"weights sha256: {weights}")
        self.log.print(f"val loss: {first_val:.4f} at the start, {last_val:.4f} at the end")
        self.log.print(f"tokens/s: {speed:.0f}")


def print_plan(config: Config, ranks: Ranks) -> None:
    with torch.device("meta"):
        model = GPT(config, None)
    batches, _ = len(TrainData(config).batches), ValData(config)
    microbatch, total = config.microbatch_tokens, MICROBATCHES * config.microbatch_tokens
    # bytes of each rank: parameters, gradients, its part of Muon's one moment and of Adam's two
    held = sum(p.nbytes * (2 + (1 if name.startswith("blocks") else 2) / ranks.world_size)
               for name, p in model.named_parameters())
    elements = config.layers * 4 * config.dim  # of the MLP's hidden activation, a token
    capacity = first_capacity(config) if config.mlp == "bitsparse" else 0
    hidden = {"bitsparse": capacity / microbatch + elements * bits_per_element(0) / 8,
              "dense": 2 * elements, "checkpoint": 0, "eager": 4 * elements}[config.mlp]
    peak = held + microbatch * (hidden + config.layers * config.dim * KEPT_BYTES)
    time_known = f"not known before a run of this model has finished in {config.log_dir}"
    like = {name: getattr(config, name)
            for name in ("layers", "dim", "microbatch_tokens", "mlp", "head")}
    like |= {"device": ranks.device_name(), "world_size": ranks.world_size}
    for path in sorted(Path(config.log_dir).glob("*.txt"), key=os.path.getmtime):
        lines = re.findall(r"^(?:config|summary): (\{.*\})", path.read_text(errors="replace"), re.M)
        run = {key: value for line in lines for key, value in json.loads(line).items()}
        if "tokens_per_second" in run and like.items() <= run.items():  # the newest one counts
            time_known = (f"{config.steps * total / run['tokens_per_second']:.0f} s without "
                          f"validation, at the {run['tokens_per_second']:.0f} tokens/s of run "
                          f"{run['run_id']}")
    if ranks.rank == 0:
        print(ranks.describe(),
              f"parameters: {sum(p.numel() for p in model.parameters())}; with gradients and "
              f"moments {held / MIB:.0f} MiB",
              f"tokens: {config.steps} steps x {total} = {config.steps * total}; {config.data} has "
              f"{batches} batches, --epochs {config.epochs}",
              f"activation buffer at the start: {capacity / MIB:.0f} MiB",
              f"MLP's hidden activations: {hidden:.0f} bytes/token",
              f"predicted peak VRAM of a GPU in training: {peak / MIB:.0f} MiB",
              f"time: {time_known}", "nothing was trained (--dry-run)", sep="\n")
    ranks.leave()


def train(config: Config, ranks: Ranks) -> None:
    log = Log(config, ranks)
    trainer = Trainer(config, ranks, log)
    log.print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters, {config.steps} "
              f"steps of {trainer.tokens_per_step} tokens from {config.data}, --mlp {config.mlp}")
    if trainer.cuda:  # a CPU has nothing to compile
        trainer.warm_up()
    trainer.summarize(*trainer.run())
    saved = trainer.finish_saving()
    log.close(not saved)
    ranks.leave()
    if not saved:
        stop("the run is over and in its log, but its last weights are not saved")


def main() -> None:
    config = parse_config(sys.argv[1:])
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
        # which would fill each empty tensor with NaN, for those that read before they write
        torch.utils.deterministic.fill_uninitialized_memory = False
        for name, value in DETERMINISTIC_INDUCTOR.items():
            setattr(torch._inductor.config, name, value)
    ranks = start_ranks(config.head)
    ranks.catch_signals()
    try:
        (print_plan if config.dry_run else train)(config, ranks)
    except torch.cuda.OutOfMemoryError as error:
        stop(f"{ranks.device} has too little memory: {str(error).splitlines()[0]} Lower "
             "--microbatch-tokens or --val-sequence, or pass --mlp checkpoint")
    except RuntimeError as error:  # of gloo or NCCL, where a rank is gone
        if ranks.world_size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            stop("ended, since another rank did")
        raise


if __name__ == "__main__":
    main()
