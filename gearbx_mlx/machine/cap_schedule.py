"""The cap schedule: all caps that a controller can choose from, one layer and one width per step."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Sensitivity = Callable[[str, int], float]
"""(path, bits) -> the cost of this layer at these bits, such as its KL. Only the order matters."""


@dataclass(frozen=True)
class Range:
    """A layer that can be capped.

    widths: the bits that it may be capped to, ascending. gears: its bits in each gear of the ladder, without a cap.
    read: bits to the bytes that a token reads at them. weights: their number.
    """

    path: str
    widths: tuple[int, ...]
    gears: tuple[int, ...]
    read: Mapping[int, int]
    weights: int = 0

    def bytes_in(self, gear: int, cap: int) -> int:
        """The bytes that a token reads in a gear, under a cap."""
        return self.read[min(self.gears[gear], cap)]


@dataclass(frozen=True)
class CapStep:
    """A layer's cap, before and after."""

    path: str
    before: int
    after: int


class CapSchedule:
    """Positions from 0, every layer at its most bits, to the last one, every layer at its fewest.

    Steps are in the order of their cost, the cheapest first. So the way down begins with the least sensitive layers.
    The way up takes back the latest step first, so it begins with the most sensitive ones.

    Args:
        layers: those that can be capped.
        sensitivity: the cost of a layer at some bits.
        fixed: bytes that a token reads from the rest of the model.
    """

    def __init__(self, layers: Sequence[Range], sensitivity: Sensitivity, fixed: float = 0):
        self.layers = {layer.path: layer for layer in layers}
        self.fixed = fixed
        self.weights = sum(layer.weights for layer in layers)
        self.gears = len(layers[0].gears) if layers else 1
        costed = []
        for place, layer in enumerate(layers):
            cost = -math.inf
            for before, after in itertools.pairwise(reversed(layer.widths)):
                # A layer goes down in order, even if the measured costs do not rise.
                cost = max(cost, sensitivity(layer.path, after))
                costed.append((cost, -after, place, CapStep(layer.path, before, after)))
        self.steps = tuple(step for *_, step in sorted(costed, key=lambda item: item[:3]))
        self._bytes = np.array([self._in_gear(gear) for gear in range(self.gears)], dtype=float)

    @property
    def last(self) -> int:
        return len(self.steps)

    def read(self, passes: Sequence[float] | np.ndarray) -> np.ndarray:
        """The bytes that these passes in each gear read, at every position."""
        return np.asarray(passes, dtype=float) @ self._bytes

    def bits(self, read: float, passes: float) -> float:
        """Bits per weight of the layers that can be capped, from the bytes that these passes read."""
        return 8 * (float(read) - passes * self.fixed) / self.weights if self.weights else 0.0

    def within(self, share: float) -> int:
        """The first position within a budget: a share of the way from the top gear's fewest bytes to its most."""
        read = self._bytes[-1]
        most = read[-1] + share * (read[0] - read[-1])
        return int(np.argmax(read <= most + 1e-9 * read[0]))

    def caps(self, position: int) -> dict[str, int]:
        """Path to the most bits of every layer, at a position."""
        most = {path: layer.widths[-1] for path, layer in self.layers.items()}
        return most | {step.path: step.after for step in self.steps[:position]}

    def _in_gear(self, gear: int) -> list[float]:
        """The bytes of a pass in a gear, at every position."""
        most = self.fixed + sum(layer.bytes_in(gear, layer.widths[-1]) for layer in self.layers.values())
        each = ((self.layers[step.path], step) for step in self.steps)
        change = (layer.bytes_in(gear, step.after) - layer.bytes_in(gear, step.before) for layer, step in each)
        return [*itertools.accumulate(change, initial=most)]
