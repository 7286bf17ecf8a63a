"""Tokenises text of your own into shards that train_gpt.py reads; defines the shard format.

    python data/fineweb.py books/ --dir data/books     # each .txt, .md, .jsonl, .parquet below it
    python data/fineweb.py corpus.jsonl --field content
    python data/fineweb.py --dataset HuggingFaceFW/fineweb:sample-10BT      # NAME or NAME:CONFIG

Documents: a .txt or .md file is one document, a line of .jsonl or a row of .parquet (needs pyarrow)
or of the train split of a dataset (needs datasets) is one, its text in --field. Files come in the
order of their paths. Documents of nothing but white space are left out. Bytes that are not UTF-8
become U+FFFD, and the documents that had some are counted at the end.

Shard: 256 int32 [20240520, 1, n_tokens, 0, ...], then n_tokens uint16 GPT-2 tokens, all little
endian; every document begins with token 50256. A shard holds whole documents: it ends before the
document that would bring it above --shard-tokens, and only a document longer than that makes a
longer shard. Written to --dir:
    fineweb_val_000000.bin        the first documents, up to the one that reaches --val-tokens,
                                  so that validation never depends on the number of shards
    fineweb_train_000001.bin ...  all others
    source.json                   the settings, and a sha256 over the documents of each shard

The bytes depend on the text, --shard-tokens and --val-tokens, never on the number of processes.
A shard appears under its name only when it is complete. A stopped run goes on with the same
command: it reads the text again, makes sure by source.json that the finished shards hold it, and
tokenises the rest.

Without a network, TIKTOKEN_CACHE_DIR must name a folder that has GPT-2's tokenizer files;
data/sample.py writes one, data/sample/tokenizer.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

MAGIC, VERSION = 20240520, 1
HEADER_INTS, HEADER_BYTES = 256, 1024
BOS = 50256  # GPT-2's <|endoftext|>, which opens a document here, and its last token
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
VAL = "fineweb_val_000000.bin"
STATE = "source.json"
BATCH_CHARACTERS = 1 << 19  # a task of about 0.1 s, so that passing it on costs nothing beside it


# -------------------------------------------------------------------------------
# Shards

@dataclass(frozen=True)
class Shard:
    """What a valid shard holds."""

    tokens: int
    documents: int
    largest_token: int


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes tokens as a shard, which appears under its name only when it is complete."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(header)
            file.write(tokens.astype("<u2", copy=False))
        os.replace(part, path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def count_tokens(path: Path) -> int:
    """The tokens of a shard, by its header; a ValueError where header and size do not agree."""
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, fewer than a shard's header ({HEADER_BYTES})")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    if magic != MAGIC:
        raise ValueError(f"{path} begins with {magic}, not with a shard's magic {MAGIC}")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, expected {VERSION}")
    if count < 1:
        raise ValueError(f"{path} has {count} tokens by its header, expected at least 1")
    if size != (expected := HEADER_BYTES + 2 * count):
        raise ValueError(
            f"{path} has {size:,} bytes, but {expected:,} by its header ({count:,} tokens)"
        )
    return count


def inspect_shard(path: Path) -> Shard:
    """Reads a whole shard; a ValueError says what is wrong with it."""
    count = count_tokens(path)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=count)
    if (largest := int(tokens.max())) > BOS:
        where = int(np.argmax(tokens > BOS))
        raise ValueError(
            f"{path} has token {int(tokens[where])} at position {where:,}; GPT-2's last is {BOS}"
        )
    if (documents := int(np.count_nonzero(tokens == BOS))) == 0:
        raise ValueError(f"{path} has no token {BOS}, so no document begins in it")
    return Shard(count, documents, largest)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Makes directory and keeps other runs out of it; a ValueError if one is in it already."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {directory}; wait for its end") from None
        except OSError:
            pass  # a file system without locks on directories (NFS)
        yield
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------
# Documents

class Documents:
    """The non-empty texts of a source in their fixed order; notes those that were not UTF-8."""

    def __init__(self, source: Path | None, dataset: str | None, field: str):
        self.field = field
        self.not_utf8: list[str] = []
        self.empty = 0
        if dataset is not None:
            self.texts = self._read_dataset(dataset)
        else:
            self.texts = self._read_files(self._list_files(source))

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            if text and not text.isspace():
                yield text
            else:
                self.empty += 1

    @staticmethod
    def _list_files(source: Path) -> list[Path]:
        if not source.exists():
            raise ValueError(f"{source} does not exist; for a dataset of the hub, use --dataset")
        if source.is_file():
            files = [source] if source.suffix in SUFFIXES else []
        else:
            files = [p for p in source.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        if not files:
            raise ValueError(f"{source} has no text: expected {', '.join(SUFFIXES)}")
        return sorted(files, key=lambda path: path.as_posix())

    def _read_files(self, files: list[Path]) -> Iterator[str]:
        for path in files:
            if path.suffix == ".jsonl":
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip():
                            yield self._parse_line(line, f"{path}:{number}")
            elif path.suffix == ".parquet":
                yield from self._read_parquet(path)
            else:
                yield self._decode(path.read_bytes(), str(path))

    def _decode(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            self.not_utf8.append(where)
            return raw.decode("utf-8-sig", errors="replace")

    def _parse_line(self, line: bytes, where: str) -> str:
        try:
            row = json.loads(self._decode(line, where))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error}); mend or remove that line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} is a JSON {type(row).__name__}, expected an object")
        return self._pick(row, where)

    def _pick(self, row: dict, where: str) -> str:
        self._check_field(row, where)
        text = row[self.field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: field '{self.field}' is a {type(text).__name__}, expected a string"
            )
        return text

    def _check_field(self, names, where: str) -> None:
        if self.field not in names:
            raise ValueError(
                f"{where} has no field '{self.field}'; choose by --field one of {', '.join(names)}"
            )

    def _read_parquet(self, path: Path) -> Iterator[str]:
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
        try:
            table = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} cannot be read as parquet ({first_line(error)})") from None
        self._check_field(table.schema_arrow.names, str(path))
        for batch in table.iter_batches(columns=[self.field]):
            for row in batch.to_pylist():
                yield self._pick(row, str(path))

    def _read_dataset(self, dataset: str) -> Iterator[str]:
        try:
            import datasets
        except ImportError:
            raise ValueError(f"--dataset {dataset} needs datasets: pip install datasets") from None
        name, _, config = dataset.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train")
        except Exception as error:  # of no common base: network, names, configurations, formats
            raise ValueError(f"dataset {dataset} cannot be had: {first_line(error)}") from None
        for number, row in enumerate(rows):
            yield self._pick(row, f"row {number} of {dataset}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -------------------------------------------------------------------------------
# Tokens

def text_digest(text: str) -> bytes:
    """The sha256 of a text; a lone surrogate, which JSON can hold, counts as itself."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()


