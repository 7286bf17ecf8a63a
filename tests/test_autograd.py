"""relu2_mlp and relu_mlp: outputs and gradients against a dense twin, bit for bit.

What:  the twin makes the same GEMM calls and every elementwise product in float32, rounded once;
       where all sums are exact in float32, plain autograd of F.linear must agree too, whose GEMM
       calls are its own. All codecs and storages; with fp8, the twin rounds r to it first. Two
       layers on one buffer, eager and compiled, without recompilation; what is read after a
       reset() dropped it, and a buffer that is gone. The norm against F.rms_norm before the MLP;
       which GEMMs are made where something is frozen; how often a checkpointed block stores.
       torch.autograd.gradcheck does not apply: it wants float64, and a difference quotient of
       bf16 results says nothing.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU.
Run:   python -m pytest tests/test_autograd.py
"""

import gc
from functools import partial

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bitsparse_kernels
from bitsparse_kernels import (
    INEXACT,
    ActivationBuffer,
    compress,
    compress_reference,
    decompress,
    dense_gradient_reference,
    mlp_backward,
    mlp_forward,
    relu2_mlp,
    relu_mlp,
)

MLPS = {1: relu_mlp, 2: relu2_mlp}
SAVES = ["bitsparse", "dense", "checkpoint"]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CODECS = ["raw", "sign", "exponent"]
FORMATS = [(codec, storage) for codec in CODECS for storage in (BF16, E4M3, E5M2)]
every_format = pytest.mark.parametrize(("codec", "storage"), FORMATS)
NAMES = ["x", "w1", "w2", "b1", "b2"]
D, HIDDEN = 48, 200  # 200 = not a multiple of 16, so that rows begin anywhere in groups and tiles


def make_inputs(batch, device="cpu", biases=True, integers=False, seed=0):
    """({x, w1, w2, b1, b2}, dy); integers: from -2 to 2, so that all sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        if integers:
            return torch.randint(-2, 3, shape, generator=generator).bfloat16().to(device)
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    inputs = {"x": make(*batch, D), "w1": make(HIDDEN, D), "w2": make(D, HIDDEN)}
    if biases:
        inputs |= {"b1": make(HIDDEN), "b2": make(D)}
    return inputs, make(*batch, D)


def rounded_to_fp8(r, storage):
    """r float32 >= 0 and finite, to the nearest fp8 value at one scale for the tensor, float32."""
    largest = torch.finfo(storage).max
    scale = r.max() * (1 / largest)  # as CUDA divides by a number
    return (r * (1 / scale)).to(storage).float() * scale


def dense_twin(inputs, dy, power, storage=BF16):
    """(y, gradients by name), with nothing left to autograd."""
    x, w1, w2, b1, b2 = (inputs.get(name) for name in NAMES)
    shape = x.shape
    x, dy = x.view(-1, D), dy.view(-1, D)
    z = linear(x, w1, b1)
    passes = ~(z <= 0)  # NaN too, as in torch.relu and its backward
    r = torch.where(passes, z, 0.0).float()
    post = (r * r if power == 2 else r).bfloat16()
    y = linear(post, w2, b2)
    if storage != BF16:  # backward alone sees the rounded one
        r = rounded_to_fp8(r, storage)
        post = (r * r if power == 2 else r).bfloat16()
    dh = (dy @ w2).float()
    dz = torch.where(passes, (dh * (2 * r) if power == 2 else dh).bfloat16(), 0.0)
    gradients = {"x": (dz @ w1).view(shape), "w1": dz.t() @ x, "w2": dy.t() @ post}
    if b1 is not None:
        gradients |= {"b1": dz.sum(0), "b2": dy.sum(0)}
    return y.view(shape), gradients


def plain_autograd(inputs, dy, power):
    """(y, gradients by name) of what one would write without this module."""
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    post = linear(leaves["x"], leaves["w1"], leaves.get("b1")).relu()
    if power == 2:
        post = post.square()
    y = linear(post, leaves["w2"], leaves.get("b2"))
    y.backward(dy)
    return y.detach(), {name: t.grad for name, t in leaves.items()}


def run_mlp(inputs, dy, power, save, **format_):
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    buffer = None
    if save == "bitsparse":
        n = inputs["x"].numel() // D * HIDDEN
        buffer = ActivationBuffer(2 * n + 4096, inputs["x"].device)
    y = MLPS[power](**leaves, buffer=buffer, save=save, **format_)
    if buffer is not None:
        assert not buffer.overflowed()
    y.backward(dy)
    return y.detach(), {name: t.grad for name, t in leaves.items()}


def assert_same(result, expected):
    (y, gradients), (expected_y, expected_gradients) = result, expected
    assert torch.equal(y, expected_y)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient, expected_gradients[name]), name


# -----------------------------------------------------------------------------
# One layer


# no batch axis; one token; less than a tile; several tiles and a ragged end, in two axes
@pytest.mark.parametrize("batch", [(), (1,), (7,), (3, 37)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("power", [1, 2])
def test_equals_dense_twin(batch, device, biases, save, power):
    inputs, dy = make_inputs(batch, device, biases)
    expected = dense_twin(inputs, dy, power)
    assert all(t.any() for t in expected[1].values())  # zeros would agree with anything
    assert_same(run_mlp(inputs, dy, power, save), expected)


@pytest.mark.parametrize("batch", [(1,), (3, 37)])  # less than a tile; several and a ragged end
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [1, 2])
@every_format
def test_equals_dense_twin_in_every_format(batch, device, power, codec, storage):
    inputs, dy = make_inputs(batch, device)
    result = run_mlp(inputs, dy, power, "bitsparse", codec=codec, storage=storage)
    assert_same(result, dense_twin(inputs, dy, power, storage))


@pytest.mark.parametrize("device", DEVICES)
@every_format
def test_backward_sees_what_decompress_gives(device, codec, storage):
    """With integers whose products are exact, in every format: dw2 of dy = identity is post."""
    r = torch.arange(1, 16, device=device).bfloat16()
    x = torch.eye(15, device=device).bfloat16()
    w1 = (r[:, None] * x - x.roll(1, 0)).contiguous().requires_grad_()
    w2 = torch.zeros(15, 15, device=device).bfloat16().requires_grad_()
    buffer = ActivationBuffer(2**12, device)
    y = relu_mlp(x, w1, w2, buffer=buffer, codec=codec, storage=storage)
    (dw2,) = torch.autograd.grad(y, [w2], x)
    buffer.reset()
    z = linear(x, w1).detach()
    assert torch.equal(dw2, decompress(compress(z, buffer, codec, storage)))


@pytest.fixture
def float32_sums():
    """A GPU's GEMMs may otherwise round partial sums to bf16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.usefixtures("float32_sums")
