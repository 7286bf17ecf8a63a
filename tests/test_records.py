"""scripts/: logs of every era read, compared, made into records, drawn; tables kept current.

The logs here are written by hand in the shape of their era, and the expected values are typed in.
A training log holds this repository's own sources, whose text about steps must not become data.

Needs: git and bash. No GPU, no network.
Run:   bash scripts/test.sh tests/test_records.py
"""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import new_record  # noqa: E402
import update_tables  # noqa: E402
from compare_records import LogReader, load, p_below, p_differs  # noqa: E402

SEPARATOR = "=" * 100
SOURCES = [(ROOT / name).read_text() for name in new_record.SOURCES]


def write(path, *lines, end="\n"):
    path.write_text("\n".join(lines) + end, newline="")
    return path


def command(*arguments, cwd=None, **environment):
    return subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, cwd=cwd or ROOT,
        env=os.environ | environment)


def script(name, *arguments, **options):
    return command(sys.executable, ROOT / "scripts" / name, *arguments, **options)


# -----------------------------------------------------------------------------
# Reading: one log an era

# A source with lines that are steps to the letter, as a docstring or a comment may quote them.
SOURCE = ['"""Logs lines such as', "step:1750/1750 val_loss:1.0000 train_time:1ms step_avg:1.00ms",
          '"""', "import os", "s:9 tel:1.0",
          'print(f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{t:.0f}ms")', "'''",
          "step:1/2 train_loss:1.0 train_time:1ms step_avg:1.00ms", "'''"]
YEAR_2024 = [
    *SOURCE, SEPARATOR, "Running pytorch 2.4.1+cu121 compiled for CUDA 12.1", "nvidia-smi:",
    "Wed Oct 16 13:25:45 2024       ",
    "|   0  NVIDIA H100 80GB HBM3          Off |   00000000:18:00.0 Off |                    0 |",
    SEPARATOR,
    "step:0/20 val_loss:16.0098 train_time:286ms step_avg:nanms",
    "step:10/20 train_loss:7.0940 train_time:61759ms step_avg:nanms",
    "step:11/20 train_loss:6.9980 train_time:90ms step_avg:nanms",  # the clock began again
    "step:13/20 train_loss:6.7010 train_time:395ms step_avg:131.59ms",
    "step:20/20 train_loss:6.4305 train_time:1469ms step_avg:146.92ms",
    "step:20/20 val_loss:6.4112 train_time:1470ms step_avg:147.00ms",
    "peak memory consumption: 29980 MiB"]
YEAR_2025 = [
    *SOURCE, SEPARATOR, "Running Python 3.10.12 (main, May 27 2025, 17:12:29) [GCC 11.4.0]",
    "Sun Jul 13 01:33:51 2025       ",
    "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |",
    SEPARATOR, "blocks.0.attn.qkv_w: torch.Size([3, 768, 768]) torch.float32 1.0 1.0", "",
    "step:0/1750 val_loss:10.8258 train_time:0ms step_avg:0.02ms",
    "step:1500/1750 val_loss:3.3010 train_time:147000ms step_avg:98.00ms",
    "step:1501/1750 train_time:147099ms step_avg:98.00ms",
    "step:1750/1750 val_loss:3.2790 train_time:171675ms step_avg:98.10ms",
    "peak memory allocated: 31626 MiB reserved: 31892 MiB"]
TRACK_3 = [
    *SOURCE, SEPARATOR,
    "Running PyTorch 2.11.0+cu128 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with "
    "world_size 8",
    SEPARATOR,
    "step:0/3250 val_loss:10.82584 train_time:0.000s step_avg:nanms",
    "step:250/3250 val_loss:3.91234 train_time:61.234s step_avg:244.90ms",
    "step:3250/3250 val_loss:3.27854 train_time:483.312s step_avg:147.10ms",
    # the next run of the same file, without its source
    "step:0/3250 val_loss:10.82584 train_time:0.000s step_avg:nanms",
    "step:3250/3250 val_loss:3.27942 train_time:477.956s step_avg:147.08ms"]
LLMC = ["s:0 tel:11.0123", "s:0 trl:11.0120 lr:0.0000 norm:15.2",
        "s:249 trl:4.61 lr:0.0018 norm:1.2", "s:250 tel:4.5123"]


def read(path):
    reader = LogReader(path)
    return reader.runs, reader.problems


