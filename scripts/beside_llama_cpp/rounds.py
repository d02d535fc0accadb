"""Timing several programs in turn within one run, and rows of what that found."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from rich.progress import Progress

THEIRS = "llama.cpp"
DENSE = "float"  # activations of our top gear, whose weights are not packed
PAUSE = 0.02  # seconds, in which threads that look for work fall asleep

Clock = Callable[[], float]  # seconds per token, when called


@dataclass(frozen=True)
class Rounds:
    """How often everything is timed, beside the read bandwidth of the machine.

    Args:
        read_bandwidth: GB/s, when called.
    """

    trials: int
    read_bandwidth: Clock
    progress: Progress

    def time(self, what: str, clocks: Mapping[str, Clock]) -> tuple[dict[str, list[float]], float]:
        """Seconds per token of each clock in each trial, all in turn after a warm-up, and the median bandwidth."""
        spent: dict[str, list[float]] = {name: [] for name in clocks}
        bandwidths = []
        for trial in self.progress.track(range(self.trials + 1), description=what):
            bandwidths.append(self.read_bandwidth())
            for name, clock in clocks.items():
                time.sleep(PAUSE)
                seconds = clock()
                mx.synchronize()  # mlx-lm begins a token more than it hands out
                if trial:
                    spent[name].append(seconds)
        return spent, statistics.median(bandwidths)


def gain(before: list[float], after: list[float]) -> float:
    """How many times as fast: the median of the trials."""
    return statistics.median(old / new for old, new in zip(before, after))


def compared(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Tokens per second of both, and how many times as fast ours is: the median of the trials, smallest and largest."""
    ratios = [other / own for own, other in zip(ours, theirs)]
    return {
        "tokens_per_second": 1 / statistics.median(ours),
        "llama_cpp_tokens_per_second": 1 / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def rows_of(spent: Mapping[str, list[float]], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each activations of ours, beside llama.cpp's times."""
    return [
        shared | {"activations": name} | compared(seconds, spent[THEIRS])
        for name, seconds in spent.items()
        if name != THEIRS
    ]
