"""Find a layer that suddenly takes longer while the others do not (Manifest document, "Latency Feedback")."""

import statistics
from collections.abc import Iterable, Mapping

RATIO = 1.5  # the document's example is 14 ms after 8 ms
IN_A_ROW = 2  # tokens: a single slow one is mostly another program's doing
WARM_UP = 10  # tokens before an average means something
HOLD = 50  # tokens for which a layer stays lowered
WEIGHT = 0.05  # weight of a new time in the moving average
UNUSUAL = 5.0  # mean deviations from the average: on a busy machine times vary without a reason


class Spikes:
    """Takes the time of every layer for every token, and names the layers to lower.

    A layer spikes when its time exceeds its moving average by the factor `ratio`, relative to the median of the layers,
    and by more than its usual deviation. If all layers are slower at once, the machine is slower, and the controller
    reacts. After `hold` tokens the layer is free again and its average begins anew, so a layer that stays slow does not
    stay lowered for ever.
    """

    def __init__(self, ratio: float = RATIO, hold: int = HOLD):
        self.ratio = ratio
        self.hold = hold
        self.lowered: dict[str, int] = {}
        """Layer to the number of tokens for which it stays lowered."""
        self._average: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._deviation: dict[str, float] = {}  # relative
        self._high: dict[str, int] = {}

    def forget(self, layers: Iterable[str]) -> None:
        """Begin the averages of these layers anew, since their bits have changed."""
        for layer in layers:
            for known in (self._average, self._count, self._deviation, self._high):
                known.pop(layer, None)

    def update(self, times: Mapping[str, float]) -> bool:
        """Take the times of one token (seconds). Returns whether `lowered` names other layers than before."""
        ratios = {layer: taken / self._average.get(layer, taken) for layer, taken in times.items()}
        usual = statistics.median(ratios.values()) if ratios else 1.0
        before = set(self.lowered)
        for layer, taken in times.items():
            ratio, deviation, count = ratios[layer] / usual, self._deviation.get(layer, 0.0), self._count.get(layer, 0)
            jumped = count >= WARM_UP and ratio > max(self.ratio, 1 + UNUSUAL * deviation)
            self._high[layer] = self._high.get(layer, 0) + 1 if jumped else 0
            if self._high[layer] >= IN_A_ROW and layer not in self.lowered:
                self.lowered[layer] = self.hold + 1
            if not jumped:
                average, weight = self._average.get(layer, taken), max(WEIGHT, 1 / (count + 1))
                self._count[layer] = count + 1
                self._deviation[layer] = deviation + weight * (abs(ratio - 1) - deviation)
                self._average[layer] = average + weight * (taken - average)
        self.lowered = {layer: left - 1 for layer, left in self.lowered.items() if left > 1}
        changed = before ^ set(self.lowered)
        self.forget(changed)
        return bool(changed)
