"""Thresholds from recorded entropies: for given shares, or by the statistics of GEARBX section 4.

Every function takes entropies in bits and returns ascending thresholds, one fewer than there are gears. The paper has
three gears; for other ladders its two thresholds are the first and the last, and the others are spread evenly.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from ..errors import GearbxError
from .gates import (
    DEFAULT_HYSTERESIS,
    DEFAULT_MIN_GEAR_DURATION,
    DEFAULT_WINDOW,
    Monitor,
    ThresholdGate,
    replay,
    spread_between,
)

LOW_PERCENTILE, HIGH_PERCENTILE = 0.30, 0.60
LOW_CAP, HIGH_CAP = 0.06, 0.12  # shares of log2 V
PERCENTILE_BAND, MEDIAN_BAND = 0.2, 0.3  # bits
FLOOR = 0.01  # bits
MEDIAN_FACTOR = 2.5
MIN_SAMPLES = 5


def positive(entropies: Sequence[float]) -> list[float]:
    """Return the samples above 0 bits, sorted.

    Raises:
        GearbxError: fewer than five such samples (GEARBX 4.1).
    """
    samples = sorted(e for e in entropies if e > 0)
    if len(samples) < MIN_SAMPLES:
        raise GearbxError(
            f"calibration: needs {MIN_SAMPLES} tokens with entropy above 0, got {len(samples)}; "
            "use more or longer prompts"
        )
    return samples


def widen(low: float, high: float, band: float) -> tuple[float, float]:
    """Return a band of at least this width (bits): a narrower one is widened around its center, above the floor."""
    if high - low < band:
        center = (low + high) / 2
        low, high = center - band / 2, center + band / 2
    low = max(low, FLOOR)
    return low, max(high, low + band)


def percentile_thresholds(entropies: Sequence[float], gears: int, vocab_size: int) -> tuple[float, ...]:
    """Return the 30th and the 60th percentile, at least 0.2 bits apart, capped at 0.06 and 0.12 log2 V (GEARBX 4.1,
    4.2)."""
    e = positive(entropies)
    n = len(e)
    low = max(e[max(math.floor(n * LOW_PERCENTILE) - 1, 0)], FLOOR)
    high = e[min(n - 1, math.floor(n * HIGH_PERCENTILE))]
    low, high = widen(low, high, PERCENTILE_BAND)
    ceiling = math.log2(vocab_size)
    return spread_between(*widen(min(low, LOW_CAP * ceiling), min(high, HIGH_CAP * ceiling), PERCENTILE_BAND), gears)


def median_thresholds(entropies: Sequence[float], gears: int) -> tuple[float, ...]:
    """Return the median and 2.5 times the median, at least 0.3 bits apart (GEARBX 4.2, the MLX backend)."""
    median = statistics.median(positive(entropies))
    return spread_between(*widen(median, MEDIAN_FACTOR * median, MEDIAN_BAND), gears)


def check_shares(shares: Sequence[float]) -> None:
    """Validate shares of tokens. Raises GearbxError if one is negative, or their sum is not 1."""
    if any(not 0 <= s <= 1 for s in shares) or not math.isclose(sum(shares), 1, abs_tol=0.01):
        shown = ", ".join(f"{s:g}" for s in shares)
        raise GearbxError(f"shares: must be parts of 1, one per gear, got {shown}; use numbers with the sum 1")


def share_thresholds(
    sequences: Sequence[Sequence[float]],
    shares: Sequence[float],
    vocab_size: int,
    window: int = DEFAULT_WINDOW,
    hysteresis: float = DEFAULT_HYSTERESIS,
    min_gear_duration: int = DEFAULT_MIN_GEAR_DURATION,
) -> tuple[tuple[float, ...], list[float]]:
    """Return thresholds that send a given share of tokens to each gear, lowest gear first.

    The gate is replayed over the recorded sequences, since its hysteresis and duration change the shares of plain
    quantiles.

    Returns:
        thresholds in bits, and the shares that the replay reached with them.

    Raises:
        GearbxError: shares that are negative or do not add up to 1, too few samples.
    """
    check_shares(shares)
    positive([e for sequence in sequences for e in sequence])

    def reached(thresholds: Sequence[float]) -> list[float]:
        counts = np.zeros(len(shares))
        for sequence in sequences:
            gate = ThresholdGate(thresholds, hysteresis, min_gear_duration)
            for gear in replay(sequence, Monitor(vocab_size, window), gate):
                counts[gear] += 1
        return (counts / counts.sum()).tolist()

    ceiling = math.log2(vocab_size)
    gap = ceiling * 1e-4  # keeps thresholds apart if a gear has a share of 0
    thresholds = list(spread_between(gap, ceiling, len(shares)))
    for _ in range(3):  # since each threshold changes the shares of the others slightly
        for k in range(len(thresholds)):
            below = thresholds[k - 1] + gap if k else gap
            above = thresholds[k + 1] - gap if k + 1 < len(thresholds) else ceiling + (len(thresholds) + 1) * gap
            share = sum(shares[: k + 1])
            for _ in range(16):  # the share of the gears up to k grows with threshold k
                thresholds[k] = (below + above) / 2
                if sum(reached(thresholds)[: k + 1]) < share:
                    below = thresholds[k]
                else:
                    above = thresholds[k]
    return tuple(thresholds), reached(thresholds)


def kickdown_thresholds(
    entropies: Sequence[Sequence[float]], shares: Sequence[float]
) -> tuple[tuple[float, ...], list[float]]:
    """Return thresholds of mode kickdown that leave a given share of tokens to each gear, lowest gear first.

    Args:
        entropies: for each token, bits in every gear below the top one.
        shares: parts of 1, one for each gear.

    Returns:
        thresholds in bits, and the shares of these tokens with them.

    Raises:
        GearbxError: shares that are negative or do not add up to 1, too few tokens.
    """
    check_shares(shares)
    climbing = np.asarray(entropies, float)
    positive(climbing[:, 0].tolist())
    left = 1.0
    thresholds: list[float] = []
    reached: list[float] = []
    for gear, share in enumerate(shares[:-1]):
        column = climbing[:, gear]
        threshold = float(np.quantile(column, min(1.0, share / left))) if left > 0 and len(column) else 0.0
        thresholds.append(max(threshold, thresholds[-1] + FLOOR if thresholds else 0.0))
        above = climbing[column > thresholds[-1]]
        reached.append((len(climbing) - len(above)) / len(entropies))
        climbing, left = above, left - share
    return tuple(thresholds), [*reached, len(climbing) / len(entropies)]
