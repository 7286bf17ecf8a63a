"""scripts/run.sh and scripts/venv.sh: what they install, prepare, add and hand to train_gpt.py.

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
