"""The monitor: mean, slope, forecast and catastrophe of the last few entropies (GEARBX 3.2 and 3.5)."""

import math
from collections import deque
from dataclasses import dataclass

from ..errors import GearbxError

DEFAULT_WINDOW = 3  # GEARBX 3.2, the MLX backend
DEFAULT_LOOKAHEAD = 2
CATASTROPHE_SHARE = 0.9


@dataclass(frozen=True)
class Reading:
    """The state of the monitor after one token, in bits.

    value: of this token. forecast: the mean that is expected `lookahead` tokens later. catastrophe: the last two values
    were both above 0.9 log2 V, so the model knows next to nothing.
    """

    value: float
    mean: float
    slope: float
    forecast: float
    catastrophe: bool


class Monitor:
    """A rolling window over the entropy of the tokens.

    Args:
        vocab_size: V, the length of the logits.
        window: tokens in the rolling mean.
        lookahead: tokens that the forecast looks ahead.
        catastrophe_share: two values in a row above this share of log2 V are a catastrophe; infinite: never.

    Raises:
        GearbxError: a window shorter than one token.
    """

    def __init__(
        self,
        vocab_size: int,
        window: int = DEFAULT_WINDOW,
        lookahead: int = DEFAULT_LOOKAHEAD,
        catastrophe_share: float = CATASTROPHE_SHARE,
    ):
        if window < 1:
            raise GearbxError(f"window is {window}; give a number of tokens, 1 or more")
        self.ceiling = catastrophe_share * math.log2(vocab_size)
        self.lookahead = lookahead
        self._window: deque[float] = deque(maxlen=window)
        self._previous = 0.0  # apart from the window, which may have room for one value only

    def reset(self) -> None:
        self._window.clear()
        self._previous = 0.0

    def update(self, value: float) -> Reading:
        """Take the next token's entropy (bits). Returns the new state."""
        catastrophe = min(value, self._previous) > self.ceiling
        self._window.append(value)
        self._previous = value
        values = self._window
        mean = sum(values) / len(values)
        slope = (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 0.0
        return Reading(value, mean, slope, mean + self.lookahead * slope, catastrophe)
