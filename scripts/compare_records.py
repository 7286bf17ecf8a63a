"""Compares runs with a baseline: final val loss and its statistics, step time, VRAM per token.

    python scripts/compare_records.py BASELINE CANDIDATE...
    python scripts/compare_records.py records/2026-01-01_Eager records/2026-01-01_BitSparse
    python scripts/compare_records.py 'old/*.txt' 'new/*.txt' --json

BASELINE and each CANDIDATE are a record folder, a log, or a quoted glob of logs. Read are the logs
of train_gpt.py and of Modded-NanoGPT: llm.c style, 2024, 2025 to now, and track 3. A log is only
ever read as text, and the source code that it begins with is not taken for data. What cannot be
read, and each run that did not end, is named with file and line, and is not counted.

llm.c does not log how many steps a run was to make: the last val loss of its log counts as final.

Two tests: final val losses below --target-loss (one-sided one-sample t-test, as the speedrun asks,
with p < 0.01), and different from the baseline's (Welch's t-test, two-sided).

Exit status: 0; 1 where a candidate's val loss is worse than the baseline's (Welch, one-sided,
p < 0.01) or, with --target-loss given, not below that; 2 for what could not be read at all.
"""

import argparse
import glob
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scipy import stats

TARGET_LOSS = 3.28  # on FineWeb's validation tokens: what the speedrun runs to
SIGNIFICANT = 0.01  # the speedrun's level

# -----------------------------------------------------------------------------
# Logs

SEPARATOR = "=" * 100
# What stands at the left margin of a Python source and of no line that a run logs. From such a line
# to the next separator all is source: it may hold anything, also what looks like a step.
SOURCE = re.compile(r"""[rR]?(\"\"\"|''')|import \w|from \S+ import |(class|def) \w""")
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)"
STEP = re.compile(rf"step:(\d+)/(\d+)((?: \w+:{NUMBER}(?:ms|s)?)+) step_avg:({NUMBER})ms")
LLMC_STEP = re.compile(rf"s:(\d+)((?: \w+:{NUMBER})+)")
LOSSES = {"val_loss": "val", "tel": "val", "train_loss": "train", "trl": "train"}
BUFFER = re.compile(r"buffer:(\d+)/\d+ used:(\d+) capacity:(\d+) density:([\d.,]+)")
PEAK = re.compile(r"peak memory (?:allocated|consumption): (\d+) MiB.*")
VERSIONS = re.compile(r"Python \S+, torch (\S+), triton (\S+), numpy \S+")
GPU = re.compile(r"\|\s+\d+\s+(NVIDIA .*?)\s+(?:On|Off|N/A)\s+\|.*")
GPU_TRACK_3 = re.compile(r"Running PyTorch .* on (NVIDIA .*) with world_size \d+")
DATE = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2}) +(\d+) [\d:]{8} (\d{4})\s*")


@dataclass
class Loss:
    step: int
    loss: float
    milliseconds: float | None  # on the run's clock


@dataclass
class Run:
    """What a log tells of one run; None and empty where it does not tell."""

    file: Path
    sources: list[str] = field(default_factory=list)
    config: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    device: str | None = None
    torch: str | None = None
    date: tuple[str, str, str] | None = None  # month, day, year, as nvidia-smi prints them
    total: int | None = None  # steps that the run was to make
    step: int = -1  # the last one logged
    line: int = 0  # where that stands
    val: list[Loss] = field(default_factory=list)
    train: list[Loss] = field(default_factory=list)
    # step: bytes used, capacity, density by layer; a step that was repeated has its last values
    buffer: dict[int, tuple[int, int, list[float]]] = field(default_factory=dict)
    step_average: float | None = None  # ms, over the whole run
    peak: float | None = None  # MiB

    @property
    def finished(self) -> bool:
        if not self.val:
            return False
        if self.total is None:  # llm.c does not say; it validates after its last step
            return not self.train or self.train[-1].step < self.val[-1].step
        return self.val[-1].step == self.total

    @property
    def final_loss(self) -> float:
        return self.summary.get("val_loss", self.val[-1].loss)

    @property
    def step_median(self) -> float | None:
        return self.summary.get("step_ms_median")

    @property
    def milliseconds(self) -> float | None:
        return self.summary.get("train_ms", self.val[-1].milliseconds)

    @property
    def tokens(self) -> int | None:
        return self.summary.get("tokens")

    @property
    def bytes_per_token(self) -> float | None:
        return self.summary.get("bytes_per_token_last") or None  # 0 on a CPU: not measured

    @property
    def peak_mib(self) -> float | None:
        return self.summary.get("peak_mib") or self.peak


