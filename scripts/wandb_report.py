"""Compares wandb runs without an account: the table of compare_records.py, from local files.

    python scripts/wandb_report.py BASELINE CANDIDATE...
    python scripts/wandb_report.py wandb/offline-run-20260101_120000-abcd1234
    python scripts/wandb_report.py 'eager/wandb/offline-run-*' 'bitsparse/wandb/offline-run-*'

BASELINE and each CANDIDATE are a run's folder, its .wandb file, or a quoted glob of them. They are
read with `wandb leet inspect --json`, wandb's own command, which needs no network. The train time
without validation is not in wandb's history, so that column stays empty; the log has it.
"""

import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from compare_records import TARGET_LOSS, Group, Loss, Run, print_comparison


def stop(sentence: str) -> None:
    sys.exit(f"wandb_report.py: {sentence}")


def wandb_records(path: Path) -> list[dict]:
    """The records of a run's file, in order."""
    if path.is_dir() and not list(path.glob("*.wandb")):
        stop(f"{path}: the folder has no .wandb file; expected wandb/offline-run-… or wandb/run-…")
    result = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path],
                            capture_output=True, text=True,
                            env=os.environ | {"WANDB_ERROR_REPORTING": "false"})
    if result.returncode:
        reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
        stop(f"{path}: `wandb leet inspect` cannot read it: {reason}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def read_run(path: Path) -> Run:
    run = Run(path)
    rows = []
    for record in wandb_records(path):
        if record["type"] == "run":
            run.config |= record["run"].get("config", {}).get("update", {})
        elif record["type"] == "history":
            rows.append(record["history"]["item"])
    if "steps" not in run.config:
        stop(f"{path}: holds no run of train_gpt.py")
    run.total = run.config["steps"]
    run.val = [Loss(row["_step"], row["val_loss"], None) for row in rows if "val_loss" in row]
    if not run.finished:
        last = rows[-1]["_step"] if rows else "none"
        stop(f"{path}: the run's last step is {last} of {run.total}, without a final val loss")
    steps = [row for row in rows if "step_ms" in row]
    tokens = steps[0]["tokens_per_second"] * steps[0]["step_ms"] / 1000  # of one step
    run.summary = {"tokens": run.total * round(tokens),
                   "step_ms_median": statistics.median(row["step_ms"] for row in steps),
                   "bytes_per_token_last": steps[-1]["vram/bytes_per_token"],
                   "peak_mib": max(row.get("vram/peak_mib", 0) for row in steps)}
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline")
    parser.add_argument("candidates", nargs="*", metavar="candidate")
    parser.add_argument("--target-loss", type=float, default=TARGET_LOSS,
                        help=f"here: {TARGET_LOSS}")
    options = parser.parse_args()
    groups = []
    for argument in (options.baseline, *options.candidates):
        paths = [Path(p) for p in sorted(glob.glob(argument))]
        if not paths:
            stop(f"{argument}: no such folder, file or glob")
        groups.append(Group(Path(argument).name, [read_run(path) for path in paths]))
    print_comparison(groups, options.target_loss)


if __name__ == "__main__":
    main()
