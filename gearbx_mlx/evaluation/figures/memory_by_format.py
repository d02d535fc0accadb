"""Picture 2: memory of the weights by format, predicted and measured (GEARBX 17, figure 2)."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...formats import get_format
from ...telemetry.trace import BLUE, ORANGE
from .matrices import matrices
from .style import HATCHES
from .subject import Subject

GROUP_SIZE = 64
FORMATS = (("rowwise", 8), ("rowwise", 6), ("rowwise", 4), ("rowwise", 2), ("affine", 8), ("affine", 4))
HALF = 2  # bytes of fp16


def predicted(shape: tuple[int, ...], format: str, bits: int) -> tuple[float, int]:
    """Bytes of the codes and of the scales in fp16: one a row, or a scale and a bias for every 64 weights."""
    size = math.prod(shape)
    scales = shape[0] if format == "rowwise" else 2 * size // GROUP_SIZE
    return size * bits / 8, scales * HALF


def measured(layer: nn.Linear, format: str, bits: int) -> int:
    """Bytes of the arrays that the format makes of a layer in fp16, padding included."""
    dense = nn.Linear(1, 1, bias=False)
    dense.weight = layer.weight.astype(mx.float16)
    module = get_format(format).modules(dense, bits, (bits,), GROUP_SIZE, mx.float16)[bits]
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def measure(subject: Subject) -> dict[str, Any]:
    """Bytes of all linear layers in fp16, and in each format: codes and scales as predicted, and as they are."""
    layers = list(matrices(subject).values())
    rows = []
    for format, bits in FORMATS:
        parts = [predicted(layer.weight.shape, format, bits) for layer in layers]
        codes, scales = (sum(column) for column in zip(*parts))
        whole = sum(measured(layer, format, bits) for layer in layers)
        rows.append({"format": format, "bits": bits, "codes": codes, "scales": scales, "measured": whole})
    return {"layers": len(layers), "fp16": sum(HALF * layer.weight.size for layer in layers), "rows": rows}


def label(row: Mapping[str, Any]) -> str:
    return f"{row['format']} {row['bits']}"


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: codes and scales as predicted, over fp16; diamonds: the arrays."""
    axes, rows, whole = figure.subplots(), data["rows"], data["fp16"]
    names = ["fp16", *map(label, rows)]
    codes = [1.0, *(row["codes"] / whole for row in rows)]
    scales = [0.0, *(row["scales"] / whole for row in rows)]
    axes.bar(names, codes, width=0.6, color=BLUE, label="codes, predicted")
    axes.bar(names, scales, width=0.6, bottom=codes, color=ORANGE, hatch=HATCHES[1], label="scales, predicted")
    sizes = [row["measured"] / whole for row in rows]
    axes.plot(names[1:], sizes, "D", color="black", markerfacecolor="white", label="arrays, measured")
    axes.set(ylabel="bytes, fp16 = 1", xlabel="format and bits")
    axes.legend()


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB predicted and measured, their share of fp16, and the share of the scales."""
    head = ["format", "bits", "predicted, MB", "measured, MB", "of fp16", "of it scales"]
    rows = [["fp16", "16", f"{data['fp16'] / 1e6:.3f}", f"{data['fp16'] / 1e6:.3f}", "100.0%", "0.0%"]]
    for row in data["rows"]:
        made = row["codes"] + row["scales"]
        sizes = [f"{made / 1e6:.3f}", f"{row['measured'] / 1e6:.3f}", f"{row['measured'] / data['fp16']:.1%}"]
        rows.append([row["format"], str(row["bits"]), *sizes, f"{row['scales'] / made:.1%}"])
    return head, rows
