"""BitSparse: ReLU and ReLU² activations, saved for the backward pass losslessly compressed.

Problem. An MLP y = relu(x w1ᵀ)² w2ᵀ keeps its hidden activation, [tokens, h] in bf16, from forward to
backward: 2 bytes an element, the largest thing a transformer block saves. Most of those elements are
zero. Here one bit an element says which are not, and those that are not are packed densely into one
preallocated buffer. Nothing in it asks the host: sizes, offsets and overflow stay on the device.

Format. The activation is read as one flat row of n elements, cut into tiles of TILE = 2048, a tile into
8 groups of 256 (the last tile is filled up with elements that are not stored). In a group, element
e = 8 * lane + word, with lane in 0..31 and word in 0..7:

    mask   int32 [tiles, 64]   word w of group g stands at 8 g + w; its bit `lane` is 1 where element
                               256 g + 8 lane + w of the tile is stored. 256 bytes a tile.
    base   int64 [tiles]       the byte of the buffer at which the tile's values begin.
    values in the buffer       2 bytes each, little endian, ordered by (group, word, lane): the value of
                               element (g, w, lane) is number popcount(all mask words of the tile before
                               8 g + w) + popcount(mask word & ((1 << lane) - 1)). A tile takes
                               2 * nnz bytes, rounded up to a multiple of 16 (the padding is not written).

    To read one element by hand: x[5000] of a [2, 4096] tensor is in tile 5000 // 2048 = 2, at 904 in
    it: group 3, offset 136 = 8 * 17 + 0: lane 17, word 0. Is bit 17 of mask[2, 24] set? If not, it is
    0. If so, with k the popcount of mask[2, 0:24] and of the 17 low bits of mask[2, 24], its bf16 is in
    the two bytes of the buffer from base[2] + 2 k.

    The order (group, word, lane) lets a warp find every rank with two popcounts and no scan over
    elements, since the 32 bits of a mask word belong to the 32 lanes of a warp. Tiles come to lie in
    the buffer in the order in which the device reserved room for them, which differs between runs;
    what is read back does not.

Lossless. Stored is every element that is positive or NaN: subnormals, +inf and NaN of either sign keep
their 16 bits; −0 and negative elements come back as +0. So decompress(compress(x)) equals torch.relu(x)
bit for bit wherever relu(x) is not zero, and is +0 elsewhere. The backward pass computes
post = bf16(r * r) and dz = bf16(dh * 2r), products in float32, each rounded once: what the dense path
computes. (With save="dense", r is rebuilt as bf16(sqrt(post)), which is r whenever r² is a normal
bf16, that is for r >= 2^-63.)

Size. bits_per_element(density) = 1 (mask) + 64 / TILE (base) + 16 * density + 56 / TILE (mean padding):
at density 0.2, 1 + 0.031 + 3.2 + 0.027 = 4.26 bits, against 16 dense.

Capacity. The buffer never grows by itself and nothing is ever written past its end. Every tile reserves
its bytes by an atomic add on a device counter, which goes on counting past the capacity: so the needed
size is known exactly. A tile that does not fit whole is not written at all, it reads back as zeros, and
`overflowed()` is true from then until `resize()`: whoever uses the results must test it (train_gpt.py
turns such a step into one without effect, on the device, and repeats it with a larger buffer).

Lifetime. What is written into the buffer lives until its next reset(): one reset() before each forward,
and the backward of that forward before the next reset().

torch.compile sees opaque operators without mutated arguments, so there is no graph break and no copy of
the buffer: they find it by its number (an int). The contract that makes this sound: a tile's values are
written by the one operator call that returns its `mask` and `base`, and read only by operators that take
these two; so data dependence orders writes before reads. Reservations commute, so the layers may run
in any order.

Usage:

    buffer = ActivationBuffer(capacity_bytes=2**30, device="cuda")
    buffer.reset()                                     # before each forward
    y = relu2_mlp(x, w1, w2, buffer=buffer)            # x [..., d], w1 [h, d], w2 [d, h], all bf16
"""
import itertools
import os
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
TILE = 2048  # elements that share one base
ALIGN = 16  # bytes: a tile's values begin on a 16-byte vector
TILE_GROUPS = TILE // GROUP
TILE_WORDS = TILE // 32
SAVES = ("bitsparse", "dense", "checkpoint")

