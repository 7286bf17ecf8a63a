"""The format of bitsparse_kernels.py: its bytes by hand, what lossless means, sizes, refusals.

What:  stored bytes against ones typed in from the module's docstring, round trips against integer
       arithmetic on the 16 bits of each element (no float comparison is asked what is positive).
Needs: a CPU. What a GPU adds is in test_kernels.py.
Run:   python -m pytest tests/test_format.py
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitsparse_kernels
from bitsparse_kernels import (
    ActivationBuffer,
    BitSparseTensor,
    bits_per_element,
    compress,
    compress_reference,
    decompress,
    decompress_reference,
    relu2_mlp,
    relu_mlp,
)

TILE = 2048  # as the docstring says; not taken from the module
SPECIAL = (
    *(0x0000, 0x8000),  # zeros
    *(0x0001, 0x8001, 0x007F, 0x807F),  # smallest and largest subnormals
    *(0x0080, 0x8080, 0x7F7F, 0xFF7F),  # smallest and largest normals
    *(0x7F80, 0xFF80),  # infinities
    *(0x7F81, 0x7FA5, 0x7FC0, 0x7FFF),  # NaN: signalling, with a payload, quiet, all ones
    *(0xFF81, 0xFFA5, 0xFFC0, 0xFFFF),  # the same with the sign bit
    *(0x3F80, 0xBF80),  # 1 and -1
)


def bf16(bits):
    """A bf16 tensor with the given 16-bit patterns."""
    bits = torch.as_tensor(bits, dtype=torch.int32)
    return (bits - (bits >= 0x8000).int() * 0x10000).short().view(torch.bfloat16)


def bits_of(x):
    return x.view(torch.int16).int() & 0xFFFF


def is_stored(bits):
    """Positive, +inf or NaN, told from the bits alone."""
    return ((bits > 0) & (bits < 0x8000)) | (bits > 0xFF80)


def expected_bits(x):
    bits = bits_of(x)
    return torch.where(is_stored(bits), bits, 0)


def random_input(n, density, seed=0):
    """n elements of random bit patterns (subnormals and infinities too), stored or not at random.

    Those that are not stored are negative, or one zero or the other.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(1, 0x7F81, (n,), generator=generator)
    magnitude[torch.rand(n, generator=generator) < 0.1] = 0x3F80
    zero = torch.rand(n, generator=generator) < 0.1
    stored = torch.rand(n, generator=generator) < density
    not_stored = torch.where(zero, magnitude % 2 * 0x8000, magnitude + 0x8000)
    return bf16(torch.where(stored, magnitude, not_stored))


def read_element(i, mask, heads, arena):
    """The bits of element i, read as the docstring says, one integer operation after another."""
    tile, in_tile = divmod(i, TILE)
    group, offset = divmod(in_tile, 256)
    lane, word = divmod(offset, 8)
    words = [int(w) & 0xFFFFFFFF for w in mask[tile]]
    if not words[8 * group + word] >> lane & 1:
        return 0
    k = sum(w.bit_count() for w in words[: 8 * group + word])
    k += (words[8 * group + word] & ((1 << lane) - 1)).bit_count()
    start = 16 * (int(heads[tile]) & (2**40 - 1)) + 2 * k
    return int(arena[start]) | int(arena[start + 1]) << 8


# -----------------------------------------------------------------------------
# Bytes by hand

# 2050 elements, so two tiles, the second with two elements. All that are not named here are +0.
HAND_ELEMENTS = {
    0: 0x3F80,  # 1.0          tile 0  group 0  lane 0   word 0
    1: 0x4000,  # 2.0                  group 0  lane 0   word 1
    2: 0xBF80,  # -1.0                 group 0  lane 0   word 2, not stored
    3: 0x8000,  # -0.0                 group 0  lane 0   word 3, not stored
    8: 0x4040,  # 3.0                  group 0  lane 1   word 0
    15: 0x3F00,  # 0.5                 group 0  lane 1   word 7
    255: 0xFFC1,  # a negative NaN     group 0  lane 31  word 7
    256: 0x7F80,  # +inf               group 1  lane 0   word 0
    299: 0x0001,  # 2^-133             group 1  lane 5   word 3
    300: 0xFF80,  # -inf               group 1  lane 5   word 4, not stored
    2047: 0x7F7F,  # the largest       group 7  lane 31  word 7
    2049: 0x4080,  # 4.0       tile 1  group 0  lane 0   word 1
}
HAND_MASK = {  # (tile, word): bits
    (0, 0): 0b11,
    (0, 1): 0b1,
    (0, 7): -(2**31) + 0b10,  # bits 31 and 1 of an int32
    (0, 8): 0b1,
    (0, 11): 0b100000,
    (0, 63): -(2**31),
    (1, 1): 0b1,
}
# Tile 0: 8 values, so 16 bytes from 0; tile 1: 1 value, from 16, in units of 16 bytes.
HAND_HEADS = [0x0008_00_00000000, 0x0001_00_00000001]
HAND_HEADS_SWAPPED = [0x0008_00_00000001, 0x0001_00_00000000]
TILE_0_BYTES = bytes.fromhex("803f 4040 0040 003f c1ff 807f 0100 7f7f")
TILE_1_BYTES = bytes.fromhex("8040")


