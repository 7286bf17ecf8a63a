"""A disk that is full, losses that are not finite, wandb that does not answer: what is then kept.

What:  checkpoints and the log on a really full file system; a loss and weights that are not finite,
       on one rank of two; wandb unreachable, and a resumed run's; the launcher of scripts/run.sh on
       signals and dead ranks; scripts/bench_vram.py's table.
Needs: a CPU. The full file system is a tmpfs that root mounts; else a limit on the file size.
Run:   python -m pytest tests/test_robust.py
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--microbatch-tokens", "128", "--val-tokens", "1024", "--val-sequence", "512",
         "--val-every", "0", "--layers", "4", "--dim", "32", "--heads", "2", "--window-end", "256",
         "--epochs", "4"]
DRIVER = """
import sys
sys.path.insert(0, {root!r})
import train_gpt
train_gpt.VOCAB, train_gpt.BOS = 512, 511
{patch}
train_gpt.main()
"""
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


@pytest.fixture(scope="module")
def text(make_text_folder):
    return make_text_folder(bos=511)


def run(home, *arguments, patch="", ranks=1, limit=None, **environment):
    """A run in the folder home, of SMALL's model. limit: bytes of a file."""
    driver = home / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT), patch=patch))
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone",
                                    f"--nproc_per_node={ranks}"]
    kept = {k: v for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not k.startswith("WANDB")}

    def prepare():
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() then answers EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, *launch, str(driver), *map(str, arguments)], cwd=home, text=True,
        capture_output=True, timeout=300, stdin=subprocess.DEVNULL, preexec_fn=prepare,
        env=kept | {"OMP_NUM_THREADS": "1", "HOME": str(home), "NETRC": str(home / "netrc"),
                    "XDG_CONFIG_HOME": str(home)} | environment)


def log_of(folder):
    (path,) = folder.glob("*.txt")
    return path.read_text()


def steps(folder):
    return [int(n) for n in re.findall(r"^step:(\d+)/\d+ train_loss", log_of(folder), re.M)]


# -----------------------------------------------------------------------------
# A full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system for one checkpoint of SMALL's model, 0.9 MB, and the log with its sources."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = 950_000 + sum((ROOT / name).stat().st_size
                         for name in ("train_gpt.py", "bitsparse_kernels.py"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
                             capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a tmpfs, and not in every container")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder, left):
    """All of it but so many bytes, in whole pages."""
    stat = os.statvfs(folder)
    (folder / "filling").write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - left))


def test_no_room_for_checkpoints(text, tmp_path, small_disk):
    """Training goes on; the checkpoint that was there stays, and is good; the status tells."""
    result = run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 6, "--save-every", 2,
                 "--log-dir", small_disk)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert steps(small_disk) == [1, 2, 3, 4, 5, 6]
    (kept,) = small_disk.glob("*/*")  # nothing unfinished
    assert kept.name == "step-00000002.pt"
    failures = re.findall(r"^(\S+) was not written: No space left on device; the last checkpoint "
                          r"is (\S+)$", result.stdout, re.M)
    assert [(Path(a).name, b) for a, b in failures] == [("step-00000004.pt", str(kept)),
                                                        ("step-00000006.pt", str(kept))]
    assert "summary: {" in log_of(small_disk)
    assert result.stderr.splitlines() == [
        "train_gpt.py: the run is over and in its log, but its last weights are not saved"]
    again = run(tmp_path, "--resume", "latest", "--log-dir", small_disk, "--save-every", 0,
                "--keep", 0)
    assert again.returncode == 0
    assert re.findall("weights sha256: .*", again.stdout) == \
        re.findall("weights sha256: .*", result.stdout)


