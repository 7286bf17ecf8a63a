"""scripts/analyze_compression.py and its page: sizes, entropies, gradients, and the page.

What:  entropies, codes and packed sizes of masks and values that are counted by hand; break-even
       densities against their closed form; the captured activations and gradients against a run
       of the model that counts and differentiates for itself; a record made from the checkpoint
       of a few steps, made again from its JSON, and read by update_tables.py; sentences.
Needs: a CPU.
Run:   python -m pytest tests/test_analyze.py
"""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import analyze_compression as analysis  # noqa: E402
import bench_kernels  # noqa: E402
import bench_record  # noqa: E402
import update_tables  # noqa: E402

import train_gpt  # noqa: E402
from bitsparse_kernels import CODECS, STORAGES, ActivationBuffer, bits_per_element  # noqa: E402

CPU = torch.device("cpu")
STEPS, DIM, TOKENS = 4, 64, 128
@pytest.fixture(scope="module", autouse=True)
def _small_on_cpu():
    """A vocabulary whose rows do not take most of the time; the CPU, also where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(train_gpt, "VOCAB", 512)
        patch.setattr(train_gpt, "BOS", 511)
        patch.setattr(train_gpt, "flex_attention", None)  # nothing may call it; put back after
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def run(home, script, *arguments):
    """A script's main() in the folder home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
        script.main()


@pytest.fixture(scope="module")
def home(tmp_path_factory, make_text_folder, _small_on_cpu):
    """A folder with text/, logs/RUN/step-00000004.pt and the record of its analysis."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").symlink_to(make_text_folder(bos=511))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train_gpt.train(train_gpt.parse_config([
            "--preset", "tiny", "--data", "text", "--steps", str(STEPS), "--epochs", "4",
            "--microbatch-tokens", str(TOKENS), "--val-tokens", "1024", "--val-sequence", "512",
            "--val-every", "0", "--dim", str(DIM), "--no-wandb"]), train_gpt.Ranks(0, 1, CPU))
    (log,) = home.glob("logs/*.txt")
    text = log.read_text()
    for name, more in (("e4m3", 0.25), ("e5m2", -0.5)):  # runs with other train losses
        (home / f"{name}.txt").write_text(re.sub(
            r"train_loss:([\d.]+)", lambda m, more=more: f"train_loss:{float(m[1]) + more:.6f}",
            text))
    run(home, analysis, "--checkpoint", checkpoint(home), "--out",
        "2026-12-01_Optimum", "--curves", f"bf16={log.relative_to(home)}", "e4m3=e4m3.txt",
        "e5m2=e5m2.txt")
    return home


def checkpoint(home):
    (path,) = home.glob("logs/*/step-*.pt")
    return path.relative_to(home)


@pytest.fixture(scope="module")
def made(home):
    return json.loads((home / "2026-12-01_Optimum" / "summary.json").read_text())


# -----------------------------------------------------------------------------
# By hand


def test_entropies_of_known_counts_and_masks():
    assert analysis.entropy(torch.tensor([3, 3, 3, 3])) == 2
    assert analysis.entropy(torch.tensor([4, 2, 1, 1, 0])) == 1.75
    assert analysis.entropy(torch.tensor([0, 9])) == 0
    assert analysis.entropy(torch.zeros(4, dtype=torch.int64)) == 0  # a layer that stores nothing
    assert analysis.mask_entropy(torch.tensor([0.5])) == 1
    # a column always stored and one never: the mask of both together looks random, apart neither
    assert analysis.mask_entropy(torch.tensor([1.0, 0.0])) == 0
    assert analysis.mask_entropy(torch.tensor([0.25])) == pytest.approx(2 - 0.75 * math.log2(3))


def test_huffman_lengths():
    assert analysis.huffman_lengths([8, 4, 2, 1, 1]) == [1, 2, 3, 4, 4]
    assert analysis.huffman_lengths([0, 5, 0]) == [0, 0, 0]  # one symbol needs no bits
    assert analysis.huffman_lengths([1, 1, 1, 1]) == [2, 2, 2, 2]


def tile_of(**exponents):
    """A tile's stored and exponent; at e0=3 the element 0 has exponent 3."""
    stored, exponent = torch.zeros(2048, dtype=torch.bool), torch.zeros(2048, dtype=torch.int32)
    for element, e in exponents.items():
        stored[int(element[1:])], exponent[int(element[1:])] = True, e
    return stored, exponent


