"""The format of bitsparse_kernels.py: its bytes by hand, what lossless means, sizes, refusals.

What:  for each codec and storage, stored bytes against ones typed in from the module's docstring,
       and against an independent decoder written from it, in Python's integers; round trips
       against arithmetic on the bits of each element (no float comparison is asked what is
       positive, no conversion of torch's what is nearest); sizes against what is stored.
Needs: a CPU. What a GPU adds is in test_kernels.py.
Run:   python -m pytest tests/test_format.py
"""

import functools
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bitsparse_kernels
from bitsparse_kernels import (
    ActivationBuffer,
    BitSparseTensor,
    bits_per_element,
    compress,
    compress_reference,
    decompress,
    expand_reference,
    optimal_bits_per_element,
    relu2_mlp,
    relu_mlp,
)

TILE = 2048  # as the docstring says; not taken from the module
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CODECS = ["raw", "sign", "exponent"]
FORMATS = [(codec, storage) for codec in CODECS for storage in (BF16, E4M3, E5M2)]
every_format = pytest.mark.parametrize(("codec", "storage"), FORMATS)
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



# The docstring's table of widths, typed in. "exponent": without the exponent's 0 to so many bits.
WIDTH = {
    ("raw", BF16): 16,
    ("raw", E4M3): 8,
    ("raw", E5M2): 8,
    ("sign", BF16): 15,
    ("sign", E4M3): 7,
    ("sign", E5M2): 7,
    ("exponent", BF16): 7,
    ("exponent", E4M3): 3,
    ("exponent", E5M2): 2,
}
EXPONENT_BITS = {BF16: 8, E4M3: 4, E5M2: 5}  # at most


def fp8_values(storage):
    """float64: what the codes from 0 to the largest finite one mean, by the formats' definition."""
    mantissa, bias, largest = (3, 7, 0x7E) if storage == E4M3 else (2, 15, 0x7B)
    values = []
    for code in range(largest + 1):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        if exponent:
            fraction += 1 << mantissa
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias - mantissa))
    return torch.tensor(values, dtype=torch.float64)


def fp8_codes(x, scale, storage):
    """The nearest code of each element of x / scale, ties to the even one; 0 if not stored."""
    values = fp8_values(storage)
    between = (values[1:] + values[:-1]) / 2
    y = (x.float() * (1 / scale)).double().nan_to_num(0, 0, 0).clamp(min=0)
    code = torch.searchsorted(between, y)  # how many of them are below
    tie = y == between[code.clamp(max=len(between) - 1)]
    code += tie & (code % 2 == 1)
    bits = bits_of(x)
    code[bits == 0x7F80] = 0x7F if storage == E4M3 else 0x7C
    code[(bits & 0x7FFF) > 0x7F80] = 0x7F
    return torch.where(is_stored(bits), code, 0)


def expected_values(x, codec, storage, scale=None):
    """What the format holds of each element, as an integer of the storage's bits."""
    if storage != BF16:
        return fp8_codes(x, scale, storage)
    bits = torch.where(is_stored(bits_of(x)), bits_of(x), 0)
    return bits if codec == "raw" else bits & 0x7FFF


def largest_scale(x, storage):
    """By the docstring; float32, of which the last bit may be the rounding of 1 / 448 first."""
    bits = bits_of(x)
    most = x[(bits > 0) & (bits < 0x7F80)].double().max().item() if len(x) else 0
    return most / (448 if storage == E4M3 else 57344)


def expected_result(x, t):
    """The bf16 bits that decompress gives, from expected_values."""
    scale = t.saved[2][0] if len(t.saved) > 2 else None
    values = expected_values(x.flatten(), t.codec, t.storage, scale).view(x.shape)
    if t.storage == BF16:
        return values
    table = fp8_values(t.storage).float()
    table = torch.cat([table, torch.full((128 - len(table),), torch.nan)])
    if t.storage == E5M2:
        table[0x7C] = torch.inf
    return bits_of((table[values] * scale).bfloat16())


def quieten(bits):
    """fp8's NaN times the scale is some NaN."""
    return torch.where((bits & 0x7FFF) > 0x7F80, 0x7FC0, bits)


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


def parse_head(head, codec, storage):
    """(first byte, nnz, smallest or base exponent, width) of a tile."""
    head = int(head) & (1 << 64) - 1  # an exponent of 8 bits sets the sign
    width = WIDTH[codec, storage]
    if codec == "exponent":
        width += 3 if head >> 60 > 8 else head >> 60
    else:
        assert head >> 52 == 0
    return 16 * (head & (2**40 - 1)), head >> 40 & 0xFFF, head >> 52 & 0xFF, width


