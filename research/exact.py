"""Format exact: bits per weight, memory, and a picture, for docs/exact.md."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.telemetry.trace import LEGEND_OUTSIDE, gear_color, get_pyplot, save

from .studies import Found, study

LADDER = "4,16"
COPIES = ("4,16", "4,8,16")  # in planes
ROWS, WIDTH = 512, 4096
BILLIONS = (1, 4, 8, 14, 32)
SMALL_GROUP = 32  # for models whose widths are not multiples of 64


class Weights(NamedTuple):
    """One model: bits per weight of all arrays in format exact; of planes beside the original, by ladder; and the
    entropy of the bfloat16 numbers.
    """

    name: str
    exact: float
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


def measured(name: str, make: Callable[..., nn.Module], group_size: int) -> Weights:
    """make: loads the model again, since format exact drops its weights."""
    settings: dict[str, Any] = {"group_size": group_size, "dtype": "bfloat16"}
    shapes = {layer.path: layer.module.weight.shape for layer in discover(make(), "all", group_size)[0]}
    weights = sum(map(math.prod, shapes.values()))
    gearbox = Gearbox(make(), LADDER, format="exact", **settings)
    larger = shapes.keys() - {layer.path for layer in gearbox.layers}  # which stay as they are
    exact = stored(gearbox, [gearbox.ladder.top]) + 2 * sum(math.prod(shapes[path]) for path in larger)
    copies = {}
    for ladder in COPIES:
        gearbox = Gearbox(make(), ladder, **settings)
        copies[ladder] = 8 * stored(gearbox, gearbox.ladder) / weights
    return Weights(name, 8 * exact / weights, copies, entropy(make()))


def stored(gearbox: Gearbox, gears: Iterable[Gear]) -> int:
    """Return the bytes of the arrays of these gears, without duplicates. Format exact's top gear has all arrays."""
    arrays: dict[int, mx.array] = {}
    for gear in gears:
        gearbox.shift(gear)
        modules = dict(gearbox.model.named_modules())
        for layer in gearbox.layers:
            arrays |= {id(array): array for _, array in tree_flatten(modules[layer.path].parameters())}
    return sum(array.nbytes for array in arrays.values())


def entropy(model: nn.Module) -> float:
    """Entropy of the bfloat16 numbers in all matrices, in bits: no code of single weights takes less."""
    matrices = [array for _, array in tree_flatten(model.parameters()) if array.ndim > 1]
    counts = np.bincount(np.concatenate([np.array(array.view(mx.uint16)).ravel() for array in matrices]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bits_table(demo: Weights, models: list[str]) -> str:
    found = [measured(name, lambda weight=weight: Block(weight), 64) for name, weight in random_matrices()]
    found.append(demo)
    for path in models:
        name = f"{Path(path).name}, groups of {SMALL_GROUP}"
        found.append(measured(name, lambda path=path: bfloat16_model(path), SMALL_GROUP))
    head = ["weights", "entropy", "`exact`", "bfloat16"]
    rows = [
        [
            weights.name,
            f"{weights.entropy:.2f}",
            f"{weights.exact:.2f}",
            16,
            *(f"{weights.copies[ladder]:.2f}" for ladder in COPIES),
        ]
        for weights in found
    ]
    return table([*head, *(f"`planes` {ladder}" for ladder in COPIES)], rows)


def memory_table(demo: Weights) -> str:
    head = ["weights", "bfloat16", "`exact`", *(f"`planes` {ladder}" for ladder in COPIES)]
    bits = [16.0, demo.exact, *demo.copies.values()]
    return table(head, [[f"{count} B", *(f"{count * each / 8:.1f} GB" for each in bits)] for count in BILLIONS])


CODE, LOW, HIGH = (gear_color(place, 3) for place in range(3))
PARTS = {"code": CODE, "scale and bias": "#8d95dd", "high byte": HIGH, "low byte": LOW, "bfloat16": "0.85"}
DRAWN_WIDTH, GROUP = 4096, 64
SHOWN = 5  # the weight's column in the picture


def encoded(weight: mx.array) -> tuple[nn.Module, ExactMatrix]:
    """Return the low gear of a matrix, and its arrays."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    made = get_format("exact").modules(layer, 4, (4, 16), GROUP, mx.bfloat16)
    return made[4], made[16].matrix


def draw_boxes(axes: Any, left: float, y: float, texts: list[str], color: str) -> None:
    for place, text in enumerate(texts):
        axes.bar(left + place, 1, 1, y, align="edge", color=color, edgecolor="white")
        axes.text(left + place + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=11)


def draw_weight(axes: Any) -> None:
    """Draw a weight's bits, and the stored parts of them."""
    weight = load()[0].model.layers[0].mlp.up_proj.weight
    low, matrix = encoded(weight)
    bits = f"{int(weight.view(mx.uint16)[0, SHOWN].item()):016b}"
    code = int(low.weight[0, 0].item()) >> 4 * SHOWN & 15
    value = np.array(dense_weight(low).astype(mx.float32))[0, SHOWN]
    axes.text(0, 5.15, f"a weight: {float(weight[0, SHOWN].item()):.6f}, in bfloat16", fontsize=11)
    draw_boxes(axes, 0, 4, list(bits[:8]), HIGH)
    draw_boxes(axes, 8, 4, list(bits[8:]), LOW)
    for begin, end, text in ((0, 1, "sign"), (1, 9, "exponent"), (9, 16, "mantissa")):
        bracket(axes, begin, end, text)
    arrow(axes, (4, 3.1), (2, 2.1), HIGH)
    arrow(axes, (4, 3.1), (12, 2.1), HIGH)
    arrow(axes, (12, 3.1), (21, 2.1), LOW)
    axes.text(
        17,
        4.5,
        "orange: the high byte\npurple: the low byte, which begins\nwith the last bit of the exponent",
        va="center",
    )
    draw_boxes(axes, 0, 1, list(f"{code:04b}"), CODE)
    draw_boxes(axes, 8, 1, [""] * 8, HIGH)
    draw_boxes(axes, 17, 1, list(bits[8:]), LOW)
    near = f"code of the low gear:\nit stands for {value:.6f}, and\nnames 256 numbers around"
    zero = f"high byte, only where the code\nstands for 0 and names nothing:\n{share_of_high(matrix):.0%} of these"
    for x, text in ((0, near), (8, zero), (17, "low byte, of every weight:\nwhich of the 256 it is")):
        axes.text(x, 0.75, text, fontsize=9, va="top", color="0.2")
    axes.set(xlim=(-0.3, 25.5), ylim=(-1.3, 5.7))
    axes.set_axis_off()


def bracket(axes: Any, begin: float, end: float, text: str) -> None:
    """Name the bits from one column to another, below them."""
    axes.plot([begin + 0.1, begin + 0.1, end - 0.1, end - 0.1], [3.9, 3.75, 3.75, 3.9], color="0.4", linewidth=1)
    axes.text((begin + end) / 2, 3.45, text, fontsize=9, color="0.2", ha="center", va="center")


def share_of_high(matrix: ExactMatrix) -> float:
    return int(np.array(matrix.offsets)[-1]) / matrix.low.size


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6})


