"""What the last few entropies say: level, slope, look-ahead, catastrophe (GEARBX 3.2 and 3.5)."""

import math
from collections import deque
from dataclasses import dataclass

from ..errors import GearbxError

DEFAULT_WINDOW = 3  # GEARBX 3.2, the MLX backend
DEFAULT_LOOKAHEAD = 2
CATASTROPHE_SHARE = 0.9


@dataclass(frozen=True)
class Reading:
    """The monitored signal after one token; all in bits.

    `forecast` is the level expected `lookahead` tokens on; `catastrophe` says that the last two values were both
    above 0.9 log2 V: the model no longer knows anything.
    """

    value: float
    mean: float
    slope: float
    forecast: float
    catastrophe: bool


class Monitor:
    """A rolling window over the entropy of the tokens.

    Args:
        vocab_size: V, the length of the logits; catastrophe is relative to log2 V.
        window: tokens in the rolling mean.
        lookahead: tokens ahead that the forecast is for.
        catastrophe_share: of log2 V, above which two values in a row are a catastrophe; infinite: nothing is one.

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
        self._previous = 0.0  # kept apart from the window, which may hold a single value

    def reset(self) -> None:
        self._window.clear()
        self._previous = 0.0

    def update(self, value: float) -> Reading:
        """Take the next token's entropy, in bits."""
        catastrophe = min(value, self._previous) > self.ceiling
        self._window.append(value)
        self._previous = value
        values = self._window
        mean = sum(values) / len(values)
        slope = (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 0.0
        return Reading(value, mean, slope, mean + self.lookahead * slope, catastrophe)
