"""The Triton kernels of bitsparse_kernels.py against its pure-torch reference, bit for bit.

What:  1. on any machine, the plain kernels in Triton's interpreter: what they store, read back
          and leave alone. Its conversion to bf16 truncates instead of rounding, and gets
          subnormals wrong, so results of arithmetic (post, dz) are only held there where every
          operand is a power of two. Its conversion to fp8 loses carries: there, only bf16 storage.
          It multiplies no matrices of bf16: the fused GEMMs are given float32.
       2. on any machine, the staged kernels (inline PTX, which the interpreter cannot run)
          compiled for three GPUs, the thread layout that they rely on, and their registers; and
          those GEMMs, for the one GPU that they are for.
       3. on a GPU, everything, for both, in every codec and storage.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU (the largest tests up to 24 GB of its memory).
Run:   python -m pytest tests/test_kernels.py
"""

import re
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.functional import linear
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import bitsparse_kernels
from bitsparse_kernels import (
    STALE,
    STRIPES,
    ActivationBuffer,
    activate_triton,
    backward_triton,
    compress,
    compress_reference,
    compress_triton,
    decompress,
    decompress_triton,
    dense_gradient_reference,
    dense_gradient_triton,
    expand_reference,
    gradient_triton,
    linear_activate_triton,
    linear_gradient_triton,
    relu2_mlp,
    relu_mlp,
)

