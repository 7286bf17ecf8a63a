"""The parts of train_gpt.py's model, optimizers and schedules, each against a plain definition.

What:  attention masks and the block lists of FlexAttention, element by element; the rotation; the
       loss head and its gradients against float64, with bf16 and with fp8; Muon and Adam against
       float64; the schedules' corners. On a GPU: FlexAttention against the CPU's attention, the
       loss kernel against float64, the fp8 head against the CPU's, and a whole forward and backward
       in a CUDA graph.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU.
Run:   python -m pytest tests/test_model.py
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from bitsparse_kernels import ActivationBuffer
from train_gpt import (
    BLOCK,
    BOS,
    GPT,
    MIB,
    VOCAB,
    Adam,
    Attention,
    Config,
    Muon,
    Ranks,
    TableGradient,
    attention_mask,
    buffer_capacity,
    first_capacity,
    head_loss,
    head_operands,
    heads,
    heads_reference,
    lr_factor,
    muon_beta,
    orthogonalize,
    rotate,
    softcapped_loss_,
    window_blocks,
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # what @compiled functions are made for


@pytest.fixture(autouse=True)
def _compile_anew():
    """The compiler refuses a function after 8 shapes, of which the tests together have more."""
    torch.compiler.reset()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(x, expected):
    """Frobenius norm of the difference, as a fraction of that of what is expected."""
    return float((x.double() - expected).norm() / expected.norm())


# -----------------------------------------------------------------------------
# Attention

# Where documents begin among 5 blocks of tokens: nowhere; everywhere; at block borders and beside
# them; one document over several blocks
DOCUMENTS = {
    "none": [],
    "one": [0],
    "borders": [0, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK - 1],
    "long": [5, 7, 60, 4 * BLOCK + 3],
    "every token": range(5 * BLOCK),
}


def make_tokens(starts):
    tokens = torch.arange(5 * BLOCK, dtype=torch.int32)
    tokens[list(starts)] = BOS
    return tokens


def dense_mask(tokens, window):
    """The rule of attention_mask, for all pairs [queries, keys]."""
    q, k = np.indices((len(tokens), len(tokens)))
    document = np.cumsum(tokens.numpy() == BOS)
    same = document[q] == document[k]
    return torch.from_numpy((k <= q) & same & (q // BLOCK - k // BLOCK < window))


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU, so that FlexAttention's mask is made here."""

    is_cuda = True


# only the own block; two; more than there are
@pytest.mark.parametrize("window", [1, 2, 9])
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS)
def test_attention_masks(starts, window):
    tokens = make_tokens(starts)
    expected = dense_mask(tokens, window)
    blocks = torch.tensor(window, dtype=torch.int32)
    assert torch.equal(attention_mask(tokens, blocks), expected)

    mask = attention_mask(tokens.as_subclass(OnGPU), blocks)
    assert mask.BLOCK_SIZE == (BLOCK, BLOCK)
    found = torch.zeros_like(expected)
    computed = set()
    for count, columns, whole in ((mask.kv_num_blocks, mask.kv_indices, False),
                                  (mask.full_kv_num_blocks, mask.full_kv_indices, True)):
        for row in range(5):
            for column in columns[0, 0, row, : count[0, 0, row]].tolist():
                assert (row, column) not in computed
                computed.add((row, column))
                q = torch.arange(row * BLOCK, (row + 1) * BLOCK)[:, None]
                k = torch.arange(column * BLOCK, (column + 1) * BLOCK)
                found[q, k] = True if whole else mask.mask_mod(0, 0, q, k).as_subclass(torch.Tensor)
    assert torch.equal(found, expected)
    some = expected.view(5, BLOCK, 5, BLOCK).any(3).any(1)
    assert computed == {tuple(pair) for pair in some.nonzero().tolist()}  # no block for nothing