def test_no_room_for_the_log(text, tmp_path, small_disk):
    """Its lines wait in memory, and are written when there is room again."""
    patch = """
import pathlib
step = train_gpt.Trainer.step
def watched(self, number):
    filling = pathlib.Path(self.config.log_dir) / "filling"
    if number == 3:
        free = __import__("os").statvfs(filling.parent)
        filling.write_bytes(b"x" * (free.f_bavail * free.f_frsize))
    if number == {again}:
        filling.unlink()
    return step(self, number)
train_gpt.Trainer.step = watched
"""
    arguments = ["--data", text, *SMALL, "--no-wandb", "--keep", 0, "--log-dir", small_disk,
                 "--epochs", 30]
    lines = "its lines wait in memory"
    # one page of the log's file is there already: enough steps to need another
    result = run(tmp_path, *arguments, "--steps", 60, patch=patch.format(again=58))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count(f"takes no more: No space left on device; {lines}") == 1
    assert steps(small_disk) == list(range(1, 61))
    next(small_disk.glob("*.txt")).unlink()

    result = run(tmp_path, *arguments, "--steps", 60, patch=patch.format(again=-1))
    assert result.returncode == 1
    assert result.stdout.count(lines) == 1
    assert re.fullmatch(r"train_gpt\.py: \S+ lacks its last \d+ bytes, which the disk did not "
                        r"take\n", result.stderr)
    assert "step:60/60 val_loss" in result.stdout


def test_file_size_limit(text, tmp_path):
    """As on a full disk, without being root: a quota, say."""
    result = run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 3, limit=400_000)
    assert result.returncode == 1
    assert "step-00000003.pt was not written: File too large; the last checkpoint is none" \
        in result.stdout
    assert steps(tmp_path / "logs") == [1, 2, 3]
    assert list(tmp_path.glob("logs/*/*")) == []


# -----------------------------------------------------------------------------
# Not finite

POISON = """
step = train_gpt.Trainer.step
def poisoned(self, number):
    if number == 5 and self.ranks.rank == {rank}:
        {how}
    return step(self, number)
train_gpt.Trainer.step = poisoned
"""
LOSS = "self.model.embed.data[:] = float('nan')"


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), pytest.param(2, 1, marks=on_cpu)])
def test_loss_that_is_not_finite(text, tmp_path, ranks, rank):
    result = run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 9, "--save-every", 2,
                 ranks=ranks, patch=POISON.format(rank=rank, how=LOSS))
    assert result.returncode == 1  # torchrun's own is 1 too
    (last,) = tmp_path.glob("logs/*/step-00000004.pt")
    sentence = (f"the loss of step 6 is not finite on rank {rank}; lower --muon-lr and --adam-lr; "
                f"resume from {last.relative_to(tmp_path)}")
    assert f"train_gpt.py: {sentence}" in result.stderr
    assert result.stderr.count("not finite") == 1
    assert sentence in log_of(tmp_path / "logs")
    assert steps(tmp_path / "logs") == [1, 2, 3, 4, 5]
    assert run(tmp_path, "--resume", last, ranks=ranks).returncode == 0  # it is good


def test_weights_that_are_not_finite_are_not_saved(text, tmp_path):
    """A moment of a row that no later batch uses would not show in any loss."""
    patch = POISON.format(rank=0, how="self.adam.state[0][300] = float('inf')")
    result = run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 9, "--save-every", 3,
                 patch=patch)
    assert result.returncode == 1
    (last,) = tmp_path.glob("logs/*/*")
    assert last.name == "step-00000003.pt"
    assert ("train_gpt.py: the weights or moments after step 6 are not finite; lower --muon-lr and "
            f"--adam-lr; resume from {last.relative_to(tmp_path)}") in result.stderr


def test_rates_far_too_high(text, tmp_path):
    result = run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 9, "--muon-lr", 1e38,
                 "--adam-lr", 1e38)
    assert result.returncode == 1
    assert re.search(r"^train_gpt\.py: the loss of step \d is not finite on rank 0; lower "
                     r"--muon-lr and --adam-lr; there is no checkpoint$", result.stderr, re.M)


# -----------------------------------------------------------------------------
# wandb


