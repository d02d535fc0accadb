"""What EAD's Table 1 and Figure 1 show of a report: the large model's share of the tokens, and a score.

For each threshold, beside a coin with the same share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tables import Columns, markdown_table, percent

Row = Mapping[str, Any]
# Along a text, and writing answers: the score of Table 1, and one that tells models apart that get nothing right.
ALONG_A_TEXT = {"top1_agreement": "same favourite as the large model", "perplexity": "perplexity"}
WRITING = {"accuracy": "right answers", "same_answer_as_reference": "same answer as the large model"}


@dataclass(frozen=True)
class ThresholdPoint:
    """A threshold in bits, the large model's share of the tokens and used parameters over its own, both parts of 1.

    score: as in the report, with its standard error. coin: a coin's share and score; None if it was not tossed.
    """

    threshold: float
    share: float
    parameters: float
    score: float
    error: float
    coin: tuple[float, float] | None


def scores_of(report: Row) -> dict[str, str]:
    """The fields of a report's rows that are scores, the one of Table 1 first, and what they are called."""
    return WRITING if "accuracy" in report["policies"][0] else ALONG_A_TEXT


def points(report: Row, score: str) -> list[ThresholdPoint]:
    """A point for each threshold, the highest first, as in Table 1."""
    rows = {row["name"]: row for row in report["policies"]}
    found = []
    for row in rows.values():
        if row["policy"] == "pair":
            control = row.get("against_random_same_share") or rows.get(row["name"].replace("pair", "random"))
            coin = (control.get("share_top", row["share_top"]), control[score]) if control else None
            error = row["standard_error"] if score == "accuracy" else 0.0
            found.append(
                ThresholdPoint(row["threshold"], row["share_top"], row["parameter_ratio"], row[score], error, coin)
            )
    return sorted(found, key=lambda point: -point.threshold)


def shown(value: float, score: str) -> str:
    """A score as text: "12.5 %", and a perplexity as it is."""
    return f"{value:.3f}" if score == "perplexity" else percent(value)


def table_1(report: Row) -> list[str]:
    """The lines of EAD's Table 1, and what part of the large model's score that is, as in its abstract."""
    score, name = next(iter(scores_of(report).items()))
    found = points(report, score)
    best = found[-1].score if found[-1].share == 1 else 0.0  # the large model alone
    columns: Columns = {
        "entropy threshold, bits": lambda row: f"{row['threshold']:g}",
        "large model usage": lambda row: percent(row["share"]),
        name: lambda row: shown(row["score"], score),
        "of the large model's": lambda row: percent(row["score"] / best) if best else "",
        "parameter ratio": lambda row: percent(row["parameters"]),
        "a coin's": lambda row: shown(row["coin"][1], score) if row["coin"] and 0 < row["share"] < 1 else "",
    }
    return markdown_table(columns, [vars(point) for point in found])