def test_masks_of_both_windows_are_used():
    """Of 6 layers 0, 2, 3 and 5 see the whole window, 1 and 4 half of it, and 3 has no attention.

    A window of two blocks is one in the short layers.
    """
    config = Config(layers=6, dim=32, heads=2, microbatch_tokens=2 * BLOCK, val_sequence=2 * BLOCK,
                    mlp="eager")
    torch.manual_seed(0)
    model = GPT(config, None)
    assert [b.attention is None for b in model.blocks] == [i == 3 for i in range(6)]
    seen = []
    for i, block in enumerate(model.blocks):
        if block.attention is not None:
            block.attention.register_forward_pre_hook(
                lambda module, arguments, i=i: seen.append((i, arguments[-1])))
    tokens = make_tokens([0])[: 2 * BLOCK]
    model(tokens, tokens.long(), torch.tensor(2, dtype=torch.int32))
    assert [i for i, _ in seen] == [0, 1, 2, 4, 5]
    for i, mask in seen:
        assert torch.equal(mask, dense_mask(tokens, 1 if i in (1, 4) else 2))


def rotary(n, d):
    angle = torch.zeros(n, d // 2)
    angle[:, : d // 4] = torch.arange(n)[:, None] * (1 / 1024) ** torch.linspace(0, 1, d // 4)
    return angle.cos(), angle.sin()


def test_rotate_is_a_rotation_of_half_the_dimensions():
    x = randn(50, 3, 32)
    y = rotate(x, *rotary(50, 32))
    turned = [*range(8), *range(16, 24)]
    still = [*range(8, 16), *range(24, 32)]
    assert torch.equal(y[..., still], x[..., still])
    assert torch.equal(y[0], x[0])  # the angle 0
    # float32 products and sums: a few units in the last place, 2^-23 each
    norms = [t[..., turned].view(50, 3, 2, 8).norm(dim=2) for t in (x, y)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-6, atol=1e-6)
    assert (y[1:, :, turned] != x[1:, :, turned]).float().mean() > 0.9


def test_rotate_depends_on_the_distance_only():
    q, k = (randn(1, 1, 32, seed=seed).expand(50, 1, 32) for seed in (1, 2))
    q, k = (rotate(t, *rotary(50, 32)) for t in (q, k))
    scores = q[:, 0] @ k[:, 0].T
    # angles to 49 in float32, with an error of 2^-19, in scores of about 10
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=1e-3)
    assert float((scores[1:] - scores[:-1]).abs().max()) > 0.1


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS)
def test_flex_attention_equals_sdpa(starts):
    attention = Attention(Config(dim=256, heads=2))
    tokens, window = make_tokens(starts), torch.tensor(2, dtype=torch.int32)
    q, k, v, dy = (randn(5 * BLOCK, 2, 128, seed=i, dtype=torch.bfloat16) for i in range(4))

    def attend(q, k, v, tokens, window):
        return attention(q, k, v, attention_mask(tokens, window))

    def results(function, device):
        inputs = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        y = function(*inputs, tokens.to(device), window.to(device))
        return [y, *torch.autograd.grad(y, inputs, dy.to(device))]

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    for result, expected in zip(results(compiled, "cuda"), results(attend, "cpu"), strict=True):
        # the probabilities, y and gradients are rounded to bf16 (2^-9) at other places; where a
        # token sees itself alone the gradients of q and k are differences of equals
        error = (result.cpu().double() - expected.double()).norm()
        assert error < 2 ** -6 * max(expected.double().norm(), dy.double().norm() / 4)


def test_a_table_gets_the_gradients_of_all_its_lookups():
    tokens, factors = torch.tensor([3, 0, 3, 5]), randn(2, 4, 8)
    table = randn(6, 8, seed=1).requires_grad_()
    wanted, = torch.autograd.grad((F.embedding(tokens, table) * factors).sum(), table)
    zeros = TableGradient.apply(tokens, table)
    values = [F.embedding(tokens, table.detach()) + zeros for _ in factors]
    assert all(torch.equal(value, table[tokens]) for value in values)
    loss = sum((value * factor).sum() for value, factor in zip(values, factors, strict=True))
    torch.testing.assert_close(torch.autograd.grad(loss, table)[0], wanted)


HEADS_NAMES = ["q", "k", "v", "dqkv", "dvalue", "dlambdas"]


HEADS_WITH_GRADIENT = (0, 3, 4)  # of heads' inputs: qkv, the zeros that bring the table's, lambdas


