"""scripts/hf_patch.py: patched models of transformers give the unpatched model's bits.

What:  tiny models of the supported families, outputs and all gradients with torch.equal; what must
       be refused, with its reason; frozen and tied weights; gradient checkpointing; the buffer's
       size, overflow and lifetime; the command; scripts/bench_nemotron_h.py at a tiny size.
Needs: a CPU; transformers 5.3 or newer for what builds models (skipped without it); what is marked
       `gpu` an NVIDIA GPU.
Run:   python -m pytest tests/test_hf_patch.py
"""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitsparse_kernels import CODECS, INEXACT, ActivationBuffer, bits_per_element

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import update_tables  # noqa: E402
from hf_patch import BufferOverflow, find_mlps, patch_mlps, patched, report, unpatch  # noqa: E402

try:
    import transformers
except ImportError:
    transformers = None
needs_transformers = pytest.mark.skipif(
    transformers is None, reason="needs transformers, which is optional: pip install transformers")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]

D, HIDDEN = 32, 88  # 88: rows of the hidden activation begin anywhere in groups and tiles


class Mlp(nn.Module):
    def __init__(self, act=None, bias=False):
        super().__init__()
        self.up = nn.Linear(D, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, D, bias=bias)
        self.act = act or nn.ReLU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class ByFunctions(Mlp):
    """Without an activation module, and with down defined first."""

    def __init__(self):
        nn.Module.__init__(self)
        self.c_proj = nn.Linear(HIDDEN, D, bias=False)
        self.c_fc = nn.Linear(D, HIDDEN, bias=False)

    def forward(self, x):
        return self.c_proj(self.c_fc(x).relu().square())


class Residual(Mlp):
    def forward(self, x):
        return x + super().forward(x)


class Rounding(Mlp):
    """relu² with a rounding that is not torch.square's: of r/3 before its product with 3r."""

    def forward(self, x):
        r = self.up(x).relu()
        return self.down(r / 3 * (3 * r))


class WithDropout(Mlp):
    def __init__(self, p):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.down(self.dropout(self.act(self.up(x))))


class Detached(Mlp):
    def forward(self, x):
        return self.down(self.act(self.up(x.detach()))) + 0 * x


class Gated(Mlp):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, HIDDEN)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Inlined(Mlp):
    """The layers of an MLP within a block that has more."""

    def __init__(self):
        super().__init__(bias=True)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        hidden = self.norm(x)
        hidden = self.up(hidden)
        # A comment and a blank line change nothing.

        hidden = self.act(hidden)
        hidden = self.down(hidden)
        return x + hidden


class InlinedNested(Inlined):
    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class InlinedScaled(Inlined):
    """As InlinedNested, but down's input is not the activation's output."""

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))) * 2)


class InlinedSum(Inlined):
    """As Inlined, but the activation's input is not up's output."""

    def forward(self, x):
        hidden = self.up(x) + x.mean()
        hidden = self.act(hidden)
        hidden = self.down(hidden)
        return hidden


class InlinedElsewhere(Inlined):
    """As Inlined, but up's output is used once more."""

    def forward(self, x):
        z = self.up(self.norm(x))
        return x + self.down(self.act(z)) + z.mean()


class LoraLike(nn.Linear):
    pass


def with_lora():
    mlp = Mlp()
    mlp.up = LoraLike(D, HIDDEN)
    return mlp


def with_one_bias():
    mlp = Mlp()
    mlp.up = nn.Linear(D, HIDDEN)
    return mlp


def with_hook():
    mlp = Mlp()
    mlp.up.register_forward_hook(lambda *_: None)
    return mlp


def with_a_replaced_forward():
    mlp = Mlp()
    mlp.forward = lambda x: x
    return mlp


def gradients(model, step):
    """The output of step(), and every gradient after it, by parameter."""
    model.zero_grad(set_to_none=True)
    output = step()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach().clone(), grads


