"""Report of a text from recordings: a row for each policy, and its comparison with controls.

The controls are the static gears, and a gate that chooses at random, with the same share or the same bytes. A report
has data, a table, and a picture of KL against bytes per token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pages import table

from gearbx_mlx.evaluate.run import Columns
from gearbx_mlx.evaluation.predictions import Recording, quality, read_per_token, three_digits
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.telemetry.trace import BLUE, GREEN, ORANGE, SKY_BLUE, VERMILION, get_pyplot, save

from .policies import COUNTED, SHIFTING, PolicyRow
from .replay import Reference
from .statistics import blocks_of, by_bucket, paired


def markdown_table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table."""
    return table([*columns], [[show(row) for show in columns.values()] for row in rows])


def percent(part: float, digits: int = 1) -> str:
    """0.25 -> "25.0 %"."""
    return f"{100 * part:.{digits}f} %"


def kilobytes(row: Mapping[str, Any]) -> str:
    """Weight bytes per token in kB."""
    return f"{row['weight_bytes_per_token'] / 1000:.0f}"


def change_of_kl(control: Mapping[str, Any] | None) -> str:
    """Return the difference of the mean KL from a control's, such as "-35 ± 2 %"; empty without a control."""
    if not control or control["kl_mean_change"] is None:
        return ""
    error = control["kl_mean_change_error"]
    shown = "" if math.isnan(error) else f" ± {100 * error:.0f}"
    return f"{100 * control['kl_mean_change']:+.0f}{shown} %"


