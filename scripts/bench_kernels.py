"""How fast the kernels are, and how much they store: against the copy roofline, and against others.

    python scripts/bench_kernels.py                       # the table, on a GPU; a minute or two
    python scripts/bench_kernels.py --peers               # and other ways to hold the same values
    python scripts/bench_kernels.py --activations z.pt    # also on real pre-activations: of a file,
    python scripts/bench_kernels.py --checkpoint logs/RUN/step-00000054.pt --data DIR    # of a run
    python scripts/bench_kernels.py --peers --json FILE   # the numbers, and a record of them:
    python scripts/bench_kernels.py --from FILE --out records/YYYY-MM-DD_Kernels

What a row's kernel writes is compared with torch's values before it is timed; the exit status is 1
where any differ. Times are medians, each run from a cold L2 (a buffer
of 256 MiB is overwritten in between). The roofline is the rate of a device-to-device copy of the
first shape, measured in the same run, bytes read and written; a kernel's share of it counts the
bytes that it must move at least: its dense tensors once, mask, heads and the stored values.

    compress    z -> post = relu(z)² in its place, and mask, heads, values
    decode      mask, heads, values -> relu(z)
    backward    dh -> dz in its place, and post, from mask, heads, values
    gradient    dh -> dz in its place, alone
    dense       the same two directions of --mlp dense: z -> post; dh, post -> dz

Where the GPU allows it (relu2_mlp's docstring), the MLP's first GEMM makes post itself: what that
takes together with the compression is timed too, beside a GEMM of cuBLAS and the kernels above.

z is normal with its mean shifted to give the density; --activations takes a file of torch.save: a
bf16 tensor [tokens, hidden] or a dict of them by name. --checkpoint sends a microbatch of --data's
validation tokens through a trained model, and takes every third layer.
"""
import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import bench_record
import torch
import torch.nn.functional as F
from analyze_compression import capture
from bench_record import stop, table
from compare_records import shown

sys.path.insert(0, str(Path(__file__).parent.parent))
import bitsparse_kernels as bk

SOURCES = ("train_gpt.py", "bitsparse_kernels.py", "scripts/analyze_compression.py",
           "scripts/bench_kernels.py")
SHAPES = [(65536, 3072), (16384, 21504)]
WIDTHS = 768, 4096  # d of the two models whose hidden activations these are
DENSITIES = [0.1, 0.2, 0.5]
DECISIVE = 0.2  # the density of the targets, of fp8's rows and of the peers


def measure(function, flush: torch.Tensor, prepare=None, repeats: int = 15) -> float:
    """Median ms of function(), from a cold L2."""
    events = []
    for _ in range(repeats + 3):
        if prepare is not None:
            prepare()
        flush.zero_()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        function()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events[3:])  # warm from then on
    return times[len(times) // 2]


def synthetic(shape: tuple[int, int], density: float) -> torch.Tensor:
    shift = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - density)).item()
    return (torch.randn(shape, device="cuda") - shift).bfloat16()


