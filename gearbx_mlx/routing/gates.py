"""Monitor of entropies, thresholds and their file, gates, the initial gear, and batch policies.

- The monitor: mean, slope, forecast and catastrophe of the last few entropies (GEARBX 3.2 and 3.5).
- Thresholds between gears: the paper's defaults, their file, and checks. calibration.py derives them from text.
- Gates turn a monitor's reading into a gear (GEARBX 3.3, 3.5 and 10.2).
- The initial gear, chosen from the prompt (GEARBX 11); entropy takes over after a few tokens.
- Batch policies: the gear of a step, whose weights all sequences share, from their requested gears.
"""

import itertools
import json
import math
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict

from ..errors import GearbxError, GearbxWarning
from ..files.reading import Count, check_schema, parse_json, read_as, typed

DEFAULT_WINDOW = 3  # GEARBX 3.2, the MLX backend
LOOKAHEAD = 2  # tokens
CATASTROPHE_SHARE = 0.9
LOW_BITS, HIGH_BITS = 1.8, 3.5  # GEARBX 3.3, for the reference vocabulary
REFERENCE_VOCABULARY = 32768
DEFAULT_HYSTERESIS = 0.1  # bits
DEFAULT_MIN_GEAR_DURATION = 4  # tokens


@dataclass(frozen=True)
class Reading:
    """State of the monitor after one token, in bits.

    value: of this token. forecast: the expected mean two tokens later. catastrophe: the last two values were both above
    0.9 log2 V, so the distribution was nearly uniform.
    """

    value: float
    mean: float
    slope: float
    forecast: float
    catastrophe: bool


class RunningMean:
    """Exponentially weighted mean of values.

    Args:
        kept: share of the earlier values' weight that each new value leaves.
        prior: mean before any value; it has the weight of `weight` values.

    Attributes:
        value: the mean.
    """

    def __init__(self, kept: float, prior: float, weight: float = 0.0):
        self._kept, self._weight, self.value = kept, weight, prior

    def add(self, value: float) -> None:
        self._weight = self._kept * self._weight + 1
        self.value += (value - self.value) / self._weight


