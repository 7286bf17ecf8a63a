"""How many bytes of each token does training hold for backward, with each --mlp?

    python scripts/bench_vram.py --preset tiny --data data/sample    # as initialized
    python scripts/bench_vram.py --checkpoint latest                 # trained; options are its own
    python scripts/bench_vram.py --checkpoint logs/RUN/step-00000080.pt --log-dir logs

Options are those of train_gpt.py. The bytes are those of all tensors that autograd really saved,
each storage once and parameters apart, and of the activation buffer's use: the slope between one
length and twice that, which leaves out what does not grow with the tokens. The model runs without
torch.compile, so it holds more than a compiled one does; the MLP's own part is the same.
"""

import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bitsparse_kernels import ActivationBuffer
from train_gpt import (
    BLOCK,
    GPT,
    Config,
    TrainData,
    first_capacity,
    parse_config,
    read_checkpoint,
    stop,
    window_blocks,
)

MODES = ("eager", "dense", "checkpoint", "bitsparse")


def read_arguments(arguments: list[str]) -> tuple[Config, dict | None]:
    """The config, and the checkpoint's weights where one was asked for and is kept."""
    if "--checkpoint" not in arguments:
        return parse_config(arguments), None
    at = arguments.index("--checkpoint")
    if at + 1 == len(arguments):
        stop("--checkpoint: expected a path, or latest")
    others = arguments[:at] + arguments[at + 2:]
    if arguments[at + 1] == "latest" and parse_config(others).keep == 0:
        return parse_config(others), None  # as run.sh asks after a run that leaves none
    # --resume, of which only the options and the weights are used here
    config = parse_config([*others, "--resume", arguments[at + 1]])
    return config, read_checkpoint(config.resume)["model"]


def saved_bytes(model: GPT, buffer: ActivationBuffer, *batch: torch.Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(t):
        storage = t.untyped_storage()  # kept, so that no address comes twice
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return t

    buffer.reset()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(*batch)
    del loss
    return sum(storage.nbytes() for storage in held.values()) + int(buffer.used_bytes())


def bytes_per_token(model: GPT, buffer: ActivationBuffer, config: Config, tokens: torch.Tensor,
                    window: torch.Tensor) -> dict[str, float]:
    """By --mlp."""
    half, slopes = max(1, config.microbatch_tokens // BLOCK // 2) * BLOCK, {}
    for mlp in MODES:
        for block in model.blocks:
            block.mlp.save = mlp
        short, long = (saved_bytes(model, buffer, tokens[:n], tokens[1: n + 1].long(), window)
                       for n in (half, 2 * half))
        slopes[mlp] = (long - short) / half
    return slopes


def main() -> None:
    config, weights = read_arguments(sys.argv[1:])
    torch.manual_seed(config.seed)
    data = TrainData(config)
    # a step's microbatches, one after the other: twice the shortest length is more than one of 128
    tokens = torch.cat([data.microbatch(0, i)[:-1] for i in range(3)])
    buffer = ActivationBuffer(2 * first_capacity(config), "cpu", config.layers)
    model = GPT(config, buffer)
    if weights is not None:
        model.load_state_dict(weights)
    step = 0 if weights is None else config.steps
    window = torch.tensor(window_blocks(config, step), dtype=torch.int32)
    slopes = bytes_per_token(model, buffer, config, tokens, window)
    where = f"from {config.resume}" if config.resume else "at initialization"
    print(f"held for backward, weights apart, {where} (CPU, torch {torch.__version__}, "
          f"triton {triton.__version__}):")
    for mlp in MODES:
        print(f"  --mlp {mlp:<10} {slopes[mlp]:7.0f} bytes/token, "
              f"{slopes[mlp] - slopes['checkpoint']:5.0f} of them the MLP's hidden activation, "
              f"{100 * slopes[mlp] / slopes['dense'] - 100:+.1f} % of dense")


if __name__ == "__main__":
    main()
