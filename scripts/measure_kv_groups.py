"""Measure how groups of numbers for 4-bit keys and values change a model's predictions: KL from entries as they are.

Groups run along a head's numbers, so that each position is quantized by itself, or (keys, as in KIVI and QuantSpec)
along 64 positions of each number. Every token sees quantized keys and values, its own included.

    python scripts/measure_kv_groups.py [--models MODEL ...] [--texts 4] [--page docs/kv_gears.md]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from pages import fill, table

from gearbx_mlx import load
from gearbx_mlx.formats.kv_cache import pack, unpack
from gearbx_mlx.loading import DEMO_MODEL

TALES = Path(__file__).with_name("tales_calibrate.txt")
CONTEXT = 256  # tokens of each text: all models know so many
POSITIONS = 64  # of a group along positions
WIDTHS = (4, 4)
SCALE = 16  # bits of a scale, and of an offset

Change = Callable[[mx.array], mx.array]


def same(vectors: mx.array) -> mx.array:
    return vectors


def per_token(group: int, bits: int = 4) -> Change:
    """Quantizes vectors (B, H, S, D) in groups of so many numbers of a position."""

    def change(vectors: mx.array) -> mx.array:
        packed = pack(vectors, WIDTHS, min(group, vectors.shape[-1]))
        return unpack(*packed, WIDTHS, bits)

    return change


def per_channel(vectors: mx.array) -> mx.array:
    """Quantizes vectors (B, H, S, D) in groups of positions; the last positions, too few for a group, stay."""
    whole = vectors.shape[2] // POSITIONS * POSITIONS
    turned = per_token(POSITIONS)(vectors[:, :, :whole].swapaxes(2, 3)).swapaxes(2, 3)
    return mx.concatenate([turned, vectors[:, :, whole:]], axis=2)


def bits_per_number(keys: int, values: int, bits: int = 4) -> str:
    """Bits of a number, on average, with groups of so many keys and values that share a scale and an offset."""
    return f"{bits + (2 * SCALE / keys + 2 * SCALE / values) / 2:g}"


WAYS: dict[str, tuple[str, Change, Change]] = {  # bits per number; keys, values
    "64 of a position": (bits_per_number(64, 64), per_token(64), per_token(64)),
    "32 of a position": (bits_per_number(32, 32), per_token(32), per_token(32)),
    "16 of a position": (bits_per_number(16, 16), per_token(16), per_token(16)),
    "keys: 64 positions; values: 64 of a position": (bits_per_number(POSITIONS, 64), per_channel, per_token(64)),
    "keys: 64 positions; values: 32 of a position": (bits_per_number(POSITIONS, 32), per_channel, per_token(32)),
    "32 of a position, both planes": (bits_per_number(32, 32, 8), per_token(32, 8), per_token(32, 8)),
}


class ChangedCache(KVCache):
    """A cache that keeps changed keys and values."""

    def __init__(self, keys: Change, values: Change):
        super().__init__()
        self.changes = keys, values

    def update_and_fetch(self, keys, values):
        return super().update_and_fetch(*(change(vectors) for change, vectors in zip(self.changes, (keys, values))))


def logprobs(model: nn.Module, texts: list[list[int]], keys: Change, values: Change) -> mx.array:
    """(tokens, V) of all texts."""
    found = []
    for text in texts:
        logits = model(mx.array([text]), cache=[ChangedCache(keys, values) for _ in model.layers])[0]
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1])
    return mx.concatenate(found)


def measured(path: str, count: int) -> list[str]:
    """KL in bits and the share of equal choices, in each way."""
    model, tokenizer = load(path)
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(TALES.read_text(encoding="utf-8"))
    texts = [tokens[i * CONTEXT : (i + 1) * CONTEXT] for i in range(min(count, len(tokens) // CONTEXT))]
    exact = logprobs(model, texts, same, same)
    figures = []
    for _, keys, values in WAYS.values():
        changed = logprobs(model, texts, keys, values)
        kl = (mx.exp(exact) * (exact - changed)).sum(axis=-1).mean() / mx.log(mx.array(2.0))
        equal = (exact.argmax(axis=-1) == changed.argmax(axis=-1)).astype(mx.float32).mean()
        figures.append(f"{kl.item():.4f} ({equal.item():.1%})")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="beside the demo model")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    models = {Path(path).name: measured(path, args.texts) for path in (str(DEMO_MODEL), *args.models)}
    rows = [[way, bits, *each] for (way, (bits, *_)), *each in zip(WAYS.items(), *models.values())]
    made = table(["groups", "bits", *models], rows)
    print(made)
    if args.page:
        fill(args.page, {"kv_groups": lambda *_: made})


if __name__ == "__main__":
    main()