class LogReader:
    """Reads one file; .runs are those that ended, .problems name the rest."""

    def __init__(self, path: Path):
        self.path = path
        self.runs: list[Run] = []
        self.problems: list[str] = []
        self.run = Run(path)
        text = path.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
        lines = text.split("\n")
        source: list[str] | None = None  # the lines of the one being passed over
        opened = 0
        for number, line in enumerate(lines, 1):
            if source is not None:
                if line == SEPARATOR:
                    self.run.sources.append("".join(s + "\n" for s in source))
                    source = None
                else:
                    source.append(line)
            elif SOURCE.match(line):
                if self.run.step >= 0:
                    self._end_run()
                    self.run = Run(path)
                source, opened = [line], number
            else:
                self._read_line(number, line.rstrip(), cut=number == len(lines))
        if source is not None:
            self.problem(opened, "a source begins here and no line of 100 '=' ends it, so the log "
                                 "stops within the source")
        if self.run.step >= 0:
            self._end_run()
        elif not self.runs and not self.problems:
            self.problem(1, "no line of the file tells of a step")

    def problem(self, line: int, what: str) -> None:
        self.problems.append(f"{self.path}:{line}: {what}")

    def _end_run(self) -> None:
        run = self.run
        if run.finished:
            self.runs.append(run)
            return
        of = "" if run.total is None else f" of {run.total}"
        self.problem(run.line, f"the run stops at step {run.step}{of} without a final val loss; it "
                               "is not counted")

    def _read_line(self, number: int, line: str, cut: bool) -> None:
        """cut: the file ends within the line, whose last number may therefore lack digits."""
        run = self.run
        if match := STEP.fullmatch(line):
            values = dict(pair.split(":") for pair in match[3].split())
            if not re.fullmatch(NUMBER + "m?s", values.get("train_time", "")):
                self.problem(number, f"no train_time with its unit in {line!r}")
                return
            value, unit = re.fullmatch("(.*?)(m?s)", values["train_time"]).groups()
            milliseconds = float(value) * (1 if unit == "ms" else 1000)
            step, total = int(match[1]), int(match[2])
            self._add_step(number, step, total, values, milliseconds)
            # Track 3 (seconds) prints the average since its last validation.
            average = float(match[4]) if unit == "ms" else milliseconds / max(step, 1)
            if math.isfinite(average):  # 2024: nan for the first steps
                self.run.step_average = average
        elif (match := LLMC_STEP.fullmatch(line)) and not cut:
            self._add_step(number, int(match[1]), None,
                           dict(pair.split(":") for pair in match[2].split()), None)
        elif re.match(r"(step|s):\d", line):
            self.problem(number, f"{'cut off' if cut else 'not a step line of any known form'}: "
                                 f"{line[:80]!r}")
        elif match := BUFFER.fullmatch(line):
            run.buffer[int(match[1])] = (int(match[2]), int(match[3]),
                                         [float(d) for d in match[4].split(",")])
        elif line.startswith(("config: {", "summary: {")):
            name, _, text = line.partition(": ")
            try:
                setattr(run, name, json.loads(text))
            except json.JSONDecodeError:
                self.problem(number, f"{'cut off' if cut else 'not JSON'}: {line[:80]!r}")
        elif match := PEAK.fullmatch(line):
            run.peak = float(match[1])
        elif match := VERSIONS.fullmatch(line):
            run.torch = match[1]
        elif match := GPU.fullmatch(line) or GPU_TRACK_3.fullmatch(line):
            run.device = match[1]
        elif match := DATE.fullmatch(line):
            run.date = match.groups()

    def _add_step(self, number: int, step: int, total: int | None, values: dict[str, str],
                  milliseconds: float | None) -> None:
        run = self.run
        losses = {kind: float(values[key]) for key, kind in LOSSES.items() if key in values}
        again = any(getattr(run, kind) and getattr(run, kind)[-1].step == step for kind in losses)
        if run.step >= 0 and (step < run.step or again or total != run.total):
            if step <= 1 or run.finished or total != run.total:  # another run of the same source
                self._end_run()
                self.run = run = Run(self.path, run.sources, run.config, {}, run.device, run.torch,
                                     run.date)
            else:  # a run that went back and repeated steps
                self.problem(number, f"step {step} comes after step {run.step}: the later lines "
                                     "count")
                for kept in (run.val, run.train):
                    kept[:] = [loss for loss in kept if loss.step < step]
        run.step, run.total, run.line = step, total, number
        for kind, loss in losses.items():
            getattr(run, kind).append(Loss(step, loss, milliseconds))


