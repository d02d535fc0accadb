"""Tokens per second of a random Llama's gears with MLX's kernels and with native ones, beside MLX's dense float32.

    python scripts/compare_kernels.py --shape 1024x8 --tokens 24

Rounds go through all variants in turn, and medians are taken, so that what else the machine is doing meets all of them
alike. Ratios of one run can be compared, times of different runs cannot.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from gearbx_mlx import Gearbox
from gearbx_mlx.kernels import cpu


def random_llama(width: int, layers: int, dtype: mx.Dtype) -> nn.Module:
    """MLP 2.75 times as wide, heads of 64 with half as many for keys and values, a vocabulary of 32000."""
    mx.random.seed(0)
    llama = importlib.import_module("mlx_lm.models.llama")
    shape = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def decode(model: nn.Module, tokens: int) -> Callable[[], float]:
    """A round: seconds per token of a few greedy tokens after a short prompt."""
    cache_of = importlib.import_module("mlx_lm.models.cache").make_prompt_cache

    def one_round() -> float:
        cache = cache_of(model)
        token = mx.argmax(model(mx.array([[1, 2, 3]]), cache=cache)[:, -1:], axis=-1)
        mx.eval(token)
        start = time.perf_counter()
        for _ in range(tokens):
            token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)
        return (time.perf_counter() - start) / tokens

    return one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1024x8", help="WIDTHxLAYERS. Default: 1024x8")
    parser.add_argument("--tokens", type=int, default=24, help="Tokens in a round. Default: 24")
    parser.add_argument("--rounds", type=int, default=5, help="Default: 5")
    parser.add_argument("--slow-tokens", type=int, default=2, help="Tokens in a round of MLX's own kernels. Default: 2")
    args = parser.parse_args()
    width, layers = (int(part) for part in args.shape.split("x"))
    reason = cpu.why_not()
    if reason is not None:
        raise SystemExit(f"there are no native kernels: {reason}")

    variants: dict[str, tuple[str, int]] = {  # name: kernels and gear, tokens in a round
        "mlx, dense float32": ("mlx high", args.slow_tokens),
        "mlx, planes, 4 bits": ("mlx low", args.slow_tokens),
        "native, planes, 4 bits": ("native low", args.tokens),
        "native, planes, 8 bits": ("native mid", args.tokens),
        "native, dense bfloat16": ("native high", args.tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    boxes = {k: Gearbox(random_llama(width, layers, mx.bfloat16), kernels=k) for k in ("mlx", "native")}
    for _ in range(args.rounds + 1):
        for name, (engaged, tokens) in variants.items():
            kernels, gear = engaged.split()
            boxes[kernels].shift(gear)
            seconds[name].append(decode(boxes[kernels].model, tokens)())
    # The first round is a warm-up.
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    base = medians["mlx, dense float32"]
    print(f"shape {args.shape}, {cpu.native().threads()} threads, median of {args.rounds} rounds")  # type: ignore[union-attr]
    print(f"{'':24} {'tokens/s':>9} {'ratio':>7} {'spread':>13}")
    for name, median in medians.items():
        low, high = (base / f(seconds[name][1:]) for f in (max, min))
        print(f"{name:24} {1 / median:9.2f} {base / median:7.2f} {low:6.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
