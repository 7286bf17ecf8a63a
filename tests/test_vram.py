"""scripts/bench_vram.py: its line, ratios, components, tables and record.

What:  the numbers made of what was measured; a real forward graph, grouped by component, against
       the tensors that autograd holds; steps that leave the weights alone; on a GPU a whole run.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU and some minutes.
Run:   python -m pytest tests/test_vram.py
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_record
import bench_vram
import update_tables

import train_gpt
from bitsparse_kernels import ActivationBuffer

ROOT = Path(__file__).resolve().parent.parent
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOKENS, DIM, LAYERS = 256, 32, 4
SMALL = train_gpt.Config(microbatch_tokens=TOKENS, dim=DIM, heads=2, layers=LAYERS, steps=3,
                         val_tokens=1024, val_sequence=512, window_end=256, wandb=False)


# -----------------------------------------------------------------------------
# Numbers


def measured(tokens, slope, constant, model, buffer=0, **more):
    """What a mode would measure whose activations take constant + slope * tokens bytes."""
    held = constant + slope * tokens - 1000 - buffer
    return {"tokens": tokens, "bytes_per_token": (constant + slope * tokens) / tokens,
            "peak_bytes": model + constant + slope * tokens, "buffer_bytes": buffer,
            "held_bytes": held, "host_synchronizations": 0, **more,
            "saved_bytes": dict.fromkeys(bench_vram.COMPONENTS, 0) | {"head": held - 10}}


ROUNDS_MS = {"eager": [[10, 12], [20, 22], [30, 32]], "dense": [[11, 11], [42, 42], [31, 31]],
             "bitsparse-raw": [[22, 22], [21, 21], [62, 62]]}


def rows():
    def row(mode, slope, **more):
        return bench_vram.make_row(mode, measured(49152, slope, 3e6, 2e9, **more),
                                   measured(98304, slope, 3e6, 2e9, **more), ROUNDS_MS)

    return [row("eager", 400e3), row("dense", 300e3),
            row("bitsparse-raw", 200e3, buffer=2 ** 28, density=0.25, bits_per_value=16.1)]


def test_the_line_is_found_and_inverted():
    row = rows()[0]
    assert row["slope"] == pytest.approx(400e3)
    assert row["fixed_bytes"] == pytest.approx(2e9 + 3e6)
    for gb, tokens in row["largest_microbatch"].items():
        assert tokens % train_gpt.BLOCK == 0
        room = int(gb) * 1e9 - row["fixed_bytes"]
        assert 0 <= room - row["slope"] * tokens < row["slope"] * train_gpt.BLOCK


def test_no_microbatch_where_the_weights_do_not_fit():
    assert bench_vram.largest_microbatch(1000, 25e9, 24) == 0
    assert bench_vram.largest_microbatch(1e9, 0, 127) == 0
    assert bench_vram.largest_microbatch(1e9, 0, 128) == 128


def test_ratios_are_of_neighbours():
    # The rounds' medians are 11, 21, 31 and 22, 21, 62: ratios 2, 1, 2. Of all medians it is 22/21.
    assert bench_vram.ratio(ROUNDS_MS, "bitsparse-raw", "eager") == 2
    assert bench_vram.ratio(ROUNDS_MS, "eager", "eager") == 1
    assert bench_vram.ratio({"eager": ROUNDS_MS["eager"]}, "eager", "dense") is None
    assert rows()[0]["step_ms"] == 21


def test_components_add_up():
    for row in rows():
        assert sum(row["components"].values()) == pytest.approx(row["bytes_per_token"])
        assert row["components"]["transient"] * 49152 == pytest.approx(1000)
        assert row["components"]["not in the graph"] * 49152 == pytest.approx(10)
    assert rows()[2]["components"][bench_vram.VALUES] == 2 ** 28 / 49152


# -----------------------------------------------------------------------------
# What a real forward keeps


@pytest.fixture(scope="module")
def small_vocabulary():
    with pytest.MonkeyPatch.context() as patch:
        for module in (train_gpt, bench_vram):
            patch.setattr(module, "VOCAB", 512)
        patch.setattr(train_gpt, "BOS", 511)
        yield


@pytest.mark.parametrize("mode", ["eager", "dense", "bitsparse-raw"])
def test_a_forward_graph_by_component(small_vocabulary, mode):
    """AOTAutograd's real partition; no code is generated, so no compiler is needed."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config as inductor

    mlp, codec = bench_vram.MODES[mode]
    config = dataclasses.replace(SMALL, mlp=mlp, codec=codec)
    elements = LAYERS * TOKENS * 4 * DIM
    model = train_gpt.GPT(config, ActivationBuffer(2 * elements, "cpu", LAYERS))
    graph = bench_vram.SavedTensorsPass(config)

    def compile_forward(module, inputs):
        inductor.post_grad_custom_pre_pass(module.graph)
        return torch._functorch.aot_autograd.make_boxed_func(module.forward)

    torch._dynamo.reset()
    with inductor.patch(post_grad_custom_pre_pass=graph):
        forward = torch.compile(model, dynamic=False, fullgraph=True, backend=aot_autograd(
            fw_compiler=compile_forward, partition_fn=min_cut_rematerialization_partition))
        tokens = torch.randint(0, 511, (TOKENS + 1,), dtype=torch.int32)
        batch = tokens[:-1], tokens[1:].long(), torch.tensor(2, dtype=torch.int32)
        loss = forward(*batch)
        saved = graph.bytes
        loss_fn = loss.grad_fn
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(),
                                                        *batch)}
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in loss_fn.saved_tensors}
        assert sum(saved.values()) == sum(n for at, n in held.items()
                                          if at not in own and n > 2)  # the lookups' zero
        loss.backward()  # its graph comes by, and is told apart
    assert graph.bytes is saved
    hidden = {"eager": 4 * elements,  # relu(z) and its square, as the partitioner decides
              "dense": 2 * elements,
              "bitsparse-raw": elements // 8 + LAYERS * 8 * (TOKENS * 4 * DIM // 2048 + 1)}
    assert saved[bench_vram.HIDDEN] == hidden[mode]
    layer = TOKENS * DIM * 2  # bytes of a bf16 [tokens, dim]
    # of each block its output, and the sum before its MLP or what attention adds for it
    assert saved["residual stream and norms"] == 2 * LAYERS * layer
    assert saved["MLP: input"] == 0  # made again from it
    assert saved["embeddings"] == layer + 4 * TOKENS  # x0 before its norm, and that one's rstd
    assert saved["head"] == layer + 512 * DIM * 2 + 2 * 4 * TOKENS  # dx, dw, inverse, rstd
    # the output at least, in three layers; a CPU's attention keeps more than FlexAttention
    assert saved["attention: q, k, v, output"] > 3 * layer


def test_steps_change_no_weight(small_vocabulary, make_text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = dataclasses.replace(
        SMALL, data=str(make_text_folder(bos=511)), epochs=4, log_dir=str(tmp_path), mlp="dense",
        muon_lr=bench_vram.NO_RATE, adam_lr=bench_vram.NO_RATE)
    ranks = train_gpt.start_ranks()
    trainer = train_gpt.Trainer(config, ranks, train_gpt.Log(config, ranks))
    with torch.no_grad():
        for p in trainer.model.parameters():  # no gradient is zero, as many are at first
            p += 0.01 * torch.randn_like(p)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    moments = [t.clone() for t in trainer.muon.state]
    trainer.step(0)
    trainer.step(0)
    for name, t in trainer.model.state_dict().items():
        assert torch.equal(t, before[name]), name
    for now, then in zip(trainer.muon.state, moments, strict=True):
        assert not torch.equal(now, then)  # they have worked


class Connection:
    """A pipe whose other end asks for two turns."""

    def __init__(self):
        self.sent, self.asked = [], [True, True, False]

    def send(self, value):
        self.sent.append(value)

    def recv(self):
        return self.asked.pop(0)


class Event:
    def __init__(self, enable_timing):
        pass

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


class Pass:
    bytes = dict.fromkeys(bench_vram.COMPONENTS, 1)


def test_a_modes_process(small_vocabulary, make_text_folder, tmp_path, monkeypatch):
    """On a CPU, with counters of memory that stand still; the weights are another run's."""
    sync_debug_mode = []
    for name, fake in (("is_available", lambda: False), ("Event", Event),
                       ("memory_allocated", lambda: 5000), ("max_memory_allocated", lambda: 9000),
                       ("synchronize", lambda: None), ("empty_cache", lambda: None),
                       ("set_sync_debug_mode", sync_debug_mode.append)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(bench_vram, "SavedTensorsPass", lambda config: Pass())
    config = dataclasses.replace(SMALL, data=str(make_text_folder(bos=511)), mlp="eager",
                                 log_dir=str(tmp_path), save_every=1, deterministic=True)
    ranks = train_gpt.start_ranks()
    trainer = train_gpt.Trainer(config, ranks, train_gpt.Log(config, ranks))
    with torch.no_grad():
        for block in trainer.model.blocks:
            block.mlp.w1.zero_()[:4] = 1  # one row in 32
    trainer.save()
    assert trainer.finish_saving()
    files = sorted(tmp_path.rglob("*"))
    config = bench_vram.read_config("latest", None, ["--log-dir", str(tmp_path)])
    assert "deterministic" not in bench_vram.make_record(config, [])["config"]
    larger = bench_vram.read_config("latest", 2 * TOKENS, ["--log-dir", str(tmp_path)])
    assert len(train_gpt.TrainData(larger).batches) < larger.steps
    measured, rounds = [], {}
    for tokens in (TOKENS, 2 * TOKENS):
        connection = Connection()
        bench_vram.serve(connection, dataclasses.replace(
            config, mlp="bitsparse", wandb=True, microbatch_tokens=tokens), config.steps)
        memory, *rounds["bitsparse-raw"] = connection.sent
        measured.append(memory)
    assert sorted(tmp_path.rglob("*")) == files  # neither a log nor a checkpoint
    row = bench_vram.make_row("bitsparse-raw", *measured, rounds)
    assert [len(turn) for turn in row["rounds_ms"]] == [bench_vram.TIMED] * 2
    assert min(map(min, row["rounds_ms"])) > 0
    assert 0 < row["density"] <= 1 / 32
    assert 16 <= row["bits_per_value"] < 17  # tiles are rounded up
    assert row["peak_mib"] == 9000 / train_gpt.MIB
    assert sync_debug_mode == ["warn", "default"] * 2
    assert row["sizes"][1]["host_synchronizations"] == 0
    assert measured[1]["buffer_bytes"] == 2 * train_gpt.MIB
    assert row["slope"] > 0
    assert sum(row["components"].values()) == pytest.approx(row["bytes_per_token"])


# -----------------------------------------------------------------------------
# Record and command line


def bench(*arguments, cwd, **environment):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "bench_vram.py"),
                           *map(str, arguments)], capture_output=True, text=True, cwd=cwd,
                          env=os.environ | environment)


