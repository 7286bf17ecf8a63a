"""What does a token cost in VRAM and in time, with each --mlp and --codec?

    python scripts/bench_vram.py --preset tiny --data data/sample    # as initialized
    python scripts/bench_vram.py --checkpoint latest                 # trained, with its options
    python scripts/bench_vram.py --checkpoint logs/RUN/step-00000080.pt --log-dir logs
    python scripts/bench_vram.py --checkpoint latest --modes eager dense bitsparse-raw --json FILE
    python scripts/bench_vram.py --from FILE --out records/YYYY-MM-DD_Name    # a record of FILE

Other options are those of train_gpt.py; --deterministic changes nothing here. Density decides, so
weights are a checkpoint's or initial.

On a GPU each mode is a process with a Trainer of its own, at --microbatch-tokens and at twice
that; all compile at once, and memory is that of a training run. The steps are the trainer's, of 8
microbatches and with the optimizers, always of the same batch; learning rates are so small that
float32 makes 0 of them, so weights and density stay. The buffer has the size that the trainer would
give it: what was needed and a twentieth, in steps of 2 MiB.

    B/token   (most allocated in forward and backward - allocated before + buffer) / tokens
    slope     of the same bytes between the two sizes: B/token without what does not grow. (Not to
              half the size: there the head, whose chunks stay as they are, has the peak)
    peak MiB  most allocated in a step, weights, gradients, moments and buffer included
    step ms   median; the modes take turns, ROUNDS times, every other time in the opposite order,
              each with a step that is not timed and TIMED that are. Ratios: the median over the
              rounds of two modes' ratio in a round; behind it the least and the largest
    waits     of the host for the device in a step, counted by torch.cuda.set_sync_debug_mode
    24 GB     tokens of the largest microbatch, by the line through the peak with that slope. GB:
              10^9 bytes of tensors; such cards have 7 % more, for CUDA and gaps. What grows with
              the square of the tokens, the attention masks, is not in the line

A token's bytes by component are those of the tensors that Inductor's forward graph hands to its
backward, each storage once, parameters and inputs apart. "not in the graph" is what the allocator
counts besides; "transient" is what the peak has above all that is held when forward ends, less what
backward has freed by then.

On a CPU, where nothing is compiled, B/token alone: of all tensors that autograd really saved, each
storage once and parameters apart, and of the buffer's use, as the slope between one length and
twice that. That is more than a compiled model holds; the MLP's own part is the same.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import bench_record
import torch
import triton
from bench_record import stop, table
from compare_records import shown
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bitsparse_kernels import CODECS, ActivationBuffer
from train_gpt import (
    BLOCK,
    GPT,
    MIB,
    MICROBATCHES,
    VOCAB,
    Config,
    Log,
    SavedBytes,
    TrainData,
    Trainer,
    buffer_capacity,
    first_capacity,
    parse_config,
    read_checkpoint,
    start_ranks,
    window_blocks,
)

SOURCES = ("train_gpt.py", "bitsparse_kernels.py", "scripts/bench_vram.py")
MODES = {"eager": ("eager", "raw"), "dense": ("dense", "raw"), "checkpoint": ("checkpoint", "raw"),
         **{f"bitsparse-{codec}": ("bitsparse", codec) for codec in CODECS}}  # --mlp, --codec
ROUNDS, TIMED = 8, 2
NO_RATE = 1e-300  # 0 in float32: the optimizers do all their work, and the weights keep their bits
CARDS = (24, 40, 80, 140)  # GB
HIDDEN, VALUES, WEIGHTS = "MLP: hidden", "MLP: values in the buffer", "weights in bf16"
COMPONENTS = ("embeddings", "attention: masks", "attention: input",
              "attention: q, k, v, output", "residual stream and norms", "MLP: input", HIDDEN,
              "head", WEIGHTS)


def read_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this script, and train_gpt.py's."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a path, or latest: the newest of --log-dir")
    parser.add_argument("--microbatch-tokens", type=int,
                        help="also where a checkpoint's run had another number of them")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="which ones")
    bench_record.add_options(parser)
    options, others = parser.parse_known_args(arguments)
    if not (torch.cuda.is_available() or options.earlier) and (options.json or options.out):
        stop("--json and --out: expected a CUDA GPU, received none; a CPU has no such numbers")
    bench_record.check_options(parser, options, others)
    options.modes = list(dict.fromkeys(options.modes))
    return options, others


def read_config(checkpoint: str | None, tokens: int | None, others: list[str]) -> Config:
    """config.resume: the checkpoint whose weights are taken, or empty. tokens: of a microbatch."""
    size = [] if tokens is None else ["--microbatch-tokens", str(tokens)]
    config = parse_config([*others, *size])
    # run.sh asks for the latest after a run that leaves none, too
    if checkpoint is None or (checkpoint == "latest" and config.keep == 0):
        return config
    own = parse_config([*others, "--resume", checkpoint])
    # one batch is enough here, also where there are fewer of these tokens than that run had steps
    return replace(own, microbatch_tokens=tokens or own.microbatch_tokens,
                   epochs=max(own.epochs, own.steps))


# -----------------------------------------------------------------------------
# On a CPU


def saved_bytes(model: GPT, buffer: ActivationBuffer, *batch: torch.Tensor) -> int:
    buffer.reset()
    saved = SavedBytes(model)
    with saved:
        loss = model(*batch)
    del loss
    return saved.total() + int(buffer.used_bytes())


def slopes_on_cpu(config: Config, modes: list[str], number: int) -> dict[str, float]:
    """Bytes a token that autograd saves, by mode."""
    half = max(1, config.microbatch_tokens // BLOCK // 2) * BLOCK
    torch.manual_seed(config.seed)
    data = TrainData(config)
    # a step's microbatches, one after the other: twice the shortest length is more than one of 128
    tokens = torch.cat([data.microbatch(0, i)[:-1] for i in range(3)])
    buffer = ActivationBuffer(2 * first_capacity(config), "cpu", config.layers)
    model = GPT(config, buffer)
    if config.resume:
        model.load_state_dict(read_checkpoint(config.resume)["model"])
    window, slopes = torch.tensor(window_blocks(config, number), dtype=torch.int32), {}
    for mode in modes:
        for block in model.blocks:
            block.mlp.save, block.mlp.codec = MODES[mode]
        short, long = (saved_bytes(model, buffer, tokens[:n], tokens[1: n + 1].long(), window)
                       for n in (half, 2 * half))
        slopes[mode] = (long - short) / half
    return slopes


def print_slopes(slopes: dict[str, float]) -> None:
    for mode, slope in slopes.items():
        line = f"  {mode:<18} {slope:7.0f} bytes/token"
        if "checkpoint" in slopes:
            line += f", {slope - slopes['checkpoint']:5.0f} of them the MLP's hidden activation"
        if "dense" in slopes:
            line += f", {100 * slope / slopes['dense'] - 100:+.1f} % of dense"
        print(line)


# -----------------------------------------------------------------------------
# What the compiled forward keeps


def module_of(node: torch.fx.Node) -> str:
    """Class of the innermost module that the node comes from; empty: GPT itself, or none."""
    stack = node.meta.get("nn_module_stack")
    kind = [*stack.values()][-1][1] if stack else ""
    return getattr(kind, "__name__", str(kind)).rpartition(".")[2]


def component_of(node: torch.fx.Node, readers: set[str], config: Config, place: str) -> str:
    """One of COMPONENTS, for what node makes; readers: modules that read it.

    place, for GPT's own nodes: before, between or after the blocks.
    """
    value, module = node.meta["val"], module_of(node)
    if not value.dtype.is_floating_point:
        return HIDDEN if module == "MLP" else "attention: masks"
    if config.microbatch_tokens not in value.shape:
        return "head" if VOCAB in value.shape else WEIGHTS
    if module == "MLP":
        return HIDDEN if value.shape[-1] > config.dim else "MLP: input"
    if module == "Attention":
        return "attention: q, k, v, output"
    if module and "MLP" in readers:
        return "MLP: input"
    if module and "Attention" in readers:
        return "attention: input"
    if not module and place != "between":
        return "embeddings" if place == "before" else "head"
    return "residual stream and norms"


def group_saved(graph: torch.fx.Graph, config: Config) -> dict[str, int]:
    """Bytes that a forward graph hands to its backward, by component, each storage once."""
    views: dict[int, list[tuple[int, torch.fx.Node]]] = {}  # of a storage, its maker first
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            views.setdefault(value.untyped_storage()._cdata, []).append((i, node))
    in_blocks = [i for i, node in enumerate(nodes) if module_of(node)]
    saved = {node.meta["val"].untyped_storage() for node in nodes[-1].args[0]
             if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)}
    grouped = dict.fromkeys(COMPONENTS, 0)
    for address, size in {storage._cdata: storage.nbytes() for storage in saved}.items():
        i, node = views[address][0]
        if node.op != "placeholder" and node.meta["val"].numel() > 1:  # the loss
            readers = {module_of(user) for _, view in views[address] for user in view.users}
            place = "before" if i < in_blocks[0] else "after" if i > in_blocks[-1] else "between"
            grouped[component_of(node, readers, config, place)] += size
    return grouped


class SavedTensorsPass(CustomGraphPass):
    """Tells Inductor nothing; its .bytes are of the last forward graph that came by."""

    def __init__(self, config: Config):
        self.config, self.bytes = config, None

    def __call__(self, graph: torch.fx.Graph) -> None:
        # AOTAutograd's names: a backward has tangents too, the optimizers' graphs neither
        kinds = {node.name.split("_")[0] for node in graph.nodes if node.op == "placeholder"}
        if "primals" in kinds and "tangents" not in kinds:
            self.bytes = group_saved(graph, self.config)

    def uuid(self) -> None:  # a graph from the cache would not come by
        return None


# -----------------------------------------------------------------------------
# A mode's process


def measure_memory(trainer: Trainer, number: int) -> dict:
    config, buffer, held = trainer.config, trainer.buffer, []
    graph, forward = SavedTensorsPass(config), trainer.forward

    def watched(*batch):
        before = torch.cuda.memory_allocated()
        loss = forward(*batch)
        held.append(torch.cuda.memory_allocated() - before)
        return loss

    trainer.forward = watched
    with inductor.patch(post_grad_custom_pre_pass=graph):
        step = trainer.step(number)  # compiles
    if graph.bytes is None:
        stop("expected that Inductor compiles the model's forward; it was not asked to")
    capacity, used = 0, {}
    if buffer is not None:
        capacity = buffer_capacity(config, step.snapshot.peak_bytes)
        buffer.resize(capacity)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = trainer.step(number)
    torch.cuda.set_sync_debug_mode("default")
    trainer.forward, snapshot = forward, step.snapshot
    if buffer is not None:
        if snapshot.overflowed:
            stop(f"{snapshot.needed_bytes} bytes of buffer were needed, in a batch that had "
                 f"fitted into {capacity}")
        stored = sum(snapshot.layer_nnz)
        elements = MICROBATCHES * config.microbatch_tokens * 4 * config.dim * config.layers
        used = {"density": stored / elements,
                "bits_per_value": 8 * snapshot.stored_bytes / max(1, stored)}
    measured = {"tokens": config.microbatch_tokens,
                "bytes_per_token": step.row["vram/bytes_per_token"],
                "peak_bytes": torch.cuda.max_memory_allocated(), "buffer_bytes": capacity,
                "held_bytes": held[-1], "saved_bytes": graph.bytes, **used,
                "host_synchronizations": sum("synchronizing" in str(w.message) for w in caught)}
    torch.cuda.empty_cache()  # for the other modes' processes
    return measured


def time_steps(trainer: Trainer, number: int) -> list[float]:
    """ms of TIMED steps; as in training, the device always has the next one to work on."""
    events = []
    for _ in range(1 + TIMED):
        trainer.step(number)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that one mode's activations at a time need room
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def serve(connection, config: Config, number: int) -> None:
    """Sends what the mode holds, then times of steps as often as it is asked."""
    try:
        with (tempfile.TemporaryDirectory() as folder,
              contextlib.redirect_stdout(io.StringIO())):  # the log's console
            own = replace(config, resume="", log_dir=folder, wandb=False, muon_lr=NO_RATE,
                          adam_lr=NO_RATE)
            ranks = start_ranks(config.head)
            trainer = Trainer(own, ranks, Log(own, ranks))
        if config.resume:
            trainer.model.load_state_dict(read_checkpoint(config.resume)["model"])
        connection.send(measure_memory(trainer, number))
        while connection.recv():
            connection.send(time_steps(trainer, number))
    except torch.cuda.OutOfMemoryError as error:
        stop(f"--mlp {config.mlp}: {str(error).splitlines()[0]} Every mode has a process on the "
             f"GPU: choose fewer --modes, or lower --microbatch-tokens")


class Worker:
    def __init__(self, config: Config, number: int):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, config, number))
        self.process.start()
        theirs.close()

    def receive(self):
        try:
            return self.connection.recv()
        except EOFError:
            stop("a mode's process has ended; it says why above")

    def time_steps(self) -> list[float]:
        self.connection.send(True)
        return self.receive()

    def end(self) -> None:
        self.connection.send(False)
        self.process.join()


def start_workers(config: Config, modes: list[str], number: int,
                  workers: dict) -> dict[tuple[str, int], dict]:
    """Adds a worker for each mode to workers; returns what each holds, by mode and tokens."""
    # Kernels that several modes have are compiled by the first ones, and cached for the others
    first = [mode for mode in modes if mode in ("eager", "dense")] or modes[:1]
    others = [mode for mode in modes if mode not in first]
    cores, memory, once = len(os.sched_getaffinity(0)), {}, config.microbatch_tokens
    for stage in (first, others) if others else (first,):
        started, keys = time.perf_counter(), [(m, n) for m in stage for n in (once, 2 * once)]
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, cores // len(keys)))
        for mode, tokens in keys:
            mlp, codec = MODES[mode]
            workers[mode, tokens] = Worker(
                replace(config, microbatch_tokens=tokens, mlp=mlp, codec=codec), number)
        memory |= {key: workers[key].receive() for key in keys}
        print(f"compiled {', '.join(stage)}: {time.perf_counter() - started:.0f} s", flush=True)
        for mode in stage:
            workers.pop((mode, 2 * once)).end()
    return memory


def measure(config: Config, modes: list[str], number: int) -> list[dict]:
    """A row for each mode."""
    workers, rounds, once = {}, {mode: [] for mode in modes}, config.microbatch_tokens
    try:
        memory = start_workers(config, modes, number, workers)
        for turn in range(ROUNDS):
            for mode in modes[::-1 if turn % 2 else 1]:
                rounds[mode].append(workers[mode, once].time_steps())
        for worker in workers.values():
            worker.end()
    finally:  # where one failed
        for worker in workers.values():
            worker.process.terminate()
    return [make_row(mode, memory[mode, once], memory[mode, 2 * once], rounds) for mode in modes]


# -----------------------------------------------------------------------------
# Numbers


def largest_microbatch(slope: float, fixed: float, gb: float) -> int:
    """Tokens, in whole blocks, whose fixed + slope * tokens bytes fit."""
    return max(0, int((gb * 1e9 - fixed) / slope)) // BLOCK * BLOCK


def ratios(turns: list[list[float]], to: list[list[float]]) -> list[float]:
    """Of two modes' ms of steps by round: the ratio in each."""
    return [median(a) / median(b) for a, b in zip(turns, to, strict=True)]