def assert_equal(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert torch.equal(actual[1][name], grad), name


def plain_step(model, tokens=40, seed=0):
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x = x.to(next(model.parameters()).device)

    def step():
        model.zero_grad(set_to_none=True)
        y = model(x)
        y.square().mean().backward()
        return y

    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("make", "power"),
    [
        (Mlp, 1),
        (lambda: Mlp(bias=True), 1),
        (ByFunctions, 2),
        (Inlined, 1),
        (InlinedNested, 1),
        (lambda: WithDropout(0.0), 1),  # at p = 0 it does nothing, in training too
        (lambda: nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, D)), 1),
        (lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), 1),  # either order
    ],
)
def test_patched_by_structure(make, power, codec, device):
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).bfloat16().to(device)
    step = plain_step(model)
    expected = gradients(model, step)
    with patched(model, codec) as p:
        assert [(mlp.reason, mlp.power) for mlp in p.found] == [(None, power)] * 2
        assert_equal(gradients(model, step), expected)
        assert int(p.buffer.used_bytes()) > 0
    assert_equal(gradients(model, step), expected)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Mlp(nn.ReLU6()), "ReLU6"),
        (lambda: Mlp(nn.SiLU()), "SiLU"),
        (Residual, "more or other than"),
        (Rounding, "more or other than"),
        (Detached, "more or other than"),
        (lambda: WithDropout(0.1), "Dropout(p=0.1"),
        (Gated, "gated: up, down, gate"),
        (InlinedElsewhere, "more or other than"),
        (InlinedScaled, "more or other than"),
        (InlinedSum, "more or other than"),
        (with_lora, "its up is a LoraLike"),
        (with_one_bias, "only one of its linear layers has a bias"),
        (with_hook, "hooks"),
        (with_a_replaced_forward, "already replaced"),
    ],
)
def test_refused_with_its_reason(make, reason):
    model = nn.Sequential(make()).bfloat16()
    (mlp,) = find_mlps(model)
    assert reason in mlp.reason
    assert reason in report([mlp])
    with pytest.raises(ValueError, match="no MLP to patch"):
        patched(model)


def test_shared_activation_of_a_block_is_refused():
    model = nn.Sequential(Inlined(), Inlined())
    model[1].act = model[0].act
    assert all("shared" in mlp.reason for mlp in find_mlps(model))


def test_finding_changes_nothing(monkeypatch):
    seeds = []  # of GPUs
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model = nn.Sequential(WithDropout(0.5), Mlp()).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    find_mlps(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seeds
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_patching_twice_is_refused_and_unpatch_undoes():
    model = nn.Sequential(Mlp(), Inlined()).bfloat16()
    buffer = ActivationBuffer(2**20, "cpu", layers=2)
    patch_mlps(model, buffer)
    assert all("already replaced" in mlp.reason for mlp in find_mlps(model))
    unpatch(model)
    assert [mlp.reason for mlp in find_mlps(model)] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_one_sentence(dtype):
    model = Mlp().bfloat16()
    x = torch.randn(3, D).bfloat16()
    with (pytest.raises(ValueError, match=f"x: expected dtype torch.bfloat16, received {dtype}"),
          patched(model)):
        model(x.to(dtype))
    assert "forward" not in vars(model)  # an error leaves the model unpatched
    with (pytest.raises(ValueError, match=f"w1: expected dtype torch.bfloat16, received {dtype}"),
          patched(model.to(dtype))):
        model(x)


def test_autocast_is_refused():
    model = Mlp().bfloat16()
    with (pytest.raises(ValueError, match="autocast"), patched(model),
          torch.autocast("cpu", torch.bfloat16)):
        model(torch.randn(3, D).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS)
def test_codec_and_storage_reach_every_mlp(codec, device):
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Inlined()).bfloat16().to(device)
    step = plain_step(model)
    exact, exact_grads = gradients(model, step)
    used = []
    for storage in (torch.bfloat16, torch.float8_e4m3fn):
        with patched(model, codec, storage) as p:
            output, grads = gradients(model, step)
            used.append(int(p.buffer.used_bytes()))
        assert torch.equal(output, exact)  # of the activation before it was rounded
        for name, grad in grads.items():
            error = (grad - exact_grads[name]).float().norm() / exact_grads[name].float().norm()
            assert (error == 0) if storage == torch.bfloat16 else error < 0.1, name
    assert used[1] < 0.7 * used[0]
    with pytest.raises(ValueError, match="expected one of raw, sign, exponent, received 'zip'"):
        patched(model, "zip")


