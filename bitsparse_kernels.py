"""BitSparse: ReLU and ReLU² activations, saved for the backward pass losslessly compressed.

Problem. An MLP y = relu(x w1ᵀ)² w2ᵀ keeps its hidden activation, [tokens, h] in bf16, from
forward to backward: 2 bytes an element, the largest thing a transformer block saves. Most of
those elements are zero. Here one bit an element says which are not, and those that are not are
packed densely into one preallocated buffer. Nothing in it asks the host: sizes, offsets and
overflow stay on the device.

Format. The activation is read as one flat row of n elements, cut into tiles of TILE = 2048, a
tile into 8 groups of 256 (the last tile is filled up with elements that are not stored). In a
group, element e = 8 * lane + word, with lane in 0..31 and word in 0..7:

    mask   int32 [tiles, 64]   word w of group g stands at 8 g + w; its bit `lane` is 1 where
                               element 256 g + 8 lane + w of the tile is stored. 256 bytes a tile.
    heads  int64 [tiles + 1]   of each tile. Bits 0..39: where in the buffer its values begin, in
                               units of 16 bytes. Bits 40..51: how many values it has (nnz). Codec
                               "exponent" only: bits 52..59 the smallest exponent among them, bits
                               60..63 how many bits the others' distance from it takes (0 to 8; or
                               9 to 15: see Patches). The last head is the buffer's generation: see
                               Lifetime.
    values in the buffer       in the order (group, word, lane): the value of element (g, w, lane)
                               is number k = popcount(all mask words of the tile before 8 g + w) +
                               popcount(mask word & ((1 << lane) - 1)). It takes `width` bits, from
                               bit k * width of the tile's bytes on; bit i is bit i % 8 of byte
                               i // 8. A tile's nnz * width bits are rounded up to a multiple of
                               16 bytes (what the padding holds is undefined).
    scale  float32 [1]         with fp8 storage only: what the stored value is multiplied by.

    codec        width, bf16     width, fp8 e4m3 (e5m2)   a value's bits v are stored as
    "raw"        16              8                        v
    "sign"       15              7                        v without the sign bit, which is 0
    "exponent"   7 + 0 to 8      3 + 0 to 4 (2 + 0 to 5)  v - (smallest exponent << 7, 3 or 2)

    Patches. A tile's few smallest values may make all of its exponents take more bits. So with
    codec "exponent" and bf16, where that makes a tile smaller, a value has 10 bits: the low ones of
    d = v - (base << 7) modulo 2^15, which are all of d where v's exponent is the base or one of the
    7 above it. Each other value has a patch of 16 bits: bits 0..10 say which value it is, k; bits
    11..15 are bits 10..14 of its d. Patches, in any order, and zeros behind them fill the tile from
    the first multiple of 16 bits behind its values on. Of the head, bits 52..59 are the base, and
    bits 60..63 are 9 + the number (0 to 6) of 16-byte vectors behind those that the values begin.

    To read one element by hand (bf16, "raw"): x[5000] of a [2, 4096] tensor is in tile 5000 //
    2048 = 2, at 904 in it: group 3, offset 136 = 8 * 17 + 0: lane 17, word 0. Is bit 17 of
    mask[2, 24] set? If not, it is 0. If so, with k the popcount of mask[2, 0:24] and of the 17 low
    bits of mask[2, 24], its bf16 is in the two bytes of the buffer from 16 * (heads[2] & (2**40 -
    1)) + 2 k.

    The order (group, word, lane) lets a warp find every rank with two popcounts and no scan over
    elements, since the 32 bits of a mask word belong to the 32 lanes of a warp. Tiles come to lie
    in the buffer in the order in which the device reserved room for them, which differs between
    runs; what is read back does not.

Lossless. Stored is every element that is positive or NaN, subnormals and +inf among them; −0 and
negative elements come back as +0. So with bf16 storage decompress(compress(x)) equals
torch.relu(x) bit for bit wherever that is positive, is NaN where it is NaN ("raw" keeps a NaN's 16
bits, the other codecs all but its sign; what torch.relu makes of them differs between devices),
and is +0 elsewhere. The backward pass computes post = bf16(r * r) and dz = bf16(dh * 2r), products
in float32, each rounded once: what the dense path computes. (With save="dense", r is rebuilt as
bf16(sqrt(post)), which is r whenever r² is a normal bf16, that is for 2^-63 <= r < 2^64. Where
relu2_mlp fuses, "bitsparse" takes r from post too, but never wrongly: see "Fusing".)

fp8 storage rounds every value once, to nearest, at one scale for the tensor, which maps its largest
finite value to the largest of fp8; r is then that fp8 value times the scale, and the codecs keep it
exactly. The mask is that of x: a positive value that rounds to fp8's zero still counts as stored.
+inf stays +inf in e5m2 and becomes NaN in e4m3, which has none; a NaN is stored as 0x7F.

Size. bits_per_element(density, codec, storage) = 1 (mask) + 64 / TILE (head) + width * density + 8
* 7.5 / TILE (mean padding): at density 0.2 in bf16, "raw" takes 1 + 0.031 + 3.2 + 0.029 = 4.26
bits, "sign" 4.06, "exponent" at 10.6 bits a value, patches included, 3.18; against 16 dense.

Capacity. The buffer never grows by itself and nothing is ever written past its end. Every tile
reserves its bytes by an atomic add on a device counter, which goes on counting past the capacity:
so the needed size is known exactly. With `stripes` there are several counters, each of its own part
of the buffer, an equal one, so that tiles wait less for each other; tile t takes counter t modulo
stripes, and what is needed is stripes times the fullest part. A tile that does not fit whole into
its part is not written at all, it reads back as zeros, and `overflowed()` is true from then until
`resize()` has made room: whoever uses the results must test it (train_gpt.py turns such a step into
one without effect, on the device, and repeats it with a larger buffer).

Fusing. On compute capability 9.0 relu2_mlp makes the first GEMM and relu² in one kernel, and stores
r = bf16(sqrt(post)), z being in no memory. That kernel checks every r. Where one is no exact root
(0 < r < 2^-63, NaN, r >= 2^64; from 2^31 on r may be taken for such), it sets a flag, and
`overflowed()` is true as if values did not fit. resize() then ends fusing with this buffer, so that
the repeated step is exact, and the next resize() clears the flag; or the first one, if buffer.fuses
was set to False before, as a host does that has read snapshot().inexact. In backward dy w2 and dz
are made in one kernel too, dh being in no memory. It takes r from post, which is decompressed for
dw2, and writes dz in its place; but not if anything was stored unchecked since reset().

Lifetime. What is written into the buffer lives until its next reset(): one reset() before each
forward, and the backward of that forward before the next reset(). reset() begins a new
generation, whose number heads carry; an operator that is given heads of another one reads zeros and
sets the stale flag, which makes `overflowed()` true from then on, and snapshot().stale say why.

torch.compile sees opaque operators without mutated arguments, so there is no graph break and no
copy of the buffer: they find it by its number (an int). The contract that makes this sound: a
tile's values are written by the one operator call that returns its `mask` and `heads`, and read
only by operators that take these two; so data dependence orders writes before reads. Reservations
commute, so the layers may run in any order.

Activation checkpointing. torch.utils.checkpoint runs the forward of a block twice, and drops what
the first pass saves. So nothing is stored in that one, and the second, in backward, stores as ever:
with use_reentrant=True the first runs without gradients, else it is known by the name of
checkpoint's hook. Where it is not known, both store, which is right and takes twice the room:
inside torch.compile, and in selective checkpointing whose policy does not save the operator. With
one that does, it runs once, compiled or not:
create_selective_checkpoint_contexts([torch.ops.bitsparse.mlp_forward.default]).

Usage:

    buffer = ActivationBuffer(capacity_bytes=2**30, device="cuda")
    buffer.reset()                                     # before each forward
    y = relu2_mlp(x, w1, w2, buffer=buffer)            # x [..., d], w1 [h, d], w2 [d, h], all bf16
"""
import functools
import itertools
import math
import os
import warnings
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["ActivationBuffer", "BitSparseTensor", "BufferSnapshot", "bits_per_element", "compress",
           "decompress", "optimal_bits_per_element", "relu2_mlp", "relu_mlp"]

# -----------------------------------------------------------------------------
# Constants

GROUP = 256  # elements whose mask is 8 words of 32 bits
TILE = 2048  # elements that share one head, and are one program's work
DENSE_BLOCK = 1024  # elements a program of the dense kernels: 100 % and 86 % of the copy roofline,
# the best of 1024 to 8192 by 4 or 8 warps (H200, [65536, 3072], 2026-11-30)
LINEAR_BLOCK = 128, 256, 64  # of tokens, of hidden units and of d in the kernels of fused GEMMs
ALIGN = 16  # bytes: a tile's values begin on a 16-byte vector
# How far, in bf16's bits, the base of a tile with patches lies below its largest, 7 3/8 octaves.
# So little that is above the largest one's power of two is patched, and less at the other end. For
# normal values of one scale 7 1/4 would be best, for those of many scales 7 3/4.
WINDOW = 7 * 128 + 48
TILE_GROUPS = TILE // GROUP
TILE_WORDS = TILE // 32
SAVES = ("bitsparse", "dense", "checkpoint")
CODECS = ("raw", "sign", "exponent")
# storage dtype: bits of a value, bits of its mantissa
STORAGES = {torch.bfloat16: (16, 7), torch.float8_e4m3fn: (8, 3), torch.float8_e5m2: (8, 2)}
# What +inf is in fp8, by mantissa bits, as conversions differ: NaN where fp8 has no infinity
FP8_INF = {3: 0x7F, 2: 0x7C}
STRIPES = 8  # of a buffer from so many MiB on; see ActivationBuffer
# ActivationBuffer.state, int64: bytes needed between two resets, the most since snapshot() and the
# most since resize(); all that were stored since snapshot() (a reset's at a time); generation;
# stale; inexact, see "Fusing"
PEAK, NEEDED, TOTAL, GENERATION, STALE, INEXACT = range(6)
# ActivationBuffer.counters, int64, of a stripe: bytes asked for since reset(); then nnz by layer
CURSOR, NNZ = range(2)


def bits_per_element(density: float, codec: str = "raw", storage: torch.dtype = torch.bfloat16,
                     exponent_bits: float | None = None) -> float:
    """Expected saved bits an element at `density` (stored of all elements), for whole tiles.

    mask + head + values + padding: a tile's bits are rounded up to a multiple of 16 bytes, on
    average by 7.5 bytes. exponent_bits, for codec "exponent": the mean over the values, patches
    included (None: the most that there can be).
    """
    bits, mantissa = STORAGES[storage]
    width = {"raw": bits, "sign": bits - 1,
             "exponent": mantissa + (bits - 1 - mantissa if exponent_bits is None
                                     else exponent_bits)}[codec]
    return 1 + 64 / TILE + width * density + (8 * 7.5 / TILE if 0 < density < 1 else 0)


def optimal_bits_per_element(density: float, storage: torch.dtype = torch.bfloat16,
                             exponent_entropy: float | None = None) -> float:
    """Entropy bound, in bits, of an element that is stored with probability `density`.

    H(density) for the mask, elements taken as independent, and for each stored value its mantissa
    bits, taken as uniform, and the entropy of its exponent (None: all of the exponent's bits).
    """
    bits, mantissa = STORAGES[storage]
    if exponent_entropy is None:
        exponent_entropy = bits - 1 - mantissa
    mask = -sum(p * math.log2(p) for p in (density, 1 - density) if p > 0)
    return mask + density * (mantissa + exponent_entropy)


# -----------------------------------------------------------------------------
# Storage

_buffers: "weakref.WeakValueDictionary[int, ActivationBuffer]" = weakref.WeakValueDictionary()
_buffer_numbers = itertools.count()


class BufferSnapshot:
    """The buffer's counters at one moment, on their way to the host; ActivationBuffer.snapshot().

    ready() tells, without waiting, whether they have arrived; the properties wait if need be.
    """

    def __init__(self, state: Tensor, capacity_bytes: int):
        # state: ActivationBuffer.state, and behind it nnz by layer
        self.capacity_bytes = capacity_bytes  # at that moment
        self._event = None
        if state.device.type == "cuda":
            self._host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
            self._host.copy_(state, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = state.clone()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def _read(self, i: int) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._host[i])

    @property
    def peak_bytes(self) -> int:
        """The most bytes needed between two resets since the snapshot before this one."""
        return self._read(PEAK)

    @property
    def stored_bytes(self) -> int:
        """All bytes asked for since the snapshot before this one, without what stripes waste."""
        return self._read(TOTAL)

    @property
    def overflowed(self) -> bool:
        """Whether more than the capacity was asked for, or anything inexact; no resize() since."""
        return self._read(NEEDED) > self.capacity_bytes or self.inexact

    @property
    def inexact(self) -> bool:
        """Whether activations were not the roots of their squares: see "Fusing" above."""
        return self._read(INEXACT) != 0

    @property
    def stale(self) -> bool:
        """Whether anything was ever read that a reset() had dropped: a mistake of the caller."""
        return self._read(STALE) != 0

    @property
    def needed_bytes(self) -> int:
        """The most bytes needed between two resets since the last resize(), or an overflow's."""
        return self._read(NEEDED)

    @property
    def layer_nnz(self) -> list[int]:
        """Values stored since the snapshot before this one, by layer."""
        return [self._read(i) for i in range(INEXACT + 1, len(self._host))]


