"""Bounds of an entropy of which only the k largest log-probabilities are known, and routing by such bounds.

A server lists the k largest of V probabilities, p_1 >= ... >= p_k. Their part of the entropy is K = -sum p_i log2 p_i.
The others have r = 1 - sum p_i together, and at most p_k each. By Jensen's inequality the entropy is largest where they
are all alike: H <= K + r log2((V - k) / r). It is smallest in a corner of 0 <= q_i <= p_k, sum q_i = r, where
m = floor(r / p_k) tokens have p_k and one has the rest, s = r - m p_k: H >= K - m p_k log2 p_k - s log2 s. If a list is
shorter than asked for, p_k becomes 1. Every listed value is an interval, as wide as its type or its digits round.

Routing gives the gear by each bound, and every gear that is possible.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import GearbxError
from .gates import RUN_AHEAD, Monitor, Reading, ThresholdGate

LEAST = -1e4  # nats: e to this power is 0 in any type, like e to the -9999 that OpenAI writes for "very unlikely"
FLOAT_ERROR = 1e-9  # of sums of probabilities, here
SINGLE = 2.0**-14  # nats: what single precision loses in the sum of a log-softmax, over any vocabulary
LARGEST_LOGIT = 32.0  # its steps are assumed where values do not show how large logits are
BFLOAT16, FLOAT16, FLOAT32 = 2.0**-8, 2.0**-11, 2.0**-24  # half a step of a number, as a part of it, at most
MAX_DECIMALS = 6  # with more than these, rounding does not matter
PEAK = 1 / math.e  # where -p log p is largest


@dataclass(frozen=True)
class Rounding:
    """A log-probability l is off by `absolute` + `relative` |l| at most, in nats."""

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, logprob: float) -> float:
        return self.absolute + self.relative * abs(logprob)


NO_ROUNDING = Rounding()


def entropy_bounds(
    logprobs: Sequence[float], vocab_size: int, rounding: Rounding = NO_ROUNDING, unlisted: float | None = None
) -> tuple[float, float]:
    """Return the least and the largest entropy, in bits, that a distribution with these log-probabilities can have.

    Args:
        logprobs: natural, of k tokens, in any order; minus infinity is a probability of 0.
        vocab_size: V, of which k are known.
        rounding: of the log-probabilities.
        unlisted: the log-probability that none of the other V - k exceeds; the smallest of `logprobs` if not given,
            which is right for the k largest. 0: nothing is known of the others.

    Raises:
        GearbxError: no distribution over V tokens has these log-probabilities.
    """
    check_logprobs(logprobs, vocab_size, rounding)
    known = [max(value, LEAST) for value in logprobs]
    low = [math.exp(value - rounding.of(value)) for value in known]
    high = [min(1.0, math.exp(value + rounding.of(value))) for value in known]
    limit = min(known) if unlisted is None else max(unlisted, LEAST)
    most_each = min(1.0, math.exp(limit + rounding.of(limit)))
    others = vocab_size - len(known)
    least, most = 1 - math.fsum(high), 1 - math.fsum(low)
    if most < -FLOAT_ERROR:
        raise GearbxError(f"the probabilities add up to {math.fsum(map(math.exp, known)):.4g}, more than 1")
    if least > others * most_each + FLOAT_ERROR:
        raise GearbxError(
            f"the probabilities leave {least:.3g} to {others} other tokens, of at most {most_each:.3g} each"
        )
    most = max(0.0, min(most, others * most_each))
    least = min(max(0.0, least), most)
    lowest = math.fsum(min(bits(a), bits(b)) for a, b in zip(low, high)) + rest_at_least(least, most, most_each)
    highest = math.fsum(bits(min(max(PEAK, a), b)) for a, b in zip(low, high)) + rest_at_most(least, most, others)
    ceiling = math.log2(vocab_size)
    return min(lowest, ceiling), min(highest, ceiling)


def bits(probability: float) -> float:
    """-p log2 p, a token's part of the entropy."""
    return -probability * math.log2(probability) if probability > 0 else 0.0


def rest_at_least(least: float, most: float, most_each: float) -> float:
    """Return the fewest bits of a mass between `least` and `most`, of tokens that have `most_each` at most.

    -p log p is concave, so that the minimum packs the mass: as many tokens as possible with `most_each`, one with what
    remains. Between two multiples of `most_each` that is concave in the mass too; so the ends and the first multiple
    between them are all that can be the minimum.
    """
    if most <= 0 or most_each <= 0:
        return 0.0

    def packed(mass: float) -> float:
        full = math.floor(mass / most_each)
        return full * bits(most_each) + bits(max(0.0, mass - full * most_each))

    multiple = math.ceil(least / most_each) * most_each
    return min(packed(mass) for mass in (least, most, *([multiple] if multiple < most else [])))


def rest_at_most(least: float, most: float, others: int) -> float:
    """Return the most bits of a mass between `least` and `most`: `others` tokens alike; r log2(n / r) is largest at n /
    e."""
    mass = min(max(others * PEAK, least), most)
    return mass * (math.log2(others) - math.log2(mass)) if mass > 0 else 0.0


