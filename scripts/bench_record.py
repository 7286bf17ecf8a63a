"""What all benches do alike: the options --json, --out and --from, and the record that they write.

    python scripts/bench_vram.py ... --json FILE         # measures: the numbers, into a file
    python scripts/bench_vram.py --from FILE --out records/YYYY-MM-DD_Name    # a record of them

So one machine measures and another, which has the history and matplotlib, makes the record; --out
beside a measurement does both at once, and --from with a record's summary.json makes its page
again. The commit is looked up whenever numbers are written, by the sha256 of the sources that
measured.
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import triton
from new_record import NO_COMMIT, ROOT, find_commit
from update_tables import CLAIMS, REQUIRED

OWN = ("--json", "--out")  # options that change no number


def stop(sentence: str) -> None:
    sys.exit(f"{Path(sys.argv[0]).name}: {sentence}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="record's folder, records/YYYY-MM-DD_Name")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE",
                        help="measure nothing: take the numbers of an earlier --json")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace,
                  others: Iterable[str] = (), beside: Iterable[str] = (),
                  pictures: bool = False) -> None:
    """Stops where the record could not be written: before minutes of measuring.

    others: words that the parser did not know. beside: options that --from allows.
    """
    allowed = {"json", "out", "earlier", *beside}
    words = [f"--{name.replace('_', '-')}" for name, value in vars(options).items()
             if value != parser.get_default(name) and name not in allowed]
    if options.earlier and (words := [*words, *others]):
        stop(f"--from measures nothing: leave out {' '.join(words)}")
    if options.out:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d_[\w.-]+", options.out.resolve().name):
            stop(f"--out {options.out}: expected a folder named YYYY-MM-DD_Name")
        if pictures and not importlib.util.find_spec("matplotlib"):
            stop("--out draws pictures, which needs matplotlib; --json FILE takes the numbers to "
                 "where it is")
    if options.earlier:
        return
    if options.out and (options.out / "summary.json").exists():
        stop(f"--out {options.out} is a record already; choose another name, or remove it")
    try:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}")


def begin(sources: Iterable[str]) -> dict:
    """The fields that all records have. sources: the files that decide the numbers."""
    words = [word for before, word in zip(sys.argv, sys.argv[1:], strict=False)
             if before not in OWN and word.partition("=")[0] not in OWN]
    cuda = torch.cuda.is_available()
    return {"kind": "bench", "name": "", "date": datetime.date.today().isoformat(), "claim": "",
            "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *words]),
            "commit": NO_COMMIT, "sources_sha256": {
                name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in sources},
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "torch": torch.__version__, "triton": triton.__version__, "measures": {}}


def read(path: Path) -> dict:
    """The numbers that an earlier run of the same script has written."""
    script = Path(sys.argv[0]).name
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        stop(f"--from {path} cannot be read: {error.strerror}")
    except ValueError as error:
        stop(f"--from {path}: expected a file that --json has written, received no JSON: {error}")
    needed = {*REQUIRED["bench"], "sources_sha256"}
    if not isinstance(record, dict) or (lacking := needed - record.keys()):
        stop(f"--from {path}: expected a file that --json has written, received one without "
             f"{', '.join(sorted(lacking)) if isinstance(record, dict) else 'any field'}")
    if record["command"].split()[1:2] != [f"scripts/{script}"]:
        stop(f"--from {path}: expected numbers of {script}, received those of {record['command']}")
    return record


def write(record: dict, options: argparse.Namespace, page: Callable[[dict], str],
          draw: Callable[[dict], dict] = lambda record: {}) -> None:
    """Fills in the commit, and --out's name and date; writes --json's file and --out's folder.

    page(record) is its README.md, draw(record) its figures by name.
    """
    if (commit := find_commit(record["sources_sha256"])) != NO_COMMIT:
        record["commit"] = commit
    if options.out:
        record["name"] = options.out.resolve().name
        record["date"] = record["name"][:10]
    text = json.dumps(record, indent=1) + "\n"
    try:
        if options.json:
            options.json.write_text(text)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "summary.json").write_text(text)
            (options.out / "README.md").write_text(page(record))
            for name, figure in draw(record).items():
                figure.savefig(options.out / f"{name}.png", dpi=160)
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}")


# -----------------------------------------------------------------------------
# Page


def head(record: dict, *facts: str, gpus: int = 1) -> list[str]:
    """The page's first lines, with the claims of the README's table that the record answers."""
    sources = f"commit {record['commit']}" if record["commit"] != NO_COMMIT else \
        f"{NO_COMMIT}; summary.json has their sha256"
    measured = [(claim, record["measures"][claim.measure]) for claim in CLAIMS
                if claim.measure in record["measures"]]
    return [f"# {record['name'] or Path(sys.argv[0]).stem}", "", record["claim"], "", "```",
            record["command"], "```", "",
            f"- Hardware: {gpus} × {record['device']}; torch {record['torch']}, triton "
            f"{record['triton']}", f"- Sources: {sources}", f"- Date: {record['date']}",
            *(f"- {fact}" for fact in facts), "",
            *(f"- {claim.text}: {claim.show(value)}; {claim.verdict(value)}"
              for claim, value in measured), *[""] * bool(measured)]


def table(cells: list[list[str]]) -> list[str]:
    """Markdown that is also aligned for the eye; all columns but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.rjust(w) if i else c.ljust(w)
                               for i, (c, w) in enumerate(zip(line, widths, strict=True))) + " |"
             for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]