def encode_batch(texts: list[str]) -> list[tuple[bytes, np.ndarray]]:
    """For each document its text's digest and its tokens, BOS first."""
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    return [(text_digest(t), np.array([BOS, *encode(t)], dtype="<u2")) for t in texts]


def start_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent is gone, even killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Consecutive texts in lists of about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_documents(texts: Iterator[str], processes: int) -> Iterator[tuple[bytes, np.ndarray]]:
    """encode_batch over all texts, in their order, with a bounded number of them in flight."""
    # Spawned, not forked: a forked worker inherits what would keep it from seeing its parent's end.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=start_worker) as pool:
        pending = deque()
        for batch in batches(texts):
            pending.append(pool.submit(encode_batch, batch))
            if len(pending) > 4 * processes:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


# -------------------------------------------------------------------------------
# Build

class Build:
    """The shards of one folder: what source.json says of them, and the writing of more."""

    _other_folder = "name another --dir or empty this one"

    def __init__(self, directory: Path, shard_tokens: int, val_tokens: int):
        self.directory, self.shard_tokens, self.val_tokens = directory, shard_tokens, val_tokens
        self.state = {
            "shard_tokens": shard_tokens, "val_tokens": val_tokens, "complete": False, "shards": []
        }
        path = directory / STATE
        if path.exists():
            try:
                found = json.loads(path.read_bytes())
                same = all(found[k] == self.state[k] for k in ("shard_tokens", "val_tokens"))
                names = {shard["file"] for shard in found["shards"]}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} is damaged; {self._other_folder}") from None
            if not same:
                raise ValueError(
                    f"{directory} was begun with --shard-tokens {found['shard_tokens']} "
                    f"--val-tokens {found['val_tokens']}; give these, or {self._other_folder}"
                )
            self.state = found
        else:
            names = set()
        if foreign := sorted(p.name for p in directory.glob("*.bin") if p.name not in names):
            raise ValueError(
                f"{directory / foreign[0]} was not made by this command; {self._other_folder}"
            )

    def keep_finished(self, texts: Iterator[str]) -> None:
        """Keeps the finished shards up to the first damaged one; takes their documents from texts.

        A ValueError if they hold other documents than these.
        """
        shards, kept = self.state["shards"], 0
        for shard in shards:
            try:
                found = inspect_shard(self.directory / shard["file"])
            except FileNotFoundError:
                break
            except ValueError as error:
                print(f"{error}: made again")
                break
            if found.documents != shard["documents"]:
                break
            self._check_documents(shard, texts)
            kept += 1
        if kept < len(shards):
            self.state["complete"] = False
            for shard in shards[kept:]:
                (self.directory / shard["file"]).unlink(missing_ok=True)
            del shards[kept:]
            self._save()
        elif self.state["complete"] and next(texts, None) is not None:
            raise ValueError(
                f"the text has more documents than the shards in {self.directory}, which were "
                f"complete; {self._other_folder}"
            )

    def _check_documents(self, shard: dict, texts: Iterator[str]) -> None:
        digest = hashlib.sha256()
        for _, text in zip(range(shard["documents"]), texts, strict=False):
            digest.update(text_digest(text))
        if digest.hexdigest() != shard["sha256"]:
            raise ValueError(
                f"{self.directory / shard['file']} was made of other text; {self._other_folder}"
            )

    def write(self, documents: Iterator[tuple[bytes, np.ndarray]]) -> None:
        """Writes the documents to shards, from the first shard that is not there yet."""
        start, total = time.perf_counter(), 0
        digests, parts, size = [], [], 0

        def finish_shard():
            shards = self.state["shards"]
            train = len(shards) + (0 if self.val_tokens else 1)
            name = VAL if train == 0 else f"fineweb_train_{train:06d}.bin"
            digest = hashlib.sha256(b"".join(digests)).hexdigest()
            shards.append({"file": name, "documents": len(digests), "sha256": digest})
            # Before the shard: one without an entry would be taken for somebody else's.
            self._save()
            write_shard(self.directory / name, np.concatenate(parts))
            seconds = time.perf_counter() - start
            bar.write(f"{self.directory / name}: {size:,} tokens, {len(digests):,} documents, "
                      f"{total / seconds:,.0f} tokens/s so far")

        # Without a terminal (disable=None) the line of each shard is the progress.
        with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
            for digest, tokens in documents:
                in_val = self.val_tokens and not self.state["shards"]
                if size and not in_val and size + tokens.size > self.shard_tokens:
                    finish_shard()
                    digests, parts, size = [], [], 0
                digests.append(digest)
                parts.append(tokens)
                size += tokens.size
                total += tokens.size
                bar.update(tokens.size)
                if in_val and size >= self.val_tokens:
                    finish_shard()
                    digests, parts, size = [], [], 0
            if self.val_tokens and not self.state["shards"]:
                raise ValueError(
                    f"the text has {size:,} tokens, fewer than the {self.val_tokens:,} of the val "
                    "split; give a smaller --val-tokens or more text"
                )
            if size:
                finish_shard()
        if len(self.state["shards"]) == (1 if self.val_tokens else 0):
            raise ValueError(
                "the val split took all of the text and left nothing to train on; "
                "give a smaller --val-tokens or more text"
            )
        self.state["complete"] = True
        self._save()
        seconds = time.perf_counter() - start
        print(f"{total:,} tokens in {seconds:.1f} s: {total / seconds:,.0f} tokens/s")

    def _save(self) -> None:
        part = self.directory / f".{STATE}.part"
        part.write_text(json.dumps(self.state, indent=1) + "\n")
        os.replace(part, self.directory / STATE)


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""

    def at_least(minimum: int):
        def parse(text: str) -> int:
            if not text.isdecimal() or int(text) < minimum:
                raise argparse.ArgumentTypeError(f"expected a number from {minimum}, got {text}")
            return int(text)

        return parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", type=Path, metavar="PATH",
                        help=f"a file or folder of {', '.join(SUFFIXES)}")
    source.add_argument("--dataset", metavar="NAME[:CONFIG]",
                        help="the train split of a dataset of the Hugging Face hub")
    parser.add_argument("--field", default="text",
                        help="where .jsonl, .parquet and datasets have it (default: %(default)s)")
    parser.add_argument("--dir", type=Path,
                        default=Path(os.path.relpath(Path(__file__).parent / "own")),
                        help="where the shards go (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=at_least(1), default=100_000_000,
                        help="most tokens in a train shard (default: %(default)s)")
    parser.add_argument("--val-tokens", type=at_least(0), default=1 << 20,
                        help="fewest tokens in the val shard, 0 for none (default: %(default)s)")
    parser.add_argument("--processes", type=at_least(1), default=len(os.sched_getaffinity(0)),
                        help="that tokenise (default: the %(default)s cores)")
    return parser.parse_args()