def hand_input():
    bits = torch.zeros(2050, dtype=torch.int32)
    for i, value in HAND_ELEMENTS.items():
        bits[i] = value
    return bf16(bits)


def hand_mask():
    mask = torch.zeros(2, 64, dtype=torch.int32)
    for at, value in HAND_MASK.items():
        mask[at] = value
    return mask


def test_compress_writes_the_bytes_by_hand():
    buffer = ActivationBuffer(32, "cpu")
    t = compress(hand_input(), buffer)
    assert t.mask.dtype == torch.int32
    assert t.heads.dtype == torch.int64
    assert torch.equal(t.mask, hand_mask())
    # The heads' constants are written as nnz << 40 by hexadecimal digits: 40 bits are 10 digits.
    assert t.heads.tolist() == HAND_HEADS == [8 << 40, 1 << 40 | 1]
    stored = bytes(buffer.arena.tolist())
    assert stored[:16] == TILE_0_BYTES
    assert stored[16:18] == TILE_1_BYTES  # what follows is padding and undefined
    assert int(buffer.used_bytes()) == 32


@pytest.mark.parametrize("swapped", [False, True])  # tiles lie in any order: only heads say where
def test_decompress_reads_the_bytes_by_hand(swapped):
    padding = b"\xa5" * 14
    tiles = [TILE_0_BYTES, TILE_1_BYTES + padding]
    buffer = ActivationBuffer(32, "cpu")
    buffer.arena.copy_(torch.tensor(list(b"".join(tiles[::-1] if swapped else tiles))))
    heads = torch.tensor(HAND_HEADS_SWAPPED if swapped else HAND_HEADS)
    x = decompress(BitSparseTensor(hand_mask(), heads, buffer, torch.Size([2050])))
    expected = torch.zeros(2050, dtype=torch.int32)
    for i, value in HAND_ELEMENTS.items():
        if value not in (0xBF80, 0x8000, 0xFF80):
            expected[i] = value
    assert torch.equal(bits_of(x), expected)


@pytest.mark.parametrize("value", [0x40A7, 0xC0A7])  # stored, and its negative
def test_docstring_reads_one_element(value):
    """The docstring's example, in its own numbers: element 5000 of a [2, 4096] tensor."""
    bits = bits_of(random_input(8192, 0.5))
    bits[5000] = value
    x = bf16(bits).view(2, 4096)
    buffer = ActivationBuffer(2 * 8192, "cpu")
    t = compress(x, buffer)
    words = [int(w) & 0xFFFFFFFF for w in t.mask[2]]
    is_set = words[24] >> 17 & 1
    assert is_set == (value < 0x8000)
    if is_set:
        k = sum(w.bit_count() for w in words[0:24]) + (words[24] & (2**17 - 1)).bit_count()
        at = 16 * (int(t.heads[2]) & (2**40 - 1)) + 2 * k
        assert bytes(buffer.arena[at : at + 2].tolist()) == bytes.fromhex("a740")
    for text in ("x[5000]", "bit 17 of mask[2, 24]", "mask[2, 0:24]"):
        assert text in bitsparse_kernels.__doc__  # else this test reads another example


# -----------------------------------------------------------------------------
# Size


# 0 and 1: no padding at all, exact; .2: the docstring's example; .01: padding weighs most there
@pytest.mark.parametrize("density", [0, 0.01, 0.2, 0.5, 1])
def test_size_formula(density):
    tiles = 512
    x = random_input(tiles * TILE, density)
    t = compress(x)  # makes a buffer of exactly the needed size
    nnz = int(is_stored(bits_of(x)).sum())
    stored = t.mask.nbytes + t.heads.nbytes + t.buffer.capacity_bytes
    assert t.buffer.capacity_bytes == int(t.buffer.used_bytes())
    # A tile's padding is 0 to 14 bytes, with standard deviation 4.6; five of them on the mean.
    tolerance = 5 * 8 * 4.6 / TILE / tiles**0.5 if 0 < density < 1 else 0
    assert abs(8 * stored / x.numel() - bits_per_element(nnz / x.numel())) <= tolerance


def test_size_example_of_the_docstring():
    assert f"{bits_per_element(0.2):.2f}" == "4.26"
    assert "= 4.26 bits" in bitsparse_kernels.__doc__
    assert bits_per_element(0) == 1 + 64 / TILE  # mask and head remain
    assert bits_per_element(1) == 17 + 64 / TILE


