"""Two models that take turns: what the commands share."""

import math
from dataclasses import dataclass

from ..errors import GearbxError
from ..routing.pair import (
    BITS,
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    SWEEP,
    check_threshold,
    pair_gate,
    pair_monitor,
    scaled,
)
from .gate import GateSettings

SMALL_MODEL = (
    "Local directory or Hub repository of a smaller model with the tokenizer of --model (EAD). For it --thresholds is "
    f"bits, 0 (large alone) to inf (small alone; default: {BITS:g}, scaled to the vocabulary), --window "
    f"{DEFAULT_WINDOW} and --min-gear-duration {DEFAULT_MIN_DURATION} unless given."
)


@dataclass(frozen=True)
class Turns:
    """Settings of the gate between two models; no thresholds: the paper's."""

    thresholds: tuple[float, ...]
    window: int
    min_duration: int

    def sweep(self, vocab_size: int) -> tuple[float, ...]:
        """The thresholds of a sweep, in bits: as given, else those of EAD's Table 1, scaled to the vocabulary."""
        return self.thresholds or tuple(bits if math.isinf(bits) else scaled(bits, vocab_size) for bits in SWEEP)

    def threshold(self, vocab_size: int) -> float:
        """The one threshold of a generation, in bits."""
        return self.thresholds[0] if self.thresholds else scaled(BITS, vocab_size)


def turns_of(thresholds: str | None, gate: GateSettings, several: bool = False) -> Turns:
    """The settings of the gate between two models.

    Args:
        thresholds: as given: bits, with commas between.
        several: a sweep over thresholds, each between 0 and infinity.

    Raises:
        GearbxError: settings that no pair can have.
    """
    if gate.hysteresis:
        raise GearbxError("--hysteresis: the gate between two models has none; leave it out")
    bits: tuple[float, ...] = ()
    if thresholds is not None:
        try:
            bits = tuple(float(part) for part in thresholds.split(","))
        except ValueError as error:
            raise GearbxError(f"--thresholds {thresholds}: with --small-model give bits, such as {BITS:g}") from error
        if len(bits) > 1 and not several:
            raise GearbxError(f"--thresholds {thresholds}: two models have one threshold between them")
        for value in bits:
            check_threshold(value)
    window = DEFAULT_WINDOW if gate.window is None else gate.window
    duration = DEFAULT_MIN_DURATION if gate.min_gear_duration is None else gate.min_gear_duration
    pair_monitor(2, window)
    pair_gate(BITS, duration)
    return Turns(bits, window, duration)
