"""The page and the pictures of a record of analyze_compression.py, from its numbers."""
import sys
from pathlib import Path
from statistics import fmean as mean

import bench_record
from compare_records import shown
from plot_records import COLORS, DASHES, STYLE, WIDTH, legend_below, plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bitsparse_kernels import CODECS  # noqa: E402

WORTH_TIMING = 0.03  # of the stored bytes: a format that saves less is left out, whatever its time

# -----------------------------------------------------------------------------
# Pictures


def plot_bits(analysis: dict):
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 4.2))
    points, layers = analysis["synthetic"], analysis["layers"]
    for axes, name in zip(panels, ("bfloat16", "float8_e4m3fn"), strict=True):
        dense = analysis["over_density"][name]["dense"]
        axes.axhline(dense, color="black", linewidth=1, label="dense")
        for codec, color, dashes in zip(CODECS, COLORS, DASHES, strict=False):
            for of, style in ((points, {"linestyle": dashes, "label": codec}),
                              (layers, {"linestyle": "", "marker": "o", "markersize": 4})):
                axes.plot([p["density"] for p in of],
                          [p["storage"][name]["codecs"][codec]["bits_per_element"] for p in of],
                          color=color, **style)
        for of, style in ((points, {"linestyle": ":", "label": "optimum"}),
                          (layers, {"linestyle": "", "marker": "x", "markersize": 5})):
            axes.plot([p["density"] for p in of], [p["storage"][name]["optimum"] for p in of],
                      color="black", **style)
        axes.set(title=name, xlabel="density (stored share of elements)", xlim=(0, 1),
                 ylim=(0, 1.1 * dense))
    panels[0].set_ylabel("stored (bits per element)")
    figure.suptitle("Lines: half-normal values in random places; dots: the layers", fontsize=12)
    legend_below(figure, panels[0])
    return figure


