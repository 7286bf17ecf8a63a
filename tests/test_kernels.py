"""The Triton kernels of bitsparse_kernels.py against its pure-torch reference, bit for bit.

What:  1. on any machine, the plain kernels in Triton's interpreter: what they store, read back
          and leave alone. Its conversion to bf16 truncates instead of rounding, and gets
          subnormals wrong, so results of arithmetic (post, dz) are only held there where every
          operand is a power of two.
       2. on any machine, the staged kernels (inline PTX, which the interpreter cannot run)
          compiled for three GPUs, and the thread layout that they rely on.
       3. on a GPU, everything, for both.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU (the largest tests up to 24 GB of its memory).
Run:   python -m pytest tests/test_kernels.py
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import bitsparse_kernels
from bitsparse_kernels import (
    ActivationBuffer,
    backward_triton,
    compress,
    compress_reference,
    compress_triton,
    decompress,
    decompress_reference,
    decompress_triton,
    relu2_mlp,
)

TILE = 2048
CANARY = 0xA5
SPECIAL = (  # as in test_format.py
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F),
    *(0x7F80, 0xFF80, 0x7F81, 0x7FA5, 0x7FC0, 0x7FFF, 0xFF81, 0xFFA5, 0xFFC0, 0xFFFF),
)
# none; one; trained; at initialization; all; every kind of float mixed at random; powers of two
KINDS = ["0", "one", "0.2", "0.5", "1", "special", "powers of two"]
RAGGED = [
    *(0, 1),  # nothing; the least, and the one n that Triton makes a constant
    *(255, 256, 257),  # around a group
    *(2047, 2048, 2049),  # around a tile
    3 * 2048 + 5,  # several tiles and a ragged end
    3 * 2048 + 48,  # ragged, but a multiple of 16, which Triton compiles for apart
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make_input(kind, n, seed=0):
    """n bf16 elements; those that are not stored are negative, or one zero or the other."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, 0x7F81, (n,), generator=generator)  # subnormals and +inf among them
    if kind == "special":
        bits = torch.tensor(SPECIAL)[bits % len(SPECIAL)]
    elif kind == "powers of two":  # ±2^-8 to ±2^8
        bits = (0x77 + bits % 17 << 7) + 0x8000 * (torch.rand(n, generator=generator) < 0.5)
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


def guarded_buffer(capacity, device, behind=4096, before=64, layers=1):
    """A buffer whose arena is the middle of a larger tensor of canaries; and that tensor."""
    buffer = ActivationBuffer(capacity, device, layers)
    capacity = buffer.capacity_bytes
    whole = torch.full((before + capacity + behind,), CANARY, dtype=torch.uint8, device=device)
    buffer.arena = whole[before : before + capacity]
    return buffer, whole


def canaries_intact(buffer, whole, before=64):
    return bool((whole[:before] == CANARY).all()) and bool(
        (whole[before + buffer.capacity_bytes :] == CANARY).all()
    )


def assert_tiles_disjoint(heads, start=0):
    """The tiles' bytes follow one another without gap or overlap, in whatever order."""
    base = (heads & (1 << 40) - 1) * 16
    size = ((heads >> 40) * 2 + 15) // 16 * 16
    order = torch.argsort(base * 8192 + size)  # empty tiles before the one that begins there
    base, size = base[order], size[order]
    assert torch.equal(base, start + size.cumsum(0) - size)


