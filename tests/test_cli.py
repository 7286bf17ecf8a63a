"""Every wrong input of train_gpt.py and scripts/sample.py: one sentence, an exit status, no trace.

What:  the error table, (input, status, sentence), of arguments, data, checkpoints, ranks and GPUs;
       --dry-run's plan; sample.py's texts.
Needs: a CPU. GPUs too old or too few are played by a stand-in.
Run:   python -m pytest tests/test_cli.py
"""

import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from train_gpt import Config, parse_config

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--steps", "2", "--microbatch-tokens", "128", "--val-tokens", "512", "--val-sequence",
         "256", "--val-every", "0", "--layers", "4", "--dim", "32", "--heads", "2", "--no-wandb"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """In a folder of its own, one process, small vocabulary, a CPU unless the test says other."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train_gpt, "VOCAB", 512)
    monkeypatch.setattr(train_gpt, "BOS", 511)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train_gpt.Ranks, "catch_signals", lambda self: None)  # pytest's stay


@pytest.fixture(scope="module")
def text(make_text_folder):
    return make_text_folder(bos=511)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A checkpoint of a finished run of SMALL."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "VOCAB", 512)
        patch.setattr(train_gpt, "BOS", 511)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        config = parse_config(["--data", str(text), *SMALL, "--log-dir", str(folder)])
        train_gpt.train(config, train_gpt.Ranks(0, 1, torch.device("cpu")))
    (path,) = folder.glob("*/step-00000002.pt")
    return path


def main(arguments, capsys, monkeypatch):
    """(exit status, standard output, standard error) of train_gpt.py."""
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    return ended(train_gpt.main, capsys)


def ended(function, capsys):
    status = 0
    try:
        function()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):  # as the interpreter does
            print(end.code, file=sys.stderr)
    out = capsys.readouterr()
    return status, out.out, out.err


# -----------------------------------------------------------------------------
# Arguments (test_train.py has each field's limits)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
        ("--keep 0 --save-every 5", "--keep: expected 1 or more with --save-every, else 0 too, "
                                    "received 0"),
        ("--save-every -1", "--save-every: expected 0 or more, received -1"),
        ("--window-end 0", "--window-end: expected 1 or more, received 0"),
        ("--final-lr 1.5", "--final-lr: expected a number from 0 to 1, received 1.5"),
        ("--muon-lr inf", "--muon-lr: expected a number above 0, received inf"),
        ("--adam-lr 0", "--adam-lr: expected a number above 0, received 0.0"),
        ("--muon-momentum nan", "--muon-momentum: expected a number from 0 to 1, received nan"),
        ("--seed -1", "--seed: expected 0 to 2^63 - 1, received -1"),
        ("--seed 9223372036854775808", "--seed: expected 0 to 2^63 - 1, received 92233720"),
        ("--mlp dense --buffer-mib 64",
         "--buffer-mib: --mlp dense has no buffer; leave it out"),
        ("--mlp packed", "--mlp: invalid choice: 'packed'"),
        ("--head fp8 --dim 24 --heads 2",
         "--dim: expected a multiple of 16 for --head fp8, received 24"),
        ("--steps", "--steps: expected one argument"),
        ("--wandb yes", "unrecognized arguments: yes"),
    ],
)
def test_arguments(capsys, monkeypatch, arguments, sentence):
    status, out, err = main(arguments.split(), capsys, monkeypatch)
    assert (status, out) == (2, "")
    usage, last = err.splitlines()
    assert usage.startswith("usage: train_gpt.py ")
    assert last.startswith("train_gpt.py: error: ")
    assert sentence in last
    assert list(Path().iterdir()) == []


def test_other_ranks_leave_a_wrong_argument_to_rank_0(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert main(["--steps", "0"], capsys, monkeypatch) == (2, "", "")


# -----------------------------------------------------------------------------
# Data, ranks, GPUs, disk


def damage(folder):
    (shard,) = folder.glob("fineweb_val_*.bin")
    shard.write_bytes(shard.read_bytes()[:-10])


def other_tokens(folder):
    (shard,) = folder.glob("fineweb_val_*.bin")
    shard.write_bytes(shard.read_bytes()[:1024] + b"\xff\xff" + shard.read_bytes()[1026:])


def no_more_val(folder):
    for shard in folder.glob("fineweb_val_*.bin"):
        shard.unlink()


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        (no_more_val, [], r"no fineweb_val_\*\.bin in \S*; fetch FineWeb with python \S+, or "),
        (damage, [], r"\S+ is damaged: expected 4024 bytes for the 1500 tokens of its header, "
                     r"received 4014; fetch or make it again"),
        (other_tokens, [], r"\S+000\.bin has a token 65535: expected GPT-2's, at most 511; make it "
                           r"again with data/fineweb\.py"),
        (None, ["--steps", 1000], r"\S+ has \d+ batches of 8 x 128 tokens, 1 times \(--epochs\), "
                                  r"and --steps is 1000; fetch more shards, lower "),
        (None, ["--val-tokens", 2048], r"\S+ has 1500 val tokens, and --val-tokens 2048 needs "),
        (None, ["--log-dir", "/dev/null/x"], r"--log-dir /dev/null/x cannot be written: Not a dir"),
    ],
)
def test_data_and_disk(capsys, monkeypatch, make_text_folder, change, arguments, sentence):
    folder = make_text_folder(bos=511)
    if change is not None:
        change(folder)
    status, _, err = main(["--data", folder, *SMALL, *arguments], capsys, monkeypatch)
    assert status == 1
    (line,) = err.splitlines()
    assert re.match("train_gpt.py: " + sentence, line)


@pytest.mark.parametrize(
    ("environment", "gpu", "sentence"),
    [
        ({"WORLD_SIZE": "3"}, None, "expected 1, 2, 4 or 8 processes, received 3"),
        ({"WORLD_SIZE": "16", "RANK": "15"}, None,
         "rank 15: expected 1, 2, 4 or 8 processes, received 16"),
        ({}, (7, 5), "expected a GPU of compute capability 8.0 or more, for bf16; received Old "
                     "GPU, 7.5"),
        ({}, (8, 6), "expected a GPU of compute capability 8.9 or more, for fp8; received Old "
                     "GPU, 8.6"),
        ({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}, (9, 0),
         "rank 2: expected a process a GPU, at most 2 here, received number 3"),
    ],
)
def test_ranks_and_gpus(capsys, monkeypatch, text, environment, gpu, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if gpu is not None:
        for name, value in {"is_available": True, "device_count": 2, "set_device": None,
                            "get_device_capability": gpu, "get_device_name": "Old GPU"}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    head = ["--head", "fp8"] if "fp8" in sentence else []
    status, out, err = main(["--data", text, *SMALL, *head], capsys, monkeypatch)
    assert (status, out, err) == (1, "", f"train_gpt.py: {sentence}\n")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("kib", "smaller"), [(99, True), (163, False), (227, False)])
def test_attention_blocks_fit_the_gpu(monkeypatch, kib, smaller):
    """Shared memory of a block: 99 KiB on sm_86, sm_89 and sm_120, 163 on A100, 227 on H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda: SimpleNamespace(shared_memory_per_block_optin=kib * 1024))
    options = train_gpt.Attention(Config(dim=32, heads=2)).kernel_options
    blocks = {name: value for name, value in options.items() if "BLOCK" in name}
    assert all(block <= 64 for block in blocks.values())
    # backward's are FlexAttention's own where they fit
    assert any(name.endswith(("_M1", "_N1")) for name in blocks) == smaller