def ratio(rounds: dict[str, list[list[float]]], mode: str, to: str) -> float | None:
    return median(ratios(rounds[mode], rounds[to])) if to in rounds else None


def make_row(mode: str, once: dict, twice: dict, rounds: dict[str, list[list[float]]]) -> dict:
    """once, twice: what measure_memory returned at the two sizes. rounds: ms of steps by mode."""
    (tokens, less), (more_tokens, more) = ((m["tokens"], m["bytes_per_token"] * m["tokens"])
                                           for m in (once, twice))
    slope = (more - less) / (more_tokens - tokens)
    fixed = once["peak_bytes"] - slope * tokens
    held, saved = once["held_bytes"], once["saved_bytes"]
    parts = saved | {VALUES: once["buffer_bytes"], "not in the graph": held - sum(saved.values()),
                     "transient": less - held - once["buffer_bytes"]}
    return {"mode": mode, "bytes_per_token": once["bytes_per_token"], "slope": slope,
            "fixed_bytes": fixed, "peak_mib": once["peak_bytes"] / MIB,
            "step_ms": median(ms for turn in rounds[mode] for ms in turn),
            "step_over_eager": ratio(rounds, mode, "eager"),
            "step_over_dense": ratio(rounds, mode, "dense"),
            "largest_microbatch": {str(gb): largest_microbatch(slope, fixed, gb) for gb in CARDS},
            "density": once.get("density"), "bits_per_value": once.get("bits_per_value"),
            "components": {name: part / tokens for name, part in parts.items()},
            "rounds_ms": rounds[mode], "sizes": [twice, once]}