def main() -> None:
    """Tokenises what is not there yet."""
    arguments = parse_arguments()
    try:
        documents = Documents(arguments.source, arguments.dataset, arguments.field)
        try:
            tiktoken.get_encoding("gpt2")
        except Exception as error:  # of no common base: network, cache, hash
            raise ValueError(
                f"GPT-2's tokenizer files cannot be had ({first_line(error)}); connect to the "
                "network, or run python data/sample.py and set "
                "TIKTOKEN_CACHE_DIR=data/sample/tokenizer"
            ) from None
        with locked(arguments.dir):
            build = Build(arguments.dir, arguments.shard_tokens, arguments.val_tokens)
            texts = iter(documents)
            build.keep_finished(texts)
            if kept := len(build.state["shards"]):
                print(f"{arguments.dir}: {kept} finished shards are kept")
            if not build.state["complete"]:
                build.write(encode_documents(texts, arguments.processes))
        if documents.empty:
            print(f"{documents.empty:,} empty documents were left out")
        if damaged := documents.not_utf8:
            print(f"{len(damaged):,} documents were not all UTF-8, first {damaged[0]}: "
                  "their other bytes became U+FFFD")
    except BrokenProcessPool:
        sys.exit("data/fineweb.py: a process that tokenised was killed (memory?); give fewer "
                 "--processes and run again: finished shards are kept")
    except (OSError, ValueError) as error:
        sys.exit(f"data/fineweb.py: {error}")
    except KeyboardInterrupt:
        print("data/fineweb.py: interrupted; the same command goes on from the finished shards",
              file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