def tile_bytes(head, codec, storage):
    _, nnz, _, width = parse_head(head, codec, storage)
    return 16 * (math.ceil(nnz * width / 128) + max((int(head) >> 60 & 15) - 9, 0))


def patches_of(head, stream):
    """The 16-bit patches and zeros at the end of a tile's bytes."""
    if int(head) >> 60 & 15 < 9:
        return []
    _, nnz, _, width = parse_head(head, "exponent", BF16)
    first = 2 * math.ceil(nnz * width / 16)
    return [int.from_bytes(stream[i : i + 2], "little") for i in range(first, len(stream), 2)]


def decode(n, saved, arena, codec, storage):
    """All n elements as the docstring says, by Python's integers; 0 where nothing is stored."""
    mask, heads = saved[:2]
    stream = bytes(arena.tolist())
    elements = [0] * n
    for tile in range(math.ceil(n / TILE)):
        at, nnz, least, width = parse_head(heads[tile], codec, storage)
        stored = stream[at : at + tile_bytes(heads[tile], codec, storage)]
        values = int.from_bytes(stored, "little")
        missing = {p & 0x7FF: p >> 11 << 10 for p in patches_of(heads[tile], stored) if p}
        words = [int(w) & 0xFFFFFFFF for w in mask[tile]]
        k = 0
        for group in range(8):
            for word in range(8):
                for lane in range(32):
                    if words[8 * group + word] >> lane & 1:
                        v = values >> k * width & (1 << width) - 1
                        if codec == "exponent":
                            v += least << WIDTH[codec, storage]
                            v = v + missing.pop(k, 0) & 0x7FFF
                        elements[TILE * tile + 256 * group + 8 * lane + word] = v
                        k += 1
        assert k == nnz
        assert not missing
    return torch.tensor(elements, dtype=torch.int32)


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
    mask, heads = t.saved
    assert mask.dtype == torch.int32
    assert heads.dtype == torch.int64
    assert torch.equal(mask, hand_mask())
    # The heads' constants are written as nnz << 40 by hexadecimal digits: 40 bits are 10 digits.
    assert heads.tolist() == [*HAND_HEADS, 0]  # the generation of a new buffer
    assert HAND_HEADS == [8 << 40, 1 << 40 | 1]
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
    heads = torch.tensor((HAND_HEADS_SWAPPED if swapped else HAND_HEADS) + [0])
    x = decompress(BitSparseTensor([hand_mask(), heads], buffer, torch.Size([2050]), "raw", BF16))
    expected = torch.zeros(2050, dtype=torch.int32)
    for i, value in HAND_ELEMENTS.items():
        if value not in (0xBF80, 0x8000, 0xFF80):
            expected[i] = value
    assert torch.equal(bits_of(x), expected)


# Of each: elements in one tile; its head; scale; the bytes of its values; what comes back.
# Elements 0, 8 (lanes 0 and 1 of word 0) come before 1 and 9 (the same lanes of word 1). The
# streams of bits are written with bit 0 at the right, as the last value's bits come first so.
PACKED_BY_HAND = {
    # 100000001001001 111111111000001 011111110000000, the NaN without its sign
    ("sign", BF16): (
        {0: 0x3F80, 8: 0xFFC1, 1: 0x4049, 2: 0xBF80},
        0x000_003_0000000000,
        None,
        "80 bf e0 7f 12 10",
        {0: 0x3F80, 8: 0x7FC1, 1: 0x4049},
    ),
    # exponents 127, 124, 128: smallest 124 = 0x7c, distances 3, 0, 4 take 3 bits, so 10 a value
    # 1001001001 0000100000 0110000000
    ("exponent", BF16): (
        {0: 0x3F80, 8: 0x3E20, 1: 0x4049, 2: 0x8000},
        0x37C_003_0000000000,
        None,
        "80 81 90 24",
        {0: 0x3F80, 8: 0x3E20, 1: 0x4049},
    ),
    # 448, 1, 2^-30 (rounds to 0, and is stored), 1.0625 (between 0x38 and 0x39: to the even one)
    ("raw", E4M3): (
        {0: 0x43E0, 8: 0x3F80, 1: 0x3080, 9: 0x3F88},
        0x000_004_0000000000,
        1,
        "7e 38 00 38",
        {0: 0x43E0, 8: 0x3F80, 9: 0x3F80},
    ),
    # 448, 240, 256 as 0x7e, 0x77, 0x78: exponents 15, 14, 15, 1 bit: 1000 0111 1110
    ("exponent", E4M3): (
        {0: 0x43E0, 8: 0x4370, 1: 0x4380},
        0x10E_003_0000000000,
        1,
        "7e 08",
        {0: 0x43E0, 8: 0x4370, 1: 0x4380},
    ),
    # 57344 and 1: 0111100 1111011
    ("sign", E5M2): (
        {0: 0x4760, 8: 0x3F80, 9: 0xFF80},
        0x000_002_0000000000,
        1,
        "7b 1e",
        {0: 0x4760, 8: 0x3F80},
    ),
}


