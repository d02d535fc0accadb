"""From recordings to the report: rows of numbers, each policy held against chance and against the static gears."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from .metrics import blocks_of, by_bucket, paired, quality
from .plans import COUNTED, SHIFTING, Entry
from .replay import Recording, Reference

SCHEMA, VERSION = "gearbx-mlx evaluation", 1


class Costs:
    """What a recording read, counted from its passes, each at what it reads in a ladder of just the gears that are
    used: whoever stays in one gear need not store it so that others share its planes."""

    def __init__(self, gearbox: Gearbox, used: Sequence[Gear]):
        ladder = Ladder([gear.bits for gear in used])
        alone = gearbox.costed_in(ladder)
        costs = {gear.bits: (alone.weight_bytes_per_token(gear), alone.bits_per_weight(gear)) for gear in ladder}
        self.gear_bytes, self.gear_bits = np.array([costs.get(gear.bits, (0, 0)) for gear in gearbox.ladder]).T

    def weight_bytes(self, recording: Recording) -> float:
        """Bytes of weights per token."""
        return float((recording.passes @ self.gear_bytes).mean())

    def effective_bits(self, recording: Recording) -> float:
        """Bits read per weight of the managed layers and token; a token computed twice reads them twice."""
        return float((recording.passes @ self.gear_bits).mean())


def gear_shares(recording: Recording, ladder: Ladder) -> dict[str, float]:
    """Gear to share of tokens whose result came from it."""
    return {gear.name: float((recording.gear == gear.index).mean()) for gear in ladder}


def tokens_of(recording: Recording, reference: Reference) -> dict[str, np.ndarray]:
    """The arguments of metrics.quality."""
    return {
        "nll": recording.nll,
        "kl": recording.kl,
        "kl_reverse": recording.kl_reverse,
        "agree": recording.agree,
        "reference_nll": reference.nll,
    }


def row_of(
    entry: Entry, recording: Recording, reference: Reference, gearbox: Gearbox, between: tuple[Gear, Gear]
) -> dict[str, Any]:
    """A row of the report. `share_top` is the share of tokens that came from the higher of the two gears (for a static
    gear and lossless, from the top one)."""
    ladder = gearbox.ladder
    if entry.policy == "static":
        used: tuple[Gear, ...] = (ladder.find(entry.bits or between[0]),)
    else:
        used = between if entry.policy in SHIFTING else (between[0], ladder.top)
    tokens, shares, costs = tokens_of(recording, reference), gear_shares(recording, ladder), Costs(gearbox, used)
    return {
        "policy": entry.policy,
        "name": entry.name,
        "share_wanted": entry.share,
        "share_top": shares[between[1].name if entry.policy in SHIFTING else ladder.top.name],
        "gear_shares": shares,
        "effective_bits": costs.effective_bits(recording),
        "weight_bytes_per_token": costs.weight_bytes(recording),
        "counted": COUNTED[entry.policy],
        **quality(**tokens),
        "buckets": by_bucket(reference.top_probability, tokens),
    }


class Chance:
    """The random gate at any share or cost, between the shares at which it ran and the two static gears.

    What a random gate comes to is very nearly linear in its share, since it picks no token before another.
    """

    def __init__(self, runs: Sequence[Recording], places: Sequence[float]):
        order = np.argsort(places)
        self.runs, self.places = [runs[i] for i in order], np.array(places)[order]

    def at(self, place: float, name: str) -> np.ndarray:
        """A field of the recording (n,), at this place on the scale that `places` are on; the ends beyond them."""
        place = float(np.clip(place, self.places[0], self.places[-1]))
        right = int(np.clip(np.searchsorted(self.places, place), 1, len(self.places) - 1))
        low, high = self.places[right - 1 : right + 1]
        weight = (place - low) / (high - low) if high > low else 0.0
        below, above = (getattr(run, name).astype(float) for run in self.runs[right - 1 : right + 1])
        return (1 - weight) * below + weight * above


def against(recording: Recording, chance: Chance, place: Any) -> dict[str, Any]:
    """Mean KL and agreement less those of the random gate on the same tokens, with standard errors."""
    blocks = blocks_of(recording.window)
    control = {name: chance.at(place, name) for name in ("kl", "agree")}
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
    """Add to every row that shifts how it does against the random gate, at its share and at its bytes per token.

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
        row["against_random_same_share"] = against(recording, by_share, row["share_top"]) if shifts else None
        row["against_random_same_bytes"] = (
            against(recording, by_bytes, row["weight_bytes_per_token"]) if shifts else None
        )


def compare_with_static(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row the best static gear that reads no more and is no further from the reference, if any."""
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


COLUMNS = {
    "policy": lambda row: row["name"],
    "share": lambda row: f"{row['share_top']:.3f}",
    "bits": lambda row: f"{row['effective_bits']:.2f}",
    "kB/token": lambda row: f"{row['weight_bytes_per_token'] / 1000:.0f}",
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "KL mean": lambda row: short(row["kl_mean"]),
    "median": lambda row: short(row["kl_median"]),
    "99 %": lambda row: short(row["kl_p99"]),
    "agreement": lambda row: f"{row['top1_agreement']:.4f}",
    "vs chance": lambda row: change(row.get("against_random_same_share")),
    "at its bytes": lambda row: change(row.get("against_random_same_bytes")),
    "better static": lambda row: row.get("better_static") or "",
}


def short(value: float) -> str:
    """Three digits; below what float32 can tell, nothing."""
    return "0" if value < 1e-9 else f"{value:.3g}"


def change(control: Mapping[str, Any] | None) -> str:
    """-35 ± 2 %"""
    if not control or control["kl_mean_change"] is None:
        return ""
    error = control["kl_mean_change_error"]
    shown = "" if math.isnan(error) else f" ± {100 * error:.0f}"
    return f"{100 * control['kl_mean_change']:+.0f}{shown} %"


def cells(row: Mapping[str, Any]) -> list[str]:
    return [show(row) for show in COLUMNS.values()]


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    floor, reference, (low, high) = report["noise_floor"], report["reference"], report["between"]
    lines = [
        f"# {report['model']} on {report['data']}",
        "",
        f"{report['tokens']} predictions in {report['windows']} windows of at most {report['context']} tokens, one "
        f"token at a time on a KV cache, against the {reference['bits']}-bit gear, whose perplexity is "
        f"{reference['perplexity']:.3f}. Policies shift between {low} and {high} bits. KL in nats.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(row))} |" for row in report["policies"]),
        "",
    ]
    if floor:
        lines += [
            f"Noise floor (the reference again, every layer's output off by up to bfloat16's roundoff): KL mean "
            f"{short(floor['kl_mean'])}, 99 % {short(floor['kl_p99'])}, agreement {floor['top1_agreement']:.4f}.",
            "",
        ]
    lines += [
        "**vs chance**: mean KL against a random gate's at the same share, with its standard error; **at its bytes**: "
        "against a random gate's that reads as many bytes. **better static**: a static gear that reads no more and is "
        "no further from the reference.",
        "",
    ]
    lines += ["What is counted:", "", *(f"- {name}: {text}" for name, text in counted(report).items()), ""]
    if not report["complete"]:
        lines += ["Not complete: the run was interrupted. The same command goes on with it.", ""]
    return "\n".join(lines)


def counted(report: Mapping[str, Any]) -> dict[str, str]:
    return {row["policy"]: row["counted"] for row in report["policies"]}