def differing(*pairs: tuple[torch.Tensor, torch.Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in pairs)


def bench_format(z: torch.Tensor, codec: str, storage: torch.dtype, rate: float,
                 flush: torch.Tensor) -> list[dict]:
    """Rows of one tensor, codec and storage. rate: bytes / ms of the roofline."""
    n = z.numel()
    dh = torch.randn_like(z)
    buffer = bk.ActivationBuffer(2 * n, z.device)
    saved = bk.compress_triton(post := z.clone(), buffer, 2, codec, storage)
    r = bk.decompress_triton(saved, buffer, n, codec, storage).view_as(z)
    wrong = {}  # values, by kernel; of fp8 what is read back alone
    if storage == torch.bfloat16:
        bk.gradient_triton(dz := dh.clone(), saved, buffer, 2, codec, storage)
        want = torch.where(z > 0, (dh.float() * (2 * r.float())).bfloat16(), 0)
        wrong = {"decode": differing((r, z.relu())), "gradient": differing((dz, want)),
                 "compress": differing((post, z.relu().square()))}
        dz, post = bk.backward_triton(dh.clone(), saved, buffer, 2, codec, storage)
        wrong["backward"] = differing((dz, want), (post, z.relu().square()))
        del want, dz
    else:
        fp8 = (z.relu().float() * (1 / saved[2])).to(storage).float() * saved[2]
        wrong["decode"] = differing((r, fp8.bfloat16()))
        del fp8
    nnz, used = int((z > 0).sum()), int(buffer.used_bytes())
    held = used + saved[0].nbytes + saved[1].nbytes
    rows = []

    def row(kernel, dense_bytes, function, prepare=None):
        ms = measure(function, flush, prepare)
        moved = dense_bytes + held
        rows.append({"kernel": kernel, "codec": codec, "storage": str(storage)[6:], "ms": ms,
                     "gb_per_s": moved / ms / 1e6, "of_roofline": moved / ms / rate,
                     "bits_an_element": 8 * held / n, "bits_a_value": 8 * used / max(nnz, 1),
                     "density": nnz / n, "values": nnz, "differing": wrong.get(kernel)})

    row("decode", 2 * n, lambda: bk.decompress_triton(saved, buffer, n, codec, storage))
    row("backward", 6 * n, lambda: bk.backward_triton(dh, saved, buffer, 2, codec, storage))
    row("gradient", 4 * n, lambda: bk.gradient_triton(dh, saved, buffer, 2, codec, storage))

    def prepare():  # the same density each time, and a buffer that does not fill up
        buffer.reset()
        post.copy_(z)

    row("compress", 4 * n, lambda: bk.compress_triton(post, buffer, 2, codec, storage), prepare)
    return rows


def bench_dense(z: torch.Tensor, rate: float, flush: torch.Tensor) -> list[dict]:
    n, rows = z.numel(), []
    post, dh = z.relu().square(), torch.randn_like(z)
    for kernel, moved, function in (
            ("compress", 4 * n, lambda: bk.activate_triton(post, 2)),
            ("gradient", 6 * n, lambda: bk.dense_gradient_triton(dh, post, 2, from_post=True))):
        ms = measure(function, flush)
        rows.append({"kernel": kernel, "codec": "dense", "storage": "bfloat16", "ms": ms,
                     "gb_per_s": moved / ms / 1e6, "of_roofline": moved / ms / rate,
                     "bits_an_element": 16.0, "bits_a_value": None,
                     "density": int((z > 0).sum()) / n, "values": None, "differing": None})
    return rows


def bench_gemm(tokens: int, d: int, hidden: int, flush: torch.Tensor) -> list[dict]:
    """The first GEMM and what makes post and stores z, apart and fused, at density DECISIVE."""
    x = torch.randn(tokens, d, device=flush.device).bfloat16()
    w1 = (torch.randn(hidden, d, device=flush.device) * (d - 1) ** -0.5).bfloat16()
    x[:, 0] = 1
    w1[:, 0] = torch.distributions.Normal(0, 1).icdf(torch.tensor(DECISIVE)).item()
    buffer = bk.ActivationBuffer(tokens * hidden, x.device)
    if not bk._may_fuse(x, w1, None, 2, True):
        print(f"GEMM {[tokens, d, hidden]}: not fused on this GPU, not timed")
        return []

    def apart(way):
        z = F.linear(x, w1)
        if way == "dense":
            bk.activate_triton(z, 2)
            return z, []
        return z, bk.compress_triton(z, buffer, 2, way)

    def fused(way):
        post = bk.linear_activate_triton(x, w1, 2, None if way == "dense" else buffer.state)
        if way == "dense":
            return post, []
        return post, bk.compress_triton(post, buffer, 0, way, from_post=True)

    rows = []
    for way in ("dense", *bk.CODECS):
        wrong = []
        for function in (apart, fused):
            buffer.reset()
            post, saved = function(way)
            z = bk.decompress_triton(saved, buffer, post.numel(), way) if saved else post
            wrong.append((post, z))
        rows.append({"shape": [tokens, d, hidden], "way": way,
                     "apart_ms": measure(lambda w=way: apart(w), flush, buffer.reset),
                     "fused_ms": measure(lambda w=way: fused(w), flush, buffer.reset),
                     "differing": differing(*zip(*wrong, strict=True))})
        del wrong, post, saved, z
    return rows


def bench_peers(z: torch.Tensor, flush: torch.Tensor) -> list[dict]:
    """Other ways to hold relu(z): bits an element, ms in and ms out."""
    r, n = z.relu(), z.numel()
    rows = []

    def row(name, held, compress, decompress):
        rows.append({"peer": name, "bits_an_element": 8 * held / n,
                     "compress_ms": measure(compress, flush, repeats=5),
                     "decompress_ms": measure(decompress, flush, repeats=5)})

    sparse = r.to_sparse_csr()
    held = sum(t.nbytes for t in (sparse.crow_indices(), sparse.col_indices(), sparse.values()))
    row("torch CSR (int64 indices)", held, r.to_sparse_csr, sparse.to_dense)

    mask, values = r > 0, r[r > 0]

    def torch_decompress():
        out = torch.zeros_like(r)
        out[mask] = values
        return out

    if differing((torch_decompress(), r)):
        stop("torch's mask and values do not give relu(z) back; no peer was timed")
    row("torch: bool mask and r[mask]", mask.nbytes + values.nbytes, lambda: (r > 0, r[r > 0]),
        torch_decompress)

    d = z.shape[1] // 4
    x, w = z.new_empty(len(z), d).normal_(), z.new_empty(z.shape[1], d).normal_()
    row(f"recompute the FFN's first GEMM (d = {d})", 0, lambda: None,
        lambda: F.linear(x, w).relu_())
    try:
        from nvidia import nvcomp
    except ImportError:
        print("nvCOMP: not measured, as nvidia.nvcomp cannot be imported "
              "(pip install nvidia-nvcomp-cu13)")
        return rows

    def alone(function, argument):  # nvCOMP has a stream of its own, on which no event waits
        torch.cuda.synchronize()
        function(argument)
        torch.cuda.synchronize()

    array = nvcomp.as_array(r.view(torch.uint8).view(-1))
    torch.cuda.synchronize()
    for algorithm in ("LZ4", "Cascaded", "Bitcomp", "ANS"):
        try:
            coder = nvcomp.Codec(algorithm=algorithm)
            packed = coder.encode(array)
            row(f"nvCOMP {algorithm}", packed.buffer_size, lambda c=coder: alone(c.encode, array),
                lambda c=coder, p=packed: alone(c.decode, p))
        except RuntimeError as error:  # all that was measured before is not lost for it
            print(f"nvCOMP {algorithm}: not measured: {error}")
    return rows


def load_activations(path: str) -> dict[str, torch.Tensor]:
    loaded = torch.load(path, weights_only=True)
    tensors = loaded if isinstance(loaded, dict) else {Path(path).stem: loaded}
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor) or t.dtype != torch.bfloat16 or t.dim() != 2:
            stop(f"{path}: expected bf16 tensors [tokens, hidden], received {name}: "
                 f"{getattr(t, 'dtype', type(t).__name__)}")
    return tensors