def test_equals_plain_autograd_where_sums_are_exact(device, biases, save, power):
    """Whatever the order of its sums, a GEMM over small integers is rounded once, to bf16."""
    inputs, dy = make_inputs((3, 37), device, biases, integers=True)
    assert_same(run_mlp(inputs, dy, power, save), plain_autograd(inputs, dy, power))


@pytest.mark.parametrize("batch", [(), (7,), (3, 37)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("power", [1, 2])
def test_norm(batch, device, weight, save, power):
    """As F.rms_norm and the MLP behind it, by autograd."""
    inputs, dy = make_inputs(batch, device)
    inputs["x"] *= 3  # so that the norm does something
    norm_weight = make_inputs((), device, seed=1)[0]["x"] if weight else None  # [D]
    results = []
    for fused in (True, False):
        leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        trained = list(leaves.values())
        scale = None
        if weight:
            scale = norm_weight.clone().requires_grad_()
            trained.append(scale)
        buffer = ActivationBuffer(2**16, device)
        options = {"buffer": buffer, "save": save}
        if fused:
            y = MLPS[power](**leaves, **options, norm_eps=1e-3, norm_weight=scale)
        else:
            x = torch.nn.functional.rms_norm(leaves.pop("x"), (D,), scale, 1e-3)
            y = MLPS[power](x, **leaves, **options)
        results.append([y, *torch.autograd.grad(y, trained, dy)])
    for fused, apart in zip(*results, strict=True):
        assert apart.any()
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("device", DEVICES)
def test_norm_of_no_tokens(device):
    inputs, dy = make_inputs((0,), device)
    leaves = [t.requires_grad_() for t in (*inputs.values(), torch.ones_like(inputs["b2"]))]
    *arguments, norm_weight = leaves
    y = relu2_mlp(*arguments, save="dense", norm_eps=1e-6, norm_weight=norm_weight)
    for gradient, t in zip(torch.autograd.grad(y, leaves, dy), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))


WAYS = [("dense", "raw", BF16), ("checkpoint", "raw", BF16), *(("bitsparse", *f) for f in FORMATS)]
every_way = pytest.mark.parametrize(("save", "codec", "storage"), WAYS)


@pytest.mark.parametrize("device", DEVICES)
@every_way
@pytest.mark.parametrize("power", [1, 2])
def test_no_tokens(device, save, codec, storage, power):
    inputs, dy = make_inputs((0,), device)
    y, gradients = run_mlp(inputs, dy, power, save, codec=codec, storage=storage)
    assert y.shape == (0, D)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, torch.zeros_like(inputs[name]))


@pytest.mark.parametrize("device", DEVICES)
@every_way
@pytest.mark.parametrize("power", [1, 2])
def test_width_of_zero(device, save, codec, storage, power):
    """d = 0: z is b1 alone, y has no elements, and no gradient comes back."""
    inputs = {"x": (5, 0), "w1": (HIDDEN, 0), "w2": (0, HIDDEN), "b1": (HIDDEN,), "b2": (0,)}
    inputs = {name: torch.ones(shape).bfloat16().to(device) for name, shape in inputs.items()}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    buffer = ActivationBuffer(2**15, device)
    options = {"buffer": buffer, "save": save, "codec": codec, "storage": storage}
    y = MLPS[power](**leaves, **options)
    assert y.shape == (5, 0)
    assert buffer.snapshot().layer_nnz == [5 * HIDDEN if save == "bitsparse" else 0]
    y = MLPS[power](**leaves, **options)
    gradients = torch.autograd.grad(y, leaves.values(), torch.zeros_like(y))
    for gradient, t in zip(gradients, leaves.values(), strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))


