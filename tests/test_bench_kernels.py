"""scripts/bench_kernels.py: what it counts, its record and page, and its sentences.

What:  rows of small tensors, with the references for kernels and made-up times: sizes by hand, and
       values that are wrong are counted; measures and page of hand-made numbers.
Needs: a CPU; nothing is timed. That z is captured as in the analysis is in test_analyze.py.
Run:   python -m pytest tests/test_bench_kernels.py
"""

import json
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_kernels
import update_tables

import bitsparse_kernels as bk

CPU = torch.device("cpu")


def run(patch, *arguments):
    """The script in this process. Returns its exit status, or its sentence."""
    patch.setattr(sys, "argv", ["bench_kernels.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    return ended.value.code


# -----------------------------------------------------------------------------
# Rows


@pytest.fixture
def on_cpu(monkeypatch):
    """The references in the kernels' place; each call takes 2 ms."""
    def measure(function, flush, prepare=None, repeats=15):
        if prepare is not None:
            prepare()
        function()
        return 2.0

    def backward(dh, saved, buffer, power, codec, storage):
        post = bk.decompress_reference(saved, buffer, dh.numel(), codec, storage, power)
        bk.gradient_reference(dh, saved, buffer, power, codec, storage)
        return dh, post.view_as(dh)

    monkeypatch.setattr(bench_kernels, "measure", measure)
    monkeypatch.setattr(bk, "backward_triton", backward)
    for name in ("compress", "decompress", "gradient"):
        monkeypatch.setattr(bk, f"{name}_triton", getattr(bk, f"{name}_reference"))


def make_rows(storage):
    """Of codec sign, and 3 tiles with 0, 2048 and 8 positive values."""
    z = torch.full((3, bk.TILE), -1.0)
    z[1], z[2, :8] = 3.0, 0.5
    return bench_kernels.bench_format(z.bfloat16(), "sign", storage, 1e3, torch.empty(1))


@pytest.mark.parametrize(("storage", "bits"), [(torch.bfloat16, 15), (torch.float8_e4m3fn, 7)])
def test_rows_of_known_activations(on_cpu, storage, bits):
    rows = make_rows(storage)
    # a full tile has no padding, 8 values fill up to whole 16 bytes
    used = bits * 2048 // 8 + 16
    held = used + 3 * 256 + 8 * (3 + 1)  # masks, heads and the generation
    n = 3 * 2048
    assert [row["kernel"] for row in rows] == ["decode", "backward", "gradient", "compress"]
    for row, elements in zip(rows, (2, 6, 4, 4), strict=True):
        assert row["values"] == 2056
        assert row["density"] == 2056 / n
        assert row["bits_a_value"] == 8 * used / 2056
        assert row["bits_an_element"] == 8 * held / n
        assert row["of_roofline"] == pytest.approx((elements * n + held) / 2.0 / 1e3)
        known = storage == torch.bfloat16 or row["kernel"] == "decode"
        assert row["differing"] == (0 if known else None)


@pytest.mark.parametrize(("kernel", "name"), [
    ("decode", "decompress"), ("gradient", "gradient"), ("compress", "compress")])
def test_a_wrong_value_is_counted(on_cpu, monkeypatch, kernel, name):
    right = getattr(bk, f"{name}_triton")

    def wrong(t, *arguments):
        result = right(t, *arguments)
        written = result if name == "decompress" else t  # in its place
        written.view(-1)[bk.TILE] += 1
        return result

    monkeypatch.setattr(bk, f"{name}_triton", wrong)
    (row,) = (row for row in make_rows(torch.bfloat16) if row["kernel"] == kernel)
    assert row["differing"] == 1


@pytest.mark.parametrize(("storage", "bits"), [(torch.bfloat16, 15), (torch.float8_e5m2, 7)])
def test_sign_bits_without_padding(on_cpu, storage, bits):
    assert bench_kernels.sign_bits(storage, CPU) == bits


@pytest.mark.parametrize("wrong", [False, True])
def test_first_gemm(on_cpu, monkeypatch, wrong):
    """Density 0.2, both ways of all savings compared; and where the GPU fuses nothing, no row."""
    assert bench_kernels.bench_gemm(64, 16, 256, torch.empty(1)) == []
    compress = bk.compress_reference
    densities = []

    def fused(x, w1, power, state):
        z = torch.nn.functional.linear(x, w1)
        densities.append(float((z > 0).float().mean()))
        bk.activate_reference(z, power)
        z[0, 0] += wrong
        return z

    def from_post(z, buffer, power, codec, from_post=False):
        return compress(z.float().sqrt().bfloat16() if from_post else z, buffer, power, codec)

    monkeypatch.setattr(bk, "_may_fuse", lambda *arguments: True)
    monkeypatch.setattr(bk, "linear_activate_triton", fused)
    monkeypatch.setattr(bk, "activate_triton", bk.activate_reference)
    monkeypatch.setattr(bk, "compress_triton", from_post)
    rows = bench_kernels.bench_gemm(64, 16, 256, torch.empty(1))
    assert [row["way"] for row in rows] == ["dense", "raw", "sign", "exponent"]
    assert all(0.15 < density < 0.25 for density in densities)
    for row in rows:
        assert row["shape"] == [64, 16, 256]
        assert row["apart_ms"] == row["fused_ms"] == 2.0
        assert row["differing"] == 2 * wrong  # post, and what is read back


@pytest.mark.parametrize("tokens", [8, 64])
def test_peers(on_cpu, monkeypatch, capsys, tokens):
    """Also with fewer tokens than hidden units; and an algorithm of nvCOMP that fails."""
    gemms, waits = [], []
    linear = torch.nn.functional.linear

    class Codec:
        def __init__(self, algorithm):
            if algorithm == "Cascaded":
                raise RuntimeError("no such format")

        def encode(self, array):
            return types.SimpleNamespace(buffer_size=tokens * 32 // 2)

        def decode(self, packed):
            pass

    def recorded(x, w):
        gemms.append((x.shape, w.shape))
        return linear(x, w)

    nvcomp = types.SimpleNamespace(as_array=lambda t: t, Codec=Codec)
    monkeypatch.setitem(sys.modules, "nvidia", types.SimpleNamespace(nvcomp=nvcomp))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(bench_kernels.F, "linear", recorded)
    z = torch.full((tokens, 32), -1.0).bfloat16()
    z[0, :4] = 1
    rows = {row["peer"]: row for row in bench_kernels.bench_peers(z, torch.empty(1))}
    assert gemms == [((tokens, 8), (32, 8))]
    assert [name for name in rows if name.startswith("nvCOMP")] == [
        "nvCOMP LZ4", "nvCOMP Bitcomp", "nvCOMP ANS"]
    assert "nvCOMP Cascaded: not measured: no such format" in capsys.readouterr().out
    assert rows["nvCOMP LZ4"]["bits_an_element"] == 4
    assert rows["torch: bool mask and r[mask]"]["bits_an_element"] == 8 + 4 * 16 / z.numel()
    assert len(waits) == 1 + 3 * 2 * 2  # before and after each call that is timed


def test_activations_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py"])
    z = torch.zeros(2, 3, dtype=torch.bfloat16)
    torch.save(z, tmp_path / "one.pt")
    torch.save({"a": z, "b": z.float()}, tmp_path / "two.pt")
    assert torch.equal(bench_kernels.load_activations(str(tmp_path / "one.pt"))["one"], z)
    with pytest.raises(SystemExit, match=r"expected bf16 tensors \[tokens, hidden\], received b: "
                                         r"torch.float32$"):
        bench_kernels.load_activations(str(tmp_path / "two.pt"))


# -----------------------------------------------------------------------------
# Record


def made_record(**more):
    def row(group, asked, kernel, codec, ms, storage="bfloat16", **other):
        return {"group": group, "case": f"density {asked}" if asked else "layer 3", "asked": asked,
                "kernel": kernel, "codec": codec, "storage": storage, "ms": ms, "gb_per_s": 4000.0,
                "of_roofline": 0.9 / ms, "bits_an_element": 4.0, "bits_a_value": 16.0,
                "density": asked or 0.25, "values": 100, "differing": 0} | other

    rows = [row(group, asked, kernel, codec, ms + slower + (asked == 0.5))
            for group, slower in (("Synthetic, [8, 8]", 0), ("Synthetic, [4, 16]", 0.125))
            for asked in (0.2, 0.5)
            for kernel in ("decode", "backward", "compress")
            for codec, ms in (("raw", 1.0), ("exponent", 1.25))]
    rows += [row("Synthetic, [8, 8]", 0.2, "decode", "raw", 0.5, "float8_e5m2"),
             row("Synthetic, [8, 8]", 0.2, "compress", "dense", 1.0, values=None, differing=None,
                 bits_a_value=None),
             row("Captured, RUN/step-00000054.pt, [8, 8]", None, "decode", "exponent", 1.0,
                 bits_a_value=11.0),
             row("Captured, RUN/step-00000054.pt, [8, 8]", None, "decode", "exponent", 1.0,
                 bits_a_value=12.0, values=300)]
    return {"kind": "bench", "name": "", "date": "2026-12-01", "claim": "", "command":
            "python scripts/bench_kernels.py --peers", "commit": "c", "sources_sha256": {"a": "b"},
            "device": "a GPU", "torch": "2", "triton": "3", "measures": {},
            "roofline_tb_per_s": 4.25, "rows": rows,
            "peers": [{"group": "Synthetic, [8, 8]", "case": "density 0.2", "peer": "a peer",
                       "bits_an_element": 7.5, "compress_ms": 1.5, "decompress_ms": 2.5}],
            "gemms": [{"shape": [8, 2, 8], "way": "raw", "apart_ms": 2.0, "fused_ms": 1.5,
                       "differing": 0}],
            "sign_bits": {"bfloat16": 15.0, "float8_e4m3fn": 7.0, "float8_e5m2": 7.0}} | more


def test_record_is_made_again_and_accepted(tmp_path, monkeypatch, capsys):
    earlier, out = tmp_path / "k.json", tmp_path / "2026-12-01_Kernels"
    earlier.write_text(json.dumps(made_record()))
    assert run(monkeypatch, "--from", earlier, "--out", out) == 0
    record = update_tables.read_record(out)
    assert record["measures"] == {
        "differing_bf16": 0, "differing_fp8": 0, "sign_bits_bf16": 15.0, "sign_bits_fp8": 7.0,
        # of the slower shape; density 0.5 is no target
        "compress_of_roofline": 0.8, "decode_of_roofline": 0.8, "backward_of_roofline": 0.8,
        "exponent_over_raw": 1.25,
        "exponent_bits_bf16": 11.75}  # by values, not by rows
    page = (out / "README.md").read_text()
    assert capsys.readouterr().out == page
    for expected in (
            "# 2026-12-01_Kernels\n", "\npython scripts/bench_kernels.py --peers\n", "1 × a GPU",
            "- Sources: commit c\n", "Copy roofline: 4.25 TB/s",
            "- BF16 storage is lossless: 0 values differ; yes\n",
            "- Ours: relu² + compress at 80 % of the copy roofline: 80.0 %; yes\n",
            "- Ours: decode at 85 % of the copy roofline: 80.0 %; **no**\n",
            "- Ours: codec exponent within 1.10 of raw's time: 1.250 of raw's time; **no**\n",
            "- Ours: at most 11.3 bits a value, on real activations: 11.75 bits a value; **no**\n",
            "## Synthetic, [4, 16]\n", "## Captured, RUN/step-00000054.pt, [8, 8]\n", "a peer",
            "| 8, 2, 8 "):
        assert expected in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()
            if line.startswith("| density") or line.startswith("| layer")]
    assert len(rows) == len(record["rows"])
    assert rows[0] == ["density 0.2", "0.200", "decode", "raw", "bfloat16", "1.0000", "4,000",
                       "90.0%", "4.000", "16.00"]


def test_without_real_activations_nothing_is_said_of_them():
    rows = [row for row in made_record()["rows"] if row["asked"]]
    assert "exponent_bits_bf16" not in bench_kernels.measures(made_record(rows=rows))


def test_wrong_values_are_told_and_fail(tmp_path, monkeypatch, capsys):
    rows = made_record()["rows"]
    rows[0]["differing"] = 3
    (tmp_path / "k.json").write_text(json.dumps(made_record(rows=rows)))
    assert run(monkeypatch, "--from", tmp_path / "k.json") == 1
    assert "- BF16 storage is lossless: 3 values differ; **no**\n" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--from", "x", "--peers"], "--from measures nothing: leave out --peers"),
    (["--json", "x"], "expected a CUDA GPU, received none; there is nothing to time")])
def test_wrong_arguments(monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, *arguments) == f"bench_kernels.py: {sentence}"
    assert not list(tmp_path.iterdir())