def heads_inputs(n, count, d, mixed, dtype):
    # of all sizes, down to where RMSNorm's eps would count if it were more than float32's
    qkv = (randn(n, 3 * count * d) * torch.logspace(-2, 1, n)[:, None]).to(dtype)
    lookup = [None] * 3
    if mixed:
        tokens = torch.randint(50, (n,), generator=torch.Generator().manual_seed(0)).int()
        table = randn(50, count * d, seed=1).to(dtype)
        lookup = [tokens, table, table.new_zeros(()).expand(n, count * d)]
    grads = [randn(n, count, d, seed=i).to(dtype) for i in (2, 3, 4)]
    return [qkv, *lookup, torch.tensor([0.7, 0.4]), *rotary(n, d)], grads


def with_gradients(function, inputs, grads):
    """As the kernels return them."""
    inputs = [None if t is None else t.detach().requires_grad_(i in HEADS_WITH_GRADIENT)
              for i, t in enumerate(inputs)]
    out = function(*inputs)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    given = torch.autograd.grad(out, wanted, grads)
    out = [t.detach() for t in out]
    return [*out, *(given if len(given) == 3 else (given[0], torch.empty(0), given[1]))]


def exact_heads(inputs, grads):
    """In float32."""
    floats = [t.float() if t is not None and t.is_floating_point() else t for t in inputs]
    return with_gradients(heads_reference, floats, [t.float() for t in grads])


def check_heads_kernels(n, count, d, mixed):
    """In float32, which Triton's interpreter computes as it is."""
    inputs, grads = heads_inputs(n, count, d, mixed, torch.float32)
    qkv, tokens, table, zeros, lambdas, cos, sin = inputs
    grid, sizes, constants = train_gpt._heads_arguments(qkv, cos)
    like = [*grads, qkv, qkv.new_empty(0 if zeros is None else zeros.shape),
            lambdas.new_empty(*grid, 2)]
    results = [torch.full_like(t, math.nan) for t in like]
    read = qkv, tokens, table, lambdas, cos, sin
    train_gpt._heads_kernel[grid](*read, *results[:3], *sizes, **constants)
    train_gpt._heads_backward_kernel[grid](*read, *grads, *results[3:], *sizes, **constants)
    results[5] = results[5].sum(0)
    for name, result, expected in zip(HEADS_NAMES, results, exact_heads(inputs, grads),
                                      strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, msg=name)


# a head dimension that is no power of two; more than a program's tokens, and fewer
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("n", "count", "d"), [(33, 3, 64), (5, 1, 24)])
def test_interpreted_heads_kernels(interpreter, n, count, d, mixed):
    interpreter(check_heads_kernels, n, count, d, mixed)


@pytest.mark.parametrize("mixed", [True, False])
def test_heads_within_recompute_uncompiled(mixed):
    """Whose saved tensors can be read once only. By shape alone: the operator has no CPU code."""
    inputs, _ = heads_inputs(32, 2, 16, mixed, torch.bfloat16)
    inputs = [None if t is None else t.to("meta").requires_grad_(i in HEADS_WITH_GRADIENT)
              for i, t in enumerate(inputs)]
    sum(t.float().sum() for t in train_gpt.recompute(heads, *inputs)).backward()
    assert all(t.grad.shape == t.shape for t in inputs if t is not None and t.requires_grad)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("n", "count", "d"), [(1000, 6, 128), (5, 1, 24)])
def test_heads_kernels(n, count, d, mixed):
    inputs, grads = heads_inputs(n, count, d, mixed, torch.bfloat16)
    wanted = exact_heads(inputs, grads)
    inputs = [None if t is None else t.cuda() for t in inputs]
    results = with_gradients(heads, inputs, [t.cuda() for t in grads])
    torch.library.opcheck(heads, tuple(inputs))
    for name, result, expected in zip(HEADS_NAMES, results, wanted, strict=True):
        if expected.numel():  # rounded to bf16 once, at the end
            assert relative_error(result.cpu(), expected.double()) < 2 ** -8, name


