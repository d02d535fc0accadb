"""A layer that is suddenly slower than it was, while the others are not (Manifest document, "Latency Feedback")."""

import statistics
from collections.abc import Iterable, Mapping

RATIO = 1.5  # the document's example is 14 ms after 8 ms
IN_A_ROW = 2  # tokens: one alone is mostly another program
WARM_UP = 10  # tokens that an average takes
HOLD = 50  # tokens that a layer is kept down
WEIGHT = 0.05  # of a new time in the moving average
UNUSUAL = 5.0  # times the mean deviation from it: on a busy machine times jump about without meaning anything


class Spikes:
    """Told the time of every layer for every token, it names those that are to be lowered.

    A layer has a spike when its time is more than `ratio` times its moving average, relative to what the middle one of
    the layers does, and more than it is usually off: if all are slower at once it is the machine, which is the
    controller's business. After `hold` tokens the layer is let go, and its average begins anew: a layer that stays slow
    is not lowered for ever.
    """

    def __init__(self, ratio: float = RATIO, hold: int = HOLD):
        self.ratio = ratio
        self.hold = hold
        self.held: dict[str, int] = {}
        """Layer to the tokens for which it is still kept down."""
        self._average: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._deviation: dict[str, float] = {}  # relative
        self._high: dict[str, int] = {}

    def forget(self, layers: Iterable[str]) -> None:
        """Begin these averages anew: the layers have other bits now."""
        for layer in layers:
            for known in (self._average, self._count, self._deviation, self._high):
                known.pop(layer, None)

    def update(self, times: Mapping[str, float]) -> bool:
        """Take one token's times, in seconds; whether `held` names other layers than before."""
        ratios = {layer: taken / self._average.get(layer, taken) for layer, taken in times.items()}
        usual = statistics.median(ratios.values()) if ratios else 1.0
        before = set(self.held)
        for layer, taken in times.items():
            ratio, deviation, count = ratios[layer] / usual, self._deviation.get(layer, 0.0), self._count.get(layer, 0)
            jumped = count >= WARM_UP and ratio > max(self.ratio, 1 + UNUSUAL * deviation)
            self._high[layer] = self._high.get(layer, 0) + 1 if jumped else 0
            if self._high[layer] >= IN_A_ROW and layer not in self.held:
                self.held[layer] = self.hold + 1
            if not jumped:
                average, weight = self._average.get(layer, taken), max(WEIGHT, 1 / (count + 1))
                self._count[layer] = count + 1
                self._deviation[layer] = deviation + weight * (abs(ratio - 1) - deviation)
                self._average[layer] = average + weight * (taken - average)
        self.held = {layer: left - 1 for layer, left in self.held.items() if left > 1}
        changed = before ^ set(self.held)
        self.forget(changed)
        return bool(changed)
