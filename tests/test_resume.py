"""Runs that are killed, told to end and resumed: the same bits as one that never was.

What:  SIGKILL at random steps and while a checkpoint is being written; SIGTERM, SIGINT and SIGHUP;
       two ranks, of which one is killed, told to end, or fails; a checkpoint of one number of ranks
       resumed by another; the buffer's size and overflows across a resume; the checkpoints that
       stay.
Needs: a CPU, sockets on the loopback address. Each run is a process of its own, and is really
       killed.
Run:   python -m pytest tests/test_resume.py

The processes' vocabulary is 512, as in test_train.py, so that a step is quick.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
STEPS = 30
SMALL = ["--steps", str(STEPS), "--microbatch-tokens", "128", "--val-tokens", "1024",
         "--val-sequence", "512", "--val-every", "7", "--layers", "4", "--dim", "32", "--heads",
         "2", "--window-end", "256", "--epochs", "4", "--no-wandb"]
DRIVER = """
import sys
sys.path.insert(0, {root!r})
import train_gpt
train_gpt.VOCAB, train_gpt.BOS = 512, 511
{patch}
train_gpt.main()
"""
# The second checkpoint is written by half; then it waits to be killed.
HALF = """
import io, pathlib, time, torch
whole, count = torch.save, 0
def save(value, file):
    global count
    count += 1
    if count < 2:
        return whole(value, file)
    stream = io.BytesIO()
    whole(value, stream)
    file.write(stream.getvalue()[: stream.tell() // 2])
    file.flush()
    pathlib.Path("half").touch()
    time.sleep(600)
torch.save = save
"""
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


@pytest.fixture(scope="module")
def text(make_text_folder):
    return make_text_folder(bos=511)


def start(home, *arguments, ranks=1, patch=""):
    """A run in the folder home, whose output goes to home/out."""
    driver = home / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT), patch=patch))
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone",
                                    f"--nproc_per_node={ranks}"]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with open(home / "out", "ab") as out:
        return subprocess.Popen(
            [sys.executable, *launch, str(driver), *map(str, arguments)], cwd=home, stdout=out,
            stderr=out, stdin=subprocess.DEVNULL, env=kept | {"OMP_NUM_THREADS": "1"})


def wait(process, status=0, home=None):
    assert process.wait(timeout=300) == status, (home / "out").read_text() if home else ""


def run(home, *arguments, status=0, **how):
    home.mkdir(exist_ok=True)
    wait(start(home, *arguments, **how), status, home)
    return home


def log_of(home):
    (path,) = (home / "logs").glob("*.txt")  # one, however often it was resumed
    return path.read_text()


def losses(home):
    return re.findall(r"^step:(\d+)/\d+ (train_loss|val_loss):(\S+)", log_of(home), re.M)


def summary(home):
    return json.loads(re.findall(r"^summary: (.*)$", log_of(home), re.M)[-1])


def checkpoints(home):
    return sorted(path.name for path in home.glob("logs/*/step-*.pt"))


def wait_for_step(home, step, process):
    """Until the log has that step, or a few beyond it."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        for path in (home / "logs").glob("*.txt"):
            if re.search(rf"^step:{step}/\d+ train_loss", path.read_text(), re.M):
                return
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {(home / 'out').read_text()}")


def assert_same(home, expected):
    assert losses(home) == losses(expected)  # each step once, and nothing else
    a, b = summary(home), summary(expected)
    assert a["weights_sha256"] == b["weights_sha256"]
    assert (a["first_val_loss"], a["val_loss"]) == (b["first_val_loss"], b["val_loss"])
    assert a["density"] == b["density"]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing happens to, and that writes no checkpoint."""
    return run(tmp_path_factory.mktemp("whole"), "--data", text, *SMALL, "--keep", 0)


# -----------------------------------------------------------------------------
# Killed


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_steps(text, tmp_path, whole, seed):
    generator, arguments, reached = random.Random(seed), ["--data", text, *SMALL], 0
    while True:
        reached += generator.randint(4, 12)
        process = start(tmp_path, *arguments, "--save-every", 2)
        if reached > STEPS:
            wait(process, 0, tmp_path)
            break
        wait_for_step(tmp_path, reached, process)
        time.sleep(generator.random() * 0.2)  # in the middle of what follows
        process.kill()
        process.wait()
        arguments = ["--resume", "latest"]
    assert arguments == ["--resume", "latest"]
    assert_same(tmp_path, whole)


def test_killed_while_a_checkpoint_is_written(text, tmp_path, whole):
    process = start(tmp_path, "--data", text, *SMALL, "--save-every", 5, patch=HALF)
    while not (tmp_path / "half").exists():
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.01)
    process.kill()
    process.wait()
    (unfinished,) = tmp_path.glob("logs/*/unfinished")
    assert unfinished.stat().st_size > 0
    assert checkpoints(tmp_path) == ["step-00000005.pt"]
    run(tmp_path, "--resume", "latest")
    assert_same(tmp_path, whole)
    assert not unfinished.exists()


def test_the_newest_checkpoints_stay(text, tmp_path, whole):
    run(tmp_path, "--data", text, *SMALL, "--save-every", 4, "--keep", 3)
    assert checkpoints(tmp_path) == ["step-00000024.pt", "step-00000028.pt", "step-00000030.pt"]
    assert_same(tmp_path, whole)
    # From an older one: what it writes is the newest, whatever its step. A later log is not lost.
    (older,) = tmp_path.glob("logs/*/step-00000024.pt")
    run(tmp_path, "--resume", older, "--save-every", 2, "--keep", 2)
    assert checkpoints(tmp_path) == ["step-00000028.pt", "step-00000030.pt"]
    assert_same(tmp_path, whole)
    run(tmp_path, "--resume", "latest")  # a finished run ends again, and is the same
    assert_same(tmp_path, whole)


def test_no_checkpoints_are_written_unless_wanted(whole):
    assert sorted(path.name for path in whole.iterdir()) == ["driver.py", "logs", "out"]
    assert len(list((whole / "logs").iterdir())) == 1


# -----------------------------------------------------------------------------
# Told to end


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130),
                                                (signal.SIGHUP, 129)])
def test_told_to_end(text, tmp_path, whole, number, status):
    process = start(tmp_path, "--data", text, *SMALL)
    wait_for_step(tmp_path, 8, process)
    process.send_signal(number)
    wait(process, status, tmp_path)
    (checkpoint,) = tmp_path.glob("logs/*/step-*.pt")
    out = (tmp_path / "out").read_text()
    assert "Traceback" not in out
    step = int(checkpoint.stem.split("-")[1])
    sentence = f"told to end, after step {step} of {STEPS}; resume from logs/"
    assert f"train_gpt.py: {sentence}" in out
    assert sentence in log_of(tmp_path)
    assert losses(tmp_path)[-1][0] == str(step)  # it is logged
    assert "\nlog: logs/" in out
    run(tmp_path, "--resume", "latest")
    assert_same(tmp_path, whole)


def test_second_signal_ends_at_once(text, tmp_path):
    process = start(tmp_path, "--data", text, *SMALL,
                    patch="import time; train_gpt.Trainer.save = lambda self: time.sleep(600)")
    wait_for_step(tmp_path, 2, process)
    process.terminate()
    time.sleep(2)
    assert process.poll() is None
    process.terminate()
    wait(process, -signal.SIGTERM)


# -----------------------------------------------------------------------------
# Ranks


@pytest.fixture(scope="module")
def whole_by_two(text, tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), "--data", text, *SMALL, "--keep", 0, ranks=2)


def rank_pids(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children")
            .read_text().split()]


@on_cpu
def test_two_ranks_of_which_one_is_killed(text, tmp_path, whole_by_two):
    process = start(tmp_path, "--data", text, *SMALL, "--save-every", 4, ranks=2)
    wait_for_step(tmp_path, 11, process)
    os.kill(rank_pids(process)[1], signal.SIGKILL)
    wait(process, 1, tmp_path)  # of torchrun; scripts/run.sh's is 137
    assert "train_gpt.py: ended, since another rank did" in (tmp_path / "out").read_text()
    run(tmp_path, "--resume", "latest", ranks=2)
    assert_same(tmp_path, whole_by_two)


@on_cpu
def test_two_ranks_of_which_one_is_told_to_end(text, tmp_path, whole_by_two):
    process = start(tmp_path, "--data", text, *SMALL, ranks=2)
    wait_for_step(tmp_path, 5, process)
    os.kill(rank_pids(process)[1], signal.SIGTERM)
    wait(process, 1, tmp_path)
    out = (tmp_path / "out").read_text()
    assert "told to end, after step " in out
    # Both end by themselves, once everything is put away; yet torchrun may see the first one gone
    # and end the other before that has come to its own end.
    assert re.search(r"exitcode +: 143", out)
    run(tmp_path, "--resume", "latest", ranks=2)
    assert_same(tmp_path, whole_by_two)


@on_cpu
def test_reason_of_a_failed_rank_is_seen(text, tmp_path):
    patch = """
grow = train_gpt.Trainer.step
def step(self, number):
    if (self.ranks.rank, number) == (1, 3):
        train_gpt.stop("its disk is gone")
    return grow(self, number)
train_gpt.Trainer.step = step
"""
    run(tmp_path, "--data", text, *SMALL, ranks=2, patch=patch, status=1)
    out = (tmp_path / "out").read_text()
    assert "train_gpt.py: rank 1: its disk is gone" in out
    ours = out[: out.index("ChildFailedError")]  # torchrun's own follows
    assert "Traceback" not in re.sub(r"Traceback.*\Z", "", ours, flags=re.S)
    assert len(re.sub(r"^step.*\n|^\[?[WE].*\n", "", ours, flags=re.M).splitlines()) < 60


@on_cpu
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_another_number_of_ranks(text, tmp_path, whole, before, after):
    """Sums over the ranks are in another order, and bf16 matrices in Muon make that visible."""
    process = start(tmp_path, "--data", text, *SMALL, "--save-every", 10, ranks=before)
    wait_for_step(tmp_path, 12, process)
    process.terminate()
    process.wait(timeout=120)
    run(tmp_path, "--resume", "latest", ranks=after)
    assert [row[:2] for row in losses(tmp_path)] == [row[:2] for row in losses(whole)]
    for (*_, a), (*_, b) in zip(losses(tmp_path), losses(whole), strict=True):
        assert float(a) == pytest.approx(float(b), abs=0.05)


# -----------------------------------------------------------------------------
# The buffer


def test_buffer_across_a_resume(text, tmp_path, whole):
    """Its size is saved; an overflow on either side of the checkpoint changes nothing."""
    small = """
init = train_gpt.Trainer.__init__
def starved(self, *arguments):
    init(self, *arguments)
    print("buffer of", self.buffer.capacity_bytes)
    self.buffer.resize(1000)
train_gpt.Trainer.__init__ = starved
"""
    process = start(tmp_path, "--data", text, *SMALL, "--save-every", 1, patch=small)
    wait_for_step(tmp_path, 6, process)
    process.kill()
    process.wait()
    run(tmp_path, "--resume", "latest", patch=small)
    assert summary(tmp_path)["overflows"] == 2
    assert_same(tmp_path, whole)
    sizes = re.findall(r"^buffer of (\d+)$", (tmp_path / "out").read_text(), re.M)
    assert sizes == [str(2 * 2**20)] * 2