def tile_values(tile, heads, buffer):
    """The values of one tile, int16; None where it did not fit."""
    head = int(heads[tile])
    at, nnz = (head & (1 << 40) - 1) * 8, head >> 40
    if 2 * at + -(-2 * nnz // 16) * 16 > buffer.capacity_bytes:
        return None
    return int16(buffer.arena)[at : at + nnz].cpu()


def check_store_and_load(device, kind, n, power=0, view=0):
    """compress_triton and decompress_triton against the reference, in buffers that overflow or not.

    view: the input begins so many elements into a larger tensor.
    """
    x = make_input(kind, n + view)[view:]
    nnz = int((~(x <= 0)).sum())
    # All fits; then about half of it, one vector, and nothing. Only one kind overflows, as what
    # fits depends on counts alone, and the interpreter is slow.
    for capacity in (2 * n + 16 * (n // TILE + 1), nnz, 16, 0)[: 4 if kind == "0.5" else 1]:
        here, _ = guarded_buffer(capacity, "cpu")
        mask, heads = compress_reference(x.clone(), here, 0)

        there, whole = guarded_buffer(capacity, device)
        z = make_input(kind, n + view).to(device)[view:]
        mask_, heads_ = compress_triton(z, there, power)
        assert canaries_intact(there, whole)
        assert torch.equal(mask_.cpu(), mask)
        assert torch.equal(heads_.cpu() >> 40, heads >> 40)
        assert_tiles_disjoint(heads_)
        assert there.state.tolist() == here.state.tolist()
        for tile in range(len(heads)):
            values, values_ = tile_values(tile, heads, here), tile_values(tile, heads_, there)
            if device == "cpu":  # there, tiles come in order
                assert (values is None) == (values_ is None)
            if values is not None and values_ is not None:
                assert torch.equal(values_, values)
        if power == 0:
            assert torch.equal(int16(z).cpu(), int16(x))  # left alone

        y = decompress_triton(mask_, heads_, there, n)
        assert y.shape == (n,)
        assert y.dtype == torch.bfloat16
        # the reference reads what the kernel wrote, wherever the tiles lie
        on_cpu = ActivationBuffer(capacity, "cpu")
        on_cpu.arena.copy_(there.arena)
        expected = decompress_reference(mask_.cpu(), heads_.cpu(), on_cpu, n)
        assert torch.equal(int16(y).cpu(), int16(expected))
        if there.state[0] <= there.capacity_bytes:
            relu = torch.where(x <= 0, torch.zeros_like(x), x)
            assert torch.equal(int16(y).cpu(), int16(relu))


def equal_but_for_nan_bits(a, b):
    """Arithmetic may give any NaN; everything else to the last bit (−0 is not +0)."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        int16(a.masked_fill(a.isnan(), 0)), int16(b.masked_fill(b.isnan(), 0))
    )


def check_arithmetic(device, kind, n, power, view=0):
    """What is computed on the way: post in compress, post and dz in backward, in float32 torch."""
    # parts of larger tensors: what lies before and behind is not to be touched
    all_z = make_input(kind, view + n + TILE).to(device)
    dh_kind = kind if kind in ("special", "powers of two") else "0.5"
    all_dh = make_input(dh_kind, view + n + TILE, seed=1).to(device)
    around = torch.ones(len(all_z), dtype=torch.bool, device=device)
    around[view : view + n] = False
    before = all_z[around].clone(), all_dh[around].clone()
    z, dh = all_z[view : view + n], all_dh[view : view + n]
    stored = ~(z <= 0)
    r = torch.where(stored, z, 0.0).float()
    post = (r * r if power == 2 else r).bfloat16()
    dz = (dh.float() * (2 * r) if power == 2 else dh.float()).bfloat16()
    dz = torch.where(stored, dz, 0.0)

    buffer, whole = guarded_buffer(2 * n + 16 * (n // TILE + 1), device)
    mask, heads = compress_triton(z, buffer, power)
    assert equal_but_for_nan_bits(z, post)
    grad, post_ = backward_triton(dh, mask, heads, buffer, power)
    assert grad.data_ptr() == dh.data_ptr()  # in place
    assert equal_but_for_nan_bits(grad, dz)
    assert equal_but_for_nan_bits(post_, post)
    assert canaries_intact(buffer, whole)
    assert torch.equal(int16(all_z[around]), int16(before[0]))
    assert torch.equal(int16(all_dh[around]), int16(before[1]))


# -----------------------------------------------------------------------------
# In Triton's interpreter. TRITON_INTERPRET is read where a kernel is defined, so the checks run in
# a process of their own that imports this file with it set.


def interpreted_kernels():
    return {
        type(kernel).__name__
        for name, kernel in vars(bitsparse_kernels).items()
        if name.endswith("_kernel")
    }


def check_overflowing_backward(device):
    """A tile that did not fit is read as zeros by backward too, and one that did is not."""
    z = make_input("powers of two", 4 * TILE).to(device)
    fits = int((~(z[: 2 * TILE] <= 0)).sum()) * 2 + 32
    buffer, whole = guarded_buffer(fits, device)
    mask, heads = compress_triton(z.clone(), buffer, 0)
    base, nnz = (heads & (1 << 40) - 1) * 16, heads >> 40
    fitted = base + (nnz * 2 + 15) // 16 * 16 <= buffer.capacity_bytes
    assert 0 < fitted.sum() < 4
    r = torch.where(fitted.repeat_interleave(TILE) & ~(z <= 0), z, 0.0)
    dh = torch.ones_like(z)
    _, post = backward_triton(dh, mask, heads, buffer, 2)
    assert torch.equal(post, r * r)
    assert torch.equal(dh[r > 0], 2 * r[r > 0])
    assert not dh[r == 0].any()
    assert canaries_intact(buffer, whole)


@pytest.fixture(scope="module")
def interpreter():
    """call(f, *arguments): f's result from a process whose kernels Triton interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
            patch.delenv("TRITON_INTERPRET")
            yield lambda f, *arguments: pool.submit(f, *arguments).result()


def test_the_interpreter_runs_the_kernels(interpreter):
    """Else all tests of this section would say nothing."""
    assert interpreter(interpreted_kernels) == {"InterpretedFunction"}
    assert interpreted_kernels() == {"JITFunction"}


# All sizes at one density, all kinds at one ragged size: a tile takes the interpreter .1 s.
@pytest.mark.parametrize(
    ("kind", "n"), [("0.5", n) for n in RAGGED] + [(kind, TILE + 300) for kind in KINDS]
)
def test_interpreted_store_and_load(interpreter, kind, n):
    interpreter(check_store_and_load, "cpu", kind, n)


@pytest.mark.parametrize("view", [1, 8])  # an address that is no multiple of 16 bytes; one that is
def test_interpreted_view(interpreter, view):
    interpreter(check_store_and_load, "cpu", "0.5", 2 * TILE + 5, 0, view)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("n", [1, 2048, 3 * 2048 + 5])  # the least, one even tile, a ragged end
def test_interpreted_arithmetic(interpreter, power, n):
    interpreter(check_store_and_load, "cpu", "powers of two", n, power)
    interpreter(check_arithmetic, "cpu", "powers of two", n, power)


def test_interpreted_overflow_in_backward(interpreter):
    interpreter(check_overflowing_backward, "cpu")


# -----------------------------------------------------------------------------
# Compiled for a GPU that is not there

COMPRESS_TYPES = {
    "z_ptr": "*i16",
    "mask_ptr": "*i32",
    "heads_ptr": "*i64",
    "values_ptr": "*i16",
    "cursor_ptr": "*i64",
    "n": "i32",
    "capacity": "i64",
}
EXPAND_TYPES = {
    "out_ptr": "*i16",
    "dh_ptr": "*bf16",
    "mask_ptr": "*i32",
    "heads_ptr": "*i64",
    "values_ptr": "*i16",
    "n": "i32",
    "capacity": "i64",
}


def compile_staged(kernel, types, compute_capability, power, even):
    """The texts that Triton makes of a STAGED kernel: {"ttgir": ..., "ptx": ...}."""
    constants = {"POWER": power, "GROUPS": 8, "EVEN": even, "STAGED": True}
    assert list(types) + list(constants) == kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, type_ in enumerate(types.values())
            if type_.startswith("*")
        },
    )
    target = GPUTarget("cuda", compute_capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 1}).asm


