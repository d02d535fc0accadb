"""Policies that select the gear of a token, and their controls.

All except the static ones shift between two gears, `low` and `high`. A policy that decides by the token itself computes
it in `low` first and then, if necessary, again in `high`: both passes are counted. A report has a row for every policy
and its controls, each with the threshold that results in the share of tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gearbx_mlx.evaluation.predictions import Recording, entropy_of_logprobs, kl_divergence, log_softmax
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.routing.calibration import share_thresholds
from gearbx_mlx.routing.gates import Monitor, ThresholdGate

from .driving import Policy, RoutePolicy
from .replay import Reference, targets_of


@dataclass
class Planned(Policy):
    """A gear for every token that is fixed beforehand, at random."""

    gears: Sequence[Gear]

    def first(self, place: int) -> Gear:
        return self.gears[place]


@dataclass
class SameToken(Policy):
    """Computes a token in `low`, and again in `high` where a signal of the token itself is above the threshold.

    With its entropy as the signal that is kickdown, with minus its entropy the inverted gate, with its true KL the
    oracle.
    """

    low: Gear
    high: Gear
    signal: Callable[[int, np.ndarray], float]  # of the place and the log-probabilities
    threshold: float
    takes_back = True

    def first(self, place: int) -> Gear:
        return self.low

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        return self.high if gear == self.low and self.signal(place, logprobs) > self.threshold else None


ONCE = ("static", "random", "route")
TWICE = ("kickdown", "inverted", "oracle")
COUNTED = {
    **dict.fromkeys(ONCE, "one pass per token, in the gear that it is computed in"),
    **dict.fromkeys(TWICE, "a low pass for every token, and a high pass for each that is computed again"),
    "lossless": "the low passes of all drafts, and one top pass for each verification",
}
CONTROLS = ("static", "random")  # in every report
SHIFTING = ("random", "route", "kickdown", "inverted", "oracle")


@dataclass(frozen=True)
class PolicyRow:
    """A row of the report: a policy with the share of tokens for the higher gear, or a static gear with its bits."""

    policy: str
    share: float | None = None
    bits: int | None = None

    @property
    def name(self) -> str:
        if self.policy == "static":
            return f"static-{self.bits}"
        return self.policy + ("" if self.share is None else f"-{self.share:g}")


@dataclass
class Setting:
    """Holds what the policies are made from. recorded: the low gear alone."""

    windows: Sequence[Sequence[int]]
    low: Gear
    high: Gear
    reference: Reference
    recorded: Recording
    seed: int = 0


def entries(policies: Collection[str], shares: Sequence[float], ladder: Sequence[Gear]) -> list[PolicyRow]:
    """Return the rows of a report, in the order of COUNTED: the policies and the controls."""
    rows = []
    for policy in COUNTED:
        if policy not in (*policies, *CONTROLS):
            continue
        if policy == "static":
            rows += [PolicyRow(policy, bits=gear.bits) for gear in ladder]
        elif policy in SHIFTING:
            rows += [PolicyRow(policy, share) for share in shares]
        else:
            rows.append(PolicyRow(policy))
    return rows


def make_policy(entry: PolicyRow, setting: Setting) -> tuple[Policy, float | None]:
    """Return a policy that shifts, and its threshold: the quantile of its signal in the low gear that gives the share.

    The policies without a threshold have None.
    """
    low, high, share = setting.low, setting.high, entry.share or 0.0
    tokens = len(targets_of(setting.windows))
    if entry.policy == "random":
        chosen = {*np.random.default_rng(setting.seed).permutation(tokens)[: round(share * tokens)].tolist()}
        return Planned([high if place in chosen else low for place in range(tokens)]), None
    if entry.policy == "route":
        return route_policy(setting, share)
    signal, recorded = signals(setting)[entry.policy]
    threshold = float(np.quantile(recorded, 1 - share, method="inverted_cdf"))
    return SameToken(low, high, signal, threshold), threshold


def signals(setting: Setting) -> dict[str, tuple[Callable[[int, np.ndarray], float], np.ndarray]]:
    """Return the signal that each policy compares with its threshold, and its values in the low gear alone (n,)."""
    entropy, reference = setting.recorded.entropy, setting.reference
    return {
        "kickdown": (lambda place, q: float(entropy_of_logprobs(log_softmax(q))), entropy),
        "inverted": (lambda place, q: -float(entropy_of_logprobs(log_softmax(q))), -entropy),
        "oracle": (
            lambda place, q: float(kl_divergence(log_softmax(reference[place]), log_softmax(q))),
            setting.recorded.kl,
        ),
    }


def route_policy(setting: Setting, share: float) -> tuple[RoutePolicy, float]:
    """Return the gate of mode route, with the threshold that `calibrate` would find."""
    recorded, vocabulary = setting.recorded, setting.reference.vocab_size
    sequences = [recorded.entropy[recorded.window == w].tolist() for w in np.unique(recorded.window)]
    thresholds, _ = share_thresholds(sequences, (1 - share, share), vocabulary)
    gears = setting.low, setting.high
    return RoutePolicy(gears, ThresholdGate(thresholds), Monitor(vocabulary)), thresholds[0]
