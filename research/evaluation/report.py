"""From recordings to the report of a text: a row for each policy, and how it compares with its controls.

The controls are the static gears, and a gate that chooses at random, at the same share or the same bytes. A report is
data, a Markdown page, columns for the terminal, and a picture of KL against bytes per token (extra `plots`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..telemetry.report import get_pyplot, save
from ..telemetry.summary import as_json
from ..telemetry.trace import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW
from .metrics import blocks_of, by_bucket, paired, quality
from .policies import COUNTED, SHIFTING, PolicyRow
from .replay import Recording, Reference

Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # header to the cell of a row
Draw = Callable[[Mapping[str, Any], Path], None]  # draws the content of a report into a file

INCOMPLETE = "Not complete: the run was interrupted. Give the same command again, and it continues."


@dataclass(frozen=True)
class Report:
    """The report of an evaluation.

    content: plain values, one row for each policy in `policies`. page: Markdown. columns: of the rows.
    first: the columns that matter most, for a narrow terminal. pictures: name of a file to what draws it.
    """

    content: dict[str, Any]
    page: str
    columns: Columns
    first: Sequence[str]
    pictures: Mapping[str, Draw] = field(default_factory=dict)

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.content["policies"]

    @property
    def complete(self) -> bool:
        return self.content["complete"]

    @property
    def json(self) -> str:
        return as_json(finite(self.content))


def finite(value: Any) -> Any:
    """Plain values without the numbers that JSON does not have: infinity becomes "inf", NaN becomes null."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def markdown_table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows),
    ]


def page_of(lines: Sequence[str], report: Mapping[str, Any]) -> str:
    """The lines as a page, which says where the report is not complete."""
    return "\n".join([*lines, *([] if report["complete"] else [INCOMPLETE, ""])])


def three_digits(value: float) -> str:
    """Three significant digits; "0" for what is below the resolution of float32."""
    return "0" if value < 1e-9 else f"{value:.3g}"


def percent(part: float, digits: int = 1) -> str:
    """0.25 -> "25.0 %"."""
    return f"{100 * part:.{digits}f} %"


def kilobytes(row: Mapping[str, Any]) -> str:
    """Weight bytes per token in kB."""
    return f"{row['weight_bytes_per_token'] / 1000:.0f}"


def change_of_kl(control: Mapping[str, Any] | None) -> str:
    """By how much mean KL differs from a control's, such as "-35 ± 2 %"; empty where there is no control."""
    if not control or control["kl_mean_change"] is None:
        return ""
    error = control["kl_mean_change_error"]
    shown = "" if math.isnan(error) else f" ± {100 * error:.0f}"
    return f"{100 * control['kl_mean_change']:+.0f}{shown} %"


SCHEMA, VERSION = "gearbx-mlx evaluation", 1


def read_per_token(gearbox: Gearbox, used: Sequence[Gear], recording: Recording) -> tuple[float, float]:
    """What a recording read per token: bytes of weights, and bits per weight of the managed layers.

    Each pass costs what it would read in a ladder of the used gears alone: a model that stays in one gear need not
    store it in planes that other gears share. A token that is computed twice reads twice.

    Args:
        used: the gears that the recording has passes in.
    """
    ladder = Ladder([gear.bits for gear in used])
    alone = gearbox.costed_in(ladder)
    costs = {gear.bits: (alone.weight_bytes_per_token(gear), alone.bits_per_weight(gear)) for gear in ladder}
    of_gears = np.array([costs.get(gear.bits, (0, 0)) for gear in gearbox.ladder]).T
    weight_bytes, bits = (float((recording.passes @ each).mean()) for each in of_gears)
    return weight_bytes, bits


