"""train_gpt.py on several ranks: the same global batches, the same model, one agreement.

What:  1, 2 and 4 processes over gloo read the same 8 microbatches a step and train alike; a buffer
       too small on one rank only makes the step void on all, and leaves no trace; each slot of a
       global batch and each val sequence is read by exactly one rank of 1, 2, 4 or 8; other
       numbers of ranks are refused.
Needs: a CPU, and sockets on the loopback address. With a GPU the processes would want one each
       and NCCL: the runs of several processes are skipped there.
Run:   python -m pytest tests/test_ranks.py
"""

import math
import os
import socket
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import train_gpt
from train_gpt import MICROBATCHES, Config, Log, Ranks, Trainer, start_ranks

STEPS = 6
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def make_trainer(folder, logs, ranks):
    # 6 layers: their 6 matrices w1 do not divide by 4 ranks, so that Muon's padding is used
    config = Config(data=str(folder), steps=STEPS, epochs=4, microbatch_tokens=128, val_tokens=1280,
                    val_sequence=256, val_every=4, layers=6, dim=32, heads=2, window_end=256,
                    log_dir=str(logs), wandb=False)
    return Trainer(config, ranks, Log(config, ranks))


def train(folder, logs, ranks, starved=()):
    """One run, and what this rank saw of it.

    starved: (step, rank); the rank's buffer is made much too small before that step's first try.
    """
    trainer = make_trainer(folder, logs, ranks)
    read, resized, vals, starved = [], [], [], dict(starved)
    step, microbatch, resize = trainer.step, trainer.train.microbatch, trainer.buffer.resize
    validate = trainer.validate

    def watched_step(number):
        if starved.pop(number, None) == ranks.rank:
            resize(1000)
        return step(number)

    def watched_microbatch(number, i):
        tokens = microbatch(number, i)
        read.append((number, i, hash(tuple(tokens.tolist()))))
        return tokens

    trainer.step, trainer.train.microbatch = watched_step, watched_microbatch
    trainer.validate = lambda number: vals.append(validate(number)) or vals[-1]
    trainer.buffer.resize = lambda size: resized.append(size) or resize(size)
    trainer.run()
    return {"read": read, "resized": resized, "overflows": trainer.overflows, "vals": vals,
            "losses": [row["loss"] for row in trainer.done],
            "weights": [p.detach() for p in trainer.model.parameters()],
            "moments": [*trainer.muon.state, *trainer.adam.state]}


# before which steps whose buffer is too small: one rank's; another's; each's in turn, so that the
# second overflows while the first's is pending; the last step
STARVED = {"rank 1": [(2, 1)], "rank 0": [(0, 0)], "in turn": [(1, 0), (2, 1)], "last": [(5, 1)]}


