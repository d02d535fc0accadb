"""All tables of caps that a controller can choose from: one way down, one layer and one width at a step."""

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

Sensitivity = Callable[[str, int], float]
"""(path, bits) -> what it costs to have this layer at so few bits: KL, say. Only the order matters."""


@dataclass(frozen=True)
class Range:
    """A layer that can be capped.

    path: of the layer. read: bits to the bytes that a token reads at them, for all widths that the layer may have.
    gears: its bits in each gear of the ladder, without a cap. weights: how many it has.
    """

    path: str
    read: Mapping[int, int]
    gears: tuple[int, ...]
    weights: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self.read))

    def bits(self, gear: int, cap: int) -> int:
        """The widest that is neither above the gear's bits nor above the cap."""
        most = min(self.gears[gear], cap)
        return max((width for width in self.read if width <= most), default=self.widths[0])


@dataclass(frozen=True)
class Step:
    """One step down: a layer from one width to the next lower one."""

    path: str
    before: int
    after: int


class Stairs:
    """Position 0 is every layer at its most bits, the last one every layer at its fewest.

    Steps are in the order of their cost, the cheapest first. So going down begins with the least sensitive layers,
    and going up, which takes back the latest step first, with the most sensitive ones.

    Args:
        layers: that can be capped.
        sensitivity: cost of a layer at so many bits.
        fixed: bytes that a token reads besides.
    """

    def __init__(self, layers: Sequence[Range], sensitivity: Sensitivity, fixed: int = 0):
        self.layers = {layer.path: layer for layer in layers}
        self.fixed = fixed
        self.gears = len(layers[0].gears) if layers else 1
        costed = []
        for place, layer in enumerate(layers):
            cost = -np.inf
            for before, after in itertools.pairwise(reversed(layer.widths)):
                cost = max(cost, sensitivity(layer.path, after))  # a layer goes down in order, whatever was measured
                costed.append((cost, -after, place, Step(layer.path, before, after)))
        self.steps = tuple(step for *_, step in sorted(costed, key=lambda item: item[:3]))
        self._saved = np.array([[self._saving(gear, step) for step in self.steps] for gear in range(self.gears)])
        self._saved = self._saved.reshape(self.gears, len(self.steps))
        self._held: frozenset[str] = frozenset()
        self._count()

    @property
    def last(self) -> int:
        return len(self.steps)

    def hold(self, paths: Set[str]) -> None:
        """Have these layers at their fewest bits at every position."""
        if paths != self._held:
            self._held = frozenset(paths)
            self._count()

    def read(self, passes: Sequence[float]) -> np.ndarray:
        """Bytes that passes in each gear read, at every position."""
        return np.asarray(passes, dtype=float) @ self._bytes

    def bits(self, position: int, passes: Sequence[float]) -> float:
        """Bits per weight of the layers that such passes read."""
        weights = sum(layer.weights for layer in self.layers.values())
        passed = sum(passes)
        managed = float(self.read(passes)[position]) - passed * self.fixed
        return 8 * managed / weights / passed if weights and passed else 0.0

    def within(self, share: float) -> int:
        """The first position at which the top gear reads no more than this share of the way from fewest to most."""
        read = self._bytes[-1]
        most = read[-1] + share * (read[0] - read[-1])
        return int(np.argmax(read <= most + 1e-9 * read[0]))

    def reach(self, position: int) -> tuple[int, int]:
        """The positions up and down to which no layer has to take more than one step."""
        down = position + self._without_repetition(self.steps[position:])
        up = position - self._without_repetition(reversed(self.steps[:position]))
        return up, down

    def caps(self, position: int) -> dict[str, int]:
        """Path to the most bits, for the layers that are not at their most."""
        found = {step.path: step.after for step in self.steps[:position]}
        held = {path: self.layers[path].widths[0] for path in self._held}
        return {p: bits for p, bits in (found | held).items() if bits < self.layers[p].widths[-1]}

    def _saving(self, gear: int, step: Step) -> int:
        """Bytes that a pass in a gear saves by a step; none where the gear has no more bits anyway."""
        layer = self.layers[step.path]
        return layer.read[layer.bits(gear, step.before)] - layer.read[layer.bits(gear, step.after)]

    def _count(self) -> None:
        """Bytes of a pass by gear and position."""
        free = np.array([step.path not in self._held for step in self.steps], dtype=float)
        start = np.full((self.gears, 1), float(self.fixed))
        for layer in self.layers.values():
            for gear in range(self.gears):
                cap = layer.widths[0] if layer.path in self._held else layer.widths[-1]
                start[gear] += layer.read[layer.bits(gear, cap)]
        self._bytes = np.concatenate([start, start - np.cumsum(self._saved * free, axis=1)], axis=1)

    @staticmethod
    def _without_repetition(steps) -> int:
        seen: set[str] = set()
        for count, step in enumerate(steps):
            if step.path in seen:
                return count
            seen.add(step.path)
        return len(seen)