# Triton's CPU interpreter (TRITON_INTERPRET=1) cannot run inline assembly: it takes the plain stores.
_STAGED = os.environ.get("TRITON_INTERPRET", "0") != "1"


def bits_per_element(density: float) -> float:
    """Expected saved bits an element at `density` (stored / all elements), padding of ragged ends apart.

    mask + base + values + padding: a tile's 2 * nnz bytes are rounded up to a multiple of ALIGN, on
    average by (ALIGN - 2) / 2 bytes where a tile's nnz is spread over many values.
    """
    padding = 8 * (ALIGN - 2) / 2 / TILE if 0 < density < 1 else 0
    return 1 + 64 / TILE + 16 * density + padding


# -----------------------------------------------------------------------------
# Storage

_buffers: "weakref.WeakValueDictionary[int, ActivationBuffer]" = weakref.WeakValueDictionary()
_buffer_numbers = itertools.count()


class BufferSnapshot:
    """The buffer's counters at one moment, on their way to the host. Made by ActivationBuffer.snapshot().

    ready() tells, without waiting, whether they have arrived; the properties wait for them if need be.
    """

    def __init__(self, state: Tensor, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes
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
        """Whether more than the capacity was ever asked for since the buffer has its present size."""
        return self._read(2) > self.capacity_bytes

    @property
    def needed_bytes(self) -> int:
        """The most bytes asked for between two resets since the buffer has its present size."""
        return self._read(2)


class ActivationBuffer:
    """A preallocated buffer for the stored values of all layers of one microbatch.

    capacity_bytes: size in bytes, rounded up to a multiple of 16. device: "cuda" or "cpu".
    None of the methods but resize() waits for the device.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str):
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: expected 0 or more, received {capacity_bytes}")
        self.number = next(_buffer_numbers)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        # int64 [3], bytes asked for: since reset, most since snapshot, most since the last resize
        self.state = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._allocate(capacity_bytes)
        _buffers[self.number] = self

    def _allocate(self, capacity_bytes: int) -> None:
        size = -(-capacity_bytes // ALIGN) * ALIGN
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)

    @property
    def capacity_bytes(self) -> int:
        return self.arena.numel()

    def _fold_cursor(self) -> None:
        self.state[1:].copy_(torch.maximum(self.state[1:], self.state[:1]))

    def reset(self) -> None:
        """Drop everything stored. What was compressed before this can no longer be read."""
        self._fold_cursor()
        self.state[0].zero_()

    def used_bytes(self) -> Tensor:
        """int64 device scalar: bytes asked for since the last reset (beyond the capacity on overflow)."""
        return self.state[0].clone()

    def overflowed(self) -> Tensor:
        """bool device scalar: whether anything since the last resize() did not fit."""
        return self.state.max() > self.capacity_bytes

    def snapshot(self) -> BufferSnapshot:
        """Send the counters to pinned host memory and begin a new peak."""
        self._fold_cursor()
        snapshot = BufferSnapshot(self.state, self.capacity_bytes)
        self.state[1].zero_()
        return snapshot

    def resize(self, capacity_bytes: int) -> None:
        """Give the buffer another size, dropping its contents and the overflow state. Between steps only.

        The old memory is freed first, so that both sizes are never held at once.
        """
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: expected 0 or more, received {capacity_bytes}")
        self.arena = None
        self._allocate(capacity_bytes)
        self.state.zero_()


@dataclass(frozen=True)
class BitSparseTensor:
    """relu(x) in compressed form; readable until its buffer's next reset().

    mask: int32 [tiles, 64]. base: int64 [tiles]. buffer: holds the values. shape: of x.
    """

    mask: Tensor
    base: Tensor
    buffer: ActivationBuffer
    shape: torch.Size


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _new_mask_and_base(z: Tensor) -> tuple[Tensor, Tensor]:
    tiles = _tiles(z.numel())
    return (z.new_empty((tiles, TILE_WORDS), dtype=torch.int32),
            z.new_empty((tiles,), dtype=torch.int64))


# -----------------------------------------------------------------------------
# Reference: pure torch, the same bits as the kernels; also what runs on a CPU


def compress_reference(z: Tensor, buffer: ActivationBuffer, power: int) -> tuple[Tensor, Tensor]:
    """Store relu(z) in the buffer and, for power 1 or 2, replace z by relu(z)**power (0: leave it).

    z: bf16, contiguous. Returns mask, base.
    """
    n = z.numel()
    bits = torch.zeros(_tiles(n) * TILE, dtype=torch.int16, device=z.device)
    bits[:n] = z.view(torch.int16).flatten()
    # [tile, group, word, lane]: the order of the values
    bits = bits.view(-1, TILE_GROUPS, 32, 8).transpose(2, 3)
    stored = ~(bits.contiguous().view(torch.bfloat16) <= 0)
    lane = torch.arange(32, device=z.device)
    mask = (stored.long() << lane).sum(-1).to(torch.int32).view(-1, TILE_WORDS)

    nnz = stored.flatten(1).sum(1)
    tile_bytes = (nnz * 2 + ALIGN - 1) // ALIGN * ALIGN
    base = buffer.state[0] + tile_bytes.cumsum(0) - tile_bytes
    buffer.state[0] += tile_bytes.sum()
    fits = base + tile_bytes <= buffer.capacity_bytes
    rank = stored.flatten(1).cumsum(1) - 1
    written = stored.flatten(1) & fits[:, None]
    values = buffer.arena.view(torch.int16)
    values[(base[:, None] // 2 + rank)[written]] = bits.flatten(1)[written]
    if power:
        r = z.masked_fill(z <= 0, 0)
        z.copy_(r * r if power == 2 else r)
    return mask, base


def decompress_reference(mask: Tensor, base: Tensor, buffer: ActivationBuffer, n: int) -> Tensor:
    """relu(z) as bf16 [n]; zeros for tiles that did not fit."""
    lane = torch.arange(32, device=mask.device)
    stored = ((mask.view(-1, TILE_WORDS, 1) >> lane) & 1).bool().flatten(1)  # [tile, (word, lane)]
    nnz = stored.sum(1)
    fits = base + (nnz * 2 + ALIGN - 1) // ALIGN * ALIGN <= buffer.capacity_bytes
    rank = stored.cumsum(1) - 1
    read = stored & fits[:, None]
    bits = torch.zeros(stored.shape, dtype=torch.int16, device=mask.device)
    bits[read] = buffer.arena.view(torch.int16)[(base[:, None] // 2 + rank)[read]]
    bits = bits.view(-1, TILE_GROUPS, 8, 32).transpose(2, 3)
    return bits.reshape(-1)[:n].view(torch.bfloat16)


def backward_reference(dh: Tensor, r: Tensor, power: int) -> tuple[Tensor, Tensor]:
    """(dz, post) of post = r**power, r = relu(z): dz = dh * power * r**(power - 1) where r is stored."""
    stored = ~(r <= 0)
    dz = dh * (2 * r) if power == 2 else dh
    return dz.masked_fill(~stored, 0), r * r if power == 2 else r


# -----------------------------------------------------------------------------
# Kernels


@triton.jit
def _popcount(x):
    """Set bits of each int32; LLVM recognizes the pattern and emits one popc."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101).to(tl.uint32, bitcast=True) >> 24).to(tl.int32)


@triton.jit
def _count_words(words):
    """From mask words [groups, 8]: the values before each word of the tile, and the tile's nnz."""
    counts = _popcount(words)
    per_group = tl.sum(counts, axis=1)
    before = (tl.cumsum(per_group, axis=0) - per_group)[:, None] + tl.cumsum(counts, axis=1) - counts
    return before, tl.sum(per_group, axis=0)


@triton.jit
def _load_tile(ptr, e, left, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + e)
    return tl.load(ptr + e, mask=e < left, other=0)


@triton.jit
def _store_tile(ptr, e, value, left, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + e, value)
    else:
        tl.store(ptr + e, value, mask=e < left)


@triton.jit
def _stage_values(rank, bits, stored, e, BYTES: tl.constexpr):
    """Compact a tile through shared memory: int16 `bits` at `rank` in, the same values in order out.

    Writing each value straight to global memory costs a 2-byte store request for every element, most
    of them predicated off, in partial sectors; from here the tile leaves in whole 16-byte vectors.
    Elements of the result past the tile's nnz are undefined. Needs all of a tile in one program.
    """
    stage = tl.inline_asm_elementwise(  # once a program: a static shared array, and its address
        "{ .shared .align 16 .b8 stage[" + str(BYTES) + "]; mov.u32 $0, stage; }",
        "=r,r", [BYTES], dtype=tl.int32, is_pure=False, pack=1)
    address = tl.where(stored, stage + rank * 2, -1)
    tl.inline_asm_elementwise("""{
        .reg .pred p, q; .reg .b16 lo, hi;
        mov.b32 {lo, hi}, $4;
        setp.ge.s32 p, $2, 0;
        setp.ge.s32 q, $3, 0;
        @p st.shared.b16 [$2], lo;
        @q st.shared.b16 [$3], hi;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""", "=r,=r,r,r,r", [address, bits], dtype=tl.int32, is_pure=False, pack=2)
    tl.debug_barrier()
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [stage + e * 2], dtype=tl.int16, is_pure=False, pack=8)