def capture_layers(path: str, data: str | None, device: torch.device) -> dict[str, torch.Tensor]:
    """z of every third layer of a trained run, of a microbatch of validation tokens."""
    layers, _ = capture(path, data, device)
    return {f"layer {i}": F.linear(x, w1) for i, (x, _, w1, _) in enumerate(layers) if i % 3 == 0}


def sign_bits(storage: torch.dtype, device: torch.device) -> float:
    """Bits a value of codec sign, of whole tiles of which all is stored: those have no padding."""
    z = torch.randn(1024, bk.TILE, device=device).abs().clamp(min=2 ** -9).bfloat16()
    buffer = bk.ActivationBuffer(2 * z.numel(), device)
    bk.compress_triton(z, buffer, 2, "sign", storage)
    return 8 * int(buffer.used_bytes()) / z.numel()


def measure_all(options: argparse.Namespace) -> dict:
    device = torch.device("cuda")
    record = bench_record.begin(SOURCES)
    flush = torch.empty(256 * 2 ** 20, dtype=torch.uint8, device=device)
    torch.manual_seed(0)
    source = synthetic(SHAPES[0], 0.5)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / measure(lambda: target.copy_(source), flush)

    cases: list[tuple[str, str, float | None, Callable]] = [
        (f"Synthetic, {list(shape)}", f"density {density}", density,
         lambda s=shape, p=density: synthetic(s, p)) for shape in SHAPES for density in DENSITIES]
    for path, read in ((options.activations, load_activations),
                       (options.checkpoint, lambda p: capture_layers(p, options.data, device))):
        if path:
            cases += [(f"Captured, {'/'.join(Path(path).parts[-2:])}, {list(z.shape)}", name, None,
                       lambda z=z: z.to(device).contiguous()) for name, z in read(path).items()]
    rows, peers, gemms = [], [], []
    for (tokens, hidden), d in zip(SHAPES, WIDTHS, strict=True):
        gemms += bench_gemm(tokens, d, hidden, flush)
    for group, case, asked, make in cases:
        z, of = make(), {"group": group, "case": case, "asked": asked}
        for storage in bk.STORAGES:
            if storage == torch.bfloat16 or asked == DECISIVE:
                for codec in bk.CODECS:
                    rows += [of | row for row in bench_format(z, codec, storage, rate, flush)]
        rows += [of | row for row in bench_dense(z, rate, flush)]
        if options.peers and asked in (None, DECISIVE):
            peers += [of | row for row in bench_peers(z, flush)]
        del z
    return record | {"roofline_tb_per_s": rate / 1e9, "rows": rows, "gemms": gemms,
                     "peers": peers, "sign_bits": {
        str(storage)[6:]: sign_bits(storage, device) for storage in bk.STORAGES}}


# -----------------------------------------------------------------------------
# Record