# -----------------------------------------------------------------------------
# Round trips

SIZES = [
    *(0, 1),  # nothing, and the least
    *(255, 256, 257),  # around a group
    *(2047, 2048, 2049),  # around a tile
    3 * 2048 + 5,  # several tiles and a ragged end
]


def assert_round_trip(x):
    before = x.clone()
    t = compress(x)
    y = decompress(t)
    assert torch.equal(bits_of(x), bits_of(before))  # the input is left alone
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    assert torch.equal(bits_of(y), expected_bits(x))
    assert int((t.heads >> 40).sum()) == int(is_stored(bits_of(x)).sum())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("density", [0, 0.2, 0.5, 1])  # empty, trained, at initialization, full
def test_round_trip(n, density):
    assert_round_trip(random_input(n, density))


# the ends of lanes, groups and tiles
@pytest.mark.parametrize("at", [0, 7, 8, 255, 256, 2047, 2048, 6148])
def test_round_trip_of_one_element(at):
    bits = torch.full((3 * 2048 + 5,), 0xBF80)
    bits[at] = 0x3F80
    assert_round_trip(bf16(bits))


# [] holds one element; [3, 0, 5] none; the others cross tiles inside a row and between rows
@pytest.mark.parametrize("shape", [(), (3, 0, 5), (7, 333), (5, 2048), (2, 3, 1000)])
def test_round_trip_of_shapes(shape):
    n = torch.Size(shape).numel()
    assert_round_trip(random_input(n, 0.5).view(shape))


def test_round_trip_of_every_bit_pattern():
    """All 65,536 of them: zeros, subnormals, normals, infinities and NaN of every payload."""
    assert_round_trip(bf16(torch.arange(0x10000)))


@pytest.mark.parametrize("bits", SPECIAL)
def test_round_trip_of_special_values(bits):
    """Alone among zeros, and in a full tile of itself."""
    x = torch.zeros(300, dtype=torch.int32)
    x[100] = bits
    assert_round_trip(bf16(x))
    assert_round_trip(bf16(torch.full((2049,), bits)))