def plot_layers(analysis: dict):
    figure, (bars, lines) = plt.subplots(2, 1, figsize=(WIDTH, 6), sharex=True)
    layers = analysis["layers"]
    numbers, below = range(len(layers)), [0.0] * len(layers)
    optimum = [layer["storage"]["bfloat16"]["optimum"] for layer in layers]
    masks = [layer["mask_entropy"] for layer in layers]
    for label, color, heights in (
            ("optimum: mask", COLORS[0], masks),
            ("optimum: values", COLORS[5], [o - m for o, m in zip(optimum, masks, strict=True)]),
            ("gap: mask", COLORS[1], [layer["gap"]["mask"] for layer in layers]),
            ("gap: values", COLORS[4], [layer["gap"]["values"] for layer in layers]),
            ("gap: heads", COLORS[6], [layer["gap"]["heads"] for layer in layers])):
        bars.bar(numbers, heights, bottom=below, color=color, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    bars.set(ylabel="bits per element", title="What codec exponent stores in bf16", ylim=(0, None))
    for i, (label, values) in enumerate((
            ("exponent, a value", [layer["storage"]["bfloat16"]["exponent_entropy"]
                                   for layer in layers]),
            ("mask, an element", masks),
            ("mask, by column", [layer["mask_entropy_by_column"] for layer in layers]),
            ("density", [layer["density"] for layer in layers]))):
        lines.plot(numbers, values, color=COLORS[i], linestyle=DASHES[i], marker=".", label=label)
    lines.set(xlabel="layer", ylabel="entropy (bits)", title="Entropies, and density",
              xticks=numbers, ylim=(0, None))
    for axes in (bars, lines):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plot_losses(analysis: dict):
    figure, (losses, differences) = plt.subplots(2, 1, figsize=(WIDTH, 6), sharex=True)
    first = next(iter(analysis["curves"].values()))["train_loss"]
    for (name, curve), color in zip(analysis["curves"].items(), COLORS, strict=False):
        losses.plot(curve["steps"], curve["train_loss"], color=color, linewidth=1, label=name)
        differences.plot(curve["steps"],
                         [a - b for a, b in zip(curve["train_loss"], first, strict=True)],
                         color=color, linewidth=1)
    losses.set_ylabel("train loss (nats per token)")
    differences.set(xlabel="steps", ylabel="less the first run's")
    losses.legend()
    return figure


def draw(analysis: dict) -> dict:
    pictures = {"bits": plot_bits, "layers": plot_layers}
    if analysis["curves"]:
        pictures["losses"] = plot_losses
    with plt.rc_context(STYLE):
        return {name: plot(analysis) for name, plot in pictures.items()}


# -----------------------------------------------------------------------------
# Page


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(bench_record.table([head, *rows]))


def layers_table(layers: list[dict]) -> str:
    def cells(of):
        s = of["storage"]["bfloat16"]
        return [f"{of['density']:.3f}", f"{of['mask_entropy']:.3f}",
                f"{of['mask_entropy_by_column']:.3f}", f"{s['exponent_entropy']:.2f}",
                *(f"{s['codecs'][codec]['bits_per_element']:.3f}" for codec in CODECS),
                f"{s['codecs']['exponent']['bits_per_value']:.2f}", f"{s['optimum']:.3f}",
                f"{s['codecs']['exponent']['bits_per_element'] / s['optimum'] - 1:+.1%}"]

    return table(["layer", "density", "mask entropy", "by column", "exponent entropy", *CODECS,
                  "exponent, a value", "optimum", "exponent over it"],
                 [[str(i), *cells(layer)] for i, layer in enumerate(layers)])


def storages_table(layers: list[dict]) -> str:
    rows = []
    for name in layers[0]["storage"]:
        of = [layer["storage"][name] for layer in layers]
        optimum = mean(s["optimum"] for s in of)
        for codec in CODECS:
            bits = mean(s["codecs"][codec]["bits_per_element"] for s in of)
            rows.append([f"{name}, {codec}", f"{bits:.3f}", f"{optimum:.3f}",
                         f"{bits - optimum:.3f}", f"{bits / optimum:.3f}"])
    return table(["storage, codec", "bits an element", "optimum", "gap", "ratio"], rows)


def density_table(over_density: dict) -> str:
    rows = [[f"{name}, {codec}", str(of["dense"]), shown(of["break_even"][codec], ".4f"),
             shown(of["break_even_half_normal"][codec], ".4f")]
            for name, of in over_density.items() for codec in CODECS]
    return table(["storage, codec", "dense bits", "formula", "measured, half-normal"], rows)


def is_worth_timing(name: str, saved: float) -> bool:
    return saved >= WORTH_TIMING and not name.endswith("(bound)")


def savings_table(saving: dict[str, float]) -> str:
    return table(["format", "stored bytes saved", ""], [
        [name, f"{saved:+z.1%}", "no format" if name.endswith("(bound)") else
         "left out by its cost" if is_worth_timing(name, saved) else "left out"]
        for name, saved in saving.items()])


def lossy_table(layers: list[dict]) -> str:
    of = {name: mean(layer["storage"][name]["codecs"]["exponent"]["bits_per_element"]
                     for layer in layers) for name in layers[0]["storage"]}
    rows = [["bf16, exponent (lossless)", f"{of['bfloat16']:.3f}", "0", "0", "0"]]
    for name, values in layers[0]["lossy"].items():
        bits = values["bits_per_element"] or of[name]
        errors = ([layer["lossy"][name][gradient] for layer in layers]
                  for gradient in ("dW1", "dW2", "dx"))
        rows.append([f"**lossy:** {name}", f"{bits:.3f}",
                     *(f"{mean(e):.4f} ({max(e):.4f})" for e in errors)])
    return table(["", "bits an element", "dW1", "dW2", "dx"], rows)


def losses_section(curves: dict[str, dict]) -> str:
    rows = [[name, str(c["storage"]), f"{c['val_loss']:.4f}",
             f"{c['last_train_loss']:.4f}", f"{c['last_difference']:+.4f}",
             f"{c['largest_difference']:+.4f}"] for name, c in curves.items()]
    first = next(iter(curves.values()))
    averaged = first["last_steps"]
    return f"""
## Losses of lossy runs

{first['steps'][-1]} steps, alike but for the storage; differences from the first run's losses.

{table(['run', 'storage', 'val loss', f'train loss, last {averaged} steps', 'difference',
        'largest, one step'], rows)}

![Train losses, and their differences](losses.png)
"""


STORED_AND_OPTIMUM = """## Where the numbers come from

Let d be the density: the share of elements that are positive, and so stored.

**Stored.** An element takes 1 bit of mask and its share of a tile's 64-bit head. A share d of the
elements adds a value of w bits. A tile's values are padded to whole 16 bytes, on average by half
of what can be missing, 7.5 bytes = 60 bits:

    stored(d) = 1 + 64/2048 + w d + 60/2048,    w = 16 (raw), 15 (sign), 7 + e (exponent)

e is the number of bits that hold the exponents of a tile, counted from its smallest; or, in bf16
and where that is less, 3 and 16 more for each value that they are too few for (a patch). The
figures above are no formula: the activations were compressed and the bytes counted.

**Optimum.** To say what an element is, say whether it is stored, and if so which value it has. By
the chain rule of entropy the bits of the two add up:

    optimum(d) = H(d) + d H(value),    H(d) = -d log2 d - (1 - d) log2(1 - d)
    H(value)   = -sum over values v of p(v) log2 p(v)

The sign is not in it: a stored value is positive. p(v) is how often v came up in the layer. By
Shannon's source coding theorem no lossless code that takes elements one by one and knows d and p is
smaller on average. A code that knows more can be: with the density d_c of each column the mask
needs only the mean of H(d_c), which is at most H(d), since H is concave (Jensen).

**Gap.** What is stored above the optimum: 1 - H(d) for the mask, 0 at d = 1/2 and more the farther
d is from it; d (w - H(value)) and the padding for the values; 64/2048 for the head.
"""
EXPONENT_AGAINST_SIGN = """\
Exponent against sign: 7 + e < 15 where e < 8, that is where the exponents of a tile span at most
128 powers of two. Of k half-normal values the smallest is about 1.25/k of the width and the largest
3 to 4 times it, so exponents span about 2 + log2 k powers: 13 for all 2048 of a tile, for which
e = 4 is enough. With patches it is little more than 3."""
FORMATS = """\
- By columns: sorted columns lie next to each other by density. 16 bits a column are added for the
  order or the column's density, 8 for a base exponent.
- Two levels: a bit a group says whether it has any element; only such groups have a mask. Mask or
  list: a bit a group of 256 says which, then 256 bits, or a count and 8 bits for each place.
- By B elements: base and width of exponents (12 bits) for each B elements, today 2048, and no
  patches. With more than 2048 a tile is larger, and there are fewer heads and less padding.
- Escapes instead of patches: exponents in 1 to 4 bits, as is best for the tile, for its most
  frequent neighbours; the last code says that the exponent is another and stands, with 8 bits,
  behind the tile's values.
- Huffman: a code of whole bits for the layer's exponents, with its table (8 bits an exponent). The
  values of a tile then differ in width: to find one, those before it have to be read.
- Savings of a format of the mask and of one of the values add up."""
COSTS = """\
These save that much, and were left out without a kernel to time:
{}.

Columns can be sorted in two ways. If the rows of w1 and the columns of w2 are, y = post w2ᵀ is
summed in another order, and training is no longer bit-identical. If elements are, a thread's 8
neighbours in memory, one 16-byte access today, are 8 accesses, and their number bounds a kernel
that makes so many (see the docstring of _compress_staged_kernel). In a Huffman code a value's place
is known when all before it in its tile have been read: a warp's 32 lanes would wait for one."""
NEIGHBOURS = """\
- fp8: values rounded at one scale a tensor, codec exponent.
- Projection, in the manner of CompAct (Shamshoum et al., 2025): instead of post = relu(z)²,
  [tokens, h], its product with a random P, [h, r], is kept, normal with variance 1/r, which a seed
  makes again. dW2 takes (post P) Pᵀ for post, which is right on average. dW1 and dx need relu(z)
  itself, and take the square root of that, 0 where it is negative. CompAct projects the inputs of
  linear layers only, and its optimizer works in the projected space: this does not measure it."""


def page(a: dict) -> str:
    layers, model, over = a["layers"], a["model"], a["over_density"]
    of = [layer["storage"]["bfloat16"] for layer in layers]
    stored = {codec: mean(s["codecs"][codec]["bits_per_element"] for s in of) for codec in CODECS}
    optimum = mean(s["optimum"] for s in of)
    gap = {part: mean(layer["gap"][part] for layer in layers) for part in layers[0]["gap"]}
    wins = "\n".join(f"- {name}: " + (
        "nowhere" if of["exponent_below_sign_from"] is None else
        f"from density {of['exponent_below_sign_from']:.3f} on") for name, of in over.items())
    timed = [f"{name} ({saved:.1%})" for name, saved in a["saving"].items()
             if is_worth_timing(name, saved)]
    top = "\n".join(bench_record.head(
        a, f"Activations: {model['tokens']:,} validation tokens through {model['checkpoint']}, "
        f"step {model['step']} of {model['steps']}, loss {model['loss']:.4f}",
        f"Model: {len(layers)} layers of {model['hidden']:,} columns (hidden units)",
        f"Seed of synthetic values and projections: {a['seed']}"))
    return f"""{top}
## Result

Mean of the layers, bf16, in bits an element, at density \
{mean(layer['density'] for layer in layers):.3f}:

- stored: {stored['exponent']:.3f} with codec exponent, {stored['sign']:.3f} with sign, \
{stored['raw']:.3f} with raw, 16 dense
- the optimum, as defined below: {optimum:.3f}; codec exponent takes \
{stored['exponent'] / optimum:.3f} times that
- the gap between the two: {stored['exponent'] - optimum:.3f}, of it {gap['mask']:.3f} mask, \
{gap['values']:.3f} values with their padding, {gap['heads']:.3f} heads

{layers_table(layers)}

All in bits an element but for the density, the entropy of an exponent and "a value".

![Bits an element over density](bits.png)
![Layers](layers.png)

All storages, mean of the layers:

{storages_table(layers)}

{STORED_AND_OPTIMUM}
## Over density

Dense storage is smaller from where stored(d) = dense on:

    d = (dense - 1 - 64/2048 - 60/2048) / w

{density_table(over)}

A dash: nowhere below density 1. The formula's column has codec exponent with all exponent bits, its
worst case. Measured: half-normal values in random places, {len(a['synthetic'])} densities from 0
to 1, straight lines between them.

{EXPONENT_AGAINST_SIGN}

Measured, codec exponent takes less than sign:

{wins}

Elsewhere the two are equal: where a tile has few values, padding hides the difference, and an fp8
exponent may need all its bits.

## What the gap suggests

Other formats, counted from the same masks and values, all layers together, against codec exponent
in bf16. A format of the mask keeps today's values, one of the values today's mask.

{savings_table(a['saving'])}

{FORMATS}

Adopted is only what saves at least {WORTH_TIMING:.0%} within 1.05 of the time, as patches did.
{COSTS.format("; ".join(timed)) if timed else "None of these saves that much."}

## Lossy neighbours, for orientation

**None of these is lossless, and none but fp8 is part of this project.** Relative error of the
gradients, ||wrong - right|| / ||right||, right being bf16's; mean of the layers (and the worst).
Each layer is given its right input and gradient: errors of other layers are not in it.

{lossy_table(layers)}

{NEIGHBOURS}
{losses_section(a['curves']) if a['curves'] else ''}"""
