"""How close to the optimum are the stored activations, and what would come closer?

    python scripts/analyze_compression.py --checkpoint logs/RUN/step-00000300.pt \\
        --data data/fineweb10B --json FILE
    python scripts/analyze_compression.py --from FILE --out records/2026-01-31_Optimum
    ... --curves bf16=logs/A.txt e4m3=logs/B.txt e5m2=logs/C.txt    # and losses of lossy runs

One microbatch of validation tokens goes forward and backward through the checkpoint's model, on
the GPU where there is one, else on the CPU. Of each layer's z = x w1ᵀ are told: what each codec and
storage really takes (it is compressed), the entropies of mask and values, and the gap between the
two; the bytes that other formats would take, counted from the same masks and values; and what
lossy storage does to dW1, dW2 and dx. The same over density, for half-normal
values in random places. --curves takes runs of train_gpt.py alike but for their --storage; the
first is what the others are compared with. The record's README.md (analyze_page.py) explains all
terms.
"""
import argparse
import heapq
import math
import sys
from pathlib import Path
from statistics import fmean as mean

import bench_record
import torch
import torch.nn.functional as F
from bench_record import stop
from compare_records import load
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402
from bitsparse_kernels import (  # noqa: E402
    ALIGN,
    CODECS,
    STORAGES,
    TILE,
    ActivationBuffer,
    bits_per_element,
    compress,
    optimal_bits_per_element,
)
from train_gpt import GPT, Config, ValData, compiled, read_checkpoint, window_blocks  # noqa: E402

SOURCES = ("train_gpt.py", "bitsparse_kernels.py", "scripts/analyze_compression.py")
NAMES = {storage: str(storage)[6:] for storage in STORAGES}  # without "torch."
BF16 = torch.bfloat16
HEAD_BITS, BLOCK_BITS = 64, 12  # of a tile's head; those of them that tell base and exponent bits
MASK_GROUPS, EXPONENT_BLOCKS, RANKS = (8, 32, 256), (256, 512, 1024, 2048, 4096), (0.25, 0.5)
LAST = 20  # steps at most, over which train losses are averaged
SAMPLE = 2 ** 17  # elements of a synthetic tensor
DENSITIES = [0, 0.001, 0.002, 0.005, 0.01, 0.02, *(i / 20 for i in range(1, 21))]


# -----------------------------------------------------------------------------
# Activations


def capture(path: str, data: str | None, device: torch.device) -> tuple[list, dict]:
    """(x, dy, w1, w2) of each layer's MLP, bf16, and what they are of.

    x [tokens, d] is its input, dy the gradient of its output.
    """
    checkpoint = read_checkpoint(path, ("config", "model", "run"))
    tokens, step = checkpoint["config"]["microbatch_tokens"], checkpoint["run"]["number"]
    config = Config(**checkpoint["config"] | {
        "mlp": "dense", "val_sequence": tokens, "val_tokens": tokens,
        "data": data or checkpoint["config"]["data"]})
    batch = ValData(config)[0].to(device)
    model = GPT(config, None)
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        stop(f"{path} does not fit this version of train_gpt.py: {' '.join(str(error).split())}")
    model.to(device)
    # Hooks do not run within a compiled model, and FlexAttention does not run without.
    train_gpt.flex_attention = compiled(train_gpt.flex_attention)
    inputs, gradients = {}, {}

    def keep(mlp, arguments, y):
        inputs[mlp.layer] = arguments[0].detach()
        y.register_hook(lambda dy: gradients.__setitem__(mlp.layer, dy))

    for block in model.blocks:
        block.mlp.register_forward_hook(keep)
    window = torch.tensor(window_blocks(config, step), dtype=torch.int32, device=device)
    loss = model(batch[:-1], batch[1:].long(), window)
    loss.backward()
    layers = [(inputs[i], gradients[i], block.mlp.w1.detach().to(BF16),
               block.mlp.w2.detach().to(BF16)) for i, block in enumerate(model.blocks)]
    return layers, {"checkpoint": path, "step": step, "steps": config.steps, "tokens": tokens,
                    "hidden": 4 * config.dim, "loss": loss.item() / tokens}


# -----------------------------------------------------------------------------
# Sizes and entropies