def test_out_of_memory(capsys, monkeypatch, text):
    def allocate(self, *batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee ...")

    monkeypatch.setattr(train_gpt.GPT, "forward", allocate)
    status, _, err = main(["--data", text, *SMALL], capsys, monkeypatch)
    assert status == 1
    assert err == ("train_gpt.py: cpu has too little memory: CUDA out of memory. Tried to allocate "
                   "2 GiB. Lower --microbatch-tokens or --val-sequence, or pass --mlp checkpoint\n")


def test_deterministic(capsys, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what is set below goes away again
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filling = torch.utils.deterministic.fill_uninitialized_memory
    inductor = torch._inductor.config
    other = {name: getattr(inductor, name) for name in train_gpt.DETERMINISTIC_INDUCTOR}
    seen = []
    monkeypatch.setattr(train_gpt, "train", lambda config, ranks: seen.append((
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        {name: getattr(inductor, name) for name in other})))
    try:
        with inductor.patch(other):  # so that these go away again too
            main([], capsys, monkeypatch)
            main(["--deterministic"], capsys, monkeypatch)
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own
            main(["--deterministic"], capsys, monkeypatch)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filling
    own = train_gpt.DETERMINISTIC_INDUCTOR
    assert seen == [(False, True, None, other), (True, False, ":4096:8", own),
                    (True, False, ":16:8", own)]
    assert other != own


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems(platform):
    script = f"import sys; sys.platform = {platform!r}; import train_gpt"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True,
                            capture_output=True)
    assert result.returncode == 1
    assert result.stderr == ("train_gpt.py: Linux is needed, as Triton has no other build; on "
                             "Windows use WSL 2\n")


# -----------------------------------------------------------------------------
# Checkpoints


def read(path):
    return torch.load(path, weights_only=True)


def cut(path, content):
    path.write_bytes(content[: len(content) // 2])


def flip_bit(path, content):
    content = bytearray(content)
    content[len(content) // 2] ^= 4  # in a tensor
    path.write_bytes(content)


def change(**changes):
    def write(path, content):
        path.write_bytes(content)
        checkpoint = read(path)
        for part, edit in changes.items():
            edit(checkpoint.get(part) if part != "whole" else checkpoint)
        torch.save(checkpoint, path)

    return write


def run_code(path, content):
    class Harm:
        def __reduce__(self):
            return os.system, ("touch harm",)

    torch.save({"config": {}, "model": Harm()}, path)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (None, r"checkpoint c\.pt cannot be read: No such file or directory"),
        (lambda path, _: path.mkdir(), r"checkpoint c\.pt cannot be read: Is a directory"),
        (cut, r"c\.pt is no checkpoint, or a damaged one: .*; take an earlier one"),
        (lambda path, _: path.write_text("hello"), r"c\.pt is no checkpoint, or a damaged one"),
        (lambda path, _: path.touch(), r"c\.pt is no checkpoint, or a damaged one"),
        (run_code, r"c\.pt is no checkpoint, or a damaged one"),
        (flip_bit, r"checkpoint c\.pt is damaged in \S+; take an earlier one"),
        (lambda path, _: torch.save({"a": torch.ones(2)}, path),  # a model's state_dict
         r"checkpoint c\.pt has no config, model, muon, adam, run: expected config, model, muon, "
         r"adam, run in it, as train_gpt\.py writes it; config and model alone serve "),
        (lambda path, _: torch.save(torch.ones(2), path), r"checkpoint c\.pt has no config, model"),
        (change(whole=lambda c: [c.pop("muon"), c.pop("adam")]),
         r"checkpoint c\.pt has no muon, adam: expected "),
        (change(config=lambda c: c.pop("layers")), r"checkpoint c\.pt is of another version of "
                                                   r"train_gpt\.py: one of the two has no "),
        (change(model=lambda m: m.update(head=torch.zeros(256, 32))),
         r"checkpoint c\.pt does not fit this version of train_gpt\.py: .*head.*\[256, 32\]"),
        (change(muon=lambda m: m.pop()), r"checkpoint c\.pt does not fit this version of "),
        (change(run=lambda r: r.update(batch="0")),
         r"--data \S+: the next batch is not the one that the run of c\.pt would have had; "
         r"expected the shards that it began with"),
    ],
)
def test_checkpoints(capsys, monkeypatch, trained, write, sentence):
    path = Path("c.pt")
    if write is not None:
        write(path, trained.read_bytes())
    status, _, err = main(["--resume", path], capsys, monkeypatch)
    assert status == 1
    (line,) = err.splitlines()
    assert re.match("train_gpt.py: " + sentence, line)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", 3], "--steps: expected 2, which the run of"),
        (["--dim", 64], "--dim: expected 32, which the run of"),
        (["--mlp", "dense"], "--mlp: expected bitsparse, which the run of"),
        (["--head", "fp8"], "--head: expected bf16, which the run of"),
        (["--preset", "speedrun"], ": expected "),
    ],
)
def test_resume_with_another_config(capsys, monkeypatch, trained, arguments, sentence):
    status, _, err = main(["--resume", trained, *arguments], capsys, monkeypatch)
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(f", received {arguments[1]}") or "--preset" in arguments