def test_equals_torch_relu():
    """Where torch.relu gives no NaN, the bits are its bits; −0 comes back as +0."""
    x = bf16([bits for bits in range(0x10000) if not bits & 0x7FFF > 0x7F80])
    assert torch.equal(bits_of(decompress(compress(x))), bits_of(torch.relu(x) + 0.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(0, 5000),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    specials=st.lists(st.tuples(st.integers(0, 4999), st.sampled_from(SPECIAL)), max_size=20),
)
def test_reference_of_any_input(n, density, seed, specials):
    """Round trip, the reading by hand of some elements, and the bytes reserved."""
    bits = bits_of(random_input(n, density, seed))
    for i, value in specials:
        if i < n:
            bits[i] = value
    x = bf16(bits)
    buffer = ActivationBuffer(2 * n + 16 * (n // TILE + 1), "cpu")
    mask, heads = compress_reference(x.clone(), buffer, 0)
    expected = expected_bits(x)
    assert torch.equal(bits_of(decompress_reference(mask, heads, buffer, n)), expected)
    for i in sorted({0, n // 2, n - 1, *(i for i, _ in specials)}):
        if 0 <= i < n:
            assert read_element(i, mask, heads, buffer.arena) == expected[i]
    nnz = [int((expected[at : at + TILE] != 0).sum()) for at in range(0, n, TILE)]
    assert [int(h) >> 40 for h in heads] == nnz
    assert int(buffer.used_bytes()) == sum(-(-2 * k // 16) * 16 for k in nnz)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=5),
    capacity=st.integers(0, 6000),
    seed=st.integers(0, 2**31),
)
def test_reference_of_any_capacity(sizes, capacity, seed):
    """Several tensors in one buffer: each tile comes back whole or as zeros, by its head alone."""
    buffer = ActivationBuffer(capacity, "cpu")
    inputs = [random_input(n, 0.5, seed + i) for i, n in enumerate(sizes)]
    stored = [compress(x, buffer) for x in inputs]
    reserved = 0
    for x, t in zip(inputs, stored, strict=True):
        y = bits_of(decompress(t))
        for tile, at in enumerate(range(0, len(x), TILE)):
            expected = expected_bits(x[at : at + TILE])
            assert int(t.heads[tile]) & (2**40 - 1) == reserved // 16
            reserved += -(-2 * int((expected != 0).sum()) // 16) * 16
            if reserved > buffer.capacity_bytes:
                expected = torch.zeros_like(expected)
            assert torch.equal(y[at : at + TILE], expected)
    assert int(buffer.used_bytes()) == reserved
    assert bool(buffer.overflowed()) == (reserved > buffer.capacity_bytes)


# -----------------------------------------------------------------------------
# Refusals: one sentence that says what was expected and what was received


def mlp_arguments(d=16, hidden=32, tokens=4):
    """x, w1, w2, b1, b2 of zeros; the letters of a wrong shape below are these numbers."""
    shapes = {"x": (tokens, d), "w1": (hidden, d), "w2": (d, hidden), "b1": (hidden,), "b2": (d,)}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def refused(call, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole sentence is compared)
        call()
    assert str(error.value) == sentence


def test_compress_refuses_another_dtype():
    refused(
        lambda: compress(torch.zeros(4)),
        "x: expected dtype torch.bfloat16, received torch.float32",
    )


def test_compress_refuses_what_is_not_contiguous():
    refused(
        lambda: compress(torch.zeros(4, 6, dtype=torch.bfloat16).t()),
        "x: expected a contiguous tensor, received shape [6, 4] with strides [1, 6]",
    )


def test_compress_refuses_a_buffer_on_another_device():
    x = torch.zeros(4, dtype=torch.bfloat16)
    refused(
        lambda: compress(x, ActivationBuffer(16, "meta")),
        "buffer: expected one on cpu, received one on meta",
    )


def test_buffer_refuses_a_negative_capacity():
    sentence = "capacity_bytes: expected 0 or more, received -1"
    refused(lambda: ActivationBuffer(-1, "cpu"), sentence)
    buffer = ActivationBuffer(32, "cpu")
    refused(lambda: buffer.resize(-1), sentence)
    assert buffer.capacity_bytes == 32  # and it still is a buffer


@pytest.mark.parametrize("mlp", [relu2_mlp, relu_mlp])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"w1": (32,)}, "w1: expected shape [h, d], received [32]"),
        ({"x": (4, 17)}, "x: expected shape [4, 16], received [4, 17]"),
        ({"x": ()}, "x: expected shape [16], received []"),
        ({"w2": (32, 16)}, "w2: expected shape [16, 32], received [32, 16]"),
        ({"b1": (16,)}, "b1: expected shape [32], received [16]"),
        ({"b2": (32,)}, "b2: expected shape [16], received [32]"),
        ({"b2": None}, "b1, b2: expected both or neither, received one of them"),
        ({"b1": None}, "b1, b2: expected both or neither, received one of them"),
    ],
)
def test_mlp_refuses_shapes(mlp, wrong, sentence):
    arguments = mlp_arguments()
    for name, shape in wrong.items():
        arguments[name] = None if shape is None else torch.zeros(shape, dtype=torch.bfloat16)
    refused(lambda: mlp(**arguments, buffer=ActivationBuffer(4096, "cpu")), sentence)


@pytest.mark.parametrize("mlp", [relu2_mlp, relu_mlp])
@pytest.mark.parametrize("name", ["x", "w1", "w2", "b1", "b2"])
def test_mlp_refuses_another_dtype(mlp, name):
    arguments = mlp_arguments()
    arguments[name] = arguments[name].float()
    refused(
        lambda: mlp(**arguments, buffer=ActivationBuffer(4096, "cpu")),
        f"{name}: expected dtype torch.bfloat16, received torch.float32",
    )


@pytest.mark.parametrize("mlp", [relu2_mlp, relu_mlp])
@pytest.mark.parametrize("name", ["x", "w1", "w2", "b1", "b2"])
def test_mlp_refuses_what_is_not_contiguous(mlp, name):
    arguments = mlp_arguments()
    arguments[name] = torch.cat([arguments[name]] * 2, dim=-1)[..., ::2]
    shape, strides = list(arguments[name].shape), list(arguments[name].stride())
    refused(
        lambda: mlp(**arguments, buffer=ActivationBuffer(4096, "cpu")),
        f"{name}: expected a contiguous tensor, received shape {shape} with strides {strides}",
    )


@pytest.mark.parametrize("mlp", [relu2_mlp, relu_mlp])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"save": "sparse"},
            "save: expected one of bitsparse, dense, checkpoint, received 'sparse'",
        ),
        ({}, 'buffer: save="bitsparse" expects an ActivationBuffer, received None'),
        (
            {"buffer": functools.partial(ActivationBuffer, 16, "meta")},
            "buffer: expected one on cpu, received one on meta",
        ),
        (
            {"buffer": functools.partial(ActivationBuffer, 16, "cpu", layers=2), "layer": 2},
            "layer: expected 0 to 1, received 2",
        ),
        (
            {"buffer": functools.partial(ActivationBuffer, 16, "cpu", layers=2), "layer": -1},
            "layer: expected 0 to 1, received -1",
        ),
    ],
)
def test_mlp_refuses_options(mlp, options, sentence):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    refused(lambda: mlp(**mlp_arguments(), **options), sentence)
