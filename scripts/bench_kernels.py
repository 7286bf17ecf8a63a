"""How fast the kernels are, and how much they store: against the copy roofline, and against others.

    python scripts/bench_kernels.py                       # the table, on a GPU; a minute or two
    python scripts/bench_kernels.py --peers               # and other ways to hold the same values
    python scripts/bench_kernels.py --activations z.pt    # also on real pre-activations

A row's bits are checked before it is timed. Times are medians, each run from a cold L2 (a buffer
of 256 MiB is overwritten in between). The roofline is the rate of a device-to-device copy of the
first shape, measured in the same run, bytes read and written; a kernel's share of it counts the
bytes that it must move at least: its dense tensors once, mask, heads and the stored values.

    compress    z -> post = relu(z)² in its place, and mask, heads, values
    decode      mask, heads, values -> relu(z)
    backward    dh -> dz in its place, and post, from mask, heads, values
    gradient    dh -> dz in its place, alone
    dense       the same two directions of --mlp dense: z -> post; dh, post -> dz

z is normal with its mean shifted to give the density; --activations takes a file of torch.save: a
bf16 tensor [tokens, hidden] or a dict of them by name.
"""
import argparse
import json
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
import bitsparse_kernels as bk

SHAPES = [(65536, 3072), (16384, 21504)]
DENSITIES = [0.1, 0.2, 0.5]


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


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"bench_kernels.py: {what}: the bits are wrong; nothing was timed")


def bench_format(z: torch.Tensor, codec: str, storage: torch.dtype, rate: float,
                 flush: torch.Tensor) -> list[dict]:
    """Rows of one tensor, codec and storage. rate: bytes / ms of the roofline."""
    n = z.numel()
    dh = torch.randn_like(z)
    buffer = bk.ActivationBuffer(2 * n, "cuda")
    saved = bk.compress_triton(post := z.clone(), buffer, 2, codec, storage)
    r = bk.decompress_triton(saved, buffer, n, codec, storage).view_as(z)
    if storage == torch.bfloat16:
        check(torch.equal(r, z.relu()) and torch.equal(post, z.relu().square()),
              f"compress, {codec}")
        dz, post = bk.backward_triton(dh.clone(), saved, buffer, 2, codec, storage)
        want = torch.where(z > 0, (dh.float() * (2 * r.float())).bfloat16(), 0)
        check(torch.equal(dz, want) and torch.equal(post, r.square()), f"backward, {codec}")
        del want
    else:
        fp8 = (z.relu().float() * (1 / saved[2])).to(storage).float() * saved[2]
        check(torch.equal(r, fp8.bfloat16()), f"compress, {codec}, {storage}")
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
                     "density": nnz / n})

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
                     "bits_an_element": 16.0, "bits_a_value": None, "density": None})
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

    check(torch.equal(torch_decompress(), r), "torch mask and values")
    row("torch: bool mask and r[mask]", mask.nbytes + values.nbytes, lambda: (r > 0, r[r > 0]),
        torch_decompress)

    d = z.shape[1] // 4
    x, w = torch.randn(len(z), d, device="cuda").bfloat16(), torch.randn_like(z[: 4 * d, :d])
    row(f"recompute the FFN's first GEMM (d = {d})", 0, lambda: None,
        lambda: torch.nn.functional.linear(x, w).relu().square())
    try:
        from nvidia import nvcomp
    except ImportError:
        print("nvCOMP: not measured, as nvidia.nvcomp cannot be imported "
              "(pip install nvidia-nvcomp-cu13)")
        return rows
    array = nvcomp.as_array(r.view(torch.uint8).view(-1))
    for algorithm in ("LZ4", "Cascaded", "Bitcomp", "ANS"):
        coder = nvcomp.Codec(algorithm=algorithm)
        packed = coder.encode(array)
        row(f"nvCOMP {algorithm}", packed.buffer_size, lambda c=coder: c.encode(array),
            lambda c=coder, p=packed: c.decode(p))
    return rows


def load_activations(path: str) -> dict[str, torch.Tensor]:
    loaded = torch.load(path, weights_only=True)
    tensors = loaded if isinstance(loaded, dict) else {Path(path).stem: loaded}
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor) or t.dtype != torch.bfloat16 or t.dim() != 2:
            sys.exit(f"bench_kernels.py: {path}: expected bf16 tensors [tokens, hidden], received "
                     f"{name}: {getattr(t, 'dtype', type(t).__name__)}")
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="other ways to hold the same values")
    parser.add_argument("--activations", help="file of real pre-activations z")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py: expected a CUDA GPU, received none; there is nothing to time")
    flush = torch.empty(256 * 2 ** 20, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    source = synthetic(SHAPES[0], 0.5)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / measure(lambda: target.copy_(source), flush)

    cases = [(f"{list(shape)}, density {density}", density,
              lambda s=shape, p=density: synthetic(s, p))
             for shape in SHAPES for density in DENSITIES]
    if options.activations:
        cases += [(name, None, lambda t=t: t.cuda())
                  for name, t in load_activations(options.activations).items()]
    rows, peers = [], []
    for name, density, make in cases:
        z = make()
        for storage in bk.STORAGES:
            if storage == torch.bfloat16 or density == 0.2:  # fp8 once a shape
                for codec in bk.CODECS:
                    rows += [row | {"case": name}
                             for row in bench_format(z, codec, storage, rate, flush)]
        rows += [row | {"case": name} for row in bench_dense(z, rate, flush)]
        if options.peers and density in (None, 0.2):
            peers += [row | {"case": name} for row in bench_peers(z, flush)]
        del z

    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}; copy roofline "
          f"{rate / 1e9:.2f} TB/s")
    print(f"{'case':<34} {'kernel':<9} {'codec':<9} {'storage':<14} {'ms':>7} {'GB/s':>6} "
          f"{'roofline':>8} {'bits/element':>12} {'bits/value':>10}")
    for row in rows:
        value = "" if row["bits_a_value"] is None else f"{row['bits_a_value']:10.2f}"
        print(f"{row['case']:<34} {row['kernel']:<9} {row['codec']:<9} {row['storage']:<14} "
              f"{row['ms']:7.4f} {row['gb_per_s']:6.0f} {row['of_roofline']:8.1%} "
              f"{row['bits_an_element']:12.3f} {value}")
    for row in peers:
        print(f"{row['case']:<34} {row['peer']:<40} {row['bits_an_element']:7.3f} bits/element, in "
              f"{row['compress_ms']:.3f} ms, out {row['decompress_ms']:.3f} ms")
    if options.json:
        Path(options.json).write_text(json.dumps(
            {"device": device, "torch": torch.__version__, "triton": triton.__version__,
             "roofline_tb_per_s": rate / 1e9, "rows": rows, "peers": peers}, indent=1))


if __name__ == "__main__":
    main()