def test_year_2024(tmp_path):
    (run,), problems = read(write(tmp_path / "a.txt", *YEAR_2024))
    assert problems == []
    assert [(v.step, v.loss) for v in run.val] == [(0, 16.0098), (20, 6.4112)]
    assert [t.step for t in run.train] == [10, 11, 13, 20]
    assert (run.final_loss, run.step_average, run.milliseconds) == (6.4112, 147.00, 1470)
    assert (run.device, run.peak_mib) == ("NVIDIA H100 80GB HBM3", 29980)
    assert run.date == ("Oct", "16", "2024")


def test_year_2025(tmp_path):
    (run,), problems = read(write(tmp_path / "a.txt", *YEAR_2025))
    assert problems == []
    assert [v.loss for v in run.val] == [10.8258, 3.3010, 3.2790]
    assert (run.step_average, run.milliseconds, run.peak_mib) == (98.10, 171675, 31626)
    assert run.sources == ["".join(line + "\n" for line in SOURCE)]


def test_track_3_two_runs_in_a_file(tmp_path):
    runs, problems = read(write(tmp_path / "a.txt", *TRACK_3))
    assert problems == []
    assert [run.final_loss for run in runs] == [3.27854, 3.27942]
    assert [run.milliseconds for run in runs] == [483312, 477956]
    # Over the whole run, not since the last validation: 483312 / 3250.
    assert runs[0].step_average == pytest.approx(148.711385, rel=1e-8)
    assert {run.device for run in runs} == {"NVIDIA H100 80GB HBM3"}


def test_llmc(tmp_path):
    (run,), problems = read(write(tmp_path / "main.log", *LLMC))
    assert problems == []
    assert [(v.step, v.loss) for v in run.val] == [(0, 11.0123), (250, 4.5123)]
    assert [t.loss for t in run.train] == [11.0120, 4.61]
    assert (run.total, run.milliseconds, run.step_average, run.tokens) == (None,) * 4


@pytest.mark.parametrize("lines", [YEAR_2024, YEAR_2025, TRACK_3, LLMC])
def test_windows_line_ends_and_byte_order_mark(tmp_path, lines):
    unix = read(write(tmp_path / "a.txt", *lines))
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path) == unix


def test_whole_logs_one_after_another(tmp_path):
    runs, problems = read(write(tmp_path / "a.txt", *YEAR_2025, *YEAR_2024, *YEAR_2025))
    assert problems == []
    assert [run.final_loss for run in runs] == [3.2790, 6.4112, 3.2790]
    assert [run.peak_mib for run in runs] == [31626, 29980, 31626]


def test_cut_off_logs_name_the_line_and_invent_nothing(tmp_path):
    whole = write(tmp_path / "a.txt", *YEAR_2025).read_text()
    path = tmp_path / "cut.txt"
    final = whole.index("step:1750/1750 val_loss:3.2790")
    for end in range(len(whole)):
        path.write_text(whole[:end])
        runs, problems = read(path)
        if runs:  # whole but for what follows the final val loss
            assert end >= final + len(YEAR_2025[-2])
            assert runs[0].final_loss == 3.2790
            assert problems == []
        else:
            assert problems
            assert all(p.startswith(f"{path}:") for p in problems)
    path.write_text(whole[: final + len("step:1750/1750 val_loss:3.27")])
    lines = whole[:final].count("\n")
    assert read(path)[1] == [
        f"{path}:{lines + 1}: cut off: 'step:1750/1750 val_loss:3.27'",
        f"{path}:{lines}: the run stops at step 1501 of 1750 without a final val loss; it is not "
        "counted"]
    path.write_text("\n".join(SOURCE))
    (problem,) = read(path)[1]
    assert "stops within the source" in problem


def test_cut_llmc_digits_are_not_a_loss(tmp_path):
    path = write(tmp_path / "a.txt", *LLMC[:-1], "s:250 tel:4.5", end="")
    runs, problems = read(path)
    assert runs == []
    assert problems[0] == f"{path}:4: cut off: 's:250 tel:4.5'"


def test_unknown_step_lines_are_named(tmp_path):
    path = write(tmp_path / "a.txt", *YEAR_2025, "step:5/1750 val_loss=3.2 train_time:5ms")
    _, problems = read(path)
    assert problems == [f"{path}:{len(YEAR_2025) + 1}: not a step line of any known form: "
                        "'step:5/1750 val_loss=3.2 train_time:5ms'"]


def test_a_run_that_went_back_counts_its_later_lines(tmp_path):
    again = ["step:1500/1750 val_loss:3.4000 train_time:147000ms step_avg:98.00ms",
             "step:1625/1750 val_loss:3.3000 train_time:159250ms step_avg:98.00ms",
             "step:1500/1750 val_loss:3.4100 train_time:147000ms step_avg:98.00ms",
             "step:1750/1750 val_loss:3.2800 train_time:171500ms step_avg:98.00ms"]
    (run,), (problem,) = read(write(tmp_path / "a.txt", *again))
    assert [v.loss for v in run.val] == [3.41, 3.28]
    assert problem.endswith(":3: step 1500 comes after step 1625: the later lines count")