class ActivationBuffer:
    """A preallocated buffer for the stored values of all layers of one microbatch.

    capacity_bytes: size in bytes, rounded up to a multiple of 16 * stripes.
    device: "cuda" or "cpu".
    layers: how many layers have their stored values counted apart (see BufferSnapshot.layer_nnz).
    stripes: see "Capacity" above. 1 wastes no room, and is taken below STRIPES MiB; STRIPES, taken
    from there on, has compress reach 95 % of an H200's copy roofline and not 84 % (2026-11-30), and
    the fullest part of a buffer of that size is less than a hundredth fuller than the mean.
    No method but resize() waits for the device.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str, layers: int = 1,
                 stripes: int | None = None):
        for name, number in (("layers", layers), ("stripes", stripes)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected 1 or more, received {number}")
        self.number = next(_buffer_numbers)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.layers = layers
        self._stripes = stripes
        self.fuses = True  # until something inexact is met: see "Fusing" above
        self.checked = True  # until relu2_mlp stores what it has not checked; then until reset()
        self.state = torch.zeros(INEXACT + 1, dtype=torch.int64, device=self.device)
        self._allocate(capacity_bytes)
        _buffers[self.number] = self

    def _allocate(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: expected 0 or more, received {capacity_bytes}")
        self.arena = None  # frees the old memory first: both sizes are never held at once
        stripes = self._stripes or (STRIPES if capacity_bytes >= STRIPES * 2**20 else 1)
        # whole lines of 128 bytes a stripe: neighbours in one would wait for each other
        self.counters = self.state.new_zeros(stripes, -(-(NNZ + self.layers) // 16) * 16)
        size = -(-capacity_bytes // (ALIGN * stripes)) * ALIGN * stripes
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)

    @property
    def capacity_bytes(self) -> int:
        return self.arena.numel()

    @property
    def stripes(self) -> int:
        return len(self.counters)

    @property
    def part_bytes(self) -> int:
        """A stripe's part of the capacity."""
        return self.capacity_bytes // self.stripes

    def _needed(self) -> Tensor:
        return self.counters[:, CURSOR].amax() * self.stripes

    @torch.compiler.disable  # the compiler would not see that operators count in state
    def reset(self) -> None:
        """Drop everything stored. What was compressed before this can no longer be read."""
        self.state[PEAK: NEEDED + 1].clamp_(min=self._needed())
        self.state[TOTAL] += self.used_bytes()
        self.state[GENERATION] += 1
        self.counters[:, CURSOR].zero_()
        self.checked = True

    def used_bytes(self) -> Tensor:
        """int64 device scalar: bytes asked for since the last reset, whether they fitted or not."""
        return self.counters[:, CURSOR].sum()

    def overflowed(self) -> Tensor:
        """bool device scalar: whether anything did not fit, was inexact or stale: see resize().

        Then what was computed with this buffer is wrong, and no optimizer may take it.
        """
        most = torch.maximum(self._needed(), self.state[NEEDED])
        return (most > self.capacity_bytes) | (self.state[STALE: INEXACT + 1] != 0).any()

    @torch.compiler.disable  # the compiler would not see that operators count in state
    def snapshot(self) -> BufferSnapshot:
        """Drop everything stored, send the counters to pinned memory, and begin to count anew."""
        self.reset()
        nnz = self.counters[:, NNZ: NNZ + self.layers]
        snapshot = BufferSnapshot(torch.cat([self.state, nnz.sum(0)]), self.capacity_bytes)
        for counter in (self.state[PEAK], self.state[TOTAL], nnz):
            counter.zero_()
        return snapshot

    @torch.compiler.disable  # the compiler would not see that operators count in state
    def resize(self, capacity_bytes: int) -> None:
        """Give the buffer another size, and drop its contents. Between steps only.

        Waits for the device while the buffer fuses, and ends that if anything was inexact.
        An overflow that the new size would not have prevented stays, and so do the stale flag and,
        while the buffer fuses, the inexact one: they may come from a step that the device is still
        at work on, and that nobody has read yet.
        """
        inexact = self.state[INEXACT] * self.fuses
        self.fuses = self.fuses and not inexact
        needed = torch.maximum(self._needed(), self.state[NEEDED])
        needed *= needed > self.capacity_bytes
        generation, stale = self.state[GENERATION] + 1, self.state[STALE].clone()
        self._allocate(capacity_bytes)
        self.state.zero_()
        for counter, value in ((NEEDED, needed), (GENERATION, generation), (STALE, stale),
                               (INEXACT, inexact)):
            self.state[counter] = value


def _find_buffer(number: int) -> ActivationBuffer:
    try:
        return _buffers[number]
    except KeyError:
        raise RuntimeError(f"activation buffer {number} is gone: keep a reference to the "
                           f"ActivationBuffer until the backward pass is over") from None


@dataclass(frozen=True)
class BitSparseTensor:
    """relu(x) in compressed form; readable until its buffer's next reset().

    saved: mask, heads and, for fp8, scale: see the module's docstring. buffer: holds the values.
    shape: of x.
    """

    saved: list[Tensor]
    buffer: ActivationBuffer
    shape: torch.Size
    codec: str
    storage: torch.dtype


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _new_saved(like: Tensor, n: int, storage: torch.dtype) -> list[Tensor]:
    """mask, heads and, for fp8, scale of n elements, on the device of `like`, to be filled in."""
    saved = [like.new_empty((_tiles(n), TILE_WORDS), dtype=torch.int32),
             like.new_empty((_tiles(n) + 1,), dtype=torch.int64)]
    if storage != torch.bfloat16:
        saved.append(like.new_empty((1,), dtype=torch.float32))
    return saved


def _fp8_scale(z: Tensor, storage: torch.dtype) -> Tensor:
    """float32 [1]: the largest finite positive element becomes the largest value of fp8."""
    bits = z.view(torch.int16).flatten()  # of positive floats, in the same order as these
    most = bits.new_zeros(1, dtype=torch.int32)
    if z.is_cuda:
        _largest_kernel[(triton.cdiv(z.numel(), 8192),)](bits, most, z.numel(), BLOCK=8192)
    elif z.numel():
        most[0] = bits.masked_fill(bits >= 0x7F80, 0).amax().clamp(min=0)
    scale = (most << 16).view(torch.float32) * (1 / torch.finfo(storage).max)  # as a GPU divides
    least = torch.finfo(torch.float32).tiny  # the inverse of a subnormal one would be infinite
    return scale.clamp(min=least).masked_fill(most == 0, 1)  # no number is sent to a GPU


# -----------------------------------------------------------------------------
# Reference: pure torch, the same bits as the kernels; also what runs on a CPU


def _ceil(a: Tensor, b: int) -> Tensor:
    return (a + b - 1) // b


