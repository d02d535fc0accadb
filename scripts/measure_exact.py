"""Measure format exact for docs/exact.md: bits per weight, memory, and what lossless mode reads.

    python scripts/measure_exact.py bits --models stories260K babyllama105
    python scripts/measure_exact.py memory
    python scripts/measure_exact.py lossless --results RESULTS

With --page docs/exact.md the table is written there as well. Models are directories; the demo model and random matrices
are always measured. RESULTS is the directory in which the commands on the page ran.
"""

import argparse
import errno
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from pages import fill, table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.gears.ladder import Gear

LADDERS = ("3,16", "4,16", "4,8,16")
COPIES = ("4,16", "4,8,16")  # in planes
ROWS, WIDTH = 512, 4096
BILLIONS = (1, 4, 8, 14, 32)
SMALL_GROUP = 32  # for models whose widths are no multiples of 64


class Weights(NamedTuple):
    """Of one model: bits per weight of all arrays in format exact, by ladder; of planes beside the original; and the
    entropy of the bfloat16 numbers.
    """

    name: str
    exact: dict[str, float]
    copies: dict[str, float]
    entropy: float


class Block(nn.Module):
    """A model of one matrix."""

    def __init__(self, weight: mx.array):
        super().__init__()
        self.proj = nn.Linear(1, 1, bias=False)
        self.proj.weight = weight


def random_matrices() -> Iterator[tuple[str, mx.array]]:
    random = np.random.default_rng(0)
    for name, values in (
        (f"Gaussian, {WIDTH} wide", random.standard_normal((ROWS, WIDTH))),
        (f"Student t, 5 degrees of freedom, {WIDTH} wide", random.standard_t(5, (ROWS, WIDTH))),
    ):
        yield name, mx.array((0.02 * values).astype(np.float32)).astype(mx.bfloat16)


def bfloat16_model(path: str | None) -> nn.Module:
    model, _ = load(path)
    model.set_dtype(mx.bfloat16)
    return model


def measured(name: str, make: Callable[[], nn.Module], group_size: int) -> Weights:
    """make: gives the model anew, since format exact drops its weights."""
    settings = {"group_size": group_size, "dtype": "bfloat16"}
    shapes = {layer.path: layer.module.weight.shape for layer in discover(make(), "all", group_size)[0]}
    exact, copies = {}, {}
    for ladder in LADDERS:
        gearbox = Gearbox(make(), ladder, format="exact", **settings)
        larger = shapes.keys() - {layer.path for layer in gearbox.layers}  # which stay as they are
        exact[ladder] = stored(gearbox, [gearbox.ladder.top]) + 2 * sum(math.prod(shapes[path]) for path in larger)
    for ladder in COPIES:
        gearbox = Gearbox(make(), ladder, **settings)
        copies[ladder] = stored(gearbox, gearbox.ladder)
    weights = sum(map(math.prod, shapes.values()))
    bits = ({ladder: 8 * count / weights for ladder, count in counts.items()} for counts in (exact, copies))
    return Weights(name, *bits, entropy(make()))


def stored(gearbox: Gearbox, gears: Iterable[Gear]) -> int:
    """The bytes of the arrays of these gears, each array once. The top gear of format exact has all of its arrays."""
    arrays: dict[int, mx.array] = {}
    for gear in gears:
        gearbox.shift(gear)
        modules = dict(gearbox.model.named_modules())
        for layer in gearbox.layers:
            arrays |= {id(array): array for _, array in tree_flatten(modules[layer.path].parameters())}
    return sum(array.nbytes for array in arrays.values())


def entropy(model: nn.Module) -> float:
    """Bits of the distribution of the bfloat16 numbers in all matrices: no code of single weights takes less."""
    matrices = [array for _, array in tree_flatten(model.parameters()) if array.ndim > 1]
    counts = np.bincount(np.concatenate([np.array(array.view(mx.uint16)).ravel() for array in matrices]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bits_table(args: argparse.Namespace) -> str:
    found = [measured(name, lambda weight=weight: Block(weight), 64) for name, weight in random_matrices()]
    found.append(measured("demo", lambda: bfloat16_model(None), 64))
    for path in args.models:
        name = f"{Path(path).name}, groups of {SMALL_GROUP}"
        found.append(measured(name, lambda path=path: bfloat16_model(path), SMALL_GROUP))
    head = ["weights", "entropy", *(f"`exact` {ladder}" for ladder in LADDERS), "bfloat16"]
    rows = [
        [
            weights.name,
            f"{weights.entropy:.2f}",
            *(f"{weights.exact[ladder]:.2f}" for ladder in LADDERS),
            16,
            *(f"{weights.copies[ladder]:.2f}" for ladder in COPIES),
        ]
        for weights in found
    ]
    return table([*head, *(f"`planes` {ladder}" for ladder in COPIES)], rows)


def memory_table(args: argparse.Namespace) -> str:
    demo = measured("demo", lambda: bfloat16_model(None), 64)
    head = ["weights", "bfloat16", *(f"`exact` {ladder}" for ladder in LADDERS), *(f"`planes` {x}" for x in COPIES)]
    bits = [16.0, *demo.exact.values(), *demo.copies.values()]
    return table(head, [[f"{count} B", *(f"{count * each / 8:.1f} GB" for each in bits)] for count in BILLIONS])


def lossless_table(results: Path) -> str:
    """What lossless mode reads, from the reports of measure_lossless.py. Raises FileNotFoundError if there are none."""
    rows = []
    for file in sorted(results.glob("exact_lossless_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        run = found["curve"]
        rows.append(
            [
                Path(found["model"]).name,
                ",".join(map(str, found["gears"])),
                f"{run['identical']} of {run['texts']}",
                f"{run['tokens_per_verification']:.1f}",
                f"{run['weight_bytes_per_token'] / 1e6:.2f} MB",
                f"{run['times_fewer_bytes']:.2f}",
                f"**{run['times_fewer_bytes_than_original']:.2f}**",
            ]
        )
    if not rows:
        raise FileNotFoundError(errno.ENOENT, "no report", str(results / "exact_lossless_*.json"))
    head = ["model", "gears", "identical", "tokens per verification", "read per token"]
    return table([*head, "times fewer than the top gear", "times fewer than bfloat16"], rows)


MAKE = {"bits": bits_table, "memory": memory_table, "lossless": lambda args: lossless_table(args.results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MAKE)
    parser.add_argument("--models", nargs="*", default=[], help="Directories.")
    parser.add_argument("--results", type=Path, default=Path(), help="Directory of the reports, for lossless.")
    parser.add_argument("--page", type=Path, help="File to write the table into.")
    args = parser.parse_args()
    made = MAKE[args.what](args)
    print(made)
    if args.page:
        fill(args.page, {args.what: lambda *_: made})


if __name__ == "__main__":
    main()
