"""scripts/run.sh and scripts/venv.sh: what they install, prepare, add and hand to train_gpt.py;
scripts/measure.sh: what it runs.

A stand-in for the venv's Python writes down every call and answers the question for the number
of GPUs, so that machines with 0 to 9 GPUs are tried here without training anything.

Needs: bash. No GPU, no network.
Run:   bash scripts/test.sh tests/test_scripts.py
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/bash
case $* in
    *device_count*) echo "$GPUS" ;;
    *platform.python_version*) echo "$VERSION" ;;
    *version_info*) [[ $VERSION != 3.9.* ]] ;;
    *)
        call=$(ls "$CALLS" | wc -l)
        printf '%s\\n' "threads=$OMP_NUM_THREADS" "$@" > "$CALLS/$call"
        ;;
esac
"""


class Project:
    """A copy of the scripts beside an empty data folder, with a stand-in venv."""

    def __init__(self, path):
        self.path = path
        self.venv = path / "venv"
        self.calls_dir = path / "calls"
        for directory in (self.venv / "bin", self.calls_dir, path / "data" / "fineweb10B"):
            directory.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", path / "scripts")
        shutil.copy(ROOT / "requirements.txt", path)
        (self.venv / "bin" / "python").write_text(PYTHON)
        (self.venv / "bin" / "python").chmod(0o755)

    def run(self, *arguments, gpus=0, version="3.11.7", cwd=None):
        environment = {
            "VIRTUAL_ENV": str(self.venv),
            "CALLS": str(self.calls_dir),
            "GPUS": str(gpus),
            "VERSION": version,
        }
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | environment
        return subprocess.run(
            ["bash", str(self.path / "scripts" / "run.sh"), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=cwd or self.path,
        )

    def calls(self):
        """What the stand-in was asked, in order: one list of arguments a call."""
        paths = sorted(self.calls_dir.iterdir(), key=lambda path: int(path.name))
        return [path.read_text().splitlines() for path in paths]

    def trained(self):
        """The launcher's process count and the arguments that train_gpt.py was given."""
        call = self.calls()[-1]
        (launch,) = (a for a in call if a.startswith("--nproc_per_node="))
        (script,) = (i for i, a in enumerate(call) if a.endswith("train_gpt.py"))
        return int(launch.split("=")[1]), call[script + 1 :]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def add_fineweb(project, *names):
    for name in names or ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        (project.path / "data" / "fineweb10B" / name).touch()


SAMPLE, FINEWEB = "./data/sample", "./data/fineweb10B"


@pytest.mark.parametrize(
    ("gpus", "fineweb", "given", "expected"),
    [
        (0, False, [], ["--data", SAMPLE, "--preset", "tiny"]),
        (0, True, [], ["--data", FINEWEB, "--preset", "tiny"]),
        (1, False, [], ["--data", SAMPLE, "--preset", "offline", "--epochs", "10"]),
        (1, True, [], ["--data", FINEWEB, "--preset", "speedrun"]),
        # What the user passes is not added again, in either spelling.
        (1, True, ["--preset", "tiny"], ["--data", FINEWEB, "--preset", "tiny"]),
        (1, False, ["--preset=tiny"], ["--data", SAMPLE, "--preset=tiny"]),
        (
            1,
            False,
            ["--epochs=3", "--mlp", "dense"],
            ["--data", SAMPLE, "--preset", "offline", "--epochs=3", "--mlp", "dense"],
        ),
        (0, True, ["--data", "a b"], ["--preset", "tiny", "--data", "a b"]),
        (1, True, ["--data=mine"], ["--preset", "offline", "--data=mine"]),
        (1, True, ["--data=d", "--preset=tiny"], ["--data=d", "--preset=tiny"]),
    ],
)
def test_arguments(project, gpus, fineweb, given, expected):
    if fineweb:
        add_fineweb(project)
    result = project.run(*given, gpus=gpus)
    assert result.returncode == 0, result.stderr
    assert project.trained() == (1, expected)


@pytest.mark.parametrize(
    ("gpus", "processes"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (6, 4), (7, 4), (8, 8), (9, 8)]
)
def test_processes(project, gpus, processes):
    result = project.run(gpus=gpus)
    assert project.trained()[0] == processes
    idle = f"{processes} of {gpus}"
    assert (idle in result.stdout) == (gpus > processes)


def test_threads_share_the_cores(project):
    project.run(gpus=0)
    cores = len(os.sched_getaffinity(0))
    assert project.calls()[-1][0] == f"threads={cores}"


def test_sample_is_built_only_when_needed(project):
    def built():
        return any(argument.endswith("sample.py") for call in project.calls() for argument in call)

    project.run("--data", "mine")
    project.run("--help")
    assert not built()
    add_fineweb(project)
    assert "FineWeb shards" in project.run().stdout
    assert not built()
    # Train shards without val are not enough.
    (project.path / "data" / "fineweb10B" / "fineweb_val_000000.bin").unlink()
    assert "offline sample" in project.run().stdout
    assert built()


def test_help_is_the_trainers_own(project):
    assert project.run("--mlp", "dense", "--help").returncode == 0
    assert project.calls()[-1][1:] == ["./train_gpt.py", "--help"]


def test_requirements_are_installed_once_for_each_version(project):
    def installs():
        return sum("install" in call for call in project.calls())

    project.run("--help")
    assert installs() == 1
    project.run("--help")
    assert installs() == 1
    with open(project.path / "requirements.txt", "a") as file:
        file.write("# changed\n")
    project.run("--help")
    assert installs() == 2


def test_runs_from_any_folder(project, tmp_path):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    result = project.run("--log-dir", "mine", cwd=elsewhere)
    assert result.returncode == 0, result.stderr
    assert project.trained()[1][:2] == ["--data", "../data/sample"]


def test_old_python_is_one_sentence(project):
    result = project.run(version="3.9.2")
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert "Python 3.11 or newer is needed" in sentence
    assert "3.9.2" in sentence


def test_a_failed_trainer_is_its_own_sentence_and_status(project):
    # The real launcher, with a trainer that refuses: torchrun alone would add a traceback.
    (project.venv / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    requirements = hashlib.sha256((project.path / "requirements.txt").read_bytes()).hexdigest()
    (project.venv / "requirements.sha256").write_text(f"{requirements}  -\n")
    (project.path / "train_gpt.py").write_text(
        "import sys\nprint('steps must be positive', file=sys.stderr)\nsys.exit(3)\n"
    )
    result = project.run("--data", "mine")
    assert result.returncode == 3
    assert "steps must be positive" in result.stderr
    assert "Traceback" not in result.stderr


# -----------------------------------------------------------------------------
# measure.sh

MEASURED = """#!/bin/bash
printf '%s\\n' "$*" >> calls
for word; do [[ $word == "$FAILS" ]] && exit 3; done
[[ $* == *"--log-dir out/logs/proof-"* ]] || exit 0
folder=$(sed 's/.*--log-dir \\([^ ]*\\).*/\\1/' <<< "$*")/run
mkdir -p "$folder"
touch "$folder.txt" "$folder/step-00000300.pt"
"""


def measure(folder, *arguments, fails="nothing"):
    python = folder / "python"
    python.write_text(MEASURED)
    python.chmod(0o755)
    shutil.copytree(ROOT / "scripts", folder / "scripts", dirs_exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    result = subprocess.run(
        ["bash", "scripts/measure.sh", *arguments], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHON": "./python", "FAILS": fails})
    calls = folder / "calls"
    return result, calls.read_text().splitlines() if calls.exists() else []


def test_measure_runs_all_parts(tmp_path):
    result, calls = measure(tmp_path, "data", "out")
    assert result.returncode == 0, result.stderr
    trained = [c for c in calls if c.startswith("train_gpt.py --preset offline --data data")]
    benches = [call for call in calls if call not in trained]
    assert [sum(f"--log-dir out/logs/{part}-" in call for call in trained)
            for part in ("compile", "proof", "buffer", "speed")] == [5, 5, 2, 5]
    assert [call.split()[0] for call in benches] == [
        f"scripts/{name}.py" for name in ("bench_kernels", "bench_vram", "analyze_compression",
                                          "bench_nemotron_h", "bench_ranks")]
    (checkpoint,) = tmp_path.glob("out/logs/proof-exponent/*/step-00000300.pt")
    for call in benches[:3]:
        assert f"--checkpoint {checkpoint.relative_to(tmp_path)} --data data" in call
    assert "e5m2=out/logs/proof-float8_e5m2/run.txt" in benches[2]
    assert all(call.endswith(".json") for call in benches)


def test_measure_runs_what_is_asked(tmp_path):
    result, calls = measure(tmp_path, "data", "out", "speed")
    assert result.returncode == 0, result.stderr
    assert [call.split("--log-dir out/logs/")[1].split()[0] for call in calls] == [
        f"speed-{name}" for name in ("eager", "dense", "raw", "sign", "exponent")]


@pytest.mark.parametrize(("arguments", "fails", "status", "sentence"), [
    (["nowhere", "out"], "", 2, "expected a folder of shards"),
    (["data", "out", "sped"], "", 2, "expected parts of compile proofs"),
    (["data", "out", "vram"], "", 1, "vram needs what the part proofs trains"),
    (["data", "out", "speed"], "dense", 1, "speed-dense failed: out/speed-dense.txt"),
    (["data", "out", "compile"], "dense", 1, "compile-dense failed: out/compile-dense.txt"),
])
def test_measure_stops_in_one_sentence(tmp_path, arguments, fails, status, sentence):
    result, calls = measure(tmp_path, *arguments, fails=fails)
    assert result.returncode == status
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert not any("speed-raw" in call for call in calls)