class Monitor:
    """Rolling window over the entropies of tokens.

    Args:
        vocab_size: V, the length of the logits.
        window: tokens in the rolling mean.
        catastrophe_share: two values in a row above this share of log2 V are a catastrophe; infinite: never.

    Raises:
        GearbxError: a window shorter than one token.
    """

    def __init__(self, vocab_size: int, window: int = DEFAULT_WINDOW, *, catastrophe_share: float = CATASTROPHE_SHARE):
        if window < 1:
            raise GearbxError(f"window: must be 1 token or more, got {window}; set a larger number")
        self.ceiling = catastrophe_share * math.log2(vocab_size)
        self._window: deque[float] = deque(maxlen=window)
        self.reset()

    def reset(self) -> None:
        self._window.clear()
        self._previous = 0.0  # separate, since the window may hold only one value

    def update(self, value: float) -> Reading:
        """Take the next token's entropy (bits) and return the new state."""
        catastrophe = min(value, self._previous) > self.ceiling
        self._window.append(value)
        self._previous = value
        values = self._window
        mean = sum(values) / len(values)
        slope = (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 0.0
        return Reading(value, mean, slope, mean + LOOKAHEAD * slope, catastrophe)


def check_thresholds(thresholds: Sequence[float], gears: int) -> None:
    """Validate thresholds: finite, ascending, one between neighboring gears. Raises GearbxError otherwise."""
    shown = ", ".join(f"{t:g}" for t in thresholds)
    if len(thresholds) != gears - 1:
        need = f"{gears} gears need {gears - 1} thresholds"
        raise GearbxError(f"{need}, got {len(thresholds)} ({shown}); use one between neighboring gears")
    if not all(math.isfinite(t) for t in thresholds):
        raise GearbxError(f"thresholds: must be finite numbers of bits, got {shown}; use finite ones")
    if any(a >= b for a, b in itertools.pairwise(thresholds)):
        raise GearbxError(f"thresholds: must ascend with the gears, got {shown}; use ascending numbers")


def spread_between(low: float, high: float, gears: int) -> tuple[float, ...]:
    """Return one threshold between neighboring gears, spread evenly from `low` to `high` (two gears: only `low`)."""
    return tuple(float(t) for t in np.linspace(low, high, max(gears - 1, 0)))


def default_thresholds(gears: int, vocab_size: int) -> tuple[float, ...]:
    """Return 1.8 and 3.5 bits, scaled by log2 V / log2 32768 (GEARBX 3.4), spread evenly for longer ladders."""
    scale = math.log2(vocab_size) / math.log2(REFERENCE_VOCABULARY)
    return spread_between(LOW_BITS * scale, HIGH_BITS * scale, gears)


class Gate(Protocol):
    """A rule that chooses the gear of the next tokens. Gears are numbered from 0, the lowest precision."""

    def update(self, reading: Reading) -> int:
        """Take the reading of a token and return the gear of the next ones."""

    def peek(self, level: float) -> int:
        """Return the gear for a mean entropy of `level` bits, without a change of state."""

    def reset(self, gear: int) -> None:
        """Start a sequence in `gear`."""


class ThresholdGate:
    """A gate that chooses gear k while the rolling mean is between threshold k-1 and threshold k.

    To leave the lowest or the highest gear, the mean has to pass the threshold by `hysteresis` bits. In ladders of four
    or more gears this also holds for every step up between inner gears, so that each boundary has a margin. The gate
    stays in a gear for at least `min_gear_duration` tokens. Only a catastrophe leads to the top gear at once.

    Args:
        thresholds: ascending, in bits, one fewer than there are gears; empty for a ladder of one.
        hysteresis: in bits.
        min_gear_duration: in tokens.

    Raises:
        GearbxError: thresholds out of order or not finite, a negative hysteresis, a duration below 1.
    """

    def __init__(
        self,
        thresholds: Sequence[float],
        hysteresis: float = DEFAULT_HYSTERESIS,
        min_gear_duration: int = DEFAULT_MIN_GEAR_DURATION,
        initial_gear: int = 0,
    ):
        check_thresholds(thresholds, len(thresholds) + 1)
        if not hysteresis >= 0:
            raise GearbxError(f"hysteresis: must be 0 bits or more, got {hysteresis}; set a larger number")
        if min_gear_duration < 1:
            raise GearbxError(f"min_gear_duration: must be 1 token or more, got {min_gear_duration}; set more")
        last = len(thresholds) - 1
        # GEARBX has no margin at the top gear, so the last threshold of a longer ladder has none for steps up.
        self.up = [t + (hysteresis if i < last or i == 0 else 0.0) for i, t in enumerate(thresholds)]
        self.down = [t - (hysteresis if i == last else 0.0) for i, t in enumerate(thresholds)]
        self.thresholds = tuple(thresholds)
        self.top = len(thresholds)
        self.min_gear_duration = min_gear_duration
        self.reset(initial_gear)

    def reset(self, gear: int) -> None:
        self.gear = gear
        self.duration = 0

    def peek(self, level: float) -> int:
        gear = self.gear
        while gear < self.top and self._rises_above(gear, level):
            gear += 1
        while gear > 0 and gear <= self.gear and self._falls_below(gear, level):
            gear -= 1
        return gear

    def update(self, reading: Reading) -> int:
        self.duration += 1
        target = self.top if reading.catastrophe else self.peek(reading.mean)
        free = self.duration >= self.min_gear_duration or (reading.catastrophe and self.gear < self.top)
        if target != self.gear and free:
            self.reset(target)
        return self.gear

    def _rises_above(self, gear: int, level: float) -> bool:
        # GEARBX 3.3: the low gear includes its threshold, and so does the high gear.
        reaches_top = gear == self.top - 1 and gear > 0
        return level >= self.up[gear] if reaches_top else level > self.up[gear]

    def _falls_below(self, gear: int, level: float) -> bool:
        leaves_top = gear == self.top and gear > 1
        return level < self.down[gear - 1] if leaves_top else level <= self.down[gear - 1]


class OneGear:
    """A gate that stays in one gear, for mode static and as a control."""

    def __init__(self, gear: int = 0):
        self.gear = gear

    def reset(self, gear: int) -> None:
        self.gear = gear

    def peek(self, level: float) -> int:
        return self.gear

    def update(self, reading: Reading) -> int:
        return self.gear


RUN_AHEAD = 2  # tokens: when a token is yielded, the next one is already in computation


def replay(entropies: Iterable[float], monitor: Monitor, gate: Gate) -> list[int]:
    """Return the gear that the gate chooses after each recorded entropy (bits), without a model."""
    return [gate.update(monitor.update(value)) for value in entropies]


THRESHOLDS_SCHEMA, THRESHOLDS_VERSION = "gearbx-mlx thresholds", 1
Positive = Annotated[int, Meta(ge=1, le=2**53)]
NotNegative = Annotated[float, Meta(ge=0)]


AUTO: Literal["auto"] = "auto"
MAKE_THRESHOLDS = "make a new file with gearbx_mlx calibrate"


class ThresholdFile(Struct, frozen=True):
    """Content of a `--thresholds` file, written by `calibrate` or by hand.

    `thresholds` are in bits; None: the paper's. `window`, `hysteresis` and `min_gear_duration` are the gate's; None:
    the default. `shares`, if known, are the calibration tokens' shares in each gear. `mode` is the decoding mode of the
    thresholds. For kickdown, `gears` and the model's `fingerprint` must match the calibration; route only warns.
    """

    thresholds: list[float] | None = None
    vocab_size: Count | None = None
    model: str = ""
    method: str = ""
    gears: list[Count] = []
    tokens: Count = 0
    window: Positive | None = None
    hysteresis: NotNegative | None = None
    min_gear_duration: Positive | None = None
    shares: list[float] = []
    mode: str = "route"
    fingerprint: str = ""
    schema: str = THRESHOLDS_SCHEMA
    version: int = THRESHOLDS_VERSION

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class ReadThresholds:
    """A thresholds file: its content and its path."""

    content: ThresholdFile
    place: str


Thresholds = Sequence[float] | Literal["auto"] | ReadThresholds | None
"""Bits, one fewer than there are gears; a file; "auto": found on short prompts; None: the paper's."""


def read_thresholds(text: str) -> Thresholds:
    """Parse the value of `--thresholds`: numbers with commas between, "auto", or a file's name.

    Raises:
        GearbxError: neither numbers nor a thresholds file.
    """
    if text == AUTO:
        return AUTO
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        content = read_as(Path(text), parse_thresholds, "a thresholds file", MAKE_THRESHOLDS)
        return ReadThresholds(content, text)


def parse_thresholds(text: str) -> ThresholdFile:
    """Parse a thresholds file.

    Raises:
        GearbxError: not JSON, an unknown schema or version, a field of the wrong type.
    """
    content = parse_json(text)
    check_schema(content, "a thresholds file", THRESHOLDS_SCHEMA, THRESHOLDS_VERSION)
    return typed(content, ThresholdFile)


def thresholds_in_bits(
    thresholds: Thresholds, gears: Sequence[int], vocab_size: int, fingerprint: Callable[[], str]
) -> tuple[float, ...]:
    """Return thresholds in bits.

    Args:
        gears: bits of the ladder.
        fingerprint: returns the model's, to compare with a file's.

    Raises:
        GearbxError: thresholds that do not fit the ladder or the model, or "auto".
    """
    if isinstance(thresholds, str):
        raise GearbxError(
            f"thresholds: must be bits here, got '{thresholds}', for mode route of generate, chat, server and analyze; "
            "use bits, or a file of gearbx_mlx calibrate"
        )
    if isinstance(thresholds, ReadThresholds):
        try:
            return thresholds_of_file(thresholds.content, gears, vocab_size, fingerprint())
        except GearbxError as error:
            raise GearbxError(f"{thresholds.place}: {error}; {MAKE_THRESHOLDS}") from error
    if isinstance(thresholds, int | float):
        raise GearbxError(f"thresholds: must be a list of bits, got {thresholds}; use [{thresholds}]")
    bits = default_thresholds(len(gears), vocab_size) if thresholds is None else tuple(thresholds)
    check_thresholds(bits, len(gears))
    return bits


def thresholds_of_file(
    content: ThresholdFile, gears: Sequence[int], vocab_size: int, fingerprint: str
) -> tuple[float, ...]:
    """Return a file's thresholds in bits, if they fit a ladder, a vocabulary and a model.

    Args:
        gears: bits.

    Raises:
        GearbxError: a different vocabulary or number of gears; thresholds out of order, negative or not finite; for
            kickdown also different gears or a different model, of which mode route only warns.
    """
    if content.thresholds is None:
        return default_thresholds(len(gears), vocab_size)
    if content.vocab_size not in (None, vocab_size):
        raise GearbxError(f"made for a vocabulary of {content.vocab_size}, got a model with {vocab_size}")
    others = []
    if content.fingerprint not in ("", fingerprint):
        others.append(f"made for a different model ({content.model}), whose weights are not these")
    if content.gears and list(content.gears) != list(gears):
        shown, mine = (",".join(map(str, bits)) for bits in (gears, content.gears))
        others.append(f"made for gears {mine}, not {shown}")
    if others and content.mode != "route":
        raise GearbxError(others[0])
    check_thresholds(content.thresholds, len(gears))
    if any(bits < 0 for bits in content.thresholds):
        raise GearbxError(f"must have thresholds of 0 bits or more, got {min(content.thresholds):g}")
    for other in others:
        warnings.warn(f"gears will have other shares: thresholds {other}", GearbxWarning, stacklevel=2)
    return tuple(float(t) for t in content.thresholds)


MATH = re.compile(r"[+*/=^<>%√∑∏∫∂∞≈≠≤≥±×÷π]|(?<=\d)\s*[-−]\s*(?=\d)")
REASONING = re.compile(
    r"\b(?:def|class|function|return|import|algorithm|code|python|javascript|java|rust|sql|regex|compile|debug|"
    r"recursion|complexity|prove|proof|derive|theorem|equation|integral|derivative|calculate|compute|solve|"
    r"explain why|step by step|analy[sz]e|implement|optimi[sz]e|reason)\b",
    re.IGNORECASE,
)


HIGH_SCORE, MID_SCORE = 4.0, 1.5


def difficulty(prompt: str) -> float:
    """Return a score: 2 n_math + 1.5 n_code + 0.3 min(words / 50, 3) + 1.5 [mean word length > 6.5]."""
    words = prompt.split()
    mean_length = sum(map(len, words)) / len(words) if words else 0.0
    return (
        2 * len(MATH.findall(prompt))
        + 1.5 * len(REASONING.findall(prompt))
        + 0.3 * min(len(words) / 50, 3)
        + 1.5 * (mean_length > 6.5)
    )


def first_gear(prompt: str, gears: int) -> int:
    """Return the number of the lowest, the middle or the top gear of a ladder with `gears` gears."""
    score = difficulty(prompt)
    if score >= HIGH_SCORE:
        return gears - 1
    return (gears - 1) // 2 if score >= MID_SCORE else 0


BatchPolicy = Callable[[Sequence[int]], int]
"""Function from the requested gears of sequences to the gear of a step. Gear 0 is the lowest precision."""


DEFAULT_POLICY = "highest"
QUANTILE = "quantile:"


def highest(requested: Sequence[int]) -> int:
    """Return the highest requested gear: no sequence gets a lower one than it requested."""
    return max(requested)


def most(requested: Sequence[int]) -> int:
    """Return the most requested gear; the highest of several."""
    counts = Counter(requested)
    return max(counts, key=lambda gear: (counts[gear], gear))


def quantile(share: float) -> BatchPolicy:
    """Return a policy for the lowest gear that is enough for this share of the sequences: 1 is `highest`, 0 the
    lowest."""

    def policy(requested: Sequence[int]) -> int:
        return sorted(requested)[max(0, math.ceil(share * len(requested) - 1e-9) - 1)]

    return policy


NAMED: dict[str, BatchPolicy] = {"highest": highest, "most": most}


def policy_named(name: str | BatchPolicy) -> BatchPolicy:
    """Return a policy by name: "highest", "most" or "quantile:Q", such as "quantile:0.75". Functions are returned.

    Raises:
        GearbxError: an unknown name, a share outside of 0 to 1.
    """
    if callable(name):
        return name
    if isinstance(name, str) and name in NAMED:
        return NAMED[name]
    if isinstance(name, str) and name.startswith(QUANTILE):
        try:
            share = float(name.removeprefix(QUANTILE))
        except ValueError:
            share = math.nan
        if 0 <= share <= 1:
            return quantile(share)
    raise GearbxError(
        f"batch policy: must be a known name, got {name!a}; choose highest, most, or quantile:Q with Q from 0 to 1, "
        "such as quantile:0.75"
    )