def test_packed_bits_of_a_tile():
    # two values of 7 + 2 bits, padded to 128, and the head
    assert analysis.packed_bits(*tile_of(e0=120, e1500=123)) == 128 + 64
    # in blocks of 256 they are apart: 7 bits each, and 7 blocks more
    assert analysis.packed_bits(*tile_of(e0=120, e1500=123), block=256) == 128 + 64 + 7 * 12
    # 15 x 9 bits do not fit into 128; alike but for those of another block, 15 x 7 and 3 x 7 do
    many = {f"e{i}": 120 + 3 * (i == 0) for i in range(15)}
    assert analysis.packed_bits(*tile_of(**many)) == 256 + 64
    assert analysis.packed_bits(*tile_of()) == 64
    stored, exponent = (torch.cat(pair) for pair in zip(tile_of(e0=3), tile_of(e9=9), strict=True))
    assert analysis.packed_bits(stored, exponent) == 2 * (128 + 64)
    assert analysis.packed_bits(stored, exponent, block=4096) == 128 + 64  # 2 x (7 + 3) bits


def test_escaped_bits_of_a_tile():
    def tile(**counts):
        by_tile = torch.zeros(1, 256, dtype=torch.int64)
        for exponent, count in counts.items():
            by_tile[0, int(exponent[1:])] = count
        return by_tile

    # 100 values of one exponent and one on either side, 30 away, which would need 6 bits. With one
    # bit that says which of the two it is: 102 x 8 and the 2 x 8 that are behind
    assert analysis.escaped_bits(tile(e130=100, e160=1, e100=1)) == 896 + 64
    assert analysis.escaped_bits(tile(e130=100)) == 768 + 64  # no code kept for what does not come
    assert analysis.escaped_bits(tile(e9=300, e10=300)) == 4864 + 64  # 600 x 8, and 64 of padding
    # 3 neighbours in 2 bits, 103 x 9, and 8
    assert analysis.escaped_bits(tile(e1=34, e2=34, e3=34, e90=1)) == 1024 + 64
    assert analysis.escaped_bits(tile()) == 64
    assert analysis.escaped_bits(tile(**{f"e{e}": 1 for e in range(256)})) == 256 * 15 + 64


def test_masks_of_known_activations():
    """64 x 256 elements, of which the columns 0 to 7 are stored in all rows: 1 in 32."""
    z = torch.full((64, 256), -1.0, dtype=torch.bfloat16)
    z[:, :8] = 1
    n, counted = z.numel(), analysis.variants(z)
    values = counted["exponents by 2048 elements"] - n  # 64 x 7 bits a tile of 8 rows, padded
    assert values == 8 * (512 + 64)
    masks = {name: bits - values for name, bits in counted.items() if name.startswith("mask")}
    assert masks["mask at its entropy by column (bound)"] == 16 * 256
    assert masks["mask at its entropy (bound)"] == round(
        n * (5 / 32 + 31 / 32 * math.log2(32 / 31)))
    assert masks["mask without empty columns"] == 64 * 8 + 256
    assert masks["mask of two levels, groups of 8"] == n / 8 + 64 * 8
    assert masks["mask of two levels, groups of 256"] == n / 256 + n
    assert masks["mask or list of places, groups of 256"] == 64 * (1 + 8 + 8 * 8)
    assert masks["mask of two levels, groups of 8, columns sorted"] == n / 8 + 64 * 8 + 16 * 256
    # all values are 1: their exponents take nothing, with any code
    for name, bits in counted.items():
        if name.startswith("exponents at"):
            assert bits - n == 8 * 64 + 7 * 64 * 8
        if name.startswith("exponents in"):
            assert bits - n == values + 8 * 256


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("codec", CODECS)
def test_break_even_density(codec, storage):
    bits, _ = STORAGES[storage]
    width = bits - (codec != "raw")
    density = analysis.break_even(codec, storage)
    assert density == pytest.approx((bits - 1 - (64 + 60) / 2048) / width)
    assert bits_per_element(density, codec, storage) == pytest.approx(bits)


def test_crossing_and_where_exponent_wins():
    def point(density, sign, exponent):
        return {"density": density, "storage": {"bfloat16": {"codecs": {
            "sign": {"bits_per_element": sign}, "exponent": {"bits_per_element": exponent}}}}}

    points = [point(0, 1, 1), point(0.5, 10, 8), point(1, 18, 15)]
    assert analysis.crossing(points, torch.bfloat16, "sign") == 0.875
    assert analysis.crossing(points, torch.bfloat16, "exponent") is None
    assert analysis.exponent_wins_from(points, "bfloat16") == 0.5
    assert analysis.exponent_wins_from([point(0, 1, 1)], "bfloat16") is None