def draw_bars(axes: Any) -> None:
    """Bits per weight, to scale."""
    random = np.random.default_rng(0).standard_normal((64, DRAWN_WIDTH)).astype(np.float32)
    _, matrix = encoded(mx.array(0.02 * random).astype(mx.bfloat16))
    weights = matrix.low.size
    scales = 8 * (matrix.scales.nbytes + matrix.biases.nbytes) / weights
    high = 8 * (matrix.high.nbytes + matrix.offsets.nbytes) / weights
    bars = {
        "bfloat16": {"bfloat16": 16.0},
        "exact 4,16": {"code": 4.0, "scale and bias": scales, "high byte": high, "low byte": 8.0},
        "two copies 4,16": {"code": 4.0, "scale and bias": scales, "bfloat16": 16.0},
    }
    for place, parts in enumerate(reversed(bars.values())):
        left = 0.0
        for part, size in parts.items():
            axes.barh(place, size, left=left, color=PARTS[part], edgecolor="white", height=0.7)
            left += size
        axes.text(left + 0.15, place, f"{left:.1f}", va="center", fontsize=10)
    from matplotlib.patches import Patch

    axes.legend([Patch(color=color) for color in PARTS.values()], list(PARTS), **LEGEND_OUTSIDE)
    axes.set_yticks(range(3), list(reversed(bars)))
    axes.set(xlabel=f"bits per weight (Gaussian rows, {DRAWN_WIDTH} wide, groups of {GROUP})", xlim=(0, 22))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


@study("docs/exact.md", writes="images/exact.png", minutes=3)
def exact(models: list[str] = []) -> Found:  # noqa: B006 - nothing changes it
    """Compute bits per weight and memory of format exact, and draw a weight.

    Args:
        models: Directories besides the demo model and random matrices, such as of stories260K and babyllama105.
    """
    demo = measured("demo", lambda: bfloat16_model(None), 64)
    tables = {"bits": bits_table(demo, models), "memory": memory_table(demo)}
    return Found(tables, pictures={"exact.png": draw})


def draw(path: Path) -> None:
    """Draw the storage of the bits of a weight of the demo model, and bars of Gaussian rows."""
    figure, (weight, bars) = get_pyplot().subplots(2, 1, figsize=(10, 6), layout="constrained", height_ratios=(3, 1.6))
    draw_weight(weight)
    draw_bars(bars)
    save(figure, path, dpi=120)
