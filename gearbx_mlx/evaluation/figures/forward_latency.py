"""Picture 3: the time of a pass, by gear, with a dequant cache and with packed kernels (GEARBX 7.1; 17, figure 3)."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...formats.rowwise import Rowwise
from ...gears.gearbox import Gearbox
from ...kernels import cpu
from ...telemetry.trace import BLUE, ORANGE, VERMILION
from .style import GUIDE, HATCHES
from .subject import GEARS, Subject

LADDER = ",".join(map(str, GEARS))
TRIALS, PASSES = 9, 5
WAYS = {"first": "first pass, unpacking", "cached": "dequant cache", "packed": "packed kernel"}
COLORS = dict(zip(WAYS, (ORANGE, BLUE, VERMILION)))


def seconds(model: nn.Module, passes: int) -> float:
    """Processor time of a pass over one token, the mean of so many."""
    start = time.process_time()
    for _ in range(passes):
        mx.eval(model(mx.array([[1]])))
    return (time.process_time() - start) / passes


def trial(cached: Gearbox, packed: Gearbox | None) -> dict[str, dict[str, float]]:
    """Seconds of each way, by gear; gears and ways take turns. The top gear is dense in all of them."""
    found: dict[str, dict[str, float]] = {}
    for gear in reversed(list(cached.ladder)):
        cached.shift(gear)  # which empties the caches of the gear that is left
        times = {"first": seconds(cached.model, 1), "cached": seconds(cached.model, PASSES)}
        if packed is not None:
            packed.shift(gear)
            seconds(packed.model, 1)
            times["packed"] = seconds(packed.model, PASSES)
        found[gear.name] = times
    return found


def measure(subject: Subject) -> dict[str, Any]:
    """Processor times of a pass over one token: for each gear and way the trials, in seconds."""
    cached = Gearbox(subject.load(), LADDER, format=Rowwise(cache=True), kernels="mlx")
    native = cpu.why_not() is None
    packed = Gearbox(subject.load(), LADDER, format="rowwise", kernels="native") if native else None
    trial(cached, packed)  # makes the gears, and warms up
    trials = [trial(cached, packed) for _ in range(TRIALS)]
    gears = {
        gear.name: {way: [each[gear.name][way] for each in trials] for way in trials[0][gear.name]}
        for gear in cached.ladder
    }
    return {"gears": gears, "bits": {gear.name: gear.bits for gear in cached.ladder}}


def ratios(data: Mapping[str, Any], gear: str, way: str) -> list[float]:
    """Each trial's time over that of the top gear, dense weights on MLX, in the same trial."""
    dense = list(data["gears"].values())[-1]["cached"]
    return [a / b for a, b in zip(data["gears"][gear][way], dense)]


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: medians over dense weights on MLX, with the range of the trials."""
    axes, gears = figure.subplots(), list(data["gears"])
    ways = [way for way in WAYS if way in data["gears"][gears[0]]]
    for place, way in enumerate(ways):
        found = [ratios(data, gear, way) for gear in gears]
        middle = [statistics.median(each) for each in found]
        ends = [[m - min(e) for m, e in zip(middle, found)], [max(e) - m for m, e in zip(middle, found)]]
        left = [x + 0.27 * (place - (len(ways) - 1) / 2) for x in range(len(gears))]
        style = {"color": COLORS[way], "hatch": HATCHES[place], "label": WAYS[way], "edgecolor": "white"}
        axes.bar(left, middle, 0.25, yerr=ends, error_kw={"linewidth": 0.8, "capsize": 2}, **style)
    axes.axhline(1, **GUIDE)
    axes.set_xticks(range(len(gears)), [f"{gear} ({data['bits'][gear]} bits)" for gear in gears])
    axes.set(ylabel="processor time, dense = 1")
    axes.legend()


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds (median), and the ratio to dense weights on MLX with its range, for each gear and way."""
    rows = []
    for gear, ways in data["gears"].items():
        for way, times in ways.items():
            found = ratios(data, gear, way)
            spread = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            rows.append([gear, str(data["bits"][gear]), WAYS[way], f"{1e3 * statistics.median(times):.2f}", spread])
    return ["gear", "bits", "way", "ms", "of dense"], rows
