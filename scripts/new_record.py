"""Makes a record from the logs of finished runs: records/YYYY-MM-DD_Name/.

    python scripts/new_record.py --name Baseline --claim "3.28 in 1750 steps" \\
        --command "torchrun --nproc_per_node=8 train_gpt.py --mlp eager --seed I" logs/*.txt

The folder gets each log as <run id>.txt, a summary.json (records/README.md says what each field
means) and a README.md, to which you may add. The date is that of the first run: nvidia-smi's in its
log, or the file's own; a --name that begins with a date keeps it.

Refused, with the file that is wrong: a run that did not end, runs of different sources, of
different settings (--seed, --log-dir and --wandb apart), machines or versions, and one run twice.
The sources in the logs are looked up in this repository's history, and summary.json names the
commit that has both, or says that none has.
"""

import argparse
import datetime
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from compare_records import TARGET_LOSS, Group, LogReader, Run, p_below, shown, shown_loss

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("train_gpt.py", "bitsparse_kernels.py")  # in the order of the log
OWN = ("seed", "log_dir", "wandb")  # settings that the runs of a record may differ in
NO_COMMIT = "not of a commit here"
RUN_FIELDS = ("run_id", "first_val_loss", "val_loss", "train_ms", "step_ms_median",
              "tokens_per_second", "bytes_per_token", "bytes_per_token_last", "peak_mib",
              "density", "overflows", "weights_sha256")


def stop(sentence: str) -> None:
    sys.exit(f"new_record.py: {sentence}")


def read_runs(files: list[Path]) -> list[Run]:
    runs = []
    for file in files:
        try:
            reader = LogReader(file)
        except OSError as error:
            stop(f"{file} cannot be read: {error.strerror}")
        if reader.problems:
            stop(reader.problems[0])
        (run, *others) = reader.runs
        if others:
            stop(f"{file} holds {len(others) + 1} runs; a record has one log a run")
        if len(run.sources) != len(SOURCES) or not run.summary or not run.config:
            stop(f"{file} is not a log of this train_gpt.py: expected the sources of "
                 f"{' and '.join(SOURCES)}, a config line and a summary line")
        runs.append(run)
    return runs


def check_alike(runs: list[Run]) -> None:
    """Stops unless the runs are repetitions of one experiment."""
    seen: dict[str, Path] = {}
    for run in runs:
        run_id = run.summary["run_id"]
        if run_id in seen:
            stop(f"{seen[run_id]} and {run.file} are the same run, {run_id}")
        seen[run_id] = run.file
    first = runs[0]
    for run in runs[1:]:
        for name, a, b in zip(SOURCES, first.sources, run.sources, strict=True):
            if a != b:
                stop(f"{first.file} and {run.file} ran different versions of {name}; "
                     "a record has one")
        for kind, a, b in (
                ("config", first.config, run.config),
                ("summary", *({k: r.summary.get(k) for k in ("device", "torch", "triton")}
                              for r in (first, run)))):
            for key in sorted({*a, *b} - {*OWN}):
                if a.get(key) != b.get(key):
                    stop(f"{first.file} and {run.file} differ in their {kind}: {key} is "
                         f"{a.get(key)} and {b.get(key)}; a record has runs of one setting")


def find_commit(sources: dict[str, str]) -> str:
    """The oldest commit of this branch in which these files have these sha256."""
    def git(*arguments: str, given: str = "") -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], input=given.encode(),
                              capture_output=True, check=True).stdout

    @functools.cache  # most commits change a few files
    def has(blob: str, sha256: str) -> bool:
        return hashlib.sha256(git("cat-file", "blob", blob)).hexdigest() == sha256

    try:
        commits = git("rev-list", "HEAD", "--topo-order", "--reverse").decode().split()
        names = "".join(f"{commit}:{name}\n" for commit in commits for name in sources)
        # "<hash> blob <size>", or "<name> missing" where a commit lacks the file
        lines = iter(git("cat-file", "--batch-check", given=names).decode().splitlines())
        for commit in commits:
            files = [(next(lines).split(), sha256) for sha256 in sources.values()]
            if all(line[1] == "blob" and has(line[0], sha256) for line, sha256 in files):
                return commit
    except (OSError, subprocess.CalledProcessError):  # no git, or not a repository
        pass
    return NO_COMMIT


def first_date(runs: list[Run]) -> str:
    dates = []
    for run in runs:
        if run.date:
            when = datetime.datetime.strptime(" ".join(run.date), "%b %d %Y")
        else:
            when = datetime.datetime.fromtimestamp(run.file.stat().st_mtime)
        dates.append(when.date().isoformat())
    return min(dates)


