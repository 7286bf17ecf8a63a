"""train_gpt.py's runs: bits that do not depend on how activations are saved or on the buffer.

What:  20 steps with each --mlp, bit for bit; overflows of the buffer, after which weights, moments
       and losses are those of a run without; the buffer's size from step to step; a run as a user
       starts it, its log, and its wandb run read back; every wrong argument's sentence. On a GPU:
       whole steps without a synchronization, and the same bits in three modes.
Needs: a CPU, wandb; what is marked `gpu` an NVIDIA GPU.
Run:   python -m pytest tests/test_train.py

Runs in this process have a vocabulary of 512: at this size a step's time is otherwise that of the
50,304 rows of the embeddings and the head.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bitsparse_kernels
import train_gpt
from bitsparse_kernels import INEXACT, compress
from train_gpt import PRESETS, SOURCES, Config, Log, Ranks, Step, Trainer, parse_config

SCRIPT = Path(train_gpt.__file__)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 20
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@contextlib.contextmanager
def reproducible(compile):
    """On a GPU, sums in a fixed order; and models compiled or, which saves a minute each, not.

    FlexAttention that is not compiled leaves the window out, in all runs of a test alike.
    """
    if DEVICE.type == "cpu":
        yield
        return
    torch.compiler.reset()
    # only warnings: cuBLAS wants a setting from before the process began, which matters with
    # several streams, and here is one
    torch.use_deterministic_algorithms(True, warn_only=True)
    with (torch.compiler.set_stance("default" if compile else "force_eager"),
          torch._inductor.config.patch(train_gpt.DETERMINISTIC_INDUCTOR)):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _reproducible(request):
    with reproducible(compile=request.node.get_closest_marker("gpu") is not None):
        yield


@pytest.fixture
def small_vocabulary(monkeypatch):
    monkeypatch.setattr(train_gpt, "VOCAB", 512)
    monkeypatch.setattr(train_gpt, "BOS", 511)


@pytest.fixture(scope="module")
def text(make_text_folder):
    return make_text_folder(bos=511)


class WatchedTrainer(Trainer):
    """A trainer that is given too small a buffer before some steps, and watches what they do.

    before: called with the trainer once before the first try of each step, by number.
    """

    def __init__(self, *arguments, before=None):
        super().__init__(*arguments)
        self.before, self.void, self.sizes = dict(before or {}), [], []

    def all_state(self):
        return [*self.model.parameters(), *self.muon.state, *self.adam.state]

    def step(self, number):
        if number in self.before:
            self.before.pop(number)(self)
        if self.buffer is not None:
            self.sizes.append(self.buffer.capacity_bytes)
        state = [t.detach().clone() for t in self.all_state()]
        step = super().step(number)
        same = [torch.equal(a, b) for a, b in zip(self.all_state(), state, strict=True)]
        if self.buffer is not None and self.buffer.overflowed():
            assert all(same)
            self.void.append(number)
        else:
            assert not all(same)
        return step


def make_trainer(text, tmp_path, before=None, **changes):
    config = Config(**{"data": str(text), "steps": STEPS, "epochs": 4, "microbatch_tokens": 128,
                       "val_tokens": 1024, "val_sequence": 512, "val_every": 0, "layers": 4,
                       "dim": 64, "heads": 2, "window_end": 256, "log_dir": str(tmp_path / "logs"),
                       "wandb": False} | changes)
    ranks = Ranks(0, 1, DEVICE)
    return WatchedTrainer(config, ranks, Log(config, ranks), before=before)


def train(*arguments, **changes):
    trainer = make_trainer(*arguments, **changes)
    trainer.result = trainer.run()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.done]


def assert_same_run(trainer, expected):
    assert losses(trainer) == losses(expected)
    assert trainer.result == expected.result
    for a, b in zip(trainer.all_state(), expected.all_state(), strict=True):
        assert torch.equal(a, b)


# -----------------------------------------------------------------------------
# The ways of saving


@pytest.mark.skipif(torch.cuda.is_available(),
                    reason="--mlp eager makes a GPU's GEMM calls itself; the others: marked gpu")
@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_ways_of_saving_give_the_same_bits(text, tmp_path, small_vocabulary, head):
    eager = train(text, tmp_path, mlp="eager", head=head)
    assert len(eager.done) == STEPS
    assert losses(eager)[-1] < losses(eager)[0] - 1
    assert eager.result[1] < eager.result[0] - 1
    for mlp in ("bitsparse", "dense", "checkpoint"):
        trainer = train(text, tmp_path, mlp=mlp, head=head)
        assert {block.mlp.save for block in trainer.model.blocks} == {mlp}
        assert_same_run(trainer, eager)
        assert (trainer.buffer is None) == (mlp != "bitsparse")
    # and the comparison can fail
    other = train(text, tmp_path, mlp="dense", head=head, seed=1)
    assert losses(other) != losses(eager)


def test_fp8_head_learns_as_much(text, tmp_path, small_vocabulary):
    bf16, fp8 = (train(text, tmp_path, mlp="dense", head=head) for head in ("bf16", "fp8"))
    assert losses(fp8) != losses(bf16)
    assert losses(fp8)[-1] < losses(fp8)[0] - 1
    assert fp8.vals[STEPS] == pytest.approx(bf16.vals[STEPS], rel=0.01)


def test_warm_up_leaves_no_trace(text, tmp_path, small_vocabulary):
    trainer = make_trainer(text, tmp_path)
    before = [t.detach().clone() for t in trainer.all_state()]
    trainer.warm_up()
    for now, then in zip(trainer.all_state(), before, strict=True):
        assert torch.equal(now, then)
    assert not any(p.grad.any() for p in trainer.model.parameters())
    assert trainer.done == []
    assert trainer.overflows == 0
    assert not any(trainer.buffer.snapshot().layer_nnz)


def test_steps_report_what_the_buffer_held(text, tmp_path, small_vocabulary):
    trainer = train(text, tmp_path, steps=2)
    config = trainer.config
    elements = config.layers * config.microbatch_tokens * 4 * config.dim
    for row in trainer.done:
        layers = [row[f"bitsparse/density/layer_{i}"] for i in range(config.layers)]
        assert row["bitsparse/density"] == pytest.approx(sum(layers) / len(layers))
        assert all(0.3 < density < 0.7 for density in layers)
        # the most of 8 microbatches, against their mean; and 16 bytes a tile of 2048 at most
        used = row["bitsparse/buffer_used"] / (2 * elements)
        assert row["bitsparse/density"] <= used < row["bitsparse/density"] + 0.05
        assert row["bitsparse/buffer_capacity"] == trainer.buffer.capacity_bytes
    # the first step's weights are the initial ones: counted here by hand
    trainer = make_trainer(text, tmp_path, steps=2)
    stored = [0] * config.layers
    for i, block in enumerate(trainer.model.blocks):
        def count(module, arguments, i=i):
            z = F.linear(arguments[0], module.w1.to(torch.bfloat16))
            stored[i] += int((z > 0).sum())
        block.mlp.register_forward_pre_hook(count)
    for i in range(8):
        trainer.model(*trainer.batch(trainer.train.microbatch(0, i), 0))
    trainer = train(text, tmp_path, steps=2)
    assert [trainer.done[0][f"bitsparse/density/layer_{i}"] * 8 * elements / config.layers
            for i in range(config.layers)] == stored


def test_time_of_a_step_is_its_own(text, tmp_path, small_vocabulary):
    """It is read when the next one has been enqueued, which on a CPU means made."""
    trainer = train(text, tmp_path, {2: lambda t: time.sleep(2)}, steps=3)
    assert all(row["step_ms"] > 0 for row in trainer.done)
    assert sum(row["step_ms"] for row in trainer.done) < trainer.train_ms - 2000


# -----------------------------------------------------------------------------
# Overflow


@pytest.fixture(scope="module")
def plain_run(text, tmp_path_factory):
    """A run with validation every 3 steps and room enough in the buffer."""
    with pytest.MonkeyPatch.context() as patch, reproducible(compile=False):
        patch.setattr(train_gpt, "VOCAB", 512)
        patch.setattr(train_gpt, "BOS", 511)
        trainer = train(text, tmp_path_factory.mktemp("plain"), steps=8, val_every=3)
    assert (trainer.void, trainer.overflows) == ([], 0)
    return trainer


def starve(trainer):
    """A hundredth of what half of the elements take."""
    config = trainer.config
    trainer.buffer.resize(config.layers * config.microbatch_tokens * 4 * config.dim // 100)


# the steps before which the buffer is made too small, and those that have no effect: that step and
# the one that was started before the host could see it, unless the host waits to validate
@pytest.mark.parametrize(
    ("starved", "void"),
    [
        ([0], [0, 1]),
        ([4], [4, 5]),
        ([2], [2]),  # step 3 comes after validation
        ([3], [3, 4]),  # just validated
        ([7], [7]),  # the last
        ([0, 2, 4, 7], [0, 1, 2, 4, 5, 7]),
        ([3, 4], [3, 4]),  # starved again while step 3 is pending: grown once
    ],
)
def test_overflow_changes_nothing(text, tmp_path, small_vocabulary, plain_run, starved, void):
    before = {number: starve for number in starved}
    trainer = train(text, tmp_path, before, steps=8, val_every=3)
    assert not trainer.before
    assert trainer.void == void
    assert trainer.overflows == (1 if starved == [3, 4] else len(starved))
    assert trainer.done[-1]["bitsparse/overflows"] == trainer.overflows
    assert_same_run(trainer, plain_run)
    said = re.findall(r"step (\d+) overflowed the buffer: (\d+) bytes needed, (\d+) there; now",
                      trainer.log.path.read_text())
    assert len(said) == trainer.overflows
    assert all(int(needed) > 50 * int(had) for _, needed, had in said)


def test_buffer_too_small_from_the_start(text, tmp_path, small_vocabulary, plain_run):
    trainer = make_trainer(text, tmp_path, steps=8, val_every=3)
    starve(trainer)
    trainer.warm_up()  # overflows too, and need not be repeated
    trainer.void.clear()
    trainer.result = trainer.run()
    assert (trainer.void, trainer.overflows) == ([0, 1], 1)
    assert_same_run(trainer, plain_run)


def test_buffer_grows_as_often_as_needed(text, tmp_path, small_vocabulary, monkeypatch):
    """Without a margin and in small steps, each new high of the need overflows."""
    monkeypatch.setattr(bitsparse_kernels, "STRIPES", 1)  # the need is that of any capacity
    plain_run = train(text, tmp_path, steps=8, val_every=3)
    monkeypatch.setattr(train_gpt, "MARGIN", 1.0)
    monkeypatch.setattr(train_gpt, "MIB", 1)  # capacities in steps of 16 bytes
    trainer = train(text, tmp_path, {0: starve}, steps=8, val_every=3)
    needs = [row["bitsparse/buffer_used"] for row in plain_run.done]
    highs = [need for i, need in enumerate(needs) if need > max(needs[:i], default=0)]
    assert len(highs) >= 3  # else this run shows nothing
    # once more where the step already under way needed more than the one that the room was made for
    assert len(highs) <= trainer.overflows <= 2 * len(highs)
    assert [row["bitsparse/buffer_used"] for row in trainer.done] == needs
    assert trainer.buffer.capacity_bytes == highs[-1]
    assert_same_run(trainer, plain_run)


def overflow_once(trainer):
    """One use asks for more than there is; what comes after fits again."""
    n = trainer.buffer.capacity_bytes
    compress(torch.ones(n, dtype=torch.bfloat16, device=DEVICE), trainer.buffer)


def find_inexact(trainer):
    """As a fused GEMM does whose relu(z) its square does not tell: see "Fusing" of the kernels."""
    trainer.buffer.state[INEXACT] = 1


@pytest.mark.parametrize("starved", [0, 3])
def test_overflow_right_after_validation_does_not_repeat_it(
        text, tmp_path, small_vocabulary, starved):
    trainer = train(text, tmp_path, {starved: starve}, steps=6, val_every=3)
    assert re.findall(r"^step:(\d)/6 val_loss", trainer.log.path.read_text(), re.M) == [*"036"]


def test_overflow_in_one_microbatch_is_enough(text, tmp_path, small_vocabulary, plain_run):
    """What comes after it in the step fits again, and so does the next step."""
    trainer = train(text, tmp_path, {4: overflow_once}, steps=8, val_every=3)
    assert (trainer.void, trainer.overflows) == ([4, 5], 1)
    assert trainer.sizes[0] < trainer.buffer.capacity_bytes
    assert_same_run(trainer, plain_run)


@pytest.mark.parametrize("happens", [overflow_once, find_inexact])
def test_shrinking_does_not_hide_what_voids_a_step(
        text, tmp_path, small_vocabulary, plain_run, monkeypatch, happens):
    """The buffer may shrink after step 3, while step 4 is void: step 5 must have no effect."""
    monkeypatch.setattr(train_gpt, "SETTLE", 3)
    monkeypatch.setattr(train_gpt, "MIB", 64)
    trainer = train(text, tmp_path, {0: lambda t: t.buffer.resize(2**20), 4: happens},
                    steps=8, val_every=3)
    assert (trainer.void, trainer.overflows) == ([4, 5], 1)
    assert min(trainer.sizes) < 2**20  # it did shrink
    assert_same_run(trainer, plain_run)


def test_buffer_that_nothing_can_hold(text, tmp_path, small_vocabulary, monkeypatch):
    trainer = make_trainer(text, tmp_path, {1: starve}, steps=3)

    def no_memory(size):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    trainer.before[2] = lambda t: monkeypatch.setattr(t.buffer, "resize", no_memory)
    expected = (r"^train_gpt.py: step 2 needs \d+ bytes of activation buffer, it has \d+, and "
                r"2097152 are not free on .*; lower --microbatch-tokens or pass --mlp checkpoint$")
    with pytest.raises(SystemExit, match=expected):
        trainer.run()


# -----------------------------------------------------------------------------
# The buffer's size


def settle_with_needs(trainer, needs):
    """The capacities after steps that needed these bytes, as the trainer settles them."""
    capacities = []
    for number, need in enumerate(needs):
        snapshot = SimpleNamespace(peak_bytes=need, capacity_bytes=trainer.buffer.capacity_bytes,
                                   stored_bytes=0, layer_nnz=[0] * trainer.config.layers)
        trainer.read_snapshot(Step(number, 0.0, 0.0, None, snapshot, {}))
        capacities.append(trainer.buffer.capacity_bytes)
    return capacities


def resizes(capacities):
    return sum(a != b for a, b in zip(capacities, capacities[1:], strict=False))


@pytest.fixture
def bytewise_trainer(text, tmp_path, small_vocabulary, monkeypatch):
    monkeypatch.setattr(train_gpt, "MIB", 1)  # capacities in steps of 16 bytes
    trainer = make_trainer(text, tmp_path)
    trainer.buffer.resize(105_000)
    return trainer


def test_buffer_shrinks_when_the_need_has_fallen(bytewise_trainer):
    capacities = settle_with_needs(bytewise_trainer, [100_000] * 15 + [40_000] * 15)
    assert capacities[:15] == [105_008] * 15
    assert capacities[-1] == 42_000
    assert resizes(capacities) == 1


# within a twentieth; falling by some percent at a time, as a model's density does
@pytest.mark.parametrize(
    ("needs", "most"),
    [([100_000, 96_000] * 20, 0), ([int(100_000 * 0.98 ** i) for i in range(60)], 12)],
)
def test_buffer_is_not_resized_often(bytewise_trainer, needs, most):
    capacities = settle_with_needs(bytewise_trainer, needs)
    assert resizes(capacities) <= most
    assert all(capacity >= need for capacity, need in zip(capacities, needs, strict=True))
    assert capacities[-1] <= needs[-1] * 1.05 * 0.98 ** -9  # the most of five steps, five ago


def test_buffer_is_not_shrunk_by_a_single_low_step(bytewise_trainer):
    capacities = settle_with_needs(bytewise_trainer, ([100_000] * 11 + [50_000]) * 4)
    assert min(capacities) >= 100_000


def test_buffer_does_not_shrink_right_after_growing(text, tmp_path, small_vocabulary, monkeypatch):
    monkeypatch.setattr(train_gpt, "MIB", 64)
    trainer = train(text, tmp_path, {2: lambda t: t.buffer.resize(2**20)}, steps=14)
    assert trainer.overflows == 0
    assert trainer.sizes[2:6] == [2**20] * 4  # from the start on, 5 steps
    assert len(set(trainer.sizes[12:])) == 1
    assert trainer.sizes[-1] < 2**20 // 4


def test_buffer_keeps_the_size_that_was_asked_for(text, tmp_path, small_vocabulary):
    trainer = train(text, tmp_path, steps=13, buffer_mib=32)  # 2 MiB would do
    assert set(trainer.sizes) == {32 * 2**20}


# -----------------------------------------------------------------------------
# A run as a user starts it

TINY = ["--steps", "3", "--microbatch-tokens", "128", "--val-tokens", "512", "--val-sequence",
        "256", "--val-every", "2", "--layers", "4", "--dim", "32", "--heads", "2"]


def run_script(*arguments, home, **environment):
    """Nobody is logged in there, and no input."""
    passed = {k: v for k, v in os.environ.items()
              if not k.startswith("WANDB") and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, cwd=home, timeout=600,
        env=passed | {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "NETRC": str(home / "netrc"),
                      "OMP_NUM_THREADS": "1"} | environment)


def wandb_records(path, home):
    """The records of a run's folder, by wandb's own command, which needs no network."""
    result = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path],
                            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                            env=os.environ | {"HOME": str(home), "WANDB_ERROR_REPORTING": "false"})
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def real_run(make_text_folder, tmp_path_factory):
    """A run with wandb in offline mode: (what it printed, its folder)."""
    folder = tmp_path_factory.mktemp("run")
    result = run_script("--data", str(make_text_folder(bos=50256)), *TINY, home=folder,
                        WANDB_DIR=str(folder))
    assert result.returncode == 0, result.stderr
    return result, folder


def test_console(real_run):
    result, folder = real_run
    lines = result.stdout.splitlines()
    if DEVICE.type == "cpu":
        assert lines[0] == "CPU only, 1 threads: the kernels' torch reference"
    else:
        assert torch.cuda.get_device_name() in lines[0]
        assert any(re.match(r"VRAM of a microbatch.* \d+ bytes/token", line) for line in lines)
    assert lines[1] == "wandb: offline"
    assert re.fullmatch(r"\d+ parameters, 3 steps of 1024 tokens from .*/text\d*, --mlp bitsparse",
                        lines[2])
    first, last = (float(re.search(rf"^step:{n}/3 val_loss:(\d\.\d{{4}}|\d\d\.\d{{4}}) ",
                                   result.stdout, re.M)[1]) for n in (0, 3))
    assert f"val loss: {first:.4f} at the start, {last:.4f} at the end" in lines
    assert last < first
    assert any(re.fullmatch(r"tokens/s: \d+", line) for line in lines)
    log = next(line for line in lines if line.startswith("log: "))
    assert (folder / log.removeprefix("log: ")).is_file()
    run = next(line for line in lines if line.startswith("wandb: /"))
    assert list(Path(run.removeprefix("wandb: ")).glob("*.wandb"))
    assert not re.search("enter|choice|login|api key", result.stdout + result.stderr, re.I)


def test_log_file(real_run):
    (path,) = (real_run[1] / "logs").glob("*.txt")
    log = path.read_text()
    assert log.startswith(SOURCES[0] + "=" * 100 + "\n" + SOURCES[1] + "=" * 100 + "\n")
    rest = log[sum(map(len, SOURCES)):]
    assert f"torch {torch.__version__}" in rest
    config = json.loads(re.search(r"^config: (.*)$", rest, re.M)[1])
    assert {f.name for f in fields(Config)} | {"world_size"} == set(config)
    assert (config["steps"], config["dim"], config["world_size"]) == (3, 32, 1)
    timing = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    steps = re.findall(rf"^step:(\d)/3 train_loss:(\d+\.\d{{6}}) {timing}$", rest, re.M)
    assert [n for n, _ in steps] == ["1", "2", "3"]
    vals = re.findall(rf"^step:(\d)/3 val_loss:(\d+\.\d{{4}}) {timing}$", rest, re.M)
    assert [n for n, _ in vals] == ["0", "2", "3"]
    buffers = re.findall(r"^buffer:(\d)/3 used:(\d+) capacity:2097152 density:([\d.,]+)$",
                         rest, re.M)
    assert [n for n, *_ in buffers] == ["1", "2", "3"]
    assert all(len(density.split(",")) == 4 for *_, density in buffers)
    summary = json.loads(re.search(r"^summary: (.*)$", rest, re.M)[1])
    assert summary["run_id"] == path.stem
    assert (summary["mlp"], summary["steps"], summary["tokens"]) == ("bitsparse", 3, 3 * 1024)
    assert f"{summary['val_loss']:.4f}" == vals[-1][1]
    assert f"{summary['first_val_loss']:.4f}" == vals[0][1]
    assert summary["overflows"] == 0
    assert len(summary["density"]) == 4
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])


@pytest.fixture(scope="module")
def wandb_run(real_run):
    """(the run's record, its rows by step)"""
    (path,) = real_run[1].glob("wandb/offline-run-*")
    records = wandb_records(path, real_run[1])
    (run,) = [r["run"] for r in records if r["type"] == "run"]
    rows = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert len({row["_step"] for row in rows}) == len(rows)
    return run, {row["_step"]: row for row in rows}


EVERY_STEP = {"loss", "lr", "step_ms", "tokens_per_second", "vram/bytes_per_token",
              "bitsparse/density", *(f"bitsparse/density/layer_{i}" for i in range(4)),
              "bitsparse/buffer_used", "bitsparse/buffer_capacity", "bitsparse/bits_per_value",
              "bitsparse/overflows"}


def test_wandb_run_read_back(real_run, wandb_run):
    run, rows = wandb_run
    config = run["config"]["update"]
    (log,) = (real_run[1] / "logs").glob("*.txt")
    assert run["project"] == "bitsparse-speedrun"
    assert run["display_name"] == f"bitsparse-{log.stem[:8]}"
    assert config["run_id"] == log.stem
    assert {f.name for f in fields(Config)} <= set(config)

    assert sorted(rows) == [0, 1, 2, 3]
    text = log.read_text()
    for step in (1, 2, 3):
        assert set(rows[step]) >= EVERY_STEP
        assert f"step:{step}/3 train_loss:{rows[step]['loss']:.6f} " in text
        assert 0.3 < rows[step]["bitsparse/density"] < 0.7
        assert 0 < rows[step]["bitsparse/buffer_used"] < rows[step]["bitsparse/buffer_capacity"]
        assert rows[step]["bitsparse/overflows"] == 0
        assert rows[step]["tokens_per_second"] == pytest.approx(1024e3 / rows[step]["step_ms"])
    assert [rows[step]["lr"] for step in (1, 2)] == [0.05, 0.05]
    assert [step for step in rows if "val_loss" in rows[step]] == [0, 2, 3]
    for step in (0, 2, 3):
        assert f"step:{step}/3 val_loss:{rows[step]['val_loss']:.4f} " in text


def test_wandb_has_the_memory_of_each_step(wandb_run):
    """What autograd keeps, on a CPU: of each layer at least its output and the MLP's mask."""
    for step in (1, 2, 3):
        row = wandb_run[1][step]
        assert row["vram/bytes_per_token"] > 4 * (2 * 32 + 4 * 32 / 8)
        assert ("vram/peak_mib" in row) == (DEVICE.type == "cuda")
        assert row.get("vram/peak_mib", 1) > 0


def test_no_wandb_makes_no_run(text, tmp_path, small_vocabulary, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--data", str(text), "--no-wandb", *TINY])
    train_gpt.main()
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]
    assert "wandb" not in capsys.readouterr().out


def test_two_runs_have_two_logs(text, tmp_path, small_vocabulary):
    for _ in range(2):
        make_trainer(text, tmp_path)
    assert len(list((tmp_path / "logs").glob("*.txt"))) == 2


# -----------------------------------------------------------------------------
# Command line


def test_config_from_arguments():
    config = parse_config(["--preset", "offline", "--steps", "7", "--no-wandb", "--mlp=dense"])
    assert config == Config(**PRESETS["offline"] | {"steps": 7, "wandb": False, "mlp": "dense"})
    default = "speedrun" if torch.cuda.is_available() else "tiny"
    for preset, changes in PRESETS.items():
        assert parse_config(["--preset", preset]) == Config(**changes)
        assert parse_config([f"--preset={preset}", "--wandb"]) == Config(**changes)
    assert parse_config([]) == Config(**PRESETS[default])
    speedrun = parse_config(["--preset", "speedrun"])  # record #26
    assert (speedrun.steps, 8 * speedrun.microbatch_tokens) == (1750, 393_216)
    assert (speedrun.layers, speedrun.dim, speedrun.heads) == (12, 768, 6)
    assert speedrun.window_end == 1792


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--layers 2", "--layers: expected an even number from 4 on, received 2"),
        ("--layers 5", "--layers: expected an even number from 4 on, received 5"),
        ("--heads 0", "--heads: expected 1 or more, received 0"),
        ("--heads 3 --dim 128", "--dim: expected a multiple of 4 x --heads (12), received 128"),
        ("--dim 0", "--dim: expected a multiple of 4 x --heads"),
        ("--dim -8 --heads 2", "--dim: expected a multiple of 4 x --heads (8), received -8"),
        ("--microbatch-tokens 64", "--microbatch-tokens: expected a multiple of 128, received 64"),
        ("--microbatch-tokens 0", "--microbatch-tokens: expected a multiple of 128, received 0"),
        ("--val-sequence 129", "--val-sequence: expected a multiple of 128, received 129"),
        ("--val-sequence 0", "--val-sequence: expected a multiple of 128, received 0"),
        ("--val-sequence 256 --val-tokens 300",
         "--val-tokens: expected a multiple of --val-sequence (256), received 300"),
        ("--val-tokens 0", "--val-tokens: expected a multiple of --val-sequence"),
        ("--steps 0", "--steps: expected 1 or more, received 0"),
        ("--steps -1", "--steps: expected 1 or more, received -1"),
        ("--epochs 0", "--epochs: expected 1 or more, received 0"),
        ("--val-every -1", "--val-every: expected 0 or more, received -1"),
        ("--buffer-mib -1", "--buffer-mib: expected 0 or more, received -1"),
        ("--cooldown 0", "--cooldown: expected a number above 0, at most 1, received 0.0"),
        ("--cooldown 1.1", "--cooldown: expected a number above 0, at most 1, received 1.1"),
        ("--cooldown nan", "--cooldown: expected a number above 0, at most 1, received nan"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--steps 1.5", "--steps: invalid int value: '1.5'"),
        ("--adam-lr x", "--adam-lr: invalid float value: 'x'"),
        ("--mlp sparse", "--mlp: invalid choice: 'sparse'"),
        ("--preset big", "--preset: invalid choice: 'big'"),
        ("--steps", "--steps: expected one argument"),
        ("--unknown 3", "unrecognized arguments: --unknown 3"),
        ("data/sample", "unrecognized arguments: data/sample"),
        ("--step 3", "unrecognized arguments: --step 3"),  # no abbreviations
        ("--pre tiny", "unrecognized arguments: --pre tiny"),
        ("--muon_lr 1", "unrecognized arguments: --muon_lr 1"),
    ],
)
def test_wrong_arguments(capsys, arguments, complaint):
    with pytest.raises(SystemExit) as error:
        parse_config(arguments.split())
    assert error.value.code == 2
    *usage, sentence = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage: ")
    assert ": error: " in sentence
    assert complaint in sentence


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as error:
        parse_config(["--preset", "offline", "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    for f in fields(Config):
        flag = "--" + f.name.replace("_", "-")
        assert re.search(rf"^  {flag}[ ,\n]", text, re.M), flag
        assert " ".join(f.metadata["help"].split()) in said
    assert "(here: 54)" in text  # the preset's steps
    for f in fields(Config):  # so that the flag and its default can be understood
        assert f.metadata["help"]
        assert f.type in (int, float, str, bool)


def test_missing_data_is_one_sentence(tmp_path):
    result = run_script("--data", str(tmp_path / "none"), "--no-wandb", *TINY, home=tmp_path)
    assert result.returncode == 1
    (sentence,) = result.stderr.strip().splitlines()
    assert sentence.startswith("train_gpt.py: no fineweb_train_*.bin in ")
    assert "--data data/sample" in sentence


def test_log_dir_that_cannot_be_written(text, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    log_dir = str(tmp_path / "file" / "logs")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--data", str(text), "--no-wandb",
                                      "--log-dir", log_dir, *TINY])
    with pytest.raises(SystemExit, match=f"^train_gpt.py: --log-dir {log_dir} cannot be written: "):
        train_gpt.main()


def test_wandb_that_is_not_installed(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ImportError
    expected = "^train_gpt.py: wandb is not installed: pip install .* or pass --no-wandb$"
    with pytest.raises(SystemExit, match=expected):
        make_trainer(text, tmp_path, wandb=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seed", str(2**70)], "--seed"),
        (["--buffer-mib", str(10**12)], "--buffer-mib"),  # nearly 2^60 bytes
        (["--data", "{folder}/large"], "fineweb_train_000001.bin"),
        (["--data", "{folder}/directory"], "fineweb_train_000001.bin"),
    ],
    ids=["seed", "buffer", "token beyond the vocabulary", "directory as a shard"],
)
def test_other_things_a_user_can_cause(
        text, tmp_path, small_vocabulary, monkeypatch, capsys, write_shard, arguments, complaint):
    (tmp_path / "large").mkdir()
    for split in ("train", "val"):
        write_shard(tmp_path / "large" / f"fineweb_{split}_000001.bin", [511, 600] * 2000)
    (tmp_path / "directory" / "fineweb_train_000001.bin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--no-wandb", *TINY, "--data", str(text),
                                      *(a.format(folder=tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as error:
        train_gpt.main()
    assert complaint in f"{error.value.code} {capsys.readouterr().err}"


@pytest.mark.parametrize(("number", "void"), [(0, [0, 1]), (4, [4, 5]), (7, [7])])
def test_inexact_activations_change_nothing(
        text, tmp_path, small_vocabulary, plain_run, number, void):
    trainer = train(text, tmp_path, {number: find_inexact}, steps=8, val_every=3)
    assert (trainer.void, trainer.overflows) == (void, 1)
    assert not trainer.buffer.fuses
    assert f"step {number + 1} had activations whose squares" in trainer.log.path.read_text()
    assert_same_run(trainer, plain_run)


# -----------------------------------------------------------------------------
# GPU

GPU_SIZE = {"dim": 256, "microbatch_tokens": 512, "steps": 5, "epochs": 10, "val_sequence": 1024}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "options",
    [{"mlp": "dense"}, {"mlp": "checkpoint"}, {"mlp": "eager"}, {"mlp": "dense", "head": "fp8"},
     *({"mlp": "bitsparse", "codec": codec, "storage": storage}
       for codec in ("raw", "sign", "exponent")
       for storage in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))])
def test_steps_do_not_wait_for_the_device(text, tmp_path, small_vocabulary, options):
    trainer = make_trainer(text, tmp_path, **options, **GPU_SIZE)
    trainer.warm_up()
    steps = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):  # Trainer's own: WatchedTrainer looks at the results
            steps.append(Trainer.step(trainer, number))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.start_clock()
    for step in steps:
        assert trainer.settle(step)
    assert len(trainer.done) == 3


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_ways_of_saving_give_the_same_bits_on_a_gpu(text, tmp_path, small_vocabulary, head):
    dense = train(text, tmp_path, mlp="dense", head=head, **GPU_SIZE)
    assert losses(dense)[-1] < losses(dense)[0] - 1
    for mlp in ("bitsparse", "checkpoint"):
        torch.compiler.reset()
        assert_same_run(train(text, tmp_path, mlp=mlp, head=head, **GPU_SIZE), dense)


@pytest.mark.gpu
@on_gpu
def test_inexact_activations_on_a_gpu(tmp_path, small_vocabulary, monkeypatch, write_shard):
    """Activations below 2^-63 in a run whose GEMMs are fused, and in one of separate kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    text = tmp_path / "text"
    text.mkdir()
    tokens = np.random.default_rng(0).zipf(1.5, 500_000).clip(1, 100)
    tokens[::300] = 511
    for name in ("train_000001", "val_000000"):
        write_shard(text / f"fineweb_{name}.bin", tokens)
    fused, may_fuse = [], bitsparse_kernels._may_fuse

    def may_fuse_all_the_same(*arguments):
        torch.use_deterministic_algorithms(False)
        fused.append(may_fuse(*arguments))
        torch.use_deterministic_algorithms(True, warn_only=True)
        return fused[-1]

    def shrink(trainer):
        with torch.no_grad():
            trainer.model.blocks[1].mlp.w1 *= 2.0**-75

    monkeypatch.setattr(bitsparse_kernels, "_may_fuse", may_fuse_all_the_same)
    size = {"dim": 768, "heads": 6, "microbatch_tokens": 8192}  # where GEMMs add up as cuBLAS
    runs = []
    for fuses in (True, False):
        torch.compiler.reset()
        trainer = make_trainer(text, tmp_path, {2: shrink}, **GPU_SIZE | size)
        trainer.buffer.fuses = fuses
        trainer.result = trainer.run()
        runs.append(trainer)
        assert all(fused)
        assert bool(fused) == fuses
        fused.clear()
    assert [trainer.void for trainer in runs] == [[2, 3], []]
    assert_same_run(*runs)