def run_rank(rank, world_size, port, folder, out):
    """A process's life: the runs of train(), their results in out."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train_gpt.VOCAB, train_gpt.BOS = 512, 511  # most of a small step's time is the vocabulary
    ranks = start_ranks()
    runs = {"plain": []} | (STARVED if world_size == 2 else {})
    torch.save({name: train(folder, out / "logs", ranks, starved)
                for name, starved in runs.items()}, out / f"{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(make_text_folder, tmp_path_factory):
    """{world size: [a rank's {run: result}]}"""
    folder, found = make_text_folder(bos=511), {}
    for world_size in (1, 2, 4):
        out = tmp_path_factory.mktemp("ranks")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(
            run_rank, (world_size, port, folder, out), nprocs=world_size)
        found[world_size] = [torch.load(out / f"{rank}.pt") for rank in range(world_size)]
        assert len(list((out / "logs").glob("*.txt"))) == len(found[world_size][0])  # rank 0's
    return found


@on_cpu
def test_global_batches_are_the_same(results):
    expected = Counter(results[1][0]["plain"]["read"])
    assert Counter((step, i) for step, i, _ in expected) == Counter(
        (step, i) for step in range(STEPS) for i in range(MICROBATCHES))
    assert len({tokens for *_, tokens in expected}) == STEPS * MICROBATCHES
    for world_size in (2, 4):
        read = [rank["plain"]["read"] for rank in results[world_size]]
        assert sum(map(Counter, read), Counter()) == expected
        assert {len(r) for r in read} == {len(expected) // world_size}


@on_cpu
def test_ranks_hold_the_same_model(results):
    for world_size in (2, 4):
        first, *others = [rank["plain"] for rank in results[world_size]]
        for other in others:
            assert other["losses"] == first["losses"]
            assert other["vals"] == first["vals"]
            for a, b in zip(other["weights"], first["weights"], strict=True):
                assert torch.equal(a, b)


# Gradients are bf16 sums over 8 microbatches (embeddings) or pass through bf16 (Muon), here in
# another order: 2^-9 of an update, and what follows from it. Seen in these runs: 3e-4 of a loss.
TOLERANCE = 2e-3


@on_cpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(results, world_size):
    one, many = results[1][0]["plain"], results[world_size][0]["plain"]
    # the same weights: the sum of 8 float32 losses in another order
    assert many["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert many["vals"][0] == pytest.approx(one["vals"][0], rel=1e-6)
    assert many["losses"] == pytest.approx(one["losses"], rel=TOLERANCE)
    assert many["vals"] == pytest.approx(one["vals"], rel=TOLERANCE)
    assert one["losses"][0] - one["losses"][-1] > 20 * TOLERANCE * one["losses"][0]


@on_cpu
@pytest.mark.parametrize("name", STARVED)
def test_overflow_on_one_rank_changes_nothing(results, name):
    starved = {rank for _, rank in STARVED[name]}
    for rank, runs in enumerate(results[2]):
        plain, run = runs["plain"], runs[name]
        assert plain["overflows"] == 0
        assert run["overflows"] == len(STARVED[name])
        assert len(run["resized"]) == (rank in starved)  # grown where it was too small, once
        assert run["losses"] == plain["losses"]
        # validation after the repeated step may be repeated with it
        assert list(dict.fromkeys(run["vals"])) == plain["vals"]
        for key in ("weights", "moments"):
            for a, b in zip(run[key], plain[key], strict=True):
                assert torch.equal(a, b)
        assert len(run["read"]) > len(plain["read"])
        assert set(run["read"]) == set(plain["read"])


class LoneRank(Ranks):
    """A rank whose others do not exist: what it would send, it keeps."""

    def sum_(self, x):
        pass


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_each_microbatch_and_val_sequence_is_read_once(
        make_text_folder, tmp_path, monkeypatch, world_size):
    monkeypatch.setattr(train_gpt, "VOCAB", 512)
    monkeypatch.setattr(train_gpt, "BOS", 511)
    device = torch.device("cpu")
    trainer = make_trainer(make_text_folder(bos=511), tmp_path, Ranks(0, 1, device))
    trainer.forward = lambda *batch: trainer.model.scalars.sum()
    trainer.muon.step = trainer.adam.step = lambda *arguments: None
    slots, sequences = [], []
    microbatch, val = trainer.train.microbatch, trainer.val
    trainer.train.microbatch = lambda step, i: slots.append((step, i)) or microbatch(step, i)

    class WatchedVal:
        def __len__(self):
            return len(val)

        def __getitem__(self, i):
            sequences.append(i)
            return val[i]

    trainer.val = WatchedVal()
    for rank in range(world_size):
        trainer.ranks = LoneRank(rank, world_size, device)
        trainer.step(3)
        trainer.validate(3)
    assert sorted(slots) == [(3, i) for i in range(MICROBATCHES)]
    assert sorted(sequences) == list(range(5))  # 1280 tokens; 5 divides by none of 2, 4, 8


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 16])
def test_other_world_sizes_are_refused(monkeypatch, world_size):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    expected = f"^train_gpt.py: expected 1, 2, 4 or 8 processes, received {world_size}$"
    with pytest.raises(SystemExit, match=expected):
        start_ranks()


def test_one_process_needs_no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = start_ranks()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert not dist.is_initialized()
    x = torch.arange(4.0)
    assert ranks.scatter_mean(x) is x
    assert ranks.gather(x) is x
    assert math.isclose(ranks.part(x).sum(), 6)
