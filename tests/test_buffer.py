"""ActivationBuffer: capacity, counters, overflow that corrupts nothing, no waiting for the device.

What:  the counters' meaning over resets, snapshots and resizes; canary bytes around the arena; what
       is read after the reset that dropped it; on a GPU, no synchronization in anything that a step
       calls, and capture into a CUDA graph.
Needs: a CPU; what is marked `gpu` an NVIDIA GPU.
Run:   python -m pytest tests/test_buffer.py
"""

import gc

import pytest
import torch
from torch.nn.functional import linear

from bitsparse_kernels import STRIPES, ActivationBuffer, compress, decompress, relu2_mlp, relu_mlp

TILE = 2048
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# Bytes of a tile in which every element is stored, and all of them are the same power of two, so
# that "exponent" takes no exponent bits.
FULL_TILE = {
    ("raw", BF16): 4096,
    ("raw", E4M3): 2048,
    ("raw", E5M2): 2048,
    ("sign", BF16): 3840,  # 15 / 16
    ("sign", E4M3): 1792,  # 7 / 8
    ("sign", E5M2): 1792,
    ("exponent", BF16): 1792,  # mantissas alone: 7, 3 and 2 bits
    ("exponent", E4M3): 768,
    ("exponent", E5M2): 512,
}
every_format = pytest.mark.parametrize(("codec", "storage"), FULL_TILE)
CANARY = 0xA5
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]


def ones(tiles, device="cpu"):
    """A row of tiles, every element stored: 4096 bytes a tile, known without looking."""
    return torch.ones(tiles * TILE, dtype=torch.bfloat16, device=device)


def randn(n, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator).bfloat16().to(device)


def guarded_buffer(capacity, device):
    """A buffer whose arena is the middle of a larger tensor of canaries; and that tensor."""
    buffer = ActivationBuffer(capacity, device)
    whole = torch.full((buffer.capacity_bytes + 8192,), CANARY, dtype=torch.uint8, device=device)
    buffer.arena = whole[4096:-4096]
    return buffer, whole


def canaries_intact(whole):
    return bool((whole[:4096] == CANARY).all()) and bool((whole[-4096:] == CANARY).all())


# -----------------------------------------------------------------------------
# Capacity and counters


