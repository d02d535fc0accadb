"""Which gear computes a token: the policies that are compared, and the controls that they have to beat.

All but the static ones shift between two gears, `low` and `high`. A policy that looks at the token itself first
computes it in `low`, and then, if it is to be, again in `high`: both passes are counted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..gears.ladder import Gear
from ..routing.gates import Gate
from ..routing.monitor import Monitor
from .metrics import entropy_bits, log_softmax

ROUTE_DELAY = 2  # passes: when a token is handed out, the pass for the next one is under way


class Policy(Protocol):
    """Asked for every token in turn. `place` counts predictions over the whole text, from 0.

    `takes_back` says whether tokens may be computed again, for which the cache has to forget.
    """

    takes_back: bool

    def begin(self) -> None:
        """A new window, with an empty cache."""
        ...

    def first(self, place: int) -> Gear:
        """The gear that computes this token first."""
        ...

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        """The higher gear to compute it again in, having seen its log-probabilities (V,); or None."""
        ...

    def after(self, logprobs: np.ndarray) -> None:
        """What came out in the end (V,)."""
        ...


class OnePass:
    """What decides before a token is computed, and is content with what comes."""

    takes_back = False

    def begin(self) -> None:
        pass

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        return None

    def after(self, logprobs: np.ndarray) -> None:
        pass


class Static(OnePass):
    """One gear for every token."""

    def __init__(self, gear: Gear):
        self.gear = gear

    def first(self, place: int) -> Gear:
        return self.gear


class Planned(OnePass):
    """The gear of every token is laid down beforehand: at random, or by position alone."""

    def __init__(self, gears: Sequence[Gear]):
        self.gears = gears

    def first(self, place: int) -> Gear:
        return self.gears[place]


class Route(OnePass):
    """GEARBX's gate over the entropies of past tokens, which acts two passes later, as it does in `decoding.route`.

    Args:
        gears: that the gate numbers from 0.
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
        reading = self.monitor.update(float(entropy_bits(log_softmax(logprobs))))
        self.coming.append(self.gears[self.gate.update(reading)])


@dataclass
class SameToken:
    """Computed in `low`, and again in `high` where the signal of this very token is above the threshold.

    With its entropy that is kickdown, with minus its entropy the inverted gate, with its true KL the oracle.
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
    """The tokens with the least before them in `high`: positions (n,) within their windows, up to the quantile."""
    last = np.quantile(positions, share, method="inverted_cdf")
    return Planned([high if up else low for up in positions < last])
