"""The picture of a run of simulate_throttling.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gearbx_mlx.files.writing import replacing
from gearbx_mlx.machine.readers import THERMAL
from gearbx_mlx.telemetry.report import OUTSIDE, get_pyplot
from gearbx_mlx.telemetry.trace import BLUE, GREEN, VERMILION, gear_color

if TYPE_CHECKING:
    from simulate_throttling import Run

WINDOW = 10  # tokens: speeds are means over them


def draw(run: "Run", bare: "Run", path: Path) -> None:
    """Draw speed, caps, bits and the machine over time.

    Args:
        run: with the controller.
        bare: the same scenario without it.
        path: of a PNG, which is replaced.
    """
    pyplot = get_pyplot()
    figure, (speed, caps, bits, state) = pyplot.subplots(
        4, 1, figsize=(10, 9), sharex=True, layout="constrained", height_ratios=(3, 2, 1.3, 1.7)
    )
    times = [token.seconds for token in run.tokens]
    draw_speed(speed, times, run, bare)
    draw_caps(caps, times, run)
    bits.step(times, [token.bits for token in run.tokens], where="post", color="0.2", linewidth=1)
    bits.set(ylabel="bits per weight")
    draw_state(state, times, run)
    for axes in (speed, caps, state):
        axes.legend(**OUTSIDE)
    for axes in (speed, caps, bits, state):
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as place:
        figure.savefig(place, dpi=120, format="png")
    pyplot.close(figure)


def draw_speed(axes: Any, times: list[float], run: "Run", bare: "Run") -> None:
    taken = np.array([token.taken for token in run.tokens])
    measured = [1 / np.nanmean(taken[i - WINDOW : i]) for i in range(WINDOW, len(times))]
    axes.plot(times[WINDOW:], measured, color=BLUE, linewidth=1, label=f"measured, over {WINDOW} tokens")
    axes.plot([t.seconds for t in bare.tokens], [t.top for t in bare.tokens], color="0.6", linewidth=1, label="no cap")
    axes.axhline(run.scenario.target, color="0.2", linestyle="--", linewidth=1, label="target")
    axes.set(ylabel="tokens/s", title="A machine that is throttled, empty and full, and what the controller does")
    axes.set_ylim(0, None)


def draw_caps(axes: Any, times: list[float], run: "Run") -> None:
    widths = sorted({bits for token in run.tokens for bits in token.caps.values()})
    counts = [[sum(cap == width for cap in token.caps.values()) for token in run.tokens] for width in widths]
    colors = [gear_color(place, len(widths)) for place in range(len(widths))]
    axes.stackplot(times, counts, labels=[f"{width} bits" for width in widths], colors=colors, step="post")
    axes.set(ylabel="layers capped to")


def draw_state(axes: Any, times: list[float], run: "Run") -> None:
    heat = [THERMAL.index(token.state.thermal or "nominal") / (len(THERMAL) - 1) for token in run.tokens]
    axes.step(times, heat, where="post", color=VERMILION, linewidth=1.4, label="heat: nominal to critical")
    charge = [1.0 if token.state.battery is None else token.state.battery for token in run.tokens]
    axes.step(times, charge, where="post", color=BLUE, linewidth=1.2, linestyle="--", label="battery")
    memory = [token.state.memory or 0.0 for token in run.tokens]
    axes.step(times, memory, where="post", color=GREEN, linewidth=1.2, linestyle="-.", label="memory in use")
    axes.step(times, [token.share for token in run.tokens], where="post", color="0.2", linestyle=":", label="budget")
    axes.set(ylabel="machine", xlabel="seconds", ylim=(-0.05, 1.05))