@pytest.mark.parametrize("device", DEVICES)
@every_way
@pytest.mark.parametrize("power", [1, 2])
def test_nothing_is_stored_where_nothing_requires_grad(device, save, codec, storage, power):
    """With gradients enabled, but for frozen weights and an input without one."""
    inputs, dy = make_inputs((37,), device)
    buffer = ActivationBuffer(2**16, device)
    buffer.arena.fill_(0xA5)
    y = MLPS[power](**inputs, buffer=buffer, save=save, codec=codec, storage=storage)
    assert not y.requires_grad
    assert torch.equal(y, dense_twin(inputs, dy, power)[0])
    assert not buffer.state.any()
    assert not buffer.counters.any()
    assert (buffer.arena == 0xA5).all()


# each alone, and the GEMMs that its gradient takes; weights frozen as in fine-tuning of biases;
# inputs without a gradient (first layer); a norm's weight alone
FROZEN = {
    ("x",): 2,  # dh and dx
    ("w1",): 2,  # dh and dw1
    ("w2",): 1,
    ("b1",): 1,  # dh
    ("b2",): 0,
    ("b1", "b2"): 1,
    ("w1", "w2"): 3,
    ("x", "w2"): 3,
    ("norm_weight",): 2,  # dh and dx
    ("norm_weight", "w1"): 3,
    ("x", "w1", "w2", "b1", "b2", "norm_weight"): 4,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("trained", "norm"),
    [(t, False) for t in FROZEN if "norm_weight" not in t] + [(t, True) for t in FROZEN],
)
def test_frozen_inputs(device, save, trained, norm):
    """The same gradients as without anything frozen, and no GEMM for those that nobody takes."""
    inputs, dy = make_inputs((37,), device)
    options = {"save": save, "buffer": ActivationBuffer(2**20, device)}
    if norm:
        inputs["norm_weight"] = torch.linspace(0.5, 2, D, device=device).bfloat16()
        options["norm_eps"] = 1e-6

    def run(names):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in inputs.items()}
        y = relu2_mlp(**leaves, **options)
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu]) as profile:
            y.backward(dy)
        counts = {event.key: event.count for event in profile.key_averages()}
        gemms = counts.get("aten::mm", 0) + counts.get("aten::addmm", 0)
        gradients = {name: t.grad for name, t in leaves.items() if t.grad is not None}
        return y, gradients, gemms

    y, expected, _ = run(inputs)
    y_, gradients, gemms = run(trained)
    assert torch.equal(y_, y)
    assert gradients.keys() == set(trained) & inputs.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    again = save == "checkpoint" and trained != ("b2",)  # z once more
    assert gemms == FROZEN[trained] + again


@pytest.fixture
def fused(monkeypatch):
    """One kernel stands for the first GEMM and the activation: of each call, power and checked.

    And another for dh and dz: "gradient", power, in place. By torch, on a CPU; the kernels
    themselves are in test_kernels.py.
    """
    calls = []

    def linear_activate(x, w1, power, state=None):
        calls.append((power, state is not None))
        r = linear(x, w1).relu()
        if state is not None:
            state[INEXACT] |= ((r != 0) & ~((r >= 2.0**-63) & (r < 2.0**64))).any()
        return r.float().pow(power).bfloat16()

    def compress(post, buffer, power, codec, storage, layer, from_post):
        assert power == 0
        r = post.float().sqrt().bfloat16() if from_post else post
        return compress_reference(r, buffer, 0, codec, storage, layer)

    def linear_gradient(dy, w2, post, power, out=None):
        calls.append(("gradient", power, out is post))
        dz = dy @ w2
        dense_gradient_reference(dz, post, power, from_post=True)
        return dz if out is None else out.copy_(dz)

    for name in ("_may_fuse", "_may_fuse_gradient"):
        monkeypatch.setattr(bitsparse_kernels, name, lambda *arguments: True)
    monkeypatch.setattr(bitsparse_kernels, "linear_gradient_triton", linear_gradient)
    monkeypatch.setattr(bitsparse_kernels, "_may_compress_post", lambda buffer, storage: (
        buffer.fuses and storage == BF16))
    monkeypatch.setattr(bitsparse_kernels, "linear_activate_triton", linear_activate)
    monkeypatch.setattr(bitsparse_kernels, "compress_triton", compress)
    return calls