# -----------------------------------------------------------------------------
# Our own logs


def our_log(path, run_id="run-1", mlp="eager", seed=0, val=4.125, step_ms=700.0, vram=250e3,
            device="NVIDIA H200", sources=SOURCES, **config):
    """A log as train_gpt.py writes it, of four steps."""
    config = {"steps": 4, "microbatch_tokens": 1024, "layers": 2, "dim": 128, "mlp": mlp,
              "buffer_mib": 0, "seed": seed, "log_dir": "logs", "wandb": False,
              "world_size": 1} | config
    lines = [*(source + SEPARATOR for source in sources),
             "Python 3.11.7, torch 2.13.0, triton 3.7.1, numpy 2.4.6",
             "config: " + json.dumps(config), "Tue Dec  1 08:15:00 2026", SEPARATOR,
             "step:0/4 val_loss:10.8258 train_time:0ms step_avg:0.01ms"]
    for step in range(1, 5):
        if mlp == "bitsparse":
            lines.append(f"buffer:{step}/4 used:655360 capacity:1048576 density:0.5000,0.1250")
        lines.append(f"step:{step}/4 train_loss:{10 - step}.500000 "
                     f"train_time:{step_ms * step:.0f}ms step_avg:{step_ms:.2f}ms")
    summary = {"run_id": run_id, "mlp": mlp, "steps": 4, "tokens": 32768, "world_size": 1,
               "device": device, "torch": "2.13.0", "triton": "3.7.1", "first_val_loss": 10.82583,
               "val_loss": val, "train_ms": 4 * step_ms, "step_ms_median": step_ms,
               "tokens_per_second": 8192 / step_ms * 1000, "bytes_per_token": vram * 1.5,
               "bytes_per_token_last": vram, "peak_mib": 12000.5, "density": [],
               "overflows": 0, "weights_sha256": f"{mlp}{seed}"}
    return write(path, *lines, f"step:4/4 val_loss:{val:.4f} train_time:{4 * step_ms:.0f}ms "
                 f"step_avg:{step_ms:.2f}ms", "summary: " + json.dumps(summary),
                 "peak memory allocated: 12001 MiB reserved: 13000 MiB")


def make_logs(folder, mlp, losses, **options):
    folder.mkdir(parents=True)
    return [our_log(folder / f"{i}.txt", f"{mlp}-{i}", mlp, i, loss, **options)
            for i, loss in enumerate(losses)]


def test_our_log_with_its_sources(tmp_path):
    (run,), problems = read(our_log(tmp_path / "a.txt", mlp="bitsparse"))
    assert problems == []
    assert run.sources == SOURCES
    assert [t.loss for t in run.train] == [9.5, 8.5, 7.5, 6.5]
    assert run.buffer[1] == (655360, 1048576, [0.5, 0.125])
    assert (run.final_loss, run.tokens, run.bytes_per_token) == (4.125, 32768, 250e3)
    assert (run.peak_mib, run.torch) == (12000.5, "2.13.0")


# -----------------------------------------------------------------------------
# Statistics and comparison


def test_p_values():
    # Student's t with 2 degrees of freedom has a closed form: for mean 3.278, s 0.001, n 3,
    # t = -0.002 / (0.001 / √3) = -2√3, p = (1 - 2√3 / √(2 + 12)) / 2.
    p = (1 - math.sqrt(12 / 14)) / 2
    assert p_below([3.277, 3.278, 3.279], 3.28) == pytest.approx(p, rel=1e-6)
    assert p_below([3.278], 3.28) is None
    assert p_below([3.278, 3.278], 3.28) is None
    # Two groups of equal spread and size: Welch's test has 4 degrees of freedom, and t = 0 here.
    assert p_differs([1.0, 2.0, 3.0], [2.5, 1.5, 2.0]) == pytest.approx(1)
    assert p_differs([1.0, 2.0], [1.0]) is None
    assert p_differs([1.0, 1.0], [1.0, 1.0]) is None


