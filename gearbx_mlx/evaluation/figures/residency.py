"""Picture 7: where the weights are, by gear and residency (GEARBX 6.3, Table 6; 17, figure 7)."""

import gc
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...gears.gearbox import Gearbox
from ...gears.offload import Host
from ...telemetry.trace import BLUE, ORANGE
from .style import HATCHES
from .subject import GEARS, NAMES, Subject

RESIDENCIES = ("resident", "host", "disk")


def measure(subject: Subject) -> dict[str, Any]:
    """Bytes in MLX's pool and in numpy arrays beside it, in each gear, after all gears have been engaged once."""
    found = {name: places(subject, name) for name in RESIDENCIES}
    return {"residencies": found, "dense": sum(array.nbytes for array in weights(subject))}


def weights(subject: Subject) -> list[mx.array]:
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


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: MLX's pool below, numpy arrays above, over the dense weights of the layers that change gear."""
    panels, dense = figure.subplots(1, len(data["residencies"]), sharey=True), data["dense"]
    for axes, (name, gears) in zip(panels, data["residencies"].items()):
        pool, beside = ([gears[gear][place] / dense for gear in NAMES] for place in ("mlx", "host"))
        axes.bar(NAMES, pool, 0.6, color=BLUE, edgecolor="white", label="MLX's memory")
        axes.bar(NAMES, beside, 0.6, bottom=pool, color=ORANGE, hatch=HATCHES[1], edgecolor="white", label="host")
        axes.set(title=name, xlabel="gear")
    panels[0].set_ylabel("bytes, dense layers = 1")
    panels[0].legend(loc="upper left", bbox_to_anchor=(0.0, -0.25), ncols=2)


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB in MLX's memory and in the host's arrays, and both together over the dense layers."""
    rows = []
    for name, gears in data["residencies"].items():
        for gear in NAMES:
            pool, beside = gears[gear]["mlx"], gears[gear]["host"]
            sizes = [f"{size / 1e6:.2f}" for size in (pool, beside)]
            rows.append([name, gear, *sizes, f"{(pool + beside) / data['dense']:.2f}"])
    return ["residency", "gear", "MLX's memory, MB", "host, MB", "both over the dense layers"], rows