def test_layers_share_the_counters_that_there_are():
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(), Mlp()).bfloat16()
    counts = []
    for layers in (3, 2):
        buffer = ActivationBuffer(2**20, "cpu", layers=layers)
        patch_mlps(model, buffer)
        plain_step(model)()
        counts.append(buffer.snapshot().layer_nnz)
        unpatch(model)
    first, second, third = counts[0]
    assert min(counts[0]) > 0
    assert counts[1] == [first + third, second]


# -----------------------------------------------------------------------------
# Buffer


def too_small(model):
    """patched(model) whose buffer overflows in the first step."""
    p = patched(model)
    p.bytes_per_token = 0.01
    return p


def test_run_repeats_an_overflowed_step():
    torch.manual_seed(0)
    # Dropout between the MLPs: the repetition must draw the same random numbers.
    model = nn.Sequential(Mlp(), nn.Dropout(0.3), Mlp()).bfloat16()
    step = plain_step(model, tokens=300)
    torch.manual_seed(1)
    expected = gradients(model, step)
    with too_small(model) as p:
        calls = []

        def counted():
            calls.append(p.buffer.capacity_bytes)
            return step()

        torch.manual_seed(1)
        output = p.run(counted)
        assert len(calls) == 2
        assert not p.buffer.overflowed()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_equal((output, grads), expected)
        # And room for the same batch again.
        p.run(counted)
        assert len(calls) == 3


def test_overflow_is_never_silent():
    model = Mlp().bfloat16()
    step = plain_step(model)
    with (pytest.raises(BufferOverflow, match="needed .* the buffer has 0"),
          too_small(model)):
        step()
    with too_small(model) as p:
        step()
        with pytest.raises(BufferOverflow):
            p.check()
        p.grow()
        p.check()
        step()
    with too_small(model) as p:  # a loop that checks nothing
        step()
        step()
        with pytest.raises(BufferOverflow):
            step()
        p.grow()


def test_inexact_activations_are_never_silent():
    model = Mlp().bfloat16()
    step = plain_step(model)
    with patched(model) as p:
        step()
        p.buffer.state[INEXACT] = 1
        with pytest.raises(BufferOverflow, match="too small or too large"):
            p.check()
        assert p.buffer.fuses
        p.run(step)  # twice
        assert not p.buffer.fuses
        assert not p.buffer.overflowed()


def test_flag_makes_a_fused_optimizer_skip():
    model = Mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = plain_step(model)
    with too_small(model) as p:
        for skipped in (True, False):
            step()
            before = model.up.weight.clone()
            optimizer.found_inf = p.buffer.overflowed().float()
            optimizer.step()
            assert torch.equal(model.up.weight, before) == skipped
            if skipped:
                p.grow()
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_buffer_follows_the_need():
    model = nn.Sequential(Mlp(), Mlp()).bfloat16()
    with torch.no_grad():
        for mlp in model:
            mlp.up.weight[8:] = 0  # at most 8 of 88 elements are positive
    step = plain_step(model, tokens=2048)
    with patched(model) as p:
        step()
        first = p.buffer.capacity_bytes
        for _ in range(3):
            step()
        used = int(p.buffer.used_bytes())
        assert used < p.buffer.capacity_bytes < 1.2 * used < first / 4
        plain_step(model, tokens=4096)()  # a larger batch is given room before it overflows
        p.check()
        assert p.buffer.capacity_bytes > 1.9 * used


def test_backward_after_a_later_forward_is_never_silent():
    model = Mlp().bfloat16()
    x = torch.randn(3, D).bfloat16()

    def use_dropped_values(end):
        with patched(model) as p:
            y = model(x)
            with torch.no_grad():
                model(x)  # stores nothing, drops nothing
            y.sum().backward(retain_graph=True)
            p.check()
            model(x)
            y.sum().backward()
            assert p.buffer.overflowed()
            end(p)

    for end in (lambda p: p.check(), lambda p: p.run(lambda: None), lambda p: None):
        with pytest.raises(RuntimeError, match="a later forward"):
            use_dropped_values(end)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [Mlp, Inlined])
