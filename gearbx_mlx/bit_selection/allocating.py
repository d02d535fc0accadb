"""Tables of gears: found from the KL of each layer alone, then measured, then improved by further measurements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import GearbxError
from .allocation import EXCHANGES, Bits, Option, greedy_path, least_bytes, moves, within_bytes
from .precision import GearTable, PrecisionManifest
from .sensitivity import Distance, ExactSensitivity


@dataclass
class MeasuredTable:
    """A table with its measured distance from full precision, and the sum of its layers' KLs (nats per token)."""

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
        trials: tables to measure in search of a better one, by exchanges of bits.
        progress: called after every table that is measured.
    """

    def __init__(
        self,
        exact: ExactSensitivity,
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
            known = manifest.layers.get(layer.path)
            if known is None:
                continue
            widths = [bits for bits in known.kl if not ranges or known.min_bits <= bits <= known.max_bits]
            if not widths:
                shown = ", ".join(map(str, known.kl))
                raise GearbxError(
                    f"{layer.path}: none of its widths {shown} is in its range {known.min_bits} to {known.max_bits}"
                )
            self.options[layer.path] = [
                Option(bits, gearbox.layer_bytes(layer, gearbox.ladder.find(bits)), known.kl[bits]) for bits in widths
            ]

    def bytes_of(self, bits: Mapping[str, int]) -> int:
        """Bytes that one use of all layers reads in a table."""
        return sum(next(o.bytes for o in self.options[path] if o.bits == width) for path, width in bits.items())

    def budget(self, bits_per_weight: float) -> float:
        """Bytes of all layers at these bits per weight."""
        return bits_per_weight * self.weights / 8

    def for_bytes(self, budget: float) -> MeasuredTable:
        """The table of the least KL within a budget in bytes; where none fits, the table of the fewest bytes."""
        return self._exchanged(self._measured(within_bytes(self.options, budget).table), budget)

    def for_wishes(self, bits: Mapping[str, int]) -> MeasuredTable:
        """A table that is given: each layer has the next width that it can have, or its highest."""
        return self._measured({path: next_width(options, bits[path]) for path, options in self.options.items()})

    def for_kl(self, kl: float) -> MeasuredTable:
        """The table of the fewest bytes with at most this measured KL; where none has it, that of the most bytes."""
        points, known = greedy_path(self.options), dict[int, MeasuredTable]()

        def measured(table: Bits) -> float:
            key = self.bytes_of(table)
            if key not in known:
                known[key] = self._measured(table)
            return known[key].distance.kl

        point = least_bytes(points, measured, kl) or points[-1]
        measured(point.table)
        return known[point.bytes]

    def _measured(self, bits: Bits) -> MeasuredTable:
        distance = self.exact.measure_caps(bits)
        self.progress()
        parts = sum(o.kl for path, width in bits.items() for o in self.options[path] if o.bits == width)
        return MeasuredTable(dict(bits), self.bytes_of(bits), distance, parts)

    def _exchanged(self, best: MeasuredTable, budget: float) -> MeasuredTable:
        """Give one layer its next width and another one its previous width; keep the table that measures better."""
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


def next_width(options: Sequence[Option], bits: int) -> int:
    """The lowest width that is not below so many bits; the highest where all are."""
    return min((o.bits for o in options if o.bits >= bits), default=max(o.bits for o in options))


def gear_table(found: MeasuredTable, wish: str, weights: int) -> GearTable:
    """The table as the manifest stores it. wish: the target in words; weights: how many the layers have."""
    return GearTable(
        bits=found.bits,
        wish=wish,
        bits_per_weight=8 * found.bytes / weights,
        kl=found.distance.kl,
        perplexity_change=found.distance.perplexity_change,
        sum_of_parts=found.sum_of_parts,
    )
