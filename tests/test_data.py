"""The loader of train_gpt.py: shards refused by name, batches that lose and repeat nothing.

What:  every sentence of read_shards, TrainData and ValData; where microbatches begin, against a
       search token by token; epochs; the slots that each rank reads; the val tokens.
Needs: a CPU, hypothesis.
Run:   python -m pytest tests/test_data.py
"""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_gpt import BOS, MICROBATCHES, Config, TrainData, ValData, read_shards

MICROBATCH = 16  # tokens; parse_config asks for multiples of 128, the loader for none


def document(n, first=0):
    """BOS and n - 1 tokens that tell where they stand."""
    return np.append(BOS, np.arange(first, first + n - 1) % BOS)


def config(folder, **changes):
    return Config(**{"data": str(folder), "steps": 1, "microbatch_tokens": MICROBATCH} | changes)


# -----------------------------------------------------------------------------
# Shards that are refused


def test_shards_come_in_order_with_their_tokens(tmp_path, write_shard):
    for number in (10, 2, 1):
        write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", document(5, number))
    write_shard(tmp_path / "fineweb_val_000000.bin", document(7))
    shards = read_shards(str(tmp_path), "train")
    assert [s.tolist() for s in shards] == [document(5, n).tolist() for n in (1, 2, 10)]
    assert all(isinstance(s, np.memmap) and s.dtype == np.uint16 for s in shards)


def no_header(write, path):
    path.write_bytes(b"\0" * 600)


def odd_bytes(write, path):
    write(path, document(20), tail=b"\0")


def truncated(write, path):
    path.write_bytes(write(path, document(20)).read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda w, p: w(p, document(20), magic=20240521), r"no shard .* received \[20240521, 1\]"),
        # the byte order of another machine
        (lambda w, p: w(p, document(20), magic=0x28D63401), r"no shard .* received \[685126657, 1"),
        (lambda w, p: w(p, document(20), version=2), r"no shard .* received \[20240520, 2\]"),
        (no_header, r"no shard .* received \[0, 0\]"),
        (lambda w, p: p.touch(), r"no shard .* received \[\]"),
        (truncated, r"damaged: expected 1064 bytes for the 20 tokens .* received 1062"),
        (odd_bytes, r"damaged: expected 1064 bytes for the 20 tokens .* received 1065"),
        (lambda w, p: w(p, document(20), count=21), r"expected 1066 bytes .* received 1064"),
        (lambda w, p: w(p, document(20), count=19), r"expected 1062 bytes .* received 1064"),
        (lambda w, p: w(p, document(20), count=-1), r"expected 1022 bytes .* received 1064"),
        # 4 GiB of tokens: no 32-bit overflow makes the sizes agree
        (lambda w, p: w(p, [], count=2**31 - 1), r"expected 4294968318 bytes .* received 1024"),
    ],
    ids=["magic", "byte order", "version", "short header", "no bytes", "truncated", "odd bytes",
         "count too large", "count too small", "count negative", "count huge"],
)
def test_damaged_shard_is_named(tmp_path, write_shard, damage, complaint):
    write_shard(tmp_path / "fineweb_train_000001.bin", document(5))
    path = tmp_path / "fineweb_train_000002.bin"
    damage(write_shard, path)
    with pytest.raises(SystemExit, match=f"^train_gpt.py: {re.escape(str(path))}.*{complaint}"):
        read_shards(str(tmp_path), "train")