def test_comparison(tmp_path):
    make_logs(tmp_path / "eager", "eager", [3.277, 3.278, 3.279])
    make_logs(tmp_path / "bits", "bitsparse", [3.279, 3.278, 3.277], step_ms=693.0, vram=125e3)
    result = script("compare_records.py", "eager", "bits", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    (ours,) = data["candidates"]
    assert data["step_ms"] == "median"
    assert (ours["n"], ours["step_ms"], ours["seconds"]) == (3, 693.0, 2.772)
    assert ours["val_loss"] == pytest.approx(3.278)
    assert ours["val_loss_std"] == pytest.approx(0.001)
    assert (ours["step_ratio"], ours["bytes_ratio"], ours["tokens"]) == (0.99, 0.5, 32768)
    assert ours["p_differs"] == pytest.approx(1)
    table = script("compare_records.py", "eager", "bits", cwd=tmp_path).stdout.splitlines()
    assert len({len(line) for line in table[:4]}) == 1
    assert table[4] == (
        "bits: val loss 3.2780 ± 0.0010 (n = 3) does not differ significantly from the baseline's "
        "3.2780 (p = 1), not shown to be below 3.28 (p = 0.037), a step takes 0.9900 of the "
        "baseline's time, a token 0.5000 of its VRAM.")


def test_eras_compare_with_each_other(tmp_path):
    write(tmp_path / "old.txt", *YEAR_2025)
    write(tmp_path / "track3.txt", *TRACK_3)
    result = script("compare_records.py", "old.txt", "track3.txt", "--json", cwd=tmp_path)
    (row,) = json.loads(result.stdout)["candidates"]
    assert row["n"] == 2
    assert row["bytes_per_token"] is row["tokens"] is row["p_differs"] is None
    assert row["step_ratio"] == pytest.approx((483312 + 477956) / 2 / 3250 / 98.10)


def test_exit_status(tmp_path):
    make_logs(tmp_path / "a", "eager", [3.277, 3.278, 3.279])
    make_logs(tmp_path / "worse", "dense", [3.377, 3.378, 3.379])
    make_logs(tmp_path / "nan", "dense", [float("nan"), 3.378, 3.379])

    def status(*arguments):
        return script("compare_records.py", *arguments, cwd=tmp_path).returncode

    assert status("a", "a") == 0
    assert status("a", "worse") == 1
    assert status("a", "nan") == 1
    assert status("a", "a", "--target-loss", "3.3") == 0
    assert status("a", "a", "--target-loss", "3.28") == 1  # p = 0.037
    assert status("a", "missing") == 2
    assert status("a", "a/*.log") == 2


def test_what_was_not_counted_is_said(tmp_path):
    make_logs(tmp_path / "a", "eager", [3.277, 3.278])
    cut = (tmp_path / "a" / "0.txt").read_text().split("step:4/4 val_loss")[0]
    (tmp_path / "a" / "2.txt").write_text(cut)
    result = script("compare_records.py", "a", "--json", cwd=tmp_path)
    assert json.loads(result.stdout)["baseline"]["n"] == 2
    line = cut.count("\n")
    assert result.stderr == (f"a/2.txt:{line}: the run stops at step 4 of 4 without a final val "
                             "loss; it is not counted\n")


def test_mixed_groups_are_refused(tmp_path):
    our_log(tmp_path / "a.txt", mlp="eager")
    our_log(tmp_path / "b.txt", mlp="dense")
    with pytest.raises(ValueError, match="the runs differ in their --mlp: eager in .*a.txt, dense"):
        load(str(tmp_path / "*.txt"))


# -----------------------------------------------------------------------------
# Records and the tables made from them


def make_record(logs, records, name, *more):
    return script("new_record.py", "--name", name, "--claim", "as | dense", "--command",
                  "python train_gpt.py", "--records", records, *more, *logs)


def test_new_record(tmp_path):
    logs = make_logs(tmp_path / "logs", "bitsparse", [4.0, 4.25], codec="raw")
    result = make_record(logs, tmp_path / "records", "Bits", "--target-loss", "4.5")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "records" / "2026-12-01_Bits"  # nvidia-smi's date
    assert sorted(f.name for f in folder.iterdir()) == [
        "README.md", "bitsparse-0.txt", "bitsparse-1.txt", "summary.json"]
    assert (folder / "bitsparse-0.txt").read_bytes() == logs[0].read_bytes()
    record = json.loads((folder / "summary.json").read_text())
    expected = {"kind": "training", "name": "2026-12-01_Bits", "date": "2026-12-01", "n": 2,
                "claim": "as | dense", "command": "python train_gpt.py", "device": "NVIDIA H200",
                "mlp": "bitsparse", "codec": "raw", "storage": None, "tokens": 32768,
                "val_loss_mean": 4.125, "bytes_per_token": 250e3, "peak_mib": 12000.5,
                "target_loss": 4.5}
    assert {key: record[key] for key in expected} == expected
    assert record["val_loss_std"] == pytest.approx(0.25 / math.sqrt(2))
    # One degree of freedom: p = 1/2 - atan(3) / pi, as t = -0.375 / (std / √2) = -3.
    assert record["p_below_target"] == pytest.approx(0.5 - math.atan(3) / math.pi)
    assert "seed" not in record["config"]
    assert [run["seed"] for run in record["runs"]] == [0, 1]
    readme = (folder / "README.md").read_text()
    assert "n = 2; final val loss 4.1250 ± 0.1768; below 4.5: p = 0.1" in readme
    assert update_tables.read_record(folder) == record
    again = make_record(logs, tmp_path / "records", "Bits")
    assert again.returncode == 1
    assert "is there already" in again.stderr


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"sources": [SOURCES[0], SOURCES[1] + "# changed\n"]},
         "ran different versions of bitsparse_kernels.py"),
        ({"sources": SOURCES[:1]}, "is not a log of this train_gpt.py"),
        ({"mlp": "dense"}, "differ in their config: mlp is eager and dense"),
        ({"microbatch_tokens": 2048}, "differ in their config: microbatch_tokens is 1024 and 2048"),
        ({"device": "NVIDIA H100"}, "differ in their summary: device is NVIDIA H200 and NVIDIA H1"),
        ({"run_id": "run-1"}, "are the same run, run-1"),
    ],
)
def test_runs_that_are_no_repetitions_are_refused(tmp_path, second, sentence):
    logs = [our_log(tmp_path / "a.txt"),
            our_log(tmp_path / "b.txt", **{"run_id": "run-2"} | second)]
    result = make_record(logs, tmp_path / "records", "X")
    assert result.returncode == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "records").exists()