@pytest.mark.parametrize("format_", PACKED_BY_HAND, ids=lambda f: f"{f[0]} {f[1]}")
def test_packed_bytes_by_hand(format_):
    elements, head, scale, values, results = PACKED_BY_HAND[format_]
    values = bytes.fromhex(values)
    bits, expected = torch.zeros(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    for i, value in elements.items():
        bits[i] = value
    for i, value in results.items():
        expected[i] = value
    buffer = ActivationBuffer(16, "cpu")
    t = compress(bf16(bits), buffer, *format_)
    assert t.saved[1].tolist() == [head, 0]
    assert [float(s) for s in t.saved[2:]] == ([] if scale is None else [scale])
    assert int(buffer.used_bytes()) == 16
    # the bits behind the last value are undefined: none of the bytes typed in has any
    used = int(t.saved[1][0]) >> 40 & 0xFFF
    used *= parse_head(head, *format_)[3]
    stored = int.from_bytes(bytes(buffer.arena.tolist()), "little") & (1 << used) - 1
    assert stored == int.from_bytes(values, "little")
    # and what comes back of these bytes, with all others set
    buffer.arena.fill_(0xFF)
    ones = (1 << 128) - (1 << used) | int.from_bytes(values, "little")
    buffer.arena.copy_(torch.tensor(list(ones.to_bytes(16, "little"))))
    assert torch.equal(bits_of(decompress(t)), expected)


@pytest.mark.parametrize("value", [0x40A7, 0xC0A7])  # stored, and its negative
def test_docstring_reads_one_element(value):
    """The docstring's example, in its own numbers: element 5000 of a [2, 4096] tensor."""
    bits = bits_of(random_input(8192, 0.5))
    bits[5000] = value
    x = bf16(bits).view(2, 4096)
    buffer = ActivationBuffer(2 * 8192, "cpu")
    t = compress(x, buffer)
    words = [int(w) & 0xFFFFFFFF for w in t.saved[0][2]]
    is_set = words[24] >> 17 & 1
    assert is_set == (value < 0x8000)
    if is_set:
        k = sum(w.bit_count() for w in words[0:24]) + (words[24] & (2**17 - 1)).bit_count()
        at = 16 * (int(t.saved[1][2]) & (2**40 - 1)) + 2 * k
        assert bytes(buffer.arena[at : at + 2].tolist()) == bytes.fromhex("a740")
    docstring = " ".join(bitsparse_kernels.__doc__.split())
    for text in ("x[5000]", "bit 17 of mask[2, 24]", "mask[2, 0:24]"):
        assert text in docstring  # else this test reads another example


def test_last_head_is_the_generation():
    buffer = ActivationBuffer(4096, "cpu")
    for generation in range(3):
        t = compress(bf16([0x3F80]), buffer)
        assert t.saved[1].tolist() == [1 << 40, generation]
        buffer.reset()


# -----------------------------------------------------------------------------
# Heads at their limits


@every_format
def test_full_tile(codec, storage):
    """nnz is 2048 = 0x800, the largest there is; and the tile behind it begins where it must."""
    t = compress(bf16([0x3F80] * (TILE + 1)), codec=codec, storage=storage)
    size = TILE * (WIDTH[codec, storage]) // 8
    at, nnz, _, width = parse_head(t.saved[1][0], codec, storage)
    assert (at, nnz, width) == (0, 0x800, WIDTH[codec, storage])
    assert parse_head(t.saved[1][1], codec, storage)[:2] == (size, 1)
    assert torch.equal(decompress(t), torch.ones(TILE + 1, dtype=BF16))


# scale is 1 where the largest is 448 or 57344: so codes are known
BF16_WIDTHS = [  # stored values of one tile, smallest exponent, exponent bits
    ([], 0, 0),  # nothing at all
    ([0x0001], 0, 0),  # one value, a subnormal
    ([0x4049], 0x80, 0),
    ([0x7F80], 0xFF, 0),  # the largest exponent in bits 52 to 59
    ([0x3F80, 0x3FFF, 0x3F81], 0x7F, 0),  # all exponents equal
    ([0x0001, 0x007F], 0, 0),
    ([0x0001, 0x0080], 0, 1),  # a subnormal's exponent counts as 0
    ([0x3F80, 0x4000], 0x7F, 1),
    ([0x3F80, 0x4080], 0x7F, 2),  # the distances 2, 3 and 4: 2, 2 and 3 bits
    ([0x3F80, 0x4100], 0x7F, 2),
    ([0x3F80, 0x4180], 0x7F, 3),
    ([0x0001, 0x3F80], 0, 7),  # 0x7f
    ([0x0001, 0x4000], 0, 8),  # 0x80; from here on the head is a negative int64
    ([0x0001, 0x7F80], 0, 8),  # 0xff, the most
    ([0x3F80, 0x7F80], 0x7F, 8),  # +inf among ones
    ([0x3F80, 0x7FC0], 0x7F, 8),  # NaN
    ([0x3F80, 0xFFC0], 0x7F, 8),
    ([0x4080, 0x7F80], 0x81, 7),
]
FP8_WIDTHS = {
    E4M3: [
        ([0x43E0], 15, 0),  # 448: 3 bits a value
        ([0x43E0, 0x4380], 15, 0),  # 256
        ([0x43E0, 0x4370], 14, 1),  # 240
        ([0x43E0, 0x3F80], 7, 4),  # 1: exponents 15 and 7
        ([0x43E0, 0x3080], 0, 4),  # rounds to 0
        ([0x43E0, 0x7F80], 15, 0),  # +inf becomes NaN, 0x7f, of the same exponent
        ([0x43E0, 0xFFC0], 15, 0),
    ],
    E5M2: [
        ([0x4760], 30, 0),  # 57344: 2 bits a value, the least there is
        ([0x4760, 0x4700], 30, 0),
        ([0x4760, 0x7F80], 30, 1),
        ([0x4760, 0x7FC0], 30, 1),
        ([0x4760, 0x3F80], 15, 4),
        ([0x4760, 0x3080], 0, 5),
        ([0x4760, 0x3080, 0xFFC0], 0, 5),
    ],
}


@pytest.mark.parametrize(
    ("storage", "values", "least", "bits"),
    [(BF16, *case) for case in BF16_WIDTHS]
    + [(storage, *case) for storage, cases in FP8_WIDTHS.items() for case in cases],
)
def test_exponent_width(storage, values, least, bits):
    """Among elements that are not stored, which do not count, and next to tiles of other widths."""
    x = torch.full((3 * TILE,), 0xFF80, dtype=torch.int32)
    x[:: TILE // 2] = 0x8000
    for i, value in enumerate(values):
        x[TILE + 300 * i + 7] = value
    x[3] = x[2 * TILE + 3] = 0x3F80
    x = bf16(x)
    t = compress(x, codec="exponent", storage=storage)
    at, nnz, least_, width = parse_head(t.saved[1][1], "exponent", storage)
    assert (at, nnz) == (16, len(values))
    if values or storage == BF16:
        assert (least_, width) == (least, WIDTH["exponent", storage] + bits)
    assert bool(t.saved[1][1] < 0) == (bits == 8)
    assert torch.equal(quieten(bits_of(decompress(t))), quieten(expected_result(x, t)))


def test_patches_by_hand():
    """140 values of 1.5, but for 2^-9 as number 1 and 4 as number 2.

    Exponents from 0x76 to 0x81 would take 4 bits, 11 a value, which is 13 vectors of 16 bytes. The
    base is the exponent of 4 less 7 3/8 octaves: 0x4080 - 0x3b0 = 0x3cd0, so 0x79. What is above
    0x79 << 7 = 0x3c80 are 0x340, -0x180 and 0x400, of which the last two lack bits: in 10 bits they
    are 0x280 and 0, and modulo 2^15 they have 0x1f and 1 above those.
    """
    bits = torch.zeros(256, dtype=torch.int32)
    k = torch.arange(140)
    bits[8 * (k % 32) + k // 32] = 0x3FC0
    bits[8], bits[16] = 0x3B00, 0x4080
    buffer = ActivationBuffer(192, "cpu")
    t = compress(bf16(bits), buffer, "exponent")
    assert int(buffer.used_bytes()) == 192
    # 140 values take 10.9 vectors, so the tile has one more: 9 + 1
    head = 0xA79_08C_0000000000
    assert t.saved[1].tolist() == [head - (1 << 64), 0]
    # 1101000000 0000000000 1010000000 1101000000, then four times 1101000000 again and again
    values = bytes.fromhex("40 03 0a 00 d0" + 34 * "40 03 0d 34 d0")
    stored = bytes(buffer.arena.tolist())
    assert stored[:175] == values  # another byte makes it a multiple of 16 bits; it is undefined
    # 11111 00000000001, 00001 00000000010
    patches = bytes.fromhex("01 f8"), bytes.fromhex("02 08")
    assert stored[176:] == b"".join(patches) + bytes(12)
    assert torch.equal(bits_of(decompress(t)), bits)
    stored = values + b"\xff" + patches[1] + patches[0] + bytes(12)  # they may be in any order
    buffer.arena.copy_(torch.tensor(list(stored)))
    assert torch.equal(bits_of(decompress(t)), bits)


def tile_of(values):
    """One tile with these values in order, scattered among -1."""
    rank_order = torch.full((TILE,), 0xBF80, dtype=torch.int32)  # (group, word, lane)
    generator = torch.Generator().manual_seed(0)
    at = torch.randperm(TILE, generator=generator)[: len(values)].sort().values
    rank_order[at] = torch.as_tensor(values, dtype=torch.int32)
    return bf16(rank_order.view(8, 8, 32).transpose(1, 2).flatten())


# The large values of 410 have exponents 0x79 to 0x80, for which the base is 0x79. Small ones below
# them are patched, at most so many that they take 6 vectors, behind the values' 4100 bits, of
# which the 257th half is the last one of vector 33: 7 + 6 * 8 = 55 patches.
@pytest.mark.parametrize(
    ("small", "value", "head"),
    [
        (0, 0x0001, 0x379),  # 3 bits
        (1, 0x0001, 0x979),
        (7, 0x3C7F, 0x979),
        (8, 0x0001, 0xA79),  # one vector more
        (16, 0x3C7F, 0xB79),
        (55, 0x0001, 0xF79),
        (56, 0x0001, 0x800),  # too many
        (1, 0x40A0, 0x979),  # a larger one, with 0x81
        (1, 0x7F80, 0x879),  # +inf, a NaN with the sign: the base is far above the others
        (1, 0xFFC1, 0x879),
    ],
)
def test_patches_of_tiles(small, value, head):
    values = [0x3C80 + 0x80 * (i % 8) + 0x7F for i in range(410)]
    for i in range(small):
        values[7 * i] = value
    x = torch.cat([tile_of(values), tile_of([0x3F80]), tile_of([])])
    t = compress(x, codec="exponent")
    exponents = int(t.saved[1][0]) >> 52 & 0xFFF
    assert f"{exponents:03x}" == f"{head:03x}"
    expected = expected_values(x, "exponent", BF16)
    assert torch.equal(bits_of(decompress(t)), expected)
    assert torch.equal(decode(len(x), t.saved, t.buffer.arena, "exponent", BF16), expected)


# -----------------------------------------------------------------------------
# Size


# 0 and 1: no padding at all, exact; .2: the docstring's example; .01: padding weighs most there
@pytest.mark.parametrize("density", [0, 0.01, 0.2, 0.5, 1])
@every_format
def test_size_formula(density, codec, storage):
    tiles = 512
    x = random_input(tiles * TILE, density)
    if codec == "exponent":  # tiles of widths 0 to 8
        bits = bits_of(x)
        spread = torch.arange(tiles).repeat_interleave(TILE) % 9
        exponent = (bits >> 7 & 0xFF).clamp(max=0xFE) % (1 << spread)
        x = bf16(torch.where(bits & 0x7FFF > 0, bits & 0x807F | exponent << 7 | 1, bits))
    t = compress(x, codec=codec, storage=storage)  # makes a buffer of exactly the needed size
    assert t.buffer.capacity_bytes == int(t.buffer.used_bytes())
    assert len(t.saved) == (2 if storage == BF16 else 3)
    # what belongs to tiles: not the generation, nor the scale
    stored = 8 * (t.saved[0].nbytes + t.saved[1].nbytes - 8 + t.buffer.capacity_bytes)
    heads = [parse_head(head, codec, storage) for head in t.saved[1][:-1]]
    nnz = sum(head[1] for head in heads)
    assert nnz == int(is_stored(bits_of(x)).sum())
    mean = None
    if codec == "exponent":
        bits = sum(nnz * (width - WIDTH[codec, storage]) for _, nnz, _, width in heads)
        mean = bits / max(nnz, 1)
    formula = bits_per_element(nnz / x.numel(), codec, storage, mean)
    # A tile's padding is 0 to 127 bits in steps of the width's power of two, so 56 to 63.5 in the
    # mean for 60, with a standard deviation of 37; five of these on the mean. That asks for tiles
    # whose bits differ by about a vector; else it is any number of bits, 67.5 from 60 at most.
    width = WIDTH[codec, storage] + (mean or 0)
    spread = (TILE * density * (1 - density)) ** 0.5 * width
    tolerance = (4 + 5 * 37 / tiles**0.5 if spread > 64 else 67.5) / TILE
    tolerance *= 0 < density < 1
    assert abs(stored / x.numel() - formula) <= tolerance


def test_patches_make_half_normal_values_small():
    x = torch.randn(64 * TILE, generator=torch.Generator().manual_seed(0)).abs()
    x[torch.rand(len(x), generator=torch.Generator().manual_seed(1)) > 0.2] *= -1
    t = compress(x.bfloat16(), codec="exponent")
    assert 8 * t.buffer.capacity_bytes / int((x > 0).sum()) < 10.6  # 11.2 without patches


def test_size_examples_of_the_docstring():
    assert f"{bits_per_element(0.2):.2f}" == "4.26"
    assert f"{bits_per_element(0.2, 'sign'):.2f}" == "4.06"
    assert f"{bits_per_element(0.2, 'exponent', exponent_bits=10.6 - 7):.2f}" == "3.18"
    text = " ".join(bitsparse_kernels.__doc__.split())
    assert '"raw" takes 1 + 0.031 + 3.2 + 0.029 = 4.26 bits, "sign" 4.06' in text
    assert '"exponent" at 10.6 bits a value, patches included, 3.18' in text


@every_format
def test_size_limits(codec, storage):
    most = WIDTH[codec, storage] + (EXPONENT_BITS[storage] if codec == "exponent" else 0)
    assert bits_per_element(0, codec, storage) == 1 + 64 / TILE  # mask and head remain
    assert bits_per_element(1, codec, storage) == 1 + most + 64 / TILE
    if codec == "exponent":
        assert bits_per_element(1, codec, storage, 0) == 1 + WIDTH[codec, storage] + 64 / TILE


# 0 and 1 have no mask entropy; .5 has a bit; .1 is odd
@pytest.mark.parametrize("density", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("storage", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("exponents", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), None])
def test_optimal_bits_are_the_entropy(density, storage, exponents):
    """Against -sum(p log2 p) over every single outcome: not stored, or an exponent and mantissa."""
    count = 1 << EXPONENT_BITS[storage]
    mantissas = 1 << WIDTH["exponent", storage]
    given_ = None if exponents is None else -sum(p * math.log2(p) for p in exponents)
    outcomes = [1 - density]
    for p in exponents or [1 / count] * count:
        outcomes += [density * p / mantissas] * mantissas
    assert sum(outcomes) == pytest.approx(1)
    entropy = -sum(p * math.log2(p) for p in outcomes if p)
    # two ways to add up the same numbers: only float64's rounding is between them
    assert optimal_bits_per_element(density, storage, given_) == pytest.approx(entropy, abs=1e-9)


def test_optimal_bits_bound_what_is_stored():
    """A tensor of which everything is counted: no codec stores less than its entropy."""
    x = torch.randn(64 * TILE, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = bits_of(x)[is_stored(bits_of(x))]
    counts = Counter((bits >> 7).tolist()).values()
    entropy = -sum(c / len(bits) * math.log2(c / len(bits)) for c in counts)
    bound = optimal_bits_per_element(len(bits) / len(x), BF16, entropy)
    sizes = []
    for codec in ("exponent", "sign", "raw"):
        t = compress(x, codec=codec)
        sizes.append(8 * (sum(s.nbytes for s in t.saved) + t.buffer.capacity_bytes) / len(x))
    assert bound < sizes[0] < sizes[1] < sizes[2]


# -----------------------------------------------------------------------------
# Round trips

SIZES = [
    *(0, 1),  # nothing, and the least
    *(255, 256, 257),  # around a group
    *(2047, 2048, 2049),  # around a tile
    3 * 2048 + 5,  # several tiles and a ragged end
]


def assert_round_trip(x, codec="raw", storage=BF16):
    before = x.clone()
    t = compress(x, codec=codec, storage=storage)
    y = decompress(t)
    assert torch.equal(bits_of(x), bits_of(before))  # the input is left alone
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    result, expected = bits_of(y), expected_result(x, t)
    if storage != BF16:
        result, expected = quieten(result), quieten(expected)
        scale = t.saved[2]
        assert (scale.dtype, scale.shape) == (torch.float32, (1,))
        finite = bits_of(x)
        if bool(((finite > 0) & (finite < 0x7F80)).any()):
            wanted = max(largest_scale(x.flatten(), storage), 2.0**-126)
            assert abs(scale.item() / wanted - 1) < 2**-22  # rounded twice, in float32
        else:
            assert scale.item() == 1
    assert torch.equal(result, expected)
    nnz = int(is_stored(bits_of(x)).sum())
    assert int((t.saved[1][:-1] >> 40 & 0xFFF).sum()) == nnz


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("density", [0, 0.2, 0.5, 1])  # empty, trained, at initialization, full
@every_format
def test_round_trip(n, density, codec, storage):
    assert_round_trip(random_input(n, density), codec, storage)


# the ends of lanes, groups and tiles
@pytest.mark.parametrize("at", [0, 7, 8, 255, 256, 2047, 2048, 6148])
@pytest.mark.parametrize("codec", CODECS)
def test_round_trip_of_one_element(at, codec):
    bits = torch.full((3 * 2048 + 5,), 0xBF80)
    bits[at] = 0x3F80
    assert_round_trip(bf16(bits), codec)


# [] holds one element; [3, 0, 5] none; the others cross tiles inside a row and between rows
@pytest.mark.parametrize("shape", [(), (3, 0, 5), (7, 333), (5, 2048), (2, 3, 1000)])
@every_format
def test_round_trip_of_shapes(shape, codec, storage):
    n = torch.Size(shape).numel()
    assert_round_trip(random_input(n, 0.5).view(shape), codec, storage)


@every_format
def test_round_trip_of_every_bit_pattern(codec, storage):
    """All 65,536 of them: zeros, subnormals, normals, infinities and NaN of every payload."""
    assert_round_trip(bf16(torch.arange(0x10000)), codec, storage)


@pytest.mark.parametrize("storage", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [0, 1, 16, 100, 200, 254])  # of the largest element
def test_fp8_at_every_scale(storage, exponent):
    """Every bf16 up to there: at 0 and 1, the scale stays a normal float32, so its inverse is."""
    bits = torch.arange(exponent << 7, (exponent << 7) + 0x80)
    below = torch.arange(max(0, (exponent << 7) - 0x1000), exponent << 7)
    assert_round_trip(bf16(torch.cat([below, bits])), "raw", storage)


@pytest.mark.parametrize("bits", SPECIAL)
@every_format
def test_round_trip_of_special_values(bits, codec, storage):
    """Alone among zeros, and in a full tile of itself."""
    x = torch.zeros(300, dtype=torch.int32)
    x[100] = bits
    assert_round_trip(bf16(x), codec, storage)
    assert_round_trip(bf16(torch.full((2049,), bits)), codec, storage)


@pytest.mark.parametrize("codec", CODECS)
def test_equals_torch_relu(codec):
    """Where torch.relu gives no NaN, the bits are its bits; −0 comes back as +0."""
    x = bf16([bits for bits in range(0x10000) if not bits & 0x7FFF > 0x7F80])
    assert torch.equal(bits_of(decompress(compress(x, codec=codec))), bits_of(torch.relu(x) + 0.0))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    n=st.integers(0, 4500),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    format_=st.sampled_from(FORMATS + 3 * [("exponent", BF16)]),
    clear=st.integers(0, 8),
    rare=st.sampled_from((1, 0.1, 0.02, 0.003)),
    specials=st.lists(st.tuples(st.integers(0, 4499), st.sampled_from(SPECIAL)), max_size=5),
)
@example(n=0, density=0, seed=0, format_=("exponent", E4M3), clear=0, rare=1, specials=[])
@example(
    n=4500, density=0.2, seed=0, format_=("exponent", BF16), clear=5, rare=0.02, specials=[]
)  # patches
def test_reference_of_any_input(n, density, seed, format_, clear, rare, specials):
    """The independent decoder's reading of every element, the reference's own, and the bytes.

    clear: so many bits of the exponents are 0, for widths of all kinds.
    rare: the share of elements of which this is so; of the others these bits are 1, but the first.
    """
    bits = bits_of(random_input(n, density, seed))
    high = (1 << clear) - 1 << 15 - clear
    cleared = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < rare
    others = torch.where(bits & 0x7FFF > 0, (bits | high) & ~0x4000, bits)
    bits = torch.where(cleared, bits & ~high, others)
    for i, value in specials:
        if i < n:
            bits[i] = value
    x = bf16(bits)
    buffer = ActivationBuffer(2 * n + 16 * (n // TILE + 1), "cpu")
    saved = compress_reference(x.clone(), buffer, 0, *format_)
    expected = expected_values(x, *format_, *[scale[0] for scale in saved[2:]])
    assert torch.equal(decode(n, saved, buffer.arena, *format_), expected.int())
    r, stored = expand_reference(saved, buffer, n, *format_)
    assert torch.equal(stored, is_stored(bits))
    result = bits_of(r.bfloat16())
    t = BitSparseTensor(saved, buffer, x.shape, *format_)
    assert torch.equal(quieten(result), quieten(expected_result(x, t)))
    at = 0
    for tile, first in enumerate(range(0, n, TILE)):
        codes = expected[first : first + TILE][stored[first : first + TILE]].tolist()
        width = WIDTH[format_]
        least = 0
        if format_[0] == "exponent" and codes:
            least = min(codes) >> width
            width += ((max(codes) >> width) - least).bit_length()
        size = 16 * math.ceil(len(codes) * width / 128)
        if format_ == ("exponent", BF16) and codes:
            base = max(min(max(codes), 0x7F80) - 0x3B0, 0) >> 7
            patches = sum((code - (base << 7)) % 2**15 >= 2**10 for code in codes)
            vectors = math.ceil((math.ceil(len(codes) * 10 / 16) + patches) / 8)
            if 16 * vectors < size and vectors - math.ceil(len(codes) * 10 / 128) <= 6:
                least, width, size = base, 10, 16 * vectors
        assert parse_head(saved[1][tile], *format_) == (at, len(codes), least, width)
        assert tile_bytes(saved[1][tile], *format_) == size
        at += size
    assert int(buffer.used_bytes()) == at


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(FORMATS)), max_size=5),
    capacity=st.integers(0, 6000),
    seed=st.integers(0, 2**31),
)
def test_reference_of_any_capacity(sizes, capacity, seed):
    """Several tensors in one buffer: each tile comes back whole or as zeros, by its head alone."""
    buffer = ActivationBuffer(capacity, "cpu")
    inputs = [random_input(n, 0.5, seed + i) for i, (n, _) in enumerate(sizes)]
    stored = [compress(x, buffer, *f) for x, (_, f) in zip(inputs, sizes, strict=True)]
    reserved = 0
    for x, t in zip(inputs, stored, strict=True):
        y = bits_of(decompress(t))
        expected = expected_result(x, t)
        for tile, first in enumerate(range(0, len(x), TILE)):
            at, nnz, *_ = parse_head(t.saved[1][tile], t.codec, t.storage)
            assert at == reserved
            assert nnz == int(is_stored(bits_of(x[first : first + TILE])).sum())
            reserved += tile_bytes(t.saved[1][tile], t.codec, t.storage)
            part = expected[first : first + TILE]
            if reserved > buffer.capacity_bytes:
                part = torch.zeros_like(part)
            assert torch.equal(y[first : first + TILE], part)
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"codec": "zip"}, "codec: expected one of raw, sign, exponent, received 'zip'"),
        (
            {"storage": torch.float16},
            "storage: expected one of torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, "
            "received torch.float16",
        ),
    ],
)
def test_formats_that_there_are_not(options, sentence):
    refused(lambda: compress(torch.zeros(4, dtype=torch.bfloat16), **options), sentence)
    buffer = ActivationBuffer(16, "cpu")
    for mlp in (relu2_mlp, relu_mlp):
        refused(lambda mlp=mlp: mlp(**mlp_arguments(), buffer=buffer, **options), sentence)


