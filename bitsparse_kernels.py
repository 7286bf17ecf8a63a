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
    heads  int64 [tiles]       bits 0..39: where in the buffer the tile's values begin, in units
                               of 16 bytes; bits 40..51: how many values it has (nnz).
    values in the buffer       2 bytes each, little endian, ordered by (group, word, lane): the
                               value of element (g, w, lane) is number popcount(all mask words of
                               the tile before 8 g + w) + popcount(mask word & ((1 << lane) - 1)).
                               A tile takes 2 * nnz bytes, rounded up to a multiple of 16 (what
                               the padding holds is undefined).

    To read one element by hand: x[5000] of a [2, 4096] tensor is in tile 5000 // 2048 = 2, at 904
    in it: group 3, offset 136 = 8 * 17 + 0: lane 17, word 0. Is bit 17 of mask[2, 24] set? If
    not, it is 0. If so, with k the popcount of mask[2, 0:24] and of the 17 low bits of mask[2,
    24], its bf16 is in the two bytes of the buffer from 16 * (heads[2] & (2**40 - 1)) + 2 k.

    The order (group, word, lane) lets a warp find every rank with two popcounts and no scan over
    elements, since the 32 bits of a mask word belong to the 32 lanes of a warp. Tiles come to lie
    in the buffer in the order in which the device reserved room for them, which differs between
    runs; what is read back does not.