@pytest.mark.parametrize("mixed", [False, True])
def test_heads_reference(mixed):
    """What a CPU takes rounds to bf16 between the steps, the sums for lambdas' gradients too."""
    inputs, grads = heads_inputs(100, 3, 64, mixed, torch.bfloat16)
    for name, result, expected in zip(HEADS_NAMES, with_gradients(heads_reference, inputs, grads),
                                      exact_heads(inputs, grads), strict=True):
        if expected.numel():
            assert relative_error(result, expected.double()) < 2 ** -5, name


# -----------------------------------------------------------------------------
# Loss head


def head_loss_64(z, targets, d):
    return F.cross_entropy(30 * torch.sigmoid(z / (7.5 * d ** 0.5)), targets, reduction="none")


# a vocabulary below, at and above one load of the kernel; logits near 0 and far into saturation
@pytest.mark.parametrize("columns", [1000, 4096, 4097])
@pytest.mark.parametrize("size", [1.0, 300.0, 1e5])
@pytest.mark.parametrize("device", DEVICES)
def test_softcapped_loss(device, columns, size):
    d, n = 64, 33
    z = (randn(n, columns) * size).bfloat16().to(device)
    targets = torch.arange(n, device=device) * (columns - 1) // (n - 1)  # first and last among them
    exact = z.double().requires_grad_()
    expected = head_loss_64(exact, targets, d)
    expected.sum().backward()
    x = randn(n, d, seed=1).bfloat16().to(device)
    loss, inverse, scaled = softcapped_loss_(z, targets, x, 1 / (7.5 * d ** 0.5))
    assert torch.equal(scaled, (x * inverse[:, None]).bfloat16())
    # float32: logits of up to 30 have errors of 2^-19, and a GPU's sigmoid and exp some of theirs
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=3e-5)
    # the stored gradient is rounded once to bf16 (2^-9); where the target has almost all of the
    # probability, total - e loses digits: 2^-23 of the largest gradient there may be, 30 scale / 4
    torch.testing.assert_close(z.double() * inverse.double()[:, None], exact.grad,
                               rtol=2 ** -8, atol=1e-6)


# one token; around one, two chunks of HEAD_CHUNK; a multiple of it
@pytest.mark.parametrize("extra", [(0, 1), (1, -1), (1, 0), (1, 1), (2, 0), (2, 5)])
@pytest.mark.parametrize("device", DEVICES)
def test_head_loss_over_chunks(device, extra):
    d, columns = 64, 1000
    n = extra[0] * train_gpt.HEAD_CHUNK[device] + extra[1]
    x = randn(n, d, dtype=torch.bfloat16).to(device).requires_grad_()
    w = (randn(columns, d, seed=1) * 2).bfloat16().to(device).requires_grad_()
    targets = torch.randint(columns, (n,), generator=torch.Generator().manual_seed(2)).to(device)
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    expected = head_loss_64(exact_x @ exact_w.T, targets, d).sum()
    expected.backward()
    loss = head_loss(x, w, targets, True)[0]
    (loss / 2).backward()
    # logits of about 16 / 60, of either sign, are rounded to bf16: 2^-9 of each, which over the
    # tokens averages out; their gradients, and dx and dw, are rounded to bf16 as well
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0)
    assert relative_error(x.grad * 2, exact_x.grad) < 2 ** -7
    assert relative_error(w.grad * 2, exact_w.grad) < 2 ** -7
    # no row of a chunk's border is wrong beside the others
    rows = (x.grad.double() * 2 - exact_x.grad).norm(dim=1) / exact_x.grad.norm(dim=1)
    assert float(rows.max()) < 2 ** -5

    without, dx, _, dw = head_loss(x.detach(), w.detach(), targets, False)
    assert torch.equal(without, loss)
    assert dx.numel() == dw.numel() == 0


def e4m3(t, largest):
    """t as --head fp8 has it, float64."""
    return (t.double() * 448 / largest).clamp(-448, 448).to(torch.float8_e4m3fn).double() * (
        largest / 448)