@pytest.mark.parametrize("name", ["layers", "stripes"])
@pytest.mark.parametrize("number", [0, -1])
def test_buffer_refuses_less_than_one(name, number):
    refused(
        lambda: ActivationBuffer(16, "cpu", **{name: number}),
        f"{name}: expected 1 or more, received {number}",
    )


@pytest.mark.parametrize("mlp", [relu2_mlp, relu_mlp])
@pytest.mark.parametrize("name", ["w1", "w2", "b1", "b2"])
def test_mlp_refuses_another_device(mlp, name):
    arguments = mlp_arguments()
    arguments[name] = arguments[name].to("meta")
    refused(
        lambda: mlp(**arguments, buffer=ActivationBuffer(4096, "cpu")),
        f"{name}: expected device cpu, that of x, received meta",
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
            {"norm_weight": torch.ones(16).bfloat16()},
            "norm_eps: norm_weight expects a number, received None",
        ),
        ({"norm_eps": -1.0}, "norm_eps: expected 0 or more, received -1.0"),
        (
            {"norm_eps": 1e-6, "norm_weight": torch.ones(32).bfloat16()},
            "norm_weight: expected shape [16], received [32]",
        ),
        (
            {"norm_eps": 1e-6, "norm_weight": torch.ones(16)},
            "norm_weight: expected dtype torch.bfloat16, received torch.float32",
        ),
        (
            {"norm_eps": 1e-6, "norm_weight": torch.ones(16, device="meta").bfloat16()},
            "norm_weight: expected device cpu, that of x, received meta",
        ),
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
