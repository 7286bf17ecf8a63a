"""Do 1, 2, 4 and 8 GPUs of one host train alike, how fast, and what do they send each other?

    python scripts/bench_ranks.py --data DIR --json FILE     # as many GPUs as there are
    python scripts/bench_ranks.py --data DIR --world-sizes 1 2 --only identity,overflow,signal,bytes
    python scripts/bench_ranks.py --from FILE --out records/YYYY-MM-DD_Name    # a record of FILE

Other options are those of train_gpt.py; the preset is offline. A run is a torchrun of --mlp eager
or of --mlp bitsparse --codec exponent. On every world size, or of these what --only names:

    speed     whole runs, one after another, on a clock that leaves validation out; efficiency is
              a GPU's tokens/s over that on the smallest world size
    identity  --check-steps steps of both modes, --deterministic: the same losses and weights?
    overflow  bitsparse again, with a buffer of rank 1 too small for the middle step: do all ranks
              repeat it, and end with the same weights?
    signal    bitsparse again, with SIGTERM to torchrun in the middle: is there a checkpoint, and
              does the run resumed from it on as many ranks end with the same weights?
    bytes     what the calls of torch.distributed carry in each step of each rank, and a formula

What is not timed runs at once, up to four runs on a GPU, whose VRAM must hold them. Exit status 1
where a check fails. On a CPU: 1 and 2 ranks over gloo, the tiny preset, --check-steps steps in all
runs, and no word about speed, as the ranks share the cores.
"""

import argparse
import atexit
import itertools
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import bench_record
import torch
from bench_record import stop, table
from compare_records import LogReader, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import GPT, Config, Trainer, parse_config

SOURCES = ("train_gpt.py", "bitsparse_kernels.py", "scripts/bench_ranks.py")
PARTS = ("speed", "identity", "overflow", "signal", "bytes")
MODES = {"eager": ["--mlp", "eager"], "bitsparse": ["--mlp", "bitsparse", "--codec", "exponent"]}
SET_HERE = {"--mlp", "--codec", "--log-dir", "--keep", "--save-every", "--resume"}
RANK = "rank"  # what this script is told when torchrun starts it
# Ranks, GB/s that each sends, and where: assumed, not measured, as 80 % of the 450 that NVLink has
# each way on an H100 or H200, and of the 50 of a 400 Gb/s card. NCCL's rings go from node to node
# through all 8 cards of a node; where they do not, a rank's bytes wait for its own card.
ESTIMATES = ((2, 360, "2 GPUs, NVLink"), (4, 360, "4 GPUs, NVLink"), (8, 360, "8 GPUs, NVLink"),
             (16, 320, "2 nodes of 8, rings through all cards of a node"),
             (16, 40, "2 nodes of 8, each rank through its own card"))


def read_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this script, and train_gpt.py's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", nargs="+", type=int, choices=(1, 2, 4, 8), default=[
        n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() or 2)], help="here: %(default)s")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS,
                        help=f"parts, with commas between: {','.join(PARTS)}")
    parser.add_argument("--check-steps", type=int, default=20, help="here: %(default)s")
    parser.add_argument("--step-ms", type=float, help="a step of the offline preset on one GPU, "
                        "for the estimates (here: what is measured)")
    bench_record.add_options(parser)
    options, others = parser.parse_known_args(arguments)
    if unknown := set(options.only) - set(PARTS):
        stop(f"--only: expected some of {','.join(PARTS)}, received {','.join(sorted(unknown))}")
    if wrong := SET_HERE.intersection(o.split("=")[0] for o in others):
        stop(f"{wrong.pop()} is set for each run here; leave it out")
    bench_record.check_options(parser, options, others)
    options.world_sizes = sorted(set(options.world_sizes))
    return options, others


# -----------------------------------------------------------------------------
# In a rank