# A100, RTX 4090, H100 on ragged sizes; then even ones, and storing without relu²
@pytest.mark.parametrize(
    ("compute_capability", "power", "even"),
    [(80, 2, False), (89, 2, False), (90, 2, False), (90, 2, True), (90, 0, False)],
)
@pytest.mark.parametrize(
    ("kernel", "types"), [("_compress_kernel", COMPRESS_TYPES), ("_expand_kernel", EXPAND_TYPES)]
)
def test_staged_kernels_compile(monkeypatch, tmp_path, kernel, types, compute_capability,
                                power, even):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile indeed
    made = compile_staged(
        getattr(bitsparse_kernels, kernel), types, compute_capability, power, even
    )
    # A row of a [32, 8] block to each thread: what makes ballots of a column the mask words.
    layout = made["ttgir"].split("#blocked = ")[1].split("}")[0]
    assert "sizePerThread = [1, 8]" in layout
    assert "threadsPerWarp = [32, 1]" in layout
    assert "warpsPerCTA = [1, 1]" in layout
    ptx = made["ptx"]
    assert "shfl" not in ptx  # ranks take no exchange between threads
    ballots = 64 if kernel == "_compress_kernel" else 0  # 8 groups of 8 elements a thread
    assert ptx.count("vote.sync.ballot") == ballots
    # Values go to and from the buffer as 16-byte vectors, one a group.
    moves = "st.global.v4" if kernel == "_compress_kernel" else "ld.global.v4"
    assert ptx.replace(".L1::no_allocate", "").count(moves) >= 8
    assert "st.shared.b16" in ptx if kernel == "_compress_kernel" else "ld.shared.b16" in ptx


