"""How fast the trainer's loader is, against what the fastest run needs: 20 x 600,000 tokens/s.

    python scripts/bench_loader.py                       # on a shard made for the purpose
    python scripts/bench_loader.py --data data/fineweb10B

Reads global batches as a rank does that gets every one of them (world size 1), on the thread that
trains: the time is what a step waits for its tokens. First checks that the batches hold the shards'
tokens. Also prints how long the plan of all batches takes, which is made before the first step.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt

NEED = 20 * 600_000  # tokens/s


def make_shards(folder: str, tokens: int = 100_000_000, mean_document: int = 700) -> None:
    """One train shard of the size of FineWeb's, of random documents."""
    random = np.random.default_rng(0)
    shard = random.integers(0, train_gpt.BOS, tokens, dtype=np.uint16)
    shard[random.random(tokens) < 1 / mean_document] = train_gpt.BOS
    shard[0] = train_gpt.BOS
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, tokens
    with open(Path(folder) / "fineweb_train_000001.bin", "wb") as file:
        file.write(header.tobytes())
        file.write(shard.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of shards (here: made for the purpose)")
    parser.add_argument("--microbatch-tokens", type=int, default=49152)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            make_shards(made)
        config = train_gpt.Config(data=options.data or made, steps=1,
                                  microbatch_tokens=options.microbatch_tokens)
        start = time.perf_counter()
        data = train_gpt.TrainData(config)
        planned = time.perf_counter() - start
        shard, starts = data.batches[0]
        first = data.microbatch(0, 0).numpy()
        if not np.array_equal(first, data.shards[shard][starts[0]: starts[0] + len(first)]):
            sys.exit("bench_loader.py: the first microbatch does not hold the shard's tokens")
        tokens, start = 0, time.perf_counter()
        for step in range(len(data.batches)):
            for i in range(train_gpt.MICROBATCHES):
                tokens += len(data.microbatch(step, i)) - 1
        rate = tokens / (time.perf_counter() - start)
    print(f"plan of {len(data.batches)} global batches: {planned:.2f} s")
    print(f"{rate / 1e6:.0f} M tokens/s over {tokens} tokens; needed {NEED / 1e6:.0f} M: "
          f"{'enough' if rate >= NEED else 'TOO SLOW'}")
    sys.exit(rate < NEED)


if __name__ == "__main__":
    main()