@every_way
@pytest.mark.parametrize("power", [1, 2])
def test_what_may_fuse(fused, save, codec, storage, power):
    inputs, dy = make_inputs((3, 37), biases=False)
    y, gradients = run_mlp(inputs, dy, power, save, codec=codec, storage=storage)
    calls, expected = fused[:], dense_twin(inputs, dy, power, storage)
    assert_same((y, gradients), expected)
    from_post = save == "bitsparse" and power == 2
    fuses = save != "checkpoint" and not (from_post and storage != BF16)
    gradient_fuses = save != "checkpoint" and storage == BF16
    assert calls == ([(power, from_post)] * fuses
                     + [("gradient", power, save == "bitsparse")] * gradient_fuses)


def test_what_was_not_checked_keeps_its_gradient_apart(fused):
    inputs, dy = make_inputs((37,), biases=False)
    inputs["x"][3] *= 2.0**-70
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    expected = dense_twin(inputs, dy, 2)
    buffer = ActivationBuffer(2**20, "cpu")
    buffer.fuses = False
    y = relu2_mlp(**leaves, buffer=buffer)
    buffer.fuses = True
    relu_mlp(**leaves, buffer=buffer).backward(dy)  # whose gradient takes no roots
    assert fused == [(1, False), ("gradient", 1, True)]
    gradients = torch.autograd.grad(y, leaves.values(), dy)
    assert_same((y, dict(zip(leaves, gradients, strict=True))), expected)
    relu2_mlp(**leaves, buffer=buffer).backward(dy)
    assert fused[2:] == [(2, True)]  # the buffer does not know which of the two was checked
    buffer.reset()
    relu2_mlp(**leaves, buffer=buffer).backward(dy)
    assert fused[3:] == [(2, True), ("gradient", 2, True)]


@pytest.mark.parametrize("told", [True, False])
def test_inexact_roots_void_a_step_that_then_is_exact(fused, told):
    """told: whether the host has read the snapshot, or knows of overflowed() alone."""
    inputs, dy = make_inputs((37,), biases=False)
    inputs["x"][3] *= 2.0**-70
    buffer = ActivationBuffer(2**20, "cpu")
    expected_y, expected = dense_twin(inputs, dy, 2)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    for _ in range(1 if told else 2):
        assert torch.equal(relu2_mlp(**leaves, buffer=buffer), expected_y)
        assert buffer.overflowed()
        buffer.reset()
        assert buffer.overflowed()  # until resize()
        assert len(fused) == 1
        if told:
            snapshot = buffer.snapshot()
            assert snapshot.overflowed
            assert snapshot.inexact
            assert snapshot.needed_bytes <= snapshot.capacity_bytes
            buffer.fuses = False
        buffer.resize(2**20)
        assert not buffer.fuses
    assert not buffer.overflowed()
    y = relu2_mlp(**leaves, buffer=buffer)
    gradients = torch.autograd.grad(y, leaves.values(), dy)
    assert_same((y, dict(zip(leaves, gradients, strict=True))), (expected_y, expected))
    assert len(fused) == 1
    assert not buffer.snapshot().overflowed


@every_way
@pytest.mark.parametrize("power", [1, 2])
def test_special_activations(save, codec, storage, power):
    """NaN, infinities and 2^-100 in z have the effect that they have densely.

    Not a subnormal: the GEMM that makes z may flush it. test_format.py stores those.
    """
    if (save, power) == ("dense", 2):
        pytest.skip("the square of 2^-100 is 0: the documented difference of save='dense'")
    inputs, dy = make_inputs((37,))
    inputs["b1"][:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0**-100])
    inputs["w1"][3] = 0  # so that z[:, 3] is 2^-100
    y, gradients = run_mlp(inputs, dy, power, save, codec=codec, storage=storage)
    expected_y, expected = dense_twin(inputs, dy, power)
    assert y.isnan().all()
    assert expected_y.isnan().all()
    if storage != BF16:
        # Of every hidden unit, what b1's gradient says. 2^-100 is rounded to 0, NaN stays NaN, inf
        # is no number any more where fp8 has none; and no other unit is touched by them.
        found, dense = gradients["b1"], expected["b1"]
        assert found[0].isnan() == (power == 2)
        assert found[1].isfinite() == (power == 1)
        assert found[2] == 0
        assert (found[3] == 0) == (power == 2)
        assert found[4:].isfinite().all()
        assert not gradients["w2"][:, :2].isfinite().any()  # in post both are there
        if power == 1:  # the mask alone counts there, and it is that of z
            assert torch.equal(found, dense)
        return
    for name, gradient in gradients.items():
        nan = gradient.isnan()
        assert torch.equal(nan, expected[name].isnan())
        assert torch.equal(gradient.masked_fill(nan, 0), expected[name].masked_fill(nan, 0))
    assert gradients["b1"][2] == 0  # of -inf
    assert gradients["b1"][3] != 0  # of 2^-100
    assert gradients["b1"][0].isnan() == (power == 2)  # of NaN: dh * 2 NaN, or dh


