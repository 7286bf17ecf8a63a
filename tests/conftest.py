"""What several tests need.

What:  write_shard, a shard by hand; make_text_folder, a folder of train and val shards to train on;
       interpreter, to run Triton kernels on a CPU.
Needs: numpy and torch.
Run:   python -m pytest
"""

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

# Where pytest was started in a script's background, SIGINT is ignored, also by what tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _write_shard(path, tokens, magic=20240520, version=1, count=None, tail=b""):
    """The speedrun's format, written without the code under test; count: what the header claims."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes() + tail)
    return path


@pytest.fixture(scope="session")
def write_shard():
    return _write_shard


@pytest.fixture(scope="session")
def make_text_folder(tmp_path_factory):
    """make_text_folder(bos): a folder with two train shards and a val shard of learnable text.

    Documents of 20 to 600 tokens, below and above a microbatch; a few tokens are frequent, and a
    token makes its successor likely.
    """

    def make(bos):
        folder = tmp_path_factory.mktemp("text")
        generator = np.random.default_rng(0)
        for name, n in (("train_000001", 9000), ("train_000002", 9000), ("val_000000", 1500)):
            tokens = generator.zipf(1.5, n).clip(1, 100)
            follows = generator.random(n) < 0.5
            tokens[1:][follows[1:]] = (tokens[:-1][follows[1:]] * 7 + 3) % 100
            at = 0
            while at < n:
                tokens[at] = bos
                at += int(generator.integers(20, 600))
            _write_shard(folder / f"fineweb_{name}.bin", tokens)
        return folder

    return make


@pytest.fixture(scope="session")
def interpreter():
    """call(f, *arguments): f's result from a process whose kernels Triton interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
            patch.delenv("TRITON_INTERPRET")
            yield lambda f, *arguments: pool.submit(f, *arguments).result()
