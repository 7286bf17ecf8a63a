"""Fills the tables that are made from records, in README.md and records/README.md.

    python scripts/update_tables.py            # writes them, after a record was added
    python scripts/update_tables.py --check    # writes nothing; exit 1 where one is not current

A table stands between <!-- begin NAME --> and <!-- end NAME -->: in README.md `vram` (the newest
record of bench_vram.py at a trained density), `comparison` (the newest bitsparse record on a GPU
against its baseline) and `reproduction` (each claim of the paper or target of ours, our command,
our number, and whether it holds), in records/README.md `records`.
Every number comes from a summary.json or a log; each summary.json is checked, those of training
runs against their logs.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path

from compare_records import TARGET_LOSS, LogReader, compare, load, shown, shown_loss, table
from new_record import NO_COMMIT, OWN, RUN_FIELDS

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = {  # fields of a summary.json, by its kind
    "training": ("name", "date", "claim", "command", "commit", "sources_sha256", "device",
                 "world_size", "torch", "triton", "mlp", "n", "val_loss_mean", "val_loss_std",
                 "target_loss", "p_below_target", "step_ms_median", "bytes_per_token", "peak_mib",
                 "config", "runs"),
    "bench": ("name", "date", "claim", "command", "commit", "device", "torch", "triton",
              "measures")}
PICTURES = "pictures"  # the one folder in records/ that is not a record
# Settings of the saving alone: runs that differ in these are the same training otherwise.
SAVING = ("mlp", "codec", "storage", "buffer_mib", "keep", *OWN)


@dataclass
class Claim:
    """A claim of the paper or a target of ours, and the measure of a record that answers it."""

    text: str
    measure: str
    show: Callable[[float], str]
    holds: Callable[[float], bool] | None  # None: the paper gives no number to hold

    def verdict(self, value: float) -> str:
        if self.holds is None:
            return "no number claimed"
        return "yes" if self.holds(value) else "**no**"


def differing(what: str) -> Callable[[float], str]:
    return lambda v: f"{v:,.0f} {what} differ"


def bits(v: float) -> str:
    return f"{v:.2f} bits a value"


def less(ratio: float) -> str:
    return f"{100 - 100 * ratio:.1f} % less"


def step_time(ratio: float) -> str:
    return f"{100 * ratio - 100:+.2f} % step time"


def is_zero(v: float) -> bool:
    return v == 0


def at_most(limit: float) -> Callable[[float], bool]:
    return lambda v: v <= limit


CLAIMS = [
    Claim("Lossless: training is bit-identical to uncompressed", "differing_values",
          differing("losses or weights"), is_zero),
    Claim("BF16 storage is lossless", "differing_bf16", differing("values"), is_zero),
    Claim("FP8 storage is lossless (of the FP8 value)", "differing_fp8", differing("values"),
          is_zero),
    Claim("Sign packing: 15 of 16 bits", "sign_bits_bf16", bits, at_most(15)),
    Claim("Sign packing: 7 of 8 bits", "sign_bits_fp8", bits, at_most(7)),
    Claim("Ours: at most 11.3 bits a value, on real activations", "exponent_bits_bf16", bits,
          at_most(11.3)),
    Claim("Size near the theoretical optimum", "bits_over_optimum",
          lambda v: f"{v:.3f} × the entropy bound", None),
    Claim("Modded-NanoGPT: 31 % less VRAM per token", "vram_ratio_modded_nanogpt", less,
          at_most(0.69)),
    Claim("Modded-NanoGPT: at most 1 % overhead", "step_ratio_modded_nanogpt", step_time,
          at_most(1.01)),
    Claim("Ours: half of eager's VRAM per token", "vram_ratio_modded_nanogpt", less, at_most(0.5)),
    Claim("Ours: 31 % less VRAM per token than --mlp dense", "vram_ratio_dense", less,
          at_most(0.69)),
    Claim("Ours: no slower than eager", "step_ratio_modded_nanogpt", step_time, at_most(1)),
    Claim("Ours: at most 1 % slower than --mlp dense", "step_ratio_dense", step_time,
          at_most(1.01)),
    Claim("Ours: a peak of at most 12 GiB", "peak_mib", lambda v: f"{v / 1024:.2f} GiB",
          at_most(12 * 1024)),
    Claim("Nemotron-H: 30 % less VRAM per token", "vram_ratio_nemotron_h", less, at_most(0.70)),
    Claim("Nemotron-H: at most 1 % overhead", "step_ratio_nemotron_h", step_time, at_most(1.01)),
    *(Claim(f"Ours: {kernel} at {least} % of the copy roofline", f"{name}_of_roofline",
            lambda v: f"{100 * v:.1f} %", lambda v, least=least: 100 * v >= least)
      for kernel, name, least in (("relu² + compress", "compress", 80), ("decode", "decode", 85),
                                  ("backward", "backward", 93))),
    Claim("Ours: codec exponent within 1.10 of raw's time", "exponent_over_raw",
          lambda v: f"{v:.3f} of raw's time", at_most(1.10)),
    Claim("No host synchronization", "host_synchronizations", lambda v: f"{v:.0f} in a step",
          is_zero),
]

# -----------------------------------------------------------------------------
# Records


def read_records(root: Path) -> list[dict]:
    """All records by day and name; a ValueError names the first that breaks the form."""
    folders = [f for f in sorted((root / "records").iterdir()) if f.is_dir() and f.name != PICTURES]
    return [read_record(folder) for folder in folders]


def read_record(folder: Path) -> dict:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d_[\w.-]+", folder.name):
        raise ValueError(f"{folder}: a record's folder is named YYYY-MM-DD_Name")
    for name in ("README.md", "summary.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: {name} is missing")
    path = folder / "summary.json"
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in REQUIRED:
        raise ValueError(f"{path}: kind: expected {' or '.join(REQUIRED)}, received {kind!r}")
    if missing := [key for key in REQUIRED[kind] if key not in record]:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    if record["name"] != folder.name or not folder.name.startswith(record["date"]):
        raise ValueError(f"{path}: name and date, {record['name']} and {record['date']}, are not "
                         f"those of the folder")
    if kind == "training":
        check_logs(folder, record)
    else:
        known = {claim.measure for claim in CLAIMS}
        for measure, value in record["measures"].items():
            if measure not in known or not isinstance(value, int | float):
                raise ValueError(f"{path}: measures: expected numbers for some of "
                                 f"{', '.join(sorted(known))}; received {measure}: {value!r}")
    return record


def check_logs(folder: Path, record: dict) -> None:
    """The runs of summary.json are those of the logs beside it, number for number."""
    told = {run["run_id"]: run for run in record["runs"]}
    logs = {path.stem: path for path in folder.glob("*.txt")}
    if told.keys() != logs.keys() or record["n"] != len(logs):
        raise ValueError(f"{folder}: summary.json tells of the runs {', '.join(sorted(told))} "
                         f"(n = {record['n']}), the logs there are {', '.join(sorted(logs))}")
    for run_id, path in logs.items():
        reader = LogReader(path)
        if reader.problems:
            raise ValueError(reader.problems[0])
        for key in RUN_FIELDS:
            if told[run_id].get(key) != reader.runs[0].summary.get(key):
                raise ValueError(f"{path}: {key} is {reader.runs[0].summary.get(key)} in the log, "
                                 f"{told[run_id].get(key)} in summary.json")


def same_training(a: dict, b: dict) -> bool:
    """Whether two training records differ in how the MLP's activation is saved alone."""
    settings = [{key: value for key, value in r["config"].items() if key not in SAVING} |
                {key: r[key] for key in ("sources_sha256", "device", "torch", "triton")} |
                {"seeds": sorted(str(run["seed"]) for run in r["runs"])} for r in (a, b)]
    return settings[0] == settings[1]


