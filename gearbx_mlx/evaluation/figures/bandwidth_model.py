"""Picture 9: the speedup that fewer bytes allow, over the share of tokens in low gear (GEARBX 8.1, 12.2 and 17)."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...gears.gearbox import Gearbox
from ...telemetry.trace import BLACK, BLUE, GREEN, VERMILION
from .style import GUIDE
from .subject import Subject

READ = (0.25, 0.5, 1.0)  # bytes of low, mid and high over those of fp16
MANAGED = (1.0, 0.35)  # of the parameters
PAPER = (0.55, 0.25, 0.20)  # of the tokens in low, mid and high
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS, ROUNDS = 24, 5


def speedup(shares: Sequence[float], managed: float, read: Sequence[float] = READ) -> float:
    """Time of fp16 over time in gears, if weights are all that takes time.

    Args:
        shares: of the tokens in each gear; their sum is 1.
        managed: f, the share of the parameters that have gears.
        read: bytes of the managed ones in each gear, over those in fp16.
    """
    return 1 / ((1 - managed) + managed * sum(share * bytes for share, bytes in zip(shares, read)))


def seconds(gearbox: Gearbox, low: int) -> float:
    """CPU seconds of TOKENS passes of one token, the first `low` in the lowest gear, with the shift between."""
    cache = make_prompt_cache(gearbox.model)
    start = time.process_time()
    for place in range(TOKENS):
        if place in (0, low):
            gearbox.shift(gearbox.ladder[0] if place < low else gearbox.ladder.top)
        mx.eval(gearbox.model(mx.array([[1]]), cache=cache))
    return time.process_time() - start


def measure(subject: Subject) -> dict[str, Any]:
    """Speedups over the top gear at each share in low gear: predicted of the bytes read, and of CPU time."""
    gearbox = Gearbox(subject.load(), "4,16")
    low, high = (gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder)
    for gear in reversed(gearbox.ladder):
        gearbox.shift(gear)
        mx.eval(gearbox.model(mx.array([[1]])))
    times = [[seconds(gearbox, round(share * TOKENS)) for share in SHARES] for _ in range(ROUNDS)]
    points = []
    for place, share in enumerate(SHARES):
        ratios = sorted(row[0] / row[place] for row in times)
        bytes = high / (share * low + (1 - share) * high)
        spread = [ratios[0], ratios[-1]]
        points.append({"share": share, "bytes": bytes, "time": statistics.median(ratios), "spread": spread})
    return {"bytes": [low, high], "dtype": str(gearbox.compute_dtype), "points": points}


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Lines: the paper's model, the other tokens in high gear; markers: this model's bytes, and its CPU time."""
    axes, points = figure.subplots(), data["points"]
    places = [step / 50 for step in range(51)]
    for managed, line, color, marker in zip(MANAGED, ("-", "--"), (BLUE, VERMILION), "*P"):
        curve = [speedup((share, 0, 1 - share), managed) for share in places]
        axes.plot(places, curve, line, color=color, label=f"model, f = {managed:g}")
        mixed = {"marker": marker, "markersize": 9, "color": color, "markeredgecolor": BLACK, "linestyle": ""}
        axes.plot([PAPER[0]], [speedup(PAPER, managed)], **mixed, label=f"55/25/20, f = {managed:g}")
    shares = [point["share"] for point in points]
    axes.plot(shares, [p["bytes"] for p in points], "s:", color=GREEN, markerfacecolor="white", label="bytes, counted")
    off = [[abs(point["spread"][end] - point["time"]) for point in points] for end in (0, 1)]
    axes.errorbar(shares, [p["time"] for p in points], off, fmt="ok", capsize=2, label="CPU time, measured")
    axes.axhline(1, **GUIDE)
    axes.set(xlabel="share of tokens in low gear", ylabel="speedup over the top gear", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each share in low gear: the model's speedups, that of the bytes, and that of CPU time with its spread."""
    rows = [["55 % (mid 25 %)", *(f"{speedup(PAPER, managed):.2f}" for managed in MANAGED), "", ""]]
    for point in data["points"]:
        share, (least, most) = point["share"], point["spread"]
        model = [f"{speedup((share, 0, 1 - share), managed):.2f}" for managed in MANAGED]
        rows.append([f"{share:.0%}", *model, f"{point['bytes']:.2f}", f"{point['time']:.2f} ({least:.2f}-{most:.2f})"])
    return ["share in low gear", "f = 1", "f = 0.35", "bytes, counted", "CPU time, measured"], rows