def _layout(heads: Tensor, codec: str,
            storage: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each tile: the width of a value in bits; what is subtracted from its bits; the tile's
    bytes; and its slots, how many of their last 16 bits are for patches."""
    bits, mantissa = STORAGES[storage]
    nnz, code = heads >> 40 & 0xFFF, heads >> 60 & 15
    width, least = torch.full_like(heads, bits - (codec == "sign")), torch.zeros_like(heads)
    if codec == "exponent":
        width, least = mantissa + code.where(code < 9, 3), (heads >> 52 & 255) << mantissa
    tile_bytes = (_ceil(nnz * width, 8 * ALIGN) + (code - 9).clamp(min=0)) * ALIGN
    slots = torch.where(code < 9, 0, tile_bytes // 2 - _ceil(nnz * width, 16))
    return width, least, tile_bytes, slots


def _heads_with_patches(heads: Tensor, v: Tensor, stored: Tensor) -> Tensor:
    """Heads of codec "exponent", bf16, but with patches in the tiles that they make smaller.

    v: int64 [tile, (group, word, lane)].
    """
    nnz, largest = stored.sum(1), v.masked_fill(~stored, 0).amax(1)
    base = (largest.clamp(max=0x7F80) - WINDOW).clamp(min=0) >> 7
    patches = (stored & (v - (base << 7)[:, None] & 0x7C00 != 0)).sum(1)
    vectors = _ceil(_ceil(nnz * 10, 16) + patches, 8)
    extra = vectors - _ceil(nnz * 10, 128)
    *_, tile_bytes, _ = _layout(heads, "exponent", torch.bfloat16)
    smaller = (vectors * ALIGN < tile_bytes) & (extra <= 6)
    return torch.where(smaller, nnz << 40 | base << 52 | 9 + extra << 60, heads)


def _fit(base: Tensor, tile_bytes: Tensor, buffer: ActivationBuffer) -> Tensor:
    stripe = torch.arange(len(base), device=base.device) % buffer.stripes
    return base + tile_bytes <= (stripe + 1) * buffer.part_bytes


def compress_reference(z: Tensor, buffer: ActivationBuffer, power: int, codec: str = "raw",
                       storage: torch.dtype = torch.bfloat16, layer: int = 0) -> list[Tensor]:
    """Store relu(z) in the buffer and, for power 1 or 2, replace z by relu(z)**power (0: leave it).

    z: bf16, contiguous. Returns mask, heads and, for fp8, scale.
    """
    n = z.numel()
    x = torch.zeros(_tiles(n) * TILE, dtype=torch.bfloat16, device=z.device)
    x[:n] = z.flatten()
    # [tile, (group, word, lane)]: the order of the values
    x = x.view(-1, TILE_GROUPS, 32, 8).transpose(2, 3).flatten(1)
    stored = ~(x <= 0)
    lane = torch.arange(32, device=z.device)
    mask = (stored.view(-1, TILE_WORDS, 32).long() << lane).sum(-1).to(torch.int32)

    bits, mantissa = STORAGES[storage]
    scale = [] if bits == 16 else [_fp8_scale(z, storage)]
    if scale:
        v = (x.float() * (1 / scale[0])).to(storage).view(torch.uint8).long()
        v = v.masked_fill(x == math.inf, FP8_INF[mantissa])
    else:
        v = x.view(torch.int16).long() & 0xFFFF
    if codec != "raw" or scale:
        v &= (1 << bits - 1) - 1
    nnz = stored.sum(1)
    heads = nnz << 40
    if codec == "exponent":
        exponent = v >> mantissa
        least = exponent.masked_fill(~stored, 255).amin(1)
        spread = exponent.masked_fill(~stored, 0).amax(1) - least
        width = sum((spread >= 1 << i).long() for i in range(8))
        heads += torch.where(nnz > 0, least << 52 | width << 60, 0)
        if not scale:
            heads = _heads_with_patches(heads, v, stored)

    width, least, tile_bytes, slots = _layout(heads, codec, storage)
    base = torch.empty_like(tile_bytes)
    for stripe, counters in enumerate(buffer.counters):
        of_stripe = slice(stripe, None, buffer.stripes)
        mine = tile_bytes[of_stripe]
        base[of_stripe] = stripe * buffer.part_bytes + counters[CURSOR] + mine.cumsum(0) - mine
        counters[CURSOR] += mine.sum()
        counters[NNZ + layer] += nnz[of_stripe].sum()
    # the bit stream in 16-bit halves: a value lies in one of them, or in one and the next
    end_half = tile_bytes.cumsum(0) // 2
    first_half = end_half - tile_bytes // 2
    rank = stored.cumsum(1) - 1
    bit = rank * width[:, None]
    half = (first_half[:, None] + bit // 16)[stored]
    v -= least[:, None]
    halves = torch.zeros(int(tile_bytes.sum()) // 2 + 1, dtype=torch.int64, device=z.device)
    missing = v & 0x7C00  # of a tile with patches
    patched = stored & (slots > 0)[:, None] & (missing != 0)
    slot = (end_half - slots)[:, None] + patched.cumsum(1) - 1
    halves[slot[patched]] = (rank | missing << 1)[patched]
    v = ((v & (1 << width)[:, None] - 1) << bit % 16)[stored]
    halves.index_add_(0, half, v & 0xFFFF)
    halves.index_add_(0, half + 1, v >> 16)
    to = torch.arange(len(halves) - 1, device=z.device)
    to += (base // 2 - first_half).repeat_interleave(tile_bytes // 2)
    fits = _fit(base, tile_bytes, buffer).repeat_interleave(tile_bytes // 2)
    buffer.arena.view(torch.int16)[to[fits]] = halves[:-1][fits].to(torch.int16)
    if power:
        activate_reference(z, power)
    heads |= base >> 4
    return [mask, torch.cat([heads, buffer.state[GENERATION, None]]), *scale]


def expand_reference(saved: list[Tensor], buffer: ActivationBuffer, n: int, codec: str = "raw",
                     storage: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """relu(z), [n], and which of it is stored; zeros for tiles that are not there.

    relu(z) is bf16, in which a NaN keeps its bits; or float32 where fp8 is multiplied by its scale.
    """
    mask, heads, *scale = saved
    fresh = heads[-1] == buffer.state[GENERATION]
    buffer.state[STALE] |= ~fresh
    heads = heads[:-1]
    lane = torch.arange(32, device=mask.device)
    stored = ((mask[:, :, None] >> lane) & 1).bool().flatten(1)  # [tile, (group, word, lane)]
    base = (heads & (1 << 40) - 1) << 4
    width, least, tile_bytes, slots = _layout(heads, codec, storage)
    fits = _fit(base, tile_bytes, buffer)
    read = stored & (fits & fresh)[:, None]
    rank = stored.cumsum(1) - 1
    bit = rank * width[:, None]
    half = (base[:, None] // 2 + bit // 16)[read]
    halves = buffer.arena.view(torch.int16)
    v = halves[half].long() & 0xFFFF
    v |= (halves[(half + 1).clamp(max=len(halves) - 1)].long() & 0xFFFF) << 16
    v = (v >> (bit % 16)[read]) & ((1 << width) - 1)[:, None].expand_as(read)[read]
    v += least[:, None].expand_as(read)[read]
    if codec == "exponent":
        there = (torch.arange(64, device=v.device) < slots[:, None]) & (fits & fresh)[:, None]
        tile, slot = there.nonzero(as_tuple=True)
        patch = halves[(base + tile_bytes)[tile] // 2 - 1 - slot].long()
        missing = torch.zeros_like(rank)
        missing.index_put_((tile, patch & 0x7FF), patch >> 1 & 0x7C00, accumulate=True)
        v = v + missing.gather(1, rank.clamp(min=0))[read] & 0x7FFF
    v = v.to(torch.uint8).view(storage).float() * scale[0] if scale else v.to(torch.int16)
    r = torch.zeros(stored.shape, dtype=v.dtype, device=mask.device)
    r[read] = v  # bf16 as int16: the assignment of a single NaN would change its bits
    r = r if scale else r.view(torch.bfloat16)
    return tuple(t.view(-1, TILE_GROUPS, 8, 32).transpose(2, 3).reshape(-1)[:n]
                 for t in (r, stored))


def decompress_reference(saved: list[Tensor], buffer: ActivationBuffer, n: int,
                         codec: str = "raw", storage: torch.dtype = torch.bfloat16,
                         power: int = 1) -> Tensor:
    """relu(z)**power as bf16 [n]; zeros for tiles that did not fit, and for stale ones."""
    r, _ = expand_reference(saved, buffer, n, codec, storage)
    return r.float().square().bfloat16() if power == 2 else r.bfloat16()


def gradient_reference(dh: Tensor, saved: list[Tensor], buffer: ActivationBuffer, power: int,
                       codec: str = "raw", storage: torch.dtype = torch.bfloat16) -> None:
    """Replace dh by dz = bf16(dh * 2r) (power 2) or dh (1) where r = relu(z) is stored, else 0."""
    r, stored = expand_reference(saved, buffer, dh.numel(), codec, storage)
    _differentiate(dh, r.view_as(dh), stored.view_as(dh), power)


def activate_reference(z: Tensor, power: int) -> None:
    """Replace z by relu(z)**power."""
    z.masked_fill_(z <= 0, 0)
    if power == 2:
        z.square_()


def dense_gradient_reference(dh: Tensor, a: Tensor, power: int, from_post: bool) -> None:
    """As gradient_reference, where a is post (from_post); or z, which is replaced by post."""
    r = a.float().sqrt().bfloat16() if from_post and power == 2 else a
    _differentiate(dh, r, ~(r <= 0), power)
    if not from_post:
        activate_reference(a, power)


def _differentiate(dh: Tensor, r: Tensor, stored: Tensor, power: int) -> None:
    """dh bf16; r bf16 or float32, anything where it is not stored; stored bool; of one shape."""
    if power == 2:
        dh.copy_(dh.float() * (2 * r.float()))
    dh.masked_fill_(~stored, 0)


# -----------------------------------------------------------------------------
# Kernels
#
# One program is one warp and one tile. Two-dimensional blocks [32, 8] hold one group: row = lane,
# column = word, so that a thread holds 8 neighbours (one 16-byte access) and 32 threads hold the
# 32 bits of each mask word. STAGED kernels rely on that assignment of rows to threads, which Triton
# chooses for 16-byte accesses by one warp; _staging_works() checks it, by result, before use.

# The address of room for a tile's values; and behind them for its mask words, and behind those for
# the address of each word's first value.
_STAGE_ASM = tl.constexpr(
    f"{{ .shared .align 16 .b8 stage[{2 * TILE}]; mov.u32 $0, stage; }}")
_STAGE_WITH_WORDS_ASM = tl.constexpr(
    f"{{ .shared .align 16 .b8 stage[{2 * TILE + 8 * TILE_WORDS}]; mov.u32 $0, stage; }}")
_GENERATION, _STALE, _INEXACT, _NNZ, _WINDOW = map(
    tl.constexpr, (GENERATION, STALE, INEXACT, NNZ, WINDOW))
_TILE, _TILE_GROUPS, _TILE_WORDS = map(tl.constexpr, (TILE, TILE_GROUPS, TILE_WORDS))
# What the lanes have written to shared memory can be read by the others.
_SYNC_ASM = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
_STAGE_GET_WORD_ASM = tl.constexpr("ld.shared.b32 $0, [$1];")
_STAGE_PUT_WORD_ASM = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
_POPC_ASM = tl.constexpr("popc.b32 $0, $1;")


def _stored_asm(pairs: bool, first: int) -> str:
    """Into predicates p0 to p7, which of eight bf16 in $first and the three after it are stored.

    pairs: two by one comparison, from compute capability 9.0 on.
    """
    if pairs:
        return "\n".join(f"setp.gtu.bf16x2 p{2 * i}|p{2 * i + 1}, ${first + i}, zero;"
                         for i in range(4))
    return "\n".join(
        f"max.NaN.bf16x2 pair, ${first + i}, zero; setp.gt.u32 p{2 * i + 1}, pair, 0xffff;"
        f"and.b32 pair, pair, 0xffff; setp.ne.u32 p{2 * i}, pair, 0;" for i in range(4))


_NOTHING_ASM = "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
# Eight elements a call, of the lane in $12. Their mask words go to the shared address $4, from two
# lanes: of two stores by one, ptxas makes a branch.
_STAGE_BALLOT_ASM, _STAGE_BALLOT_PAIRS_ASM = (tl.constexpr("\n".join([
    "{ .reg .pred p<8>, first, second; .reg .b32 w<8>, pair, zero; mov.b32 zero, 0;",
    _stored_asm(pairs, 20),
    *(f"vote.sync.ballot.b32 w{i}, p{i}, 0xffffffff;" for i in range(8)),
    "setp.eq.s32 first, $12, 0; setp.eq.s32 second, $12, 1;",
    "@first st.shared.v4.b32 [$4], {w0, w1, w2, w3};",
    "@second st.shared.v4.b32 [$4+16], {w4, w5, w6, w7};",
    _NOTHING_ASM])) for pairs in (False, True))
# Of the eight mask words from the shared address $4, w0 to w7: in at0 to at7, where this lane's
# values are, or would be: after those of the lanes before, whose bits $12 has.
_STAGE_PLACES_ASM = "\n".join([
    "{ .reg .pred p<8>; .reg .b32 w<8>, at<8>, own, x, zero; .reg .b16 v<8>;",
    *(f"ld.shared.v4.b32 {{{r}{i}, {r}{i + 1}, {r}{i + 2}, {r}{i + 3}}}, [$4+{at + 4 * i}];"
      for r, at in (("w", 0), ("at", 4 * TILE_WORDS)) for i in (0, 4)),
    *(f"and.b32 x, w{i}, $12; popc.b32 x, x; mad.lo.u32 at{i}, x, 2, at{i};" for i in range(8)),
    "mov.b32 zero, 0x80008000;"])  # two of -0
_STORED_BY_WORD_ASM = "\n".join([
    "add.s32 own, $12, 1;",
    *(f"and.b32 x, w{i}, own; setp.ne.u32 p{i}, x, 0;" for i in range(8))])
# Eight elements a call: those of $20 to $23 that are stored, as the values in $24 to $27, to their
# places. By pairs that takes fewer instructions; unlike before with -0, as ptxas would else keep 64
# predicates from there.
_STAGE_PUT_ASM, _STAGE_PUT_PAIRS_ASM = (tl.constexpr("\n".join([
    _STAGE_PLACES_ASM, _stored_asm(pairs, 20) if pairs else _STORED_BY_WORD_ASM,
    *(f"mov.b32 {{v{2 * i}, v{2 * i + 1}}}, ${24 + i};" for i in range(4)),
    *(f"@p{i} st.shared.b16 [at{i}], v{i};" for i in range(8)),
    _NOTHING_ASM])) for pairs in (False, True))
# The way back: eight elements, 0 where they are not stored; or their squares. Such a product is
# exact in float32, and where it is too small for that still rounds to the same bf16.
_STAGE_TAKE_ASM, _STAGE_TAKE_SQUARES_ASM = (tl.constexpr("\n".join([
    _STAGE_PLACES_ASM, _STORED_BY_WORD_ASM,
    *(f"mov.b32 x, 0; @p{i} ld.shared.u16 x, [at{i}]; mov.b32 at{i}, x;" for i in range(8)),
    *(f"prmt.b32 ${i}, at{2 * i}, at{2 * i + 1}, 0x5410;" for i in range(4)),
    *(f"fma.rn.bf16x2 ${i}, ${i}, ${i}, zero;" for i in range(4 * square)),
    "}"])) for square in (False, True))
# four of 16-bit elements, and eight of each of the others
_STAGE_TAKE_REGISTERS, _STAGE_BALLOT_REGISTERS, _STAGE_PUT_REGISTERS = (
    tl.constexpr(",".join(["=r"] * 4 + ["r"] * inputs)) for inputs in (16, 20, 24))
# relu(z) and relu(z)**2 of eight elements, bf16.
_RELU_ASM, _RELU2_ASM = (tl.constexpr("\n".join([
    "{ .reg .b32 zero, minus_zero; mov.b32 zero, 0; mov.b32 minus_zero, 0x80008000;",
    *(f"max.NaN.bf16x2 ${i}, ${4 + i}, zero;" for i in range(4)),
    *(f"fma.rn.bf16x2 ${i}, ${i}, ${i}, minus_zero;" for i in range(4 * square)), "}"]))
    for square in (False, True))
# The first lane adds $2 to the counter at $1; and gets what was there. The other lanes, which do
# not, have other addresses: for one address, ptxas would add up over the lanes, in 20 instructions.
_COUNT_ASM, _RESERVE_ASM = (tl.constexpr(
    "{ .reg .pred first; .reg .b64 at; setp.eq.s32 first, $3, 0; mov.b64 $0, 0;"
    f"mad.wide.s32 at, $3, 8, $1; @first {how} [at], $2; }}") for how in (
        "red.relaxed.gpu.global.add.u64", "atom.relaxed.gpu.global.add.u64 $0,"))
_FIRST_LANE_ASM = tl.constexpr("""{
    .reg .b32 low, high;
    mov.b64 {low, high}, $1;
    shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;
    shfl.sync.idx.b32 high, high, 0, 31, 0xffffffff;
    mov.b64 $0, {low, high}; }""")
# 16 bytes from the shared address $1 to the address $2, where $3 is not 0.
_STAGE_WRITE_ASM = tl.constexpr("""{
    .reg .pred inside; .reg .b32 v<4>;
    setp.ne.s32 inside, $3, 0;
    @inside ld.shared.v4.b32 {v0, v1, v2, v3}, [$1];
    @inside st.global.v4.b32 [$2], {v0, v1, v2, v3};
    mov.b32 $0, 0; }""")
_STAGE_GET_ASM = tl.constexpr("ld.shared.u16 $0, [$1];")
# Eight elements a call, one 16-byte vector at the shared address of the first.
_STAGE_PUT_VECTOR_ASM = tl.constexpr("""{
    st.shared.v4.b32 [$4], {$12, $13, $14, $15};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0; }""")
# A copy of the value at the shared address $1 to $2.
_STAGE_COPY_ASM = tl.constexpr(
    "{ .reg .b16 v; ld.shared.b16 v, [$1]; st.shared.b16 [$2], v; mov.b32 $0, 0; }")
def _root_asm(values: str) -> str:
    """Two squares of values that are stored become their roots, bf16; low, high: 32 bits each.

    The error of sqrt.approx is far from what could change the rounding, as all r >= 2^-63 have
    shown.
    """
    return f"""
    shl.b32 low, {values}, 16;
    and.b32 high, {values}, 0xffff0000;
    sqrt.approx.ftz.f32 low, low;
    sqrt.approx.ftz.f32 high, high;
    cvt.rn.bf16x2.f32 {values}, high, low;"""


# Eight values at the shared address $1, each a square: their roots.
_STAGE_ROOT_ASM = tl.constexpr("\n".join([
    "{ .reg .b32 v<4>, low, high; ld.shared.v4.b32 {v0, v1, v2, v3}, [$1];",
    *(_root_asm(f"v{i}") for i in range(4)),
    "st.shared.v4.b32 [$1], {v0, v1, v2, v3}; mov.b32 $0, 0; }"]))
# The smallest and largest of the 16 values at the shared address $2, if $3 > 0; and of 16 squares,
# which become their roots. As bf16, which none of them is below 0 of: so a NaN is the largest, and
# the smallest where there is nothing else.
_STAGE_RANGE_ASM, _STAGE_ROOT_RANGE_ASM = (tl.constexpr("\n".join([
    "{ .reg .pred some; .reg .b32 v<8>, low, high; setp.gt.s32 some, $3, 0;",
    "@some ld.shared.v4.b32 {v0, v1, v2, v3}, [$2];",
    "@some ld.shared.v4.b32 {v4, v5, v6, v7}, [$2+16];",
    *(_root_asm(f"v{i}") for i in range(8 * root)),
    *("@some st.shared.v4.b32 [$2], {v0, v1, v2, v3};",
      "@some st.shared.v4.b32 [$2+16], {v4, v5, v6, v7};")[:2 * root],
    "min.bf16x2 $0, v0, v1; max.NaN.bf16x2 $1, v0, v1;",
    *(f"min.bf16x2 $0, $0, v{i}; max.NaN.bf16x2 $1, $1, v{i};" for i in range(2, 8)),
    "shr.u32 high, $0, 16; and.b32 $0, $0, 0xffff; min.u32 $0, $0, high;",
    "shr.u32 high, $1, 16; and.b32 $1, $1, 0xffff; max.u32 $1, $1, high;",
    "@!some mov.b32 $0, 0xffff; @!some mov.b32 $1, 0; }"])) for root in (False, True))
# Bit i: whether, of the 16 values at the shared address $1, number i less $2 (in both halves of 32
# bits) has more than 10 bits. In pairs, $2 is 0x7b81 less that, and is added: as bf16, values of 10
# bits are then 0x7b81 to infinity, those above NaN, and those below less. (A NaN may have a sign;
# but beside one $2 is 1, and it stays a NaN or becomes 0.)
_STAGE_OUTSIDE_ASM, _STAGE_OUTSIDE_PAIRS_ASM = (tl.constexpr("\n".join([
    "{ .reg .b32 v<8>, high;",
    "ld.shared.v4.b32 {v0, v1, v2, v3}, [$1];",
    "ld.shared.v4.b32 {v4, v5, v6, v7}, [$1+16];",
    "mov.b32 $0, 0; mov.b32 high, 0x7b817b81;",
    *((f"add.u16x2 v{i}, v{i}, $2; set.ltu.u32.bf16x2 v{i}, v{i}, high;" if pairs else f"""
    or.b32 v{i}, v{i}, 0x80008000; sub.s32 v{i}, v{i}, $2;
    and.b32 v{i}, v{i}, 0x7c007c00; add.s32 v{i}, v{i}, 0x7c007c00;
    shr.u32 v{i}, v{i}, {15 - 2 * i};""") +
      f"and.b32 v{i}, v{i}, {0x10001 << 2 * i:#x}; or.b32 $0, $0, v{i};" for i in range(8)),
    "shr.u32 high, $0, 15; or.b32 $0, $0, high; and.b32 $0, $0, 0xffff; }"]))
    for pairs in (False, True))
# The low half of $2 to the shared address $1, where $3 is not 0.
_STAGE_PUT_HALF_ASM = tl.constexpr(
    "{ .reg .pred some; setp.ne.s32 some, $3, 0; @some st.shared.u16 [$1], $2; mov.b32 $0, 0; }")
# $2 is added to the value at the shared address $1, where $2 is not 0.
_STAGE_PATCH_ASM = tl.constexpr("""{
    .reg .pred some; .reg .b32 v;
    setp.ne.s32 some, $2, 0;
    @some ld.shared.u16 v, [$1];
    @some add.s32 v, v, $2;
    @some and.b32 v, v, 0x7fff;
    @some st.shared.u16 [$1], v;
    mov.b32 $0, 0; }""")


def _square_asm(pairs: int) -> str:
    """$0 and following: the squares of a thread's pairs of relu(z), which come behind them.

    Sets the int64 at the address behind those to 1 where a root would not be exact. r - 1 is less
    than 0x1fff for 0 < r < 2^-63 alone, as r is bits and 0 becomes the largest; and where a square
    is infinite or NaN, so is a sum of products with it, even with 0.
    """
    lines = ["{ .reg .pred bad; .reg .b32 zero, ones, less, low<4>, sum<4>;",
             "mov.b32 zero, 0; mov.b32 ones, -1;",
             *(f"mov.b32 low{i}, 0x1fff1fff; mov.b32 sum{i}, 0;" for i in range(4))]
    for i in range(pairs):
        lines += [f"mul.rn.bf16x2 ${i}, ${pairs + i}, ${pairs + i};",
                  f"add.u16x2 less, ${pairs + i}, ones;",
                  f"min.u16x2 low{i % 4}, low{i % 4}, less;"]
        if i % 2:
            s = i // 2 % 4
            lines.append(f"fma.rn.bf16x2 sum{s}, ${i - 1}, ${i}, sum{s};")
    for i in range(1, 4):  # a sum that is not finite ends as NaN
        lines += [f"min.u16x2 low0, low0, low{i};", f"fma.rn.bf16x2 sum0, sum0, zero, sum{i};"]
    return "\n".join([*lines, "fma.rn.bf16x2 sum0, sum0, zero, zero;",
                      "xor.b32 low0, low0, 0x1fff1fff; or.b32 sum0, sum0, low0;",
                      "setp.ne.s32 bad, sum0, 0;",
                      f"@bad st.relaxed.gpu.global.b64 [${2 * pairs}], 1; }}"])


# Twice the roots of two bf16, also of subnormal ones. The error of sqrt.approx, 2^-23, is far from
# what could change the rounding of a bf16's root: none is nearer than 2^-19 to where that changes.
_TWICE_ROOT_ASM = tl.constexpr("""{
    .reg .b32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    sqrt.approx.f32 low, low;
    sqrt.approx.f32 high, high;
    cvt.rn.bf16x2.f32 low, high, low;
    add.rn.bf16x2 $0, low, low; }""")
# Into L2, what stands at $1.
_PREFETCH_ASM = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# $1 * $2 where $2 is positive or NaN, else 0, of two bf16. Such a product is exact in float32, and
# where it is too small for that still rounds to the same bf16.
_TIMES_STORED_ASM = tl.constexpr("""{
    .reg .b32 dz, stored, zero;
    mov.b32 zero, 0;
    mul.rn.bf16x2 dz, $1, $2;
    set.gtu.u32.bf16x2 stored, $2, zero;
    and.b32 $0, dz, stored; }""")

# what a thread of 8 warps has of a block
_LINEAR_PAIRS = LINEAR_BLOCK[0] * LINEAR_BLOCK[1] // 512
_SQUARE_ASM = tl.constexpr(_square_asm(_LINEAR_PAIRS))
_SQUARE_REGISTERS = tl.constexpr(
    ",".join(["=&r"] * _LINEAR_PAIRS + ["r"] * _LINEAR_PAIRS + ["l"] * 2 * _LINEAR_PAIRS))
_SQUARE_PACK = tl.constexpr(2 * _LINEAR_PAIRS)


def _stage_pack_asm(width: int, pairs: bool) -> str:
    """A lane's 16 values, 16 bits each, from the shared address $1: packed to `width` halves at $2.

    All lanes read before any writes, as the two places overlap. From each value $4 is subtracted
    (in pairs, it is added), and the bits $3 of that are kept, each in both halves of 32 bits.
    $5: how many of the 16 there are; what comes after them only gets into the bits after theirs.
    """
    lines = ["{ .reg .pred some; .reg .b32 v<8>, x, out;",
             "setp.gt.s32 some, $5, 0;",
             "ld.shared.v4.b32 {v0, v1, v2, v3}, [$1];",
             "ld.shared.v4.b32 {v4, v5, v6, v7}, [$1+16];",
             "bar.warp.sync 0xffffffff;"]
    for i in range(8):  # two values become one of 2 width bits
        lines += [f"add.u16x2 v{i}, v{i}, $4;" if pairs else  # else neither may be less than $4
                  f"or.b32 v{i}, v{i}, 0x80008000; sub.s32 v{i}, v{i}, $4;",
                  f"and.b32 v{i}, v{i}, $3; shr.u32 x, v{i}, 16;",
                  f"mad.lo.s32 v{i}, x, {(1 << width) - (1 << 16)}, v{i};"]
    for half in range(0, width, 2):
        lines.append("mov.b32 out, 0;")
        for i in range(8):
            shift = 2 * width * i - 16 * half
            if -2 * width < shift < 32:
                way = "shl" if shift >= 0 else "shr"
                # add, not or, which would be an instruction more
                lines.append(f"{way}.b32 x, v{i}, {abs(shift)}; add.u32 out, out, x;")
        if width % 2 == 0:
            lines.append(f"@some st.shared.b32 [$2+{2 * half}], out;")
        else:  # a lane's halves may begin within 32 bits
            lines.append(f"@some st.shared.u16 [$2+{2 * half}], out;")
            if half + 1 < width:
                lines.append(f"shr.u32 out, out, 16; @some st.shared.u16 [$2+{2 * half + 2}], out;")
    return "\n".join([*lines, "bar.warp.sync 0xffffffff;", "mov.b32 $0, 0; }"])


_STAGE_PACK_ASM, _STAGE_PACK_PAIRS_ASM = (
    tl.constexpr(tuple(_stage_pack_asm(width, pairs) for width in range(16)))
    for pairs in (False, True))
# The way back, of 512 values: eight times 64, of which a lane takes two neighbours. Its first two
# begin at bit $2 % 32 of the word at the shared address $1; $3 bits a value, 64 of them are whole
# words. $4: the bits of a value that are kept; $5: what is added; each in both halves of 32 bits.
# $6: the address that the first two go to, 16 bits each; all lanes read before any writes.
_STAGE_UNPACK_ASM = tl.constexpr("\n".join([
    "{ .reg .b32 in, v<8>, next;",
    *(f"""
    mad.lo.s32 in, $3, {8 * i}, $1;
    ld.shared.b32 v{i}, [in];
    ld.shared.b32 next, [in+4];
    shf.r.wrap.b32 v{i}, v{i}, next, $2;
    shr.u32 next, v{i}, $3;
    prmt.b32 v{i}, v{i}, next, 0x5410;
    and.b32 v{i}, v{i}, $4;
    add.s32 v{i}, v{i}, $5;""" for i in range(8)),
    "bar.warp.sync 0xffffffff;",
    *(f"st.shared.b32 [$6+{128 * i}], v{i};" for i in range(8)),
    "mov.b32 $0, 0; }"]))


@triton.jit
def _popcount(x):
    """Set bits of each int32; LLVM recognizes the pattern and emits one popc."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101).to(tl.uint32, bitcast=True) >> 24).to(tl.int32)


@triton.jit
def _float_bits(bits):
    """float32 of bf16 given as int16 (a shift: exact, and the interpreter gets it right too)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rank_words(words, lane, before):
    """Each element's number among the tile's values, were it stored; and the count so far.

    words [32, 8], the same in all rows; before [32, 1]: the tile's values before this group.
    """
    counts = _popcount(words)
    rank = before + tl.cumsum(counts, axis=1) - counts + _popcount(words & ((1 << lane) - 1))
    return rank, before + tl.sum(counts, axis=1)[:, None]


@triton.jit
def _load_group(ptr, e, left, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + e)
    return tl.load(ptr + e, mask=e < left, other=0)


@triton.jit
def _store_group(ptr, e, value, left, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + e, value)
    else:
        tl.store(ptr + e, value, mask=e < left)


@triton.jit
def _fp8_bits(x, inverse, FP8: tl.constexpr, CONVERT: tl.constexpr, MANTISSA: tl.constexpr):
    """int16 with the 8 bits of x * inverse in FP8."""
    if CONVERT is not None:
        bits = tl.inline_asm_elementwise(
            CONVERT, "=r,f", [x * inverse], dtype=tl.int32, is_pure=True, pack=1)
    else:
        bits = (x * inverse).to(FP8).to(tl.uint8, bitcast=True)
    return tl.where(x == float("inf"), 0x7F if MANTISSA == 3 else 0x7C, bits.to(tl.int16))


@triton.jit
def _tile_width(low, high, CODEC: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Bits of a value, what is subtracted from it, and the head's bits that say so (from 52 on).

    low, high: the smallest and largest value in the tile.
    """
    if CODEC == "exponent":
        low, high = low >> MANTISSA, high >> MANTISSA
        spread = tl.maximum(high - low, 0)
        # as many bits as its exponent says, as float32
        exponent = spread.to(tl.float32).to(tl.int32, bitcast=True) >> 23
        exponent_bits = tl.maximum(exponent - 126, 0)
        low = tl.where(high < low, 0, low)  # no value at all
        return MANTISSA + exponent_bits, low << MANTISSA, low | (exponent_bits << 8)
    return (BITS if CODEC == "raw" else BITS - 1), 0, 0


@triton.jit
def _window(high):
    """What is subtracted from the values of a tile with patches, whose largest value is high."""
    return tl.maximum(tl.minimum(high, 0x7F80) - _WINDOW, 0) >> 7 << 7


@triton.jit
def _with_patches(nnz, patches, window, width, least, code, tile_bytes):
    """_tile_width's three, a tile's bytes and slots; with patches where these make it smaller."""
    end = (nnz * 10 + 15) // 16  # of the values, in 16 bits
    vectors = (end + patches + 7) // 8
    extra = vectors - (end + 7) // 8
    smaller = (vectors * 16 < tile_bytes) & (extra <= 6)
    return (tl.where(smaller, 10, width), tl.where(smaller, window, least),
            tl.where(smaller, window >> 7 | (9 + extra) << 8, code),
            tl.where(smaller, vectors * 16, tile_bytes), tl.where(smaller, vectors * 8 - end, 0))


@triton.jit
def _missing_plain(scratch_ptr, g, nnz, window):
    """The numbers of 256 values in scratch_ptr, and of each less the window bits 10 to 14."""
    k = g * 256 + tl.arange(0, 256)
    v = tl.load(scratch_ptr + k, mask=k < nnz, other=0).to(tl.int32)
    return k, tl.where(k < nnz, (v - window) & 0x7C00, 0)


@triton.jit
def _pack_plain(values_ptr, scratch_ptr, nnz, width, least, keep, fits, GROUPS: tl.constexpr):
    """What _stage_pack_asm does, in global memory: scratch_ptr int16 [nnz] to a stream of bits."""
    for g in tl.static_range(GROUPS):
        half = g * 256 + tl.arange(0, 256)
        first = half * 16 // width
        bits = tl.zeros((256,), tl.int32)
        for i in tl.static_range(9):  # a half has bits of so many values at most: width >= 2
            k = first + i
            v = tl.load(scratch_ptr + k, mask=k < nnz, other=0).to(tl.int32) & keep
            v = tl.where(k < nnz, (v - least) & ((1 << width) - 1), 0)
            shift = tl.minimum(k * width - half * 16, 16)  # 32 and more would be undefined
            bits |= tl.where(shift >= 0, v << tl.maximum(shift, 0), v >> tl.maximum(-shift, 0))
        tl.store(values_ptr + half, bits.to(tl.int16), mask=(half * 16 < nnz * width) & fits)


@triton.jit(do_not_specialize=["layer"])
def _compress_kernel(z_ptr, mask_ptr, heads_ptr, values_ptr, state_ptr, counters_ptr, scale_ptr,
                     scratch_ptr, n, part_bytes, row, layer, STRIPES: tl.constexpr,
                     POWER: tl.constexpr, CODEC: tl.constexpr, FP8: tl.constexpr,
                     CONVERT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
                     GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Store the positive elements of z, and in the same pass replace z by relu(z)**POWER (0: not).

    z_ptr       [n] bf16 as int16, read 2 n bytes, written 2 n where POWER is not 0
    mask_ptr    [tiles, 8 GROUPS] int32, written n / 8 bytes
    heads_ptr   [tiles + 1] int64, written
    values_ptr  [STRIPES, part_bytes / 2] int16, written width * nnz / 8 bytes in all
    state_ptr   the buffer's: the generation, read
    counters_ptr  [STRIPES, row] int64: the cursor and nnz of `layer`, an atomic add a tile each
    scale_ptr   [1] float32, read where values are stored as FP8 (a dtype; None: bf16), which
                CONVERT (None: Triton's own way) makes of a float32
    scratch_ptr [tiles, 256 GROUPS] int16, used where values are packed
    Grid: one program a tile of 256 GROUPS elements, in any order. A tile that would end past the
    `part_bytes` of its stripe is counted and not written.
    """
    PACKED: tl.constexpr = CODEC != "raw" or BITS != 16
    PATCHES: tl.constexpr = CODEC == "exponent" and FP8 is None
    keep: tl.constexpr = 0xFFFF if not PACKED else (1 << (BITS - 1)) - 1  # of a value's bits
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    word = tl.arange(0, 8)[None, :]
    e = lane * 8 + word
    z_ptr += tile * (GROUPS * 256)
    mask_ptr += tile * (GROUPS * 8)
    if PACKED:
        scratch_ptr += tile * (GROUPS * 256)
    left = n - tile * (GROUPS * 256)
    if FP8 is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))  # "/" is not rounded to nearest

    nnz = tl.zeros((32, 1), tl.int32)
    low, high = tl.full((32, 8), keep, tl.int32), tl.zeros((32, 8), tl.int32)
    four_groups = tl.zeros((32, 8), tl.int32)
    kept = ()
    ahead = _load_group(z_ptr, e, left, EVEN)
    for g in tl.static_range(GROUPS):
        bits = ahead
        if g + 1 < GROUPS:
            ahead = _load_group(z_ptr + (g + 1) * 256, e, left - (g + 1) * 256, EVEN)
        x = _float_bits(bits)
        stored = ~(x <= 0.0)  # true for NaN
        words = tl.sum(stored.to(tl.int32) << lane, axis=0)[None, :] + tl.zeros_like(lane)
        rank, nnz = _rank_words(words, lane, nnz)
        if FP8 is not None:
            bits = _fp8_bits(x, inverse, FP8, CONVERT, MANTISSA)
        if CODEC == "exponent":
            v = bits.to(tl.int32) & keep
            low = tl.minimum(low, tl.where(stored, v, keep))
            high = tl.maximum(high, tl.where(stored, v, 0))
        if PACKED:
            tl.store(scratch_ptr + rank, bits, mask=stored)
        else:
            kept = kept + ((bits, tl.where(stored, rank, -1)),)
        # lane l writes word l of each four groups: one 128-byte store
        four_groups = tl.where(lane == (g % 4) * 8 + word, words, four_groups)
        if g % 4 == 3:
            tl.store(mask_ptr + (g - 3) * 8 + tl.arange(0, 32), tl.sum(four_groups, axis=1))
            four_groups = tl.zeros((32, 8), tl.int32)
        if POWER > 0:
            r = tl.where(stored, x, 0.0)
            post = r * r if POWER == 2 else r
            _store_group(z_ptr + g * 256, e, post.to(tl.bfloat16).to(tl.int16, bitcast=True),
                         left - g * 256, EVEN)

    nnz = tl.max(tl.max(nnz, axis=1), axis=0)
    low, high = tl.min(tl.min(low, axis=1), axis=0), tl.max(tl.max(high, axis=1), axis=0)
    width, least, code = _tile_width(low, high, CODEC, BITS, MANTISSA)
    tile_bytes = (nnz * width + 127) // 128 * 16
    if PACKED:
        tl.debug_barrier()
    if PATCHES:
        patches = 0
        for g in range(GROUPS):
            k, missing = _missing_plain(scratch_ptr, g, nnz, _window(high))
            patches += tl.sum((missing != 0).to(tl.int32), axis=0)
        width, least, code, tile_bytes, slots = _with_patches(
            nnz, patches, _window(high), width, least, code, tile_bytes)
    tile_bytes = tile_bytes.to(tl.int64)
    stripe = tile % STRIPES
    counters_ptr += stripe * row
    tl.atomic_add(counters_ptr + _NNZ + layer, nnz.to(tl.int64), sem="relaxed")
    base = stripe * part_bytes + tl.atomic_add(counters_ptr, tile_bytes, sem="relaxed")
    tl.store(heads_ptr + tile,
             (base >> 4) | (nnz.to(tl.int64) << 40) | (tl.cast(code, tl.int64) << 52))
    if tile == 0:
        tl.store(heads_ptr + tl.num_programs(0), tl.load(state_ptr + _GENERATION))
    fits = base + tile_bytes <= (stripe + 1) * part_bytes
    values_ptr += tl.multiple_of(base // 2, 8)
    if PACKED:
        _pack_plain(values_ptr, scratch_ptr, nnz, width, least, keep, fits, GROUPS)
        if PATCHES:
            patch_ptr = values_ptr + tile_bytes // 2 - slots
            padding = tl.arange(0, 64)
            tl.store(patch_ptr + padding, tl.zeros((64,), tl.int16),
                     mask=(padding >= patches) & (padding < slots) & fits)
            for g in range(GROUPS):
                k, missing = _missing_plain(scratch_ptr, g, nnz, least)
                patched = (missing != 0).to(tl.int32)
                tl.store(patch_ptr + tl.cumsum(patched, axis=0) - 1,
                         (k | missing << 1).to(tl.int16), mask=(missing != 0) & (slots > 0) & fits)
                patch_ptr += tl.sum(patched, axis=0)
    else:
        for g in tl.static_range(GROUPS):
            bits, rank = kept[g]
            tl.store(values_ptr + rank, bits, mask=(rank >= 0) & fits)


@triton.jit
def _add(ASM: tl.constexpr, counter_ptr, number, lanes):
    """[32] int64, of the first lane, by _RESERVE_ASM, what the counter was.

    Nobody waits for it until it is used.
    """
    return tl.inline_asm_elementwise(
        ASM, "=&l,l,l,r", [counter_ptr.to(tl.int64), number.to(tl.int64), lanes],
        dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _sync(lanes):
    tl.inline_asm_elementwise(_SYNC_ASM, "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _count_bits(words):
    """As _popcount, which the compiler knows as one instruction unless it is shifted then."""
    return tl.inline_asm_elementwise(
        _POPC_ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _put_word(address, word):
    tl.inline_asm_elementwise(_STAGE_PUT_WORD_ASM, "=r,r,r", [address, word],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put_places(stage, counts, lanes):
    """Behind the words, the address of each word's first value; returns the number of values.

    counts: [32], of the lane's first word, and 16 bits on of its second.
    """
    before, total = tl.cumsum(counts, axis=0) - counts, tl.sum(counts, axis=0)
    nnz = 0
    for i in tl.static_range(_TILE_WORDS // 32):
        _put_word(stage + 2 * _TILE + (_TILE_WORDS + i * 32 + lanes) * 4,
                  stage + (nnz + (before >> 16 * i & 0xFFFF)) * 2)
        nnz += total >> 16 * i & 0xFFFF
    return nnz


@triton.jit
def _get_half(address):
    """The 16 bits at a shared address."""
    return tl.inline_asm_elementwise(
        _STAGE_GET_ASM, "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put_half(address, value, some):
    tl.inline_asm_elementwise(_STAGE_PUT_HALF_ASM, "=r,r,r,r", [address, value, some],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["layer"])
def _compress_staged_kernel(
        z_ptr, mask_ptr, heads_ptr, values_ptr, state_ptr, counters_ptr, scale_ptr, n, part_bytes,
        row, layer, STRIPES: tl.constexpr, POWER: tl.constexpr, CODEC: tl.constexpr,
        FP8: tl.constexpr, CONVERT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
        EVEN: tl.constexpr, PAIRS: tl.constexpr, FROM_POST: tl.constexpr):
    """As _compress_kernel, but a tile is compacted in shared memory and written in 16-byte vectors.

    With a 2-byte store an element, the number of store requests is the bound, most of them in
    partial sectors: 69 % of the copy roofline at density 0.2 (H200, [65536, 3072], 2026-11-30).
    PAIRS: whether the GPU compares bf16 by pairs. FROM_POST: z_ptr is relu(z)**2 already (POWER 0,
    bf16 alone); roots are taken of the values that are stored, not of all elements.

    The steps are in the order in which the least is waited for. All of z is on its way before any
    of it is looked at; where a tile's values go is asked as soon as their size is known, and what
    does not need it (post, packing) comes before what does. Ranks are by word: see _expand_kernel.
    """
    PACKED: tl.constexpr = CODEC != "raw" or BITS != 16
    PATCHES: tl.constexpr = CODEC == "exponent" and FP8 is None
    keep: tl.constexpr = 0xFFFF if not PACKED else (1 << (BITS - 1)) - 1  # of a value's bits
    # From the end: what the GEMM before has written last is in L2 still, and what is read last here
    # the GEMM after reads first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    word = tl.arange(0, 8)[None, :]
    lanes = tl.arange(0, 32)
    e = lane * 8 + word
    z_ptr += tile * _TILE
    mask_ptr += tile * _TILE_WORDS
    left = n - tile * _TILE
    stripe = tile % STRIPES
    counters_ptr += stripe * row
    kept = ()
    if EVEN:  # where single elements are masked, registers do not hold as many loads
        for g in tl.static_range(_TILE_GROUPS):
            kept = kept + (tl.load(z_ptr + g * 256 + e),)
    stage = tl.inline_asm_elementwise(
        _STAGE_WITH_WORDS_ASM, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    stage_words = stage + _TILE * 2
    if FP8 is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))  # "/" is not rounded to nearest

    # The mask words, written to shared memory by two lanes, and from there one by each lane.
    own = lane + tl.zeros_like(e)
    for g in tl.static_range(_TILE_GROUPS):
        z = kept[g] if EVEN else _load_group(z_ptr + g * 256, e, left - g * 256, EVEN)
        tl.inline_asm_elementwise(
            _STAGE_BALLOT_PAIRS_ASM if PAIRS else _STAGE_BALLOT_ASM,
            _STAGE_BALLOT_REGISTERS, [stage_words + g * 32 + tl.zeros_like(e), own, z],
            dtype=tl.int16, is_pure=False, pack=8)
    _sync(lanes)
    counts = tl.zeros((32,), tl.int32)
    for i in tl.static_range(_TILE_WORDS // 32):
        words = tl.inline_asm_elementwise(
            _STAGE_GET_WORD_ASM, "=r,r", [stage_words + (i * 32 + lanes) * 4],
            dtype=tl.int32, is_pure=False, pack=1)
        tl.store(mask_ptr + i * 32 + lanes, words)
        counts += _count_bits(words) << 16 * i
    nnz = _put_places(stage, counts, lanes)
    _sync(lanes)
    _add(_COUNT_ASM, counters_ptr + _NNZ + layer, nnz, lanes)
    if CODEC != "exponent":
        width, least, code = _tile_width(0, 0, CODEC, BITS, MANTISSA)
        tile_bytes = (nnz * width + 127) // 128 * 16
        base = _add(_RESERVE_ASM, counters_ptr, tile_bytes, lanes)

    lower = ((1 << lane) - 1) + tl.zeros_like(e)
    for g in tl.static_range(_TILE_GROUPS):
        z = kept[g] if EVEN else _load_group(z_ptr + g * 256, e, left - g * 256, EVEN)
        bits = z
        if FP8 is not None:
            bits = _fp8_bits(_float_bits(z), inverse, FP8, CONVERT, MANTISSA)
        tl.inline_asm_elementwise(
            _STAGE_PUT_PAIRS_ASM if PAIRS else _STAGE_PUT_ASM, _STAGE_PUT_REGISTERS,
            [stage_words + g * 32 + tl.zeros_like(e), lower, z, bits],
            dtype=tl.int16, is_pure=False, pack=8)
    _sync(lanes)

    if FROM_POST and CODEC != "exponent":
        for part in range((nnz + 255) // 256):  # 256 values at a time, 8 a lane
            tl.inline_asm_elementwise(_STAGE_ROOT_ASM, "=r,r", [stage + part * 512 + lanes * 16],
                                      dtype=tl.int32, is_pure=False, pack=1)
        _sync(lanes)
    if CODEC == "exponent":
        # Behind the last value, so that all of the last lane's 16 are some. There may be the words,
        # which have been read.
        tl.inline_asm_elementwise(_STAGE_COPY_ASM, "=r,r,r", [stage, stage + (nnz + lanes) * 2],
                                  dtype=tl.int32, is_pure=False, pack=1)
        _sync(lanes)
        low, high = tl.full((32,), 0xFFFF, tl.int32), tl.zeros((32,), tl.int32)
        for i in tl.static_range(_TILE // 512):  # 512 values at a time, 16 a lane
            if i * 512 < nnz:
                first = i * 512 + lanes * 16
                lowest, highest = tl.inline_asm_elementwise(
                    _STAGE_ROOT_RANGE_ASM if FROM_POST else _STAGE_RANGE_ASM, "=&r,=&r,r,r",
                    [stage + first * 2, nnz - first],
                    dtype=(tl.int32, tl.int32), is_pure=False, pack=1)
                low, high = tl.minimum(low, lowest), tl.maximum(high, highest)
        low, high = tl.min(low, axis=0) & keep, tl.max(high, axis=0) & keep
        width, least, code = _tile_width(low, high, CODEC, BITS, MANTISSA)
        tile_bytes = (nnz * width + 127) // 128 * 16
        if PATCHES:
            window = _window(high)
            patched = tl.zeros((32,), tl.int64)  # bit 16 i + j: value 512 i + 16 lane + j
            for i in tl.static_range(_TILE // 512):
                if i * 512 < nnz:
                    first = i * 512 + lanes * 16
                    outside = tl.inline_asm_elementwise(
                        _STAGE_OUTSIDE_PAIRS_ASM if PAIRS else _STAGE_OUTSIDE_ASM, "=&r,r,r",
                        [stage + first * 2, (0x7B81 - window if PAIRS else window) * 0x10001],
                        dtype=tl.int32, is_pure=False, pack=1)
                    outside &= (1 << tl.minimum(tl.maximum(nnz - first, 0), 16)) - 1
                    patched |= outside.to(tl.int64) << (16 * i)
            own = _popcount(patched.to(tl.int32)) + _popcount((patched >> 32).to(tl.int32))
            patches = tl.sum(own, axis=0)
            width, least, code, tile_bytes, slots = _with_patches(
                nnz, patches, window, width, least, code, tile_bytes)
        base = _add(_RESERVE_ASM, counters_ptr, tile_bytes, lanes)

    if POWER > 0:
        for g in tl.static_range(_TILE_GROUPS):
            z = kept[g] if EVEN else _load_group(z_ptr + g * 256, e, left - g * 256, EVEN)
            post = tl.inline_asm_elementwise(
                _RELU2_ASM if POWER == 2 else _RELU_ASM, "=&r,=&r,=&r,=&r,r,r,r,r", [z],
                dtype=tl.int16, is_pure=True, pack=8)
            _store_group(z_ptr + g * 256, e, post, left - g * 256, EVEN)

    if PATCHES and slots > 0:  # to where the words were, until the values are packed
        to = stage_words + (tl.cumsum(own, axis=0) - own) * 2
        for _ in range(tl.max(own, axis=0)):
            below = (patched & -patched) - 1  # the lowest bit that is set
            bit = _popcount(below.to(tl.int32)) + _popcount((below >> 32).to(tl.int32))
            k = (bit // 16 * 512 + lanes * 16 + bit % 16) & 0x7FF
            missing = (_get_half(stage + k * 2) - least) & 0x7C00
            _put_half(to, k | missing << 1, (patched != 0).to(tl.int32))
            patched &= patched - 1
            to += 2

    if PACKED:
        WIDEST: tl.constexpr = BITS if CODEC == "raw" else BITS - 1
        for w in tl.static_range(MANTISSA if CODEC == "exponent" else WIDEST, WIDEST + 1):
            if width == w:
                for part in range((nnz + 511) // 512):  # 512 values at a time, 16 a lane
                    first = part * 512 + lanes * 16
                    tl.inline_asm_elementwise(
                        _STAGE_PACK_PAIRS_ASM[w] if PAIRS else _STAGE_PACK_ASM[w], "=r,r,r,r,r,r",
                        [stage + first * 2, stage + first // 8 * w,
                         (keep & ((1 << w) - 1)) * 0x10001,
                         ((-least & 0xFFFF) if PAIRS else least) * 0x10001, nnz - first],
                        dtype=tl.int32, is_pure=False, pack=1)
    if PATCHES and slots > 0:
        for i in tl.static_range(2):
            slot = i * 32 + lanes
            patch = tl.where(slot < patches, _get_half(stage_words + slot * 2), 0)
            _put_half(stage + tile_bytes + (slot - slots) * 2, patch,
                      (slot < slots).to(tl.int32))
        _sync(lanes)

    base = stripe * part_bytes + tl.inline_asm_elementwise(
        _FIRST_LANE_ASM, "=l,l", [base], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(heads_ptr + tile + tl.zeros_like(lanes),
             (base >> 4) | (nnz.to(tl.int64) << 40) | (tl.cast(code, tl.int64) << 52),
             mask=lanes == 0)
    if tile == 0:
        tl.store(heads_ptr + tl.num_programs(0), tl.load(state_ptr + _GENERATION))
    # whole vectors: the last one's padding is this tile's own
    room = tl.where(base + tile_bytes <= (stripe + 1) * part_bytes, tile_bytes, 0)
    for i in tl.static_range(_TILE // 512):
        if i * 1024 < tile_bytes:
            for j in tl.static_range(2):
                at = i * 1024 + j * 512 + lanes * 16
                tl.inline_asm_elementwise(
                    _STAGE_WRITE_ASM, "=r,r,l,r",
                    [stage + at, values_ptr.to(tl.int64) + base + at, (at < room).to(tl.int32)],
                    dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _stage_patch(stage, patch):
    """Add to the values in shared memory what the patches, [32], say."""
    tl.inline_asm_elementwise(
        _STAGE_PATCH_ASM, "=r,r,r", [stage + (patch & 0x7FF) * 2, (patch >> 1) & 0x7C00],
        dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _expand_kernel(out_ptr, dh_ptr, mask_ptr, heads_ptr, values_ptr, state_ptr, scale_ptr, n,
                   part_bytes, STRIPES: tl.constexpr, POWER: tl.constexpr, CODEC: tl.constexpr,
                   FP8: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
                   GROUPS: tl.constexpr, EVEN: tl.constexpr, STAGED: tl.constexpr):
    """From the compressed relu(z) = r: write r**POWER (1 or 2), or replace dh by dz, or both.

    out_ptr   [n] bf16 as int16, written: bf16(r) (POWER 1) or bf16(r * r) (2). None: not
    dh_ptr    [n] bf16, read and written in place: dz = bf16(dh * 2r) (POWER 2) or dh (1) where r
              is stored, 0 elsewhere. None: not
    mask_ptr, heads_ptr, values_ptr, scale_ptr as in _compress_kernel, read
    state_ptr the buffer's: the generation, read; the stale flag, set
    Grid: one program a tile. A tile that did not fit or is of another generation reads as zeros.
    """
    PACKED: tl.constexpr = CODEC != "raw" or BITS != 16
    PATCHES: tl.constexpr = CODEC == "exponent" and FP8 is None
    VALUES: tl.constexpr = out_ptr is not None or POWER == 2  # relu's dz takes the mask alone
    # One popcount a mask word and not one in every lane: they take 8 cycles each, and bound what
    # only decodes. With dh in registers as well, ptxas takes twice as many for it.
    SHARED: tl.constexpr = STAGED and dh_ptr is None
    SQUARES: tl.constexpr = SHARED and POWER == 2 and FP8 is None  # by pairs
    # From the end: what is written last, the first rows, the GEMM for dw2 reads first, from L2.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    word = tl.arange(0, 8)[None, :]
    e = lane * 8 + word
    if out_ptr is not None:
        out_ptr += tile * (GROUPS * 256)
    if dh_ptr is not None:
        dh_ptr += tile * (GROUPS * 256)
    mask_ptr += tile * (GROUPS * 8)
    left = n - tile * (GROUPS * 256)

    head = tl.load(heads_ptr + tile)
    dh = ()
    if dh_ptr is not None:
        for g in tl.static_range(GROUPS):
            dh = dh + (_load_group(dh_ptr + g * 256, e, left - g * 256, EVEN),)
    if FP8 is not None:
        scale = tl.load(scale_ptr)
    base = (head & 0xFFFFFFFFFF) << 4
    code = (head >> 40).to(tl.int32)  # nnz, smallest exponent, exponent bits
    nnz = code & 0xFFF
    width = BITS if CODEC == "raw" else BITS - 1
    least = 0
    if CODEC == "exponent":
        exponent_bits = (code >> 20) & 15
        width = MANTISSA + tl.where(exponent_bits < 9, exponent_bits, 3)
        least = ((code >> 12) & 255) << MANTISSA
    tile_bytes = (nnz * width + 127) // 128 * 16
    if PATCHES:
        patched = exponent_bits >= 9
        first_patch = (nnz * width + 15) // 16
        tile_bytes += tl.maximum(exponent_bits - 9, 0) * 16
    fresh = tl.load(heads_ptr + tl.num_programs(0)) == tl.load(state_ptr + _GENERATION)
    fits = (base + tile_bytes <= (tile % STRIPES + 1) * part_bytes) & fresh
    if not fresh:
        tl.store(state_ptr + _STALE, 1)
    values_ptr += tl.multiple_of(base // 2, 8)
    if STAGED and VALUES:
        stage = tl.inline_asm_elementwise(
            _STAGE_WITH_WORDS_ASM if SHARED else _STAGE_ASM, "=r,r", [0], dtype=tl.int32,
            is_pure=False, pack=1)
    if SHARED:
        lanes = tl.arange(0, 32)
        counts = tl.zeros((32,), tl.int32)
        for i in tl.static_range(GROUPS // 4):
            words = tl.where(fits, tl.load(mask_ptr + i * 32 + lanes), 0)
            _put_word(stage + GROUPS * 512 + (i * 32 + lanes) * 4, words)
            counts += _count_bits(words) << 16 * i
        _put_places(stage, counts, lanes)
        lower = ((1 << lane) - 1) + tl.zeros_like(e)
    if STAGED and VALUES:
        for i in tl.static_range(2):
            # with dh, all is written: of a tile that does not fit, zeros are read
            if (i * 2048 < tile_bytes) | (not SHARED):
                for j in tl.static_range(GROUPS // 2):
                    at = i * 2048 + j * 512 + lane * 16 + tl.zeros_like(word)  # of the vector
                    packed = tl.load(values_ptr + (i * 1024 + j * 256) + e,
                                     mask=(at < tile_bytes) & fits, other=0)
                    tl.inline_asm_elementwise(
                        _STAGE_PUT_VECTOR_ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
                        [stage + at, packed], dtype=tl.int16, is_pure=False, pack=8)
        tl.debug_barrier()
        if PATCHES:
            slot = first_patch + tl.arange(0, 32)
            patch = tl.where(slot < tile_bytes // 2, _get_half(stage + slot * 2), 0)
            slot += 32
            patch_ = tl.where(slot < tile_bytes // 2, _get_half(stage + slot * 2), 0)
        if PACKED:
            # Here a value is unpacked once; where elements are read, it would be once an element.
            # In place, the last 512 first: values of 15 bits or less lie below where they go.
            lanes = tl.arange(0, 32)
            first = lanes * 2 * width
            for i in tl.static_range(GROUPS // 2 - 1, -1, -1):
                if (i * 512 < nnz) & fits:
                    tl.inline_asm_elementwise(
                        _STAGE_UNPACK_ASM, "=r,r,r,r,r,r,r",
                        [stage + (first >> 5) * 4 + i * 64 * width, first, width,
                         ((1 << width) - 1) * 0x10001, least * 0x10001,
                         stage + i * 1024 + lanes * 4], dtype=tl.int32, is_pure=False, pack=1)
            tl.debug_barrier()
        if PATCHES and patched:
            _stage_patch(stage, patch)
            _stage_patch(stage, patch_)
            tl.debug_barrier()

    before = tl.zeros((32, 1), tl.int32)
    if not SHARED:
        ahead = tl.load(mask_ptr + word + tl.zeros_like(lane))
    for g in tl.static_range(GROUPS):
        if SHARED:
            bits = tl.inline_asm_elementwise(
                _STAGE_TAKE_SQUARES_ASM if SQUARES else _STAGE_TAKE_ASM, _STAGE_TAKE_REGISTERS,
                [stage + GROUPS * 512 + g * 32 + tl.zeros_like(e), lower],
                dtype=tl.int16, is_pure=False, pack=8)
        else:
            words = ahead
            if g + 1 < GROUPS:
                ahead = tl.load(mask_ptr + (g + 1) * 8 + word + tl.zeros_like(lane))
            rank, before = _rank_words(words, lane, before)
            stored = ((words >> lane) & 1) != 0
        if VALUES and not SHARED:
            if STAGED:
                # An element that is not stored reads what stands at the rank that it would have.
                bits = _get_half(stage + rank * 2).to(tl.int16)
            elif PACKED:
                first = rank * width  # the value's first bit
                half = values_ptr + (first >> 4)
                v = tl.load(half, mask=stored & fits, other=0).to(tl.int32) & 0xFFFF
                # the second half, if the value has bits in it
                more = stored & fits & ((first & 15) + width > 16)
                v |= tl.load(half + 1, mask=more, other=0).to(tl.int32) << 16
                v >>= first & 15
                v = (v & ((1 << width) - 1)) + least
                if PATCHES:
                    i = tl.where(patched, first_patch, tile_bytes // 2)
                    while i < tile_bytes // 2:
                        patch = tl.load(values_ptr + i, mask=fits, other=0).to(tl.int32)
                        v += tl.where(rank == (patch & 0x7FF), (patch >> 1) & 0x7C00, 0)
                        i += 1
                    v &= 0x7FFF
                bits = v.to(tl.int16)
            else:
                bits = tl.load(values_ptr + rank, mask=stored & fits, other=0)
            bits = tl.where(stored if STAGED else stored & fits, bits, 0)
        if VALUES:
            if FP8 is not None:
                r = bits.to(tl.uint8).to(FP8, bitcast=True).to(tl.float32) * scale
            else:
                r = _float_bits(bits)
        if dh_ptr is not None:
            grad = dh[g].to(tl.float32)
            dz = grad * (2.0 * r) if POWER == 2 else grad
            _store_group(dh_ptr + g * 256, e, tl.where(stored, dz, 0.0).to(tl.bfloat16),
                         left - g * 256, EVEN)
        if out_ptr is not None:
            if POWER == 2 and not SQUARES:
                bits = (r * r).to(tl.bfloat16).to(tl.int16, bitcast=True)
            elif FP8 is not None:
                bits = r.to(tl.bfloat16).to(tl.int16, bitcast=True)
            _store_group(out_ptr + g * 256, e, bits, left - g * 256, EVEN)


@triton.jit
def _largest_kernel(z_ptr, most_ptr, n, BLOCK: tl.constexpr):
    """The bits of z's largest finite positive element.

    z_ptr [n] bf16 as int16, read; most_ptr [1] int32, made no smaller. Grid: ceil(n / BLOCK).
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e = tl.arange(0, BLOCK)
    bits = tl.load(z_ptr + start + e, mask=e < n - start, other=0).to(tl.int32)
    tl.atomic_max(most_ptr, tl.max(tl.where(bits < 0x7F80, bits, 0), axis=0), sem="relaxed")


@triton.jit
def _activate_kernel(z_ptr, n, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """Replace z by relu(z)**POWER. z_ptr [n] bf16, read and written. Grid: ceil(n / BLOCK)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e = tl.arange(0, BLOCK)
    x = tl.load(z_ptr + start + e, mask=e < n - start).to(tl.float32)
    r = tl.where(~(x <= 0.0), x, 0.0)
    post = r * r if POWER == 2 else r
    tl.store(z_ptr + start + e, post.to(tl.bfloat16), mask=e < n - start)


@triton.jit
def _place(tile, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr):
    """A tile's first row and column. 8 rows of tiles together: what they read is still in L2."""
    together = 8 * tiles_n
    first = tile // together * 8
    rows = min(tiles_m - first, 8)
    return (first + tile % together % rows) * BM, tile % together // rows * BN


@triton.jit
def _linear_activate_kernel(x_desc, w1_desc, post_desc, state_ptr, M, N, K, POWER: tl.constexpr):
    """post = relu(z)**POWER of z = bf16(x w1ᵀ), which is in no memory; descriptors for TMA of

    x_desc     [M, K] bf16 in blocks [BM, BK], read
    w1_desc    [N, K] bf16 in blocks [BN, BK], read
    post_desc  [M, N] bf16 in blocks [BM, BN / 2], written, in two steps to spare shared memory
    state_ptr  a buffer's: the inexact flag, set where relu(z) is no exact root of post (POWER 2).
               None: not checked
    Grid: any number of programs, of which one fits a multiprocessor. They take the ceil(M / BM) *
    ceil(N / BN) tiles in turns. Past the ends of a tensor TMA reads zeros, and writes nothing.

    .33 ms for [49152, 768] times [768, 3072], where cuBLAS takes .32 and _activate_kernel .14 more;
    no other blocks, warps and stages tried were faster (H200, 2026-11-30).
    """
    BM: tl.constexpr = x_desc.block_shape[0]
    BN: tl.constexpr = w1_desc.block_shape[0]
    BK: tl.constexpr = x_desc.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = _place(tile, tiles_m, tiles_n, BM, BN)
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_desc.load([row, k * BK])
            w1 = w1_desc.load([column, k * BK])
            sums = tl.dot(x, w1.T, sums)
        # relu(bf16(s)) is bf16(relu(s)), which one instruction computes, for two sums
        r = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16)
        if state_ptr is not None:
            post = tl.inline_asm_elementwise(
                _SQUARE_ASM, _SQUARE_REGISTERS, [r, (state_ptr + _INEXACT).to(tl.int64)],
                dtype=tl.bfloat16, is_pure=False, pack=_SQUARE_PACK)
        else:
            post = r * r if POWER == 2 else r
        left, right = tl.split(post.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        post_desc.store([row, column], left)
        post_desc.store([row, column + BN // 2], right)


@triton.jit
def _twice_root(post, POWER: tl.constexpr):
    """What dh is multiplied by, bf16, of POWER 2; of 1, post. Stored is what is positive or NaN."""
    if POWER == 2:
        return tl.inline_asm_elementwise(
            _TWICE_ROOT_ASM, "=r,r", [post], dtype=tl.bfloat16, is_pure=True, pack=2)
    return post


@triton.jit
def _times_stored(dh, factor, POWER: tl.constexpr):
    """dz of dh and what _twice_root gave."""
    if POWER == 2:
        return tl.inline_asm_elementwise(
            _TIMES_STORED_ASM, "=r,r,r", [dh, factor], dtype=tl.bfloat16, is_pure=True, pack=2)
    return tl.where(factor <= 0.0, 0.0, dh)


@triton.jit
def _linear_gradient_kernel(dy_desc, w2_desc, post_desc, dz_desc, post_ptr, M, N, K,
                            POWER: tl.constexpr):
    """dz = bf16(dh * 2 bf16(sqrt(post))) (POWER 2) or dh (1) where post is positive or NaN, else 0,

    of dh = bf16(dy w2), which is in no memory; descriptors for TMA of
    dy_desc    [M, K] bf16 in blocks [BM, BK], read
    w2_desc    [K, N] bf16 in blocks [BK, BN], read
    post_desc  [M, N] bf16 in blocks [BM, BN / 2], read, in two steps to spare shared memory; none
               of it below 0
    dz_desc    as post_desc, written; it may be the same memory
    post_ptr   [M, N], post itself, sent for ten steps before the end of a tile's sum (POWER 2)
    Grid: as _linear_activate_kernel's.

    A tile's post is read, and made roots of, in the last four steps of its sum, a quarter of that
    work in each: so it is done while the tensor cores are at work on the step before. Of
    [49152, 768] times [768, 3072] all this takes .425 ms, .442 where post is not sent for, .436
    and .448 where all is done at the end, the GEMM alone .330; cuBLAS takes .322 and
    _dense_backward_kernel .214 more (H200, 2026-11-30).
    """
    BM: tl.constexpr = dy_desc.block_shape[0]
    BN: tl.constexpr = w2_desc.block_shape[1]
    BK: tl.constexpr = dy_desc.block_shape[1]
    HALF: tl.constexpr = BN // 2
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # From the end: the GEMM for dw2 has read these rows last, and those for dx and dw1 begin
        # with what is written last here.
        row, column = _place(tiles_m * tiles_n - 1 - tile, tiles_m, tiles_n, BM, BN)
        sums = tl.zeros((BM, BN), tl.float32)
        left, right = tl.zeros((BM, HALF), tl.bfloat16), tl.zeros((BM, HALF), tl.bfloat16)
        for k in range(steps):
            dy = dy_desc.load([row, k * BK])
            w2 = w2_desc.load([k * BK, column])
            sums = tl.dot(dy, w2, sums)
            if POWER == 2 and k == max(steps - 10, 0):
                rows = tl.minimum(row + tl.arange(0, BM), M - 1)[:, None].to(tl.int64)
                lines = tl.minimum(column + tl.arange(0, BN // 64) * 64, N - 1)[None, :]
                tl.inline_asm_elementwise(
                    _PREFETCH_ASM, "=r,l", [(post_ptr + rows * N + lines).to(tl.int64)],
                    dtype=tl.int32, is_pure=False, pack=1)
            if k == max(steps - 4, 0):
                left = post_desc.load([row, column])
            if k == max(steps - 3, 0):
                right = post_desc.load([row, column + HALF])
            if k == max(steps - 2, 0):
                left = _twice_root(left, POWER)
            if k == steps - 1:
                right = _twice_root(right, POWER)
        dh = tl.split(sums.to(tl.bfloat16).reshape(BM, 2, HALF).permute(0, 2, 1))
        dz_desc.store([row, column], _times_stored(dh[0], left, POWER))
        dz_desc.store([row, column + HALF], _times_stored(dh[1], right, POWER))


@triton.jit
def _dense_backward_kernel(dh_ptr, a_ptr, n, POWER: tl.constexpr, FROM_POST: tl.constexpr,
                           BLOCK: tl.constexpr):
    """Replace dh by dz where the activation itself is at hand.

    dh_ptr  [n] bf16, read and written in place, as in _expand_kernel
    a_ptr   [n] bf16: post, read (FROM_POST); or z, read and replaced by post
    Grid: ceil(n / BLOCK).
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e = tl.arange(0, BLOCK)
    inside = e < n - start
    dh = tl.load(dh_ptr + start + e, mask=inside).to(tl.float32)
    a = tl.load(a_ptr + start + e, mask=inside).to(tl.float32)
    stored = ~(a <= 0.0)
    if FROM_POST:
        r = tl.sqrt_rn(a).to(tl.bfloat16).to(tl.float32) if POWER == 2 else a
    else:
        r = tl.where(stored, a, 0.0)
        post = r * r if POWER == 2 else r
        tl.store(a_ptr + start + e, post.to(tl.bfloat16), mask=inside)
    dz = dh * (2.0 * r) if POWER == 2 else dh
    tl.store(dh_ptr + start + e, tl.where(stored, dz, 0.0).to(tl.bfloat16), mask=inside)


# -----------------------------------------------------------------------------
# Launchers: the kernels behind the same signatures as the reference


@functools.cache
def _staging_works(device: torch.device) -> bool:
    """Whether STAGED kernels give the right bits here: tried once, at the first use on a device."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return False  # the interpreter cannot run inline assembly
    generator = torch.Generator().manual_seed(0)
    few_half_all = torch.tensor([[-1.0], [0], [4]])
    x = (torch.randn(3, TILE, generator=generator) + few_half_all).bfloat16()
    buffer = ActivationBuffer(2 * x.numel(), device)
    right = True
    for codec in CODECS:
        out = torch.empty_like(x, device=device)
        saved = _new_saved(out, out.numel(), torch.bfloat16)
        _launch_compress(x.to(device), saved, buffer, 0, codec, torch.bfloat16, 0, staged=True)
        _launch_expand(out, None, saved, buffer, 1, codec, torch.bfloat16, staged=True)
        expected, *_ = compress_reference(x, ActivationBuffer(0, "cpu"), 0)
        right &= torch.equal(saved[0].cpu(), expected) and torch.equal(out.cpu(), x.relu())
        buffer.reset()
    if not right:
        warnings.warn(f"bitsparse: Triton {triton.__version__} assigns threads in an unexpected "
                      f"way on {device}; the slower plain kernels run instead", stacklevel=2)
    return right


def _may_stage(*tensors: Tensor) -> bool:
    """16-byte accesses need 16-byte alignment, which a view into a larger tensor may lack."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and _staging_works(tensors[0].device)


_FP8 = {torch.bfloat16: None, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# One value a conversion: Triton's two, taken apart, are code that ptxas 12.8 compiles wrongly, the
# second value coming from a register that is never set.
_CONVERT_ASM = ("{{ .reg .b16 pair; cvt.rn.satfinite.{}x2.f32 pair, 0f00000000, $1; "
                "cvt.u32.u16 $0, pair; }}")


def _convert_asm(storage: torch.dtype, capability: tuple[int, int]) -> str:
    """Of a float32 to the fp8 `storage`, on a GPU of that compute capability."""
    if capability < (8, 9):
        raise ValueError(f"storage: expected torch.bfloat16 on a GPU of compute capability "
                         f"{capability[0]}.{capability[1]}, as fp8 needs 8.9, received {storage}")
    return _CONVERT_ASM.format("e4m3" if storage == torch.float8_e4m3fn else "e5m2")


def _format_options(n: int, codec: str, storage: torch.dtype, staged: bool) -> dict:
    bits, mantissa = STORAGES[storage]
    even = n % TILE == 0
    # 64 registers: what 32 warps, the most of one warp each, leave on a multiprocessor
    return dict(CODEC=codec, FP8=_FP8[storage], BITS=bits, MANTISSA=mantissa, EVEN=even,
                num_warps=1, maxnreg=64 if staged and even else None)


def _launch_compress(z, saved, buffer, power, codec, storage, layer, staged, from_post=False):
    """saved: mask, heads and scale; the first two are written."""
    n = z.numel()
    mask, heads, *scale = saved
    capability = torch.cuda.get_device_capability(z.device) if z.is_cuda else None
    convert = None
    if storage != torch.bfloat16 and z.is_cuda:  # not where the kernel is interpreted
        convert = _convert_asm(storage, capability)
    tensors = (z.view(torch.int16), mask, heads, buffer.arena.view(torch.int16), buffer.state,
               buffer.counters, *(scale or [None]))
    sizes = n, buffer.part_bytes, buffer.counters.stride(0), layer
    options = dict(STRIPES=buffer.stripes, POWER=power, CONVERT=convert,
                   **_format_options(n, codec, storage, staged))
    if staged:
        _compress_staged_kernel[(_tiles(n),)](
            *tensors, *sizes, PAIRS=capability >= (9, 0), FROM_POST=from_post, **options)
    else:
        packed = codec != "raw" or storage != torch.bfloat16
        scratch = z.new_empty(_tiles(n) * TILE, dtype=torch.int16) if packed else None
        _compress_kernel[(_tiles(n),)](
            *tensors, scratch, *sizes, GROUPS=TILE_GROUPS, **options)


def _launch_expand(out, dh, saved, buffer, power, codec, storage, staged):
    """out, dh: as out_ptr and dh_ptr of _expand_kernel; at least one of them."""
    n = (dh if out is None else out).numel()
    mask, heads, *scale = saved
    _expand_kernel[(_tiles(n),)](
        None if out is None else out.view(torch.int16), dh, mask, heads,
        buffer.arena.view(torch.int16), buffer.state, *(scale or [None]), n,
        buffer.part_bytes, STRIPES=buffer.stripes, POWER=power, GROUPS=TILE_GROUPS, STAGED=staged,
        **_format_options(n, codec, storage, staged))


def compress_triton(z: Tensor, buffer: ActivationBuffer, power: int, codec: str = "raw",
                    storage: torch.dtype = torch.bfloat16, layer: int = 0,
                    from_post: bool = False) -> list[Tensor]:
    """As compress_reference. from_post: z is relu(z)**2 (for power 0, where _may_compress_post)."""
    if not z.numel():
        return compress_reference(z, buffer, power, codec, storage, layer)
    saved = _new_saved(z, z.numel(), storage)
    if storage != torch.bfloat16:
        saved[2] = _fp8_scale(z, storage)
    staged = _may_stage(z, buffer.arena)
    _launch_compress(z, saved, buffer, power, codec, storage, layer, staged, from_post)
    return saved


def _may_compress_post(buffer: ActivationBuffer, storage: torch.dtype) -> bool:
    """Whether compress_triton may be given relu(z)**2: fp8 takes z, to find its scale."""
    return (buffer.fuses and storage == torch.bfloat16 and buffer.device.type == "cuda"
            and _may_stage(buffer.arena))


def decompress_triton(saved: list[Tensor], buffer: ActivationBuffer, n: int, codec: str = "raw",
                      storage: torch.dtype = torch.bfloat16, power: int = 1) -> Tensor:
    """As decompress_reference."""
    out = torch.empty(n, dtype=torch.bfloat16, device=saved[0].device)
    if n:
        staged = _may_stage(out, buffer.arena)
        _launch_expand(out, None, saved, buffer, power, codec, storage, staged)
    return out


def gradient_triton(dh: Tensor, saved: list[Tensor], buffer: ActivationBuffer, power: int,
                    codec: str = "raw", storage: torch.dtype = torch.bfloat16) -> None:
    """As gradient_reference."""
    if dh.numel():
        staged = _may_stage(dh, buffer.arena)
        _launch_expand(None, dh, saved, buffer, power, codec, storage, staged)


def backward_triton(dh: Tensor, saved: list[Tensor], buffer: ActivationBuffer, power: int,
                    codec: str = "raw",
                    storage: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """(dz in the memory of dh, post) from the compressed relu(z), which is read once."""
    post = torch.empty_like(dh)
    if dh.numel():
        staged = _may_stage(dh, post, buffer.arena)
        _launch_expand(post, dh, saved, buffer, power, codec, storage, staged)
    return dh, post


def activate_triton(z: Tensor, power: int) -> None:
    """As activate_reference."""
    _activate_kernel[(triton.cdiv(z.numel(), DENSE_BLOCK),)](z, z.numel(), POWER=power,
                                                           BLOCK=DENSE_BLOCK)


@functools.cache
def _fusing_works(device: torch.device, power: int, checked: bool) -> bool:
    """Whether _linear_activate_kernel gives the right bits here: tried once, at the first use."""
    generator = torch.Generator().manual_seed(0)
    # Several tiles and ragged ends; integers, whose sums are exact in any order, until rounded.
    x, w1 = (torch.randint(-8, 9, (n, 200), generator=generator).bfloat16() for n in (1300, 520))
    right = True
    for value in (1, 2.0 ** -80, 2.0 ** 65):  # the last two give relu(z) that are no exact roots
        x[700] = value
        expected = (x.float() @ w1.float().t()).bfloat16()
        activate_reference(expected, power)
        post = torch.empty_like(expected, device=device)
        state = torch.zeros(INEXACT + 1, dtype=torch.int64, device=device) if checked else None
        _launch_linear_activate(x.to(device), w1.to(device), post, power, programs=7, state=state)
        right &= torch.equal(post.cpu(), expected)
        right &= not checked or state.tolist() == [int(i == INEXACT and value != 1)
                                                   for i in range(INEXACT + 1)]
    if not right:
        _warn_of_fusing(device)
    return right


def _warn_of_fusing(device: torch.device) -> None:
    warnings.warn(f"bitsparse: Triton {triton.__version__} compiles a fused GEMM wrongly on "
                  f"{device}; the slower separate kernels run instead", stacklevel=3)


def _may_fuse(x: Tensor, w1: Tensor, b1: Tensor | None, power: int, checked: bool) -> bool:
    """Whether linear_activate_triton may stand for F.linear(x, w1, b1) and activate_triton.

    checked: with the check of roots that save="bitsparse" needs for power 2.
    """
    return b1 is None and _may_fuse_gemm(len(w1), x, w1) and _fusing_works(x.device, power, checked)


def _may_fuse_gradient(power: int, dy: Tensor, w2: Tensor, *post: Tensor) -> bool:
    """Whether linear_gradient_triton may stand for dy @ w2 and dense_gradient_triton."""
    return (_may_fuse_gemm(w2.shape[1], dy, w2, *post)
            and _gradient_fusing_works(dy.device, power))


def _may_fuse_gemm(hidden: int, x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels of fused GEMMs may run on such tensors, the first [tokens, d].

    They gave cuBLAS's bits at the sizes of training that were tried, but cuBLAS may choose another
    order of summation elsewhere. So under torch.use_deterministic_algorithms(True), which proofs of
    equality set, they may not run.
    """
    if not x.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    gpu = torch.cuda.get_device_properties(x.device)
    tiles = triton.cdiv(len(x), LINEAR_BLOCK[0]) * triton.cdiv(hidden, LINEAR_BLOCK[1])
    return ((gpu.major, gpu.minor) == (9, 0)
            and tiles >= gpu.multi_processor_count  # for fewer, cuBLAS has smaller ones
            and x.numel() > 0 and x.shape[1] % 8 == hidden % 8 == 0  # TMA wants rows of 16 bytes
            and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, *others)))


def _descriptor(t: Tensor, block: list[int]) -> TensorDescriptor:
    # not the tensor's own strides: of an axis of length 1 they may be any
    return TensorDescriptor(t, t.shape, [t.shape[1], 1], block)


def _launch_linear_activate(x, w1, post, power, programs, state=None):
    """post is written."""
    bm, bn, bk = LINEAR_BLOCK
    _linear_activate_kernel[(programs,)](
        _descriptor(x, [bm, bk]), _descriptor(w1, [bn, bk]), _descriptor(post, [bm, bn // 2]),
        state, *post.shape, x.shape[1], POWER=power, num_warps=8, num_stages=3)


def linear_activate_triton(x: Tensor, w1: Tensor, power: int,
                           state: Tensor | None = None) -> Tensor:
    """relu(bf16(x w1ᵀ))**power, bf16 [tokens, h], of what _may_fuse allows.

    state, for power 2: a buffer's, whose inexact flag is set where relu(z) is no exact root.
    """
    post = x.new_empty((len(x), len(w1)))
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _launch_linear_activate(x, w1, post, power, programs, state)
    return post


@functools.cache
def _gradient_fusing_works(device: torch.device, power: int) -> bool:
    """As _fusing_works, of _linear_gradient_kernel."""
    generator = torch.Generator().manual_seed(0)
    dy = torch.randint(-8, 9, (1300, 200), generator=generator).bfloat16()
    w2 = torch.randint(-8, 9, (200, 520), generator=generator).bfloat16()
    post = torch.randint(-8, 9, (1300, 520), generator=generator).bfloat16()
    activate_reference(post, power)
    expected = (dy.float() @ w2.float()).bfloat16()
    dense_gradient_reference(expected, post, power, from_post=True)
    dz = post.to(device)  # in its place
    _launch_linear_gradient(dy.to(device), w2.to(device), dz, dz, power, programs=7)
    right = torch.equal(dz.cpu(), expected)
    if not right:
        _warn_of_fusing(device)
    return right


def _launch_linear_gradient(dy, w2, post, dz, power, programs):
    """dz is written."""
    bm, bn, bk = LINEAR_BLOCK
    _linear_gradient_kernel[(programs,)](
        _descriptor(dy, [bm, bk]), _descriptor(w2, [bk, bn]), _descriptor(post, [bm, bn // 2]),
        _descriptor(dz, [bm, bn // 2]), post, *post.shape, dy.shape[1], POWER=power, num_warps=8,
        num_stages=3)


def linear_gradient_triton(dy: Tensor, w2: Tensor, post: Tensor, power: int,
                           out: Tensor | None = None) -> Tensor:
    """dz, bf16 [tokens, h], of dh = dy w2 and post, of what _may_fuse_gradient allows.

    As dense_gradient_reference from post. out: where to write it; it may be post.
    """
    dz = torch.empty_like(post) if out is None else out
    programs = torch.cuda.get_device_properties(dy.device).multi_processor_count
    _launch_linear_gradient(dy, w2, post, dz, power, programs)
    return dz


def dense_gradient_triton(dh: Tensor, a: Tensor, power: int, from_post: bool) -> None:
    """As dense_gradient_reference."""
    _dense_backward_kernel[(triton.cdiv(dh.numel(), DENSE_BLOCK),)](
        dh, a, dh.numel(), POWER=power, FROM_POST=from_post, BLOCK=DENSE_BLOCK)


# -----------------------------------------------------------------------------
# Ops: the whole MLP is one operator a direction, so all ways of saving make the same GEMM calls,
# but for those of "dense" and "bitsparse" where _may_fuse and _may_fuse_gradient say so


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """F.rms_norm(x, (d,), weight, eps) of x [tokens, d]; and rstd float32 [tokens, 1]."""
    return torch.ops.aten._fused_rms_norm(x, [x.shape[1]], weight, eps)


def _rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor,
                       weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(dx, dweight) as autograd of F.rms_norm computes them, to the last bit."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(
            dy, x, [x.shape[1]], rstd, weight, [True, weight is not None])
    # A CPU has no such operator: there, autograd goes through the float32 operations one by one.
    dy, x = dy.float(), x.float()
    dweight = None
    if weight is not None:
        dweight = (dy * (x * rstd)).sum(0).to(weight.dtype)
        dy = dy * weight
    dmean = -0.5 * (dy * x).sum(1, keepdim=True) * rstd.pow(3)
    return (dy * rstd + dmean / x.shape[1] * (2 * x)).bfloat16(), dweight


@torch.library.custom_op("bitsparse::mlp_forward", mutates_args=())
def mlp_forward(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
                norm_weight: Tensor | None, norm_eps: float | None, power: int, save: str,
                codec: str, storage: torch.dtype, buffer: int, layer: int,
                store: bool) -> list[Tensor]:
    """[y, *saved]: y = relu(x w1ᵀ + b1)**power w2ᵀ + b2 for x [tokens, d].

    With norm_eps, x goes through RMSNorm first.
    saved: with norm_eps rstd; then mask, heads and for fp8 scale ("bitsparse"), post ("dense"), or
    nothing ("checkpoint"). Without `store`, mask, heads and scale are of that shape only, and the
    heads of no generation.
    """
    rstd = []
    if norm_eps is not None:
        x, *rstd = _rms_norm(x, norm_weight, norm_eps)
    saved = []
    activations = _find_buffer(buffer) if save == "bitsparse" else None
    from_post = save == "bitsparse" and power == 2
    fuses = save != "checkpoint" and (not from_post or _may_compress_post(activations, storage))
    if fuses and _may_fuse(x, w1, b1, power, from_post):
        z = linear_activate_triton(x, w1, power, activations.state if from_post else None)
        if save == "bitsparse" and store:
            saved = compress_triton(z, activations, 0, codec, storage, layer, from_post)
    else:
        z = F.linear(x, w1, b1)
        if save == "bitsparse" and store:
            compress_ = compress_triton if z.is_cuda else compress_reference
            saved = compress_(z, activations, power, codec, storage, layer)
            activations.checked &= not from_post
        else:
            (activate_triton if z.is_cuda else activate_reference)(z, power)
    if save == "dense":
        saved = [z]
    if save == "bitsparse" and not store:
        saved = _new_saved(z, z.numel(), storage)
        saved[1].fill_(-1)
    return [F.linear(z, w2, b2), *rstd, *saved]


@mlp_forward.register_fake
def _(x, w1, w2, b1, b2, norm_weight, norm_eps, power, save, codec, storage, buffer, layer, store):
    rstd = [] if norm_eps is None else [x.new_empty((x.shape[0], 1), dtype=torch.float32)]
    saved = []
    if save == "bitsparse":
        saved = _new_saved(x, x.shape[0] * w1.shape[0], storage)
    elif save == "dense":
        saved = [x.new_empty((x.shape[0], w1.shape[0]))]
    return [x.new_empty((x.shape[0], w2.shape[0])), *rstd, *saved]


@torch.library.custom_op("bitsparse::mlp_backward", mutates_args=())
def mlp_backward(dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None,
                 norm_weight: Tensor | None, saved: list[Tensor], norm_eps: float | None,
                 power: int, save: str, codec: str, storage: torch.dtype, buffer: int, layer: int,
                 needs: list[bool]) -> list[Tensor]:
    """The gradients of mlp_forward's x, w1, w2, b1, b2, norm_weight, where `needs` says so."""
    needs_x, needs_w1, needs_w2, needs_b1, needs_b2, needs_norm_weight = needs
    needs_dx = needs_x or needs_norm_weight
    needs_dz = needs_dx or needs_w1 or needs_b1
    dx = dw1 = dw2 = db1 = db2 = dnorm_weight = None
    dy = dy.contiguous()  # autograd may hand over an expanded gradient
    normed = x
    if norm_eps is not None:
        rstd, *saved = saved
        if needs_w1 or save == "checkpoint":
            normed, _ = _rms_norm(x, norm_weight, norm_eps)
    dense_gradient = dense_gradient_triton if dy.is_cuda else dense_gradient_reference

    if save == "checkpoint" and (needs_w2 or needs_dz):
        post = F.linear(normed, w1, b1)
        if needs_dz:
            dz = dy @ w2
            dense_gradient(dz, post, power, from_post=False)
        else:
            (activate_triton if dy.is_cuda else activate_reference)(post, power)
        if needs_w2:
            dw2 = dy.t() @ post
        del post
    if save == "dense":
        if needs_w2:
            dw2 = dy.t() @ saved[0]
        if needs_dz and _may_fuse_gradient(power, dy, w2, saved[0]):
            dz = linear_gradient_triton(dy, w2, saved[0], power)
        elif needs_dz:
            dz = dy @ w2
            dense_gradient(dz, saved[0], power, from_post=True)
    if save == "bitsparse":
        activations = _find_buffer(buffer)
        decompress_ = decompress_triton if dy.is_cuda else decompress_reference
        gradient = gradient_triton if dy.is_cuda else gradient_reference
        last = layer == activations.layers - 1
        # whether r, and what is stored, is what post says
        told = storage == torch.bfloat16 and (power == 1 or activations.checked)
        if needs_dz and told and _may_fuse_gradient(power, dy, w2):
            post = decompress_(saved, activations, len(dy) * w2.shape[1], codec, storage, power)
            post = post.view(len(dy), w2.shape[1])
            if needs_w2:
                dw2 = dy.t() @ post
            dz = linear_gradient_triton(dy, w2, post, power, out=post)
        elif needs_w2 and needs_dz and dy.is_cuda and not last:
            dz, post = backward_triton(dy @ w2, saved, activations, power, codec, storage)
            dw2 = dy.t() @ post
            del post
        else:
            # The last layer's backward begins while all that is saved is still there. It reads the
            # compressed copy twice, so that one of post and dz is there at a time.
            if needs_w2:
                post = decompress_(saved, activations, len(dy) * w2.shape[1], codec, storage, power)
                dw2 = dy.t() @ post.view(len(dy), w2.shape[1])
                del post
            if needs_dz:
                dz = dy @ w2
                gradient(dz, saved, activations, power, codec, storage)

    if needs_dx:
        dx = dz @ w1
        if norm_eps is not None:
            dx, dnorm_weight = _rms_norm_backward(dx, x, rstd, norm_weight)
    if needs_w1:
        dw1 = dz.t() @ normed
    if needs_b1:
        db1 = dz.sum(0)
    if needs_b2:
        db2 = dy.sum(0)
    gradients = dx, dw1, dw2, db1, db2, dnorm_weight
    return [t for t, needed in zip(gradients, needs, strict=True) if needed]


@mlp_backward.register_fake
def _(dy, x, w1, w2, b1, norm_weight, saved, norm_eps, power, save, codec, storage, buffer, layer,
      needs):
    inputs = x, w1, w2, b1, w2.new_empty((w2.shape[0],)), norm_weight
    return [t.new_empty(t.shape) for t, needed in zip(inputs, needs, strict=True) if needed]


# -----------------------------------------------------------------------------
# Autograd


def _setup_context(ctx, inputs, output):
    x, w1, w2, b1, _, norm_weight, *ctx.options, _ = inputs
    ctx.save_for_backward(x, w1, w2, b1, norm_weight, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    x, w1, w2, b1, norm_weight, *saved = ctx.saved_tensors
    needs = ctx.needs_input_grad[:6]
    gradients = iter(mlp_backward(grads[0], x, w1, w2, b1, norm_weight, saved, *ctx.options, needs))
    return *(next(gradients) if needed else None for needed in needs), *[None] * 8


mlp_forward.register_autograd(_backward, setup_context=_setup_context)


# -----------------------------------------------------------------------------
# Public functions


def _check_tensor(name: str, t: Tensor, device: torch.device,
                  shape: tuple[int, ...] | None = None) -> None:
    if t.device != device:
        raise ValueError(f"{name}: expected device {device}, that of x, received {t.device}")
    if t.dtype != torch.bfloat16:
        raise ValueError(f"{name}: expected dtype torch.bfloat16, received {t.dtype}")
    if shape is not None and tuple(t.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, received {list(t.shape)}")
    if not t.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, received shape {list(t.shape)} "
                         f"with strides {list(t.stride())}")


def _check_buffer(buffer: ActivationBuffer, device: torch.device) -> None:
    if buffer.device != device:
        raise ValueError(f"buffer: expected one on {device}, received one on {buffer.device}")


def _check_format(codec: str, storage: torch.dtype) -> None:
    if codec not in CODECS:
        raise ValueError(f"codec: expected one of {', '.join(CODECS)}, received {codec!r}")
    if storage not in STORAGES:
        raise ValueError(f"storage: expected one of {', '.join(map(str, STORAGES))}, "
                         f"received {storage}")


def compress(x: Tensor, buffer: ActivationBuffer | None = None, codec: str = "raw",
             storage: torch.dtype = torch.bfloat16) -> BitSparseTensor:
    """relu(x), x bf16 of any shape, contiguous, in the format of the module's docstring.

    Without a buffer one of exactly the needed size is made, for which the host waits for the
    device. On overflow of a given buffer, see "Capacity" there. Raises ValueError for other x.
    """
    _check_tensor("x", x, x.device)
    _check_format(codec, storage)
    compress_ = compress_triton if x.is_cuda else compress_reference
    if buffer is None:
        buffer = ActivationBuffer(0, x.device, stripes=1)
        compress_(x, buffer, 0, codec, storage)  # stores nothing and counts everything
        buffer.resize(int(buffer.used_bytes()))
    _check_buffer(buffer, x.device)
    saved = compress_(x, buffer, 0, codec, storage)
    return BitSparseTensor(saved, buffer, x.shape, codec, storage)


def decompress(t: BitSparseTensor) -> Tensor:
    """relu(x), bf16, of the shape of the x that was compressed."""
    format_ = t.saved, t.buffer, t.shape.numel(), t.codec, t.storage
    decompress_ = decompress_triton if t.saved[0].is_cuda else decompress_reference
    return decompress_(*format_).view(t.shape)


def _saves_in_vain() -> bool:
    """Whether torch.utils.checkpoint drops what is saved here, to run all this again in backward.

    Told by the module and name of its hook. Where they are others, or where an operator's results
    may be kept by a dispatch mode (as by selective checkpointing), the answer is no.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)
    return (getattr(pack, "__module__", None) == "torch.utils.checkpoint"
            and getattr(pack, "__qualname__", "").startswith("_checkpoint_hook."))


def _mlp(x, w1, w2, b1, b2, power, buffer, codec, storage, save, layer, norm_eps, norm_weight):
    if w1.dim() != 2:
        raise ValueError(f"w1: expected shape [h, d], received {list(w1.shape)}")
    hidden, d = w1.shape
    _check_tensor("x", x, x.device, (*x.shape[:-1], d))
    _check_tensor("w1", w1, x.device)
    _check_tensor("w2", w2, x.device, (d, hidden))
    if (b1 is None) != (b2 is None):
        raise ValueError("b1, b2: expected both or neither, received one of them")
    if b1 is not None:
        _check_tensor("b1", b1, x.device, (hidden,))
        _check_tensor("b2", b2, x.device, (d,))
    if norm_weight is not None:
        if norm_eps is None:
            raise ValueError("norm_eps: norm_weight expects a number, received None")
        _check_tensor("norm_weight", norm_weight, x.device, (d,))
    if norm_eps is not None and not norm_eps >= 0:
        raise ValueError(f"norm_eps: expected 0 or more, received {norm_eps}")
    if save not in SAVES:
        raise ValueError(f"save: expected one of {', '.join(SAVES)}, received {save!r}")
    _check_format(codec, storage)
    if save == "bitsparse":
        if buffer is None:
            raise ValueError('buffer: save="bitsparse" expects an ActivationBuffer, received None')
        _check_buffer(buffer, x.device)
        if not 0 <= layer < buffer.layers:
            raise ValueError(f"layer: expected 0 to {buffer.layers - 1}, received {layer}")
        if not (torch.is_grad_enabled()
                and any(t is not None and t.requires_grad
                        for t in (x, w1, w2, b1, b2, norm_weight))):
            save = "checkpoint"  # nothing will be read back: store nothing
    number = buffer.number if buffer is not None else -1
    store = save == "bitsparse" and not _saves_in_vain()
    tokens = x.view(x.shape[:-1].numel(), d)
    y, *_ = mlp_forward(tokens, w1, w2, b1, b2, norm_weight, norm_eps, power, save, codec, storage,
                        number, layer, store)
    return y.view(x.shape)


def relu2_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
              *, buffer: ActivationBuffer | None = None, codec: str = "raw",
              storage: torch.dtype = torch.bfloat16, save: str = "bitsparse", layer: int = 0,
              norm_eps: float | None = None, norm_weight: Tensor | None = None) -> Tensor:
    """relu(x w1ᵀ + b1)² w2ᵀ + b2.

    x [..., d], w1 [h, d], w2 [d, h], b1 [h], b2 [d]: bf16, contiguous. Returns [..., d] bf16.
    save: how the hidden activation is kept for backward. "bitsparse": compressed, its values in
    `buffer`, as `codec` and `storage` say. "dense": post = relu(z)² only, 2 bytes an element.
    "checkpoint": not at all; backward makes the first GEMM again. With bf16 storage outputs and
    gradients are the same bits in all three (for "dense" where r >= 2^-63: see "Lossless" in the
    module's docstring). On compute capability 9.0 "dense", and "bitsparse" with bf16 storage, make
    the first GEMM and relu² in one kernel, where there is no b1, and dy w2 and dz in another. They
    added up as cuBLAS at the sizes tried; to be sure of it anywhere,
    torch.use_deterministic_algorithms(True) has all three call cuBLAS.
    layer: the number under which the buffer counts what this call stores.
    norm_eps: x is replaced by F.rms_norm(x, (d,), norm_weight, norm_eps), norm_weight [d] bf16 or
    None. For backward, x and 4 bytes a token are kept, and what the norm made of x is made again.
    """
    return _mlp(x, w1, w2, b1, b2, 2, buffer, codec, storage, save, layer, norm_eps, norm_weight)


def relu_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
             *, buffer: ActivationBuffer | None = None, codec: str = "raw",
             storage: torch.dtype = torch.bfloat16, save: str = "bitsparse", layer: int = 0,
             norm_eps: float | None = None, norm_weight: Tensor | None = None) -> Tensor:
    """relu(x w1ᵀ + b1) w2ᵀ + b2; arguments as relu2_mlp."""
    return _mlp(x, w1, w2, b1, b2, 1, buffer, codec, storage, save, layer, norm_eps, norm_weight)
