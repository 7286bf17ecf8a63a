"""Writes text with a trained model, from a checkpoint of train_gpt.py.

    python scripts/sample.py logs/RUN/step-00001750.pt
    python scripts/sample.py latest --prompt "The President of the United States" --tokens 200
    python scripts/sample.py latest --temperature 0     # the likeliest token each time

The checkpoint tells the model's sizes. GPT-2's tokenizer is taken from data/sample/tokenizer where
data/sample.py has put it, else tiktoken fetches it. The whole text is computed again for each
token, which is simple, and quick enough for a few hundred.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_gpt import (
    BLOCK,
    BOS,
    GPT,
    Config,
    compiled,
    find_checkpoint,
    read_checkpoint,
    window_blocks,
)


def stop(sentence: str) -> None:
    sys.exit(f"sample.py: {sentence}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a step-*.pt, or latest: the newest in --log-dir")
    parser.add_argument("--log-dir", default="logs", help="for latest (here: logs)")
    parser.add_argument("--prompt", default="", help="text to go on from (here: a new document)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens at most (here: 100)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0 takes the likeliest token, 1 draws as the model says (here: 0.8)")
    parser.add_argument("--top-k", type=int, default=50,
                        help="draws among so many likeliest tokens (0: all; here: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (here: 0)")
    options = parser.parse_args()
    for name, right, expected in (
            ("--tokens", options.tokens >= 1, "1 or more"),
            ("--temperature", 0 <= options.temperature < math.inf, "0 or more"),
            ("--top-k", options.top_k >= 0, "0 or more")):
        if not right:
            parser.error(f"argument {name}: expected {expected}, received "
                         f"{getattr(options, name[2:].replace('-', '_'))}")
    return options


def load_tokenizer():
    folder = Path(__file__).resolve().parent.parent / "data" / "sample" / "tokenizer"
    if folder.is_dir():
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder))
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        stop("tiktoken is not installed: pip install -r requirements.txt")
    except Exception as error:  # of requests, of the hash check
        stop(f"GPT-2's tokenizer is not in {folder} and could not be fetched "
             f"({type(error).__name__}); python data/sample.py puts it there")


def load_model(path: Path, device: torch.device) -> tuple[GPT, Config]:
    checkpoint = read_checkpoint(path, ("config", "model"))
    config = Config(**checkpoint["config"] | {"mlp": "dense"})  # nothing is saved here
    weights = checkpoint["model"]
    model = GPT(config, None)
    found = {name: list(t.shape) for name, t in weights.items()}
    expected = {name: list(p.shape) for name, p in model.named_parameters()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            stop(f"{path} has weights of another config than the one in it (--layers "
                 f"{config.layers} --dim {config.dim} --heads {config.heads}): {name}, expected "
                 f"{expected.get(name, 'none')}, received {found.get(name, 'none')}")
    model.load_state_dict(weights)
    return model.to(device), config


def next_token(logits: torch.Tensor, options: argparse.Namespace, generator) -> int:
    if options.temperature == 0:
        return int(logits.topk(1).indices)  # among equals the one that --top-k 1 takes
    if 0 < options.top_k < len(logits):
        best = logits.topk(options.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, best.indices, best.values)
    # in float64 on the CPU, so that a seed draws alike everywhere from alike logits
    odds = F.softmax(logits.double().cpu() / options.temperature, -1)
    return int(torch.multinomial(odds, 1, generator=generator))


@torch.no_grad()
def main() -> None:
    options = read_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config = load_model(find_checkpoint(options.checkpoint, options.log_dir), device)
    tokenizer = load_tokenizer()
    tokens = [BOS, *tokenizer.encode_ordinary(options.prompt)]
    total = -(-(len(tokens) + options.tokens) // BLOCK) * BLOCK  # one shape, compiled once
    longest = len(model.cos)
    if total > longest:
        stop(f"the prompt's {len(tokens) - 1} tokens and --tokens {options.tokens} make {total} "
             f"with padding, and the model was made for {longest} at most")
    window = torch.tensor(window_blocks(config, config.steps), dtype=torch.int32, device=device)
    hidden = compiled(model.hidden)
    generator = torch.Generator().manual_seed(options.seed)
    print(options.prompt, end="", flush=True)
    held = []  # bytes of a character that is not whole yet
    for _ in range(options.tokens):
        padded = torch.tensor(tokens + [BOS] * (total - len(tokens)), dtype=torch.int32)
        x = hidden(padded.to(device), window)[len(tokens) - 1]
        z = F.linear(x, model.head.to(x.dtype)).float()
        logits = 30 * torch.sigmoid(z / (7.5 * config.dim ** 0.5))
        token = next_token(logits[: BOS + 1], options, generator)  # the rest of VOCAB is padding
        if token == BOS:
            break
        tokens.append(token)
        held.append(token)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd"):
            print(text, end="", flush=True)
            held.clear()
    print(tokenizer.decode(held))


if __name__ == "__main__":
    main()