@pytest.mark.parametrize("folder", ["empty", "missing"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_folder_without_shards(tmp_path, folder, split):
    (tmp_path / "empty").mkdir()
    expected = rf"no fineweb_{split}_\*.bin in .*{folder}; fetch FineWeb .* data/sample.py"
    with pytest.raises(SystemExit, match=expected):
        read_shards(str(tmp_path / folder), split)


def test_too_few_batches_is_said_before_the_start(tmp_path, write_shard):
    # two batches a shard, and 15 microbatches that are one batch: tails are not used
    full = 2 * MICROBATCHES * MICROBATCH + 1
    write_shard(tmp_path / "fineweb_train_000001.bin", document(full))
    write_shard(tmp_path / "fineweb_train_000002.bin", document(full - 1))
    assert len(TrainData(config(tmp_path, steps=3)).batches) == 3
    with pytest.raises(SystemExit, match=r"has 3 batches of 8 x 16 tokens, 1 times .* is 4;"):
        TrainData(config(tmp_path, steps=4))
    assert len(TrainData(config(tmp_path, steps=6, epochs=2)).batches) == 3
    with pytest.raises(SystemExit, match=r"3 batches .* 2 times \(--epochs\), and --steps is 7"):
        TrainData(config(tmp_path, steps=7, epochs=2))


def test_too_few_val_tokens_is_said_before_the_start(tmp_path, write_shard):
    write_shard(tmp_path / "fineweb_val_000000.bin", document(64))
    with pytest.raises(SystemExit, match="has 64 val tokens, and --val-tokens 64 needs 65"):
        ValData(config(tmp_path, val_tokens=64, val_sequence=32))
    write_shard(tmp_path / "fineweb_val_000001.bin", [5])
    assert len(ValData(config(tmp_path, val_tokens=64, val_sequence=32))) == 2


# no token; none that opens a document; shorter than a microbatch and its last target
@pytest.mark.parametrize("useless", [[], list(range(1000)), document(MICROBATCH)])
def test_shard_without_a_microbatch_is_passed_over(tmp_path, write_shard, useless):
    write_shard(tmp_path / "fineweb_train_000001.bin", useless)
    with pytest.raises(SystemExit, match="has 0 batches"):
        TrainData(config(tmp_path))
    full = document(MICROBATCHES * MICROBATCH + 1)
    write_shard(tmp_path / "fineweb_train_000002.bin", full)
    write_shard(tmp_path / "fineweb_train_000003.bin", useless)
    data = TrainData(config(tmp_path, steps=2, epochs=2))
    assert data.batches == [(1, list(range(0, MICROBATCHES * MICROBATCH, MICROBATCH)))]


# -----------------------------------------------------------------------------
# Where microbatches begin


def starts_token_by_token(tokens, length):
    """The rule of TrainData's docstring, one token after the other."""
    starts, free = [], 0  # free: the first token after the last microbatch
    opened = False  # whether a document has been seen
    for at in range(len(tokens) - length):
        bos = tokens[at] == BOS
        opened |= bos
        goes_on = at == free and opened and BOS not in tokens[at: at + length]
        if at >= free and (bos or goes_on):
            starts.append(at)
            free = at + length
    return starts


@given(
    st.integers(0, 12),  # tokens before the first document
    st.lists(st.integers(1, 40), max_size=12),  # documents' lengths, around that of a microbatch
    st.sampled_from([1, 2, 7, 16]),
)
def test_starts(before, lengths, microbatch):
    tokens = np.concatenate([np.arange(before), *map(document, lengths)]).astype(np.uint16)
    data = TrainData.__new__(TrainData)  # without shards
    data.tokens = microbatch
    starts = data.find_starts(tokens)
    assert starts == starts_token_by_token(tokens.tolist(), microbatch)
    assert all(b - a >= microbatch for a, b in zip(starts, starts[1:], strict=False))
    for start in starts:
        assert start + microbatch < len(tokens)  # the last target exists
        part = tokens[start: start + microbatch]
        assert part[0] == BOS or BOS not in part
    # nothing is passed over but the ends of documents shorter than a microbatch
    for end, start in zip([s + microbatch for s in starts], starts[1:], strict=False):
        assert start - end < microbatch
        assert BOS not in tokens[end:start]


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=30), min_size=1, max_size=3))
def test_batches_use_no_token_twice(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("shards")
    for number, lengths in enumerate(shards):
        header = np.zeros(256, "<i4")
        tokens = np.concatenate([document(n, 1000 * i) for i, n in enumerate(lengths)])
        header[:3] = 20240520, 1, len(tokens)
        (folder / f"fineweb_train_{number:06d}.bin").write_bytes(
            header.tobytes() + tokens.astype("<u2").tobytes())
    data = TrainData.__new__(TrainData)
    try:
        data.__init__(config(folder, steps=100, epochs=100))
    except SystemExit:
        assert not data.batches
    used = [(shard, at) for shard, starts in data.batches
            for start in starts for at in range(start, start + MICROBATCH)]
    assert len(used) == len(set(used)) == len(data.batches) * MICROBATCHES * MICROBATCH
    assert used == sorted(used)  # in the order of the shards


def test_microbatch_has_its_tokens_and_the_last_target(tmp_path, write_shard):
    tokens = document(3 * MICROBATCHES * MICROBATCH)
    write_shard(tmp_path / "fineweb_train_000001.bin", tokens)
    data = TrainData(config(tmp_path, steps=5, epochs=3))
    assert len(data.batches) == 2  # of the third the last target is missing
    for step in range(5):
        for i in range(MICROBATCHES):
            at = (step % 2 * MICROBATCHES + i) * MICROBATCH
            batch = data.microbatch(step, i)
            assert batch.dtype == torch.int32
            assert batch.tolist() == tokens[at: at + MICROBATCH + 1].tolist()


def test_shards_that_no_step_needs_are_not_searched(tmp_path, write_shard):
    for number in (1, 2):
        write_shard(tmp_path / f"fineweb_train_{number:06d}.bin",
                    document(MICROBATCHES * MICROBATCH + 1))
    assert {shard for shard, _ in TrainData(config(tmp_path, steps=1)).batches} == {0}
    assert {shard for shard, _ in TrainData(config(tmp_path, steps=2)).batches} == {0, 1}


# -----------------------------------------------------------------------------
# Validation tokens


# one sequence; several; with tokens to spare; over the seam of two shards
@pytest.mark.parametrize(("val_tokens", "sequence"), [(32, 32), (96, 32), (64, 16)])
@pytest.mark.parametrize("cut", [None, 40])
def test_val_sequences_cover_the_first_tokens_once(
        tmp_path, write_shard, val_tokens, sequence, cut):
    tokens = document(120)
    if cut is None:
        write_shard(tmp_path / "fineweb_val_000000.bin", tokens)
    else:
        write_shard(tmp_path / "fineweb_val_000000.bin", tokens[:cut])
        write_shard(tmp_path / "fineweb_val_000001.bin", tokens[cut:])
    data = ValData(config(tmp_path, val_tokens=val_tokens, val_sequence=sequence))
    parts = [data[i] for i in range(len(data))]
    assert all(p.dtype == torch.int32 and len(p) == sequence + 1 for p in parts)
    assert torch.cat([p[:-1] for p in parts]).tolist() == tokens[:val_tokens].tolist()
    assert torch.cat([p[1:] for p in parts]).tolist() == tokens[1: val_tokens + 1].tolist()