class WatchedTrainer(Trainer):
    """Writes what its rank saw to folder/rank<i>.json; starves rank 1's buffer before a step."""

    folder, starved_step, grown = "", 0, 0  # starved_step 0: none; grown: times
    sent: Counter = Counter()  # calls and bytes of each collective in a step
    steps_sent: list[dict[str, int]] = []

    def step(self, number: int):
        if number and (number, self.ranks.rank) == (self.starved_step, 1):
            self.starved_step = 0  # not when it is repeated
            self.buffer.resize(1000)
        self.sent.clear()
        step = super().step(number)
        self.steps_sent.append(dict(self.sent))
        return step

    def grow(self, step) -> None:
        self.grown += 1
        super().grow(step)

    def summarize(self, *losses) -> None:
        super().summarize(*losses)
        Path(self.folder, f"rank{self.ranks.rank}.json").write_text(json.dumps({
            "sent": self.steps_sent, "overflows": self.overflows, "grown": self.grown,
            "bytes_per_token": round(self.done[-1]["vram/bytes_per_token"])}))


def run_rank(folder: str, starved_step: str, *arguments: str) -> None:
    """train_gpt.py in this process, watched."""
    def count(name, collective):
        def counted(*tensors, **options):
            WatchedTrainer.sent[f"{name} calls"] += 1
            # the whole is the largest: what goes into a reduce_scatter, comes out of an all_gather
            WatchedTrainer.sent[f"{name} bytes"] += max(t.nbytes for t in tensors)
            WatchedTrainer.sent["asynchronous calls"] += bool(options.get("async_op"))
            return collective(*tensors, **options)

        return counted

    WatchedTrainer.folder, WatchedTrainer.starved_step = folder, int(starved_step)
    train_gpt.Trainer = WatchedTrainer
    train_gpt._reduce_scatter = count("reduce_scatter", train_gpt._reduce_scatter)
    train_gpt._all_gather = count("all_gather", train_gpt._all_gather)
    train_gpt.dist.all_reduce = count("all_reduce", train_gpt.dist.all_reduce)
    sys.argv = ["train_gpt.py", *arguments]
    train_gpt.main()


# -----------------------------------------------------------------------------
# Runs


class Run:
    """A torchrun of train_gpt.py in a folder of its own; watched if starved_step is given."""

    def __init__(self, folder: Path, ranks: int, mode: str, *arguments: str, keep: int = 0,
                 starved_step: int | None = None):
        print(f"{time.strftime('%X')} {folder.name}", flush=True)
        folder.mkdir(exist_ok=True)
        self.folder, self.ranks = folder, ranks
        program = [train_gpt.__file__] if starved_step is None else \
            [__file__, RANK, str(folder), str(starved_step)]
        with (folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc_per_node={ranks}", *program, *MODES[mode], "--no-wandb", "--log-dir",
                 str(folder / "logs"), "--keep", str(keep), *arguments],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        atexit.register(self.process.terminate)  # where it has not ended

    def end(self) -> "Run":
        """Wait for it. If it fails, so does this script."""
        if status := self.process.wait():
            output = (self.folder / "out").read_text(errors="replace").splitlines()
            stop("\n".join([f"a run ended with status {status}: {shlex.join(self.process.args)}",
                            *output[-40:]]))
        run = LogReader(next(self.folder.glob("logs/*.txt"))).runs[-1]
        self.summary, self.weights = run.summary, run.summary["weights_sha256"][:16]
        # as logged: what is the same in runs of the same bits
        self.bits = [loss.loss for loss in run.train], self.summary["val_loss"], self.weights
        return self

    def seen(self, key: str) -> list:
        """What each rank of a watched run saw."""
        return [json.loads((self.folder / f"rank{i}.json").read_text())[key]
                for i in range(self.ranks)]


