"""The gate between two models: rolling entropy chooses which one computes the next token (EAD 3)."""

import math
import sys

from ..errors import GearbxError
from .gates import Monitor, ThresholdGate

SMALL, LARGE = 0, 1
NAMES = ("small", "large")
DEFAULT_WINDOW = 5  # tokens, EAD 3.3
DEFAULT_MIN_DURATION = 10  # tokens, EAD 3.3
EAD_BITS = 0.25  # EAD 4 finds that 0.125 to 0.25 are best
EAD_VOCABULARY = 2**17  # EAD's models: Llama 3.2 has 128256 tokens, Qwen 2.5 151936
BELOW_ANY_ENTROPY = -1.0


def scaled(bits: float, vocab_size: int) -> float:
    """Return a threshold of the paper, scaled to another vocabulary by log2 V / log2 of the paper's, as in
    GEARBX 3.4."""
    return bits * math.log2(vocab_size) / math.log2(EAD_VOCABULARY)


def check_threshold(bits: float) -> None:
    """Raises GearbxError for a number that is not a threshold."""
    if not bits >= 0:
        raise GearbxError(
            f"the threshold between two models is {bits:g}; give bits, 0 (large alone) to inf (small alone)"
        )


def pair_monitor(vocab_size: int, window: int = DEFAULT_WINDOW) -> Monitor:
    """Return a monitor without catastrophe, which EAD does not have."""
    return Monitor(vocab_size, window, catastrophe_share=math.inf)


def pair_gate(threshold: float, min_duration: int = DEFAULT_MIN_DURATION) -> ThresholdGate:
    """EAD's equation 4: the large model computes while the mean is above the threshold.

    Args:
        threshold: bits, 0 (always large) to infinity (always small).
        min_duration: tokens for which each model computes at least.

    Raises:
        GearbxError: a threshold below 0 or NaN, a duration below 1.
    """
    check_threshold(threshold)
    bits = min(threshold, sys.float_info.max) if threshold > 0 else BELOW_ANY_ENTROPY
    return ThresholdGate((bits,), hysteresis=0.0, min_gear_duration=min_duration)


def first_model(threshold: float) -> int:
    """Return the small model (Algorithm 1), except at a threshold of 0, where the large one computes everything (Table
    1)."""
    return LARGE if threshold == 0 else SMALL


def parameter_ratio(share: float, parameters: tuple[int, int]) -> float:
    """(alpha P_S + beta P_L) / P_L (EAD, Table 1), where the large model computes a share beta of the tokens."""
    return ((1 - share) * parameters[SMALL] + share * parameters[LARGE]) / parameters[LARGE]
