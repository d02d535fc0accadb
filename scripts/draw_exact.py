"""Draw where the bits of a weight go in format exact, for docs/exact.md.

python scripts/draw_exact.py docs/images/exact.png

The bits are those of a real weight of the demo model, and the bars those of Gaussian rows, both encoded here.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from matplotlib.patches import Patch

from gearbx_mlx import load
from gearbx_mlx.files.writing import replacing
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.telemetry.report import OUTSIDE, get_pyplot
from gearbx_mlx.telemetry.trace import gear_color

CODE, LOW, HIGH = (gear_color(place, 3) for place in range(3))
PARTS = {"code": CODE, "scale and bias": "#8d95dd", "high byte": HIGH, "low byte": LOW, "bfloat16": "0.85"}
WIDTH, GROUP = 4096, 64
SHOWN = 5  # column of the weight in the picture


def encoded(weight: mx.array) -> tuple[nn.Module, ExactMatrix]:
    """The low gear of a matrix, and its arrays."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    made = get_format("exact").modules(layer, 4, (4, 16), GROUP, mx.bfloat16)
    return made[4], made[16].matrix


def draw_boxes(axes: Any, left: float, y: float, texts: list[str], color: str) -> None:
    for place, text in enumerate(texts):
        axes.bar(left + place, 1, 1, y, align="edge", color=color, edgecolor="white")
        axes.text(left + place + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=11)


def draw_weight(axes: Any) -> None:
    """A weight's bits, and what is stored of them."""
    weight = load()[0].model.layers[0].mlp.up_proj.weight
    low, matrix = encoded(weight)
    bits = f"{int(weight.view(mx.uint16)[0, SHOWN].item()):016b}"
    code = int(low.weight[0, 0].item()) >> 4 * SHOWN & 15
    value = float(dense_weight(low)[0, SHOWN].item())
    axes.text(0, 5.15, f"a weight: {float(weight[0, SHOWN].item()):.6f}, in bfloat16", fontsize=11)
    draw_boxes(axes, 0, 4, list(bits[:8]), HIGH)
    draw_boxes(axes, 8, 4, list(bits[8:]), LOW)
    for x, text in ((0, "sign"), (1, "exponent"), (9, "mantissa")):
        axes.text(x + 0.05, 3.72, text, fontsize=8, color="0.4", va="center")
    arrow(axes, (4, 3.5), (2, 2.1), HIGH)
    arrow(axes, (4, 3.5), (12, 2.1), HIGH)
    arrow(axes, (12, 3.5), (21, 2.1), LOW)
    draw_boxes(axes, 0, 1, list(f"{code:04b}"), CODE)
    draw_boxes(axes, 8, 1, [""] * 8, HIGH)
    draw_boxes(axes, 17, 1, list(bits[8:]), LOW)
    near = f"code of the low gear:\nit stands for {value:.6f}, and\nnames 256 numbers around"
    zero = f"high byte, only where the code\nstands for 0 and names nothing:\n{share_of_high(matrix):.0%} of these"
    for x, text in ((0, near), (8, zero), (17, "low byte, of every weight:\nwhich of the 256 it is")):
        axes.text(x, 0.75, text, fontsize=9, va="top", color="0.2")
    axes.set(xlim=(-0.3, 25.5), ylim=(-1.3, 5.7))
    axes.set_axis_off()


def share_of_high(matrix: ExactMatrix) -> float:
    return matrix.offsets[-1].item() / matrix.low.size


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6})


def draw_bars(axes: Any) -> None:
    """Bits per weight, to scale."""
    random = np.random.default_rng(0).standard_normal((64, WIDTH)).astype(np.float32)
    _, matrix = encoded(mx.array(0.02 * random).astype(mx.bfloat16))
    weights = matrix.low.size
    scales = 8 * (matrix.scales.nbytes + matrix.biases[0].nbytes) / weights
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
    axes.legend([Patch(color=color) for color in PARTS.values()], list(PARTS), **OUTSIDE)
    axes.set_yticks(range(3), list(reversed(bars)))
    axes.set(xlabel=f"bits per weight (Gaussian rows, {WIDTH} wide, groups of {GROUP})", xlim=(0, 22))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="A PNG, which is replaced.")
    args = parser.parse_args()
    pyplot = get_pyplot()
    figure, (weight, bars) = pyplot.subplots(2, 1, figsize=(10, 6), layout="constrained", height_ratios=(3, 1.6))
    draw_weight(weight)
    draw_bars(bars)
    with replacing(args.out) as place:
        figure.savefig(place, dpi=120, format="png")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