def find_pairs(records: list[dict], baseline: str = "eager") -> list[tuple[dict, dict]]:
    """(baseline, bitsparse) records of the same training on GPUs, in the order of records."""
    training = [r for r in records if r["kind"] == "training" and r["bytes_per_token"]]
    pairs = []
    for ours in training:
        baselines = [r for r in training if r["mlp"] == baseline and same_training(r, ours)]
        if ours["mlp"] == "bitsparse" and baselines:
            pairs.append((baselines[-1], ours))
    return pairs


def is_proof(record: dict) -> bool:
    """Of bit-identity: such runs are slower."""
    return bool(record["config"].get("deterministic"))


def differing_values(root: Path, eager: dict, ours: dict) -> int:
    """Losses, as logged, and final weights that are not the same in two records."""
    runs = [load(str(root / "records" / r["name"]))[0].runs for r in (eager, ours)]
    seen = [[(p.step, p.loss) for run in own for p in [*run.train, *run.val]] +
            [run.summary["weights_sha256"] for run in own] for own in runs]
    return sum(a != b for a, b in zip_longest(*seen))


# -----------------------------------------------------------------------------
# Tables


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def commit_link(commit: str) -> str:
    return commit if commit == NO_COMMIT else f"`{commit[:10]}`"


def records_table(root: Path, records: list[dict]) -> list[str]:
    if not records:
        return ["No record exists yet."]
    lines = ["| record | claim | device | n | val loss | step ms | VRAM B/token | commit | "
             "command |", "|---|---|---|--:|--:|--:|--:|---|---|"]
    for r in records:
        if r["kind"] == "training":
            device = f"{r['world_size']} × {r['device']}"
            loss = shown_loss({"val_loss": r["val_loss_mean"], "val_loss_std": r["val_loss_std"]})
            numbers = [str(r["n"]), loss, shown(r["step_ms_median"], ".2f"),
                       shown(r["bytes_per_token"], ",.0f")]
        else:
            device, numbers = r["device"], ["–"] * 4
        lines.append("| " + " | ".join([f"[{r['name']}]({r['name']}/)", cell(r["claim"]), device,
                                        *numbers, commit_link(r["commit"]),
                                        f"`{cell(r['command'])}`"]) + " |")
    return lines


