"""Pictures of bytes and of errors: memory by format (2), reconstruction error (4), residency (7)."""

import gc
import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.rowwise import dequantize, quantize
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.offload import Host
from gearbx_mlx.telemetry.trace import BLACK, BLUE, ORANGE, VERMILION

from .subject import GEARS, HATCHES, NAMES, Subject, matrices

# Picture 2: memory of the weights by format, predicted and measured (GEARBX 17, figure 2).

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


def measure_memory_by_format(subject: Subject) -> dict[str, Any]:
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


def draw_memory_by_format(data: Mapping[str, Any], figure: Any) -> None:
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


def table_memory_by_format(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB predicted and measured, their share of fp16, and the share of the scales."""
    head = ["format", "bits", "predicted, MB", "measured, MB", "of fp16", "of it scales"]
    rows = [["fp16", "16", f"{data['fp16'] / 1e6:.3f}", f"{data['fp16'] / 1e6:.3f}", "100.0%", "0.0%"]]
    for row in data["rows"]:
        made = row["codes"] + row["scales"]
        sizes = [f"{made / 1e6:.3f}", f"{row['measured'] / 1e6:.3f}", f"{row['measured'] / data['fp16']:.1%}"]
        rows.append([row["format"], str(row["bits"]), *sizes, f"{row['scales'] / made:.1%}"])
    return head, rows


# Picture 4: how far per-channel codes are from the weights, by bits (GEARBX 17, figure 4, and 5.1).

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


def measure_reconstruction_error(subject: Subject) -> dict[str, Any]:
    """For each width the errors of every matrix."""
    weights = {path: layer.weight for path, layer in matrices(subject).items()}
    return {str(bits): {path: errors(weight, bits) for path, weight in weights.items()} for bits in BITS}


def draw_reconstruction_error(data: Mapping[str, Any], figure: Any) -> None:
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


def table_reconstruction_error(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each width: median and largest relative error, largest error and bound, largest error of a row over s/2."""
    rows = []
    for bits, found in data.items():
        relative = [error["relative"] for error in found.values()]
        largest, bound, share = (max(e[key] for e in found.values()) for key in ("largest", "bound", "of_bound"))
        cells = [f"{np.median(relative):.2%}", f"{max(relative):.2%}", f"{largest:.4f}", f"{bound:.4f}", f"{share:.4f}"]
        rows.append([bits, str(len(found)), *cells])
    head = ["bits", "matrices", "relative error, median", "largest", "largest error of a weight", "largest s/2"]
    return [*head, "error over its row's s/2, largest"], rows


# Picture 7: where the weights are, by gear and residency (GEARBX 6.3, Table 6; 17, figure 7).

RESIDENCIES = ("resident", "host", "disk")


def measure_residency(subject: Subject) -> dict[str, Any]:
    """Bytes in MLX's pool and in numpy arrays beside it, in each gear, after all gears have been engaged once."""
    found = {name: places(subject, name) for name in RESIDENCIES}
    return {"residencies": found, "dense": sum(array.nbytes for array in managed_weights(subject))}


def managed_weights(subject: Subject) -> list[mx.array]:
    """Of the layers that change gear, as loaded."""
    return [layer.module.weight for layer in Gearbox(subject.load(), str(GEARS[-1]), kernels="mlx").layers]


def places(subject: Subject, residency: str) -> dict[str, dict[str, int]]:
    """Of format rowwise, whose gears are arrays of their own, as in the paper."""
    gc.collect()
    before = mx.get_active_memory()
    model = subject.load()
    ladder = ",".join(map(str, GEARS))
    directory = subject.directory if residency == "disk" else None
    gearbox = Gearbox(model, ladder, format="rowwise", kernels="mlx", residency=residency, checkpoint=directory)
    for gear in gearbox.ladder:
        gearbox.shift(gear)
    found = {}
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        gc.collect()
        beside = gearbox.residency.bytes if isinstance(gearbox.residency, Host) else 0
        found[gear.name] = {"mlx": mx.get_active_memory() - before, "host": beside}
    return found


def draw_residency(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: MLX's pool below, numpy arrays above, over the dense weights of the layers that change gear."""
    panels, dense = figure.subplots(1, len(data["residencies"]), sharey=True), data["dense"]
    for axes, (name, gears) in zip(panels, data["residencies"].items()):
        pool, beside = ([gears[gear][place] / dense for gear in NAMES] for place in ("mlx", "host"))
        axes.bar(NAMES, pool, 0.6, color=BLUE, edgecolor="white", label="MLX's memory")
        axes.bar(NAMES, beside, 0.6, bottom=pool, color=ORANGE, hatch=HATCHES[1], edgecolor="white", label="host")
        axes.set(title=name, xlabel="gear")
    panels[0].set_ylabel("bytes, dense layers = 1")
    panels[0].legend(loc="upper left", bbox_to_anchor=(0.0, -0.25), ncols=2)


def table_residency(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB in MLX's memory and in the host's arrays, and both together over the dense layers."""
    rows = []
    for name, gears in data["residencies"].items():
        for gear in NAMES:
            pool, beside = gears[gear]["mlx"], gears[gear]["host"]
            sizes = [f"{size / 1e6:.2f}" for size in (pool, beside)]
            rows.append([name, gear, *sizes, f"{(pool + beside) / data['dense']:.2f}"])
    return ["residency", "gear", "MLX's memory, MB", "host, MB", "both over the dense layers"], rows
