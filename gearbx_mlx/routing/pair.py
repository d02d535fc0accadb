"""Which of two models computes the next token, by rolling entropy (EAD 3): the paper's gate and its constants."""

import math
import random
import sys

from ..errors import GearbxError
from .gates import ThresholdGate
from .monitor import Monitor, Reading

SMALL, LARGE = 0, 1
NAMES = ("small", "large")
DEFAULT_WINDOW = 5  # tokens, EAD 3.3
DEFAULT_MIN_DURATION = 10  # tokens, EAD 3.3
BITS = 0.25  # EAD 4 finds 0.125 to 0.25 best
REFERENCE_VOCABULARY = 2**17  # EAD's models: Llama 3.2 has 128256 tokens, Qwen 2.5 151936
BELOW_ANY_ENTROPY = -1.0
# EAD's Table 1; its 99 is more bits than any vocabulary has.
SWEEP = (math.inf, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0)


def scaled(bits: float, vocab_size: int) -> float:
    """A threshold of the paper's for another vocabulary, as GEARBX 3.4 does it: by log2 V / log2 of the paper's."""
    return bits * math.log2(vocab_size) / math.log2(REFERENCE_VOCABULARY)


def check_threshold(bits: float) -> None:
    """Raises GearbxError for what is no threshold."""
    if not bits >= 0:
        raise GearbxError(
            f"the threshold between two models is {bits:g}; give bits, 0 (large alone) to inf (small alone)"
        )


def pair_monitor(vocab_size: int, window: int = DEFAULT_WINDOW) -> Monitor:
    """The rolling mean alone: EAD knows no catastrophe."""
    return Monitor(vocab_size, window, catastrophe_share=math.inf)


def pair_gate(threshold: float, min_duration: int = DEFAULT_MIN_DURATION) -> ThresholdGate:
    """EAD's equation 4: the large model while the mean is above the threshold, each held for `min_duration` tokens.

    Args:
        threshold: bits, 0 (always large) to infinity (always small).
        min_duration: tokens.

    Raises:
        GearbxError: a threshold below 0 or none, a duration below 1.
    """
    check_threshold(threshold)
    bits = min(threshold, sys.float_info.max) if threshold > 0 else BELOW_ANY_ENTROPY
    return ThresholdGate((bits,), hysteresis=0.0, min_gear_duration=min_duration)


def first_model(threshold: float) -> int:
    """The small one (Algorithm 1), but where the large one is to compute every token (Table 1: 100 % at 0)."""
    return LARGE if threshold == 0 else SMALL


def parameter_ratio(share: float, parameters: tuple[int, int]) -> float:
    """(alpha P_S + beta P_L) / P_L (EAD, Table 1), for a share beta of the large model and both models' parameters."""
    return ((1 - share) * parameters[SMALL] + share * parameters[LARGE]) / parameters[LARGE]


class Coin:
    """The control: knows nothing of the text, and has the large model's share and the gate's minimum duration.

    Every `min_duration` tokens a coin with this share decides which model computes the next ones.
    """

    def __init__(self, share: float, min_duration: int = DEFAULT_MIN_DURATION, seed: int = 0):
        self.share, self.min_duration = share, min_duration
        self._random = random.Random(seed)
        self.gear, self.held = self._toss(), 0

    def _toss(self) -> int:
        return LARGE if self._random.random() < self.share else SMALL

    def reset(self, gear: int) -> None:
        self.gear, self.held = gear, 0

    def peek(self, level: float) -> int:
        return self.gear

    def update(self, reading: Reading) -> int:
        self.held += 1
        if self.held >= self.min_duration:
            self.reset(self._toss())
        return self.gear
