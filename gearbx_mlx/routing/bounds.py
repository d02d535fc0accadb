"""Bounds of the entropy from the k largest log-probabilities, and routing by such bounds.

A server lists the k largest of V probabilities, p_1 >= ... >= p_k. Their part of the entropy is K = -sum p_i log2 p_i.
The others sum to r = 1 - sum p_i, and are at most p_k each. By Jensen's inequality, entropy is largest if they are
equal: H <= K + r log2((V - k) / r). It is smallest in a corner of 0 <= q_i <= p_k, sum q_i = r: m = floor(r / p_k)
tokens have p_k and one has the rest, s = r - m p_k, so H >= K - m p_k log2 p_k - s log2 s. If a list is shorter than
requested, p_k becomes 1. Every listed value is an interval, given by the rounding of its type or its digits.

Routing returns the gear for each bound, and every possible gear.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import GearbxError
from .gates import RUN_AHEAD, Monitor, Reading, ThresholdGate

MIN_LOGPROB = -1e4  # nats: its exponential is 0 in any type, as for -9999, OpenAI's value for "very unlikely"
FLOAT_ERROR = 1e-9  # error of sums of probabilities in this module
SINGLE = 2.0**-14  # nats: error of single precision in the sum of a log-softmax, over any vocabulary
LARGEST_LOGIT = 32.0  # assumed if the values do not determine the size of logits
BFLOAT16, FLOAT16, FLOAT32 = 2.0**-8, 2.0**-11, 2.0**-24  # largest relative rounding error
MAX_DECIMALS = 6  # with more decimals, their rounding is negligible
PEAK = 1 / math.e  # maximum of -p log p


@dataclass(frozen=True)
class Rounding:
    """Rounding error of a log-probability l: at most `absolute` + `relative` |l|, in nats."""

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, logprob: float) -> float:
        return self.absolute + self.relative * abs(logprob)


NO_ROUNDING = Rounding()


def entropy_bounds(
    logprobs: Sequence[float], vocab_size: int, rounding: Rounding = NO_ROUNDING, unlisted: float | None = None
) -> tuple[float, float]:
    """Return the least and the largest entropy, in bits, of distributions with these log-probabilities.

    Args:
        logprobs: natural, of k tokens, in any order; minus infinity is a probability of 0.
        vocab_size: V.
        rounding: of the log-probabilities.
        unlisted: upper bound of the other V - k log-probabilities; 0: unknown. None: the smallest of `logprobs`, as
            for the k largest.

    Raises:
        GearbxError: no distribution over V tokens has these log-probabilities.
    """
    check_logprobs(logprobs, vocab_size, rounding)
    known = [max(value, MIN_LOGPROB) for value in logprobs]
    low = [math.exp(value - rounding.of(value)) for value in known]
    high = [min(1.0, math.exp(value + rounding.of(value))) for value in known]
    limit = min(known) if unlisted is None else max(unlisted, MIN_LOGPROB)
    most_each = min(1.0, math.exp(limit + rounding.of(limit)))
    others = vocab_size - len(known)
    least, most = 1 - math.fsum(high), 1 - math.fsum(low)
    if most < -FLOAT_ERROR:
        total = math.fsum(map(math.exp, known))
        raise GearbxError(f"probabilities: must sum to at most 1, got {total:.4g}; use natural logarithms")
    if least > others * most_each + FLOAT_ERROR:
        raise GearbxError(
            f"probabilities: {others} unlisted tokens of at most {most_each:.3g} cannot sum to {least:.3g}; "
            "set a larger unlisted bound"
        )
    most = max(0.0, min(most, others * most_each))
    least = min(max(0.0, least), most)
    lowest = math.fsum(min(bits(a), bits(b)) for a, b in zip(low, high)) + rest_at_least(least, most, most_each)
    highest = math.fsum(bits(min(max(PEAK, a), b)) for a, b in zip(low, high)) + rest_at_most(least, most, others)
    ceiling = math.log2(vocab_size)
    return min(lowest, ceiling), min(highest, ceiling)


def bits(probability: float) -> float:
    """Return -p log2 p, a token's part of the entropy."""
    return -probability * math.log2(probability) if probability > 0 else 0.0


def rest_at_least(least: float, most: float, most_each: float) -> float:
    """Return the fewest bits of a mass between `least` and `most`, of tokens with at most `most_each`.

    -p log p is concave, so the minimum packs the mass: as many tokens as possible have `most_each`, and one has the
    rest. This is concave in the mass between two multiples of `most_each`. Candidates for the minimum are therefore
    the ends and the first multiple between them.
    """
    if most <= 0 or most_each <= 0:
        return 0.0

    def packed(mass: float) -> float:
        full = math.floor(mass / most_each)
        return full * bits(most_each) + bits(max(0.0, mass - full * most_each))

    multiple = math.ceil(least / most_each) * most_each
    return min(packed(mass) for mass in (least, most, *([multiple] if multiple < most else [])))