def test_resume_takes_options_from_the_checkpoint(trained):
    saved = asdict(parse_config(["--resume", str(trained)]))
    changed = asdict(parse_config(["--resume=latest", f"--log-dir={trained.parent.parent}",
                                   "--steps", "2", "--val-every", "1", "--wandb"]))
    assert saved == read(trained)["config"] | {"resume": str(trained)}
    assert {k for k in saved if saved[k] != changed[k]} == {"val_every", "wandb"}


def test_resume_latest_without_any(capsys, monkeypatch):
    status, _, err = main(["--resume", "latest"], capsys, monkeypatch)
    assert (status, err) == (1, "train_gpt.py: there is no latest checkpoint: no step-*.pt in a "
                                "folder of logs; name the run's --log-dir, or start one without "
                                "--resume\n")


# -----------------------------------------------------------------------------
# The plan


def test_dry_run(capsys, monkeypatch, text):
    status, out, err = main(["--data", text, *SMALL, "--dry-run"], capsys, monkeypatch)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("CPU only, ")
    parameters = sum(p.numel() for p in train_gpt.GPT(Config(layers=4, dim=32, heads=2), None)
                     .parameters())
    assert lines[1].startswith(f"parameters: {parameters}; with gradients and moments ")
    assert lines[2].startswith(f"tokens: 2 steps x 1024 = 2048; {text} has ")
    assert lines[3] == "activation buffer at the start: 2 MiB"
    assert re.match(r"predicted peak VRAM of a GPU in training: \d+ MiB$", lines[5])
    assert lines[6] == "time: not known before a run of this model has finished in logs"
    assert lines[7] == "nothing was trained (--dry-run)"
    assert list(Path().iterdir()) == []