TILE = 2048
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CODECS = ["raw", "sign", "exponent"]
FORMATS = [(codec, storage) for codec in CODECS for storage in (BF16, E4M3, E5M2)]
every_format = pytest.mark.parametrize(("codec", "storage"), FORMATS)
BITS = {BF16: (16, 7), E4M3: (8, 3), E5M2: (8, 2)}  # of a value, and of its mantissa
CANARY = 0xA5
SPECIAL = (  # as in test_format.py
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F),
    *(0x7F80, 0xFF80, 0x7F81, 0x7FA5, 0x7FC0, 0x7FFF, 0xFF81, 0xFFA5, 0xFFC0, 0xFFFF),
)
# none; one; trained; at initialization; all; every kind of float mixed at random; powers of two;
# tiles whose exponents take 0, 1, ... 7 bits, and 0 again; tiles with patches, none to too many
KINDS = ["0", "one", "0.2", "0.5", "1", "special", "powers of two", "widths", "patches"]
RAGGED = [
    *(0, 1),  # nothing; the least, and the one n that Triton makes a constant
    *(255, 256, 257),  # around a group
    *(2047, 2048, 2049),  # around a tile
    3 * 2048 + 5,  # several tiles and a ragged end
    3 * 2048 + 48,  # ragged, but a multiple of 16, which Triton compiles for apart
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make_input(kind, n, seed=0, storage=BF16):
    """n bf16 elements; those that are not stored are negative, or one zero or the other.

    For fp8, all but the special ones are from 2^-12 to 2^8: a wider range would round to 0.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, 0x7F81, (n,), generator=generator)  # subnormals and +inf among them
    if storage != BF16 and kind != "special":
        bits = (0x73 + (bits >> 7) % 20 << 7) + bits % 0x80
    if kind == "special":
        bits = torch.tensor(SPECIAL)[bits % len(SPECIAL)]
    elif kind == "powers of two":  # ±2^-8 to ±2^8
        bits = (0x77 + bits % 17 << 7) + 0x8000 * (torch.rand(n, generator=generator) < 0.5)
    elif kind == "widths":
        spread = 1 << torch.arange(n) // TILE % 8
        bits = (0x40 + (bits >> 7) % spread << 7) + bits % 0x80
        bits += 0x8000 * (torch.rand(n, generator=generator) < 0.6)
    elif kind == "patches":  # exponents 0x73 to 0x7a but for a share below; a few 0x7b in tile 7
        share = torch.tensor([0.02, 0, 0.001, 0.005, 0.05, 0.2, 0.02, 0.02])
        share = share[torch.arange(n) // TILE % 8]
        rare = torch.rand(n, generator=generator) < share
        bits = ((0x73 + (bits >> 7) % 8 << 7) + bits % 0x80).where(~rare, bits % 0x3980 + 1)
        bits[6 * TILE + 3 : 7 * TILE : 1000] = 0x7FA5
        bits[7 * TILE :: 500] = 0x3DC0
        bits += 0x8000 * (torch.rand(n, generator=generator) < 0.6)
    elif kind == "one":
        bits += 0x8000
        if n:
            bits[2 * n // 3] = 0x3F80
    else:
        zero = (torch.rand(n, generator=generator) < 0.1).long()
        stored = torch.rand(n, generator=generator) < float(kind)
        bits = torch.where(stored, bits, zero * (bits % 2 * 0x8000) + (1 - zero) * (bits + 0x8000))
    return (bits - 0x10000 * (bits >= 0x8000)).short().view(torch.bfloat16)


def int16(x):
    return x.view(torch.int16)


def guarded_buffer(capacity, device, behind=4096, before=64, layers=1, stripes=None):
    """A buffer whose arena is the middle of a larger tensor of canaries; and that tensor."""
    buffer = ActivationBuffer(capacity, device, layers, stripes)
    capacity = buffer.capacity_bytes
    whole = torch.full((before + capacity + behind,), CANARY, dtype=torch.uint8, device=device)
    buffer.arena = whole[before : before + capacity]
    return buffer, whole


def canaries_intact(buffer, whole, before=64):
    return bool((whole[:before] == CANARY).all()) and bool(
        (whole[before + buffer.capacity_bytes :] == CANARY).all()
    )


def tile_widths(heads, codec, storage):
    """Of each tile (heads without the last), the width of a value in bits."""
    bits, mantissa = BITS[storage]
    if codec == "exponent":
        return mantissa + (heads >> 60 & 15).where(heads >> 60 & 15 < 9, 3)
    return torch.full_like(heads, bits - (codec == "sign"))


def tile_extents(heads, codec, storage):
    """(first byte, bytes) of each tile."""
    heads = heads[:-1]
    bits = (heads >> 40 & 0xFFF) * tile_widths(heads, codec, storage)
    more = ((heads >> 60 & 15) - 9).clamp(min=0)
    return (heads & (1 << 40) - 1) * 16, ((bits + 127) // 128 + more) * 16


def assert_tiles_disjoint(base, size, buffer):
    """A stripe's tiles follow one another without gap or overlap, in whatever order."""
    for stripe in range(buffer.stripes):
        at = base[stripe :: buffer.stripes] - stripe * buffer.part_bytes
        length = size[stripe :: buffer.stripes]
        order = torch.argsort(at * 8192 + length)  # empty tiles before the one that begins there
        at, length = at[order], length[order]
        assert torch.equal(at, length.cumsum(0) - length)


def tile_stream(tile, saved, buffer, codec, storage):
    """The bits of one tile's values, a number, and its patches; None where it did not fit."""
    at, size = (int(t[tile]) for t in tile_extents(saved[1], codec, storage))
    if at + size > (tile % buffer.stripes + 1) * buffer.part_bytes:
        return None
    head = saved[1][tile]
    used = int(head >> 40 & 0xFFF) * int(tile_widths(head, codec, storage))
    stored = buffer.arena[at : at + size].cpu()
    patches = stored.view(torch.int16)[(used + 15) // 16 :].tolist()
    stream = int.from_bytes(stored.numpy().tobytes(), "little")
    return stream & (1 << used) - 1, sorted(patches) if int(head) >> 60 & 15 > 8 else []


def capacity_of(x, codec, storage, stripes=1):
    """The bytes that x takes, without a kernel's help."""
    buffer = ActivationBuffer(0, x.device, stripes=stripes)
    compress_reference(x.clone(), buffer, 0, codec, storage)
    return buffer.snapshot().needed_bytes


def kept_relu(x, codec):
    """relu(x) as bf16 storage keeps it: "raw" to the last bit of a NaN, the others but its sign."""
    relu = torch.where(x <= 0, torch.zeros_like(x), x)
    return relu if codec == "raw" else (int16(relu) & 0x7FFF).view(BF16)


def rounded(x, storage, scale):
    """What relu(x) is in fp8, by torch's conversion; float32. +inf is NaN where there is none."""
    r = (x.float() * (1 / scale)).to(storage).float() * scale
    r = r.masked_fill(x == torch.inf, torch.inf if storage == E5M2 else torch.nan)
    return torch.where(x <= 0, 0.0, r)


def check_store_and_load(
    device, kind, n, power=0, view=0, codec="raw", storage=BF16, stripes=1
):
    """compress_triton and decompress_triton against the reference, in buffers that overflow or not.

    view: the input begins so many elements into a larger tensor.
    """
    format_ = codec, storage
    x = make_input(kind, n + view, storage=storage)[view:]
    needed = capacity_of(x, *format_, stripes)
    # All fits; then about half of it, one vector, and nothing. Only one kind overflows, as what
    # fits depends on counts alone, and the interpreter is slow.
    capacities = (needed, needed // 2, 16, 0)[: 4 if kind == "0.5" else 1]
    if device == "cpu" and n > TILE:
        capacities = capacities[:2]
    for capacity in capacities:
        here, _ = guarded_buffer(capacity, "cpu", stripes=stripes)
        saved = compress_reference(x.clone(), here, 0, *format_)

        there, whole = guarded_buffer(capacity, device, stripes=stripes)
        z = make_input(kind, n + view, storage=storage).to(device)[view:]
        saved_ = compress_triton(z, there, power, *format_)
        assert canaries_intact(there, whole)
        assert len(saved_) == len(saved) == (2 if storage == BF16 else 3)
        assert torch.equal(saved_[0].cpu(), saved[0])
        assert torch.equal(saved_[1].cpu() >> 40, saved[1] >> 40)  # nnz and exponents
        assert saved_[1][-1] == saved[1][-1] == 0  # the generation
        if storage != BF16:
            assert torch.equal(saved_[2].cpu(), saved[2])
        assert_tiles_disjoint(*tile_extents(saved_[1], *format_), there)
        assert there.state.tolist() == here.state.tolist()
        assert there.counters.tolist() == here.counters.tolist()
        assert bool(there.overflowed()) == (there.capacity_bytes < needed)
        for tile in range(len(saved[0])):
            stream = tile_stream(tile, saved, here, *format_)
            stream_ = tile_stream(tile, saved_, there, *format_)
            if device == "cpu":  # there, tiles come in order
                assert (stream is None) == (stream_ is None)
            if stream is not None and stream_ is not None:
                assert stream_ == stream
        if power == 0:
            assert torch.equal(int16(z).cpu(), int16(x))  # left alone

        y = decompress_triton(saved_, there, n, *format_)
        assert y.shape == (n,)
        assert y.dtype == torch.bfloat16
        assert canaries_intact(there, whole)
        assert not there.state[STALE]
        # the reference reads what the kernel wrote, wherever the tiles lie
        on_cpu = ActivationBuffer(capacity, "cpu", stripes=stripes)
        on_cpu.arena.copy_(there.arena)
        expected, _ = expand_reference([s.cpu() for s in saved_], on_cpu, n, *format_)
        if storage == BF16:
            assert torch.equal(int16(y).cpu(), int16(expected))
        else:
            assert equal_but_for_nan_bits(y.cpu(), expected.bfloat16())
        if not there.overflowed():
            if storage == BF16:
                assert torch.equal(int16(y).cpu(), int16(kept_relu(x, codec)))
            else:
                expected = rounded(x, storage, saved[2]).bfloat16()
                assert equal_but_for_nan_bits(y.cpu(), expected)


def equal_but_for_nan_bits(a, b):
    """Arithmetic may give any NaN; everything else to the last bit (−0 is not +0)."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        int16(a.masked_fill(a.isnan(), 0)), int16(b.masked_fill(b.isnan(), 0))
    )


def expected_backward(z, dh, power, storage, saved):
    """(dz, post), bf16, by torch in float32."""
    stored = ~(z <= 0)
    r = torch.where(stored, z, 0.0).float() if storage == BF16 else rounded(z, storage, saved[2])
    dz = (dh.float() * (2 * r) if power == 2 else dh.float()).bfloat16()
    return torch.where(stored, dz, 0.0), (r * r if power == 2 else r).bfloat16()


def check_arithmetic(device, kind, n, power, view=0, codec="raw", storage=BF16):
    """What is computed on the way: post in compress, post and dz in backward, in float32 torch."""
    # parts of larger tensors: what lies before and behind is not to be touched
    all_z = make_input(kind, view + n + TILE, storage=storage).to(device)
    dh_kind = kind if kind in ("special", "powers of two") else "0.5"
    all_dh = make_input(dh_kind, view + n + TILE, seed=1).to(device)
    around = torch.ones(len(all_z), dtype=torch.bool, device=device)
    around[view : view + n] = False
    before = all_z[around].clone(), all_dh[around].clone()
    z, dh = all_z[view : view + n], all_dh[view : view + n]
    r = torch.where(z <= 0, 0.0, z).float()
    activated = (r * r if power == 2 else r).bfloat16()

    buffer, whole = guarded_buffer(2 * n + 16 * (n // TILE + 1), device)
    original = z.clone()
    saved = compress_triton(z, buffer, power, codec, storage)
    assert equal_but_for_nan_bits(z, activated)  # not rounded to fp8
    dz, post = expected_backward(original, dh, power, storage, saved)
    grad, post_ = backward_triton(dh, saved, buffer, power, codec, storage)
    assert grad.data_ptr() == dh.data_ptr()  # in place
    assert equal_but_for_nan_bits(grad, dz)
    assert equal_but_for_nan_bits(post_, post)
    assert canaries_intact(buffer, whole)
    assert torch.equal(int16(all_z[around]), int16(before[0]))
    assert torch.equal(int16(all_dh[around]), int16(before[1]))


def check_apart(device, kind, n, power, view=0, codec="raw", storage=BF16):
    """post alone and dz alone, as the MLP's backward takes them, against both at once."""
    z = make_input(kind, view + n, storage=storage).to(device)[view:]
    dh_kind = kind if kind in ("special", "powers of two") else "0.5"
    all_dh = make_input(dh_kind, view + n + TILE, seed=1).to(device)
    dh = all_dh[view : view + n]
    # where there are several tiles, the last one to be stored does not fit
    capacity = capacity_of(z, codec, storage) - 16 * (n > TILE)
    buffer, whole = guarded_buffer(capacity, device)
    saved = compress_triton(z, buffer, 0, codec, storage)
    dz, post = backward_triton(dh.clone(), saved, buffer, power, codec, storage)
    assert dz.any()
    assert post.any()
    post_ = decompress_triton(saved, buffer, n, codec, storage, power)
    assert equal_but_for_nan_bits(post_, post)
    around = all_dh[:view].clone(), all_dh[view + n :].clone()
    gradient_triton(dh, saved, buffer, power, codec, storage)
    assert equal_but_for_nan_bits(dh, dz)
    assert torch.equal(int16(all_dh[:view]), int16(around[0]))
    assert torch.equal(int16(all_dh[view + n :]), int16(around[1]))
    assert canaries_intact(buffer, whole)
    buffer.reset()
    assert not decompress_triton(saved, buffer, n, codec, storage, power).any()
    assert buffer.snapshot().stale
    buffer.state[STALE] = 0  # forget that
    gradient_triton(dh.fill_(1), saved, buffer, power, codec, storage)
    assert power == 1 or not dh.any()  # relu's takes the mask alone, which is not in the buffer
    assert buffer.snapshot().stale


def check_largest(device, kind, n):
    """The bits of the largest finite positive element, among infinities and NaN of either sign."""
    x = make_input(kind, n).to(device)
    most = torch.zeros(1, dtype=torch.int32, device=device)
    bitsparse_kernels._largest_kernel[(-(-n // 1024),)](int16(x), most, n, BLOCK=1024)
    finite = x[x.isfinite() & (x > 0)]
    expected = int(int16(finite.max())) if len(finite) else 0
    assert int(most) == expected


def check_linear_activate(device, m, n, k, power):
    """The GEMM of save="dense" on integers, whose sums are exact in any order, and special rows."""
    generator = torch.Generator().manual_seed(0)
    x, w1 = (torch.randint(-8, 9, (rows, k), generator=generator).float() for rows in (m, n))
    if device == "cpu":  # sums of 8 bits at most, as the interpreter does not round to bf16
        x = x.sign() * (torch.arange(k) % (k // 4) == torch.arange(m)[:, None] % (k // 4))
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row * m // 3, k // 2] = value
    expected = (x @ w1.t()).relu().bfloat16()
    expected = expected.float().pow(power).bfloat16()
    around = torch.full((m * n + 64,), -7.0, dtype=torch.bfloat16, device=device)
    post = around[32:-32].view(m, n)
    x, w1 = (t.to(device, torch.float32 if device == "cpu" else BF16) for t in (x, w1))
    bitsparse_kernels._launch_linear_activate(x, w1, post, power, programs=5)
    assert equal_but_for_nan_bits(post.cpu(), expected)
    assert bool((torch.cat([around[:32], around[-32:]]) == -7).all())


def check_linear_gradient(device, m, n, k, power, in_place):
    """dz from dy w2 of integers, whose sums are exact in any order, and from special post."""
    generator = torch.Generator().manual_seed(0)
    dy, w2 = (torch.randint(-8, 9, shape, generator=generator).float()
              for shape in ((m, k), (k, n)))
    if device == "cpu":  # sums of 8 bits at most, as the interpreter does not round to bf16
        dy = dy.sign() * (torch.arange(k) % (k // 4) == torch.arange(m)[:, None] % (k // 4))
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        dy[row * m // 3, k // 2] = value
    post = torch.tensor(SPECIAL, dtype=torch.uint16).view(BF16)
    post = post[~(post < 0)]
    if device == "cpu":  # whose interpreter gets subnormals wrong
        post = post[~((post > 0) & (post < 2.0**-126))]
    post = post[torch.randint(len(post), (m, n), generator=generator)]
    expected = (dy @ w2).bfloat16()
    dense_gradient_reference(expected, post, power, from_post=True)
    around = torch.full((m * n + 64,), -7.0, dtype=BF16, device=device)
    dz = around[32:-32].view(m, n)
    dy, w2 = (t.to(device, torch.float32 if device == "cpu" else BF16) for t in (dy, w2))
    used = dz.copy_(post) if in_place else post.to(device)
    bitsparse_kernels._launch_linear_gradient(dy, w2, used, dz, power, programs=5)
    assert equal_but_for_nan_bits(dz.cpu(), expected)
    assert in_place or torch.equal(int16(used).cpu(), int16(post))
    assert bool((torch.cat([around[:32], around[-32:]]) == -7).all())


# -----------------------------------------------------------------------------
# In Triton's interpreter. TRITON_INTERPRET is read where a kernel is defined, so the checks run in
# a process of their own that imports this file with it set.


def interpreted_kernels():
    return {
        type(kernel).__name__
        for name, kernel in vars(bitsparse_kernels).items()
        if name.endswith("_kernel")
    }


def check_overflowing_backward(device, codec="raw", storage=BF16):
    """A tile that did not fit is read as zeros by backward too, and one that did is not."""
    z = make_input("powers of two", 3 * TILE + 1025).to(device)
    buffer, whole = guarded_buffer(capacity_of(z, codec, storage) // 2 + 32, device)
    saved = compress_triton(z.clone(), buffer, 0, codec, storage)
    base, size = tile_extents(saved[1], codec, storage)
    fitted = base + size <= buffer.capacity_bytes
    assert 0 < fitted.sum() < 4
    assert buffer.overflowed()
    fitted = fitted.repeat_interleave(TILE)[: len(z)]
    dh = torch.ones_like(z)
    dz, post = expected_backward(z, dh, 2, storage, saved)
    grad, post_ = backward_triton(dh, saved, buffer, 2, codec, storage)
    assert torch.equal(post_, torch.where(fitted, post, 0.0))
    assert torch.equal(grad, torch.where(fitted, dz, 0.0))
    assert canaries_intact(buffer, whole)


def check_stale(device, codec="raw", storage=BF16, view=0):
    """What another generation's heads point to is read as zeros, and the flag is set by reading."""
    x = make_input("0.5", 2 * TILE + 5 + view, storage=storage).to(device)[view:]
    buffer = ActivationBuffer(capacity_of(x, codec, storage), device)
    buffer.reset()
    saved = compress_triton(x.clone(), buffer, 0, codec, storage)
    assert saved[1][-1] == 1
    kept = decompress_triton(saved, buffer, len(x), codec, storage)
    assert kept.any()
    buffer.reset()
    assert not buffer.overflowed()
    assert not decompress_triton(saved, buffer, len(x), codec, storage).any()
    assert buffer.overflowed()
    dh = torch.ones(len(x) + view, dtype=BF16, device=device)[view:]
    grad, post = backward_triton(dh, saved, buffer, 2, codec, storage)
    assert not grad.any()
    assert not post.any()
    assert buffer.snapshot().stale
    saved = compress_triton(x.clone(), buffer, 0, codec, storage)
    assert saved[1][-1] == 3  # snapshot() resets too
    again = decompress_triton(saved, buffer, len(x), codec, storage)
    assert equal_but_for_nan_bits(again, kept)


def test_the_interpreter_runs_the_kernels(interpreter):
    """Else all tests of this section would say nothing."""
    assert interpreter(interpreted_kernels) == {"InterpretedFunction"}
    assert interpreted_kernels() == {"JITFunction"}


# All sizes at one density, all kinds at one ragged size: a tile takes the interpreter .1 s; and
# where it is packed, half a second.
@pytest.mark.parametrize(
    ("codec", "kind", "n"),
    [("raw", "0.5", n) for n in RAGGED[:-1]]  # the last differs where Triton compiles
    + [("raw", kind, TILE + 300) for kind in KINDS]
    + [(codec, "0.5", n) for codec in ("sign", "exponent") for n in (0, 1, 257)]
    + [(codec, kind, TILE + 300) for codec in ("sign", "exponent") for kind in KINDS]
    + [("exponent", kind, 8 * TILE + 5) for kind in ("widths", "patches")],
)
def test_interpreted_store_and_load(interpreter, codec, kind, n):
    interpreter(check_store_and_load, "cpu", kind, n, 0, 0, codec)


@pytest.mark.parametrize("view", [1, 8])  # an address that is no multiple of 16 bytes; one that is
@pytest.mark.parametrize("codec", CODECS)
def test_interpreted_view(interpreter, view, codec):
    interpreter(check_store_and_load, "cpu", "0.2", TILE + 5, 0, view, codec)


# more stripes than tiles; fewer
@pytest.mark.parametrize(("stripes", "n"), [(8, TILE + 5), (2, 3 * TILE)])
@pytest.mark.parametrize("codec", ["raw", "exponent"])
def test_interpreted_stripes(interpreter, codec, stripes, n):
    interpreter(check_store_and_load, "cpu", "0.5", n, 0, 0, codec, BF16, stripes)


# the least, one even tile, a ragged end
@pytest.mark.parametrize(
    ("codec", "n"), [("raw", 1), ("raw", 2048), ("raw", 2053), ("sign", 2053), ("exponent", 300)]
)
@pytest.mark.parametrize("power", [1, 2])
def test_interpreted_arithmetic(interpreter, power, n, codec):
    interpreter(check_store_and_load, "cpu", "powers of two", n, power, 0, codec)
    interpreter(check_arithmetic, "cpu", "powers of two", n, power, 0, codec)


@pytest.mark.parametrize(("codec", "n"), [("raw", 2053), ("sign", 2053), ("exponent", 300)])
@pytest.mark.parametrize("power", [1, 2])
def test_interpreted_apart(interpreter, power, n, codec):
    interpreter(check_apart, "cpu", "powers of two", n, power, 0, codec)


@pytest.mark.parametrize("kind", ["0", "one", "special", "0.5"])
def test_interpreted_largest(interpreter, kind):
    interpreter(check_largest, "cpu", kind, 5000)


@pytest.mark.parametrize("codec", CODECS)
def test_interpreted_overflow_in_backward(interpreter, codec):
    interpreter(check_overflowing_backward, "cpu", codec)


@pytest.mark.parametrize("codec", CODECS)
def test_interpreted_stale(interpreter, codec):
    interpreter(check_stale, "cpu", codec)


# Power 1 alone: the interpreter multiplies no bf16, and has no root in inline assembly.
takes_counts = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="the interpreter of Triton 3.6 takes no count of a loop from NumPy 2.4",
)


@takes_counts
@pytest.mark.parametrize(("m", "n", "k"), [(3, 8, 8), (300, 520, 200), (1300, 256, 64)])
def test_interpreted_linear_activate(interpreter, m, n, k):
    interpreter(check_linear_activate, "cpu", m, n, k, 1)


@takes_counts
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 8, 8), (300, 520, 392), (1300, 256, 64)])
def test_interpreted_linear_gradient(interpreter, m, n, k, in_place):
    interpreter(check_linear_gradient, "cpu", m, n, k, 1, in_place)


# -----------------------------------------------------------------------------
# Compiled for a GPU that is not there

TYPES = {
    "z_ptr": "*i16",
    "out_ptr": "*i16",
    "dh_ptr": "*bf16",
    "mask_ptr": "*i32",
    "heads_ptr": "*i64",
    "values_ptr": "*i16",
    "state_ptr": "*i64",
    "counters_ptr": "*i64",
    "scale_ptr": "*fp32",
    "n": "i32",
    "part_bytes": "i64",
    "row": "i32",
    "layer": "i32",
}
TRITON_FP8 = {BF16: None, E4M3: tl.float8e4nv, E5M2: tl.float8e5}


def compile_staged(
    kernel, compute_capability, codec, storage, power, even, absent=(), from_post=False
):
    """What Triton makes of a STAGED kernel: {"ttgir": ..., "ptx": ..., "cubin": ...}.

    absent: pointers that are None.
    """
    bits, mantissa = BITS[storage]
    constants = {
        "STRIPES": STRIPES,
        "POWER": power,
        "CODEC": codec,
        "FP8": TRITON_FP8[storage],
        "CONVERT": None if storage == BF16 else bitsparse_kernels._convert_asm(
            storage, divmod(compute_capability, 10)
        ),
        "BITS": bits,
        "MANTISSA": mantissa,
        "GROUPS": 8,
        "EVEN": even,
        "STAGED": True,
        "PAIRS": compute_capability >= 90,
        "FROM_POST": from_post,
        "scratch_ptr": None,
        **dict.fromkeys(absent),
    }
    if storage == BF16:
        constants["scale_ptr"] = None
    signature = {
        name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: v for name, v in constants.items() if name in signature},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, type_ in enumerate(signature.values())
            if type_.startswith("*")
        },
    )
    target = GPUTarget("cuda", compute_capability, 32)
    options = {"num_warps": 1, "maxnreg": 64 if even else None}
    return triton.compile(source, target=target, options=options).asm


def test_fp8_needs_a_gpu_that_converts_it():
    with pytest.raises(ValueError, match="expected torch.bfloat16 on a GPU of compute capability "
                                         "8.6, as fp8 needs 8.9, received torch.float8_e5m2$"):
        bitsparse_kernels._convert_asm(E5M2, (8, 6))


def resource_usage(cubin, path):
    """{"REG": registers a thread, "STACK": bytes, "LOCAL": bytes, "SHARED": ...} of a kernel."""
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    output = subprocess.run(
        [tool, "-res-usage", path], check=True, capture_output=True, text=True
    ).stdout
    (line,) = (line for line in output.splitlines() if "REG:" in line)
    return {name: int(value) for name, value in (item.split(":") for item in line.split())}


# A compilation takes a second, so not all products: for the H100 each codec with each storage, and
# each of the two with each power and output, by Latin squares; then RTX 4090, and A100, which has
# no fp8. Those that GEMMs with relu² take post from are compiled below.
POWERS = [2, 0, 1]
ABSENT = [(), ("dh_ptr",), ("out_ptr",)]  # both outputs; post alone; dz alone
COMPRESSIONS = [
    (90, codec, storage, POWERS[(i + i // 3) % 3], i % 2 == 1, ())
    for i, (codec, storage) in enumerate(FORMATS)
] + [
    (89, "exponent", E4M3, 2, False, ()),
    (80, "exponent", BF16, 2, False, ()),
]
EXPANSIONS = [
    (90, codec, storage, 2 - i % 2, i % 4 < 2, ABSENT[(i + i // 3) % 3])
    for i, (codec, storage) in enumerate(FORMATS)
] + [
    (90, "exponent", BF16, 2, True, ("dh_ptr",)),  # the two that training takes
    (90, "exponent", BF16, 2, True, ("out_ptr",)),
    (90, "raw", BF16, 1, True, ("out_ptr",)),  # takes the mask alone
    (89, "exponent", E4M3, 2, False, ("out_ptr",)),
    (80, "exponent", BF16, 2, False, ()),
]


@pytest.mark.parametrize(
    ("kernel", "compute_capability", "codec", "storage", "power", "even", "absent"),
    [("_compress_staged_kernel", *c) for c in COMPRESSIONS]
    + [("_expand_kernel", *e) for e in EXPANSIONS],
)
def test_staged_kernels_compile(
    monkeypatch, tmp_path, kernel, compute_capability, codec, storage, power, even, absent
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile indeed
    compresses = kernel == "_compress_staged_kernel"
    values = compresses or power == 2 or "out_ptr" not in absent
    by_word = compresses or absent == ("dh_ptr",)  # ranks
    made = compile_staged(
        getattr(bitsparse_kernels, kernel), compute_capability, codec, storage, power, even, absent
    )
    # A row of a [32, 8] block to each thread: what makes ballots of a column the mask words.
    layout = "sizePerThread = [1, 8], threadsPerWarp = [32, 1], warpsPerCTA = [1, 1]"
    assert layout in made["ttgir"]
    ptx = made["ptx"]
    # Ranks take no exchange between threads; by word, they are a sum over the lanes, and one more
    # tells patches where to go. Where its tile begins in the buffer (64 bits), one lane is told.
    patches = compresses and (codec, storage) == ("exponent", BF16)
    assert ptx.count("shfl") == 5 * by_word + 5 * patches + 2 * compresses
    assert ptx.count("vote.sync.ballot") == (64 if compresses else 0)  # 8 groups of 8 elements
    # Values go to and from the buffer as 16-byte vectors, one a group; and so do z, dh and post in
    # whole tiles. Of the mask, two vectors a group are read, the same by each lane; or each word
    # once.
    plain_ptx = ptx.replace(".L1::no_allocate", "")
    loads, stores = (plain_ptx.count(f"{way}.global.v4") for way in ("ld", "st"))
    if compresses:
        assert loads == 8 * even
        assert stores == 8 + 8 * (even and power > 0)
    else:
        assert loads == 16 * (not by_word) + 8 * values + 8 * (even and "dh_ptr" not in absent)
        assert stores == 8 * even * (2 - len(absent))
    packed = (codec, storage) != ("raw", BF16)
    assert (("st.shared.b16" if compresses else "ld.shared.u16") in ptx) == values
    # What is packed is unpacked 512 values at a time, and not once an element.
    assert ptx.count("shf.r.wrap.b32 v0,") == 4 * (packed and values and not compresses)
    # fp8's scale is inverted as IEEE says, which "/" is not: the bits would differ from a CPU's
    assert "div.full" not in ptx
    assert ("div.rn.f32" in ptx) == (compresses and storage != BF16)
    # One value a conversion: of two, taken apart, ptxas compiles the second wrongly.
    assert ptx.count("x2.f32 pair, 0f00000000") == (64 if compresses and storage != BF16 else 0)
    # No spill; and 12 programs of one warp and 168 registers fit a multiprocessor's 65,536, or 32
    # of 64.
    usage = resource_usage(made["cubin"], tmp_path / "cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] <= (64 if even else 168)
    stage = 4096 * values + 512 * by_word
    assert stage <= usage["SHARED"] <= stage + 1024  # sm_90 reserves 1 KB


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("even", [True, False])
def test_compress_from_post_compiles(monkeypatch, tmp_path, codec, even):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile indeed
    kernel = bitsparse_kernels._compress_staged_kernel
    made = compile_staged(kernel, 90, codec, BF16, 0, even, from_post=True)
    # of what is stored: in a loop, 8 a lane, or with its range in four branches, 16 a lane
    roots = made["ptx"].count("sqrt.approx.ftz.f32")
    assert roots == (64 if codec == "exponent" else 8)
    usage = resource_usage(made["cubin"], tmp_path / "cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] <= (64 if even else 168)


@pytest.mark.parametrize(("power", "checked"), [(1, False), (2, False), (2, True)])
def test_linear_activate_compiles(monkeypatch, tmp_path, power, checked):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile indeed
    bm, bn, bk = bitsparse_kernels.LINEAR_BLOCK
    signature = {
        "x_desc": f"tensordesc<bf16[{bm}, {bk}]>",
        "w1_desc": f"tensordesc<bf16[{bn}, {bk}]>",
        "post_desc": f"tensordesc<bf16[{bm}, {bn // 2}]>",
        "state_ptr": "*i64" if checked else "constexpr",
        **dict.fromkeys("MNK", "i32"),
        "POWER": "constexpr",
    }
    constants = {"POWER": power} | ({} if checked else {"state_ptr": None})
    source = ASTSource(bitsparse_kernels._linear_activate_kernel, signature, constants)
    options = {"num_warps": 8, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    # A thread rounds two of its 128 sums at a time, and squares two; ptxas makes relu, which keeps
    # NaN, part of the rounding. Blocks of x and w1 are read twice ahead and once in the loop. Those
    # of post, of 256 bytes a row, are written in halves.
    assert ptx.count("wgmma.mma_async") == bk // 16
    assert ptx.count("max.NaN.f32") == 128
    assert ptx.count("cvt.rn.bf16x2.f32") == 64
    assert ptx.count("mul.bf16x2") == 64 * (power == 2 and not checked)
    # What is checked: two by a minimum, into which ptxas takes the addition, and four by a product;
    # and all once more, for K = 0.
    for operation, count in (("mul.rn.bf16x2", 64), ("add.u16x2", 64), ("min.u16x2", 64 + 3),
                             ("fma.rn.bf16x2", 32 + 4)):
        assert ptx.count(operation) == 2 * count * checked
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == 6
    assert ptx.count("cp.async.bulk.tensor.2d.global") == 2 * 2
    # No spill; and what a multiprocessor has of shared memory for one program.
    usage = resource_usage(made.asm["cubin"], tmp_path / "cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert made.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("power", [1, 2])
def test_linear_gradient_compiles(monkeypatch, tmp_path, power):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile indeed
    bm, bn, bk = bitsparse_kernels.LINEAR_BLOCK
    half = f"tensordesc<bf16[{bm}, {bn // 2}]>"
    signature = {
        "dy_desc": f"tensordesc<bf16[{bm}, {bk}]>",
        "w2_desc": f"tensordesc<bf16[{bk}, {bn}]>",
        "post_desc": half,
        "dz_desc": half,
        "post_ptr": "*bf16",
        **dict.fromkeys("MNK", "i32"),
        "POWER": "constexpr",
    }
    source = ASTSource(bitsparse_kernels._linear_gradient_kernel, signature, {"POWER": power})
    options = {"num_warps": 8, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    # A thread has 64 pairs of a block. Blocks of dy and w2 are read twice ahead and once in the
    # loop, those of post in it; their roots are there too, before the tensor cores are waited for.
    assert ptx.count("wgmma.mma_async") == bk // 16
    assert ptx.count("cvt.rn.bf16x2.f32") == 128 * (power == 2)
    assert ptx.count("sqrt.approx.f32") == 128 * (power == 2)
    # and before that, each of 256 threads sends for two of its 512 lines
    assert ptx.count("prefetch.global.L2") == 2 * (power == 2)
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == 6 + 2
    assert ptx.count("cp.async.bulk.tensor.2d.global") == 2 * 2
    if power == 2:
        assert ptx.rindex("sqrt.approx.f32") < ptx.index("wgmma.mma_async")
    waits = re.findall(r"wgmma.wait_group.sync.aligned (\d)", ptx)
    assert waits == ["1", "0", "0"]  # in the loop, for the step before
    # No spill; and what a multiprocessor has of shared memory for one program.
    usage = resource_usage(made.asm["cubin"], tmp_path / "cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert made.metadata.shared <= 227 * 1024


def test_roots_round_as_they_do_exactly():
    """An error of 2^-22 of the root of any bf16 changes nothing; sqrt.approx's is 2^-23 at most."""
    post = torch.arange(0x7F80).short().view(BF16).double()
    root = post.sqrt().float().bfloat16()  # no double rounding: none is that near to a tie
    assert torch.equal(post.float().sqrt().bfloat16(), root)
    for error in (-(2.0**-22), 2.0**-22):
        assert torch.equal((post.sqrt() * (1 + error)).float().bfloat16(), root)


# -----------------------------------------------------------------------------
# On a GPU
#
# Each format, power, "staged or plain", "whole tiles or not" and "n a multiple of 16 or not" is a
# kernel of its own, whose compilation takes longer than all tests of it. So most sizes here are
# odd, which share one, and not everything is combined with everything.

FEW_FORMATS = [("raw", BF16), ("exponent", BF16), ("sign", E4M3)]


@pytest.mark.gpu
@on_gpu
def test_staged_kernels_run_here():
    """The staged kernels are what the other tests run on aligned inputs, the plain ones on views.

    A machine on which staging does not work still gives the right bits, only slower: then this
    test alone fails.
    """
    x = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    assert bitsparse_kernels._may_stage(x)
    assert not bitsparse_kernels._may_stage(x[1:])
    assert bitsparse_kernels._may_stage(x[8:])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("codec", "storage", "kind", "n"),
    [("raw", BF16, kind, n) for n in RAGGED for kind in KINDS]
    + [(*f, kind, 9 * TILE + 1) for f in FORMATS for kind in KINDS]  # every width of "widths"
    + [(*f, "0.5", n) for f in FORMATS[1:] for n in (0, 255, 257, 2047, 2049, 4096)],
)
def test_store_and_load(kind, n, codec, storage):
    check_store_and_load("cuda", kind, n, codec=codec, storage=storage)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("view", [0, 1])  # staged, plain
@pytest.mark.parametrize(("stripes", "n"), [(8, 5 * TILE), (8, 30 * TILE + 1), (3, 30 * TILE)])
@every_format
def test_stripes(stripes, n, view, codec, storage):
    check_store_and_load("cuda", "0.5", n, 0, view, codec, storage, stripes)


# the plain kernels (2-byte alignment), and again the staged ones
@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("view", [1, 8])
@pytest.mark.parametrize("kind", ["0.2", "special", "widths", "patches"])
@pytest.mark.parametrize(
    ("codec", "storage", "n"),
    [(*f, 9 * TILE + 5) for f in FORMATS] + [(*f, 4 * TILE) for f in FEW_FORMATS],
)
def test_store_and_load_of_a_view(view, kind, n, codec, storage):
    check_store_and_load("cuda", kind, n, view=view, codec=codec, storage=storage)
    x = make_input(kind, n + view, storage=storage).cuda()[view:]
    t = compress(x, codec=codec, storage=storage)
    if storage == BF16:
        assert torch.equal(int16(decompress(t)), int16(kept_relu(x, codec)))
    else:
        assert equal_but_for_nan_bits(decompress(t), rounded(x, storage, t.saved[2]).bfloat16())


@pytest.mark.gpu
@on_gpu
@every_format
def test_store_and_load_in_an_unaligned_arena(codec, storage):
    """Values at addresses that are no multiple of 16 bytes: the plain kernels, in both directions.

    No allocation gives such an arena; a slice of another tensor does.
    """
    x = make_input("0.5", 5 * TILE + 7, storage=storage).cuda()
    buffer, whole = guarded_buffer(2 * len(x) + 96, "cuda", before=66)
    saved = compress_triton(x.clone(), buffer, 0, codec, storage)
    y = decompress_triton(saved, buffer, len(x), codec, storage)
    aligned = decompress(compress(x, codec=codec, storage=storage))
    assert equal_but_for_nan_bits(y, aligned)
    assert canaries_intact(buffer, whole, before=66)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("codec", "storage", "power", "n", "view"),
    [(*f, power, 3 * TILE + 5, 0) for f in FORMATS for power in (1, 2)]
    + [(*f, 2, 3 * TILE + 5, 1) for f in FEW_FORMATS]  # the plain kernels
    + [("raw", BF16, power, n, 0) for n in (1, 4096) for power in (1, 2)],  # the least; even tiles
)
def test_arithmetic(power, kind, n, view, codec, storage):
    check_arithmetic("cuda", kind, n, power, view, codec, storage)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["0.2", "special", "widths", "patches"])
@pytest.mark.parametrize(
    ("codec", "storage", "power", "n", "view"),
    [(*f, 2, 3 * TILE + 5, 0) for f in FORMATS]
    + [(*f, 1, 3 * TILE + 5, 0) for f in FEW_FORMATS]
    + [(*f, power, 3 * TILE + 5, 1) for f in FEW_FORMATS for power in (1, 2)],  # the plain kernels
)
def test_apart(power, kind, n, view, codec, storage):
    check_apart("cuda", kind, n, power, view, codec, storage)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("power", [1, 2])
@every_format
def test_arithmetic_of_every_bit_pattern(power, codec, storage):
    """All 65,536 values of z, each with 32 gradients of every kind, special ones among them."""
    z = torch.arange(0x10000, device="cuda").repeat(32)[:-3]  # odd; without three NaN of many
    z = (z - 0x10000 * (z >= 0x8000)).short().view(torch.bfloat16)
    dh = torch.cat([make_input("special", 0x80000), make_input("0.5", 0x180000 - 3)]).cuda()
    r = torch.where(z <= 0, 0.0, z).float()
    activated = z.clone()
    buffer = ActivationBuffer(2 * len(z), "cuda")
    saved = compress_triton(activated, buffer, power, codec, storage)
    assert equal_but_for_nan_bits(activated, (r * r if power == 2 else r).bfloat16())
    dz, post = expected_backward(z, dh, power, storage, saved)
    grad, post_ = backward_triton(dh, saved, buffer, power, codec, storage)
    assert equal_but_for_nan_bits(post_, post)
    assert equal_but_for_nan_bits(grad, dz)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("largest", [0x0003, 0x00FF, 0x0FFF, 0x3FFF, 0x5FFF, 0x7F7F])
@pytest.mark.parametrize("storage", [E4M3, E5M2])
def test_fp8_at_every_scale(largest, storage):
    """Every positive bf16 up to the largest, in each staged and plain: codes as the reference's.

    The scale's inverse, the product and fp8's rounding are all to nearest on both devices.
    """
    x = torch.arange(1, largest + 1).short().view(BF16)
    here = ActivationBuffer(2 * len(x) + 16, "cpu")
    saved = compress_reference(x.clone(), here, 0, "raw", storage)
    for view in (0, 1):
        z = torch.cat([x[:view], x]).cuda()[view:]
        there = ActivationBuffer(2 * len(x) + 16, "cuda")
        saved_ = compress_triton(z, there, 0, "raw", storage)
        assert torch.equal(saved_[2].cpu(), saved[2])
        for tile in range(len(saved[0])):
            stream = tile_stream(tile, saved, here, "raw", storage)
            assert tile_stream(tile, saved_, there, "raw", storage) == stream


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("n", [1, 5000, 2**24 + 1])
@pytest.mark.parametrize("kind", ["0", "one", "special", "0.5"])
def test_largest(kind, n):
    check_largest("cuda", kind, n)


@pytest.mark.gpu
@on_gpu
@every_format
def test_overflow_in_backward(codec, storage):
    check_overflowing_backward("cuda", codec, storage)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("codec", "storage", "view"),
    [(*f, 0) for f in FORMATS] + [(*f, 1) for f in FEW_FORMATS],  # staged, plain
)
def test_stale(view, codec, storage):
    check_stale("cuda", codec, storage, view)


def random_on_gpu(n, density, seed):
    """As make_input, made on the GPU and in place: 2 bytes an element and little more."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.empty(n, dtype=torch.int16, device="cuda")
    bits.random_(1, 0x7F81, generator=generator)
    for part in bits.split(2**24):
        stored = torch.rand(len(part), device="cuda", generator=generator) < density
        part.copy_(torch.where(stored, part, part | -0x8000))  # the sign bit
    return bits.view(torch.bfloat16)


def normal_on_gpu(n, density, seed):
    """Magnitudes of a normal distribution, as activations have; the largest begins each part of
    the large tests, so that they have the same scale in fp8 as the whole.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.empty(n, dtype=BF16, device="cuda").normal_(generator=generator)
    for part in x.split(PART):
        stored = torch.rand(len(part), device="cuda", generator=generator) < density
        part.copy_(torch.where(stored, part.abs(), -part.abs()))
        part[0] = 16
    return x


PART = 1024 * TILE  # elements: the reference takes some hundred bytes for each


# The trainer's hidden activation at half, full and several times its tokens; and a ragged one.
# The ragged one in every format and density: a late layer, the mean, at initialization.
LARGE = [
    ((4099, 3071), density, *format_) for density in (0.1, 0.2, 0.5) for format_ in FORMATS
] + [
    ((16384, 3072), 0.1, "raw", BF16),
    ((16384, 3072), 0.2, "exponent", E5M2),
    ((16384, 3072), 0.5, "sign", BF16),
    ((65536, 3072), 0.5, "raw", BF16),
    ((65536, 3072), 0.2, "exponent", BF16),
    ((65536, 3072), 0.2, "sign", E4M3),
]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("shape", "density", "codec", "storage"), LARGE)
def test_large(shape, density, codec, storage):
    """Against the reference on the GPU, in parts of whole tiles; a few of them, as it is slow."""
    n = shape[0] * shape[1]
    format_ = codec, storage
    x = (random_on_gpu if storage == BF16 else normal_on_gpu)(n, density, seed=n)
    buffer = ActivationBuffer(int(2 * n * density * 1.05) + 2**20, "cuda")
    saved = compress_triton(x, buffer, 0, *format_)
    y = decompress_triton(saved, buffer, n, *format_)
    assert not buffer.overflowed()
    assert_tiles_disjoint(*tile_extents(saved[1], *format_), buffer)
    for at in range(0, n, PART):
        part = x[at : at + PART]
        if storage == BF16:
            assert torch.equal(int16(y[at : at + PART]), int16(kept_relu(part, codec)))
        else:
            assert torch.equal(y[at : at + PART], rounded(part, storage, saved[2]).bfloat16())
        tiles = slice(at // TILE, at // TILE + -(-len(part) // TILE))
        if at % (16 * PART) == 0:
            scratch = ActivationBuffer(2 * len(part) + 16, "cuda")
            mask, heads, *scale = compress_reference(part.clone(), scratch, 0, *format_)
            assert torch.equal(saved[0][tiles], mask)
            assert torch.equal(saved[1][tiles] >> 40, heads[:-1] >> 40)
            assert all(map(torch.equal, scale, saved[2:]))

    dh = random_on_gpu(n, 0.5, seed=n + 1)
    before = dh.clone()
    grad, post = backward_triton(dh, saved, buffer, 2, *format_)
    for at in range(0, n, 16 * PART):
        part = slice(at, at + 16 * PART)
        dz, expected = expected_backward(x[part], before[part], 2, storage, saved)
        assert equal_but_for_nan_bits(grad[part], dz)
        assert equal_but_for_nan_bits(post[part], expected)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("codec", "tile_bytes"), [("raw", 4096), ("sign", 3840)])
def test_more_elements_than_int32_counts(codec, tile_bytes):
    """2^31 elements and some tiles, all stored: offsets into z and into the buffer pass 2^31."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free GPU memory")
    n = 2**31 + 3 * TILE + 5
    x = random_on_gpu(n, 1, seed=0)
    buffer, whole = guarded_buffer(n // TILE * tile_bytes + 16, "cuda", stripes=1)
    saved = compress_triton(x, buffer, 0, codec)
    assert canaries_intact(buffer, whole)
    assert not buffer.overflowed()
    y = decompress_triton(saved, buffer, n, codec)
    for at in range(0, n, 2**28):  # torch.equal makes a bool an element
        assert torch.equal(int16(y[at : at + 2**28]), int16(x[at : at + 2**28]))
    assert int(buffer.used_bytes()) == buffer.capacity_bytes
    assert (saved[0][:-1] == -1).all()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("fraction", [0, 0.02, 0.5, 0.999])  # of the capacity of 1,001 tiles
@pytest.mark.parametrize(("view", "stripes"), [(0, 1), (0, STRIPES), (1, STRIPES)])  # 1: plain
@every_format
def test_overflow(fraction, view, stripes, codec, storage):
    """Nothing outside the arena is written, the need is exact, and each tile is whole or zero."""
    x = normal_on_gpu(1000 * TILE + 5 + view, 0.3, seed=1)[view:]
    format_ = codec, storage
    measure = ActivationBuffer(0, "cuda", stripes=stripes)
    compress_triton(x, measure, 0, *format_)
    counted = measure.counters.clone()
    needed = measure.snapshot().needed_bytes
    capacity = int(needed * fraction)
    buffer, whole = guarded_buffer(capacity, "cuda", behind=2**22, stripes=stripes)
    saved = compress_triton(x, buffer, 0, *format_)
    assert canaries_intact(buffer, whole)
    assert torch.equal(buffer.counters, counted)
    assert bool(buffer.overflowed())
    y = decompress_triton(saved, buffer, len(x), *format_)
    base, size = tile_extents(saved[1], *format_)
    stripe = torch.arange(len(base), device="cuda") % stripes
    fits = base + size <= (stripe + 1) * buffer.part_bytes
    assert bool(fits.any()) == (fraction > 0)
    r = kept_relu(x, codec)
    if storage != BF16:
        r = rounded(x, storage, saved[2]).bfloat16()
    fits = fits.repeat_interleave(TILE)[: len(x)]
    assert torch.equal(int16(y), int16(torch.where(fits, r, 0.0)))

    buffer.resize(needed)  # now it fits, to the byte
    saved = compress_triton(x, buffer, 0, *format_)
    y = decompress_triton(saved, buffer, len(x), *format_)
    assert not buffer.overflowed()
    assert torch.equal(int16(y), int16(r))


@pytest.mark.gpu
@on_gpu
def test_values_counted_by_layer():
    """Three layers of one buffer, by many programs at once."""
    buffer = ActivationBuffer(2**26, "cuda", layers=3)
    expected = [0, 0, 0]
    for (layer, tiles), format_ in zip([(0, 1), (1, 5000), (2, 17), (1, 3)], FORMATS[5:],
                                       strict=True):
        x = random_on_gpu(tiles * TILE - 3, 0.2, seed=layer)
        compress_triton(x, buffer, 0, *format_, layer)
        expected[layer] += int((~(x <= 0)).sum())
    assert buffer.snapshot().layer_nnz == expected
    assert buffer.snapshot().layer_nnz == [0, 0, 0]  # counted anew


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("codec", CODECS)
def test_concurrent_launches_on_one_buffer(codec):
    """Kernels of four streams reserve from one counter at the same time."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [random_on_gpu(500 * TILE + 16 * i + 5, 0.3, seed=i) for i in range(32)]
    buffer, whole = guarded_buffer(sum(x.nbytes for x in inputs), "cuda", stripes=1)
    measure = ActivationBuffer(0, "cuda")
    for x in inputs:  # compile first, so that launches follow one another closely
        compress_triton(x, measure, 0, codec)
    torch.cuda.synchronize()
    stored = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 4]):
            stored.append(compress_triton(x, buffer, 0, codec))
    torch.cuda.synchronize()
    extents = [tile_extents(heads, codec, BF16) for _, heads in stored]
    assert_tiles_disjoint(*(torch.cat(parts) for parts in zip(*extents, strict=True)), buffer)
    for x, saved in zip(inputs, stored, strict=True):
        y = decompress_triton(saved, buffer, len(x), codec)
        assert torch.equal(int16(y), int16(kept_relu(x, codec)))
    assert canaries_intact(buffer, whole)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("codec", "storage"), [("raw", BF16), ("exponent", E4M3)])
def test_same_values_in_every_run(codec, storage):
    """The tiles' order may differ from run to run; what is read back and computed does not."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {"x": (513, 64), "w1": (255, 64), "w2": (64, 255)}
    x, w1, w2 = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_()
        for shape in shapes.values()
    )
    buffer = ActivationBuffer(2**20, "cuda")
    runs = []
    for _ in range(20):
        buffer.reset()
        y = relu2_mlp(x, w1, w2, buffer=buffer, codec=codec, storage=storage)
        runs.append([y, *torch.autograd.grad(y.sum(), (x, w1, w2))])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


@pytest.mark.gpu
@on_hopper
def test_what_is_fused():
    """Whatever is not gives the right bits too, only slower: then this test alone fails."""
    x, w1 = (torch.zeros(n, 64, dtype=BF16, device="cuda") for n in (8192, 768))
    for power, checked in ((1, False), (2, False), (2, True)):
        assert bitsparse_kernels._fusing_works(x.device, power, checked)
        assert bitsparse_kernels._gradient_fusing_works(x.device, power)
    buffer = ActivationBuffer(2**20, "cuda")
    assert bitsparse_kernels._may_compress_post(buffer, BF16)
    assert not bitsparse_kernels._may_compress_post(buffer, E5M2)
    buffer.fuses = False
    assert not bitsparse_kernels._may_compress_post(buffer, BF16)

    assert bitsparse_kernels._may_fuse(x, w1, None, 2, True)
    assert not bitsparse_kernels._may_fuse(x, w1, w1[:, 0], 2, True)

    def fused(x, w1):
        w2 = torch.empty(x.shape[1], len(w1), dtype=BF16, device="cuda")
        forward = bitsparse_kernels._may_fuse(x, w1, None, 2, True)
        backward = bitsparse_kernels._may_fuse_gradient(2, x, w2)
        assert backward == forward
        return forward

    assert fused(x, w1)
    assert not fused(x[:1024], w1)  # fewer tiles than multiprocessors
    assert not fused(x[:, :0], w1[:, :0])
    assert not fused(x[:, :32], w1[:, :32])  # not contiguous
    assert not fused(x[:, :60].contiguous(), w1[:, :60].contiguous())  # rows of 120 bytes
    assert not fused(x, w1[:-4])  # post's rows
    assert not fused(x.view(-1)[1:-63].view(-1, 64), w1)  # its address
    torch.use_deterministic_algorithms(True)
    try:
        assert not fused(x, w1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("m", [3, 127, 128, 129, 1100])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (136, 64), (256, 72), (1032, 776)])
def test_linear_activate(m, n, k, power):
    check_linear_activate("cuda", m, n, k, power)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("m", [3, 127, 128, 129, 1100])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (136, 64), (256, 72), (264, 200), (1032, 776)])
def test_linear_gradient(m, n, k, power, in_place):
    check_linear_gradient("cuda", m, n, k, power, in_place)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("power", [1, 2])
def test_linear_gradient_of_every_bit_pattern(power):
    """The bits of dy @ w2 and _dense_backward_kernel: of each dh, of each post."""
    bits = torch.arange(0x10000, device="cuda")
    bits = (bits - 0x10000 * (bits >= 0x8000)).short().view(BF16)
    special = torch.tensor(SPECIAL, dtype=torch.uint16).view(BF16).cuda()
    special = torch.cat([special, special.new_tensor([1, 3, 2.0**-66, 2.0**100])])
    for every_dh in (True, False):
        dy = torch.zeros(0x10000, 8, dtype=BF16, device="cuda")
        w2 = torch.zeros(8, len(special), dtype=BF16, device="cuda")
        dy[:, 0], w2[0] = (bits, 1) if every_dh else (1, special)
        post = (special if every_dh else bits[:, None]).expand(0x10000, len(special))
        post = torch.where(post < 0, 0, post).contiguous()
        dz = dy @ w2
        dense_gradient_triton(dz, post, power, from_post=True)
        assert torch.equal(int16(linear_gradient_triton(dy, w2, post, power)), int16(dz))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("power", [1, 2])
def test_linear_activate_of_every_bit_pattern(power):
    """The bits of F.linear and _activate_kernel, also of subnormals, -0 and NaN."""
    x = torch.zeros(0x10000, 8, dtype=torch.int16, device="cuda")
    bits = torch.arange(0x10000, device="cuda")
    x[:, 0] = (bits - 0x10000 * (bits >= 0x8000)).short()
    w1 = torch.zeros(24, 8, device="cuda")
    w1[:, 0] = (-2.0) ** (torch.arange(24, device="cuda") - 16)  # z: subnormal, too, and rounded
    x, w1 = x.view(BF16), w1.to(BF16)
    z = linear(x, w1)
    activate_triton(z, power)
    assert torch.equal(int16(linear_activate_triton(x, w1, power)), int16(z))


@pytest.mark.gpu
@on_hopper
def test_what_is_no_exact_root():
    """A row of such r sets the flag, or does not; and all r that do not come back from post."""
    bits = torch.arange(0x8000, device="cuda").short()  # 0 and the positive ones
    w1 = torch.zeros(256, 8, dtype=BF16, device="cuda")
    w1[:, 0] = 1
    state = torch.zeros(bitsparse_kernels.INEXACT + 1, dtype=torch.int64, device="cuda")
    for r in (0, 1, 0x7F, 0x80, 0x1FFF, 0x2000, 0x3F80, 0x4F7F, 0x5F7F, 0x5F80, 0x7F7F, 0x7F80):
        x = torch.zeros(300, 8, dtype=torch.int16, device="cuda")
        x[200, 0] = bits[r]
        x = x.view(BF16)
        r = int(int16(linear(x, w1))[200, 0])  # where a GEMM flushes subnormals there are none
        post = linear_activate_triton(x, w1, 2, state.zero_())
        assert not state[: bitsparse_kernels.INEXACT].any()
        inexact = bool(state[bitsparse_kernels.INEXACT])
        root = post[200].float().sqrt().bfloat16()
        assert inexact >= (not torch.equal(int16(root), bits[r].expand(256)))
        if r <= 0x4F7F or r >= 0x5F80:  # between, it may be set
            assert inexact == (0 < r < 0x2000 or r >= 0x5F80)
    x = torch.zeros(0x5F80, 8, dtype=torch.int16, device="cuda")
    x[0x2000:, 0] = bits[0x2000:0x5F80]
    x = x.view(BF16)
    post = linear_activate_triton(x, w1, 2)
    for codec in CODECS:
        buffer = ActivationBuffer(2 * post.numel() + 2**20, "cuda")
        saved = compress_triton(post.clone(), buffer, 0, codec, from_post=True)
        y = decompress_triton(saved, buffer, post.numel(), codec)
        assert torch.equal(int16(y).view(-1, 256), int16(x[:, :1].expand(-1, 256)))
    nan = torch.full((300, 8), torch.nan, dtype=BF16, device="cuda")
    linear_activate_triton(nan, w1, 2, state.zero_())
    assert state[bitsparse_kernels.INEXACT]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["0", "one", "0.2", "0.5", "1"])
@pytest.mark.parametrize("n", [1, 2047, 9 * TILE, 9 * TILE + 5])
def test_compress_from_post(codec, kind, n):
    """What compress makes of z, in a buffer that is large enough and in one that is not."""
    z = make_input(kind, n, storage=E4M3).cuda()  # 2^-12 to 2^8
    post = z.clone()
    activate_triton(post, 2)
    need = capacity_of(z, codec, BF16)
    for capacity in (need, need // 2):
        results = []
        for x, from_post in ((z.clone(), False), (post.clone(), True)):
            buffer, whole = guarded_buffer(capacity, "cuda")
            saved = compress_triton(x, buffer, 0, codec, from_post=from_post)
            assert canaries_intact(buffer, whole)
            assert torch.equal(x, post if from_post else z)
            results.append((saved[0], saved[1] >> 40, buffer.state, buffer.counters))
            if capacity == need:
                results[-1] += (int16(decompress_triton(saved, buffer, n, codec)),)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("m", "d", "hidden"), [(8192, 768, 3072), (49152, 768, 3072), (16000, 4096, 21504)]
)
def test_linear_activate_adds_up_as_cublas(m, d, hidden):
    """At sizes of training; and so relu2_mlp gives the same bits as with deterministic GEMMs."""
    torch.manual_seed(0)
    x = torch.randn(m, d, device="cuda").to(BF16)
    w1 = (torch.randn(hidden, d, device="cuda") * d**-0.5).to(BF16)
    w2 = w1.t().contiguous()
    assert bitsparse_kernels._may_fuse(x, w1, None, 2, False)
    post = linear(x, w1)
    activate_triton(post, 2)
    assert torch.equal(linear_activate_triton(x, w1, 2), post)
    assert torch.equal(relu2_mlp(x, w1, w2, save="dense"), linear(post, w2))
    dy = torch.randn_like(x)
    assert bitsparse_kernels._may_fuse_gradient(2, dy, w2, post)
    dz = dy @ w2
    dense_gradient_triton(dz, post, 2, from_post=True)
    assert torch.equal(int16(linear_gradient_triton(dy, w2, post, 2, out=post)), int16(dz))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mlp", [relu_mlp, relu2_mlp])
@pytest.mark.parametrize(("save", "codec"), [("dense", "raw"), *(("bitsparse", c) for c in CODECS)])
@pytest.mark.parametrize("tokens", [8192, 8000 + 37])
def test_fused_mlp_equals_separate_kernels(monkeypatch, tokens, save, codec, mlp):
    torch.manual_seed(0)
    x = torch.randn(tokens, 768, device="cuda").to(BF16)
    w1 = (torch.randn(3072, 768, device="cuda") * 768**-0.5).to(BF16)
    leaves = [t.requires_grad_() for t in (x, w1, w1.t().contiguous())]
    dy = torch.randn_like(x)
    results = []
    assert bitsparse_kernels._may_fuse(x, w1, None, 2, True)
    assert bitsparse_kernels._may_fuse_gradient(2, dy, leaves[2])
    for _ in range(2):
        buffer = ActivationBuffer(2 * 8192 * 3072, "cuda")
        y = mlp(*leaves, buffer=buffer, codec=codec, save=save)
        results.append([y, *torch.autograd.grad(y, leaves, dy), buffer.state, buffer.counters])
        assert not buffer.overflowed()
        for name in ("_may_fuse", "_may_fuse_gradient"):
            monkeypatch.setattr(bitsparse_kernels, name, lambda *arguments: False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@on_hopper
def test_fused_mlp_with_an_inexact_root():
    """It is flagged; then what is computed is what the separate kernels compute."""
    torch.manual_seed(0)
    x = torch.randn(8192, 64, device="cuda").to(BF16)
    w1 = torch.randn(768, 64, device="cuda").to(BF16)
    x[5000] *= 2.0**-70
    leaves = [t.requires_grad_() for t in (x, w1, w1.t().contiguous())]
    dy = torch.randn_like(x)
    buffer, other = (ActivationBuffer(2 * 8192 * 768, "cuda") for _ in range(2))
    other.fuses = False
    y = relu2_mlp(*leaves, buffer=buffer)
    wrong = torch.autograd.grad(y, leaves, dy)
    assert buffer.overflowed()
    assert buffer.snapshot().inexact
    buffer.fuses = False
    buffer.resize(buffer.capacity_bytes)
    results = []
    for used in (buffer, other):
        y = relu2_mlp(*leaves, buffer=used)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert not used.overflowed()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(wrong[0], results[0][1])  # or the flag had not been needed here