def test_inside_torch_checkpoint(make, use_reentrant):
    class Outer(nn.Module):
        recompute = False

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([make(), make()])

        def forward(self, x):
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = (checkpoint(block, x, use_reentrant=use_reentrant) if self.recompute
                     else block(x))
            return x

    torch.manual_seed(0)
    model = Outer().bfloat16()
    step = plain_step(model)
    expected = gradients(model, step)
    with patched(model) as p:
        step()
        once = int(p.buffer.used_bytes())
        model.recompute = True
        assert_equal(gradients(model, step), expected)
        assert int(p.buffer.used_bytes()) == once > 0


def test_frozen_and_tied_weights():
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(), Mlp()).bfloat16()
    model[0].requires_grad_(False)
    model[2].up.weight = model[1].up.weight
    step = plain_step(model)
    expected = gradients(model, step)
    with patched(model):
        assert_equal(gradients(model, step), expected)


@pytest.mark.parametrize("make", [Mlp, Inlined])
def test_compiled(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).bfloat16()
    x = torch.randn(40, D).bfloat16()

    def step(call=model, buffer=None):
        if buffer is not None:
            buffer.reset()
        model.zero_grad(set_to_none=True)
        y = call(x)
        y.square().mean().backward()
        return y

    expected = gradients(model, step)
    buffer = ActivationBuffer(2**20, "cpu")
    patch_mlps(model, buffer)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(gradients(model, lambda: step(whole, buffer)), expected)
    assert int(buffer.used_bytes()) > 0
    unpatch(model)
    torch.compiler.reset()
    broken = torch.compile(model, backend="aot_eager")
    with patched(model) as p:
        for _ in range(3):
            assert_equal(gradients(model, lambda: p.run(lambda: step(broken))), expected)
            assert 0 < int(p.buffer.used_bytes()) <= p.buffer.capacity_bytes


# -----------------------------------------------------------------------------
# transformers

