"""Draws what records and logs tell, as PNG and SVG.

    python scripts/plot_records.py BASELINE CANDIDATE... [--out records/pictures]

Each argument is a record folder, a log, or a quoted glob of logs, as for compare_records.py. Drawn
are the pictures that the runs have data for, and the others are named with what is missing:

    val_loss       val loss over steps, tokens and seconds; one line a run
    vram           VRAM per token over the tokens of a microbatch; a dot a run
    density        share of stored elements by layer over training; the last argument's first run
    buffer         capacity and use of the activation buffer over training; likewise
    bits           stored bits an element against density: what the steps of bitsparse runs took,
                   the size formula, and two optima
    step_time      step time over the baseline's (the first argument's); a bar a group, a dot a run
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from compare_records import Group, Run, load

matplotlib.use("Agg")  # files only: no display is needed
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bitsparse_kernels import TILE, bits_per_element  # noqa: E402

# Okabe and Ito's palette, told apart with every common colour blindness; dashes differ too.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DASHES = ["-", "--", "-.", ":"]
WIDTH = 8  # inches; a README shows it at about 830 pixels, so that 11 points stay readable
STYLE = {"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "bitsparse",
         "figure.constrained_layout.use": True}


def look(i: int) -> dict:
    """Colour and dashes of group i."""
    return {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)]}


def title(figure, text: str, groups: list[Group]) -> None:
    devices = {group.device for group in groups} - {None}
    figure.suptitle(text + (f" ({', '.join(sorted(devices))})" if devices else ""), fontsize=12)


def legend_below(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center",
                  ncols=2 if max(map(len, labels)) < 45 else 1)


# -----------------------------------------------------------------------------
# Pictures: each returns a figure, or a sentence on what it lacks


def plot_val_loss(groups: list[Group]):
    if not any(len(run.val) > 1 for group in groups for run in group.runs):
        return "no run has more than one val loss"
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 3.6), sharey=True)
    for i, group in enumerate(groups):
        for j, run in enumerate(group.runs):
            # The losses of the first steps would press all others into a line.
            points = [p for p in run.val if p.step >= run.val[-1].step / 10]
            y = [p.loss for p in points]
            per_step = run.tokens / run.total if run.tokens else None
            style = look(i) | {"marker": ".", "linewidth": 1.2,
                               "label": f"{group.name} (n = {len(group.runs)})" if j == 0 else None}
            panels[0].plot([p.step for p in points], y, **style)
            if per_step:
                panels[1].plot([p.step * per_step / 1e6 for p in points], y, **style)
            if all(p.milliseconds is not None for p in points):
                panels[2].plot([p.milliseconds / 1000 for p in points], y, **style)
    for axes, label in zip(panels, ("steps", "tokens (millions)", "training time (seconds)"),
                           strict=True):
        axes.set_xlabel(label)
        if not axes.lines:
            axes.text(0.5, 0.5, "not in the logs", ha="center", transform=axes.transAxes)
    panels[0].set_ylabel("val loss (nats per token)")
    title(figure, "Validation loss after the first tenth of the steps", groups)
    legend_below(figure, panels[0])
    return figure


def plot_vram(groups: list[Group]):
    figure, axes = plt.subplots(figsize=(WIDTH, 4))
    for i, group in enumerate(groups):
        points = [(run.config["microbatch_tokens"], run.bytes_per_token / 1024)
                  for run in group.runs if run.bytes_per_token]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), **look(i), marker="o",
                      label=f"{group.name} (n = {len(points)})")
    if not axes.lines:
        plt.close(figure)
        return "no run tells its VRAM per token (a run on a CPU has none)"
    axes.set(xlabel="tokens of a microbatch", ylabel="VRAM (KiB per token)", xlim=(0, None),
             ylim=(0, None))
    title(figure, "VRAM per token, forward and backward of a microbatch", groups)
    legend_below(figure, axes)
    return figure


def plot_density(groups: list[Group]):
    run = groups[-1].runs[0]
    if not run.buffer:
        return f"{run.file} has no buffer lines; they come with --mlp bitsparse"
    figure, axes = plt.subplots(figsize=(WIDTH, 4))
    steps = list(run.buffer)
    layers = np.array([density for *_, density in run.buffer.values()]).T
    # Layers have an order, so they get an ordered palette, and their numbers at the line's end.
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(layers)))
    for layer, (color, density) in enumerate(zip(colors, layers, strict=True)):
        axes.plot(steps, density, color=color, linewidth=1.4, label=f"layer {layer}",
                  linestyle=DASHES[layer % len(DASHES)], marker="." if len(steps) < 2 else None)
    axes.plot(steps, layers.mean(0), color="black", linewidth=2.5, label="mean")
    axes.set(xlabel="steps", ylabel="density (stored share of elements)", ylim=(0, None))
    title(figure, f"Density by layer over training, {groups[-1].name}", [groups[-1]])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


def plot_buffer(groups: list[Group]):
    run = groups[-1].runs[0]
    if not run.buffer:
        return f"{run.file} has no buffer lines; they come with --mlp bitsparse"
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    used, capacity, _ = zip(*run.buffer.values(), strict=True)
    for i, (name, taken) in enumerate((("capacity", capacity), ("used, the fullest microbatch",
                                                                used))):
        axes.plot(list(run.buffer), np.array(taken) / 2**20, **look(i), label=name)
    axes.set(xlabel="steps", ylabel="MiB", ylim=(0, None))
    title(figure, f"Activation buffer over training, {groups[-1].name}", [groups[-1]])
    legend_below(figure, axes)
    return figure


def entropy(p: np.ndarray) -> np.ndarray:
    return -p * np.log2(p) - (1 - p) * np.log2(1 - p)


def measured_bits(run: Run) -> list[tuple[float, float]]:
    """(density, stored bits an element) of each step: the fullest microbatch's use of the buffer,
    the mask and the heads."""
    c = run.config
    elements = c["layers"] * c["microbatch_tokens"] * 4 * c["dim"]
    return [(sum(density) / len(density), 1 + 64 / TILE + 8 * used / elements)
            for used, _, density in run.buffer.values()]


def plot_bits(groups: list[Group]):
    with_buffer = [(i, group) for i, group in enumerate(groups)
                   if any(run.buffer for run in group.runs)]
    if not with_buffer:
        return "no run has buffer lines; they come with --mlp bitsparse"
    figure, axes = plt.subplots(figsize=(WIDTH, 4.4))
    d = np.linspace(0.005, 0.6, 200)
    axes.axhline(16, color="black", linewidth=1, label="dense BF16")
    axes.plot(d, [bits_per_element(float(x)) for x in d], color="black", linestyle="--",
              label="BitSparse formula, raw BF16 values")
    axes.plot(d, entropy(d) + 15 * d, color="black", linestyle="-.",
              label="optimum, values of 15 random bits")
    axes.plot(d, entropy(d), color="black", linestyle=":", label="optimum of the mask alone")
    for i, group in with_buffer:
        points = [point for run in group.runs for point in measured_bits(run)]
        axes.scatter(*zip(*points, strict=True), s=8, color=COLORS[i % len(COLORS)], zorder=3,
                     label=f"steps of {group.name}", rasterized=True)  # thousands of them
    axes.set(xlabel="density (stored share of elements)", ylabel="stored (bits per element)",
             ylim=(0, 17), xlim=(0, 0.6))
    title(figure, "Stored bits against density", [group for _, group in with_buffer])
    legend_below(figure, axes)
    return figure


def plot_step_time(groups: list[Group]):
    median = all(run.step_median for group in groups for run in group.runs)
    times = [[run.step_median if median else run.step_average for run in group.runs]
             for group in groups]
    if len(groups) < 2 or any(None in of for of in times):
        return "needs two groups of runs, all with step times"
    base = sum(times[0]) / len(times[0])
    right = max(map(max, times)) / base
    figure, axes = plt.subplots(figsize=(WIDTH, 1.4 + 0.6 * len(groups)))
    for i, of in enumerate(times):
        ratio = sum(of) / len(of) / base
        axes.barh(i, ratio, color=COLORS[i % len(COLORS)], alpha=0.6, height=0.6)
        axes.scatter([t / base for t in of], [i] * len(of), color="black", s=14, zorder=3)
        axes.annotate(f"{ratio:.3f}", (right, i), xytext=(8, 0), textcoords="offset points",
                      va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(groups)), [f"{g.name} (n = {len(g.runs)})" for g in groups])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.set_xlabel(f"step time over the baseline's ({'median' if median else 'mean'} step; "
                    "dots: runs)")
    title(figure, "Step time", groups)
    return figure


PICTURES = {"val_loss": plot_val_loss, "vram": plot_vram, "density": plot_density,
            "buffer": plot_buffer, "bits": plot_bits, "step_time": plot_step_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="a record folder, a log, or a glob of logs")
    parser.add_argument("--out", type=Path, default=ROOT / "records" / "pictures",
                        help="folder of the pictures (here: records/pictures)")
    options = parser.parse_args()
    try:
        loaded = [load(argument) for argument in options.runs]
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_records.py: {error}")
    for _, problems in loaded:
        for problem in problems:
            print(problem, file=sys.stderr)
    groups = [group for group, _ in loaded]
    with plt.rc_context(STYLE):
        for name, plot in PICTURES.items():
            figure = plot(groups)
            if isinstance(figure, str):
                print(f"{name}: not drawn: {figure}")
                continue
            for suffix in ("png", "svg"):
                path = options.out / f"{name}.{suffix}"
                # Without the date, the same runs give the same file.
                figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == "svg" else None)
                print(path)
            plt.close(figure)


if __name__ == "__main__":
    main()
