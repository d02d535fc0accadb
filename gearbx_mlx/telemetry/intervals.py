"""Records and summary of a text whose entropies are known between two bounds, as of a server that shows a few
log-probabilities. Where a record has `entropy`, one of these has `entropy_low` and `entropy_high`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNDECIDED = "undecided"  # stands for a gear where entropies between the bounds lead to different ones
BOUNDS = ("low", "high")


def interval(record: Mapping[str, Any], name: str) -> tuple[float, float]:
    """The bounds of a field; twice its value where that is known."""
    if name in record:
        return record[name], record[name]
    low, high = (record[f"{name}_{bound}"] for bound in BOUNDS)
    return low, high


def middle(record: Mapping[str, Any], name: str) -> float:
    """The middle between the bounds of a field, or its value."""
    return sum(interval(record, name)) / 2


def interval_record(
    prompt: int,
    index: int,
    token: int | None,
    text: str,
    gear: str,
    bounds: Mapping[str, tuple[Any, Any]],
    before: str | None,
) -> dict[str, Any]:
    """The trace's object for one token.

    Args:
        index: counts from 0 after each prompt.
        token: its number, where the server says it.
        gear: or UNDECIDED.
        bounds: the lower and the upper one of `entropy` and `mean_entropy`, in bits, and the `gear` that each leads to.
        before: `gear` of the token before, if there is one.
    """
    pairs = {f"{name}_{bound}": pair[i] for name, pair in bounds.items() for i, bound in enumerate(BOUNDS)}
    shifted = before is not None and before != gear
    return {"prompt": prompt, "index": index, "token": token, "text": text, **pairs, "gear": gear, "shifted": shifted}


@dataclass
class IntervalTally:
    """What adds up over the tokens of a run; `gear_tokens` names every gear and UNDECIDED, also with 0."""

    gear_tokens: dict[str, int]
    tokens: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    shifts: list[int] = field(default_factory=lambda: [0, 0])

    @classmethod
    def of(cls, gears: Sequence[str]) -> "IntervalTally":
        return cls(dict.fromkeys([*gears, UNDECIDED], 0))

    def add(self, record: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        """Take a record, and the one before it after the same prompt."""
        self.tokens += 1
        self.gear_tokens[record["gear"]] += 1
        for i, value in enumerate(interval(record, "entropy")):
            self.sums[i] += value
        for i, bound in enumerate(BOUNDS):
            self.shifts[i] += before is not None and record[f"gear_{bound}"] != before[f"gear_{bound}"]

    def summary(self) -> dict[str, Any]:
        """Fields of a summary."""
        tokens = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "gear_tokens": self.gear_tokens,
            "undecided_share": self.gear_tokens[UNDECIDED] / tokens,
            **{f"shifts_{bound}": self.shifts[i] for i, bound in enumerate(BOUNDS)},
            **{f"mean_entropy_{bound}_bits": self.sums[i] / tokens for i, bound in enumerate(BOUNDS)},
        }