# -----------------------------------------------------------------------------
# Groups of runs


def mean(values: list[float | None]) -> float | None:
    """None unless every run tells the value: a mean over some of them would be of other runs."""
    return None if None in values or not values else statistics.fmean(values)


@dataclass
class Group:
    name: str
    runs: list[Run]

    @property
    def losses(self) -> list[float]:
        return [run.final_loss for run in self.runs]

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.losses) if len(self.runs) > 1 else None

    def mean(self, attribute: str) -> float | None:
        return mean([getattr(run, attribute) for run in self.runs])

    @property
    def weights(self) -> set[str | None]:
        """Hashes of the final weights."""
        return {run.summary.get("weights_sha256") for run in self.runs}

    @property
    def device(self) -> str | None:
        found = {run.summary.get("device", run.device) for run in self.runs}
        return found.pop() if len(found) == 1 else None


def p_below(losses: list[float], target: float) -> float | None:
    """That the mean is below target; None for one run, or where there is nothing random."""
    if len(losses) < 2 or len(set(losses)) == 1:
        return None
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def p_differs(losses: list[float], baseline: list[float], alternative="two-sided") -> float | None:
    """Welch's test; "greater": that losses are worse than the baseline's."""
    if min(len(losses), len(baseline)) < 2 or len({*losses}) == len({*baseline}) == 1:
        return None
    return float(stats.ttest_ind(losses, baseline, equal_var=False,
                                 alternative=alternative).pvalue)


def log_files(argument: str) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"{argument}: the folder has no log (*.txt)")
        return files
    files = [path] if path.exists() else [Path(f) for f in sorted(glob.glob(argument))]
    if not files:
        raise ValueError(f"{argument}: no such folder, log or glob")
    return files


def load(argument: str) -> tuple[Group, list[str]]:
    """The runs of a folder, log or glob, and sentences on what could not be read."""
    readers = [LogReader(path) for path in log_files(argument)]
    problems = [problem for reader in readers for problem in reader.problems]
    runs = [run for reader in readers for run in reader.runs]
    if not runs:
        raise ValueError("\n".join([*problems, f"{argument}: no run that ended"]))
    for what, of in (("number of steps", lambda run: run.total),
                     ("--mlp", lambda run: run.config.get("mlp"))):
        values = {of(run): run for run in runs}
        if len(values) > 1:
            (a, first), (b, second), *_ = values.items()
            raise ValueError(f"{argument}: the runs differ in their {what}: {a} in {first.file}, "
                             f"{b} in {second.file}; compare them as two groups")
    return Group(Path(argument).name or argument, runs), problems


# -----------------------------------------------------------------------------
# Comparison


def row(group: Group, baseline: Group, target: float, median: bool) -> dict:
    """Everything that the table shows of a group, unrounded."""
    step = partial(Group.mean, attribute="step_median" if median else "step_average")
    values = {
        "name": group.name, "n": len(group.runs), "device": group.device,
        "val_loss": group.mean("final_loss"), "val_loss_std": group.std,
        "p_below_target": p_below(group.losses, target), "p_differs": None, "p_worse": None,
        "step_ms": step(group), "step_ratio": None,
        "seconds": group.mean("milliseconds"), "tokens": group.mean("tokens"),
        "bytes_per_token": group.mean("bytes_per_token"), "bytes_ratio": None,
        "peak_mib": group.mean("peak_mib"), "same_weights": None}
    if values["seconds"] is not None:
        values["seconds"] /= 1000
    if group is not baseline:
        values["same_weights"] = None not in group.weights and group.weights == baseline.weights
        values["p_differs"] = p_differs(group.losses, baseline.losses)
        values["p_worse"] = p_differs(group.losses, baseline.losses, "greater")
        for ratio, ours, theirs in (("step_ratio", values["step_ms"], step(baseline)),
                                    ("bytes_ratio", values["bytes_per_token"],
                                     baseline.mean("bytes_per_token"))):
            if ours is not None and theirs:
                values[ratio] = ours / theirs
    return values


def compare(groups: list[Group], target: float) -> tuple[list[dict], bool]:
    """A row for each group, the first being the baseline; and whether step times are medians."""
    median = all(run.step_median is not None for group in groups for run in group.runs)
    return [row(group, groups[0], target, median) for group in groups], median


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def shown_loss(r: dict) -> str:
    return f"{r['val_loss']:.4f}" + ("" if r["val_loss_std"] is None
                                     else f" ± {r['val_loss_std']:.4f}")