def check_logprobs(logprobs: Sequence[float], vocab_size: int, rounding: Rounding) -> None:
    """Raises GearbxError for numbers that are not log-probabilities, none, or more than there are tokens."""
    if not logprobs:
        raise GearbxError("there are no log-probabilities")
    if len(logprobs) > vocab_size:
        raise GearbxError(f"there are {len(logprobs)} log-probabilities for a vocabulary of {vocab_size}")
    for value in logprobs:
        if not value <= (rounding.of(value) if math.isfinite(value) else 0.0) + FLOAT_ERROR:
            raise GearbxError(f"{value:g} is not a log-probability, which is 0 or less")


def rounding_as_written(logprobs: Sequence[float]) -> Rounding:
    """Return how exact log-probabilities can be that were written like these: in half precision, in decimals, or in
    single."""
    values = [value for value in logprobs if math.isfinite(value) and value > LEAST / 10]
    if all(map(is_bfloat16, values)):
        return Rounding(SINGLE + shared_error(values, BFLOAT16), BFLOAT16)
    if all(fits_type(value, "e") for value in values):
        return Rounding(SINGLE + shared_error(values, FLOAT16), FLOAT16)
    digits = max(map(decimals, values))
    return Rounding(SINGLE + (0.5 * 10.0**-digits if digits <= MAX_DECIMALS else 0.0), FLOAT32)


def shared_error(values: Sequence[float], precision: float) -> float:
    """Return what all log-probabilities of a half-precision type can be off by together, in nats.

    They are logits less their log(sum(exp)), which was rounded: to half a step of its size. A logit of at least half
    that size has steps at least half as large, and so has the difference. A smaller logit is further away than half
    that size, which then is known by the difference. So every value gives a limit.

    Args:
        precision: half a step of a number, as a part of it, at most.
    """
    limits = (max(binary_step(value), 2 * precision * abs(value) / (1 - precision)) for value in values)
    limit = min(limits, default=math.inf)
    return limit if math.isfinite(limit) else LARGEST_LOGIT * precision


def binary_step(value: float) -> float:
    """Return the largest power of two, negative exponents included, of which a number is a multiple; infinite for 0."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator if numerator else math.inf


def is_bfloat16(value: float) -> bool:
    return fits_type(value, "f") and struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF == 0


def fits_type(value: float, kind: str) -> bool:
    """Return whether a float16 ("e") or a float32 ("f") has this value."""
    try:
        return struct.unpack(f"<{kind}", struct.pack(f"<{kind}", value))[0] == value
    except OverflowError:
        return False


def decimals(value: float) -> int:
    """Digits after the point of the shortest decimal number that reads back as this one."""
    mantissa, _, exponent = repr(value).partition("e")
    fraction = mantissa.partition(".")[2].rstrip("0")
    return max(0, len(fraction) - int(exponent or 0))


@dataclass(frozen=True)
class Bounded:
    """A token's rolling means, in bits, and the gears that would have computed it, by the lower and the upper bound.

    possible: every gear that entropies between the bounds may lead to.
    """

    means: tuple[float, float]
    gears: tuple[int, int]
    possible: frozenset[int]


class BoundedRouting:
    """The gears of a text by both bounds of its entropies. Gears are numbered from 0, the lowest precision.

    The same entropies as both bounds give what mode route gives. Gears that the bounds agree on are not certain: a gate
    remembers when it shifted last, and stays, so that entropies between the bounds can lead to a third gear. So all
    states that a gate can be in are followed as well. The true gear is always among the possible ones.

    Args:
        make_monitor, make_gate: a new one for each bound.
        first: the gear that the text begins in.
    """

    def __init__(
        self,
        make_monitor: Callable[[], Monitor],
        make_gate: Callable[[], ThresholdGate],
        first: int,
    ):
        self.monitors = [make_monitor() for _ in range(2)]
        self.gates = [make_gate() for _ in range(2)]
        self.any_gate = make_gate()
        for gate in (*self.gates, self.any_gate):
            gate.reset(first)
        self.states = {(self.any_gate.gear, self.any_gate.duration)}
        self.coming = deque([((first, first), frozenset({first}))] * RUN_AHEAD)

    def update(self, entropies: tuple[float, float]) -> Bounded:
        """Take the bounds of the next token's entropy, in bits."""
        readings = [monitor.update(value) for monitor, value in zip(self.monitors, entropies)]
        low, high = (gate.update(reading) for gate, reading in zip(self.gates, readings))
        between = list(distinct_readings(self.any_gate, *readings))
        self.states = {self.after(state, reading) for state in self.states for reading in between}
        self.coming.append(((low, high), frozenset(gear for gear, _ in self.states)))
        return Bounded((readings[0].mean, readings[1].mean), *self.coming.popleft())

    def after(self, state: tuple[int, int], reading: Reading) -> tuple[int, int]:
        """Return the gear and the duration of a gate after a reading."""
        gate = self.any_gate
        gate.gear, gate.duration = state
        gate.update(reading)
        return gate.gear, min(gate.duration, gate.min_gear_duration)


def distinct_readings(gate: ThresholdGate, low: Reading, high: Reading) -> Iterator[Reading]:
    """Readings between two that lead a gate to everything that readings between them can lead it to.

    A gate compares the mean with its levels; so these levels, what follows them and the ends stand for all means.
    """
    levels = [level for level in (*gate.up, *gate.down) if low.mean <= level <= high.mean]
    means = {low.mean, high.mean, *levels, *(min(math.nextafter(level, math.inf), high.mean) for level in levels)}
    for catastrophe in {low.catastrophe, high.catastrophe}:
        for mean in means:
            yield replace(low, mean=mean, catastrophe=catastrophe)
