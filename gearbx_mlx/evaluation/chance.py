"""The control of every policy that shifts: a gate that chooses at random, at the same share or the same bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .metrics import blocks_of, paired
from .plans import SHIFTING
from .replay import Recording


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


def against_chance(recording: Recording, chance: Chance, place: Any) -> dict[str, Any]:
    """Mean KL and agreement compared with the random gate's on the same tokens, with standard errors.

    Args:
        place: where to ask `chance`.
    """
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
        row["against_random_same_share"] = against_chance(recording, by_share, row["share_top"]) if shifts else None
        row["against_random_same_bytes"] = (
            against_chance(recording, by_bytes, row["weight_bytes_per_token"]) if shifts else None
        )