def fp8_head_inputs(size, n):
    """w of size makes logits of 0; of about 0.4 / 60; of 16 / 60."""
    d, columns = 64, 1008
    x = train_gpt.norm(randn(n, d)).bfloat16()
    x[0], x[1] = 0, torch.eye(d)[3] * d ** 0.5  # the largest that RMSNorm gives
    w = (randn(columns, d, seed=1) * size).bfloat16()
    targets = torch.randint(columns, (n,), generator=torch.Generator().manual_seed(2))
    w[targets[2]] += size * x[2]  # and a token that is sure of its target
    return x, w, targets


@pytest.mark.parametrize("size", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("device", DEVICES)
def test_fp8_head(device, size):
    x, w, targets = fp8_head_inputs(size, train_gpt.HEAD_CHUNK[device] + 5)
    d = x.shape[1]
    inputs = [t.to(device) for t in (x, w, targets)]
    fp8 = head_operands(*inputs[:2])
    loss, dx, inverse, dw = (t.cpu() for t in head_loss(*inputs, True, *fp8))
    dx = dx.double() * inverse[:, None]

    def expected(x, w):
        z = (x @ w.T).requires_grad_()
        loss = head_loss_64(z, targets, d).sum()
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    # with logits of the same e4m3 as exact as the bf16 head, above
    exact, dz = expected(e4m3(x, d ** 0.5), e4m3(w, 24))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=0)
    assert relative_error(dw, dz.T @ x.double()) < 2 ** -7
    assert relative_error(dx, dz @ w.double()) < 2 ** -7 or size == 0
    # e4m3 rounds by up to 2^-4, which over a sum, and the tokens, averages out
    exact, dz = expected(x.double(), w.double())
    torch.testing.assert_close(loss.double(), exact, rtol=0.01, atol=0)
    assert relative_error(dw, dz.T @ x.double()) < 2 ** -5
    assert relative_error(dx, dz @ w.double()) < 2 ** -5 or size == 0


def test_fp8_head_of_large_weights():
    """Beyond what they can be, they are the largest; NaN stays NaN."""
    x, w = randn(4, 64).bfloat16(), torch.tensor([23.9, -24, 100, -math.inf]).repeat(16, 16).T
    w8 = head_operands(x, w)[1].float() * 24 / 448
    torch.testing.assert_close(w8, w.clamp(-24, 24), rtol=2 ** -4, atol=0)
    assert head_operands(x, w * math.nan)[1].float().isnan().all()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("size", [0.05, 2.0])
def test_fp8_head_on_a_gpu(size):
    """Compiled as in training, against the CPU's arithmetic."""
    def head(x, w, targets):
        return head_loss(x, w, targets, True, *head_operands(x, w))[0]

    x, w, targets = fp8_head_inputs(size, train_gpt.HEAD_CHUNK["cuda"] + 5)
    results = []
    for device, function in (("cpu", head), ("cuda", train_gpt.compiled(head))):
        inputs = [t.detach().to(device).requires_grad_() for t in (x, w)]
        loss = function(*inputs, targets.to(device))
        loss.backward()
        results.append([loss.detach().cpu(), *(t.grad.cpu() for t in inputs)])
    (loss, *grads), (other_loss, *other_grads) = results
    # logits are summed in another order, and those between two of bf16 rounded otherwise
    torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=0)
    for other, grad in zip(other_grads, grads, strict=True):
        assert relative_error(other, grad.double()) < 2 ** -7


def test_validation_has_no_fp8(monkeypatch):
    monkeypatch.setattr(train_gpt, "VOCAB", 512)
    torch.manual_seed(0)
    model, fp8 = (GPT(Config(layers=4, dim=32, heads=2, microbatch_tokens=BLOCK, val_sequence=BLOCK,
                             mlp="dense", head=head), None) for head in ("bf16", "fp8"))
    torch.nn.init.normal_(model.head)
    fp8.load_state_dict(model.state_dict())
    tokens = make_tokens([0])[:BLOCK] % 512
    batch = tokens, tokens.long(), torch.tensor(1)
    with torch.no_grad():
        assert torch.equal(fp8(*batch), model(*batch))
    assert not torch.equal(fp8(*batch), model(*batch))