def quality_arguments(recording: Recording, reference_nll: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arguments of metrics.quality."""
    fields = {name: getattr(recording, name) for name in ("nll", "kl", "kl_reverse", "agree")}
    return fields | {"reference_nll": reference_nll}


def row_of(
    entry: PolicyRow, recording: Recording, reference: Reference, gearbox: Gearbox, between: tuple[Gear, Gear]
) -> dict[str, Any]:
    """Return a row of the report.

    `share_top` is the share of tokens from the higher of the two gears; of static gears and lossless from the top one.
    """
    ladder = gearbox.ladder
    if entry.policy == "static":
        used: tuple[Gear, ...] = (ladder.find(entry.bits or between[0]),)
    else:
        used = between if entry.policy in SHIFTING else (between[0], ladder.top)
    tokens = quality_arguments(recording, reference.nll)
    shares = {gear.name: float((recording.gear == gear.index).mean()) for gear in ladder}
    weight_bytes, bits = read_per_token(gearbox, used, recording)
    return {
        "policy": entry.policy,
        "name": entry.name,
        "share_wanted": entry.share,
        "share_top": shares[used[-1].name if entry.policy != "static" else ladder.top.name],
        "gear_shares": shares,
        "effective_bits": bits,
        "weight_bytes_per_token": weight_bytes,
        "counted": COUNTED[entry.policy],
        **quality(**tokens),
        "buckets": by_bucket(reference.top_probability, tokens),
    }


class Chance:
    """The random gate at any share or cost: between the runs of a random gate and the two static gears.

    Its results are very nearly linear in its share, since it prefers no token.

    Args:
        runs: recordings of random gates and of the static gears.
        places: the share, or the cost, of each run.
    """

    def __init__(self, runs: Sequence[Recording], places: Sequence[float]):
        order = np.argsort(places)
        self.runs, self.places = [runs[i] for i in order], np.array(places)[order]

    def at(self, place: float, name: str) -> np.ndarray:
        """Return a field of the recordings (n,) at a place on the scale of `places`, no further than its ends."""
        place = float(np.clip(place, self.places[0], self.places[-1]))
        right = int(np.clip(np.searchsorted(self.places, place), 1, len(self.places) - 1))
        low, high = self.places[right - 1 : right + 1]
        weight = (place - low) / (high - low) if high > low else 0.0
        below, above = (getattr(run, name).astype(float) for run in self.runs[right - 1 : right + 1])
        return (1 - weight) * below + weight * above


def against_chance(recording: Recording, chance: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Mean KL and agreement compared with the random gate's on the same tokens, with standard errors.

    Args:
        chance: from the name of a field to the random gate's values (n,).
    """
    blocks = blocks_of(recording.window)
    control = {name: chance(name).astype(float) for name in ("kl", "agree")}
    kl, mean = paired(recording.kl, control["kl"], blocks), float(control["kl"].mean())
    return {
        "kl_mean": mean,
        "kl_mean_change": kl["difference"] / mean if mean > 0 else None,  # -0.35: 35 % lower
        "kl_mean_change_error": kl["standard_error"] / mean if mean > 0 else None,
        "top1_agreement": float(control["agree"].mean()),
        "top1_agreement_difference": paired(recording.agree.astype(float), control["agree"], blocks),
    }


def compare_with_chance(
    rows: Sequence[dict[str, Any]], recordings: Mapping[str, Recording], low: int, high: int
) -> None:
    """Add to every row that shifts a comparison with the random gate, at its share and at its bytes per token."""
    points = [row for row in rows if row["policy"] == "random" or row["name"] in (f"static-{low}", f"static-{high}")]
    share = {f"static-{low}": 0.0, f"static-{high}": 1.0}
    runs = [recordings[row["name"]] for row in points]
    by_share = Chance(runs, [share.get(row["name"], row["share_top"]) for row in points])
    by_bytes = Chance(runs, [row["weight_bytes_per_token"] for row in points])
    for row in rows:
        shifts = row["policy"] in SHIFTING and row["policy"] != "random" and len(points) > 1
        recording = recordings[row["name"]]
        places = {"share": (by_share, row["share_top"]), "bytes": (by_bytes, row["weight_bytes_per_token"])}
        for same, (chance, place) in places.items():
            compared = against_chance(recording, partial(chance.at, place)) if shifts else None
            row[f"against_random_same_{same}"] = compared


def compare_with_static(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row the best static gear, if any, that reads no more and is no further from the reference."""
    static = [row for row in rows if row["policy"] == "static"]
    for row in rows:
        better = [
            other
            for other in static
            if other is not row
            and other["weight_bytes_per_token"] <= row["weight_bytes_per_token"]
            and other["kl_mean"] <= row["kl_mean"]
        ]
        row["better_static"] = min(better, key=lambda other: other["kl_mean"])["name"] if better else None


COLUMNS: Columns = {
    "policy": lambda row: row["name"],
    "share": lambda row: f"{row['share_top']:.3f}",
    "bits": lambda row: f"{row['effective_bits']:.2f}",
    "kB/token": kilobytes,
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "KL mean": lambda row: three_digits(row["kl_mean"]),
    "median": lambda row: three_digits(row["kl_median"]),
    "99 %": lambda row: three_digits(row["kl_p99"]),
    "agreement": lambda row: f"{row['top1_agreement']:.4f}",
    "vs chance": lambda row: change_of_kl(row.get("against_random_same_share")),
    "at its bytes": lambda row: change_of_kl(row.get("against_random_same_bytes")),
    "better static": lambda row: row.get("better_static") or "",
}


NOTHING = 1e-7  # nats: where a KL of 0 is drawn on a scale that has no 0
GREY = "#767676"
# Colour, marker and size of each policy. Policies that lie close together differ in shape as well as in colour; smaller
# markers are drawn later, so that they lie on larger ones.
STYLES = {
    "random": (GREY, "o", 130),
    "inverted": (VERMILION, "X", 100),
    "route": (SKY_BLUE, "s", 55),
    "kickdown": (GREEN, "D", 50),
    "oracle": (ORANGE, "*", 130),
    "lossless": (BLUE, "P", 100),
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw a marker for each policy and share, a line through the static gears, and the noise floor, dashed."""
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
    """Draw the front of the static gears, each with its bits."""
    front = sorted(point_of(row) for row in rows)
    axes.plot(*zip(*front), color="0.1", marker="|", markersize=12, linewidth=1.2, label="static gears", zorder=1)
    for row in rows:
        bits = f"{row['name'].split('-')[1]} bits"
        axes.annotate(bits, point_of(row), (4, 8), textcoords="offset points", fontsize=9)


def draw_policy(axes: Any, rows: list[Mapping[str, Any]], policy: str, style: tuple[str, str, int], order: int) -> None:
    """Draw a marker for each share, slightly transparent and with a white rim, so that markers below stay visible."""
    if not rows:
        return
    color, marker, size = style
    points, rim = zip(*(point_of(row) for row in rows)), {"edgecolors": "white", "linewidths": 0.8}
    axes.scatter(*points, color=color, marker=marker, s=size, alpha=0.85, label=policy, zorder=order, **rim)


def point_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """x, y."""
    return row["weight_bytes_per_token"] / 1e6, max(row["kl_mean"], NOTHING)