def test_values_that_fp8_holds_have_no_gradient_error():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(32, 16, generator=generator).bfloat16() for _ in range(2))
    w1, w2 = (torch.randn(64, 16, generator=generator).bfloat16() for _ in range(2))
    z = 2.0 ** torch.randint(-3, 3, (32, 64), generator=generator)
    z[0, 0] = 7  # 448 / 64 in e4m3; in e5m2, with 57344 = 1.75 * 2^15, it is a 2^-13 part of that
    z = torch.where(torch.rand(32, 64, generator=generator) < 0.3, z, -z).bfloat16()
    z[0, 0] = 7
    rows = analysis.lossy(z, (x, dy, w1, w2.t().contiguous()), seed=0)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert [rows[name][of] for of in ("dW1", "dW2", "dx")] == [0, 0, 0]
    for fraction in (0.25, 0.5):
        row = rows[f"projection, rank {fraction:g} h"]
        assert row["bits_per_element"] == 16 * fraction
        assert row["dW2"] > 0.1


# -----------------------------------------------------------------------------
# A trained model


def test_captured_are_the_models_own(home, made, monkeypatch):
    """Densities and gradients against a run with --mlp bitsparse, which counts for itself."""
    monkeypatch.chdir(home)
    layers, _ = analysis.capture(str(checkpoint(home)), None, CPU)
    saved = train_gpt.read_checkpoint(checkpoint(home))
    config = train_gpt.Config(**saved["config"] | {"val_tokens": TOKENS, "val_sequence": TOKENS})
    buffer = ActivationBuffer(2 ** 22, CPU, config.layers)
    model = train_gpt.GPT(config, buffer)
    model.load_state_dict(saved["model"])
    batch = train_gpt.ValData(config)[0]
    window = torch.tensor(train_gpt.window_blocks(config, STEPS), dtype=torch.int32)
    loss = model(batch[:-1], batch[1:].long(), window)
    loss.backward()
    assert made["model"]["loss"] == loss.item() / TOKENS
    nnz = buffer.snapshot().layer_nnz
    for layer, block, stored, told in zip(layers, model.blocks, nnz, made["layers"], strict=True):
        assert told["density"] == stored / (TOKENS * 4 * DIM)
        x, _, w1, _ = layer
        r = torch.nn.functional.linear(x, w1).relu().float()
        dw1, dw2, _ = analysis.gradients(*layer, r, r * r)
        assert torch.equal(dw1.float(), block.mlp.w1.grad)
        assert torch.equal(dw2.float(), block.mlp.w2.grad)


def test_the_kernels_are_timed_on_the_same_activations(home, made, monkeypatch):
    monkeypatch.chdir(home)
    captured = bench_kernels.capture_layers(str(checkpoint(home)), "text", CPU)
    assert list(captured) == ["layer 0", "layer 3"]
    for name, z in captured.items():
        assert (z.shape, z.dtype) == ((TOKENS, 4 * DIM), torch.bfloat16)
        told = made["layers"][int(name.split()[1])]
        assert (z > 0).double().mean().item() == told["density"]


def test_sizes_agree_with_each_other(made):
    n = TOKENS * 4 * DIM
    for layer in made["layers"]:
        for storage, (bits, _) in STORAGES.items():
            of = layer["storage"][analysis.NAMES[storage]]
            assert 0 < of["optimum"] < of["codecs"]["exponent"]["bits_per_element"]
            # within the padding's spread over these 16 tiles
            assert of["codecs"]["raw"]["bits_per_element"] == pytest.approx(
                bits_per_element(layer["density"], "raw", storage), abs=0.03)
            assert of["value_entropy"] < bits - 1
        exponent = layer["storage"]["bfloat16"]["codecs"]["exponent"]["bits_per_element"]
        # the codec's generation aside, its patches make it smaller than what is counted without
        assert exponent * n - 64 < layer["variants"]["exponents by 2048 elements"] * n
        assert layer["mask_entropy_by_column"] <= layer["mask_entropy"] <= 1
        assert exponent == pytest.approx(
            layer["storage"]["bfloat16"]["optimum"] + sum(layer["gap"].values()))
        errors = layer["lossy"]
        for gradient in ("dW1", "dW2", "dx"):
            assert 0 < errors["float8_e4m3fn"][gradient] < errors["float8_e5m2"][gradient] < 0.2
    ends = [point["storage"]["bfloat16"]["codecs"]["raw"]["bits_per_element"]
            for point in (made["synthetic"][0], made["synthetic"][-1])]
    generation = 64 / analysis.SAMPLE
    assert ends == [1 + 64 / 2048 + generation, 17 + 64 / 2048 + generation]
    measured = made["over_density"]["bfloat16"]["break_even_half_normal"]
    assert measured["raw"] == pytest.approx(analysis.break_even("raw", torch.bfloat16), abs=0.002)
    assert measured["exponent"] is None  # never as large as dense