# -----------------------------------------------------------------------------
# On a GPU


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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", RAGGED)
def test_store_and_load(kind, n):
    check_store_and_load("cuda", kind, n)


# the plain kernels (2-byte alignment), and again the staged ones
@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("view", [1, 8])
@pytest.mark.parametrize("kind", ["0.2", "special"])
@pytest.mark.parametrize("n", [2 * TILE, 2 * TILE + 5])  # even, ragged
def test_store_and_load_of_a_view(view, kind, n):
    check_store_and_load("cuda", kind, n, view=view)
    x = make_input(kind, n + view).cuda()[view:]
    relu = torch.where(x <= 0, 0.0, x)
    assert torch.equal(int16(decompress(compress(x))), int16(relu))


@pytest.mark.gpu
@on_gpu
def test_store_and_load_in_an_unaligned_arena():
    """Values at addresses that are no multiple of 16 bytes: the plain kernels, in both directions.

    No allocation gives such an arena; a slice of another tensor does.
    """
    x = make_input("0.5", 5 * TILE + 7).cuda()
    buffer, whole = guarded_buffer(2 * len(x) + 96, "cuda", before=66)
    mask, heads = compress_triton(x.clone(), buffer, 0)
    relu = torch.where(x <= 0, 0.0, x)
    assert torch.equal(int16(decompress_triton(mask, heads, buffer, len(x))), int16(relu))
    assert canaries_intact(buffer, whole, before=66)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 4096, 3 * 2048 + 5])  # the least, even tiles, a ragged end
@pytest.mark.parametrize("view", [0, 1])  # staged, plain
def test_arithmetic(power, kind, n, view):
    check_store_and_load("cuda", kind, n, power, view)
    check_arithmetic("cuda", kind, n, power, view)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("power", [1, 2])