def make_record(config: Config, rows: list[dict]) -> dict:
    by_mode = {row["mode"]: row for row in rows}
    weights = "/".join(Path(config.resume).parts[-2:]) if config.resume else ""
    ours, measures = by_mode.get(f"bitsparse-{config.codec}"), {}
    if weights and ours:
        for mode, name in (("eager", "modded_nanogpt"), ("dense", "dense")):
            if mode in by_mode:
                measures |= {f"vram_ratio_{name}": ours["bytes_per_token"]
                             / by_mode[mode]["bytes_per_token"],
                             f"step_ratio_{name}": ours[f"step_over_{mode}"]}
        measures |= {"peak_mib": ours["peak_mib"],
                     "host_synchronizations": ours["sizes"][1]["host_synchronizations"]}
    return bench_record.begin(SOURCES) | {
        "claim": "VRAM and time of a token with each way to save the MLP's activation, "
                 + (f"at the density of {weights}" if weights else "at initialization"),
        "weights": weights, "measures": measures, "rows": rows,
        "config": {key: value for key, value in asdict(config).items()
                   if key not in ("mlp", "codec", "deterministic", "log_dir", "resume",
                                  "wandb")}}


# -----------------------------------------------------------------------------
# Tables and page


def main_table(rows: list[dict]) -> list[str]:
    by_mode = {row["mode"]: row for row in rows}

    def over(row, mode):
        return shown(row["bytes_per_token"] / by_mode[mode]["bytes_per_token"]
                     if mode in by_mode else None, ".4f")

    def between(row, mode):
        if mode not in by_mode or row["mode"] == mode:
            return "–"
        found = ratios(row["rounds_ms"], by_mode[mode]["rounds_ms"])
        return f"{min(found):.4f}–{max(found):.4f}"

    head = ["mode", "density", "bits/value", "B/token", "/ eager", "/ dense", "slope", "peak MiB",
            "step ms", "/ eager", "in rounds", "/ dense", "in rounds", "waits",
            *(f"{gb} GB" for gb in CARDS)]
    return table([head] + [
        [row["mode"], shown(row["density"], ".3f"), shown(row["bits_per_value"], ".2f"),
         f"{row['bytes_per_token']:,.0f}", over(row, "eager"), over(row, "dense"),
         f"{row['slope']:,.0f}", f"{row['peak_mib']:,.0f}", f"{row['step_ms']:.2f}",
         shown(row["step_over_eager"], ".4f"), between(row, "eager"),
         shown(row["step_over_dense"], ".4f"), between(row, "dense"),
         str(row["sizes"][1]["host_synchronizations"]),
         *(f"{n:,}" for n in row["largest_microbatch"].values())] for row in rows])


