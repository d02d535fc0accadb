"""The picture of a report: KL against bytes per token, the static gears as a front. matplotlib is the extra `plots`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.writing import replacing
from ..telemetry.report import get_pyplot

NOTHING = 1e-7  # nats: where a KL of 0 is drawn on a scale that has no 0
STYLES = {
    "random": ("0.45", "o"),
    "route": ("#b07aa1", "s"),
    "position": ("#9c755f", "v"),
    "kickdown": ("#2e9e6b", "D"),
    "inverted": ("#d0453b", "X"),
    "oracle": ("#d99a20", "*"),
    "lossless": ("#4e79a7", "P"),
    "lossless-fixed": ("#a0c0e0", "P"),
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A point for each policy and share, a line through the static gears, the noise floor as a dashed one.

    Args:
        report: as evaluation.json.
        path: of a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    rows = report["policies"]
    front = sorted(place(row) for row in rows if row["policy"] == "static")
    axes.plot(*zip(*front), color="0.1", marker="|", markersize=12, linewidth=1.2, label="static gears", zorder=1)
    for row in rows:
        if row["policy"] == "static":
            axes.annotate(
                f"{row['name'].split('-')[1]} bits", place(row), (4, 6), textcoords="offset points", fontsize=9
            )
    for policy, (color, marker) in STYLES.items():
        points = [place(row) for row in rows if row["policy"] == policy]
        if points:
            axes.scatter(*zip(*points), color=color, marker=marker, s=55, label=policy, zorder=2, edgecolors="none")
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
    with replacing(path) as file:
        figure.savefig(file, dpi=110, format=path.suffix[1:])
    pyplot.close(figure)


def place(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["weight_bytes_per_token"] / 1e6, max(row["kl_mean"], NOTHING)