def quality_arguments(recording: Recording, reference_nll: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments of metrics.quality."""
    fields = {name: getattr(recording, name) for name in ("nll", "kl", "kl_reverse", "agree")}
    return fields | {"reference_nll": reference_nll}


def row_of(
    entry: PolicyRow, recording: Recording, reference: Reference, gearbox: Gearbox, between: tuple[Gear, Gear]
) -> dict[str, Any]:
    """A row of the report.

    `share_top` is the share of tokens from the higher of the two gears; of a schedule from the highest that the policy
    may use; of static gears and lossless from the top one.
    """
    ladder = gearbox.ladder
    if entry.policy == "static":
        used: tuple[Gear, ...] = (ladder.find(entry.bits or between[0]),)
    elif entry.policy == "kv":
        used = (ladder.top,)
    else:
        shifts = entry.policy in SHIFTING or entry.schedule is not None
        used = entry.gears(between) if shifts else (between[0], ladder.top)
    tokens = quality_arguments(recording, reference.nll)
    shares = {gear.name: float((recording.gear == gear.index).mean()) for gear in ladder}
    weight_bytes, bits = read_per_token(gearbox, used, recording)
    return {
        "policy": entry.policy,
        "name": entry.name,
        "share_wanted": entry.share,
        "schedule": None if entry.schedule is None else str(entry.schedule),
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
        """A field of the recordings (n,) at a place on the scale of `places`, no further than its ends."""
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
    """Add to every row that shifts a comparison with the random gate, at its share and at its bytes per token.

    Args:
        low, high: bits of the two gears.
    """
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


def compare_with_coins(
    rows: Sequence[dict[str, Any]], recordings: Mapping[str, Recording], coins: Mapping[str, Recording]
) -> None:
    """Add to every row with a schedule a comparison with its coin, which has its shares and so its bytes.

    Args:
        recordings, coins: by the names of rows.
    """
    for row in rows:
        if coin := coins.get(row["name"]):
            compared = against_chance(recordings[row["name"]], partial(getattr, coin))
            row["against_random_same_share"] = row["against_random_same_bytes"] = compared


def compare_with_static(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row the best static gear, if any, that reads no more and is no further from the reference.

    A row over a KV cache in gears has none: it reads less of the cache, which the bytes of weights do not show.
    """
    static = [row for row in rows if row["policy"] == "static"]
    for row in rows:
        better = [
            other
            for other in static
            if other is not row
            and row["policy"] != "kv"
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
FIRST = ("policy", "share", "kB/token", "KL mean", "agreement", "vs chance", "better static")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    floor, reference, (low, high) = report["noise_floor"], report["reference"], report["between"]
    known = reference["perplexity"] is not None  # else the run was interrupted before
    perplexity = f", whose perplexity is {reference['perplexity']:.3f}" if known else ""
    lines = [
        f"# {report['model']} on {report['data']}",
        "",
        f"{report['tokens']} predictions in {report['windows']} windows of at most {report['context']} tokens, one "
        f"token at a time on a KV cache, against the {reference['bits']}-bit gear{perplexity}. "
        f"Policies shift between {low} and {high} bits. KL in nats.",
        "",
        *markdown_table(COLUMNS, report["policies"]),
        "",
    ]
    if floor:
        lines += [
            f"Noise floor (the reference again, with every layer's output off by up to bfloat16's roundoff): KL mean "
            f"{three_digits(floor['kl_mean'])}, 99 % {three_digits(floor['kl_p99'])}, "
            f"agreement {floor['top1_agreement']:.4f}.",
            "",
        ]
    lines += [
        "**vs chance**: mean KL against a random gate's at the same share, with its standard error; **at its bytes**: "
        "against the mean KL of a random gate that reads as many bytes. **better static**: a static gear that reads no "
        "more and is no further from the reference.",
        "",
        "The passes that each policy counts:",
        "",
        *dict.fromkeys(f"- {row['policy']}: {row['counted']}" for row in report["policies"]),
        "",
    ]
    return page_of(lines, report)


NOTHING = 1e-7  # nats: where a KL of 0 is drawn on a scale that has no 0
GREY, BROWN = "#767676", "#8c564b"
# Colour, marker and size of each policy. Policies that lie close together differ in shape as well as in colour; smaller
# markers are drawn later, so that they lie on larger ones.
STYLES = {
    "random": (GREY, "o", 130),
    "inverted": (VERMILION, "X", 100),
    "position": (PURPLE, "v", 90),
    "schedule": (YELLOW, "^", 70),
    "schedule-route": (BROWN, "p", 60),
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
    front = sorted(point_of(row) for row in rows)
    axes.plot(*zip(*front), color="0.1", marker="|", markersize=12, linewidth=1.2, label="static gears", zorder=1)
    for row in rows:
        bits = f"{row['name'].split('-')[1]} bits"
        axes.annotate(bits, point_of(row), (4, 8), textcoords="offset points", fontsize=9)


def draw_policy(axes: Any, rows: list[Mapping[str, Any]], policy: str, style: tuple[str, str, int], order: int) -> None:
    """A marker for each share, slightly transparent and with a white rim, so that markers below stay visible."""
    if not rows:
        return
    color, marker, size = style
    shape: dict[str, Any] = {"linewidths": 1.8} if marker == "x" else {"edgecolors": "white", "linewidths": 0.8}
    points = zip(*(point_of(row) for row in rows))
    axes.scatter(*points, color=color, marker=marker, s=size, alpha=0.85, label=policy, zorder=order, **shape)


def point_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """x, y."""
    return row["weight_bytes_per_token"] / 1e6, max(row["kl_mean"], NOTHING)
