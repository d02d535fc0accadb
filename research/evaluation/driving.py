"""Policies along a text: rules that select the gear of each token, including mode route's."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.evaluation.predictions import TextPrediction, entropy_of_logprobs, log_softmax, next_logprobs
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.routing.gates import RUN_AHEAD, Gate, Monitor

Begun = Callable[[int], Any]
"""Takes the number of a window, and returns the KV cache of what stands before it."""


class Policy:
    """Chooses the gear of each token in turn. `place` counts predictions over the whole text, from 0.

    `takes_back`: tokens may be computed again, so that the KV cache is put back.
    """

    takes_back = False

    def begin(self) -> None:
        """Start a new window, with an empty KV cache."""

    def first(self, place: int) -> Gear:
        """Return the gear that computes this token first."""
        raise NotImplementedError

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        """Return the higher gear that computes the token again, given its log-probabilities (V,); or None."""
        return None

    def after(self, logprobs: np.ndarray) -> None:
        """Take the log-probabilities (V,) of the last pass."""


@dataclass
class StaticPolicy(Policy):
    """Stay in one gear."""

    gear: Gear

    def first(self, place: int) -> Gear:
        return self.gear


@dataclass
class RoutePolicy(Policy):
    """GEARBX's gate over the entropies of past tokens, which acts two passes later, as in `decoding.route`.

    gears: the gate numbers them from 0, in which a window begins.
    """

    gears: Sequence[Gear]
    gate: Gate
    monitor: Monitor

    def begin(self) -> None:
        self.gate.reset(0)
        self.monitor.reset()
        self.coming = deque([self.gears[0]] * RUN_AHEAD)

    def first(self, place: int) -> Gear:
        return self.coming.popleft()

    def after(self, logprobs: np.ndarray) -> None:
        reading = self.monitor.update(float(entropy_of_logprobs(log_softmax(logprobs))))
        self.coming.append(self.gears[self.gate.update(reading)])


def driven(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], policy: Policy, begun: Begun | None = None
) -> Iterator[TextPrediction]:
    """Read the windows under a policy, and yield every prediction. begun: without it nothing stands before windows."""
    place = itertools.count()
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        policy.begin()
        for token, target in itertools.pairwise(window):
            yield TextPrediction(number, target, *computed(gearbox, policy, next(place), token, cache))


def computed(
    gearbox: Gearbox, policy: Policy, place: int, token: int, cache: Any
) -> tuple[np.ndarray, Gear, Sequence[int]]:
    """Return the prediction after a token: log-probabilities (V,), the gear that computed them, passes in each gear."""
    passes = [0] * len(gearbox.ladder)
    gear: Gear | None = policy.first(place)
    before = Snapshot(cache) if policy.takes_back else None
    while gear is not None:
        if before is not None and any(passes):
            before.restore()
        gearbox.shift(gear)
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        passes[gear.index] += 1
        engaged, gear = gear, policy.again(place, gear, logprobs)
    policy.after(logprobs)
    return logprobs, engaged, passes