def vram_table(root: Path, records: list[dict]) -> list[str]:
    """The modes' table of bench_vram.py's page, as it stands there."""
    benches = [r for r in records
               if r["command"].split()[1:2] == ["scripts/bench_vram.py"] and r["weights"]]
    if not benches:
        return ["No record of `scripts/bench_vram.py` from a checkpoint exists yet."]
    record = benches[-1]
    lines = (root / "records" / record["name"] / "README.md").read_text().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("| mode ")), None)
    if first is None:
        raise ValueError(f"records/{record['name']}/README.md: expected a table whose first column "
                         "is mode, received none")
    rows = takewhile(lambda line: line.startswith("|"), lines[first:])
    return [*rows, "", f"1 × {record['device']}, torch {record['torch']}, triton "
            f"{record['triton']}; [{record['name']}](records/{record['name']}/): "
            f"`{record['command']}`"]


def comparison_table(root: Path, records: list[dict]) -> list[str]:
    pairs = [pair for pair in find_pairs(records) if not is_proof(pair[1])]
    if not pairs:
        return ["No pair of records of `--mlp eager` and `--mlp bitsparse` on a GPU exists yet."]
    eager, ours = pairs[-1]
    others = [r for r in records if r["kind"] == "training" and r["bytes_per_token"]
              and r["mlp"] != "eager" and same_training(r, ours)]
    names = [r["name"] for r in (eager, *others)]
    groups = [load(str(root / "records" / name))[0] for name in names]
    lines = table(*compare(groups, ours["target_loss"]), ours["target_loss"])
    for name in names:
        lines = [line.replace(f"| {name} ", f"| [{name}](records/{name}/) ", 1) for line in lines]
    target = f" --target-loss {ours['target_loss']:g}" * (ours["target_loss"] != TARGET_LOSS)
    return [*lines, "", f"{ours['world_size']} × {ours['device']}, torch {ours['torch']}, triton "
            f"{ours['triton']}; `python scripts/compare_records.py "
            f"{' '.join('records/' + name for name in names)}{target}`"]


def reproduction_table(root: Path, records: list[dict]) -> list[str]:
    found: dict[str, tuple[float, str, str]] = {}  # measure: value, command, record; newest wins
    answers = []
    for mlp, name in (("dense", "dense"), ("eager", "modded_nanogpt")):
        for baseline, ours in find_pairs(records, mlp):
            command = (f"python scripts/compare_records.py records/{baseline['name']} "
                       f"records/{ours['name']}")
            if is_proof(ours):
                measures = {"differing_values": differing_values(root, baseline, ours)}
            else:
                measures = {f"{what}_ratio_{name}": ours[key] / baseline[key] for what, key in
                            (("vram", "bytes_per_token"), ("step", "step_ms_median"))}
                measures["peak_mib"] = ours["peak_mib"]
            answers += [(ours["date"], measure, value, command, ours["name"])
                        for measure, value in measures.items()]
    # benches last: of one day, theirs count, as one run has both sides of a ratio in turns
    for r in (r for r in records if r["kind"] == "bench"):
        answers += [(r["date"], measure, value, r["command"], r["name"])
                    for measure, value in r["measures"].items()]
    for _, measure, *answer in sorted(answers, key=lambda a: a[0]):
        found[measure] = tuple(answer)
    lines = ["| the paper's claim, or our target | our number | holds | record | command |",
             "|---|--:|---|---|---|"]
    for claim in CLAIMS:
        if claim.measure not in found:
            lines.append(f"| {claim.text} | no record yet | – | – | – |")
            continue
        value, command, name = found[claim.measure]
        lines.append(f"| {claim.text} | {claim.show(value)} | {claim.verdict(value)} | "
                     f"[{name}](records/{name}/) | `{cell(command)}` |")
    return lines


TABLES = {
    "README.md": {"vram": vram_table, "comparison": comparison_table,
                  "reproduction": reproduction_table},
    "records/README.md": {"records": records_table},
}


def fill(text: str, file: str, name: str, lines: list[str]) -> str:
    """text with the lines between the markers of a table."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{file}: expected one line {begin} and, after it, one line {end}")
    before, rest = text.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def update(root: Path, check: bool) -> list[str]:
    """Names the files that were not current; rewrites them unless check."""
    records = read_records(root)
    changed = {}
    for file, tables in TABLES.items():
        text = old = (root / file).read_text()
        for name, make in tables.items():
            text = fill(text, file, name, make(root, records))
        if text != old:
            changed[file] = text
    if not check:  # all or nothing: only once every table could be made
        for file, text in changed.items():
            (root / file).write_text(text)
    return list(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    try:
        changed = update(ROOT, options.check)
    except OSError as error:
        sys.exit(f"update_tables.py: {error.filename}: {error.strerror}")
    except ValueError as error:
        sys.exit(f"update_tables.py: {error}")
    if options.check and changed:
        sys.exit(f"update_tables.py: not current: {', '.join(changed)}; run "
                 "python scripts/update_tables.py and commit")
    print(f"written: {', '.join(changed)}" if changed else "every table is current")


if __name__ == "__main__":
    main()
