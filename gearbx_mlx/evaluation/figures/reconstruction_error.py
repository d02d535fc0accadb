"""Picture 4: how far per-channel codes are from the weights, by bits (GEARBX 17, figure 4, and 5.1)."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...formats.rowwise import dequantize, quantize
from ...telemetry.trace import BLACK, BLUE, VERMILION
from .matrices import matrices
from .subject import Subject

BITS = (2, 4, 6, 8)


def errors(weight: mx.array, bits: int) -> dict[str, Any]:
    """Of a matrix (O, I): relative and largest error, half the largest scale s, and the largest error over its s/2."""
    exact = weight.astype(mx.float32)  # scales in float32, so that nothing but the codes is rounded
    codes, scales = quantize(exact, bits)
    off = mx.abs(dequantize(codes, scales) - exact)
    rows = off.max(axis=-1)
    return {
        "relative": mx.sqrt(mx.square(off).sum() / mx.square(exact).sum()).item(),
        "largest": rows.max().item(),
        "bound": scales.max().item() / 2,
        "of_bound": (rows / (scales / 2)).max().item(),
    }


def measure(subject: Subject) -> dict[str, Any]:
    """For each width the errors of every matrix."""
    weights = {path: layer.weight for path, layer in matrices(subject).items()}
    return {str(bits): {path: errors(weight, bits) for path, weight in weights.items()} for bits in BITS}


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Left: the relative error of each matrix; right: its largest error over the bound."""
    left, right = figure.subplots(1, 2)
    for place, matrices_of in enumerate(data.values()):
        found = list(matrices_of.values())
        spread = place + np.linspace(-0.2, 0.2, len(found))
        left.plot(spread, [error["relative"] for error in found], "o", color=BLUE, markersize=2.5)
        right.plot(
            [error["bound"] for error in found],
            [error["largest"] for error in found],
            "os^D"[place],
            color=[VERMILION, "#e69f00", "#56b4e9", BLUE][place],
            markeredgecolor=BLACK,
            markeredgewidth=0.4,
            label=f"{list(data)[place]} bits",
        )
    bounds = [error["bound"] for found in data.values() for error in found.values()]
    ends = [min(bounds), max(bounds)]
    right.plot(ends, ends, color=BLACK, linestyle="--", linewidth=0.8, label="bound, s/2")
    left.set(yscale="log", xlabel="bits", ylabel="relative error of a matrix")
    left.set_xticks(range(len(data)), list(data))
    right.set(xscale="log", yscale="log", xlabel="half the largest scale, s/2", ylabel="largest error of a matrix")
    right.legend()


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each width: median and largest relative error, largest error and bound, largest error of a row over s/2."""
    rows = []
    for bits, found in data.items():
        relative = [error["relative"] for error in found.values()]
        largest, bound, share = (max(e[key] for e in found.values()) for key in ("largest", "bound", "of_bound"))
        cells = [f"{np.median(relative):.2%}", f"{max(relative):.2%}", f"{largest:.4f}", f"{bound:.4f}", f"{share:.4f}"]
        rows.append([bits, str(len(found)), *cells])
    head = ["bits", "matrices", "relative error, median", "largest", "largest error of a weight", "largest s/2"]
    return [*head, "error over its row's s/2, largest"], rows