def step_traffic(config: Config, ranks: int) -> dict[str, int]:
    """Calls and bytes of each collective in a step on 2 or more ranks, from parameters' shapes."""
    with torch.device("meta"):
        model = GPT(config, None)
    matrices = Counter()  # by shape: Muon's, padded to as many for each rank
    for p in model.blocks.parameters():
        matrices[p.shape[-2:]] += p.shape[:-2].numel()
    elements = sum(-(-n // ranks) * ranks * shape.numel() for shape, n in matrices.items())
    tables = [model.embed, *model.value_embeds, model.head]  # Adam's, gradients in their dtype
    table_bytes, calls = sum(p.nbytes for p in tables), len(matrices) + len(tables)
    return {"reduce_scatter calls": calls, "reduce_scatter bytes": 4 * elements + table_bytes,
            "all_gather calls": calls, "all_gather bytes": 2 * elements + table_bytes,  # bf16
            "all_reduce calls": 1,  # the scalars' gradient and 4 sums, float32
            "all_reduce bytes": 4 * (model.scalars.numel() + 4), "asynchronous calls": 0}


def estimate(config: Config, rows: list[dict], step_ms: float | None) -> list[dict]:
    """Around a ring a rank sends (ranks - 1) / ranks of a tensor, twice that in an all_reduce.

    step_ms: of one GPU; None: what rows have.
    """
    first = next((r for r in rows if r["mode"] == "bitsparse" and r["efficiency"]), None)
    one = step_ms or first and first["step_ms_median"] * first["world_size"]
    found = []
    for ranks, speed, where in ESTIMATES:
        whole = step_traffic(config, ranks)
        sent = (ranks - 1) / ranks * (whole["reduce_scatter bytes"] + whole["all_gather bytes"]
                                      + 2 * whole["all_reduce bytes"])
        found.append({"where": where, "ranks": ranks, "assumed_gb_per_s": speed, "sent_bytes": sent,
                      "communication_ms": sent / speed / 1e6, "compute_ms": one and one / ranks})
    return found


def check_identity(eager: Run, whole: Run) -> tuple[bool, str]:
    """Whether it holds, and what was seen; as do all checks. whole: bitsparse, and undisturbed."""
    losses, val_loss, weights = zip(eager.bits, whole.bits, strict=True)
    return eager.bits == whole.bits, (
        f"{len(losses[0])} train losses, val losses {val_loss}, weights {weights}; B/token by "
        f"rank: {eager.seen('bytes_per_token')} and {whole.seen('bytes_per_token')}")


def check_bytes(whole: Run, formula: dict[str, int]) -> tuple[bool, str]:
    counted = [step for steps in whole.seen("sent") for step in steps]
    wrong = [f"; but counted: {step}" for step in counted if step != formula][:1]
    return not wrong, f"in each of the ranks' {len(counted)} steps " + ", ".join(
        [f"{key} {value:,}" for key, value in formula.items()] + wrong)


def check_overflow(starved: Run, whole: Run) -> tuple[bool, str]:
    starved.end()
    repeated, grown = ([a - b for a, b in zip(starved.seen(key), whole.seen(key), strict=True)]
                       for key in ("overflows", "grown"))
    alone = repeated == [1] * starved.ranks and grown == [0, 1, *[0] * (starved.ranks - 2)]
    return alone and starved.bits == whole.bits, (
        f"steps repeated, by rank: {repeated}; buffers grown: {grown}; weights {starved.weights}")


def check_signal(run: Run, whole: Run) -> tuple[bool, str]:
    steps = len(whole.bits[0])
    logged = re.compile(rf"^step:{steps // 2}/\d+ train_loss", re.M)
    while run.process.poll() is None and not any(
            logged.search(log.read_text()) for log in run.folder.glob("logs/*.txt")):
        time.sleep(0.02)
    run.process.terminate()
    status, saved = run.process.wait(), [p.stem for p in run.folder.glob("logs/*/step-*.pt")]
    seen = f"of {steps} steps, torchrun ended with status {status} and left {saved or 'nothing'}"
    if not status or not saved or saved == [f"step-{steps:08}"]:
        return False, seen
    resumed = Run(run.folder, run.ranks, "bitsparse", "--resume", "latest", keep=1).end()
    return resumed.bits == whole.bits, f"{seen}; resumed to weights {resumed.weights}"


def measure(config: Config, base: list[str], options: argparse.Namespace, work: Path) -> dict:
    only, sizes, steps = options.only, options.world_sizes, options.check_steps
    gpus, checks, rows = torch.cuda.is_available(), [], []
    check = [*base, "--steps", str(steps), "--deterministic"]
    how = {"signal": (check_signal, {"keep": 1}),  # the first to be waited for
           "overflow": (check_overflow, {"starved_step": steps // 2})}
    compiling = [Run(work / f"compile-{mode}", sizes[-1], mode, *base, "--steps", "1")
                 for mode in MODES if "speed" in only and gpus]
    # the most ranks first, as they compile for all GPUs
    for n in reversed(sizes if {*only} - {"speed"} else []):
        eager, run = (Run(work / f"{n}-{mode}", n, mode, *check, starved_step=0) for mode in MODES)
        found = {"identity": check_identity(eager.end(), run.end())}
        more = {name: Run(work / f"{n}-{name}", n, "bitsparse", *check, **how[name][1])
                for name in how if name in only and n > 1}
        found |= {name: how[name][0](started, run) for name, started in more.items()}
        if n > 1:
            found["bytes"] = check_bytes(run, step_traffic(config, n))
        checks += [{"check": name, "ranks": n, "holds": found[name][0], "seen": found[name][1]}
                   for name in PARTS if name in only and name in found]
    for run in compiling:
        run.end()
    for n, mode in itertools.product(sizes, MODES if "speed" in only else ()):
        run = Run(work / f"speed-{n}-{mode}", n, mode, *(base if gpus else check)).end()
        row = run.summary | {"mode": mode, "per_rank": run.summary["tokens_per_second"] / n}
        first = next((r for r in rows if r["mode"] == mode), row)
        rows.append(row | {"efficiency": row["per_rank"] / first["per_rank"] if gpus else None})
    return {"checks": checks, "rows": rows}


# -----------------------------------------------------------------------------
# The page


def page(record: dict) -> str:
    columns = {"tokens_per_second": ",.0f", "efficiency": ".3f", "step_ms_median": ".2f",
               "bytes_per_token_last": ",.0f", "peak_mib": ",.0f"}  # none of a CPU
    speeds = [[r["mode"], str(r["world_size"]), *(shown(r["efficiency"] and r[key], form)
                                                  for key, form in columns.items()),
               f"{r['val_loss']:.6f}"] for r in record["rows"]]
    estimates = [[e["where"], f"{e['sent_bytes'] / 1e6:,.0f}", str(e["assumed_gb_per_s"]),
                  f"{e['communication_ms']:.2f}", shown(e["compute_ms"], ".1f"), shown(
                      e["compute_ms"] and 1 / (1 + e["communication_ms"] / e["compute_ms"]), ".3f")]
                 for e in record["estimates"]]
    return "\n".join([
        *bench_record.head(record, gpus=1 if record["device"] == "CPU"
                           else max(record["world_sizes"])),
        *(f"- {c['check']} on {c['ranks']}: {'holds' if c['holds'] else 'FAILS'}. {c['seen']}"
          for c in record["checks"]), "",
        *table([["mode", "ranks", "tokens/s", "efficiency", "step ms", "B/token, rank 0",
                 "peak MiB", "val loss"], *speeds]), "",
        "The bytes of a step: reduce_scatter of Muon's gradients (float32) and of those of "
        "embeddings and head (in their type), all_gather of Muon's updates (bf16) and of "
        "embeddings and head, one all_reduce of what is small. They overlap with no compute: all "
        "come after the last backward of a rank, no call is asynchronous, and what follows on the "
        "device waits for it; only the host runs ahead. An estimate adds them, at a bandwidth that "
        "is assumed and without latency, to the step of one GPU, shared by more. "
        "train_gpt.py takes up to 8 processes: for 16 the batch would be cut into 16.", "",
        *table([["estimate", "MB sent by a rank", "GB/s assumed", "communication ms", "compute ms",
                 "efficiency"], *estimates])]) + "\n"


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        return run_rank(*sys.argv[2:])
    options, others = read_arguments(sys.argv[1:])
    gpus = torch.cuda.is_available()
    if options.earlier:
        record = bench_record.read(options.earlier)
    else:
        record = bench_record.begin(SOURCES)
        base = ["--preset", "offline" if gpus else "tiny", *others]
        config = parse_config(base)
        model = config if gpus else parse_config(["--preset", "offline"])  # of the estimates
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
            measured = measure(config, base, options, Path(work))
        record |= measured | {
            "claim": "Several GPUs train alike, how fast, and what they send" if gpus else
            "Ranks on a CPU train alike, and what they send; not how fast, on shared cores",
            "world_sizes": options.world_sizes, "check_steps": options.check_steps,
            "estimates": estimate(model, measured["rows"], options.step_ms)}
    bench_record.write(record, options, page)
    print(page(record), end="")
    sys.exit(not all(check["holds"] for check in record["checks"]))


if __name__ == "__main__":
    main()
