"""Gate of a pair: rolling entropy chooses the model that computes the next token (EAD 3)."""

import math
import sys

from ..errors import GearbxError
from .gates import Monitor, ThresholdGate

SMALL, LARGE = 0, 1
NAMES = ("small", "large")
DEFAULT_WINDOW = 5  # tokens, EAD 3.3
DEFAULT_MIN_DURATION = 10  # tokens, EAD 3.3
EAD_BITS = 0.25  # the best thresholds of EAD 4 are 0.125 to 0.25
EAD_VOCABULARY = 2**17  # EAD's models: Llama 3.2 has 128256 tokens, Qwen 2.5 151936
BELOW_ANY_ENTROPY = -1.0


def scaled(bits: float, vocab_size: int) -> float:
    """Return a threshold of the paper, scaled to a vocabulary by log2 V / log2 of the paper's, as in GEARBX 3.4."""
    return bits * math.log2(vocab_size) / math.log2(EAD_VOCABULARY)


def check_threshold(bits: float) -> None:
    """Validate the threshold of a pair. Raises GearbxError if it is negative or NaN."""
    if not bits >= 0:
        raise GearbxError(
            f"threshold of a pair: must be 0 bits (large model only) to inf (small only), got {bits:g}; use one of them"
        )


def pair_monitor(vocab_size: int, window: int = DEFAULT_WINDOW) -> Monitor:
    """Return a monitor without catastrophes, as EAD has none."""
    return Monitor(vocab_size, window, catastrophe_share=math.inf)


def pair_gate(threshold: float, min_duration: int = DEFAULT_MIN_DURATION) -> ThresholdGate:
    """Return the gate of EAD's equation 4: the large model computes while the mean is above the threshold.

    Args:
        threshold: bits, 0 (always large) to infinity (always small).
        min_duration: fewest tokens in a row by each model.

    Raises:
        GearbxError: a threshold below 0 or NaN, a duration below 1.
    """
    check_threshold(threshold)
    bits = min(threshold, sys.float_info.max) if threshold > 0 else BELOW_ANY_ENTROPY
    return ThresholdGate((bits,), hysteresis=0.0, min_gear_duration=min_duration)


def first_model(threshold: float) -> int:
    """Return the model of the first token: the small one (Algorithm 1), or for a threshold of 0 the large one (Table
    1)."""
    return LARGE if threshold == 0 else SMALL


def parameter_ratio(share: float, parameters: tuple[int, int]) -> float:
    """Return (alpha P_S + beta P_L) / P_L (EAD, Table 1), if the large model computes a share beta of the tokens."""
    return ((1 - share) * parameters[SMALL] + share * parameters[LARGE]) / parameters[LARGE]