SIZES = {"vocab_size": 64, "hidden_size": D, "num_attention_heads": 2, "num_key_value_heads": 2}
FAMILIES = {
    "nemotron_h": {
        **SIZES, "intermediate_size": HIDDEN, "hybrid_override_pattern": "M-M*-E",
        "num_hidden_layers": 6, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "n_routed_experts": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
    "nemotron": {**SIZES, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    "arcee": {**SIZES, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    "nanochat": {**SIZES, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    "jais2": {**SIZES, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    "persimmon": {**SIZES, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    "opt": {**SIZES, "ffn_dim": HIDDEN, "num_hidden_layers": 2, "word_embed_proj_dim": D,
            "max_position_embeddings": 64},
}  # fmt: skip
PATCHED = {"nemotron_h": ["mixer", "mixer", "shared_experts"], "opt": ["0", "1"]}


def build(family, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def language_step(model):
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)

    def step():
        torch.manual_seed(2)  # OPT has dropout outside of its MLPs
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    return step


@pytest.fixture
def deterministic():
    """Gradients of embeddings and attention repeat, on a GPU too; what cannot only warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, device, deterministic):
    model = build(family).to(device)
    step = language_step(model)
    expected = gradients(model, step)
    with patched(model) as p:
        done = [mlp.name.split(".")[-1] for mlp in p.found if mlp.reason is None]
        assert done == PATCHED.get(family, ["mlp", "mlp"])
        assert {mlp.power for mlp in p.found if not mlp.reason} == {1 if family == "opt" else 2}
        assert_equal(gradients(model, step), expected)
        assert int(p.buffer.used_bytes()) > 0
        assert min(p.buffer.snapshot().layer_nnz) > 0
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long, device=device))
    if family == "nemotron_h":
        assert "routed experts" in report(p.found)
    assert_equal(gradients(model, step), expected)


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # 5.24 renames it
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, use_reentrant, device, deterministic):
    """What a step stores is the same with and without it, but all of it is stored in backward."""
    model = build(family).to(device)
    step = language_step(model)
    with patched(model) as p:
        step()
        once, nnz = int(p.buffer.used_bytes()), p.buffer.snapshot().layer_nnz
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    expected = gradients(model, step)
    with patched(model) as p:
        mlps = [mlp for mlp in p.found if mlp.reason is None]
        stored = []  # before each call of an MLP
        hooks = [mlp.entry.register_forward_pre_hook(
            lambda *_: stored.append(int(p.buffer.used_bytes()))) for mlp in mlps]
        assert_equal(gradients(model, step), expected)
        assert int(p.buffer.used_bytes()) == once
        # Each is called twice. Before the second call of the first to be recomputed, nothing is
        # stored, and before that of any other, something is.
        assert [bytes_ > 0 for bytes_ in stored] == (
            [False] * (len(mlps) + 1) + [True] * (len(mlps) - 1))
        assert p.buffer.snapshot().layer_nnz == nnz
        for hook in hooks:
            hook.remove()
        # Only the other blocks recomputed: the MLPs store in forward.
        for mlp in mlps:
            for block in mlp.blocks:
                block.gradient_checkpointing = False
        assert_equal(gradients(model, step), expected)
        assert int(p.buffer.used_bytes()) == once
        model(torch.zeros(1, 3, dtype=torch.long, device=device))
        assert int(p.buffer.used_bytes()) > 0


@needs_transformers
def test_bitnet_is_gated():
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(
        "bitnet", **SIZES, intermediate_size=HIDDEN, num_hidden_layers=1))
    (mlp,) = find_mlps(model)
    assert "gated" in mlp.reason


def run_script(name, *arguments):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(ROOT / "scripts" / name), *arguments],
                          capture_output=True, text=True, env=environment)


@needs_transformers
def test_command(tmp_path):
    build("nemotron_h").config.save_pretrained(tmp_path)
    result = run_script("hf_patch.py", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "2 x NemotronHMLP, first model.layers.1.mixer: patched: relu², 32 -> 88" in result.stdout
    result = run_script("hf_patch.py", str(tmp_path / "none"))
    assert result.returncode == 1
    assert "cannot build this model" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(transformers is not None, reason="transformers is installed")
def test_command_without_transformers():
    result = run_script("hf_patch.py", "nemotron_h")
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert "needs transformers (pip install 'transformers>=5.3')" in sentence


# -----------------------------------------------------------------------------
# scripts/bench_nemotron_h.py


def run_bench(tmp_path, part, *arguments):
    """The record that the bench wrote."""
    folder = tmp_path / "records" / "2026-01-02_Bench"
    result = run_script("bench_nemotron_h.py", "--part", part, "--out", str(folder), "--json",
                        str(tmp_path / "bench.json"), *arguments)
    assert result.returncode == 0, result.stderr
    assert re.search(r"loss and gradients, \d+ tensors, equal dense's in every mode, and eager's\n",
                     result.stdout)
    record = json.loads((folder / "summary.json").read_text())
    assert record == json.loads((tmp_path / "bench.json").read_text())
    assert record["command"] == shlex.join(
        ["python", "scripts/bench_nemotron_h.py", "--part", part, *arguments])
    # The table stands last, and in the page too.
    table = result.stdout.splitlines()[-len(record["rows"]) - 2:]
    assert table[0].startswith("|")
    assert "\n".join(table) in (folder / "README.md").read_text()
    update_tables.read_records(tmp_path)
    return record


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="its sizes are tiny on a CPU only")


@on_cpu
def test_bench_of_the_ffn_stack(tmp_path):
    tokens, layers, hidden = 128, 3, 336
    record = run_bench(tmp_path, "ffn", "--tokens", "128", "--layers", "3", "--density", ".2")
    held = {row["mode"]: row["bytes"] for row in record["rows"]}
    activation = 2 * tokens * hidden * layers
    assert held["eager"] - held["dense"] == held["dense"] - held["checkpoint"] == activation
    densities = record["rows"][0]["densities"]
    assert densities == pytest.approx([0.2] * layers, abs=0.03)  # of other rows than were shifted
    for codec, bits in (("raw", None), ("sign", None), ("exponent", 3.3)):  # with patches
        compressed = held[codec] - held["checkpoint"]
        expected = bits_per_element(sum(densities) / layers, codec, exponent_bits=bits)
        # The buffer's margin, and the last tile of each layer, which is filled up.
        assert compressed == pytest.approx(1.02 * expected / 16 * activation, rel=0.02, abs=768)
    sweep = record["sweep"]
    assert [(p["method"], p["layers"]) for p in sweep] == [
        (method, k) for method in ("checkpoint", "raw", "exponent") for k in range(layers + 1)]
    assert [p["bytes"] for p in sweep if p["layers"] == 0] == [held["dense"]] * 3
    assert [p["bytes"] for p in sweep if p["layers"] == layers] == [
        held[mode] for mode in ("checkpoint", "raw", "exponent")]
    assert record["measures"] == {}
    folder = tmp_path / "records" / record["name"]
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert made.keys() == {"README.md", "summary.json", "vram_time.png"}
    (folder / "README.md").unlink()
    (folder / "vram_time.png").write_bytes(b"")
    assert run_script("bench_nemotron_h.py", "--from", str(tmp_path / "bench.json"), "--out",
                      str(folder)).returncode == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made


def test_bench_stack_has_the_asked_density_in_every_layer():
    import bench_nemotron_h as bench

    torch.manual_seed(0)
    stack = bench.build_ffn_stack(8, 256, 672, 0.2, "cpu")
    densities = []
    for ffn in stack:
        ffn.up_proj.register_forward_hook(
            lambda up, args, z: densities.append((z > 0).float().mean().item()))
    bench.run_ffn_stack(stack, (torch.randn(128, 256) + 1).bfloat16())
    assert densities == pytest.approx([0.2] * 8, abs=0.02)


@on_cpu
@needs_transformers
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_bench_of_the_model(tmp_path):
    record = run_bench(tmp_path, "model", "--tokens", "32", "48", "--layers", "4")
    assert [row["tokens"] for row in record["rows"]] == [32] * 6 + [48] * 6
    last = {row["mode"]: row for row in record["rows"][-6:]}
    assert last["raw"]["slope"] < last["dense"]["slope"] < last["eager"]["slope"]
    assert record["measures"] == {
        "vram_ratio_nemotron_h": last["raw"]["slope"] / last["eager"]["slope"],
        "step_ratio_nemotron_h": last["raw"]["ms"] / last["eager"]["ms"]}
    others = run_bench(tmp_path / "others", "model", "--tokens", "32", "48", "--layers", "4",
                       "--recompute-others")
    saved = [a["bytes"] - b["bytes"] for a, b in zip(record["rows"], others["rows"], strict=True)]
    assert saved[0] > 0
    assert saved == [saved[0]] * 6 + [saved[6]] * 6  # of Mamba blocks: the same in every mode


@needs_transformers
def test_lean_mamba_computes_what_transformers_does():
    import bench_nemotron_h
    from transformers.models.nemotron_h import modeling_nemotron_h

    # float32: orders of sums differ, and nothing else.
    model = build("nemotron_h", hybrid_override_pattern="MM").float()
    step = language_step(model)
    loss, expected = gradients(model, step)
    original = modeling_nemotron_h.mamba2_split_conv1d_scan_combined
    modeling_nemotron_h.mamba2_split_conv1d_scan_combined = bench_nemotron_h.lean_mamba
    try:
        lean_loss, grads = gradients(model, step)
    finally:
        modeling_nemotron_h.mamba2_split_conv1d_scan_combined = original
    torch.testing.assert_close(lean_loss, loss, rtol=1e-6, atol=0)
    for name, grad in expected.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-4 * scale, msg=name)


def test_bench_arguments(tmp_path):
    for arguments, sentence in [
        (["--density", "1.5"], "expected 0.01 to 0.99, received 1.5"),
        (["--tokens", "many"], "expected 2 to 1.04858e+06, received many"),
        (["--part", "ffn", "--out", str(tmp_path / "name")], "a folder named YYYY-MM-DD_Name"),
        (["--part", "ffn", "--model", str(tmp_path)], "no config.json in there"),
        (["--from", str(tmp_path)], f"bench_nemotron_h.py: --from {tmp_path} cannot be read: Is a"),
        (["--from", "x", "--tokens", "9"], "--from measures nothing: leave out --tokens"),
    ]:
        result = run_script("bench_nemotron_h.py", *arguments)
        assert result.returncode != 0
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