def measures(record: dict) -> dict[str, float]:
    """For update_tables.py. Targets are for the worst shape."""
    bf16 = [row for row in record["rows"] if row["storage"] == "bfloat16"]
    fp8 = [row for row in record["rows"] if row["storage"] != "bfloat16"]
    found = {"differing_bf16": sum(row["differing"] or 0 for row in bf16 + record["gemms"]),
             "differing_fp8": sum(row["differing"] or 0 for row in fp8),
             "sign_bits_bf16": record["sign_bits"]["bfloat16"],
             "sign_bits_fp8": max(bits for storage, bits in record["sign_bits"].items()
                                  if storage != "bfloat16")}
    ms = {(row["group"], row["kernel"], row["codec"]): row["ms"]
          for row in bf16 if row["asked"] == DECISIVE}
    for kernel in ("compress", "decode", "backward"):
        found[f"{kernel}_of_roofline"] = min(
            row["of_roofline"] for row in bf16
            if (row["kernel"], row["codec"], row["asked"]) == (kernel, "raw", DECISIVE))
    found["exponent_over_raw"] = max(ms[group, kernel, codec] / ms[group, kernel, "raw"]
                                     for group, kernel, codec in ms if codec == "exponent")
    real = [row for row in bf16 if row["asked"] is None and row["codec"] == "exponent"]
    if real:
        found["exponent_bits_bf16"] = (sum(row["bits_a_value"] * row["values"] for row in real)
                                       / sum(row["values"] for row in real))
    return found


def page(record: dict) -> str:
    lines = bench_record.head(record, f"Copy roofline: {record['roofline_tb_per_s']:.2f} TB/s")
    lines += [
        "The answers above are at density 0.2 with codec raw, the worse shape of the two, and for "
        "exponent over raw the worst kernel; sign packing is measured where all elements are "
        "stored, without padding. How much faster than the reference code the kernels are is not "
        "measured here, as that code is not part of this repository. The docstring of "
        "scripts/bench_kernels.py says what the kernels are and how they are timed."]
    head = ["case", "density", "kernel", "codec", "storage", "ms", "GB/s", "of roofline",
            "bits/element", "bits/value"]
    for group in dict.fromkeys(row["group"] for row in record["rows"]):
        lines += ["", f"## {group}", "", *table([head] + [
            [row["case"], f"{row['density']:.3f}", row["kernel"], row["codec"], row["storage"],
             f"{row['ms']:.4f}", f"{row['gb_per_s']:,.0f}", f"{row['of_roofline']:.1%}",
             f"{row['bits_an_element']:.3f}", shown(row["bits_a_value"], ".2f")]
            for row in record["rows"] if row["group"] == group])]
    if record["gemms"]:
        lines += ["", "## The first GEMM with what follows it", "",
                  f"[tokens, d] times [d, hidden], relu² and compression, at density {DECISIVE}. "
                  "Apart: cuBLAS, then one kernel that makes post and stores z. Fused: one kernel "
                  "makes post, then one stores its roots.", "", *table(
            [["tokens, d, hidden", "saved as", "apart, ms", "fused, ms", "fused/apart"]] + [
                [", ".join(map(str, row["shape"])), row["way"], f"{row['apart_ms']:.4f}",
                 f"{row['fused_ms']:.4f}", f"{row['fused_ms'] / row['apart_ms']:.3f}"]
                for row in record["gemms"]])]
    if record["peers"]:
        lines += ["", "## Other ways to hold the same values", "", *table(
            [["peer", "case", "bits/element", "in, ms", "out, ms"]] + [
                [row["peer"], f"{row['group']}, {row['case']}", f"{row['bits_an_element']:.3f}",
                 f"{row['compress_ms']:.3f}", f"{row['decompress_ms']:.3f}"]
                for row in record["peers"]])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="other ways to hold the same values")
    parser.add_argument("--activations", help="file of real pre-activations z")
    parser.add_argument("--checkpoint", help="a step-*.pt of train_gpt.py, whose z are captured")
    parser.add_argument("--data", help="its folder of fineweb_val_*.bin (here: that of the run)")
    bench_record.add_options(parser)
    options = parser.parse_args()
    if not (options.earlier or torch.cuda.is_available()):
        stop("expected a CUDA GPU, received none; there is nothing to time")
    bench_record.check_options(parser, options)
    record = bench_record.read(options.earlier) if options.earlier else measure_all(options)
    record |= {"claim": "Time and size of the kernels, against the rate of a copy and against "
                        "other ways to hold the same values", "measures": measures(record)}
    bench_record.write(record, options, page)
    print(page(record), end="")
    sys.exit(any(row["differing"] for row in record["rows"] + record["gemms"]))


if __name__ == "__main__":
    main()
