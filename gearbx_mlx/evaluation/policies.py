"""Which gear computes a token: the policies of the comparison, and the controls that they have to beat.

All but the static ones shift between two gears, `low` and `high`. A policy that decides by the token itself computes it
in `low` first and then, perhaps, again in `high`: both passes are counted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..gears.ladder import Gear
from ..routing.gates import Gate
from ..routing.monitor import Monitor
from .metrics import entropy_of_logprobs, log_softmax

ROUTE_DELAY = 2  # passes: when a token is handed out, the pass for the next one is under way


class Policy(Protocol):
    """Chooses the gear of each token in turn. `place` counts predictions over the whole text, from 0.

    `takes_back`: tokens may be computed again, so that the KV cache is put back.
    """

    takes_back: bool

    def begin(self) -> None:
        """Start a new window, with an empty KV cache."""
        ...

    def first(self, place: int) -> Gear:
        """The gear that computes this token first."""
        ...

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        """The higher gear that computes the token again, given its log-probabilities (V,); or None."""
        ...

    def after(self, logprobs: np.ndarray) -> None:
        """Take the log-probabilities (V,) of the last pass."""
        ...


class OnePass:
    """A policy that decides before a token is computed, and never computes it again."""

    takes_back = False

    def begin(self) -> None:
        pass

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        return None

    def after(self, logprobs: np.ndarray) -> None:
        pass


class StaticPolicy(OnePass):
    """One gear for every token."""

    def __init__(self, gear: Gear):
        self.gear = gear

    def first(self, place: int) -> Gear:
        return self.gear


class Planned(OnePass):
    """A gear for every token that is fixed beforehand: at random, or by position alone."""

    def __init__(self, gears: Sequence[Gear]):
        self.gears = gears

    def first(self, place: int) -> Gear:
        return self.gears[place]


class RoutePolicy(OnePass):
    """GEARBX's gate over the entropies of past tokens, which acts two passes later, as in `decoding.route`.

    Args:
        gears: the gate numbers them from 0.
        initial_gear: number of the gear to begin in.
    """

    def __init__(self, gears: Sequence[Gear], gate: Gate, monitor: Monitor, initial_gear: int = 0):
        self.gears, self.gate, self.monitor, self.initial_gear = gears, gate, monitor, initial_gear

    def begin(self) -> None:
        self.gate.reset(self.initial_gear)
        self.monitor.reset()
        self.coming = deque([self.gears[self.initial_gear]] * ROUTE_DELAY)

    def first(self, place: int) -> Gear:
        return self.coming.popleft()

    def after(self, logprobs: np.ndarray) -> None:
        reading = self.monitor.update(float(entropy_of_logprobs(log_softmax(logprobs))))
        self.coming.append(self.gears[self.gate.update(reading)])


@dataclass
class SameToken:
    """Computes a token in `low`, and again in `high` where a signal of the token itself is above the threshold.

    With its entropy as the signal that is kickdown, with minus its entropy the inverted gate, with its true KL the
    oracle.
    """

    low: Gear
    high: Gear
    signal: Callable[[int, np.ndarray], float]  # of the place and the log-probabilities
    threshold: float
    takes_back = True

    def begin(self) -> None:
        pass

    def first(self, place: int) -> Gear:
        return self.low

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        return self.high if gear == self.low and self.signal(place, logprobs) > self.threshold else None

    def after(self, logprobs: np.ndarray) -> None:
        pass


def random_plan(low: Gear, high: Gear, share: float, tokens: int, seed: int) -> Planned:
    """Exactly this share of the tokens in `high`, drawn at random."""
    chosen = np.zeros(tokens, bool)
    chosen[np.random.default_rng(seed).permutation(tokens)[: round(share * tokens)]] = True
    return Planned([high if up else low for up in chosen])


def position_plan(low: Gear, high: Gear, share: float, positions: np.ndarray) -> Planned:
    """The first tokens of every window in `high`; positions (n,) within the windows, up to the quantile."""
    last = np.quantile(positions, share, method="inverted_cdf")
    return Planned([high if up else low for up in positions < last])