def test_wandb_that_does_not_answer(text, tmp_path):
    """The run goes on with its offline mode, which `wandb sync` sends later."""
    result = run(tmp_path, "--data", text, *SMALL, "--steps", 2, WANDB_API_KEY="a" * 40,
                 WANDB_BASE_URL="http://127.0.0.1:9", WANDB_INIT_TIMEOUT="2")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    assert lines[1].startswith("wandb does not answer: ")
    assert lines[2] == "wandb: offline"
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_wandb_whose_service_dies(text, tmp_path):
    patch = """
import os, pathlib
step = train_gpt.Trainer.step
def watched(self, number):
    if number == 3:
        for child in pathlib.Path("/proc/self/task").glob("*/children"):
            for pid in child.read_text().split():
                if b"wandb-core" in pathlib.Path("/proc", pid, "cmdline").read_bytes():
                    os.kill(int(pid), 9)
    return step(self, number)
train_gpt.Trainer.step = watched
"""
    result = run(tmp_path, "--data", text, *SMALL, "--steps", 30, patch=patch)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^wandb ended \(.*\): the run goes on, with its log alone$",
                          result.stdout, re.M)) == 1
    assert steps(tmp_path / "logs") == list(range(1, 31))


def test_wandb_goes_on_in_its_run(text, tmp_path):
    run(tmp_path, "--data", text, *SMALL, "--steps", 2)
    run(tmp_path, "--resume", "latest")
    (log,) = tmp_path.glob("logs/*.txt")
    folders = list(tmp_path.glob("wandb/offline-run-*"))
    assert {re.sub(r".*run-\d+_\d+-", "", folder.name) for folder in folders} == {log.stem}


# -----------------------------------------------------------------------------
# scripts/run.sh and scripts/bench_vram.py


def launcher():
    """The Python in scripts/run.sh that starts torchrun."""
    return re.search(r"^launcher='\n(.*?)^'$", (ROOT / "scripts" / "run.sh").read_text(),
                     re.M | re.S)[1]


@pytest.mark.parametrize(
    ("script", "status", "sentence"),
    [
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137,
         "run.sh: rank 0 was killed by signal 9\n"),
        ("", 0, ""),
    ],
)
def test_launcher(tmp_path, script, status, sentence):
    (tmp_path / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "-c", launcher(), "", "--standalone", "--nproc_per_node=1",
         str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120)
    assert result.returncode == status
    said = [line for line in result.stderr.splitlines(True) if not re.match(r"[WEI]\d{4} ", line)]
    assert "".join(said) == sentence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launcher_passes_signals_on(tmp_path, number):
    (tmp_path / "script.py").write_text(f"""
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path({str(tmp_path / "told")!r}).write_text(str(number))
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
pathlib.Path({str(tmp_path / "ready")!r}).touch()
time.sleep(60)
""")
    process = subprocess.Popen(
        [sys.executable, "-c", launcher(), "", "--standalone", "--nproc_per_node=1",
         str(tmp_path / "script.py")], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert (tmp_path / "told").read_text() == str(int(number))
    assert "Traceback" not in err


def test_bench_vram(text, tmp_path):
    """On a CPU, from a checkpoint and at initialization; bitsparse holds less than dense."""
    run(tmp_path, "--data", text, *SMALL, "--no-wandb", "--steps", 3)
    bench = "import runpy, sys; sys.argv[0] = 'bench_vram.py'; " \
            f"sys.path.insert(0, {str(ROOT / 'scripts')!r}); " \
            f"runpy.run_path({str(ROOT / 'scripts' / 'bench_vram.py')!r}, run_name='__main__')"
    for arguments, place in ((["--checkpoint", "latest"], "from logs/"),
                             (["--data", text, *SMALL, "--steps", 3, "--keep", 0,
                               "--checkpoint", "latest"], "at initialization")):
        result = run(tmp_path, *arguments,
                     patch=f"{bench}\ntrain_gpt.main = lambda: None", CUDA_VISIBLE_DEVICES="")
        assert (result.returncode, result.stderr) == (0, "")
        lines = result.stdout.splitlines()
        assert place in lines[0]
        held = dict(re.match(r"  ([\w-]+) +(\d+) bytes/token, +\d+ of them", line).groups()
                    for line in lines[1:])
        assert list(held) == ["eager", "dense", "checkpoint", "bitsparse-raw", "bitsparse-sign",
                              "bitsparse-exponent"]
        ours = [int(n) for mode, n in held.items() if mode.startswith("bitsparse")]
        assert int(held["checkpoint"]) < ours[2] < ours[1] < ours[0] < int(held["dense"])
        assert int(held["dense"]) - int(held["checkpoint"]) == 2 * 4 * 4 * 32  # h of 4 layers