def rest_at_most(least: float, most: float, others: int) -> float:
    """Return the most bits of a mass between `least` and `most`: n equal tokens have r log2(n / r), largest at n /
    e."""
    mass = min(max(others * PEAK, least), most)
    return mass * (math.log2(others) - math.log2(mass)) if mass > 0 else 0.0


def check_logprobs(logprobs: Sequence[float], vocab_size: int, rounding: Rounding) -> None:
    """Validate log-probabilities. Raises GearbxError for positive ones, none, or more than there are tokens."""
    if not logprobs:
        raise GearbxError("log-probabilities: must not be empty; pass one or more")
    if len(logprobs) > vocab_size:
        raise GearbxError(f"log-probabilities: must be at most {vocab_size}, got {len(logprobs)}; set the vocabulary")
    for value in logprobs:
        if not value <= (rounding.of(value) if math.isfinite(value) else 0.0) + FLOAT_ERROR:
            raise GearbxError(f"log-probabilities: must be 0 or less, got {value:g}; use natural logarithms")


def rounding_as_written(logprobs: Sequence[float]) -> Rounding:
    """Return the rounding of log-probabilities from their values: of half precision, of decimals, or of single
    precision."""
    values = [value for value in logprobs if math.isfinite(value) and value > MIN_LOGPROB / 10]
    if all(map(is_bfloat16, values)):
        return Rounding(SINGLE + shared_error(values, BFLOAT16), BFLOAT16)
    if all(fits_type(value, "e") for value in values):
        return Rounding(SINGLE + shared_error(values, FLOAT16), FLOAT16)
    digits = max(map(decimals, values))
    return Rounding(SINGLE + (0.5 * 10.0**-digits if digits <= MAX_DECIMALS else 0.0), FLOAT32)


def shared_error(values: Sequence[float], precision: float) -> float:
    """Return the common error of all log-probabilities of a half-precision type, in nats.

    They are logits minus log(sum(exp)), rounded to half a step of its size. A logit of at least half that
    size has steps at least half as large, and so has the difference. A smaller logit has a difference larger than half
    that size; this bounds the size. So every value yields a limit.

    Args:
        precision: largest relative rounding error of the type.
    """
    limits = (max(binary_step(value), 2 * precision * abs(value) / (1 - precision)) for value in values)
    limit = min(limits, default=math.inf)
    return limit if math.isfinite(limit) else LARGEST_LOGIT * precision


def binary_step(value: float) -> float:
    """Return the largest power of two that divides a number, with negative exponents too; infinite for 0."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator if numerator else math.inf


def is_bfloat16(value: float) -> bool:
    return fits_type(value, "f") and struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF == 0


def fits_type(value: float, kind: str) -> bool:
    """Return whether a float16 ("e") or a float32 ("f") can hold this value."""
    try:
        return struct.unpack(f"<{kind}", struct.pack(f"<{kind}", value))[0] == value
    except OverflowError:
        return False


def decimals(value: float) -> int:
    """Return the number of decimals of the shortest decimal number that reads back as this one."""
    mantissa, _, exponent = repr(value).partition("e")
    fraction = mantissa.partition(".")[2].rstrip("0")
    return max(0, len(fraction) - int(exponent or 0))


@dataclass(frozen=True)
class Bounded:
    """A token's rolling means, in bits, and its gears, by the lower and the upper bound.

    possible: every gear that entropies between the bounds can lead to.
    """

    means: tuple[float, float]
    gears: tuple[int, int]
    possible: frozenset[int]


class BoundedRouting:
    """Gears of a sequence by both bounds of its entropies. Gears are numbered from 0, the lowest precision.

    Equal bounds yield the gears of mode route. Gears that the bounds agree on are not certain: a gate depends on its
    latest shift, so entropies between the bounds can lead to a third gear. All states that a gate can have are
    therefore tracked, and the true gear is always among the possible ones.

    Args:
        make_monitor, make_gate: return a new one for each bound.
        first: initial gear.
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
    """Yield readings between two that lead a gate to every state that readings between them can lead it to.

    A gate compares the mean with its levels. The levels, their next larger numbers and the ends represent all means.
    """
    levels = [level for level in (*gate.up, *gate.down) if low.mean <= level <= high.mean]
    means = {low.mean, high.mean, *levels, *(min(math.nextafter(level, math.inf), high.mean) for level in levels)}
    for catastrophe in {low.catastrophe, high.catastrophe}:
        for mean in means:
            yield replace(low, mean=mean, catastrophe=catastrophe)