def summarize(name: str, date: str, claim: str, command: str, runs: list[Run],
              target: float) -> dict:
    group, summary, config = Group(name, runs), runs[0].summary, runs[0].config
    sha256 = [hashlib.sha256(source.encode()).hexdigest() for source in runs[0].sources]
    return {
        "kind": "training", "name": name, "date": date, "claim": claim, "command": command,
        "commit": find_commit(dict(zip(SOURCES, sha256, strict=True))), "sources_sha256": sha256,
        "device": summary["device"], "world_size": summary["world_size"],
        "torch": summary["torch"], "triton": summary["triton"],
        "mlp": summary["mlp"], "codec": config.get("codec"), "storage": config.get("storage"),
        "steps": summary["steps"], "tokens": summary["tokens"], "n": len(runs),
        "val_loss_mean": group.mean("final_loss"), "val_loss_std": group.std,
        "target_loss": target, "p_below_target": p_below(group.losses, target),
        "step_ms_median": group.mean("step_median"),
        "bytes_per_token": group.mean("bytes_per_token"), "peak_mib": group.mean("peak_mib"),
        "config": {key: value for key, value in config.items() if key not in OWN},
        "runs": [{"seed": run.config.get("seed")} | {key: run.summary.get(key)
                                                     for key in RUN_FIELDS} for run in runs]}


def readme(record: dict) -> str:
    loss = shown_loss({"val_loss": record["val_loss_mean"],
                       "val_loss_std": record["val_loss_std"]})
    p = ("no test with one run, or with equal ones" if record["p_below_target"] is None
         else f"p = {record['p_below_target']:.2g}")
    codec = "".join(f", {key} {record[key]}" for key in ("codec", "storage") if record[key])
    lines = [
        f"# {record['name']}", "", record["claim"], "", "```", record["command"], "```", "",
        f"- Hardware: {record['world_size']} × {record['device']}; torch {record['torch']}, "
        f"triton {record['triton']}",
        f"- Sources: commit {record['commit']}" if record["commit"] != NO_COMMIT
        else f"- Sources: {NO_COMMIT}; they stand in each log",
        f"- {record['steps']} steps, {record['tokens']:,} tokens; --mlp {record['mlp']}{codec}",
        f"- n = {record['n']}; final val loss {loss}; below {record['target_loss']:g}: {p} "
        "(one-sided one-sample t-test)", "",
        "| run | seed | val loss | train s | step ms (median) | VRAM B/token, at most | "
        "in the last step | peak MiB | overflows |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for run in record["runs"]:
        lines.append(
            f"| [{run['run_id']}]({run['run_id']}.txt) | {run['seed']} | {run['val_loss']:.4f} | "
            f"{run['train_ms'] / 1000:.1f} | {run['step_ms_median']:.2f} | "
            + " | ".join(shown(run[key] or None, ",.0f") for key in (
                "bytes_per_token", "bytes_per_token_last", "peak_mib"))
            + f" | {run['overflows']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, metavar="log")
    parser.add_argument("--name", required=True, help="letters, digits, '-', '_' and '.'")
    parser.add_argument("--claim", required=True, help="what the record shows, one sentence")
    parser.add_argument("--command", required=True, help="what its runs were started with")
    parser.add_argument("--target-loss", type=float, default=TARGET_LOSS,
                        help=f"what the val losses are tested against (here: {TARGET_LOSS})")
    parser.add_argument("--records", type=Path, default=ROOT / "records",
                        help="folder of the records (here: the repository's)")
    options = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+", options.name):
        stop(f"--name: expected letters, digits, '-', '_' and '.', received {options.name!r}")
    runs = read_runs(options.logs)
    check_alike(runs)
    if dated := re.fullmatch(r"(\d{4}-\d\d-\d\d)_.+", options.name):
        name, date = options.name, dated[1]
    else:
        date = first_date(runs)
        name = f"{date}_{options.name}"
    record = summarize(name, date, options.claim, options.command, runs, options.target_loss)
    folder = options.records / name
    try:
        folder.mkdir(parents=True)
        for run in runs:
            shutil.copyfile(run.file, folder / f"{run.summary['run_id']}.txt")
        (folder / "summary.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "README.md").write_text(readme(record))
    except FileExistsError:
        stop(f"{folder} is there already; choose another --name, or remove it")
    except OSError as error:
        stop(f"{folder} cannot be written: {error.strerror}")
    print(f"{folder}: {len(runs)} run{'s' if len(runs) > 1 else ''}, sources: {record['commit']}")


if __name__ == "__main__":
    main()