def test_an_unfinished_run_is_refused(tmp_path):
    log = our_log(tmp_path / "a.txt")
    log.write_text(log.read_text().split("step:4/4 val_loss")[0])
    result = make_record([log], tmp_path / "records", "X")
    assert "stops at step 4 of 4" in result.stderr


def test_commit_is_the_one_with_both_sources(tmp_path, monkeypatch):
    def git(*arguments):
        return command("git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@e",
                       *arguments).stdout.strip()

    def find(*sources):
        return new_record.find_commit({
            name: hashlib.sha256(source.encode()).hexdigest()
            for name, source in zip(new_record.SOURCES, sources, strict=False)})

    monkeypatch.setattr(new_record, "ROOT", tmp_path)
    assert find("a\n", "b\n") == "not of a commit here"  # no repository
    git("init", "-q")
    commits = []
    for train, kernels in (("a\n", None), ("a\n", "é\n"), ("c\n", "é\n"), ("a\n", "é\n")):
        (tmp_path / "train_gpt.py").write_text(train)
        if kernels:
            (tmp_path / "bitsparse_kernels.py").write_text(kernels)
        git("add", "-A")
        git("commit", "-q", "-m", "m")
        commits.append(git("rev-parse", "HEAD"))
    assert find("a\n", "é\n") == commits[1]
    assert find("c\n", "é\n") == commits[2]
    assert find("a\n", "b\n") == "not of a commit here"
    assert find("c\n") == commits[2]  # where one file decides


MARKERS = {"README.md": ("vram", "comparison", "reproduction"), "records/README.md": ("records",)}


def add_bench(root, name, command, weights="", **measures):
    """A bench's record; returns its page, which is empty."""
    folder = root / "records" / name
    folder.mkdir()
    (folder / "README.md").touch()
    (folder / "summary.json").write_text(json.dumps({
        "kind": "bench", "name": name, "date": name[:10], "claim": "c", "command": command,
        "commit": "0123456789abcdef", "device": "NVIDIA H200", "torch": "2.13.0",
        "triton": "3.7.1", "weights": weights, "measures": measures}))
    return folder / "README.md"


@pytest.fixture(scope="module")
def made_project(tmp_path_factory):
    """A repository with the markers, records of an eager, a dense and a bitsparse training, and a
    bench. In the table of records alone: bitsparse with a seed more, and a run on a CPU."""
    tmp_path = tmp_path_factory.mktemp("made")
    root = tmp_path / "project"
    (root / "records").mkdir(parents=True)
    for file, names in MARKERS.items():
        (root / file).write_text("# Title\n\n" + "".join(
            f"<!-- begin {name} -->\nstale\n<!-- end {name} -->\nafter {name}\n" for name in names))
    for mlp, step_ms, vram in (("eager", 700.0, 250e3), ("dense", 690.0, 200e3),
                               ("bitsparse", 693.0, 125e3)):
        logs = make_logs(tmp_path / mlp, mlp, [4.0, 4.25], step_ms=step_ms, vram=vram)
        assert make_record(logs, root / "records", mlp).returncode == 0
    logs = make_logs(tmp_path / "seeds", "bitsparse", [4.0, 4.25, 4.5], vram=100e3)
    assert make_record(logs, root / "records", "seeds").returncode == 0
    logs = make_logs(tmp_path / "cpu", "bitsparse", [9.0], vram=0, device="CPU")
    assert make_record(logs, root / "records", "cpu").returncode == 0
    add_bench(root, "2026-12-02_Kernels", "python scripts/bench.py",
              differing_values=0, sign_bits_bf16=15.5, bits_over_optimum=1.125)
    return root


