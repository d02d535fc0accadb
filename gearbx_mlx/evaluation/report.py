"""From recordings to the report of a text: a row for each policy, and how it compares with the static gears."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from .metrics import by_bucket, quality
from .plans import COUNTED, SHIFTING, PolicyRow
from .replay import Recording, Reference
from .tables import INCOMPLETE, Columns, change_of_kl, kilobytes, markdown_table, three_digits

SCHEMA, VERSION = "gearbx-mlx evaluation", 1


class RecordingCosts:
    """What a recording read, from its passes.

    Each pass costs what it would read in a ladder of the used gears alone: a model that stays in one gear need not
    store it in planes that other gears share.

    Args:
        used: the gears that the recording has passes in.
    """

    def __init__(self, gearbox: Gearbox, used: Sequence[Gear]):
        ladder = Ladder([gear.bits for gear in used])
        alone = gearbox.costed_in(ladder)
        costs = {gear.bits: (alone.weight_bytes_per_token(gear), alone.bits_per_weight(gear)) for gear in ladder}
        self.gear_bytes, self.gear_bits = np.array([costs.get(gear.bits, (0, 0)) for gear in gearbox.ladder]).T

    def weight_bytes(self, recording: Recording) -> float:
        """Bytes of weights per token."""
        return float((recording.passes @ self.gear_bytes).mean())

    def effective_bits(self, recording: Recording) -> float:
        """Bits read per weight of the managed layers and token; a token that is computed twice reads them twice."""
        return float((recording.passes @ self.gear_bits).mean())


def gear_shares(recording: Recording, ladder: Ladder) -> dict[str, float]:
    """Gear to the share of tokens whose distribution it computed."""
    return {gear.name: float((recording.gear == gear.index).mean()) for gear in ladder}


def quality_arguments(recording: Recording, reference: Reference) -> dict[str, np.ndarray]:
    """The arguments of metrics.quality."""
    return {
        "nll": recording.nll,
        "kl": recording.kl,
        "kl_reverse": recording.kl_reverse,
        "agree": recording.agree,
        "reference_nll": reference.nll,
    }


def row_of(
    entry: PolicyRow, recording: Recording, reference: Reference, gearbox: Gearbox, between: tuple[Gear, Gear]
) -> dict[str, Any]:
    """A row of the report.

    `share_top` is the share of tokens from the higher of the two gears; of static gears and lossless from the top one.
    """
    ladder = gearbox.ladder
    if entry.policy == "static":
        used: tuple[Gear, ...] = (ladder.find(entry.bits or between[0]),)
    elif entry.policy == "kv":
        used = (ladder.top,)
    else:
        used = between if entry.policy in SHIFTING else (between[0], ladder.top)
    tokens, shares = quality_arguments(recording, reference), gear_shares(recording, ladder)
    costs = RecordingCosts(gearbox, used)
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
        *(f"- {policy}: {passes}" for policy, passes in counted(report).items()),
        "",
    ]
    if not report["complete"]:
        lines += [INCOMPLETE, ""]
    return "\n".join(lines)


def counted(report: Mapping[str, Any]) -> dict[str, str]:
    """Policy to the passes that are counted for it."""
    return {row["policy"]: row["counted"] for row in report["policies"]}
