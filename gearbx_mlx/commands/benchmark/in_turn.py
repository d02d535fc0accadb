"""Two loops that are timed in turn, and the row of what one takes beside the other."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ...gears.ladder import Gear


def in_turn(
    first: Callable[[], float], second: Callable[[], float], trials: int, progress: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Seconds of two loops, trial by trial. Which of them begins alternates; a trial before all others warms up."""
    seconds: dict[Callable[[], float], list[float]] = {first: [], second: []}
    for trial in range(trials + 1):
        for loop in (first, second) if trial % 2 else (second, first):
            spent = loop()
            if trial:
                seconds[loop].append(spent)
        progress()
    return seconds[first], seconds[second]


def ratio_row(gear: Gear, ratios: Sequence[float], figures: dict[str, Any], read_bandwidth: Any) -> dict[str, Any]:
    """The row of a gear.

    Args:
        ratios: one of each trial.
        figures: what else the row says of the loops.
        read_bandwidth: of memory while they ran.
    """
    return {
        "gear": gear.name,
        "bits": gear.bits,
        **figures,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "read_bandwidth_gigabytes_per_second": read_bandwidth(),
        "trials": len(ratios),
        **read_bandwidth.row,
    }