VRAM_PAGE = """# bench

| B/token | eager |
|---|--:|
| head | 1 |

| mode  | B/token |
|-------|--------:|
| eager | 250,000 |
| dense | 200,000 |
"""


@pytest.fixture
def project(made_project, tmp_path):
    return shutil.copytree(made_project, tmp_path / "project")


def test_tables(project):
    assert update_tables.update(project, check=True) == list(MARKERS)
    assert "stale" in (project / "README.md").read_text()
    assert update_tables.update(project, check=False) == list(MARKERS)
    assert update_tables.update(project, check=True) == []
    readme = (project / "README.md").read_text()
    assert readme.startswith("# Title\n")
    assert "after comparison" in readme
    assert "stale" not in readme
    rows = {line.split(" | ")[0].strip("| "): line for line in readme.splitlines()
            if line.startswith("|")}
    link = "[2026-12-01_bitsparse](records/2026-12-01_bitsparse/)"
    compared = ("python scripts/compare_records.py records/2026-12-01_eager "
                "records/2026-12-01_bitsparse")
    for claim, expected in {
            "Lossless: training is bit-identical to uncompressed":
                "0 losses or weights differ | yes | "
                "[2026-12-02_Kernels](records/2026-12-02_Kernels/) | `python scripts/bench.py` |",
            "Sign packing: 15 of 16 bits": "15.50 bits a value | **no** | [2026-12-02_Kernels]",
            "Size near the theoretical optimum": "1.125 × the entropy bound | no number claimed |",
            "Modded-NanoGPT: 31 % less VRAM per token":
                f"50.0 % less | yes | {link} | `{compared}` |",
            "Modded-NanoGPT: at most 1 % overhead": f"-1.00 % step time | yes | {link} |",
            "Nemotron-H: 30 % less VRAM per token": "no record yet | – | – | – |",
    }.items():
        assert f"| {claim} | {expected}" in rows[claim]
    assert "0.5000" in rows[link]
    assert "0.8000" in rows["[2026-12-01_dense](records/2026-12-01_dense/)"]
    assert "CPU" not in readme
    records = (project / "records" / "README.md").read_text()
    assert records.count("| [2026-12-0") == 6
    assert "| as \\| dense | 1 × NVIDIA H200 | 2 | 4.1250 ± 0.1768 | 693.00 | 125,000 |" in records
    assert "| [2026-12-02_Kernels](2026-12-02_Kernels/) | c | NVIDIA H200 | – | – |" in records


def test_table_of_bench_vram(project):
    page = add_bench(project, "2026-12-02_Vram", "python scripts/bench_vram.py --checkpoint x",
                     weights="x")
    page.write_text(VRAM_PAGE)
    add_bench(project, "2026-12-03_Other", "python scripts/bench_other.py")
    add_bench(project, "2026-12-03_Initial", "python scripts/bench_vram.py")
    update_tables.update(project, check=False)
    readme = (project / "README.md").read_text()
    table = readme.split("<!-- begin vram -->\n")[1].split("\n<!-- end vram -->")[0]
    assert table.splitlines() == [
        *VRAM_PAGE.splitlines()[-4:], "",
        "1 × NVIDIA H200, torch 2.13.0, triton 3.7.1; [2026-12-02_Vram](records/2026-12-02_Vram/): "
        "`python scripts/bench_vram.py --checkpoint x`"]
    page.write_text("# bench\n")
    with pytest.raises(ValueError, match="2026-12-02_Vram/README.md: expected a table whose first"):
        update_tables.update(project, check=False)