def test_the_record(home, made, tmp_path):
    folder = home / "2026-12-01_Optimum"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "bits.png", "layers.png", "losses.png", "summary.json"]
    record = update_tables.read_record(folder)
    assert 1 < record["measures"]["bits_over_optimum"] < 2
    page = (folder / "README.md").read_text()
    assert f"{record['measures']['bits_over_optimum']:.3f} times that" in page
    assert made["command"] in page
    assert f"step {STEPS} of {STEPS}" in page
    losses = made["curves"]
    assert losses["e4m3"]["last_difference"] == pytest.approx(0.25)
    assert losses["e5m2"]["largest_difference"] == pytest.approx(-0.5)
    assert re.search(r"\+0\.2500 \| +\+0\.2500 \|", page)
    # all of it comes from the JSON
    again = tmp_path / folder.name
    run(home, analysis, "--from", folder / "summary.json", "--out", again)
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_same_seed_gives_the_same_analysis(home, made):
    """Also without --curves: then there is neither that section nor its picture."""
    run(home, analysis, "--checkpoint", checkpoint(home), "--json", "again.json")
    again = json.loads((home / "again.json").read_text())
    for part in ("layers", "saving", "synthetic", "over_density"):
        assert again[part] == made[part]
    folder = home / "2026-12-01_Again"
    run(home, analysis, "--from", "again.json", "--out", folder)
    assert not (folder / "losses.png").exists()
    assert "Losses of" not in (folder / "README.md").read_text()
    # and with the losses of runs that came later
    run(home, analysis, "--from", "again.json", "--out", folder, "--curves", "e4m3=e4m3.txt")
    assert (folder / "losses.png").exists()
    assert "Losses of" in (folder / "README.md").read_text()


def test_numbers_need_no_matplotlib(home, made, tmp_path, monkeypatch):
    for module in ("matplotlib", "analyze_page", "plot_records"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(bench_record.importlib.util, "find_spec", lambda name: None)
    source = home / "2026-12-01_Optimum" / "summary.json"
    run(home, analysis, "--from", source, "--json", tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == made
    with pytest.raises(SystemExit, match="--out draws pictures, which needs matplotlib"):
        run(home, analysis, "--from", source, "--out", "2026-12-01_Again")


# -----------------------------------------------------------------------------
# Sentences


@pytest.mark.parametrize(("change", "sentence"), [
    ({"--checkpoint": "none.pt"}, "checkpoint none.pt cannot be read: No such file"),
    ({"--checkpoint": "damaged.pt"}, "damaged.pt is no checkpoint, or a damaged one"),
    ({"--checkpoint": "other.pt"}, "other.pt does not fit this version of train_gpt.py"),
    ({"--data": "nowhere"}, "no fineweb_val_*.bin in nowhere"),
    ({"--curves": ["e4m3.txt"]}, "--curves: expected NAME=LOG, received 'e4m3.txt'"),
    ({"--curves": ["a=none.txt"]}, "--curves a: none.txt: no such folder, log or glob"),
    ({"--curves": ["a=e4m3.txt", "b=short.txt"]},
     "--curves b: expected the 4 steps of e4m3.txt, received 3 in short.txt"),
    ({"--out": "e4m3.txt/2026-12-01_X"}, "e4m3.txt/2026-12-01_X cannot be written: Not a dir"),
    ({"--out": "x"}, "--out x: expected a folder named YYYY-MM-DD_Name"),
])
def test_what_is_wrong_is_one_sentence(home, change, sentence):
    whole = (home / checkpoint(home)).read_bytes()
    (home / "damaged.pt").write_bytes(whole[: len(whole) // 2])
    other = torch.load(home / checkpoint(home), weights_only=True)
    torch.save(other | {"config": other["config"] | {"dim": 2 * DIM}}, home / "other.pt")
    text = (home / "e4m3.txt").read_text()
    (home / "short.txt").write_text(re.sub(r"step:2/4 train_loss.*\n", "", text))
    arguments = {"--checkpoint": checkpoint(home), "--out": "2026-12-01_Wrong"} | change
    with pytest.raises(SystemExit, match="^[^\n]+$") as ended:
        run(home, analysis, *(
            word for name, value in arguments.items()
            for word in (name, *(value if isinstance(value, list) else [value]))))
    assert sentence in str(ended.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"layers": []}'])
def test_a_page_of_nothing_is_one_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(SystemExit, match="^[^\n]+$") as ended:
        run(tmp_path, analysis, "--from", "a.json", "--out", "2026-12-01_X")
    assert str(ended.value).startswith("analyze_compression.py: --from a.json")
    assert not (tmp_path / "2026-12-01_X").exists()


def test_something_has_to_be_read_and_written(home):
    for words in ((), ("--checkpoint", checkpoint(home)), ("--json", "x"), ("--from", "x")):
        with pytest.raises(SystemExit, match="expected --checkpoint or --from, and --json or"):
            run(home, analysis, *words)
