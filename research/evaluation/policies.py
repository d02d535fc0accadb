"""Which gear computes a token: the policies of the comparison, and the controls that they have to beat.

All but the static ones shift between two gears, `low` and `high`. A policy that decides by the token itself computes it
in `low` first and then, perhaps, again in `high`: both passes are counted. A report has a row for every policy with its
controls, each with the threshold that gives the share of tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..gears.ladder import Gear, Schedule
from ..routing.calibration import share_thresholds
from ..routing.gates import RUN_AHEAD, Gate, Monitor, ThresholdGate
from .metrics import entropy_of_logprobs, kl_divergence, log_softmax
from .replay import Policy, Recording, Reference, positions_of, targets_of


@dataclass
class StaticPolicy(Policy):
    """One gear for every token."""

    gear: Gear

    def first(self, place: int) -> Gear:
        return self.gear


@dataclass
class Planned(Policy):
    """A gear for every token that is fixed beforehand: at random, or by position alone."""

    gears: Sequence[Gear]

    def first(self, place: int) -> Gear:
        return self.gears[place]


@dataclass
class RoutePolicy(Policy):
    """GEARBX's gate over the entropies of past tokens, which acts two passes later, as in `decoding.route`.

    Args:
        gears: the gate numbers them from 0.
        initial_gear: number of the gear to begin in.
    """

    gears: Sequence[Gear]
    gate: Gate
    monitor: Monitor
    initial_gear: int = 0

    def begin(self) -> None:
        self.gate.reset(self.initial_gear)
        self.monitor.reset()
        self.coming = deque([self.gears[self.initial_gear]] * RUN_AHEAD)

    def first(self, place: int) -> Gear:
        return self.coming.popleft()

    def after(self, logprobs: np.ndarray) -> None:
        reading = self.monitor.update(float(entropy_of_logprobs(log_softmax(logprobs))))
        self.coming.append(self.gears[self.gate.update(reading)])


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


class HigherOf(Policy):
    """The higher gear of two policies that compute each token once: a schedule, say, and a gate on top of it."""

    def __init__(self, one: Policy, other: Policy):
        self.both = one, other

    def begin(self) -> None:
        for policy in self.both:
            policy.begin()

    def first(self, place: int) -> Gear:
        return max((policy.first(place) for policy in self.both), key=lambda gear: gear.index)

    def after(self, logprobs: np.ndarray) -> None:
        for policy in self.both:
            policy.after(logprobs)


def scheduled_plan(schedule: Schedule, positions: np.ndarray) -> Planned:
    """The gears of a schedule, which begins with every window; positions (n,) within the windows."""
    return Planned([schedule.gears[part] for part in np.searchsorted(schedule.ends, positions, side="right")])


def shuffled(gears: Sequence[Gear], seed: int) -> Planned:
    """A coin with exactly as many tokens in each gear."""
    return Planned([gears[i] for i in np.random.default_rng(seed).permutation(len(gears))])


ONCE = ("static", "random", "route", "position", "schedule", "schedule-route")
TWICE = ("kickdown", "inverted", "oracle")
COUNTED = {
    **dict.fromkeys(ONCE, "one pass per token, in the gear that it is computed in"),
    **dict.fromkeys(TWICE, "a low pass for every token, and a high pass for each that is computed again"),
    **dict.fromkeys(
        ("lossless", "lossless-fixed"), "the low passes of all drafts, and one top pass for each verification"
    ),
    "kv": "one pass per token, in the top gear, over a KV cache in the gear of the name",
}
WHOLE = 16  # bits of the KV cache's gear that reads the entries as they are
CONTROLS = ("static", "random")  # in every report
SHIFTING = ("random", "route", "kickdown", "inverted", "position", "oracle")


@dataclass(frozen=True)
class PolicyRow:
    """A row of the report: a policy with the share of tokens for the higher gear, or a static gear with its bits.

    kv_gears: of policy `kv`: the ladder of the KV cache, one of whose gears has `bits`. schedule: that it follows.
    """

    policy: str
    share: float | None = None
    bits: int | None = None
    kv_gears: tuple[int, ...] = ()
    schedule: Schedule | None = None

    def gears(self, between: tuple[Gear, Gear]) -> tuple[Gear, ...]:
        """The gears that a policy which shifts may use, ascending. between: of those without a schedule."""
        own = () if self.schedule is None else self.schedule.gears
        return tuple(sorted({*own, *(() if self.policy == "schedule" else between)}, key=lambda gear: gear.index))

    @property
    def name(self) -> str:
        if self.policy == "static":
            return f"static-{self.bits}"
        if self.policy == "kv":
            return f"kv-{self.bits}-of-{'-'.join(map(str, self.kv_gears))}"
        schedule = "" if self.schedule is None else f"-{self.schedule}"
        return self.policy + schedule + ("" if self.share is None else f"-{self.share:g}")


@dataclass
class Setting:
    """What the policies are made from.

    recorded: the low gear alone. gate: window, hysteresis and min_gear_duration of route.
    """

    windows: Sequence[Sequence[int]]
    low: Gear
    high: Gear
    reference: Reference
    recorded: Recording
    gate: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def entries(
    policies: Sequence[str],
    shares: Sequence[float],
    ladder: Sequence[Gear],
    kv_gears: tuple[int, ...] = (),
    schedules: Sequence[Schedule] = (),
) -> list[PolicyRow]:
    """The rows of a report, in the order of COUNTED: the policies, the controls, and gears of the KV cache."""
    rows = []
    for policy in COUNTED:
        if policy not in (*policies, *CONTROLS):
            continue
        if policy == "static":
            rows += [PolicyRow(policy, bits=gear.bits) for gear in ladder]
        elif policy in SHIFTING:
            rows += [PolicyRow(policy, share) for share in shares]
        elif policy == "schedule":
            rows += [PolicyRow(policy, schedule=schedule) for schedule in schedules]
        elif policy == "schedule-route":
            rows += [PolicyRow(policy, share, schedule=schedule) for schedule in schedules for share in shares]
        else:
            rows.append(PolicyRow(policy))
    return rows + [PolicyRow("kv", bits=bits, kv_gears=kv_gears) for bits in kv_gears if bits < WHOLE]


def make_policy(entry: PolicyRow, setting: Setting) -> tuple[Policy, float | None]:
    """A policy that shifts, and its threshold: the quantile of its signal in the low gear that gives the share.

    The policies without a threshold have None.
    """
    low, high, share = setting.low, setting.high, entry.share or 0.0
    tokens, positions = len(targets_of(setting.windows)), positions_of(setting.windows)
    if entry.schedule is not None:
        plan = scheduled_plan(entry.schedule, positions)
        if entry.policy == "schedule":
            return plan, None
        gate, threshold = route_policy(setting, share)
        return HigherOf(plan, gate), threshold
    if entry.policy == "random":
        chosen = {*np.random.default_rng(setting.seed).permutation(tokens)[: round(share * tokens)].tolist()}
        return Planned([high if place in chosen else low for place in range(tokens)]), None
    if entry.policy == "position":  # the first tokens of every window, up to the quantile
        last = int(np.quantile(positions, share, method="inverted_cdf"))
        return scheduled_plan(Schedule((high, low), (last,)), positions), None
    if entry.policy == "route":
        return route_policy(setting, share)
    signal, recorded = signals(setting)[entry.policy]
    threshold = float(np.quantile(recorded, 1 - share, method="inverted_cdf"))
    return SameToken(low, high, signal, threshold), threshold


def signals(setting: Setting) -> dict[str, tuple[Callable[[int, np.ndarray], float], np.ndarray]]:
    """The signal that each policy compares with its threshold, and its values in the low gear alone (n,)."""
    entropy, reference = setting.recorded.entropy, setting.reference
    return {
        "kickdown": (lambda place, q: float(entropy_of_logprobs(log_softmax(q))), entropy),
        "inverted": (lambda place, q: -float(entropy_of_logprobs(log_softmax(q))), -entropy),
        "oracle": (
            lambda place, q: float(kl_divergence(reference.logprobs(place), log_softmax(q))),
            setting.recorded.kl,
        ),
    }


def route_policy(setting: Setting, share: float) -> tuple[RoutePolicy, float]:
    """The gate of mode route, with the threshold that `calibrate --method share` would find."""
    recorded, vocabulary = setting.recorded, setting.reference.stored.shape[1]
    sequences = [recorded.entropy[recorded.window == w].tolist() for w in np.unique(recorded.window)]
    thresholds, _ = share_thresholds(sequences, (1 - share, share), vocabulary, **setting.gate)
    gate = {key: value for key, value in setting.gate.items() if key != "window"}
    monitor = Monitor(vocabulary, **({"window": setting.gate["window"]} if "window" in setting.gate else {}))
    return RoutePolicy((setting.low, setting.high), ThresholdGate(thresholds, **gate), monitor), thresholds[0]