def test_proofs_of_bit_identity(project):
    """Deterministic runs: compared bit for bit, and not for their time."""
    shutil.rmtree(project / "records" / "2026-12-02_Kernels")  # the newer answer
    for name in ("2026-12-01_eager", "2026-12-01_dense", "2026-12-01_bitsparse"):
        spoil_summary(project, lambda r: r["config"].update(deterministic=True), name)

    def differing():
        update_tables.update(project, check=False)
        readme = (project / "README.md").read_text()
        assert "No pair of records" in readme
        assert "step time" not in readme
        return re.search(r"(\d+) losses or weights differ \| ([^|]+) \| \[2026-12-01_bits", readme)

    expected, _ = differing().groups()
    log = project / "records" / "2026-12-01_bitsparse" / "bitsparse-1.txt"
    text = log.read_text()
    losses = re.findall(r"train_loss:\S+", text)
    log.write_text(text.replace(losses[-1], "train_loss:5.999999"))
    assert differing().groups() == (str(int(expected) + 1), "**no**")


def spoil_summary(root, change, name="2026-12-01_eager"):
    path = root / "records" / name / "summary.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda root: (root / "README.md").write_text("# Title\n"),
         "README.md: expected one line <!-- begin vram -->"),
        (lambda root: (root / "records" / "notes").mkdir(), "YYYY-MM-DD_Name"),
        (lambda root: (root / "records" / "2026-12-01_eager" / "README.md").unlink(),
         "README.md is missing"),
        (lambda root: spoil_summary(root, lambda r: r.pop("claim")), "claim missing"),
        (lambda root: spoil_summary(root, lambda r: r.update(kind="x")), "expected training or"),
        (lambda root: spoil_summary(root, lambda r: r.update(name="y")), "not those of the folder"),
        (lambda root: spoil_summary(root, lambda r: r["runs"][0].update(val_loss=3.9)),
         "val_loss is 4.0 in the log, 3.9 in summary.json"),
        (lambda root: (root / "records" / "2026-12-01_eager" / "eager-1.txt").unlink(),
         "the logs there are eager-0"),
        (lambda root: spoil_summary(root, lambda r: r["measures"].update(speed=1),
                                    "2026-12-02_Kernels"), "received speed: 1"),
    ],
)
def test_what_breaks_the_form_is_named(project, spoil, sentence):
    before = (project / "records" / "README.md").read_text()
    spoil(project)
    with pytest.raises(ValueError, match="^[^\n]+$") as caught:
        update_tables.update(project, check=False)
    assert sentence in str(caught.value)
    assert (project / "records" / "README.md").read_text() == before


def test_the_tables_of_this_repository_are_current():
    result = script("update_tables.py", "--check")
    assert result.returncode == 0, result.stderr


def test_the_readme_of_records_tells_of_every_field():
    text = (ROOT / "records" / "README.md").read_text()
    fields = {*update_tables.REQUIRED["training"], *update_tables.REQUIRED["bench"],
              *new_record.RUN_FIELDS, *(claim.measure for claim in update_tables.CLAIMS)}
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []


# -----------------------------------------------------------------------------
# Pictures, wandb, reproduction