def test_backward_twice():
    inputs, dy = make_inputs((37,))
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    buffer = ActivationBuffer(2**20, "cpu")
    y = relu2_mlp(**leaves, buffer=buffer)
    first = torch.autograd.grad(y, leaves.values(), dy, retain_graph=True)
    before = buffer.state.clone(), buffer.counters.clone()
    second = torch.autograd.grad(y, leaves.values(), dy, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for now, then in zip((buffer.state, buffer.counters), before, strict=True):
        assert torch.equal(now, then)  # backward only reads
    other = torch.autograd.grad(y, leaves.values(), -dy)
    assert all(torch.equal(a, -b) for a, b in zip(first, other, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, leaves.values(), dy)


def test_expanded_gradient():
    """y.sum() hands over one number with strides of 0."""
    inputs, _ = make_inputs((37,))
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    buffer = ActivationBuffer(2**20, "cpu")
    relu2_mlp(**leaves, buffer=buffer).sum().backward()
    gradients = {name: t.grad for name, t in leaves.items()}
    y, expected = dense_twin(inputs, torch.ones_like(inputs["x"]), 2)
    assert_same((y, gradients), (y, expected))


def test_inputs_are_left_alone():
    inputs, dy = make_inputs((37,))
    before = {name: t.clone() for name, t in inputs.items()}
    dy_before = dy.clone()
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    buffer = ActivationBuffer(2**20, "cpu")
    relu2_mlp(**leaves, buffer=buffer).backward(dy)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert torch.equal(dy, dy_before)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("power", [1, 2])
def test_no_grad_stores_nothing(context, power):
    inputs, dy = make_inputs((37,))
    buffer = ActivationBuffer(2**16, "cpu")
    buffer.arena.fill_(0xA5)
    buffer.state.copy_(torch.arange(len(buffer.state)))  # left as it is, whatever it is
    buffer.counters.fill_(7)
    with context():
        y = MLPS[power](**inputs, buffer=buffer)
    assert torch.equal(y, dense_twin(inputs, dy, power)[0])
    assert (buffer.arena == 0xA5).all()
    assert torch.equal(buffer.state, torch.arange(len(buffer.state)))
    assert (buffer.counters == 7).all()


@pytest.mark.parametrize("norm", [{}, {"norm_eps": 1e-6}])
def test_what_is_held_for_backward(norm):
    """Bytes from forward to backward, beside x and the weights."""
    inputs, _ = make_inputs((4, 2048), biases=False)
    n = 4 * 2048 * HIDDEN
    buffer = ActivationBuffer(2 * n, "cpu")
    held = {}
    for save, codec, storage in WAYS:
        saved = []
        leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        own = {t.untyped_storage().data_ptr() for t in leaves.values()}

        def pack(t, saved=saved):
            saved.append(t)
            return t

        options = {"buffer": buffer, "save": save, "codec": codec, "storage": storage}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            relu2_mlp(**leaves, **options, **norm)
        held[save, codec, storage] = sum(
            t.nbytes for t in saved if t.untyped_storage().data_ptr() not in own
        )
    tiles = n // 2048
    for (save, _, storage), size in held.items():
        size -= 4 * 4 * 2048 * len(norm)  # a float32 a token
        if save == "bitsparse":  # masks, heads and the generation; and fp8's scale
            assert size == tiles * (256 + 8) + 8 + 4 * (storage != BF16)
        else:
            assert size == {"dense": 2 * n, "checkpoint": 0}[save]


# -----------------------------------------------------------------------------
# Two layers on one buffer


def two_layer_inputs(device, seed=0):
    first, dy = make_inputs((61,), device, seed=seed)
    second, _ = make_inputs((61,), device, seed=seed + 1)
    second = {name: t * 0.1 for name, t in second.items()}
    return first["x"], [{k: v for k, v in p.items() if k != "x"} for p in (first, second)], dy


def two_layers(x, layers, buffer, codec="raw", storage=BF16):
    for i, parameters in enumerate(layers):
        x = relu2_mlp(x, **parameters, buffer=buffer, layer=i, codec=codec, storage=storage)
    return x


def two_normed_layers(x, layers, buffer):
    for i, parameters in enumerate(layers):
        x = x + relu2_mlp(x, **parameters, buffer=buffer, layer=i, norm_eps=1e-6)
    return x


def step(model, x, layers, dy, buffer, *format_):
    """[y, dx, every parameter's gradient] of one step of model."""
    x = x.clone().requires_grad_()
    layers = [{name: t.clone().requires_grad_() for name, t in p.items()} for p in layers]
    buffer.reset()
    y = model(x, layers, buffer, *format_)
    leaves = [x, *(t for p in layers for t in p.values())]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def two_layer_twin(x, layers, dy, storage=BF16):
    x1, _ = dense_twin({"x": x} | layers[0], dy, 2, storage)
    y, second = dense_twin({"x": x1} | layers[1], dy, 2, storage)
    _, first = dense_twin({"x": x} | layers[0], second["x"], 2, storage)
    order = ["w1", "w2", "b1", "b2"]
    return [y, first["x"], *(first[k] for k in order), *(second[k] for k in order)]


def assert_all_equal(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@every_format
def test_two_layers_on_one_buffer(device, codec, storage):
    x, layers, dy = two_layer_inputs(device)
    buffer = ActivationBuffer(2**20, device, layers=2)
    results = step(two_layers, x, layers, dy, buffer, codec, storage)
    assert_all_equal(results, two_layer_twin(x, layers, dy, storage))
    x1 = linear(x, layers[0]["w1"], layers[0]["b1"])
    nnz = buffer.snapshot().layer_nnz
    assert nnz[0] == int((x1 > 0).sum())
    assert nnz[1] > 0


# "aot_eager": the tracing of inductor without its C++ compiler, which a machine may lack
BACKENDS = [
    ("cpu", "aot_eager"),
    pytest.param("cuda", "inductor", marks=[pytest.mark.gpu, on_gpu]),
]


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_without_graph_break_or_recompilation(device, backend):
    """fullgraph refuses graph breaks; the stance refuses a second compilation over all of this:
    steps with other values, resize to more and to less, overflow, eager use in between.
    """
    torch._dynamo.reset()
    model = torch.compile(two_layers, backend=backend, fullgraph=True)
    buffer = ActivationBuffer(2**20, device, layers=2)
    arguments = two_layer_inputs(device)
    first = step(model, *arguments, buffer)
    assert_all_equal(first, two_layer_twin(*arguments))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (1, 2, 3):
            arguments = two_layer_inputs(device, seed)
            assert_all_equal(step(model, *arguments, buffer), two_layer_twin(*arguments))
        needed = buffer.snapshot().needed_bytes
        for capacity in (2**21, 0, needed):
            buffer.resize(capacity)
            results = step(model, *arguments, buffer)
            assert bool(buffer.overflowed()) == (capacity == 0)
            assert torch.equal(results[0], two_layer_twin(*arguments)[0])  # overflow or not
            if capacity:
                assert_all_equal(results, two_layer_twin(*arguments))
        assert_all_equal(step(two_layers, *arguments, buffer), two_layer_twin(*arguments))
        assert_all_equal(step(model, *arguments, buffer), two_layer_twin(*arguments))
    torch._dynamo.reset()


def test_the_stance_notices_a_recompilation():
    """Else the test above would say nothing: another shape must fail under it."""
    torch._dynamo.reset()
    model = torch.compile(two_layers, backend="aot_eager", fullgraph=True, dynamic=False)
    buffer = ActivationBuffer(2**20, "cpu", layers=2)
    x, layers, dy = two_layer_inputs("cpu")
    step(model, x, layers, dy, buffer)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompil"),
    ):
        step(model, x[:50], layers, dy[:50], buffer)
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@every_format
def test_compiled_in_every_format(device, backend, codec, storage):
    torch._dynamo.reset()
    model = torch.compile(two_layers, backend=backend, fullgraph=True)
    buffer = ActivationBuffer(2**20, device, layers=2)
    arguments = two_layer_inputs(device)
    results = step(model, *arguments, buffer, codec, storage)
    assert_all_equal(results, two_layer_twin(*arguments, storage))
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_with_frozen_parameters(device, backend):
    torch._dynamo.reset()
    x, layers, dy = two_layer_inputs(device)
    _, dx, *expected = two_layer_twin(x, layers, dy)
    frozen = [0, 3, 5]  # w1 and b2 of the first layer, w2 of the second
    flat = [t.clone().requires_grad_(i not in frozen)
            for i, t in enumerate(t for p in layers for t in p.values())]
    names = list(layers[0])
    layers = [dict(zip(names, flat[at : at + 4], strict=True)) for at in (0, 4)]
    buffer = ActivationBuffer(2**20, device, layers=2)
    model = torch.compile(two_layers, backend=backend, fullgraph=True)
    model(x, layers, buffer).backward(dy)
    for i, t in enumerate(flat):
        assert t.grad is None if i in frozen else torch.equal(t.grad, expected[i])
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_norm(device, backend):
    """A residual stream: x is held by it anyway. One layer's norm has a weight."""
    torch._dynamo.reset()
    x, layers, dy = two_layer_inputs(device)
    layers[1]["norm_weight"] = torch.linspace(0.5, 2, D, device=device).bfloat16()
    buffer = ActivationBuffer(2**20, device, layers=2)
    eager = step(two_normed_layers, x, layers, dy, buffer)
    model = torch.compile(two_normed_layers, backend=backend, fullgraph=True)
    assert_all_equal(step(model, x, layers, dy, buffer), eager)
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize("later_forward", [False, True])  # only a reset; or all of another forward
def test_compiled_backward_after_reset(device, backend, later_forward):
    torch._dynamo.reset()
    model = torch.compile(two_layers, backend=backend, fullgraph=True)
    buffer = ActivationBuffer(2**20, device, layers=2)
    x, layers, dy = two_layer_inputs(device)
    x.requires_grad_()
    y = model(x, layers, buffer)
    buffer.reset()
    if later_forward:
        later = model(x, layers, buffer)
    assert not buffer.overflowed()
    (dx,) = torch.autograd.grad(y, [x], dy)
    assert not dx.any()
    assert buffer.overflowed()
    if later_forward:  # which is fresh, and whose gradients are right; yet the flag stays
        (dx,) = torch.autograd.grad(later, [x], dy)
        assert torch.equal(dx, two_layer_twin(x.detach(), layers, dy)[1])
    assert buffer.overflowed()
    snapshot = buffer.snapshot()
    assert snapshot.stale
    assert not snapshot.overflowed
    assert_all_equal(step(model, x.detach(), layers, dy, buffer),
                     two_layer_twin(x.detach(), layers, dy))
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_two_models_with_one_reset_each(device, backend):
    """The model whose contents the other's reset dropped gets zeros, and the flag says so."""
    torch._dynamo.reset()
    buffer = ActivationBuffer(2**20, device, layers=2)
    outputs = []
    for seed in (0, 5):
        x, layers, dy = two_layer_inputs(device, seed)
        model = torch.compile(two_layers, backend=backend, fullgraph=True)
        buffer.reset()
        x.requires_grad_()
        outputs.append((model(x, layers, buffer), x, layers, dy))
    y, x, layers, dy = outputs[1]
    (dx,) = torch.autograd.grad(y, [x], dy)
    assert torch.equal(dx, two_layer_twin(x.detach(), layers, dy)[1])
    assert not buffer.overflowed()
    y, x, _, dy = outputs[0]
    (dx,) = torch.autograd.grad(y, [x], dy)
    assert not dx.any()
    assert buffer.overflowed()
    torch._dynamo.reset()


@pytest.mark.parametrize("method", ["reset", "snapshot", "resize"])
def test_the_compiler_refuses_what_counts_in_between(method):
    """Inside a compiled function it could not be ordered with the operators, which it sees not."""
    torch._dynamo.reset()
    buffer = ActivationBuffer(2**20, "cpu", layers=2)
    x, layers, _ = two_layer_inputs("cpu")

    def forward(x, layers):
        getattr(buffer, method)(*([2**20] if method == "resize" else []))
        return two_layers(x, layers, buffer)

    model = torch.compile(forward, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        model(x, layers)
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_backward_of_a_dropped_buffer(device, backend):
    torch._dynamo.reset()
    x, layers, dy = two_layer_inputs(device)
    x.requires_grad_()
    buffer = ActivationBuffer(2**20, device, layers=2)
    number = buffer.number
    y = torch.compile(two_layers, backend=backend, fullgraph=True)(x, layers, buffer)
    del buffer
    gc.collect()
    with pytest.raises(RuntimeError, match=f"activation buffer {number} is gone: keep"):
        torch.autograd.grad(y, [x], dy)
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_no_grad_stores_nothing(device, backend):
    torch._dynamo.reset()
    x, layers, _ = two_layer_inputs(device)
    buffer = ActivationBuffer(2**20, device, layers=2)
    model = torch.compile(two_layers, backend=backend, fullgraph=True)
    with torch.no_grad():
        y = model(x, layers, buffer)
    assert not buffer.state.any()
    assert not buffer.counters.any()
    assert torch.equal(y, two_layers(x, layers, buffer))
    torch._dynamo.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_with_a_changing_number_of_tokens(device, backend):
    """Dynamic shapes, as a compiler turns to when it sees a second one."""
    torch._dynamo.reset()
    model = torch.compile(two_layers, backend=backend, fullgraph=True, dynamic=True)
    buffer = ActivationBuffer(2**20, device, layers=2)
    x, layers, dy = two_layer_inputs(device)
    for tokens in (61, 41, 11):
        arguments = x[:tokens], layers, dy[:tokens]
        assert_all_equal(step(model, *arguments, buffer), two_layer_twin(*arguments))
    torch._dynamo.reset()


# -----------------------------------------------------------------------------
# Activation checkpointing


def blocks(x, layers, buffer, codec, storage, wrap):
    """Two residual blocks, each of them called by wrap(block, x)."""
    for i, parameters in enumerate(layers):
        def block(x, i=i, parameters=parameters):
            options = {"buffer": buffer, "codec": codec, "storage": storage, "layer": i}
            return x + relu2_mlp(x * 0.5, **parameters, **options, norm_eps=1e-6)

        x = wrap(block, x)
    return x


def call(block, x):
    return block(x)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False)


def selective(block, x):
    policy = [torch.ops.bitsparse.mlp_forward.default]
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def selective_of_others(block, x):
    """The operator is called twice."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def with_hooks_of_its_own(block, x):
    """They keep what the first pass saves, instead of checkpoint's, and nothing is dropped."""

    def hooked(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return block(x)

    return not_reentrant(hooked, x)


def checkpointed_step(device, codec, storage, wrap, model=blocks):
    """(bytes stored in forward, in all; values by layer; [y, dx, every parameter's gradient])."""
    x, layers, dy = two_layer_inputs(device)
    buffer = ActivationBuffer(2**20, device, layers=2)
    leaves = [x, *(t for p in layers for t in p.values())]
    for t in leaves:
        t.requires_grad_()
    y = model(x, layers, buffer, codec, storage, wrap)
    forward = int(buffer.used_bytes())
    y.backward(dy)  # not autograd.grad, which reentrant checkpointing does not support
    used = int(buffer.used_bytes())
    assert not buffer.overflowed()
    return forward, used, buffer.snapshot().layer_nnz, [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("codec", "storage"), [("raw", BF16), ("exponent", E4M3)])
@pytest.mark.parametrize(
    ("wrap", "in_forward", "in_all"),
    [
        (reentrant, 0, 1),
        (not_reentrant, 0, 1),
        (nested, 0, 1),
        (selective, 1, 1),
        (selective_of_others, 1, 2),
        (with_hooks_of_its_own, 1, 1),
    ],
)
def test_checkpointed(device, codec, storage, wrap, in_forward, in_all):
    """in_forward, in_all: how many times what a step without checkpointing stores is stored."""
    _, used, nnz, expected = checkpointed_step(device, codec, storage, call)
    assert used > 0
    forward_, used_, nnz_, results = checkpointed_step(device, codec, storage, wrap)
    assert (forward_, used_) == (in_forward * used, in_all * used)
    assert nnz_ == [in_all * count for count in nnz]
    assert_all_equal(results, expected)


def test_checkpoint_with_hooks_of_another_name(monkeypatch):
    """As in a later torch: stored in both passes, and right."""
    _, used, _, expected = checkpointed_step("cpu", "raw", BF16, call)
    top = "_top_saved_tensors_default_hooks"
    monkeypatch.setattr(torch._C._autograd, top, lambda ignore_is_tracing: (call, call))
    forward_, used_, _, results = checkpointed_step("cpu", "raw", BF16, not_reentrant)
    assert (forward_, used_) == (used, 2 * used)
    assert_all_equal(results, expected)


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize(("wrap", "in_all"), [(selective, 1), (not_reentrant, 2)])
def test_compiled_checkpointed(device, backend, wrap, in_all):
    torch._dynamo.reset()
    _, used, nnz, expected = checkpointed_step(device, "raw", BF16, call)
    model = torch.compile(blocks, backend=backend, fullgraph=True)
    forward_, used_, nnz_, results = checkpointed_step(device, "raw", BF16, wrap, model)
    assert (forward_, used_) == (used, in_all * used)
    assert nnz_ == [in_all * count for count in nnz]
    assert_all_equal(results, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", [BF16, E4M3])
def test_what_was_not_stored_is_not_read(device, storage):
    """Should a first pass's mask and heads be used after all, the buffer says so."""
    inputs, dy = make_inputs((37,), device)
    buffer = ActivationBuffer(2**20, device)
    options = (None, 2, "bitsparse", "raw", storage, buffer.number, 0)
    _, *saved = mlp_forward(*inputs.values(), None, *options, False)
    assert not buffer.state.any()
    assert not buffer.counters.any()
    x, w1, w2, b1, _ = inputs.values()
    mlp_backward(dy, x, w1, w2, b1, None, saved, *options, [True] * 5 + [False])
    assert buffer.overflowed()
    assert buffer.snapshot().stale


# -----------------------------------------------------------------------------
# The operators themselves


def opcheck_tests(save):
    """All of torch.library.opcheck; but "bitsparse" returns heads that begin where the last call
    ended, so that two runs, which the last check compares, differ by design.
    """
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    return tests if save == "bitsparse" else [*tests, "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@every_way
def test_opcheck(device, biases, norm, save, codec, storage):
    inputs, dy = make_inputs((37,), device, biases)
    buffer = ActivationBuffer(2**20, device)
    x, w1, w2, b1, b2 = (
        inputs[name].requires_grad_() if name in inputs else None for name in NAMES
    )
    norm_eps, norm_weight = (1e-6, torch.ones_like(x[0]).requires_grad_()) if norm else (None, None)
    options = (norm_eps, 2, save, codec, storage, buffer.number, 0)
    arguments = (x, w1, w2, b1, b2, norm_weight, *options, False)
    torch.library.opcheck(mlp_forward, arguments, test_utils=opcheck_tests(save))
    arguments = (*arguments[:-1], True)
    torch.library.opcheck(mlp_forward, arguments, test_utils=opcheck_tests(save))
    _, *saved = mlp_forward(*arguments)
    # An operator without an autograd formula of its own: no input may ask for a gradient.
    arguments = [
        [s.detach() for s in t] if isinstance(t, list) else t if t is None else t.detach()
        for t in (dy, x, w1, w2, b1, norm_weight, saved)
    ]
    arguments += options
    needs = [t is not None for t in (x, w1, w2, b1, b2, norm_weight)]
    arguments.append(needs)
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(mlp_backward, arguments, test_utils=tests)
    arguments[-1] = [False, *needs[1:]]
    torch.library.opcheck(mlp_backward, arguments, test_utils=tests)
