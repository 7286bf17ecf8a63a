"""scripts/bench_ranks.py: its runs on two ranks, its formula, estimates and record.

What:  a whole bench on 2 gloo ranks, in which a rank really overflows, torchrun is really told to
       end and its run resumed, and each step's bytes are counted; the same checks where something
       is wrong; the formula for the speedrun's model by hand; the page and its record.
Needs: a CPU, sockets on the loopback address. Each run is a torchrun of its own.
Run:   python -m pytest tests/test_bench_ranks.py

The runs' vocabulary is 512, as in test_ranks.py, so that a step is quick.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_ranks
import update_tables

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
STEPS = 24  # a signal after 12 ends the run some 3 steps later
SMALL = ["--check-steps", str(STEPS), "--microbatch-tokens", "128", "--val-tokens", "1024",
         "--val-sequence", "512", "--val-every", "0", "--layers", "4", "--dim", "32", "--heads",
         "2", "--window-end", "256", "--epochs", "8"]
DRIVER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "scripts")!r}]
import train_gpt
train_gpt.VOCAB, train_gpt.BOS = 512, 511
import bench_ranks
(bench_ranks if sys.argv[1] == bench_ranks.RANK else train_gpt).main()
"""
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def bench(patch, *arguments):
    """The script in this process. Returns its exit status."""
    patch.setattr(sys, "argv", ["bench_ranks.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        bench_ranks.main()
    return exit.value.code


@pytest.fixture(scope="module")
def record(make_text_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "VOCAB", 512)
        patch.setattr(train_gpt, "__file__", str(driver))
        patch.setattr(bench_ranks, "__file__", str(driver))
        patch.setenv("OMP_NUM_THREADS", "1")
        assert bench(patch, "--data", make_text_folder(bos=511), *SMALL, "--world-sizes", 2,
                     "--only", "identity,overflow,signal,bytes", "--json", folder / "r.json") == 0
    return json.loads((folder / "r.json").read_text())


# -----------------------------------------------------------------------------
# The bench


@on_cpu
def test_every_check_ran_and_holds(record):
    checks = {check["check"]: check for check in record["checks"]}
    assert list(checks) == ["identity", "overflow", "signal", "bytes"]
    assert all(check["holds"] and check["ranks"] == 2 for check in checks.values())
    assert f"{STEPS} train losses" in checks["identity"]["seen"]
    assert "steps repeated, by rank: [1, 1]; buffers grown: [0, 1]" in checks["overflow"]["seen"]
    assert "torchrun ended with status 1 and left ['step-000000" in checks["signal"]["seen"]
    # layers of 32: 4 q, k, v and projections each, but the third has no attention
    muon = (12 + 4 * 2 * 4) * 32 * 32
    tables = 3 * 512 * 32 * 2 + 512 * 32 * 4  # three in bf16, the head
    seen = checks["bytes"]["seen"]
    assert f"the ranks' {2 * STEPS} steps reduce_scatter calls 7" in seen
    assert f"reduce_scatter bytes {4 * muon + tables:,}, " in seen
    assert f"all_gather bytes {2 * muon + tables:,}, " in seen
    assert "all_reduce calls 1, all_reduce bytes 88, asynchronous calls 0" in seen


@on_cpu
def test_a_cpu_says_nothing_about_speed(record):
    assert record["device"] == "CPU"
    assert record["rows"] == []
    assert all(e["compute_ms"] is None for e in record["estimates"])


class FakeRun(SimpleNamespace):
    ranks = 2
    weights = "abc"

    def end(self):
        return self

    def seen(self, key):
        return self.by_rank[key]


STEP = {"reduce_scatter bytes": 8, "all_gather bytes": 6}


def fake_run(bits=1, **by_rank):
    return FakeRun(bits=([bits], bits, "abc"), by_rank={
        "overflows": [0, 0], "grown": [0, 0], "bytes_per_token": [1.0, 2.0],
        "sent": [[STEP, STEP], [STEP, STEP]]} | by_rank)


def test_checks_can_fail():
    whole = fake_run()
    assert bench_ranks.check_identity(fake_run(), whole)[0]
    assert not bench_ranks.check_identity(fake_run(bits=2), whole)[0]
    starved = {"overflows": [1, 1], "grown": [0, 1]}
    assert bench_ranks.check_overflow(fake_run(**starved), whole)[0]
    assert not bench_ranks.check_overflow(fake_run(bits=2, **starved), whole)[0]
    assert not bench_ranks.check_overflow(fake_run(), whole)[0]  # nothing overflowed
    assert not bench_ranks.check_overflow(fake_run(**starved | {"grown": [1, 1]}), whole)[0]
    assert not bench_ranks.check_overflow(fake_run(**starved | {"overflows": [0, 1]}), whole)[0]
    assert bench_ranks.check_bytes(whole, STEP)[0]
    other = STEP | {"all_gather bytes": 7}
    holds, seen = bench_ranks.check_bytes(fake_run(sent=[[STEP, STEP], [STEP, other]]), STEP)
    assert not holds
    assert f"counted: {other}" in seen


@pytest.mark.parametrize(("status", "saved"), [(0, 5), (1, 10), (1, None)])
def test_a_signal_that_did_not_end_the_run_in_the_middle(tmp_path, status, saved):
    (tmp_path / "logs" / "run").mkdir(parents=True)
    if saved:
        (tmp_path / "logs" / "run" / f"step-{saved:08}.pt").touch()
    process = SimpleNamespace(poll=lambda: status, terminate=lambda: None, wait=lambda: status)
    run, whole = fake_run(), fake_run()
    whole.bits = [0.0] * 10, 0.0, "abc"
    run.process, run.folder = process, tmp_path
    assert not bench_ranks.check_signal(run, whole)[0]


# -----------------------------------------------------------------------------
# Formula and estimates


def test_bytes_of_the_speedrun():
    config = train_gpt.parse_config(["--preset", "offline"])
    square, tall, table = 768 * 768, 3072 * 768, 50304 * 768
    # 11 layers with attention, whose 44 matrices are padded to 48 on 8 and on 16 ranks; 12 layers'
    # w1 and w2 are padded to 16
    for ranks, squares, talls in ((2, 44, 12), (4, 44, 12), (8, 48, 16), (16, 48, 16)):
        muon = squares * square + 2 * talls * tall
        traffic = bench_ranks.step_traffic(config, ranks)
        assert traffic["reduce_scatter bytes"] == 4 * muon + table * (4 * 2 + 4)
        assert traffic["all_gather bytes"] == 2 * muon + table * (4 * 2 + 4)
        assert traffic["all_reduce bytes"] == 4 * (6 + 4 * 12 + 4)


def test_estimates():
    config = train_gpt.parse_config(["--preset", "offline"])
    row = {"mode": "bitsparse", "efficiency": 1.0, "step_ms_median": 400.0, "world_size": 2}
    rows = [row | {"mode": "eager", "step_ms_median": 1.0}, row]
    eight = bench_ranks.estimate(config, rows, None)[2]
    assert (eight["ranks"], eight["compute_ms"]) == (8, 100)
    assert bench_ranks.estimate(config, rows, 720.0)[2]["compute_ms"] == 90
    traffic = bench_ranks.step_traffic(config, 8)
    sent = 7 / 8 * (traffic["reduce_scatter bytes"] + traffic["all_gather bytes"] + 2 * 232)
    assert eight["sent_bytes"] == pytest.approx(sent)
    assert eight["communication_ms"] == pytest.approx(1000 * sent / 360e9)


# -----------------------------------------------------------------------------
# Record and arguments


def made_record(**more):
    row = {"world_size": 2, "val_loss": 4.2, "tokens_per_second": 1e6, "step_ms_median": 400.0,
           "bytes_per_token_last": 1e5, "peak_mib": 2e4}
    config = train_gpt.parse_config(["--preset", "offline"])
    rows = [row | {"mode": mode, "efficiency": 0.987} for mode in bench_ranks.MODES]
    return {"kind": "bench", "name": "", "date": "2026-12-01", "claim": "alike", "command":
            "python scripts/bench_ranks.py", "commit": "c", "sources_sha256": {"train_gpt.py": "a"},
            "device": "a GPU", "torch": "2", "triton": "3", "measures": {},
            "world_sizes": [1, 2], "rows": rows,
            "checks": [{"check": "signal", "ranks": 2, "holds": True, "seen": "x"}],
            "estimates": bench_ranks.estimate(config, rows, None)} | more


def test_record_is_made_again_and_accepted(tmp_path, monkeypatch, capsys):
    earlier, out = tmp_path / "r.json", tmp_path / "2026-12-01_Ranks"
    earlier.write_text(json.dumps(made_record()))
    assert bench(monkeypatch, "--from", earlier, "--out", out) == 0
    record = update_tables.read_record(out)
    assert (record["name"], record["commit"]) == ("2026-12-01_Ranks", "c")
    page = (out / "README.md").read_text()
    assert capsys.readouterr().out == page
    assert page.startswith("# 2026-12-01_Ranks\n")
    for expected in ("- signal on 2: holds. x", "1,000,000", "0.987", "2 × a GPU",
                     "| 8 GPUs, NVLink "):
        assert expected in page


def test_a_failed_check_is_seen(tmp_path, monkeypatch, capsys):
    earlier = tmp_path / "r.json"
    failed = {"check": "bytes", "ranks": 2, "holds": False, "seen": "x"}
    earlier.write_text(json.dumps(made_record(checks=[failed])))
    assert bench(monkeypatch, "--from", earlier) == 1
    assert "- bytes on 2: FAILS. x" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--only", "speed,size"], "--only: expected some of speed,identity,overflow,signal,bytes, "
                               "received size"),
    (["--mlp=eager"], "--mlp is set for each run here; leave it out"),
    (["--from", "x", "--steps", "3"], "--from measures nothing: leave out --steps 3"),
    (["--from", "x", "--check-steps", "3"], "--from measures nothing: leave out --check-steps")])
def test_wrong_arguments(monkeypatch, arguments, expected):
    assert bench(monkeypatch, *arguments) == f"bench_ranks.py: {expected}"


@on_cpu
def test_reason_of_a_failed_run_is_told(tmp_path):
    run = bench_ranks.Run(tmp_path, 1, "eager", "--preset", "tiny", "--data", str(tmp_path))
    with pytest.raises(SystemExit, match="a run ended with status 1: ") as exit:
        run.end()
    assert f"no fineweb_train_*.bin in {tmp_path}" in exit.value.code