def table(rows: list[dict], median: bool, target: float) -> list[str]:
    """Markdown that is also aligned for the eye."""
    head = ["", "n", "final val loss", f"p (< {target:g})", "p (baseline)",
            f"step ms ({'median' if median else 'mean'})", "ratio", "train s", "M tokens",
            "VRAM B/token", "ratio", "peak MiB"]
    cells = [head]
    for r in rows:
        tokens = None if r["tokens"] is None else r["tokens"] / 1e6
        cells.append([r["name"], str(r["n"]), shown_loss(r), shown(r["p_below_target"], ".2g"),
                      shown(r["p_differs"], ".2g"), shown(r["step_ms"], ".2f"),
                      shown(r["step_ratio"], ".4f"), shown(r["seconds"], ".1f"),
                      shown(tokens, ".4g"), shown(r["bytes_per_token"], ",.0f"),
                      shown(r["bytes_ratio"], ".4f"), shown(r["peak_mib"], ",.0f")])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w)
                               for i, (c, w) in enumerate(zip(line, widths, strict=True))) + " |"
             for line in cells]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":"
                          for i, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]


def verdict(r: dict, base: dict, target: float) -> str:
    """One plain sentence."""
    loss = f"{r['name']}: val loss {shown_loss(r)} (n = {r['n']})"
    if not math.isfinite(r["val_loss"]):
        loss += " is not a number: a run diverged"
    elif r["p_differs"] is not None:
        if r["p_differs"] >= SIGNIFICANT:
            how = "does not differ significantly from"
        else:
            how = "is worse than" if r["val_loss"] > base["val_loss"] else "is better than"
        loss += f" {how} the baseline's {base['val_loss']:.4f} (p = {r['p_differs']:.2g})"
    elif r["val_loss"] == base["val_loss"]:
        loss += " equals the baseline's in every digit logged"
    else:
        loss += (f" against the baseline's {base['val_loss']:.4f}, a difference that needs more "
                 "runs to test")
    parts = [loss]
    if r["p_below_target"] is not None:
        below = r["p_below_target"] < SIGNIFICANT
        parts.append(f"{'' if below else 'not shown to be '}below {target:g} "
                     f"(p = {r['p_below_target']:.2g})")
    if r["same_weights"]:
        parts.append("the final weights are the baseline's, bit for bit")
    if r["step_ratio"] is not None:
        parts.append(f"a step takes {r['step_ratio']:.4f} of the baseline's time")
    if r["bytes_ratio"] is not None:
        parts.append(f"a token {r['bytes_ratio']:.4f} of its VRAM")
    if r["device"] != base["device"]:
        parts.append(f"but the devices differ ({r['device']}, {base['device']})")
    return ", ".join(parts) + "."


def print_comparison(groups: list[Group], target: float) -> None:
    rows, median = compare(groups, target)
    print("\n".join(table(rows, median, target)))
    for r in rows[1:]:
        print(verdict(r, rows[0], target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline")
    parser.add_argument("candidates", nargs="*", metavar="candidate")
    parser.add_argument("--target-loss", type=float, help=f"instead of {TARGET_LOSS}; and exit "
                        "with 1 where a candidate is not below it")
    parser.add_argument("--json", action="store_true", help="the same numbers, unrounded")
    options = parser.parse_args()
    target = TARGET_LOSS if options.target_loss is None else options.target_loss
    try:
        loaded = [load(argument) for argument in (options.baseline, *options.candidates)]
    except (OSError, ValueError) as error:
        print(f"compare_records.py: {error}", file=sys.stderr)
        sys.exit(2)  # as argparse: 1 is the answer of a comparison that was made
    groups = [group for group, _ in loaded]
    problems = [problem for _, found in loaded for problem in found]
    for problem in problems:
        print(problem, file=sys.stderr)
    rows, median = compare(groups, target)
    if options.json:
        print(json.dumps({"target_loss": target, "step_ms": "median" if median else "mean",
                          "baseline": rows[0], "candidates": rows[1:],
                          "verdicts": [verdict(r, rows[0], target) for r in rows[1:]],
                          "problems": problems}, indent=1))
    else:
        print_comparison(groups, target)
    failed = [r for r in rows[1:] if not math.isfinite(r["val_loss"])
              or (r["p_worse"] is not None and r["p_worse"] < SIGNIFICANT)
              or (options.target_loss is not None
                  and (r["p_below_target"] is None or r["p_below_target"] >= SIGNIFICANT))]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