def test_loss_at_initialization_is_that_of_guessing():
    config = Config(layers=4, dim=32, heads=2, microbatch_tokens=BLOCK, val_sequence=BLOCK,
                    mlp="dense")
    torch.manual_seed(0)
    model = GPT(config, None)
    tokens = make_tokens([0])[:BLOCK]
    with torch.no_grad():
        loss = model(tokens, tokens.long(), torch.tensor(1)) / BLOCK
    # the head is 0, so all logits are 15: float32 sums of equal terms
    assert float(loss) == pytest.approx(np.log(VOCAB), rel=1e-5)


# -----------------------------------------------------------------------------
# Optimizers

ONE_RANK = Ranks(0, 1, torch.device(DEVICE))


def true(value=True):
    return torch.tensor(value, device=DEVICE)


# square, wide, tall, a row; and one badly scaled
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 128), (128, 32), (1, 16)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_orthogonalize(rows, columns, scale):
    x = (randn(3, rows, columns) * scale).bfloat16()
    y = orthogonalize(x.to(DEVICE)).cpu().double()
    assert y.shape == x.shape
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    # these coefficients lead singular values above some 1 % of the norm into (.68, 1.13), and do
    # not converge further; bf16 adds about .02
    values = (u.mT @ y @ v.mT).diagonal(dim1=-2, dim2=-1)
    large = s > 0.02 * s.norm(dim=-1, keepdim=True)
    assert float(values[large].min()) > 0.6
    assert float(values[large].max()) < 1.25
    # and leave the singular vectors: what is off the diagonal is bf16's rounding
    off = u.mT @ y @ v.mT - torch.diag_embed(values)
    assert float(off.norm() / values.norm()) < 0.05


def test_orthogonalize_of_zero_is_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 8, 4, device=DEVICE).bfloat16()).cpu(),
                       torch.zeros(2, 8, 4).bfloat16())


def newton_schulz_64(x):
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    x = x / x.norm()
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x - 4.775 * s @ x + 2.0315 * s @ s @ x
    return x