def test_pictures(project, tmp_path):
    records = [project / "records" / f"2026-12-01_{mlp}" for mlp in ("eager", "bitsparse")]
    result = script("plot_records.py", *records, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert sorted(files) == sorted(f"{name}.{suffix}" for suffix in ("png", "svg") for name in (
        "val_loss", "vram", "density", "buffer", "bits", "step_time"))
    assert all(data.startswith(b"\x89PNG") for name, data in files.items() if name.endswith("png"))
    cpu = script("plot_records.py", project / "records" / "2026-12-01_cpu", "--out", tmp_path / "2")
    assert "vram: not drawn: no run tells its VRAM" in cpu.stdout
    assert "step_time: not drawn: needs two groups" in cpu.stdout
    missing = script("plot_records.py", "nowhere")
    assert missing.returncode == 1
    assert missing.stderr == "plot_records.py: nowhere: no such folder, log or glob\n"


WANDB_RUN = """
import sys, wandb
run = wandb.init(project="p", mode="offline", dir=sys.argv[1], config={"steps": 3, "mlp": "eager"},
                 settings=wandb.Settings(silent=True, console="off"))
for step in range(4):
    if step:
        run.log({"loss": 5.0, "step_ms": 100.0 * step, "tokens_per_second": 40960 / step,
                 "vram/bytes_per_token": 250e3 + step, "vram/peak_mib": 9000 - step}, step=step)
    if step in (0, int(sys.argv[2])):
        run.log({"val_loss": 4.5 - step / 2}, step=step)
run.finish()
"""


def test_wandb_report(tmp_path):
    for name, last in (("whole", 3), ("cut", 2)):
        (tmp_path / name).mkdir()
        made = command(sys.executable, "-c", WANDB_RUN, tmp_path / name, last, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    result = script("wandb_report.py", "whole/wandb/offline-run-*", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    cells = [cell.strip() for cell in result.stdout.splitlines()[2].strip("|").split("|")]
    # 40960 tokens/s at 100 ms a step are 4096 tokens a step, 12288 in all
    assert cells == ["offline-run-*", "1", "3.0000", "–", "–", "200.00", "–", "–", "0.01229",
                     "250,003", "–", "8,999"]
    result = script("wandb_report.py", "cut/wandb/offline-run-*", cwd=tmp_path)
    assert result.returncode == 1
    assert "last step is 3 of 3, without a final val loss" in result.stderr
    (tmp_path / "x.wandb").write_text("no run")
    result = script("wandb_report.py", "x.wandb", cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)


RUN_SH = """#!/bin/bash
# Stands for run.sh: writes down its arguments and copies a finished log to --log-dir.
set -e
echo "$*" >> calls
[[ ! -e broken || $(wc -l < calls) -lt 3 ]] || exit 7
while (( $# )); do
    case $1 in --mlp) mlp=$2 ;; --seed) seed=$2 ;; --log-dir) folder=$2 ;; esac
    shift
done
mkdir -p "$folder"
cp "made/$mlp/$seed.txt" "$folder/"
"""


@pytest.fixture
def copy(tmp_path):
    """The project's scripts with a stand-in for run.sh, and the logs that this one hands out."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in (*new_record.SOURCES, "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts" / "run.sh").write_text(RUN_SH)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    requirements = hashlib.sha256((tmp_path / "requirements.txt").read_bytes()).hexdigest()
    (tmp_path / "venv" / "requirements.sha256").write_text(f"{requirements}  -\n")
    for mlp in ("eager", "bitsparse"):
        make_logs(tmp_path / "made" / mlp, mlp, [3.277, 3.278, 3.279])
    return tmp_path


def reproduce(copy, *arguments):
    return command("bash", copy / "scripts" / "reproduce.sh", *arguments, cwd=copy,
                   VIRTUAL_ENV=str(copy / "venv"))


def test_reproduce_goes_on_where_it_stopped(copy):
    arguments = ("2", "--preset", "tiny", "--data", "a b", "--steps", "4")
    (copy / "broken").touch()  # run.sh fails from its third call on
    assert reproduce(copy, *arguments).returncode == 7
    (copy / "broken").unlink()
    # A log that was cut off does not count as finished.
    (cut,) = copy.glob("logs/reproduce/*/bitsparse-0/0.txt")
    cut.write_text(cut.read_text().split("summary: {")[0])
    result = reproduce(copy, *arguments)
    assert result.returncode == 0, result.stderr
    calls = [" ".join(line.split(" --log-dir")[0].split()[-4:])
             for line in (copy / "calls").read_text().splitlines()]
    assert calls == ["--mlp eager --seed 0", "--mlp bitsparse --seed 0", "--mlp eager --seed 1",
                     "--mlp bitsparse --seed 0", "--mlp eager --seed 1", "--mlp bitsparse --seed 1"]
    plan, counts, expected, *_ = result.stdout.splitlines()
    assert plan.endswith("2 each; all with --preset tiny --data a b --steps 4")
    # 4 steps of 8 microbatches of 256 tokens
    assert counts.strip().startswith("4 steps, 8192 tokens a run; finished in")
    assert counts.endswith(": 1 of 4")
    assert "expected: " in expected
    folders = sorted(copy.glob("logs/reproduce/*/records/*"))
    assert [f.name for f in folders] == ["2026-12-01_bitsparse-tiny-2", "2026-12-01_eager-tiny-2"]
    assert json.loads((folders[0] / "summary.json").read_text())["command"] == (
        "bash scripts/reproduce.sh 2 --preset tiny --data a\\ b --steps 4")
    assert "2026-12-01_bitsparse-tiny-2: val loss 3.2775 ± 0.0007 (n = 2)" in result.stdout
    # A third run each adds to the two.
    result = reproduce(copy, "3", *arguments[1:])
    assert result.returncode == 0, result.stderr
    assert len((copy / "calls").read_text().splitlines()) == 8
    assert "2026-12-01_bitsparse-tiny-3: val loss 3.2780 ± 0.0010 (n = 3)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["many"], "expected a number of runs (1 or more) or an option of train_gpt.py"),
        (["2", "--mlp", "dense"], "--mlp is set for each run here; leave it out"),
        (["--preset", "tiny", "--seed=3"], "--seed is set for each run here; leave it out"),
        (["--preset", "tiny", "--steps", "0"], "--steps: expected 1 or more, received 0"),
    ],
)
def test_reproduce_refuses_in_one_sentence(copy, arguments, sentence):
    result = reproduce(copy, *arguments)
    assert result.returncode != 0
    assert sentence in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (copy / "calls").exists()