def test_dry_run_predicts_by_what_each_mlp_keeps(capsys, monkeypatch, text):
    """Record #26's model and microbatch: 12 layers of 3,072 hidden elements and 49,152 tokens."""
    monkeypatch.setattr(train_gpt, "VOCAB", 50304)
    monkeypatch.setattr(train_gpt, "TrainData", lambda config: SimpleNamespace(batches=[]))
    monkeypatch.setattr(train_gpt, "ValData", lambda config: None)
    mib = {}
    for mlp in ("eager", "dense", "checkpoint", "bitsparse"):
        _, out, _ = main(["--preset", "offline", "--mlp", mlp, "--dry-run"], capsys, monkeypatch)
        mib[mlp] = int(re.search(r"in training: (\d+) MiB", out)[1])
    hidden = 12 * 3072 * 49152 / 2**20  # elements / MiB
    assert mib["eager"] - mib["dense"] == pytest.approx(2 * hidden, abs=1)
    assert mib["dense"] - mib["checkpoint"] == pytest.approx(2 * hidden, abs=1)
    # a bit and a head, and at first a buffer for half of the values with a twentieth more
    expected = (1.05 * 0.5 * 16 + 1.03) / 8 * hidden
    assert mib["bitsparse"] - mib["checkpoint"] == pytest.approx(expected, rel=0.01)
    # parameters, float32 and bf16, as often as they are held: with gradients and one or two moments
    matrices, tables, head = 11 * 4 * 768**2 + 12 * 8 * 768**2, 4 * 50304 * 768, 50304 * 768
    held = (matrices * 4 * 3 + tables * 2 * 4 + head * 4 * 4) / 2**20
    kept = 12 * 768 * train_gpt.KEPT_BYTES * 49152 / 2**20
    assert mib["checkpoint"] == pytest.approx(held + kept, rel=0.01)


def test_dry_run_takes_the_time_from_a_finished_run(capsys, monkeypatch, trained):
    arguments = ["--resume", trained, "--log-dir", trained.parent.parent, "--dry-run"]
    _, out, _ = main(arguments, capsys, monkeypatch)
    assert re.search(rf"^time: \d+ s without validation, at the \d+ tokens/s of run "
                     rf"{trained.parent.name}$", out, re.M)