# nothing; less than a vector; one; one more byte; whole vectors stay what they are
@pytest.mark.parametrize(
    ("asked", "given"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32), (4096, 4096)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_capacity_is_rounded_up_to_vectors(asked, given, device):
    buffer = ActivationBuffer(asked, device)
    assert buffer.capacity_bytes == given == buffer.arena.nbytes
    buffer = ActivationBuffer(64, device)
    buffer.resize(asked)
    assert buffer.capacity_bytes == given == buffer.arena.nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_new_buffer_is_empty(device):
    buffer = ActivationBuffer(100, device, layers=3)
    snapshot = buffer.snapshot()
    assert int(buffer.used_bytes()) == 0
    assert not buffer.overflowed()
    assert snapshot.peak_bytes == snapshot.needed_bytes == 0
    assert snapshot.layer_nnz == [0, 0, 0]
    assert snapshot.capacity_bytes == 112


@pytest.mark.parametrize("device", DEVICES)
def test_used_bytes_and_reset(device):
    buffer = ActivationBuffer(2**20, device)
    compress(ones(2, device), buffer)
    used = buffer.used_bytes()
    assert used.device == buffer.device
    assert used.dtype == torch.int64
    assert int(used) == 2 * 4096
    compress(ones(1, device)[:9], buffer)  # 18 bytes take two vectors
    assert int(buffer.used_bytes()) == 2 * 4096 + 32
    buffer.reset()
    assert int(buffer.used_bytes()) == 0
    assert int(used) == 2 * 4096  # a value of its own, not a view of the counter
    t = compress(ones(1, device), buffer)
    assert t.saved[1].tolist() == [2048 << 40, 1]  # from the beginning again, a generation later


@pytest.mark.parametrize("device", DEVICES)
def test_stripes(device):
    """Tiles take the parts in turn; what is needed is the fullest one, times their number."""
    buffer = ActivationBuffer(100, device, layers=2, stripes=4)
    assert buffer.capacity_bytes == 128  # 16 bytes a part at least
    buffer.resize(4 * 4096)
    assert buffer.part_bytes == 4096
    t = compress(ones(4, device), buffer)
    assert [head & (1 << 40) - 1 for head in t.saved[1][:-1].tolist()] == [0, 256, 512, 768]
    assert not buffer.overflowed()
    assert torch.equal(decompress(t), ones(4, device))
    t = compress(ones(1, device)[:9], buffer)  # 32 bytes more in the first part
    assert buffer.overflowed()
    assert not decompress(t).any()
    assert int(buffer.used_bytes()) == 4 * 4096 + 32
    snapshot = buffer.snapshot()
    assert snapshot.peak_bytes == snapshot.needed_bytes == 4 * (4096 + 32)
    assert snapshot.stored_bytes == 4 * 4096 + 32
    assert snapshot.layer_nnz == [4 * TILE + 9, 0]
    buffer.resize(snapshot.needed_bytes)
    buffer.reset()
    kept = decompress(compress(ones(5, device), buffer)).view(-1, TILE).any(1)
    assert kept[1:4].all()
    assert kept[0] != kept[4]  # of the one part, whichever came first
    buffer.reset()
    assert decompress(compress(ones(1, device), buffer)).all()  # and now there is room in it
    assert buffer.snapshot().needed_bytes == 4 * 8192


@pytest.mark.parametrize("device", DEVICES)
def test_stripes_by_size(device):
    buffer = ActivationBuffer(STRIPES * 2**20 - 1, device)
    assert buffer.stripes == 1
    for capacity, stripes in ((2**24 + 1, STRIPES), (100, 1)):
        buffer.resize(capacity)
        assert buffer.stripes == len(buffer.counters) == stripes
        assert buffer.capacity_bytes == -(-capacity // (16 * stripes)) * 16 * stripes
        compress(ones(2, device), buffer)
        assert int(buffer.used_bytes()) == 2 * 4096
        assert bool(buffer.overflowed()) == (stripes == 1)


@pytest.mark.parametrize("device", DEVICES)
def test_overflow_is_remembered_until_resize(device):
    buffer = ActivationBuffer(4096, device)
    compress(ones(1, device), buffer)
    assert not buffer.overflowed()  # full to the last byte is not over
    compress(ones(1, device)[:1], buffer)
    assert buffer.overflowed().dtype == torch.bool
    assert buffer.overflowed()
    buffer.reset()
    assert buffer.overflowed()
    compress(ones(1, device), buffer)  # fits, and changes nothing about what was lost
    assert buffer.overflowed()
    assert buffer.snapshot().overflowed
    assert buffer.snapshot().overflowed
    buffer.reset()
    assert buffer.overflowed()
    for too_small in (4096, 2048):  # would have overflowed as well
        buffer.resize(too_small)
        assert buffer.overflowed()
        assert buffer.snapshot().needed_bytes == 4096 + 16
    buffer.resize(4096 + 16)
    assert not buffer.overflowed()
    assert not buffer.snapshot().overflowed
    compress(ones(1, device), buffer)
    assert not buffer.overflowed()


@pytest.mark.parametrize("device", DEVICES)
def test_a_need_that_fitted_is_forgotten_by_resize(device):
    buffer = ActivationBuffer(2 * 4096, device)
    compress(ones(2, device), buffer)
    buffer.reset()
    buffer.resize(4096)  # less than what once was needed, and there
    assert not buffer.overflowed()
    assert buffer.snapshot().needed_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_snapshot(device):
    """peak, stored and layer_nnz since the snapshot before; needed since the last resize, or what
    overflowed before it."""
    buffer = ActivationBuffer(2 * 4096, device)
    for tiles in (1, 3, 2):  # three microbatches of one step; the second does not fit
        buffer.reset()
        compress(ones(tiles, device), buffer)
    first = buffer.snapshot()
    buffer.reset()
    compress(ones(1, device), buffer)
    second = buffer.snapshot()
    buffer.reset()
    third = buffer.snapshot()
    buffer.resize(3 * 4096)
    fourth = buffer.snapshot()

    assert first.peak_bytes == first.needed_bytes == 3 * 4096
    assert first.layer_nnz == [6 * TILE]
    assert first.stored_bytes == 6 * 4096
    # a snapshot drops what was stored: it does not count for the next interval
    assert second.peak_bytes == second.stored_bytes == 4096
    assert second.needed_bytes == 3 * 4096
    assert second.layer_nnz == [TILE]
    assert third.peak_bytes == third.stored_bytes == 0
    assert third.needed_bytes == 3 * 4096
    assert third.layer_nnz == [0]
    assert [s.overflowed for s in (first, second, third, fourth)] == [True, True, True, False]
    assert fourth.peak_bytes == fourth.stored_bytes == 0
    assert fourth.needed_bytes == 3 * 4096
    assert not any(s.stale for s in (first, second, third, fourth))
    assert [s.capacity_bytes for s in (first, fourth)] == [2 * 4096, 3 * 4096]
    assert all(s.ready() for s in (first, second, third, fourth))


@pytest.mark.parametrize("device", DEVICES)
def test_counts_by_layer(device):
    buffer = ActivationBuffer(2**20, device, layers=3)
    shapes = {"x": (5, 16), "w1": (32, 16), "w2": (16, 32)}
    arguments = {name: torch.ones(shape).bfloat16().to(device) for name, shape in shapes.items()}
    arguments["x"].requires_grad_()
    relu2_mlp(**arguments, buffer=buffer, layer=2)
    relu_mlp(**arguments, buffer=buffer, layer=1)
    relu_mlp(**arguments, buffer=buffer, layer=1)
    relu_mlp(**arguments, save="checkpoint", buffer=buffer, layer=0)
    assert buffer.snapshot().layer_nnz == [0, 2 * 5 * 32, 5 * 32]


# -----------------------------------------------------------------------------
# Overflow


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fitting", [0, 1, 2, 4])  # none, first, some, all but one of 5 tiles
@pytest.mark.parametrize("spare", [False, True])  # bytes left over: none; a vector short of a tile
@every_format
def test_overflow_writes_whole_tiles_or_nothing(device, fitting, spare, codec, storage):
    # powers of two: with 16 as the largest, fp8 has them exactly, and so has bf16 times the scale
    x = ones(5, device) * 2 ** torch.arange(5, device=device).repeat_interleave(TILE)
    size = FULL_TILE[codec, storage]
    buffer, whole = guarded_buffer(fitting * size + (size - 16) * spare, device)
    t = compress(x, buffer, codec, storage)
    assert canaries_intact(whole)
    assert int(buffer.used_bytes()) == 5 * size  # counted on: the need is known
    assert buffer.overflowed()
    base = (t.saved[1][:-1] & (1 << 40) - 1) * 16
    assert sorted(base.tolist()) == [i * size for i in range(5)]
    fits = base < fitting * size
    assert torch.equal(decompress(t), torch.where(fits.repeat_interleave(TILE), x, 0.0))
    assert (whole[4096 + fitting * size :] == CANARY).all()  # the spare bytes too


@pytest.mark.parametrize("device", DEVICES)
@every_format
def test_growing_to_the_needed_size_fits_exactly(device, codec, storage):
    x = randn(20 * TILE + 77, device)
    expected = decompress(compress(x, None, codec, storage))
    if storage == BF16:
        assert torch.equal(expected, x.relu())
    buffer, whole = guarded_buffer(4096, device)
    compress(x, buffer, codec, storage)
    compress(x, buffer, codec, storage)
    needed = buffer.snapshot().needed_bytes
    assert canaries_intact(whole)
    buffer.resize(needed - 16)  # one vector less is too little
    compress(x, buffer, codec, storage)
    compress(x, buffer, codec, storage)
    assert buffer.overflowed()
    buffer.resize(needed)
    first, second = (compress(x, buffer, codec, storage) for _ in range(2))
    assert not buffer.overflowed()
    assert int(buffer.used_bytes()) == needed == buffer.capacity_bytes
    assert torch.equal(decompress(first), expected)
    assert torch.equal(decompress(second), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_buffer_of_no_bytes(device):
    """Enough for what stores nothing; else everything is counted and read back as zeros."""
    buffer = ActivationBuffer(0, device)
    negative = -ones(3, device)
    assert not decompress(compress(negative, buffer)).any()
    assert not buffer.overflowed()
    t = compress(ones(3, device), buffer)
    assert buffer.overflowed()
    assert int(buffer.used_bytes()) == 3 * 4096
    assert torch.equal(decompress(t), torch.zeros_like(negative))


@pytest.mark.parametrize("device", DEVICES)
def test_overflow_leaves_the_output_right_and_backward_alive(device):
    """y does not depend on the buffer. Gradients do: they are those of an r with missing tiles."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (128, 32), "w1": (96, 32), "w2": (32, 96)}  # 6 tiles
    arguments = {
        name: torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()
        for name, shape in shapes.items()
    }
    expected = relu2_mlp(**arguments, save="checkpoint")
    for capacity in (0, 2 * 4096):  # no tile fits; some do (of about 2048 bytes each)
        buffer, whole = guarded_buffer(capacity, device)
        y = relu2_mlp(**arguments, buffer=buffer)
        assert buffer.overflowed()
        assert torch.equal(y, expected)
        gradients = torch.autograd.grad(y, arguments.values(), torch.ones_like(y))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all(gradient.any() == (capacity > 0) for gradient in gradients)
        assert canaries_intact(whole)


@pytest.mark.parametrize("device", DEVICES)
def test_forgotten_reset(device):
    """Nothing stored is overwritten: the buffer fills up, and then it says so."""
    buffer = ActivationBuffer(3 * 4096, device)
    inputs = [ones(1, device) * k for k in (1, 2, 3, 4)]
    stored = [compress(x, buffer) for x in inputs[:3]]
    assert not buffer.overflowed()
    stored.append(compress(inputs[3], buffer))
    assert buffer.overflowed()
    for t, x in zip(stored[:3], inputs[:3], strict=True):
        assert torch.equal(decompress(t), x)
    assert not decompress(stored[3]).any()


# -----------------------------------------------------------------------------
# Generations: what is read after a reset() has dropped it


@pytest.mark.parametrize("device", DEVICES)
@every_format
def test_decompress_after_reset(device, codec, storage):
    """Zeros, though the bytes still lie there; and the flag, from then on."""
    x = randn(3 * TILE + 5, device)
    buffer = ActivationBuffer(2**15, device)
    t = compress(x, buffer, codec, storage)
    kept = decompress(t)
    assert kept.any()
    assert not buffer.overflowed()
    buffer.reset()
    assert not buffer.overflowed()  # a reset is no fault
    y = decompress(t)
    assert torch.equal(y, torch.zeros_like(x))
    assert buffer.overflowed()
    again = compress(x, buffer, codec, storage)  # fresh, and right; the flag stays
    assert torch.equal(decompress(again), kept)
    first, second = buffer.snapshot(), buffer.snapshot()
    assert first.stale
    assert second.stale
    assert not first.overflowed  # it was not for want of room
    assert buffer.overflowed()
    buffer.resize(2**15)  # makes room, and no mistake good
    assert buffer.overflowed()
    assert buffer.snapshot().stale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", ["reset", "snapshot", "resize"])
def test_each_of_these_drops_the_contents(device, drop):
    buffer = ActivationBuffer(2**13, device)
    t = compress(ones(1, device), buffer)
    getattr(buffer, drop)(*([2**13] if drop == "resize" else []))
    assert not decompress(t).any()
    assert buffer.snapshot().stale


@pytest.mark.parametrize("device", DEVICES)
def test_reset_forgotten_by_two_generations(device):
    """Only the very generation counts: not a later one, be it as full and of the same values."""
    buffer = ActivationBuffer(2**13, device)
    stored = []
    for _ in range(3):
        buffer.reset()
        stored.append(compress(ones(1, device), buffer))
    assert torch.equal(decompress(stored[2]), ones(1, device))
    assert not buffer.overflowed()
    assert not decompress(stored[0]).any()
    assert not decompress(stored[1]).any()
    assert buffer.snapshot().stale


def parameters_of_a_model(device, seed=0):
    shapes = {"x": (70, 32), "w1": (95, 32), "w2": (32, 95)}
    return {
        name: randn(rows * columns, device, seed + i).view(rows, columns).requires_grad_()
        for i, (name, (rows, columns)) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("later_forward", [False, True])  # only a reset; or all of another forward
@pytest.mark.parametrize("power", [1, 2])
def test_backward_after_reset(device, later_forward, power):
    mlp = {1: relu_mlp, 2: relu2_mlp}[power]
    arguments = parameters_of_a_model(device)
    buffer = ActivationBuffer(2**15, device)
    y = mlp(**arguments, buffer=buffer)
    buffer.reset()
    if later_forward:
        mlp(**arguments, buffer=buffer)
    assert not buffer.overflowed()
    dx, dw1, dw2 = torch.autograd.grad(y, arguments.values(), torch.ones_like(y))
    assert not dw2.any()  # post is zeros
    if power == 2:  # dz = dh * 2r too; relu's needs the mask alone, which is not in the buffer
        assert not dx.any()
        assert not dw1.any()
    assert buffer.overflowed()
    assert buffer.snapshot().stale


@pytest.mark.parametrize("device", DEVICES)
def test_two_models_on_one_buffer(device):
    """One reset before both forwards serves both. A reset each drops the first's, and says so."""
    models = [parameters_of_a_model(device, seed) for seed in (0, 10)]
    buffer = ActivationBuffer(2**16, device)

    def gradients(y, arguments):
        return torch.autograd.grad(y, arguments.values(), torch.ones_like(y))

    expected = [gradients(relu2_mlp(**m, save="checkpoint"), m) for m in models]
    buffer.reset()
    outputs = [relu2_mlp(**m, buffer=buffer) for m in models]
    for y, model, right in zip(outputs, models, expected, strict=True):
        assert all(map(torch.equal, gradients(y, model), right))
    assert not buffer.overflowed()

    outputs = []
    for model in models:
        buffer.reset()
        outputs.append(relu2_mlp(**model, buffer=buffer))
    assert all(map(torch.equal, gradients(outputs[1], models[1]), expected[1]))
    assert not buffer.overflowed()
    assert not any(gradient.any() for gradient in gradients(outputs[0], models[0]))
    assert buffer.overflowed()
    snapshot = buffer.snapshot()
    assert snapshot.stale
    assert not snapshot.overflowed


# -----------------------------------------------------------------------------
# A buffer that is gone


@pytest.mark.parametrize("device", DEVICES)
def test_a_dropped_buffer_is_named(device):
    arguments = parameters_of_a_model(device)
    buffer = ActivationBuffer(2**15, device)
    y = relu2_mlp(**arguments, buffer=buffer)
    sentence = (
        f"activation buffer {buffer.number} is gone: keep a reference to the ActivationBuffer "
        f"until the backward pass is over"
    )
    del buffer
    gc.collect()
    with pytest.raises(RuntimeError, match=sentence):
        y.sum().backward()
    assert all(t.grad is None for t in arguments.values())


# -----------------------------------------------------------------------------
# Steps of several microbatches


@pytest.mark.parametrize("device", DEVICES)
def test_several_microbatches(device):
    """The buffer is used anew by each; the gradients add up to those of a run without it."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    w1, w2 = make(96, 32).requires_grad_(), make(32, 96).requires_grad_()
    microbatches = [make(tokens, 32) for tokens in (64, 100, 1)]
    buffer = ActivationBuffer(2 * 100 * 96 + 64, device)  # for the largest
    results = {}
    for save in ("bitsparse", "checkpoint"):
        w1.grad = w2.grad = None
        for x in microbatches:
            buffer.reset()
            y = relu2_mlp(x, w1, w2, buffer=buffer, save=save)
            y.backward(torch.ones_like(y))
        results[save] = w1.grad, w2.grad
        if save == "bitsparse":
            snapshot = buffer.snapshot()
            stored = [int((linear(x, w1) > 0).sum()) for x in microbatches]
            assert not snapshot.overflowed
            assert snapshot.layer_nnz == [sum(stored)]
            tiles = -(-100 * 96 // TILE)
            assert 2 * max(stored) <= snapshot.peak_bytes <= 2 * max(stored) + 14 * tiles
    for a, b in zip(*results.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_two_buffers_do_not_mix(device):
    x, other = randn(3 * TILE, device), randn(3 * TILE, device, seed=1)
    buffers = [ActivationBuffer(2**15, device) for _ in range(2)]
    assert buffers[0].number != buffers[1].number
    t = compress(x, buffers[0])
    u = compress(other, buffers[1])
    buffers[1].reset()
    v = compress(other, buffers[1])
    assert torch.equal(decompress(t), x.relu())
    assert torch.equal(decompress(v), other.relu())
    assert torch.equal(u.saved[0], v.saved[0])


# -----------------------------------------------------------------------------
# Without waiting for the device


class TwoLayers(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(device) * 0.1)
            for shape in [(500, 128), (128, 500)] * 2
        )

    def forward(self, x, buffer, *format_):
        buffer.reset()
        options = dict(zip(("codec", "storage"), format_, strict=False), buffer=buffer)
        for layer in range(2):
            weights = self.weights[2 * layer : 2 * layer + 2]
            x = relu2_mlp(x, *weights, layer=layer, **options)
        return x


def gradients_of(model, x, dy, buffer, *format_):
    y = model(x, buffer, *format_)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.fixture
def no_synchronization():
    """call(f): f() with an error at anything that makes the host wait; f is run once before, as
    kernels are compiled and tried at their first use.
    """

    def call(f):
        f()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return f()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


@pytest.mark.gpu
@on_gpu
def test_the_debug_mode_notices_synchronization(no_synchronization):
    """Else the tests below would say nothing."""
    with pytest.raises(RuntimeError, match="synchronizing"):
        no_synchronization(lambda: torch.ones(1, device="cuda").item())
    # and compress without a buffer is documented to wait
    x = randn(TILE, "cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        no_synchronization(lambda: compress(x))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("capacity", [2**22, 4096])  # all fits; overflow is no reason to wait
@pytest.mark.parametrize("view", [0, 1])  # the staged kernels; the plain ones
@every_format
def test_no_synchronization_in_compress_and_counters(
    no_synchronization, capacity, view, codec, storage
):
    x = randn(100 * TILE + 5 + view, "cuda")[view:]
    buffer = ActivationBuffer(capacity, "cuda")

    def use():
        buffer.reset()
        t = compress(x, buffer, codec, storage)
        return decompress(t), buffer.used_bytes(), buffer.overflowed(), buffer.snapshot()

    y, used, overflowed, snapshot = no_synchronization(use)
    assert bool(overflowed) == snapshot.overflowed == (capacity == 4096)
    assert int(used) == snapshot.peak_bytes
    if capacity > 4096 and storage == BF16:
        assert torch.equal(y, x.relu())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("save", "codec", "storage"),
    [("dense", "raw", BF16), ("checkpoint", "raw", BF16), *(("bitsparse", *f) for f in FULL_TILE)],
)
def test_no_synchronization_in_forward_and_backward(no_synchronization, save, codec, storage):
    x = randn(301 * 128, "cuda").view(301, 128).requires_grad_()
    w1, w2 = (randn(500 * 128, "cuda", seed=s).requires_grad_() for s in (1, 2))
    b1, b2 = randn(500, "cuda").requires_grad_(), randn(128, "cuda").requires_grad_()
    buffer = ActivationBuffer(2**20, "cuda")

    def use():
        buffer.reset()
        w = w1.view(500, 128), w2.view(128, 500)
        y = relu2_mlp(x, *w, b1, b2, buffer=buffer, save=save, codec=codec, storage=storage)
        return torch.autograd.grad(y, [x, w1, w2, b1, b2], torch.ones_like(y))

    no_synchronization(use)


@pytest.mark.gpu
@on_gpu
def test_snapshot_does_not_wait():
    """It returns while the device is still busy, and holds the counters of its own moment."""
    buffer = ActivationBuffer(2**16, "cuda")
    buffer.snapshot()  # pinned memory is allocated at the first
    x = ones(1, "cuda")
    compress(x, buffer)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # cycles: about a second
    snapshot = buffer.snapshot()
    compress(ones(2, "cuda"), buffer)
    assert not snapshot.ready()
    assert snapshot.peak_bytes == 4096  # waits
    assert snapshot.ready()
    assert buffer.snapshot().peak_bytes == 2 * 4096


@pytest.mark.gpu
@on_gpu
@every_format
def test_cuda_graph_of_forward_and_backward(codec, storage):
    """Captured once, replayed with other inputs: the bits of eager runs, and counters that count.

    An overflow within a replay shows like any other.
    """
    model = TwoLayers("cuda")
    buffer = ActivationBuffer(2**20, "cuda", layers=2)
    x = randn(301 * 128, "cuda").view(301, 128).requires_grad_()
    dy = randn(301 * 128, "cuda", seed=1).view(301, 128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and tried before the capture
        for _ in range(3):
            gradients_of(model, x, dy, buffer, codec, storage)
    torch.cuda.current_stream().wait_stream(side)
    buffer.resize(int(buffer.used_bytes()) * 11 // 10)  # other inputs of density .5 need as much
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(model, x, dy, buffer, codec, storage)

    buffer.snapshot()
    for seed in (2, 3, 4):
        with torch.no_grad():
            x.copy_(randn(301 * 128, "cuda", seed).view(301, 128))
            dy.copy_(randn(301 * 128, "cuda", seed + 10).view(301, 128))
        graph.replay()
        replayed = [t.clone() for t in captured]
        counted = buffer.snapshot()
        eager = gradients_of(model, x, dy, buffer, codec, storage)
        expected = buffer.snapshot()
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
        assert counted.layer_nnz == expected.layer_nnz
        assert all(nnz > 0 for nnz in counted.layer_nnz)
    assert not buffer.overflowed()
    with torch.no_grad():
        # All z are positive, and the four rows of a tile differ enough for 4 bits of exponent.
        x.copy_(2.0 ** (-4 * (torch.arange(301, device="cuda") % 4))[:, None].expand_as(x))
        for i, w in enumerate(model.weights):
            w.fill_(1 if i % 2 == 0 else 0.001)
    graph.replay()
    assert buffer.overflowed()
    assert int(buffer.used_bytes()) > 1.5 * buffer.capacity_bytes
    if codec != "exponent":
        # 301 * 500 values in each of two layers: 73 whole tiles, and 996 values in the last
        width = FULL_TILE[codec, storage] * 8 // TILE
        layer_bytes = 73 * FULL_TILE[codec, storage] + -(-996 * width // 128) * 16
        assert int(buffer.used_bytes()) == 2 * layer_bytes
    assert not buffer.snapshot().stale