@triton.jit
def _compress_kernel(z_ptr, mask_ptr, base_ptr, values_ptr, cursor_ptr, n, capacity,
                     POWER: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
                     STAGED: tl.constexpr):
    """Store the positive elements of z, and replace z by relu(z)**POWER in the same pass (0: leave it).

    z_ptr       [n] bf16 as int16, read 2 n bytes, written 2 n where POWER is not 0
    mask_ptr    [tiles, 8 GROUPS] int32, written n / 8 bytes
    base_ptr    [tiles] int64, written
    values_ptr  [capacity / 2] int16, written 2 nnz bytes in all
    cursor_ptr  [1] int64 bytes, one atomic add a tile
    Grid: one program a tile of 256 GROUPS elements, in any order. A tile that would end past
    `capacity` bytes is counted and not written.
    """
    tile = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None, None]
    lane = tl.arange(0, 32)[None, :, None]
    word = tl.arange(0, 8)[None, None, :]
    e = group * 256 + lane * 8 + word
    start = tile * (GROUPS * 256)
    left = n - start
    word_of_tile = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]

    bits = _load_tile(z_ptr + start, e, left, EVEN)
    x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    stored = ~(x <= 0.0)  # true for NaN
    if POWER > 0:
        r = tl.where(stored, x, 0.0)
        post = r * r if POWER == 2 else r
        _store_tile(z_ptr + start, e, post.to(tl.bfloat16).to(tl.int16, bitcast=True), left, EVEN)

    words = tl.sum(stored.to(tl.int32) << lane, axis=1)
    tl.store(mask_ptr + tile * (GROUPS * 8) + word_of_tile, words)
    before, nnz = _count_words(words)
    tile_bytes = (nnz * 2 + 15) // 16 * 16
    base = tl.atomic_add(cursor_ptr, tile_bytes.to(tl.int64), sem="relaxed")
    tl.store(base_ptr + tile, base)
    rank = before[:, None, :] + _popcount(words[:, None, :] & ((1 << lane) - 1))
    fits = base + tile_bytes <= capacity
    tile_values = values_ptr + tl.multiple_of(base // 2, 8)
    if STAGED:
        packed = _stage_values(rank, bits, stored, e, GROUPS * 512)
        # whole vectors: the padding of up to 7 values belongs to this tile
        tl.store(tile_values + e, packed, mask=((group * 256 + lane * 8) < nnz) & fits)
    else:
        tl.store(tile_values + rank, bits, mask=stored & fits)


@triton.jit
def _load_values(mask_ptr, base_ptr, values_ptr, tile, capacity, GROUPS: tl.constexpr):
    """Read one tile of relu(z): float32 [GROUPS, 32, 8] and which elements of it are stored."""
    lane = tl.arange(0, 32)[None, :, None]
    word_of_tile = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    words = tl.load(mask_ptr + tile * (GROUPS * 8) + word_of_tile)
    base = tl.load(base_ptr + tile)
    before, nnz = _count_words(words)
    words = words[:, None, :]
    stored = ((words >> lane) & 1) != 0
    rank = before[:, None, :] + _popcount(words & ((1 << lane) - 1))
    fits = base + (nnz * 2 + 15) // 16 * 16 <= capacity
    bits = tl.load(values_ptr + base // 2 + rank, mask=stored & fits, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True), stored


@triton.jit
def _decompress_kernel(out_ptr, mask_ptr, base_ptr, values_ptr, n, capacity,
                       GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Write relu(z) back in full.

    out_ptr [n] bf16 as int16, written; mask_ptr, base_ptr, values_ptr as in _compress_kernel, read.
    Grid: one program a tile. A tile that did not fit comes back as zeros.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (GROUPS * 256)
    e = (tl.arange(0, GROUPS)[:, None, None] * 256 + tl.arange(0, 32)[None, :, None] * 8
         + tl.arange(0, 8)[None, None, :])
    r, _ = _load_values(mask_ptr, base_ptr, values_ptr, tile, capacity, GROUPS)
    bits = (r.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    _store_tile(out_ptr + start, e, bits, n - start, EVEN)


@triton.jit
def _backward_kernel(dh_ptr, post_ptr, mask_ptr, base_ptr, values_ptr, n, capacity,
                     POWER: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Replace dh by dz, and rebuild post, from the compressed relu(z).

    dh_ptr    [n] bf16, read and written in place: dz = bf16(dh * 2r) (POWER 2) or dh (1), 0 where r is
    post_ptr  [n] bf16, written: bf16(r * r) (POWER 2) or r (1)
    mask_ptr, base_ptr, values_ptr as in _compress_kernel, read n / 8 + 8 tiles + 2 nnz bytes
    Grid: one program a tile. A tile that did not fit is read as zeros.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (GROUPS * 256)
    left = n - start
    e = (tl.arange(0, GROUPS)[:, None, None] * 256 + tl.arange(0, 32)[None, :, None] * 8
         + tl.arange(0, 8)[None, None, :])
    dh = _load_tile(dh_ptr + start, e, left, EVEN).to(tl.float32)
    r, stored = _load_values(mask_ptr, base_ptr, values_ptr, tile, capacity, GROUPS)
    if POWER == 2:
        dz, post = dh * (2.0 * r), r * r
    else:
        dz, post = dh, r
    _store_tile(post_ptr + start, e, post.to(tl.bfloat16), left, EVEN)
    _store_tile(dh_ptr + start, e, tl.where(stored, dz, 0.0).to(tl.bfloat16), left, EVEN)


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


def compress_triton(z: Tensor, buffer: ActivationBuffer, power: int) -> tuple[Tensor, Tensor]:
    """As compress_reference."""
    mask, base = _new_mask_and_base(z)
    n = z.numel()
    if n:
        _compress_kernel[(_tiles(n),)](
            z.view(torch.int16), mask, base, buffer.arena.view(torch.int16), buffer.state, n,
            buffer.capacity_bytes, POWER=power, GROUPS=TILE_GROUPS, EVEN=n % TILE == 0,
            STAGED=_STAGED, num_warps=1)
    return mask, base


def decompress_triton(mask: Tensor, base: Tensor, buffer: ActivationBuffer, n: int) -> Tensor:
    """As decompress_reference."""
    out = torch.empty(n, dtype=torch.bfloat16, device=mask.device)
    if n:
        _decompress_kernel[(_tiles(n),)](
            out.view(torch.int16), mask, base, buffer.arena.view(torch.int16), n,
            buffer.capacity_bytes, GROUPS=TILE_GROUPS, EVEN=n % TILE == 0, num_warps=1)
    return out


def backward_triton(dh: Tensor, mask: Tensor, base: Tensor, buffer: ActivationBuffer,
                    power: int) -> tuple[Tensor, Tensor]:
    """(dz in the memory of dh, post) from the compressed relu(z)."""
    post = torch.empty_like(dh)
    n = dh.numel()
    if n:
        _backward_kernel[(_tiles(n),)](
            dh, post, mask, base, buffer.arena.view(torch.int16), n, buffer.capacity_bytes,
            POWER=power, GROUPS=TILE_GROUPS, EVEN=n % TILE == 0, num_warps=1)
    return dh, post


# -----------------------------------------------------------------------------
# Ops: the whole MLP as one operator a direction, so that all ways of saving make the same GEMM calls


def _hidden(x: Tensor, w1: Tensor, b1: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w1, b1)


@torch.library.custom_op("bitsparse::mlp_forward", mutates_args=())
def mlp_forward(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
                power: int, save: str, buffer: int) -> list[Tensor]:
    """[y, *saved]: y = relu(x w1ᵀ + b1)**power w2ᵀ + b2 for x [tokens, d].

    saved: mask and base ("bitsparse"), post ("dense"), or nothing ("checkpoint").
    """
    z = _hidden(x, w1, b1)
    saved = []
    if save == "bitsparse":
        compress_ = compress_triton if z.is_cuda else compress_reference
        saved = [*compress_(z, _buffers[buffer], power)]
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
def _(x, w1, w2, b1, b2, power, save, buffer):
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
        mask, base = saved
        if dh.is_cuda:
            dz, post = backward_triton(dh, mask, base, _buffers[buffer], power)
        else:
            r = decompress_reference(mask, base, _buffers[buffer], dh.numel()).view_as(dh)
            dz, post = backward_reference(dh, r, power)
    else:
        from_post = save == "dense"
        a = saved[0] if from_post else _hidden(x, w1, b1)
        if dh.is_cuda:
            _dense_backward_kernel[(triton.cdiv(dh.numel(), 4096),)](
                dh, a, dh.numel(), POWER=power, FROM_POST=from_post, BLOCK=4096)
            dz, post = dh, a
        else:
            r = a.float().sqrt().bfloat16() if from_post and power == 2 else a.masked_fill(a <= 0, 0)
            dz, post = backward_reference(dh, r, power)
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
    x, w1, w2, b1, b2, ctx.power, ctx.save, ctx.buffer = inputs
    ctx.save_for_backward(x, w1, w2, b1, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    x, w1, w2, b1, *saved = ctx.saved_tensors
    out = mlp_backward(grads[0], x, w1, w2, b1, saved, ctx.power, ctx.save, ctx.buffer)
    dx, dw1, dw2, *biases = out
    db1, db2 = biases or (None, None)
    return dx, dw1, dw2, db1, db2, None, None, None


mlp_forward.register_autograd(_backward, setup_context=_setup_context)


# -----------------------------------------------------------------------------
# Public functions


def _check_tensor(name: str, t: Tensor, shape: tuple[int, ...] | None = None) -> None:
    if t.dtype != torch.bfloat16:
        raise ValueError(f"{name}: expected dtype torch.bfloat16, received {t.dtype}")
    if shape is not None and tuple(t.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, received {list(t.shape)}")
    if not t.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, received shape {list(t.shape)} with "
                         f"strides {list(t.stride())}")


def _check_buffer(buffer: ActivationBuffer, device: torch.device) -> None:
    if buffer.device != device:
        raise ValueError(f"buffer: expected one on {device}, received one on {buffer.device}")


def compress(x: Tensor, buffer: ActivationBuffer | None = None) -> BitSparseTensor:
    """relu(x), x bf16 of any shape, contiguous, in the format that the module's docstring describes.

    Without a buffer one of exactly the needed size is made, for which the host waits for the device.
    On overflow of a given buffer, see "Capacity" there. Raises ValueError for what it does not take.
    """
    _check_tensor("x", x)
    compress_ = compress_triton if x.is_cuda else compress_reference
    if buffer is None:
        buffer = ActivationBuffer(0, x.device)
        compress_(x, buffer, 0)  # stores nothing and counts everything
        buffer.resize(int(buffer.used_bytes()))
    _check_buffer(buffer, x.device)
    mask, base = compress_(x, buffer, 0)
    return BitSparseTensor(mask, base, buffer, x.shape)


def decompress(t: BitSparseTensor) -> Tensor:
    """relu(x), bf16, of the shape of the x that was compressed."""
    decompress_ = decompress_triton if t.mask.is_cuda else decompress_reference
    return decompress_(t.mask, t.base, t.buffer, t.shape.numel()).view(t.shape)


def _mlp(x, w1, w2, b1, b2, power, buffer, save):
    if w1.dim() != 2:
        raise ValueError(f"w1: expected shape [h, d], received {list(w1.shape)}")
    hidden, d = w1.shape
    _check_tensor("x", x, (*x.shape[:-1], d))
    _check_tensor("w1", w1)
    _check_tensor("w2", w2, (d, hidden))
    if (b1 is None) != (b2 is None):
        raise ValueError("b1, b2: expected both or neither, received one of them")
    if b1 is not None:
        _check_tensor("b1", b1, (hidden,))
        _check_tensor("b2", b2, (d,))
    if save not in SAVES:
        raise ValueError(f"save: expected one of {', '.join(SAVES)}, received {save!r}")
    if save == "bitsparse":
        if buffer is None:
            raise ValueError('buffer: expected an ActivationBuffer for save="bitsparse", received None')
        _check_buffer(buffer, x.device)
        if not torch.is_grad_enabled():
            save = "checkpoint"  # nothing will be read back: store nothing
    number = buffer.number if buffer is not None else -1
    return mlp_forward(x.view(-1, d), w1, w2, b1, b2, power, save, number)[0].view(x.shape)


def relu2_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
              *, buffer: ActivationBuffer | None = None, save: str = "bitsparse") -> Tensor:
    """relu(x w1ᵀ + b1)² w2ᵀ + b2.

    x [..., d], w1 [h, d], w2 [d, h], b1 [h], b2 [d]: bf16, contiguous. Returns [..., d] bf16.
    save: how the hidden activation is kept for backward. "bitsparse": compressed, its values in
    `buffer`. "dense": post = relu(z)² only, 2 bytes an element. "checkpoint": not at all; backward
    makes the first GEMM again. Outputs and gradients are the same bits in all three (for "dense"
    where r >= 2^-63: see "Lossless" in the module's docstring).
    """
    return _mlp(x, w1, w2, b1, b2, 2, buffer, save)


def relu_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None,
             *, buffer: ActivationBuffer | None = None, save: str = "bitsparse") -> Tensor:
    """relu(x w1ᵀ + b1) w2ᵀ + b2; arguments as relu2_mlp."""
    return _mlp(x, w1, w2, b1, b2, 1, buffer, save)