# -----------------------------------------------------------------------------
# Sampling


@pytest.fixture
def sample(capsys, monkeypatch):
    """Runs sample.py, with one letter a token."""
    def encode(text):
        return [ord(c) - 32 for c in text]

    def decode(tokens):
        return "".join(chr(32 + t % 95) for t in tokens)

    tokenizer = SimpleNamespace(encode_ordinary=encode, decode=decode)
    stand_in = SimpleNamespace(get_encoding=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "tiktoken", stand_in)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, arguments)])
        script = str(ROOT / "scripts" / "sample.py")
        return ended(lambda: runpy.run_path(script, run_name="__main__"), capsys)

    return run


def test_sample(sample, trained):
    texts = [sample(trained, "--tokens", 20, "--prompt", "ab", *more)
             for more in ([], [], ["--seed", 1], ["--temperature", 0],
                          ["--temperature", 0, "--seed", 1], ["--top-k", 1], ["--top-k", 0])]
    for status, out, err in texts:
        assert (status, err) == (0, "")
        assert out.startswith("ab")
        assert len(out) <= 23
    drawn, again, other, likeliest, same, first, _ = (out for _, out, _ in texts)
    assert drawn == again != other
    assert likeliest == same == first != drawn


def test_sample_is_the_models_distribution(sample, trained):
    """The likeliest token after a prompt is that of the loss head's logits, padding or not."""
    _, out, _ = sample(trained, "--tokens", 1, "--temperature", 0, "--prompt", "q" * 150)
    checkpoint = read(trained)
    model = train_gpt.GPT(Config(**checkpoint["config"] | {"mlp": "dense"}), None)
    model.load_state_dict(checkpoint["model"])
    tokens = torch.tensor([511] + [ord("q") - 32] * 150 + [511] * 105, dtype=torch.int32)
    x = model.hidden(tokens, torch.tensor(2, dtype=torch.int32)).detach()[150:151]
    losses = [float(train_gpt.head_loss(x, model.head.detach().to(x.dtype),
                                        torch.tensor([token]), False)[0]) for token in range(511)]
    assert out == "q" * 150 + chr(32 + losses.index(min(losses)) % 95) + "\n"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["none.pt"], 1, "train_gpt.py: checkpoint none.pt cannot be read: No such file"),
        (["latest"], 1, "train_gpt.py: there is no latest checkpoint: no step-*.pt in "),
        (["T", "--temperature", "-1"], 2, "--temperature: expected 0 or more, received -1.0"),
        (["T", "--top-k", "-1"], 2, "--top-k: expected 0 or more, received -1"),
        (["T", "--tokens", "0"], 2, "--tokens: expected 1 or more, received 0"),
        (["T", "--tokens", "300"], 1, "sample.py: the prompt's 0 tokens and --tokens 300 make 384 "
                                      "with padding, and the model was made for 256 at most"),
        (["W"], 1, "sample.py: w.pt has weights of another config than the one in it (--layers 4 "
                   "--dim 64 --heads 2): blocks.0.attention.project, expected [64, 64], received "
                   "[32, 32]"),
        (["M"], 1, "train_gpt.py: checkpoint m.pt has no config: expected config, model "),
    ],
)
def test_sample_refuses(sample, trained, arguments, status, sentence):
    if arguments == ["W"]:
        checkpoint = read(trained)
        checkpoint["config"]["dim"] = 64
        torch.save(checkpoint, "w.pt")
    torch.save({"model": read(trained)["model"]}, "m.pt")
    names = {"T": trained, "W": "w.pt", "M": "m.pt"}
    found, _, err = sample(*(names.get(a, a) for a in arguments))
    assert found == status
    assert sentence in err.splitlines()[-1]


def test_sample_without_a_tokenizer(sample, trained, monkeypatch):
    def get_encoding(name):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    status, _, err = sample(trained)
    assert status == 1
    assert re.fullmatch(r"sample\.py: GPT-2's tokenizer is not in \S+ and could not be fetched "
                        r"\(ConnectionError\); python data/sample\.py puts it there\n", err)