Lossless. Stored is every element that is positive or NaN: subnormals, +inf and NaN of either sign
keep their 16 bits; −0 and negative elements come back as +0. So decompress(compress(x)) equals
torch.relu(x) bit for bit wherever that is positive, is the x that was given where it is NaN (what
torch.relu makes of a NaN's bits differs between devices), and is +0 elsewhere. The backward pass
computes post = bf16(r * r) and dz = bf16(dh * 2r), products in float32, each rounded once: what
the dense path computes. (With save="dense", r is rebuilt as bf16(sqrt(post)), which is r whenever
r² is a normal bf16, that is for r >= 2^-63.)

Size. bits_per_element(density) = 1 (mask) + 64 / TILE (head) + 16 * density + 56 / TILE (mean
padding): at density 0.2, 1 + 0.031 + 3.2 + 0.027 = 4.26 bits, against 16 dense.

Capacity. The buffer never grows by itself and nothing is ever written past its end. Every tile
reserves its bytes by an atomic add on a device counter, which goes on counting past the capacity:
so the needed size is known exactly. A tile that does not fit whole is not written at all, it
reads back as zeros, and `overflowed()` is true from then until `resize()`: whoever uses the
results must test it (train_gpt.py turns such a step into one without effect, on the device, and
repeats it with a larger buffer).

Lifetime. What is written into the buffer lives until its next reset(): one reset() before each
forward, and the backward of that forward before the next reset().

torch.compile sees opaque operators without mutated arguments, so there is no graph break and no
copy of the buffer: they find it by its number (an int). The contract that makes this sound: a
tile's values are written by the one operator call that returns its `mask` and `heads`, and read
only by operators that take these two; so data dependence orders writes before reads. Reservations
commute, so the layers may run in any order.

Usage:

    buffer = ActivationBuffer(capacity_bytes=2**30, device="cuda")
    buffer.reset()                                     # before each forward
    y = relu2_mlp(x, w1, w2, buffer=buffer)            # x [..., d], w1 [h, d], w2 [d, h], all bf16
"""
import functools
import itertools
import os
import warnings
import weakref
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["ActivationBuffer", "BitSparseTensor", "BufferSnapshot", "bits_per_element", "compress",
           "decompress", "relu2_mlp", "relu_mlp"]

# -----------------------------------------------------------------------------
# Constants

GROUP = 256  # elements whose mask is 8 words of 32 bits
TILE = 2048  # elements that share one head, and are one program's work
ALIGN = 16  # bytes: a tile's values begin on a 16-byte vector
TILE_GROUPS = TILE // GROUP
TILE_WORDS = TILE // 32
SAVES = ("bitsparse", "dense", "checkpoint")


def bits_per_element(density: float) -> float:
    """Expected saved bits an element at `density` (stored of all elements), for whole tiles.

    mask + head + values + padding: a tile's 2 * nnz bytes are rounded up to a multiple of ALIGN, on
    average by (ALIGN - 2) / 2 bytes where a tile's nnz is spread over many values.
    """
    padding = 8 * (ALIGN - 2) / 2 / TILE if 0 < density < 1 else 0
    return 1 + 64 / TILE + 16 * density + padding


# -----------------------------------------------------------------------------
# Storage

_buffers: "weakref.WeakValueDictionary[int, ActivationBuffer]" = weakref.WeakValueDictionary()
_buffer_numbers = itertools.count()


class BufferSnapshot:
    """The buffer's counters at one moment, on their way to the host; ActivationBuffer.snapshot().

    ready() tells, without waiting, whether they have arrived; the properties wait if need be.
    """

    def __init__(self, state: Tensor, capacity_bytes: int):
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
        """The most bytes asked for between two resets since the snapshot before this one."""
        return self._read(1)

    @property
    def overflowed(self) -> bool:
        """Whether more than the capacity was asked for at any time since the last resize()."""
        return self._read(2) > self.capacity_bytes

    @property
    def needed_bytes(self) -> int:
        """The most bytes asked for between two resets since the last resize()."""
        return self._read(2)

    @property
    def layer_nnz(self) -> list[int]:
        """Values stored since the snapshot before this one, by layer."""
        return [self._read(i) for i in range(3, len(self._host))]


class ActivationBuffer:
    """A preallocated buffer for the stored values of all layers of one microbatch.

    capacity_bytes: size in bytes, rounded up to a multiple of 16. device: "cuda" or "cpu".
    layers: how many layers have their stored values counted apart (see BufferSnapshot.layer_nnz).
    No method waits for the device.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str, layers: int = 1):
        if layers < 1:
            raise ValueError(f"layers: expected 1 or more, received {layers}")
        self.number = next(_buffer_numbers)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.layers = layers
        # int64: bytes asked for since reset, most since snapshot, most since the last resize; then
        # values stored since snapshot, by layer
        self.state = torch.zeros(3 + layers, dtype=torch.int64, device=self.device)
        self._allocate(capacity_bytes)
        _buffers[self.number] = self

    def _allocate(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: expected 0 or more, received {capacity_bytes}")
        self.arena = None  # frees the old memory first: both sizes are never held at once
        size = -(-capacity_bytes // ALIGN) * ALIGN
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)

    @property
    def capacity_bytes(self) -> int:
        return self.arena.numel()

    def _fold_cursor(self) -> None:
        self.state[1:3].copy_(torch.maximum(self.state[1:3], self.state[:1]))

    def reset(self) -> None:
        """Drop everything stored. What was compressed before this can no longer be read."""
        self._fold_cursor()
        self.state[0].zero_()

    def used_bytes(self) -> Tensor:
        """int64 device scalar: bytes asked for since the last reset, whether they fitted or not."""
        return self.state[0].clone()

    def overflowed(self) -> Tensor:
        """bool device scalar: whether anything since the last resize() did not fit."""
        return torch.maximum(self.state[0], self.state[2]) > self.capacity_bytes

    def snapshot(self) -> BufferSnapshot:
        """Send the counters to pinned host memory, and begin to count anew."""
        self._fold_cursor()
        snapshot = BufferSnapshot(self.state, self.capacity_bytes)
        self.state[1].zero_()
        self.state[3:].zero_()
        return snapshot

    def resize(self, capacity_bytes: int) -> None:
        """Give the buffer another size; drops contents and overflow state. Between steps only."""
        self._allocate(capacity_bytes)
        self.state.zero_()


def _find_buffer(number: int) -> ActivationBuffer:
    try:
        return _buffers[number]
    except KeyError:
        raise RuntimeError(f"activation buffer {number} is gone: keep a reference to the "
                           f"ActivationBuffer until the backward pass is over") from None


@dataclass(frozen=True)
class BitSparseTensor:
    """relu(x) in compressed form; readable until its buffer's next reset().

    mask: int32 [tiles, 64]. heads: int64 [tiles]. buffer: holds the values. shape: of x.
    """

    mask: Tensor
    heads: Tensor
    buffer: ActivationBuffer
    shape: torch.Size


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _tile_bytes(nnz: Tensor) -> Tensor:
    return (nnz * 2 + ALIGN - 1) // ALIGN * ALIGN


def _new_mask_and_heads(z: Tensor) -> tuple[Tensor, Tensor]:
    tiles = _tiles(z.numel())
    return (z.new_empty((tiles, TILE_WORDS), dtype=torch.int32),
            z.new_empty((tiles,), dtype=torch.int64))


# -----------------------------------------------------------------------------
# Reference: pure torch, the same bits as the kernels; also what runs on a CPU


def compress_reference(z: Tensor, buffer: ActivationBuffer, power: int,
                       layer: int = 0) -> tuple[Tensor, Tensor]:
    """Store relu(z) in the buffer and, for power 1 or 2, replace z by relu(z)**power (0: leave it).

    z: bf16, contiguous. Returns mask, heads.
    """
    n = z.numel()
    bits = torch.zeros(_tiles(n) * TILE, dtype=torch.int16, device=z.device)
    bits[:n] = z.view(torch.int16).flatten()
    # [tile, (group, word, lane)]: the order of the values
    bits = bits.view(-1, TILE_GROUPS, 32, 8).transpose(2, 3).flatten(1)
    stored = ~(bits.view(torch.bfloat16) <= 0)
    lane = torch.arange(32, device=z.device)
    mask = (stored.view(-1, TILE_WORDS, 32).long() << lane).sum(-1).to(torch.int32)

    nnz = stored.sum(1)
    tile_bytes = _tile_bytes(nnz)
    base = buffer.state[0] + tile_bytes.cumsum(0) - tile_bytes
    buffer.state[0] += tile_bytes.sum()
    buffer.state[3 + layer] += nnz.sum()
    written = stored & (base + tile_bytes <= buffer.capacity_bytes)[:, None]
    rank = stored.cumsum(1) - 1
    buffer.arena.view(torch.int16)[(base[:, None] // 2 + rank)[written]] = bits[written]
    if power:
        r = z.masked_fill(z <= 0, 0)
        z.copy_(r * r if power == 2 else r)
    return mask, base >> 4 | nnz << 40


def decompress_reference(mask: Tensor, heads: Tensor, buffer: ActivationBuffer, n: int) -> Tensor:
    """relu(z) as bf16 [n]; zeros for tiles that did not fit."""
    lane = torch.arange(32, device=mask.device)
    stored = ((mask[:, :, None] >> lane) & 1).bool().flatten(1)  # [tile, (group, word, lane)]
    base = (heads & (1 << 40) - 1) << 4
    read = stored & (base + _tile_bytes(heads >> 40) <= buffer.capacity_bytes)[:, None]
    rank = stored.cumsum(1) - 1
    bits = torch.zeros(stored.shape, dtype=torch.int16, device=mask.device)
    bits[read] = buffer.arena.view(torch.int16)[(base[:, None] // 2 + rank)[read]]
    bits = bits.view(-1, TILE_GROUPS, 8, 32).transpose(2, 3)
    return bits.reshape(-1)[:n].view(torch.bfloat16)


def backward_reference(dh: Tensor, r: Tensor, power: int) -> tuple[Tensor, Tensor]:
    """(dz, post) of post = r**power, r = relu(z): dz = dh * power * r**(power - 1) where r > 0."""
    stored = ~(r <= 0)
    dz = dh * (2 * r) if power == 2 else dh
    return dz.masked_fill(~stored, 0), r * r if power == 2 else r


# -----------------------------------------------------------------------------
# Kernels
#
# One program is one warp and one tile. Two-dimensional blocks [32, 8] hold one group: row = lane,
# column = word, so that a thread holds 8 neighbours (one 16-byte access) and 32 threads hold the
# 32 bits of each mask word. STAGED kernels rely on that assignment of rows to threads, which Triton
# chooses for 16-byte accesses by one warp; _staging_works() checks it, by result, before use.

_STAGE_ASM = tl.constexpr(
    f"{{ .shared .align 16 .b8 stage[{2 * TILE}]; mov.u32 $0, stage; }}")
_BALLOT_ASM = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }")
# Two elements a call: 16-bit values at shared addresses $2 and $3 (-1: none).
_STAGE_PUT_ASM = tl.constexpr("""{
    .reg .pred p, q; .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $4;
    setp.ge.s32 p, $2, 0;
    setp.ge.s32 q, $3, 0;
    @p st.shared.b16 [$2], lo;
    @q st.shared.b16 [$3], hi;
    mov.b32 $0, 0;
    mov.b32 $1, 0; }""")
_STAGE_GET_ASM = tl.constexpr("""{
    .reg .pred p, q; .reg .b16 lo, hi;
    setp.ge.s32 p, $1, 0;
    setp.ge.s32 q, $2, 0;
    mov.b16 lo, 0;
    mov.b16 hi, 0;
    @p ld.shared.b16 lo, [$1];
    @q ld.shared.b16 hi, [$2];
    mov.b32 $0, {lo, hi}; }""")
# Eight elements a call, one 16-byte vector at the shared address of the first.
_STAGE_PUT_VECTOR_ASM = tl.constexpr("""{
    st.shared.v4.b32 [$4], {$12, $13, $14, $15};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0; }""")
_STAGE_GET_VECTOR_ASM = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")


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
def _compress_kernel(z_ptr, mask_ptr, heads_ptr, values_ptr, cursor_ptr, n, capacity,
                     POWER: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
                     STAGED: tl.constexpr):
    """Store the positive elements of z, and in the same pass replace z by relu(z)**POWER (0: not).

    z_ptr       [n] bf16 as int16, read 2 n bytes, written 2 n where POWER is not 0
    mask_ptr    [tiles, 8 GROUPS] int32, written n / 8 bytes
    heads_ptr   [tiles] int64, written
    values_ptr  [capacity / 2] int16, written 2 nnz bytes in all
    cursor_ptr  [1] int64 bytes, one atomic add a tile
    Grid: one program a tile of 256 GROUPS elements, in any order. A tile that would end past
    `capacity` bytes is counted and not written.

    STAGED compacts a tile in shared memory and writes whole 16-byte vectors: 91 % of the copy
    roofline at density 0.2, against 69 % with a 2-byte store an element, bound by the number
    of store requests, most of them in partial sectors (H200, [65536, 3072], 2026-11-30).
    """
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    word = tl.arange(0, 8)[None, :]
    e = lane * 8 + word
    z_ptr += tile * (GROUPS * 256)
    mask_ptr += tile * (GROUPS * 8)
    left = n - tile * (GROUPS * 256)
    if STAGED:
        stage = tl.inline_asm_elementwise(
            _STAGE_ASM, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)

    nnz = tl.zeros((32, 1), tl.int32)
    four_groups = tl.zeros((32, 8), tl.int32)
    kept = ()
    ahead = _load_group(z_ptr, e, left, EVEN)
    for g in tl.static_range(GROUPS):
        bits = ahead
        if g + 1 < GROUPS:
            ahead = _load_group(z_ptr + (g + 1) * 256, e, left - (g + 1) * 256, EVEN)
        x = _float_bits(bits)
        stored = ~(x <= 0.0)  # true for NaN
        if STAGED:
            words = tl.inline_asm_elementwise(
                _BALLOT_ASM, "=r,r", [stored.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)
        else:
            words = tl.sum(stored.to(tl.int32) << lane, axis=0)[None, :] + tl.zeros_like(lane)
        rank, nnz = _rank_words(words, lane, nnz)
        if STAGED:
            tl.inline_asm_elementwise(
                _STAGE_PUT_ASM, "=r,=r,r,r,r", [tl.where(stored, stage + rank * 2, -1), bits],
                dtype=tl.int32, is_pure=False, pack=2)
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
    tile_bytes = ((nnz * 2 + 15) // 16 * 16).to(tl.int64)
    base = tl.atomic_add(cursor_ptr, tile_bytes, sem="relaxed")
    tl.store(heads_ptr + tile, (base >> 4) | (nnz.to(tl.int64) << 40))
    fits = base + tile_bytes <= capacity
    values_ptr += tl.multiple_of(base // 2, 8)
    if STAGED:
        tl.debug_barrier()
        for g in tl.static_range(GROUPS):
            packed = tl.inline_asm_elementwise(
                _STAGE_GET_VECTOR_ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [stage + g * 512 + e * 2],
                dtype=tl.int16, is_pure=False, pack=8)
            # whole vectors: the last one's padding is this tile's own
            inside = (g * 256 + lane * 8 + tl.zeros_like(word)) < nnz
            tl.store(values_ptr + g * 256 + e, packed, mask=inside & fits)
    else:
        for g in tl.static_range(GROUPS):
            bits, rank = kept[g]
            tl.store(values_ptr + rank, bits, mask=(rank >= 0) & fits)


@triton.jit
def _expand_kernel(out_ptr, dh_ptr, mask_ptr, heads_ptr, values_ptr, n, capacity,
                   POWER: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
                   STAGED: tl.constexpr):
    """From the compressed relu(z) = r: write r (POWER 0), or r**POWER and replace dh by dz.

    out_ptr   [n] bf16 as int16, written: r (POWER 0, 1) or bf16(r * r) (2)
    dh_ptr    [n] bf16, where POWER is not 0 read and written in place: dz = bf16(dh * 2r) (2) or
              dh (1) where r is stored, 0 elsewhere
    mask_ptr, heads_ptr, values_ptr as in _compress_kernel, read n / 8 + 8 tiles + 2 nnz bytes
    Grid: one program a tile. A tile that did not fit is read as zeros.
    """
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)[:, None]
    word = tl.arange(0, 8)[None, :]
    e = lane * 8 + word
    out_ptr += tile * (GROUPS * 256)
    dh_ptr += tile * (GROUPS * 256)
    mask_ptr += tile * (GROUPS * 8)
    left = n - tile * (GROUPS * 256)

    head = tl.load(heads_ptr + tile)
    dh = ()
    if POWER > 0:
        for g in tl.static_range(GROUPS):
            dh = dh + (_load_group(dh_ptr + g * 256, e, left - g * 256, EVEN),)
    base = (head & 0xFFFFFFFFFF) << 4
    nnz = (head >> 40).to(tl.int32) & 0xFFF
    fits = base + (nnz * 2 + 15) // 16 * 16 <= capacity
    values_ptr += tl.multiple_of(base // 2, 8)
    if STAGED:
        stage = tl.inline_asm_elementwise(
            _STAGE_ASM, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
        for g in tl.static_range(GROUPS):
            inside = (g * 256 + lane * 8 + tl.zeros_like(word)) < nnz
            packed = tl.load(values_ptr + g * 256 + e, mask=inside & fits, other=0)
            tl.inline_asm_elementwise(
                _STAGE_PUT_VECTOR_ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
                [stage + g * 512 + e * 2, packed], dtype=tl.int16, is_pure=False, pack=8)
        tl.debug_barrier()

    before = tl.zeros((32, 1), tl.int32)
    ahead = tl.load(mask_ptr + word + tl.zeros_like(lane))
    for g in tl.static_range(GROUPS):
        words = ahead
        if g + 1 < GROUPS:
            ahead = tl.load(mask_ptr + (g + 1) * 8 + word + tl.zeros_like(lane))
        rank, before = _rank_words(words, lane, before)
        stored = ((words >> lane) & 1) != 0
        if STAGED:
            bits = tl.inline_asm_elementwise(
                _STAGE_GET_ASM, "=r,r,r", [tl.where(stored, stage + rank * 2, -1)],
                dtype=tl.int16, is_pure=False, pack=2)
        else:
            bits = tl.load(values_ptr + rank, mask=stored & fits, other=0)
        if POWER > 0:
            r = _float_bits(bits)
            grad = dh[g].to(tl.float32)
            dz = grad * (2.0 * r) if POWER == 2 else grad
            _store_group(dh_ptr + g * 256, e, tl.where(stored, dz, 0.0).to(tl.bfloat16),
                         left - g * 256, EVEN)
        if POWER == 2:
            bits = (r * r).to(tl.bfloat16).to(tl.int16, bitcast=True)
        _store_group(out_ptr + g * 256, e, bits, left - g * 256, EVEN)


@triton.jit
def _count_kernel(heads_ptr, nnz_ptr, tiles, BLOCK: tl.constexpr):
    """Add up the tiles' nnz. heads_ptr [tiles] int64, read; nnz_ptr [1] int64, added to."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.load(heads_ptr + i, mask=i < tiles, other=0)
    tl.atomic_add(nnz_ptr, tl.sum((heads >> 40) & 0xFFF), sem="relaxed")


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
def _dense_backward_kernel(dh_ptr, a_ptr, n, POWER: tl.constexpr, FROM_POST: tl.constexpr,
                           BLOCK: tl.constexpr):
    """Replace dh by dz where the activation itself is at hand.

    dh_ptr  [n] bf16, read and written in place, as in _backward_kernel
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
    x = torch.randn(3 * TILE, generator=generator).bfloat16()
    there, here = (ActivationBuffer(2 * x.numel(), d) for d in (device, "cpu"))
    dh = there.arena.view(torch.bfloat16)  # not read
    out = torch.empty_like(x, device=device)
    mask, heads = _launch_compress(x.to(device), there, 0, staged=True)
    _launch_expand(out, dh, mask, heads, there, 0, staged=True)
    expected_mask, _ = compress_reference(x, here, 0)
    if torch.equal(mask.cpu(), expected_mask) and torch.equal(out.cpu(), x.relu()):
        return True
    warnings.warn(f"bitsparse: Triton {triton.__version__} assigns threads in an unexpected way on "
                  f"{device}; the slower plain kernels run instead", stacklevel=2)
    return False


def _may_stage(*tensors: Tensor) -> bool:
    """16-byte accesses need 16-byte alignment, which a view into a larger tensor may lack."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and _staging_works(tensors[0].device)


def _launch_compress(z, buffer, power, staged):
    mask, heads = _new_mask_and_heads(z)
    n = z.numel()
    _compress_kernel[(_tiles(n),)](
        z.view(torch.int16), mask, heads, buffer.arena.view(torch.int16), buffer.state, n,
        buffer.capacity_bytes, POWER=power, GROUPS=TILE_GROUPS, EVEN=n % TILE == 0, STAGED=staged,
        num_warps=1)
    return mask, heads


def _launch_expand(out, dh, mask, heads, buffer, power, staged):
    n = out.numel()
    _expand_kernel[(_tiles(n),)](
        out.view(torch.int16), dh, mask, heads, buffer.arena.view(torch.int16), n,
        buffer.capacity_bytes, POWER=power, GROUPS=TILE_GROUPS, EVEN=n % TILE == 0, STAGED=staged,
        num_warps=1)


def compress_triton(z: Tensor, buffer: ActivationBuffer, power: int,
                    layer: int = 0) -> tuple[Tensor, Tensor]:
    """As compress_reference."""
    if not z.numel():
        return _new_mask_and_heads(z)
    mask, heads = _launch_compress(z, buffer, power, _may_stage(z, buffer.arena))
    tiles = heads.numel()
    _count_kernel[(triton.cdiv(tiles, 2048),)](heads, buffer.state[3 + layer], tiles, BLOCK=2048)
    return mask, heads


def decompress_triton(mask: Tensor, heads: Tensor, buffer: ActivationBuffer, n: int) -> Tensor:
    """As decompress_reference."""
    out = torch.empty(n, dtype=torch.bfloat16, device=mask.device)
    if n:
        _launch_expand(out, out, mask, heads, buffer, 0, _may_stage(out, buffer.arena))
    return out


def backward_triton(dh: Tensor, mask: Tensor, heads: Tensor, buffer: ActivationBuffer,
                    power: int) -> tuple[Tensor, Tensor]:
    """(dz in the memory of dh, post) from the compressed relu(z)."""
    post = torch.empty_like(dh)
    if dh.numel():
        _launch_expand(post, dh, mask, heads, buffer, power, _may_stage(dh, post, buffer.arena))
    return dh, post


# -----------------------------------------------------------------------------
# Ops: the whole MLP is one operator a direction, so all ways of saving make the same GEMM calls


def _hidden(x: Tensor, w1: Tensor, b1: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w1, b1)


@torch.library.custom_op("bitsparse::mlp_forward", mutates_args=())
def mlp_forward(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
                power: int, save: str, buffer: int, layer: int) -> list[Tensor]:
    """[y, *saved]: y = relu(x w1ᵀ + b1)**power w2ᵀ + b2 for x [tokens, d].

    saved: mask and heads ("bitsparse"), post ("dense"), or nothing ("checkpoint").
    """
    z = _hidden(x, w1, b1)
    saved = []
    if save == "bitsparse":
        compress_ = compress_triton if z.is_cuda else compress_reference
        saved = [*compress_(z, _find_buffer(buffer), power, layer)]
    elif z.is_cuda:
        _activate_kernel[(triton.cdiv(z.numel(), 4096),)](z, z.numel(), POWER=power, BLOCK=4096)
    else:
        z.masked_fill_(z <= 0, 0)
        if power == 2:
            z.square_()
    if save == "dense":
        saved = [z]
    return [torch.nn.functional.linear(z, w2, b2), *saved]


@mlp_forward.register_fake
def _(x, w1, w2, b1, b2, power, save, buffer, layer):
    n = x.shape[0] * w1.shape[0]
    saved = {"bitsparse": lambda: [x.new_empty((_tiles(n), TILE_WORDS), dtype=torch.int32),
                                   x.new_empty((_tiles(n),), dtype=torch.int64)],
             "dense": lambda: [x.new_empty((x.shape[0], w1.shape[0]))],
             "checkpoint": list}[save]()
    return [x.new_empty((x.shape[0], w2.shape[0])), *saved]


@torch.library.custom_op("bitsparse::mlp_backward", mutates_args=())
def mlp_backward(dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None,
                 saved: list[Tensor], power: int, save: str, buffer: int) -> list[Tensor]:
    """[dx, dw1, dw2] of mlp_forward, and [db1, db2] behind them where b1 is given."""
    dy = dy.contiguous()  # autograd may hand over an expanded gradient
    dh = dy @ w2
    if save == "bitsparse":
        if dh.is_cuda:
            dz, post = backward_triton(dh, *saved, _find_buffer(buffer), power)
        else:
            r = decompress_reference(*saved, _find_buffer(buffer), dh.numel()).view_as(dh)
            dz, post = backward_reference(dh, r, power)
    else:
        from_post = save == "dense"
        a = saved[0] if from_post else _hidden(x, w1, b1)
        if dh.is_cuda:
            _dense_backward_kernel[(triton.cdiv(dh.numel(), 4096),)](
                dh, a, dh.numel(), POWER=power, FROM_POST=from_post, BLOCK=4096)
            dz, post = dh, a
        else:
            r = a.float().sqrt().bfloat16() if from_post and power == 2 else a
            dz, post = backward_reference(dh, r.masked_fill(r <= 0, 0), power)
    dw2 = dy.t() @ post
    del post
    return [dz @ w1, dz.t() @ x, dw2, *([] if b1 is None else [dz.sum(0), dy.sum(0)])]


@mlp_backward.register_fake
def _(dy, x, w1, w2, b1, saved, power, save, buffer):
    biases = [] if b1 is None else [torch.empty_like(b1), w2.new_empty((w2.shape[0],))]
    return [x.new_empty(x.shape), w1.new_empty(w1.shape), w2.new_empty(w2.shape), *biases]


# -----------------------------------------------------------------------------
# Autograd


def _setup_context(ctx, inputs, output):
    x, w1, w2, b1, b2, ctx.power, ctx.save, ctx.buffer, _ = inputs
    ctx.save_for_backward(x, w1, w2, b1, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    x, w1, w2, b1, *saved = ctx.saved_tensors
    out = mlp_backward(grads[0], x, w1, w2, b1, saved, ctx.power, ctx.save, ctx.buffer)
    dx, dw1, dw2, *biases = out
    db1, db2 = biases or (None, None)
    return dx, dw1, dw2, db1, db2, None, None, None, None


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


def compress(x: Tensor, buffer: ActivationBuffer | None = None) -> BitSparseTensor:
    """relu(x), x bf16 of any shape, contiguous, in the format of the module's docstring.

    Without a buffer one of exactly the needed size is made, for which the host waits for the
    device. On overflow of a given buffer, see "Capacity" there. Raises ValueError for other x.
    """
    _check_tensor("x", x, x.device)
    compress_ = compress_triton if x.is_cuda else compress_reference
    if buffer is None:
        buffer = ActivationBuffer(0, x.device)
        compress_(x, buffer, 0)  # stores nothing and counts everything
        buffer.resize(int(buffer.used_bytes()))
    _check_buffer(buffer, x.device)
    mask, heads = compress_(x, buffer, 0)
    return BitSparseTensor(mask, heads, buffer, x.shape)


def decompress(t: BitSparseTensor) -> Tensor:
    """relu(x), bf16, of the shape of the x that was compressed."""
    decompress_ = decompress_triton if t.mask.is_cuda else decompress_reference
    return decompress_(t.mask, t.heads, t.buffer, t.shape.numel()).view(t.shape)


def _mlp(x, w1, w2, b1, b2, power, buffer, save, layer):
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
    if save not in SAVES:
        raise ValueError(f"save: expected one of {', '.join(SAVES)}, received {save!r}")
    if save == "bitsparse":
        if buffer is None:
            raise ValueError('buffer: save="bitsparse" expects an ActivationBuffer, received None')
        _check_buffer(buffer, x.device)
        if not 0 <= layer < buffer.layers:
            raise ValueError(f"layer: expected 0 to {buffer.layers - 1}, received {layer}")
        if not (torch.is_grad_enabled()
                and any(t is not None and t.requires_grad for t in (x, w1, w2, b1, b2))):
            save = "checkpoint"  # nothing will be read back: store nothing
    number = buffer.number if buffer is not None else -1
    tokens = x.view(x.shape[:-1].numel(), d)
    return mlp_forward(tokens, w1, w2, b1, b2, power, save, number, layer)[0].view(x.shape)


def relu2_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
              *, buffer: ActivationBuffer | None = None, save: str = "bitsparse",
              layer: int = 0) -> Tensor:
    """relu(x w1ᵀ + b1)² w2ᵀ + b2.

    x [..., d], w1 [h, d], w2 [d, h], b1 [h], b2 [d]: bf16, contiguous. Returns [..., d] bf16.
    save: how the hidden activation is kept for backward. "bitsparse": compressed, its values in
    `buffer`. "dense": post = relu(z)² only, 2 bytes an element. "checkpoint": not at all; backward
    makes the first GEMM again. Outputs and gradients are the same bits in all three (for "dense"
    where r >= 2^-63: see "Lossless" in the module's docstring).
    layer: the number under which the buffer counts what this call stores.
    """
    return _mlp(x, w1, w2, b1, b2, 2, buffer, save, layer)


def relu_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
             *, buffer: ActivationBuffer | None = None, save: str = "bitsparse",
             layer: int = 0) -> Tensor:
    """relu(x w1ᵀ + b1) w2ᵀ + b2; arguments as relu2_mlp."""
    return _mlp(x, w1, w2, b1, b2, 1, buffer, save, layer)
