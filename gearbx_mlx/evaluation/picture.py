"""The picture of a report: KL against bytes per token, the static gears as a front. matplotlib is the extra `plots`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..telemetry.report import get_pyplot, save
from ..telemetry.trace import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION

NOTHING = 1e-7  # nats: where a KL of 0 is drawn on a scale that has no 0
GREY = "#767676"
# Colour, marker and size of each policy. Policies that lie close together differ in shape as well as in colour; smaller
# markers are drawn later, so that they lie on larger ones.
STYLES = {
    "random": (GREY, "o", 130),
    "inverted": (VERMILION, "X", 100),
    "position": (PURPLE, "v", 90),
    "route": (SKY_BLUE, "s", 55),
    "kickdown": (GREEN, "D", 50),
    "oracle": (ORANGE, "*", 130),
    "lossless": (BLUE, "P", 100),
    "lossless-fixed": (BLACK, "x", 45),
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A marker for each policy and share, a line through the static gears, the noise floor as a dashed line.

    Args:
        report: the content of evaluation.json.
        path: a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    draw_static(axes, [row for row in report["policies"] if row["policy"] == "static"])
    for order, (policy, style) in enumerate(STYLES.items(), 2):
        draw_policy(axes, [row for row in report["policies"] if row["policy"] == policy], policy, style, order)
    floor = report.get("noise_floor")
    if floor:
        axes.axhline(max(floor["kl_mean"], NOTHING), color="0.6", linestyle="--", linewidth=1, label="bfloat16 noise")
    axes.set(
        yscale="log",
        xlabel="weight bytes per token, MB",
        ylabel="mean KL from the top gear, nats (0 is drawn at 1e-7)",
        title=f"{Path(report['model']).name} on {Path(report['data']).name}: {report['tokens']} tokens",
    )
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save(figure, path)


def draw_static(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    """The front of the static gears, each with its bits."""
    front = sorted(place(row) for row in rows)
    axes.plot(*zip(*front), color="0.1", marker="|", markersize=12, linewidth=1.2, label="static gears", zorder=1)
    for row in rows:
        bits = f"{row['name'].split('-')[1]} bits"
        axes.annotate(bits, place(row), (4, 8), textcoords="offset points", fontsize=9)


def draw_policy(axes: Any, rows: list[Mapping[str, Any]], policy: str, style: tuple[str, str, int], order: int) -> None:
    """A marker for each share, slightly transparent and with a white rim, so that markers below stay visible."""
    if not rows:
        return
    color, marker, size = style
    shape: dict[str, Any] = {"linewidths": 1.8} if marker == "x" else {"edgecolors": "white", "linewidths": 0.8}
    points = zip(*(place(row) for row in rows))
    axes.scatter(*points, color=color, marker=marker, s=size, alpha=0.85, label=policy, zorder=order, **shape)


def place(row: Mapping[str, Any]) -> tuple[float, float]:
    """x, y."""
    return row["weight_bytes_per_token"] / 1e6, max(row["kl_mean"], NOTHING)