def component_table(rows: list[dict]) -> list[str]:
    names = list(rows[0]["components"])
    cells = [[name, *(f"{row['components'][name]:,.0f}" for row in rows)] for name in names]
    return table([["B/token", *(row["mode"] for row in rows)], *cells,
                  ["all", *(f"{row['bytes_per_token']:,.0f}" for row in rows)]])


def page(record: dict) -> str:
    other, own = (size["tokens"] for size in record["rows"][0]["sizes"])
    turns = record["rows"][0]["rounds_ms"]
    weights = record["weights"] or f"initial, --seed {record['config']['seed']}"
    return "\n".join([
        *bench_record.head(record, f"Weights: {weights}; --storage {record['config']['storage']}; "
                           f"microbatches of {own:,} tokens, for the slope also of {other:,}"),
        "Each mode is a process with the trainer's own step, of 8 microbatches and with the "
        "optimizers, whose learning rates are so small that weights and density stay; B/token is "
        "the most that forward and backward allocate, buffer included, over the microbatch's "
        f"tokens. The modes take turns of {len(turns[0])} timed steps, {len(turns)} times; step ms "
        "is the median, a ratio the median over the rounds, and the largest microbatches (tokens "
        "that fit into so many 10^9 bytes) lie on the line through the peak with the slope.", "",
        *main_table(record["rows"]), "", "Where the bytes of a token are "
        "(scripts/bench_vram.py's docstring says how they are found):", "",
        *component_table(record["rows"])]) + "\n"


def main() -> None:
    options, others = read_arguments(sys.argv[1:])
    if options.earlier:
        record = bench_record.read(options.earlier)
    else:
        config = read_config(options.checkpoint, options.microbatch_tokens, others)
        number = config.steps if config.resume else 0  # the step whose batch and window are taken
        if not torch.cuda.is_available():
            slopes = slopes_on_cpu(config, options.modes, number)
            where = f"from {config.resume}" if config.resume else "at initialization"
            print(f"held for backward, weights apart, {where} (CPU, torch {torch.__version__}, "
                  f"triton {triton.__version__}):")
            return print_slopes(slopes)
        record = make_record(config, measure(config, options.modes, number))
    bench_record.write(record, options, page)
    print(f"{record['device']}, torch {record['torch']}, triton {record['triton']}; "
          f"{record['claim']}", "", *component_table(record["rows"]), "",
          *main_table(record["rows"]), sep="\n")


if __name__ == "__main__":
    main()
