"""How long a launch takes: its graph is built before the clock starts, and one evaluation has many launches.

A single small launch says more of Python and of the wait for a GPU than of the kernel. `compare` lets evaluations of
all candidates take about as long, so that what an evaluation itself costs raises all times by much the same factor.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx

Key = TypeVar("Key")
Make = Callable[[], Sequence[mx.array]]
"""Builds one launch or several, each an array that is not evaluated. They should not depend on each other."""

LEAST_SECONDS = 0.004  # of an evaluation: twenty times what waiting for a GPU costs
MOST_CALLS = 4096


def seconds_of(make: Make, calls: int = 1) -> float:
    """Seconds in which one evaluation computes everything that so many calls of `make` build."""
    built = [array for _ in range(calls) for array in make()]
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(built)
    return time.perf_counter() - start


def enough_calls(make: Make, least: float = LEAST_SECONDS) -> int:
    """The power of two of calls whose evaluation takes `least` seconds or more; at most MOST_CALLS.

    The first evaluation is not counted: it may compile a kernel.
    """
    seconds_of(make)
    calls = 1
    while calls < MOST_CALLS and seconds_of(make, calls) < least:
        calls *= 2
    return calls


def compare(
    candidates: Mapping[Key, Make], trials: int = 5, least: float = LEAST_SECONDS, give_up: float = math.inf
) -> dict[Key, list[float]]:
    """Seconds of one call of each candidate, trial by trial; a trial goes through all of them in turn.

    Args:
        trials: 1 or more; every second one goes backwards.
        least: seconds of an evaluation, as in `enough_calls`.
        give_up: a candidate that takes so many times as long as the fastest one of a trial is not timed again, so that
            it has fewer times.

    Raises:
        RuntimeError: from MLX, where a candidate cannot be evaluated.
    """
    calls = {key: enough_calls(make, least) for key, make in candidates.items()}
    times: dict[Key, list[float]] = {key: [] for key in candidates}
    left = list(candidates)
    for _ in range(trials):
        for key in left:
            times[key].append(seconds_of(candidates[key], calls[key]) / calls[key])
        fastest = min((times[key][-1] for key in left), default=0.0)
        left = [key for key in reversed(left) if times[key][-1] <= give_up * fastest]
    return times