def test_arithmetic_of_every_bit_pattern(power):
    """All 65,536 values of z, each with 32 gradients of every kind, special ones among them."""
    z = torch.arange(0x10000, device="cuda").repeat(32)
    z = (z - 0x10000 * (z >= 0x8000)).short().view(torch.bfloat16)
    dh = torch.cat([make_input("special", 0x80000), make_input("0.5", 0x180000)]).cuda()
    stored = ~(z <= 0)
    r = torch.where(stored, z, 0.0).float()
    post = (r * r if power == 2 else r).bfloat16()
    dz = torch.where(stored, (dh.float() * (2 * r) if power == 2 else dh.float()).bfloat16(), 0.0)
    buffer = ActivationBuffer(2 * len(z), "cuda")
    activated = z.clone()
    mask, heads = compress_triton(activated, buffer, power)
    grad, post_ = backward_triton(dh, mask, heads, buffer, power)
    assert equal_but_for_nan_bits(activated, post)
    assert equal_but_for_nan_bits(post_, post)
    assert equal_but_for_nan_bits(grad, dz)


@pytest.mark.gpu
@on_gpu
def test_overflow_in_backward():
    check_overflowing_backward("cuda")


def random_on_gpu(n, density, seed):
    """As make_input, made on the GPU and in place: 2 bytes an element and little more."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.empty(n, dtype=torch.int16, device="cuda")
    bits.random_(1, 0x7F81, generator=generator)
    for part in bits.split(2**24):
        stored = torch.rand(len(part), device="cuda", generator=generator) < density
        part.copy_(torch.where(stored, part, part | -0x8000))  # the sign bit
    return bits.view(torch.bfloat16)


def assert_large_round_trip(x, buffer):
    """compress and decompress of x, in slices of whole tiles against the reference and relu."""
    mask, heads = compress_triton(x, buffer, 0)
    y = decompress_triton(mask, heads, buffer, len(x))
    assert not buffer.overflowed()
    assert_tiles_disjoint(heads)
    step = 2048 * TILE
    for at in range(0, len(x), step):
        part = x[at : at + step]
        assert torch.equal(int16(y[at : at + step]), int16(torch.where(part <= 0, 0.0, part)))
        tiles = slice(at // TILE, (at + step) // TILE)
        if at % (16 * step) == 0:  # the reference takes some 50 bytes an element
            scratch = ActivationBuffer(2 * len(part), "cpu")
            expected_mask, expected_heads = compress_reference(part.cpu(), scratch, 0)
            assert torch.equal(mask[tiles].cpu(), expected_mask)
            assert torch.equal(heads[tiles].cpu() >> 40, expected_heads >> 40)
    return mask, heads


# The trainer's hidden activation at half, full and several times its tokens; and a ragged one.
@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("density", [0.1, 0.2, 0.5])  # a late layer, the mean, at initialization
@pytest.mark.parametrize("shape", [(1024, 768), (16384, 3072), (65536, 3072), (4099, 3071)])
def test_large(shape, density):
    n = shape[0] * shape[1]
    x = random_on_gpu(n, density, seed=n)
    buffer = ActivationBuffer(int(2 * n * density * 1.05) + 2**20, "cuda")
    mask, heads = assert_large_round_trip(x, buffer)

    dh = random_on_gpu(n, 0.5, seed=n + 1)
    r = torch.where(x <= 0, 0.0, x).float()
    dz = torch.where(x <= 0, 0.0, (dh.float() * (2 * r)).bfloat16())
    post = (r * r).bfloat16()
    grad, post_ = backward_triton(dh, mask, heads, buffer, 2)
    assert equal_but_for_nan_bits(grad, dz)
    assert equal_but_for_nan_bits(post_, post)


@pytest.mark.gpu
@on_gpu
def test_more_elements_than_int32_counts():
    """2^31 elements and some tiles, all stored: offsets into z and into the buffer pass 2^31."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free GPU memory")
    n = 2**31 + 3 * TILE + 5
    x = random_on_gpu(n, 1, seed=0)
    buffer, whole = guarded_buffer(2 * n + 16, "cuda")
    mask, heads = compress_triton(x, buffer, 0)
    assert canaries_intact(buffer, whole)
    y = decompress_triton(mask, heads, buffer, n)
    for at in range(0, n, 2**28):  # torch.equal makes a bool an element
        assert torch.equal(int16(y[at : at + 2**28]), int16(x[at : at + 2**28]))
    assert int(buffer.used_bytes()) == 2 * (n - 5) + 16
    assert (mask[:-1] == -1).all()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("fraction", [0, 0.001, 0.5, 0.999])  # of the needed capacity