@pytest.fixture
def record(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_vram.py", "--checkpoint", "latest", "--json", "f",
                                      "--out=records/2026-12-01_Vram"])
    config = dataclasses.replace(train_gpt.Config(), resume="somewhere/logs/RUN/step-00000054.pt")
    return bench_vram.make_record(config, rows())


def test_record(record, tmp_path):
    assert set(record["sources_sha256"]) == set(bench_vram.SOURCES)
    (tmp_path / "numbers.json").write_text(json.dumps(record))
    folder = tmp_path / "2026-12-01_Vram"
    result = bench("--from", "numbers.json", "--out", folder, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    read = update_tables.read_record(folder)  # as the README's tables read it
    assert read["measures"]["vram_ratio_modded_nanogpt"] == pytest.approx(
        (200e3 * 49152 + 3e6) / (400e3 * 49152 + 3e6))
    assert read["measures"]["step_ratio_modded_nanogpt"] == 2
    assert read["weights"] == "RUN/step-00000054.pt"
    page = (folder / "README.md").read_text()
    assert page.startswith(f"# {folder.name}\n")
    assert "\npython scripts/bench_vram.py --checkpoint latest\n" in page
    for line in (*bench_vram.main_table(record["rows"]),
                 *bench_vram.component_table(record["rows"])):
        assert line in page
        assert line in result.stdout
    assert result.stdout.splitlines()[-1].startswith("| bitsparse-raw ")  # the table comes last


def test_a_record_at_initialization_answers_no_claim(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_vram.py"])
    record = bench_vram.make_record(train_gpt.Config(), rows())
    assert record["measures"] == {}
    assert "initial, --seed 0" in bench_vram.page(record)


def test_a_number_that_was_not_measured_is_a_dash():
    row = rows()[0] | {"step_over_dense": None}
    cells = [cell.strip() for cell in bench_vram.main_table([row])[-1].split("|")[1:-1]]
    assert cells[:6] == ["eager", "–", "–", "400,061", "1.0000", "–"]
    assert cells[8:13] == ["21.00", "1.0000", "–", "–", "–"]


def test_ratios_stand_with_their_least_and_largest_round():
    lines = bench_vram.main_table(rows())
    cells = [[cell.strip() for cell in line.split("|")[9:14]] for line in lines[2:]]
    assert cells == [["21.00", "1.0000", "–", "1.0000", "0.5000–1.0000"],
                     ["31.00", "1.0000", "1.0000–2.0000", "1.0000", "–"],
                     ["22.00", "2.0000", "1.0000–2.0000", "2.0000", "0.5000–2.0000"]]


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--from", "none.json"], "--from none.json cannot be read: No such file"),
    (["--from", "text.json"], "--from text.json: expected a file that --json has written, received "
                              "no JSON"),
    (["--from", "list.json"], "--from list.json: expected a file that --json has written, received "
                              "one without any field"),
    (["--from", "other.json"], "--from other.json: expected a file that --json has written, "
                               "received one without claim, command, commit"),
    (["--from", "ranks.json"], "--from ranks.json: expected numbers of bench_vram.py, received "
                               "those of python scripts/bench_ranks.py"),
    (["--from", "other.json", "--layers", "4"], "--from measures nothing: leave out --layers 4"),
    (["--from", "other.json", "--checkpoint", "c"], "--from measures nothing: leave out "
                                                    "--checkpoint"),
    (["--from", "ranks.json", "--out", "Vram"], "--out Vram: expected a folder named YYYY-MM-DD_"),
    (["--preset", "tiny", "--json", "x"], "--json and --out: expected a CUDA GPU, received none"),
])
def test_refused(tmp_path, arguments, sentence):
    ranks = dict.fromkeys([*update_tables.REQUIRED["bench"], "sources_sha256"], "") | {
        "command": "python scripts/bench_ranks.py"}
    for name, text in (("other", "{}"), ("list", "[]"), ("text", "{"),
                       ("ranks", json.dumps(ranks))):
        (tmp_path / f"{name}.json").write_text(text)
    result = bench(*arguments, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert result.stderr.startswith(f"bench_vram.py: {sentence}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "Vram").exists()


def test_what_could_not_be_written_is_said_before_measuring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_x.py"])
    parser = argparse.ArgumentParser()
    bench_record.add_options(parser)
    (tmp_path / "2026-12-01_There").mkdir()
    (tmp_path / "2026-12-01_There" / "summary.json").touch()
    (tmp_path / "file").touch()
    for words, sentence in (
            (["--out", "2026-12-01_There"], "--out 2026-12-01_There is a record already; choose "
                                            "another name, or remove it"),
            (["--json", "file/x"], "file cannot be written: File exists"),
            (["--out", "file/2026-12-01_X"], "file/2026-12-01_X cannot be written: Not a dir"),
            (["--json", "."], ". cannot be written: Is a directory")):
        with pytest.raises(SystemExit, match="^[^\n]+$") as ended:
            bench_record.check_options(parser, parser.parse_args(words))
        assert str(ended.value).startswith(f"bench_x.py: {sentence}")


def test_the_commit_is_found_when_the_record_is_made(record, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bench_record, "find_commit", lambda s: asked.append(s) or "c" * 40)
    options = argparse.Namespace(json=tmp_path / "again.json", out=tmp_path / "2026-12-01_Vram")
    assert record["commit"] == "not of a commit here"
    bench_record.write(record, options, bench_vram.page)
    read = update_tables.read_record(options.out)
    assert read == json.loads(options.json.read_text())
    assert (read["commit"], asked) == ("c" * 40, [record["sources_sha256"]])
    assert f"- Sources: commit {'c' * 40}\n" in (options.out / "README.md").read_text()
    # what is not found later, in a clone without the history, stays what it was
    monkeypatch.setattr(bench_record, "find_commit", lambda s: bench_record.NO_COMMIT)
    bench_record.write(read, options, bench_vram.page)
    assert update_tables.read_record(options.out)["commit"] == "c" * 40


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu(make_text_folder, tmp_path):
    text = make_text_folder(bos=50256)
    result = bench("--data", text, "--preset", "tiny", "--epochs", 40, "--steps", 3,
                   "--val-tokens", 1024, "--microbatch-tokens", 512, "--dim", 64, "--modes",
                   "dense", "bitsparse-exponent", "--json", "numbers.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    dense, ours = json.loads((tmp_path / "numbers.json").read_text())["rows"]
    elements = 4 * 4 * 64  # a token's, of all layers; no weight has a dimension of 512
    assert dense["components"][bench_vram.HIDDEN] == 2 * elements
    assert 0.4 < ours["density"] < 0.6  # initial weights
    assert 7 < ours["bits_per_value"] < 15
    assert dense["step_over_dense"] == 1
    assert ours["components"][bench_vram.HIDDEN] == pytest.approx(elements / 8, rel=0.1)
    for row in (dense, ours):
        assert sum(row["components"].values()) == pytest.approx(row["bytes_per_token"])
        assert row["bytes_per_token"] > row["components"]["transient"] > 0
        assert [len(turn) for turn in row["rounds_ms"]] == [bench_vram.TIMED] * bench_vram.ROUNDS