def parameters(*shapes, dtype=torch.float32):
    params = [torch.nn.Parameter(randn(*shape, seed=i).to(DEVICE, dtype))
              for i, shape in enumerate(shapes)]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def test_muon_step():
    """Three steps over one stack of three matrices, a tall and two wide ones of one shape."""
    params = parameters((3, 16, 16), (64, 16), (16, 64), (16, 64))
    muon = Muon(params, ONE_RANK)
    exact = [p.detach().double().cpu() for p in params]
    momenta = [torch.zeros_like(p) for p in exact]
    for step, (lr, beta) in enumerate(((0.05, 0.85), (0.02, 0.9), (0.01, 0.95))):
        before = [p.detach().double().cpu() for p in params]
        for i, (p, expected, momentum) in enumerate(zip(params, exact, momenta, strict=True)):
            g = randn(*p.shape, seed=100 * step + i)
            p.grad.copy_(g)
            momentum.mul_(beta).add_((1 - beta) * g)
            direction = (1 - beta) * g + beta * momentum
            for one, towards in zip(expected.view(-1, *p.shape[-2:]),
                                    direction.view(-1, *p.shape[-2:]), strict=True):
                tall = one.shape[0] > one.shape[1]
                update = newton_schulz_64(towards)
                one -= lr * max(1, one.shape[0] / one.shape[1]) ** 0.5 * (
                    update.mT if tall else update)
        muon.step(lr, beta, true())
        for p, old, expected in zip(params, before, exact, strict=True):
            # the Newton-Schulz steps are made in bf16
            assert relative_error(p.detach().cpu() - old, expected - old) < 0.05
            expected.copy_(p.detach())  # the next step's error is its own
    by_shape = {p.shape[-2:]: [] for p in params}
    for p, momentum in zip(params, momenta, strict=True):
        by_shape[p.shape[-2:]].append(momentum.view(-1, *p.shape[-2:]))
    for state, expected in zip(muon.state, by_shape.values(), strict=True):
        # float32, a rounding or two a step
        torch.testing.assert_close(state.double().cpu(), torch.cat(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_step(dtype):
    params = parameters((8, 4), (5,), dtype=dtype)
    adam = Adam([(params[0], 2.0), (params[1], 0.5)], ONE_RANK)
    # bf16: parameter and moments are rounded after each step, 2^-9 of each
    rtol = 1e-5 if dtype == torch.float32 else 2 ** -6
    moments = [[torch.zeros(p.shape, dtype=torch.float64) for p in params] for _ in range(2)]
    for number in (1, 2, 3):
        before = [p.detach().double().cpu() for p in params]
        for i, p in enumerate(params):
            p.grad.copy_(randn(*p.shape, seed=10 * number + i))
        adam.step(0.01, number, true())
        for i, (p, factor) in enumerate(zip(params, (2.0, 0.5), strict=True)):
            g = p.grad.double().cpu()
            mean = moments[0][i].mul_(0.8).add_(0.2 * g) / (1 - 0.8 ** number)
            square = moments[1][i].mul_(0.95).add_(0.05 * g.square()) / (1 - 0.95 ** number)
            expected = before[i] - 0.01 * factor * mean / (square.sqrt() + 1e-10)
            torch.testing.assert_close(p.detach().double().cpu(), expected, rtol=rtol, atol=1e-6)
    for state, expected in zip(adam.state, [moments[0][0], moments[1][0], moments[0][1],
                                            moments[1][1]], strict=True):
        torch.testing.assert_close(state.double().cpu(), expected, rtol=rtol,
                                   atol=1e-6 if dtype == torch.float32 else 2 ** -8)


# an overflowing batch's gradients may be anything
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_steps_that_are_not_ok_leave_all_bits(value):
    params = parameters((8, 4), (4, 8)) + parameters((6, 4), (5,), dtype=torch.bfloat16)
    muon, adam = Muon(params[:2], ONE_RANK), Adam([(p, 1.0) for p in params[2:]], ONE_RANK)
    for ok in (True, False):
        for p in params:
            p.grad.fill_(1.0 if ok else value)
        before = [t.detach().clone() for t in (*params, *muon.state, *adam.state)]
        muon.step(0.05, 0.9, true(ok))
        adam.step(0.01, 1, true(ok))
        after = [t.detach() for t in (*params, *muon.state, *adam.state)]
        assert all(torch.equal(a, b) != ok for a, b in zip(after, before, strict=True))


# -----------------------------------------------------------------------------
# Schedules


def test_lr_factor():
    config = Config(steps=100, cooldown=0.4, final_lr=0.1)
    assert [lr_factor(config, step) for step in (0, 1, 59, 60)] == [1] * 4
    assert lr_factor(config, 80) == pytest.approx(0.55)
    assert lr_factor(config, 100) == pytest.approx(0.1)
    falling = [lr_factor(config, step) for step in range(60, 101)]
    assert all(a > b for a, b in zip(falling, falling[1:], strict=False))
    assert lr_factor(Config(steps=1, cooldown=1.0), 0) == 1
    assert lr_factor(Config(steps=4, cooldown=1.0, final_lr=0.0), 3) == pytest.approx(0.25)


def test_window_blocks():
    config = Config(steps=1728, window_end=1792)  # a token a step
    assert [window_blocks(config, step) for step in (0, 1, 128, 129, 1664, 1665, 1728)] == [
        1, 1, 1, 2, 13, 14, 14]
    assert [window_blocks(Config(steps=54), step) for step in (4, 5, 53, 54)] == [1, 2, 14, 14]
    assert window_blocks(Config(window_end=1), 1750) == 1  # itself it always sees


def test_muon_beta():
    config = Config()
    assert [muon_beta(config, step) for step in (0, 150, 300, 1749)] == pytest.approx(
        [0.85, 0.9, 0.95, 0.95])


def test_buffer_capacity():
    config, unit = Config(), 2 * MIB
    assert buffer_capacity(config, 0) == 0
    assert buffer_capacity(config, 1) == unit
    assert buffer_capacity(config, unit / 1.05 - 1) == unit
    assert buffer_capacity(config, unit) == 2 * unit
    assert buffer_capacity(config, 99 * unit) == 104 * unit  # the margin is a twentieth
    assert buffer_capacity(Config(buffer_mib=100), 1) == 100 * MIB
    assert buffer_capacity(Config(buffer_mib=1), unit) == 2 * unit


# -----------------------------------------------------------------------------
# The whole model


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("mlp", ["bitsparse", "dense", "checkpoint"])
def test_forward_and_backward_in_a_cuda_graph(mlp):
    config = Config(layers=4, dim=256, heads=2, microbatch_tokens=1024, val_sequence=1024, mlp=mlp)
    need = config.layers * config.microbatch_tokens * 4 * config.dim * 2
    buffer = ActivationBuffer(need, "cuda", config.layers) if mlp == "bitsparse" else None
    torch.manual_seed(0)
    model = GPT(config, buffer).cuda()
    with torch.no_grad():  # so that gradients reach every parameter
        for block in model.blocks:
            block.mlp.w2.normal_(std=0.02)
        model.head.normal_(std=0.02)
    forward = torch.compile(model, fullgraph=True, dynamic=False)
    tokens = torch.randint(BOS, (2, 1025), generator=torch.Generator().manual_seed(1)).int().cuda()
    tokens[:, ::300] = BOS
    inputs, targets = tokens[0, :-1].clone(), tokens[0, 1:].long()
    window = torch.tensor(3, dtype=torch.int32, device="cuda")

    def forward_and_backward():
        if buffer is not None:
            buffer.reset()
        for p in model.parameters():
            p.grad.zero_()
        loss = forward(inputs, targets, window)
        loss.backward()
        return loss.detach()

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and tune
        forward_and_backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward()
    for row in tokens:
        inputs.copy_(row[:-1])
        targets.copy_(row[1:])
        graph.replay()
        loss = captured.clone()
        grads = [b.mlp.w1.grad.clone() for b in model.blocks]
        assert torch.equal(forward_and_backward(), loss)
        for block, grad in zip(model.blocks, grads, strict=True):
            assert grad.any()
            # sums over attention's gradients are float32 atomics in an order of their own
            assert relative_error(block.mlp.w1.grad, grad.double()) < 2 ** -8


@pytest.mark.gpu
@on_gpu
def test_compiled_gradients_are_those_of_a_cpu():
    """Of every parameter, with all weights away from zero: the two share no kernel."""
    config = Config(layers=4, dim=256, heads=2, mlp="dense", microbatch_tokens=1024,
                    val_sequence=1024)
    torch.manual_seed(0)
    model = GPT(config, None)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.w2.normal_(std=0.03)
            if block.attention is not None:
                block.attention.project.normal_(std=0.03)
        model.head.normal_(std=0.03)
        model.scalars += 0.1 * torch.randn_like(model.scalars)
    tokens = torch.randint(BOS, (1025,), generator=torch.Generator().manual_seed(1)).int()
    tokens[::300] = BOS
    batch = tokens[:-1], tokens[1:].long(), torch.tensor(3, dtype=torch.int32)
    expected = model(*batch)
    expected.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.cuda()
    loss = torch.compile(model, fullgraph=True, dynamic=False)(*(t.cuda() for t in batch))
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    for name, p in model.named_parameters():  # bf16 throughout four layers, at other places
        assert relative_error(p.grad.cpu(), gradients[name]) < 2 ** -4, name


@pytest.mark.parametrize(
    ("codec", "storage", "bits"),
    [("raw", "bfloat16", 16), ("sign", "bfloat16", 15), ("exponent", "bfloat16", 11),
     ("raw", "float8_e4m3fn", 8), ("sign", "float8_e5m2", 7), ("exponent", "float8_e4m3fn", 7)],
)
def test_first_capacity_is_that_of_the_codec(codec, storage, bits):
    """Half of the elements, 5 % more, and no more than 1 % and 2 MiB for what is rounded."""
    config = Config(codec=codec, storage=storage)
    needed = 0.5 * 12 * 49152 * 3072 * bits / 8
    assert 1.05 * needed < first_capacity(config) < 1.05 * 1.01 * needed + 2 * MIB
    assert first_capacity(Config(codec=codec, storage=storage, buffer_mib=3)) == 3 * MIB