def test_overflow(fraction):
    """Nothing outside the arena is written, the need is exact, and each tile is whole or zero."""
    x = random_on_gpu(3000 * TILE + 5, 0.3, seed=1)
    measure = ActivationBuffer(0, "cuda")
    compress_triton(x, measure, 0)
    needed = int(measure.used_bytes())
    buffer, whole = guarded_buffer(int(needed * fraction), "cuda", behind=2**24)
    mask, heads = compress_triton(x, buffer, 0)
    assert canaries_intact(buffer, whole)
    assert int(buffer.used_bytes()) == needed
    assert bool(buffer.overflowed())
    y = decompress_triton(mask, heads, buffer, len(x))
    base, nnz = (heads & (1 << 40) - 1) * 16, heads >> 40
    fits = base + (nnz * 2 + 15) // 16 * 16 <= buffer.capacity_bytes
    assert bool(fits.any()) == (fraction > 0)
    kept = fits.repeat_interleave(TILE)[: len(x)] & ~(x <= 0)
    assert torch.equal(int16(y), int16(torch.where(kept, x, 0.0)))

    buffer.resize(needed)  # now it fits, to the byte
    mask, heads = compress_triton(x, buffer, 0)
    y = decompress_triton(mask, heads, buffer, len(x))
    assert not buffer.overflowed()
    assert torch.equal(int16(y), int16(torch.where(x <= 0, 0.0, x)))


@pytest.mark.gpu
@on_gpu
def test_values_counted_by_layer():
    """Three layers of one buffer; 5000 tiles take the counting kernel more than one program."""
    buffer = ActivationBuffer(2**26, "cuda", layers=3)
    expected = [0, 0, 0]
    for layer, tiles in [(0, 1), (1, 5000), (2, 17), (1, 3)]:
        x = random_on_gpu(tiles * TILE - 3, 0.2, seed=layer)
        compress_triton(x, buffer, 0, layer)
        expected[layer] += int((~(x <= 0)).sum())
    assert buffer.snapshot().layer_nnz == expected
    assert buffer.snapshot().layer_nnz == [0, 0, 0]  # counted anew


@pytest.mark.gpu
@on_gpu
def test_concurrent_launches_on_one_buffer():
    """Kernels of four streams reserve from one counter at the same time."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [random_on_gpu(500 * TILE + 11 * i, 0.3, seed=i) for i in range(32)]
    buffer, whole = guarded_buffer(sum(x.nbytes for x in inputs), "cuda")
    measure = ActivationBuffer(0, "cuda")
    for x in inputs:  # compile first, so that launches follow one another closely
        compress_triton(x, measure, 0)
    torch.cuda.synchronize()
    stored = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 4]):
            stored.append(compress_triton(x, buffer, 0))
    torch.cuda.synchronize()
    assert_tiles_disjoint(torch.cat([heads for _, heads in stored]))
    for x, (mask, heads) in zip(inputs, stored, strict=True):
        y = decompress_triton(mask, heads, buffer, len(x))
        assert torch.equal(int16(y), int16(torch.where(x <= 0, 0.0, x)))
    assert canaries_intact(buffer, whole)


@pytest.mark.gpu
@on_gpu
def test_same_values_in_every_run():
    """The tiles' order may differ from run to run; what is read back and computed does not."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {"x": (513, 64), "w1": (256, 64), "w2": (64, 256)}
    x, w1, w2 = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_()
        for shape in shapes.values()
    )
    buffer = ActivationBuffer(2**20, "cuda")
    runs = []
    for _ in range(20):
        buffer.reset()
        y = relu2_mlp(x, w1, w2, buffer=buffer)
        runs.append([y, *torch.autograd.grad(y.sum(), (x, w1, w2))])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
