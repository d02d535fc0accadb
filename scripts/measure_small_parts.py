"""Measure what 8 bits for norms and embeddings cost and save, for docs/sensitivity.md.

    python scripts/measure_small_parts.py [--models DIR ...] [--page docs/sensitivity.md]

The demo model, and those given. Embeddings are rounded for looking up alone: a tied table stays as it is as a head.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from pages import fill, table

from gearbx_mlx import load
from gearbx_mlx.bit_selection.h_process import GarbageCheck
from gearbx_mlx.evaluation.text import read_documents

TALES = Path(__file__).with_name("tales_calibrate.txt")
CONTEXT, TEXTS = 256, 8
GROUP = 64


def rounded(values: mx.array, bits: int) -> mx.array:
    """The values as affine codes with a scale and a bias for each group stand for them; a vector may end within one."""
    rows = values.reshape(-1, values.shape[-1])
    wide = mx.pad(rows, ((0, 0), (0, -rows.shape[-1] % GROUP)), "edge")
    made = mx.dequantize(*mx.quantize(wide, GROUP, bits), GROUP, bits)
    return made[:, : values.shape[-1]].reshape(values.shape)


class LookedUp(nn.Embedding):
    """An embedding whose rows are looked up in another table than the one that is the head."""

    def __init__(self, embedding: nn.Embedding, bits: int):
        nn.Module.__init__(self)
        self.weight, self._rows = embedding.weight, rounded(embedding.weight, bits)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._rows[tokens]


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.RMSNorm | nn.LayerNorm)}


def embeddings(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Embedding)}


def put(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    model.update_modules(tree_unflatten(list(modules.items())))


@contextmanager
def changed(model: nn.Module, part: str, bits: int) -> Iterator[None]:
    """The model with norms or embeddings at these bits, as long as the block goes on."""
    if part == "norms":
        before = {path: module.weight for path, module in norms(model).items()}
        for module in norms(model).values():
            module.weight = rounded(module.weight, bits)
        yield
        for path, module in norms(model).items():
            module.weight = before[path]
    else:
        own = embeddings(model)
        put(model, {path: LookedUp(module, bits) for path, module in own.items()})
        yield
        put(model, own)


def measured(path: str | None) -> list[list[str]]:
    model, tokenizer = load(path)
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(read_documents(TALES)[0])
    check = GarbageCheck(model, [tokens[i * CONTEXT : (i + 1) * CONTEXT] for i in range(TEXTS)], written=0)
    whole = sum(array.size for _, array in tree_flatten(model.parameters()))
    rows = []
    for part, found in (("norms", norms), ("embeddings", embeddings)):
        share = sum(module.weight.size for module in found(model).values()) / whole
        for bits in (8, 4):
            with changed(model, part, bits):
                rows.append([path_name(path), part, bits, f"{check.divergence(model):.2g}", f"{share:.2%}"])
    return rows


def path_name(path: str | None) -> str:
    return "demo model" if path is None else Path(path).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="Folders of further models.")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    rows = [row for path in (None, *args.models) for row in measured(path)]
    found = table(["model", "part", "bits", "KL, nats", "share of the weights"], rows)
    print(found)
    if args.page:
        fill(args.page, {"small_parts": lambda: found})


if __name__ == "__main__":
    main()