def entropy(counts: Tensor) -> float:
    """Bits a symbol, of symbols that came up so often."""
    p = counts.double() / counts.sum().clamp(min=1)
    return torch.special.entr(p).sum().item() / math.log(2)


def mask_entropy(density: Tensor) -> float:
    """Bits an element, mean over independent columns of these densities."""
    p = density.double()
    return ((torch.special.entr(p) + torch.special.entr(1 - p)).mean() / math.log(2)).item()


def round_to(z: Tensor, storage: torch.dtype, scale: list[Tensor]) -> tuple[Tensor, Tensor]:
    """relu(z) as it is stored: its bits without the sign, int32, and its value, float32."""
    if not scale:
        return z.view(torch.int16).int() & 0x7FFF, z.relu().float()
    v = (z.relu().float() * (1 / scale[0])).to(storage)
    return v.view(torch.uint8).int(), v.float() * scale[0]


def measure(z: Tensor) -> dict:
    """By storage: entropies of the values, optimum, and what each codec really takes.

    z bf16, contiguous. Bits an element count mask, heads, values and fp8's scale.
    """
    n, stored, measured = z.numel(), z > 0, {}
    nnz = int(stored.sum())
    buffer = ActivationBuffer(2 * n + ALIGN * (n // TILE + 1), z.device)
    for storage, (bits, mantissa) in STORAGES.items():
        codecs = {}
        for codec in CODECS:
            buffer.reset()
            t = compress(z, buffer, codec, storage)
            used = int(buffer.used_bytes())
            codecs[codec] = {"bits_per_value": 8 * used / max(nnz, 1), "bits_per_element":
                             8 * (used + sum(s.nbytes for s in t.saved)) / n}
        v, _ = round_to(z, storage, t.saved[2:])
        counts = v[stored].bincount(minlength=1 << (bits - 1))
        value_entropy = entropy(counts)
        measured[NAMES[storage]] = {
            "codecs": codecs, "value_entropy": value_entropy,
            "exponent_entropy": entropy(counts.view(-1, 1 << mantissa).sum(1)),
            "optimum": optimal_bits_per_element(nnz / n, storage, value_entropy - mantissa)}
    return measured


def packed_bits(stored: Tensor, exponent: Tensor, block: int = TILE) -> int:
    """Heads and values of codec exponent in bf16 without patches, were exponents packed by `block`.

    stored bool and exponent int32, flat, in whole blocks and tiles. A larger block is a larger
    tile; of smaller ones each but a tile's first costs its base and exponent bits once more.
    """
    tile, none = max(TILE, block), 1 << 20
    stored, exponent = stored.view(-1, block), exponent.view(-1, block)
    least = exponent.masked_fill(~stored, none).amin(1)
    spread = (exponent.masked_fill(~stored, -none).amax(1) - least).clamp(min=0)
    width = 7 + torch.frexp(spread.double()).exponent  # which is the bit length of an integer
    tile_bits = (stored.sum(1) * width).view(-1, tile // block).sum(1)
    return padded_bits(tile_bits) + len(tile_bits) * (HEAD_BITS + BLOCK_BITS * (tile // block - 1))


def padded_bits(tile_bits: Tensor) -> int:
    return int((-(-tile_bits // (8 * ALIGN)) * 8 * ALIGN).sum())


def escaped_bits(by_tile: Tensor) -> int:
    """As packed_bits, by tiles; but of k exponent bits the last code stands for an exponent that is
    not among the 2^k - 1 most frequent neighbours, and whose 8 bits follow behind the values.

    by_tile int64 [tiles, 256]: how often each exponent came up. The best k is taken of each tile,
    or as many bits as need no such code.
    """
    nnz, upto = by_tile.sum(1), F.pad(by_tile.cumsum(1), (1, 0))

    def outside(codes):  # of the best place for so many neighbours
        return nnz - (upto[:, codes:] - upto[:, :-codes]).amax(1)

    sizes = [torch.where(outside(1 << k) == 0, nnz * (7 + k), nnz * 15) for k in range(9)]
    sizes += [nnz * (7 + k) + 8 * outside((1 << k) - 1) for k in range(1, 5)]
    return padded_bits(torch.stack(sizes).amin(0)) + HEAD_BITS * len(nnz)


def huffman_lengths(counts: list[int]) -> list[int]:
    """Bits of each symbol in the best code of whole bits; 0 for those that never came up."""
    lengths = [0] * len(counts)
    heap = [(count, [symbol]) for symbol, count in enumerate(counts) if count]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, first), (b, second) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in first + second:
            lengths[symbol] += 1
        heapq.heappush(heap, (a + b, first + second))
    return lengths


def variants(z: Tensor) -> dict[str, int]:
    """Bits that z [tokens, hidden] would take, bf16 and lossless, by format; "(bound)": at least.

    A format of the mask is counted with today's values, one of the values with today's mask.
    """
    tokens, hidden = z.shape
    whole = -z.numel() % max(EXPONENT_BLOCKS)
    stored = z > 0
    column = stored.double().mean(0)
    flat = F.pad(stored.flatten(), (0, whole))
    exponent = (z.view(torch.int16).int() & 0x7FFF) >> 7
    flat_exponent = F.pad(exponent.flatten(), (0, whole))
    n, mask, t = z.numel(), z.numel(), compress(z, codec="exponent")
    values = 8 * t.buffer.capacity_bytes + HEAD_BITS * len(t.saved[0])

    masks = {"mask at its entropy (bound)": n * mask_entropy(stored.double().mean()[None]),
             "mask at its entropy by column (bound)": n * mask_entropy(column) + 16 * hidden,
             "mask without empty columns": tokens * int((column > 0).sum()) + hidden}
    by_density = stored[:, column.argsort()]
    for order, rows, cost in (("", stored, 0), (", columns sorted", by_density, 16 * hidden)):
        filled = F.pad(rows.flatten(), (0, whole))
        for group in MASK_GROUPS:
            groups = filled.view(-1, group).any(1)
            masks[f"mask of two levels, groups of {group}{order}"] = (
                len(groups) + group * int(groups.sum()) + cost)
        in_group = filled.view(-1, 256).sum(1)
        masks[f"mask or list of places, groups of 256{order}"] = int(
            (1 + (8 + 8 * in_group).clamp(max=256)).sum()) + cost

    packed = {f"exponents by {block} elements": packed_bits(flat, flat_exponent, block)
              for block in EXPONENT_BLOCKS}
    base = ((exponent * stored).sum(0) / stored.sum(0).clamp(min=1)).round().int()
    packed["exponents less a base by column"] = 8 * hidden + packed_bits(
        flat, F.pad((exponent - base).flatten(), (0, whole)))
    tile = torch.arange(len(flat) // TILE, device=z.device).repeat_interleave(TILE)
    by_tile = (256 * tile + flat_exponent)[flat].bincount(minlength=256 * len(flat) // TILE)
    by_tile = by_tile.view(-1, 256)
    packed["exponents with escapes"] = escaped_bits(by_tile)
    counts, nnz, heads = by_tile.sum(0), by_tile.sum(1).double(), HEAD_BITS * len(by_tile)
    lengths = torch.tensor(huffman_lengths(counts.tolist()), device=z.device)
    packed["exponents in a Huffman code by layer"] = 8 * 256 + heads + padded_bits(
        (by_tile * (7 + lengths)).sum(1))
    often = by_tile.double()
    bits = (torch.xlogy(nnz, nnz) - torch.xlogy(often, often).sum(1)) / math.log(2)
    packed["exponents at their entropy by tile (bound)"] = heads + (7 * nnz + bits).sum().item()
    least = (counts.sum() * (7 + entropy(counts))).item()
    return ({name: round(m) + values for name, m in masks.items()} |
            {name: mask + round(v) for name, v in packed.items()} |
            {"both, mask by column and exponents by layer (bound)": round(
                masks["mask at its entropy by column (bound)"] + least)})


# -----------------------------------------------------------------------------
# Lossy neighbours


def gradients(x: Tensor, dy: Tensor, w1: Tensor, w2: Tensor, r: Tensor,
              post: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dW1, dW2, dx of relu(x w1ᵀ)² w2ᵀ as backward makes them from r = relu(z) and post = r²."""
    dz = ((dy @ w2).float() * (2 * r)).to(BF16)
    return dz.t() @ x, dy.t() @ post.to(BF16), dz @ w1


def lossy(z: Tensor, layer: tuple, seed: int) -> dict[str, dict]:
    """Relative errors of the gradients, and bits an element where no codec tells them."""
    hidden = z.shape[1]
    r = z.relu().float()
    post = (r * r).to(BF16)
    right = gradients(*layer, r, post)
    rows = {}

    def row(name, bits, r, post):
        wrong = gradients(*layer, r, post)
        rows[name] = {"bits_per_element": bits} | {
            of: ((a.float() - b.float()).norm() / b.float().norm()).item()
            for of, a, b in zip(("dW1", "dW2", "dx"), wrong, right, strict=True)}

    for storage in STORAGES:
        if storage != BF16:
            t = compress(z, None, "raw", storage)
            _, kept = round_to(z, storage, t.saved[2:])
            row(NAMES[storage], None, kept, kept * kept)
    for fraction in RANKS:
        rank = round(fraction * hidden)
        generator = torch.Generator().manual_seed(seed)
        p = (torch.randn(hidden, rank, generator=generator) / rank ** 0.5).to(z.device)
        guess = (post.float() @ p).to(BF16).float() @ p.t()
        row(f"projection, rank {fraction:g} h", 16 * rank / hidden, guess.clamp(min=0).sqrt(),
            guess)
    return rows


# -----------------------------------------------------------------------------
# Losses of other runs


def read_curves(arguments: list[str]) -> dict[str, dict]:
    """Train and val losses by step, by name."""
    curves = {}
    for argument in arguments:
        name, _, file = argument.partition("=")
        if not file:
            stop(f"--curves: expected NAME=LOG, received {argument!r}")
        try:
            group, _ = load(file)
        except (OSError, ValueError) as error:
            stop(f"--curves {name}: {' '.join(str(error).split())}")
        run, *others = group.runs
        if others:
            stop(f"--curves {name}: expected one run, received {len(group.runs)} in {file}")
        if not run.train:
            stop(f"--curves {name}: expected train losses, received none in {file}")
        curves[name] = {"log": file, "storage": run.config.get("storage"),
                        "val_loss": run.final_loss, "steps": [p.step for p in run.train],
                        "train_loss": [p.loss for p in run.train]}
    first = next(iter(curves.values()), None)
    for name, curve in curves.items():
        if curve["steps"] != first["steps"]:
            stop(f"--curves {name}: expected the {len(first['steps'])} steps of {first['log']}, "
                 f"received {len(curve['steps'])} in {curve['log']}")
        differences = [a - b for a, b in zip(curve["train_loss"], first["train_loss"], strict=True)]
        curve["last_steps"] = len(differences[-LAST:])
        curve["last_train_loss"] = mean(curve["train_loss"][-LAST:])
        curve["last_difference"] = mean(differences[-LAST:])
        curve["largest_difference"] = max(differences, key=abs)
    return curves


# -----------------------------------------------------------------------------
# The analysis


def analyze_layer(layer: tuple, seed: int) -> dict:
    x, _, w1, _ = layer
    z = F.linear(x, w1)
    column = (z > 0).double().mean(0)
    measured = measure(z)
    codecs = measured["bfloat16"]["codecs"]["exponent"]
    density, n = column.mean().item(), z.numel()
    masks, optimum = mask_entropy(column.mean()[None]), measured["bfloat16"]["optimum"]
    return {
        "density": density, "empty_columns": int((column == 0).sum()), "mask_entropy": masks,
        "mask_entropy_by_column": mask_entropy(column), "storage": measured,
        "gap": {"mask": 1 - masks, "heads": HEAD_BITS / TILE,  # of codec exponent, bf16
                "values": codecs["bits_per_element"] - 1 - HEAD_BITS / TILE - (optimum - masks)},
        "variants": {name: bits / n for name, bits in variants(z).items()},
        "lossy": lossy(z, layer, seed)}


def analyze_synthetic(device: torch.device, seed: int) -> list[dict]:
    """Half-normal values in random places, of each density."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SAMPLE, generator=generator).abs()
    place = torch.randperm(SAMPLE, generator=generator)
    points = [{"density": count / SAMPLE, "storage": measure(
        torch.where(place < count, values, -values).to(BF16).to(device))}
        for count in (round(d * SAMPLE) for d in DENSITIES)]
    for point in points:  # values are alike at all densities: the most of them tell their entropy
        for storage, name in NAMES.items():
            most = points[-1]["storage"][name]["value_entropy"]
            point["storage"][name] |= {"value_entropy": most, "optimum": optimal_bits_per_element(
                point["density"], storage, most - STORAGES[storage][1])}
    return points


def break_even(codec: str, storage: torch.dtype) -> float | None:
    """Density from which dense storage is smaller, by the size formula; None: nowhere below 1.

    The exponent codec is taken at its worst, with all exponent bits.
    """
    low, high = (bits_per_element(d, codec, storage) for d in (0.25, 0.75))
    width = (high - low) / 0.5
    density = (STORAGES[storage][0] - (low - 0.25 * width)) / width
    return density if density < 1 else None


def crossing(points: list[dict], storage: torch.dtype, codec: str) -> float | None:
    """As break_even, from the measured sizes, straight between them."""
    dense, before = STORAGES[storage][0], None
    for point in points:
        d = point["density"]
        b = point["storage"][NAMES[storage]]["codecs"][codec]["bits_per_element"]
        if b > dense:
            return before[0] + (d - before[0]) * (dense - before[1]) / (b - before[1])
        before = d, b
    return None


def exponent_wins_from(points: list[dict], name: str) -> float | None:
    """The least density from which on codec exponent takes less than sign; None: there is none."""
    wins = None
    for point in reversed(points):
        codecs = point["storage"][name]["codecs"]
        if codecs["exponent"]["bits_per_element"] >= codecs["sign"]["bits_per_element"]:
            break
        wins = point["density"]
    return wins


def analyze(path: str, data: str | None, seed: int) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    captured, about = capture(path, data, device)
    layers = []
    while captured:  # a layer's tensors go when it is done
        layers.append(analyze_layer(captured.pop(0), seed))
    points = analyze_synthetic(device, seed)
    total = sum(layer["storage"]["bfloat16"]["codecs"]["exponent"]["bits_per_element"]
                for layer in layers)
    optimum = sum(layer["storage"]["bfloat16"]["optimum"] for layer in layers)
    return {
        "claim": "Stored bits of each codec against the entropy bound, by layer and over density",
        "measures": {"bits_over_optimum": total / optimum},
        "seed": seed, "model": about, "layers": layers, "saving": {
            name: 1 - sum(layer["variants"][name] for layer in layers) / total
            for name in layers[0]["variants"]},
        "synthetic": points, "over_density": {
            NAMES[storage]: {
                "dense": STORAGES[storage][0],
                "break_even": {codec: break_even(codec, storage) for codec in CODECS},
                "break_even_half_normal": {codec: crossing(points, storage, codec)
                                           for codec in CODECS},
                "exponent_below_sign_from": exponent_wins_from(points, NAMES[storage])}
            for storage in STORAGES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a step-*.pt of train_gpt.py")
    parser.add_argument("--data", help="folder of fineweb_val_*.bin (here: that of the run)")
    parser.add_argument("--curves", nargs="+", default=[], metavar="NAME=LOG",
                        help="logs of runs whose losses are compared with the first's")
    parser.add_argument("--seed", type=int, default=0,
                        help="of synthetic values and of projections (here: 0)")
    bench_record.add_options(parser)
    options = parser.parse_args()
    if not (options.earlier or options.checkpoint) or not (options.json or options.out):
        stop("expected --checkpoint or --from, and --json or --out")
    curves = read_curves(options.curves)  # before the work, as all that can be wrong
    bench_record.check_options(parser, options, beside=("curves",), pictures=True)
    if options.earlier:
        record = bench_record.read(options.earlier)
    else:
        record = bench_record.begin(SOURCES) | {"curves": {}} | analyze(
            options.checkpoint, options.data, options.seed)
    record["curves"] = curves or record["curves"]
    page = draw = None
    if options.out:  # which needs matplotlib, unlike --json
        from analyze_page import draw, page
    bench_record.write(record, options, page, draw)
    print(f"{record['measures']['bits_over_optimum']:.3f} times the entropy bound; written:",
          *filter(None, (options.json, options.out)))


if __name__ == "__main__":
    main()
