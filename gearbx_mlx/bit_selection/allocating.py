"""Tables of gears, found on the layers' own KLs and then measured, and mended by what was measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import GearbxError
from .allocation import EXCHANGES, Option, greedy_path, least_bytes, moves, within_bytes
from .allocation import Table as Bits
from .precision import PrecisionManifest, Table
from .sensitivity import Distance, Exact


@dataclass
class Found:
    """A table, measured, and the sum of its layers' KLs."""

    bits: Bits
    bytes: int
    distance: Distance
    sum_of_parts: float


class Allocator:
    """Finds tables for budgets.

    Args:
        exact: measures whole tables.
        manifest: what every layer costs.
        ranges: keep every layer in its range, min_bits to max_bits.
        trials: exchanges to mend a table by.
        progress: called after every table that is measured.
    """

    def __init__(
        self,
        exact: Exact,
        manifest: PrecisionManifest,
        ranges: bool = True,
        trials: int = EXCHANGES,
        progress: Callable[[], None] = lambda: None,
    ):
        self.exact, self.trials, self.progress = exact, trials, progress
        gearbox = exact.gearbox
        self.weights = sum(layer.weights for layer in manifest.layers.values())
        self.options: dict[str, list[Option]] = {}
        for layer in gearbox.layers:
            held = manifest.layers.get(layer.path)
            if held is None:
                continue
            widths = [bits for bits in held.kl if not ranges or held.min_bits <= bits <= held.max_bits]
            if not widths:
                shown = ", ".join(map(str, held.kl))
                raise GearbxError(
                    f"{layer.path}: none of its widths {shown} is in its range {held.min_bits} to {held.max_bits}"
                )
            self.options[layer.path] = [
                Option(bits, gearbox.layer_bytes(layer, gearbox.ladder.find(bits)), held.kl[bits]) for bits in widths
            ]

    def bytes_of(self, bits: Mapping[str, int]) -> int:
        """Of a table, as one use reads them."""
        return sum(next(o.bytes for o in self.options[path] if o.bits == width) for path, width in bits.items())

    def budget(self, bits_per_weight: float) -> float:
        """Bytes."""
        return bits_per_weight * self.weights / 8

    def for_bytes(self, budget: float) -> Found:
        """The least KL within a budget, or the table of the fewest bytes if none is within it."""
        return self._exchanged(self._measured(within_bytes(self.options, budget).table), budget)

    def for_kl(self, kl: float) -> Found:
        """The fewest bytes whose measured KL is at most so much, or the table of the most if none is."""
        points, known = greedy_path(self.options), dict[int, Found]()

        def measured(table: Bits) -> float:
            key = self.bytes_of(table)
            if key not in known:
                known[key] = self._measured(table)
            return known[key].distance.kl

        point = least_bytes(points, measured, kl) or points[-1]
        measured(point.table)
        return known[point.bytes]

    def _measured(self, bits: Bits) -> Found:
        distance = self.exact.measure_caps(bits)
        self.progress()
        parts = sum(o.kl for path, width in bits.items() for o in self.options[path] if o.bits == width)
        return Found(dict(bits), self.bytes_of(bits), distance, parts)

    def _exchanged(self, best: Found, budget: float) -> Found:
        """Give one layer a width more and another one a width less, and keep what is measured to be better."""
        tried, left = {frozenset(best.bits.items())}, self.trials
        while left:
            for bits in moves(self.options, best.bits, budget - best.bytes):
                if frozenset(bits.items()) not in tried:
                    break
            else:
                break
            tried.add(frozenset(bits.items()))
            left -= 1
            found = self._measured(bits)
            if found.distance.kl < best.distance.kl:
                best = found
        return best


def table_of(found: Found, wish: str, weights: int) -> Table:
    """As the manifest holds it."""
    return Table(
        bits=found.bits,
        wish=wish,
        bits_per_weight=8 * found.bytes / weights,
        kl=found.distance.kl,
        perplexity_change=found.distance.perplexity_change,
        sum_of_parts=found.sum_of_parts,
    )
