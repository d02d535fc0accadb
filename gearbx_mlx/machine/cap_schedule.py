"""All tables of caps that a controller can choose from: one way down, one layer and one width at a step."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

Sensitivity = Callable[[str, int], float]
"""(path, bits) -> what it costs to have this layer at so few bits: KL, say. Only the order matters."""


@dataclass(frozen=True)
class Range:
    """A layer that can be capped.

    path: of the layer. widths: the bits that it may be capped to, ascending. gears: its bits in each gear of the
    ladder, without a cap. read: bits to the bytes that a token reads at them, for all of these. weights: how many.
    """

    path: str
    widths: tuple[int, ...]
    gears: tuple[int, ...]
    read: Mapping[int, int]
    weights: int = 0

    def bits(self, gear: int, cap: int) -> int:
        return min(self.gears[gear], cap)


@dataclass(frozen=True)
class Step:
    """A layer's cap, before and after."""

    path: str
    before: int
    after: int


class CapSchedule:
    """Position 0 is every layer at its most bits, the last one every layer at its fewest.

    Steps are in the order of their cost, the cheapest first. So going down begins with the least sensitive layers,
    and going up, which takes back the latest step first, with the most sensitive ones.

    Args:
        layers: that can be capped.
        sensitivity: cost of a layer at so many bits.
        fixed: bytes that a token reads besides.
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
                cost = max(cost, sensitivity(layer.path, after))  # a layer goes down in order, whatever was measured
                costed.append((cost, -after, place, Step(layer.path, before, after)))
        self.steps = tuple(step for *_, step in sorted(costed, key=lambda item: item[:3]))
        saved = [[self._saving(gear, step) for step in self.steps] for gear in range(self.gears)]
        self._saved = np.array(saved, dtype=float).reshape(self.gears, len(self.steps))
        self._held: frozenset[str] = frozenset()
        self._count()

    @property
    def last(self) -> int:
        return len(self.steps)

    def hold(self, paths: Set[str]) -> None:
        """Have these layers at their fewest bits at every position, and no others."""
        self._held = frozenset(paths)
        self._count()

    def read(self, passes: Sequence[float] | np.ndarray) -> np.ndarray:
        """Bytes that passes in each gear read, at every position."""
        return np.asarray(passes, dtype=float) @ self._bytes

    def bits(self, read: float, passes: float) -> float:
        """Bits per weight of the layers that can be capped, from the bytes that so many passes read."""
        return 8 * (float(read) - passes * self.fixed) / self.weights if self.weights else 0.0

    def within(self, share: float) -> int:
        """The first position at which the top gear reads no more than this share of the way from fewest to most."""
        read = self._bytes[-1]
        most = read[-1] + share * (read[0] - read[-1])
        return int(np.argmax(read <= most + 1e-9 * read[0]))

    def caps(self, position: int) -> dict[str, int]:
        """Path to the most bits, for every layer."""
        most = {path: layer.widths[-1] for path, layer in self.layers.items()}
        down = {step.path: step.after for step in self.steps[:position]}
        held = {path: self.layers[path].widths[0] for path in self._held}
        return most | down | held

    def _saving(self, gear: int, step: Step) -> int:
        """Bytes that a pass in a gear saves by a step; none where the gear has no more bits anyway."""
        layer = self.layers[step.path]
        return layer.read[layer.bits(gear, step.before)] - layer.read[layer.bits(gear, step.after)]

    def _count(self) -> None:
        """Bytes of a pass by gear and position."""
        free = np.array([step.path not in self._held for step in self.steps], dtype=float)
        start = np.full((self.gears, 1), float(self.fixed))
        for path, cap in self.caps(0).items():
            layer = self.layers[path]
            for gear in range(self.gears):
                start[gear] += layer.read[layer.bits(gear, cap)]
        self._bytes = np.concatenate([start, start - np.cumsum(self._saved * free, axis=1)], axis=1)
