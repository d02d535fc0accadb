"""Bits for every layer: each additional byte goes to the layer that saves the most KL.

The KLs of layers that are reduced one at a time add up to about the KL of all of them reduced together. So
tables are found from the sum, by numbers only. The Allocator then measures its candidates, and improves them by
exchanges of bits between two layers.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import GearbxError
from . import EXCHANGES
from .precision import GearTable, PrecisionManifest
from .sensitivity import Distance, ExactSensitivity

Bits = dict[str, int]
KL_ROUNDING = 1e-6  # bytes: tolerance of a computed budget


@dataclass(frozen=True)
class Option:
    """One width of a layer: bytes that a use of it reads, and its KL (nats per token)."""

    bits: int
    bytes: int
    kl: float


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of KL over bytes, by bytes ascending.

    Each step saves less KL per byte than the step before. On a hull, a greedy choice minimizes the sum of the KLs.
    Options that save no KL are omitted.
    """
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and kl_saved_per_byte(hull[-1], option) >= kl_saved_per_byte(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def kl_saved_per_byte(low: Option, high: Option) -> float:
    """Return the KL that a step saves per byte, in nats per token."""
    return (low.kl - high.kl) / (high.bytes - low.bytes)


@dataclass(frozen=True)
class PathPoint:
    """A table on the greedy path, its bytes, and the sum of its layers' KLs (nats per token)."""

    table: Bits
    bytes: int
    kl: float


def greedy_path(options: Mapping[str, Sequence[Option]]) -> list[PathPoint]:
    """Return tables from the fewest bytes to the most: each step widens the layer that saves the most KL per byte."""
    hulls = {path: lower_hull(choices) for path, choices in options.items()}
    place = dict.fromkeys(hulls, 0)
    table = {path: hull[0].bits for path, hull in hulls.items()}
    total, kl = (sum(getattr(hull[0], name) for hull in hulls.values()) for name in ("bytes", "kl"))
    points = [PathPoint(dict(table), total, kl)]
    steps = [(-kl_saved_per_byte(hull[0], hull[1]), path) for path, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, path = heapq.heappop(steps)
        hull, here = hulls[path], place[path] + 1
        place[path], table[path] = here, hull[here].bits
        total += hull[here].bytes - hull[here - 1].bytes
        kl += hull[here].kl - hull[here - 1].kl
        points.append(PathPoint(dict(table), total, kl))
        if here + 1 < len(hull):
            heapq.heappush(steps, (-kl_saved_per_byte(hull[here], hull[here + 1]), path))
    return points


def chosen(options: Mapping[str, Sequence[Option]], table: Mapping[str, int]) -> dict[str, Option]:
    """Return the option of each layer of a table."""
    return {path: next(o for o in options[path] if o.bits == bits) for path, bits in table.items()}


def within_bytes(options: Mapping[str, Sequence[Option]], budget: float) -> PathPoint:
    """Return the last table of the greedy path within a budget, plus single steps within the rest of the budget.

    The table of the fewest bytes is returned if the budget is smaller.
    """
    points = greedy_path(options)
    budget = math.floor(budget + KL_ROUNDING)
    best = points[max(bisect.bisect_right([point.bytes for point in points], budget) - 1, 0)]
    table, total, kl = dict(best.table), best.bytes, best.kl
    now = chosen(options, table)
    while True:
        steps = [
            (kl_saved_per_byte(now[path], option), path, option)
            for path, choices in options.items()
            for option in choices
            if now[path].bytes < option.bytes <= now[path].bytes + budget - total and option.kl < now[path].kl
        ]
        if not steps:
            return PathPoint(table, total, kl)
        _, path, option = max(steps, key=lambda step: step[0])
        total, kl = total + option.bytes - now[path].bytes, kl + option.kl - now[path].kl
        table[path], now[path] = option.bits, option


def least_bytes(points: Sequence[PathPoint], measured: Callable[[Bits], float], kl: float) -> PathPoint | None:
    """Return the first point of a path with at most this measured KL, by bisection; None if the last has more."""
    found = bisect.bisect_left(range(len(points)), True, key=lambda place: measured(points[place].table) <= kl)
    return points[found] if found < len(points) else None


def moves(options: Mapping[str, Sequence[Option]], table: Mapping[str, int], room: float) -> Iterator[Bits]:
    """Yield tables with one layer a width up and one a width down, at most `room` bytes larger; the best sum first."""
    now = chosen(options, table)

    def neighbor(path: str, step: int) -> Option | None:
        choices = sorted(options[path], key=lambda o: o.bits)
        place = choices.index(now[path]) + step
        return choices[place] if 0 <= place < len(choices) else None

    found = []
    for up, down in itertools.permutations(options, 2):
        more, less = neighbor(up, 1), neighbor(down, -1)
        if more is None or less is None:
            continue
        if more.bytes - now[up].bytes + less.bytes - now[down].bytes <= room:
            change = more.kl - now[up].kl + less.kl - now[down].kl
            found.append((change, {up: more.bits, down: less.bits}))
    for _, changed in sorted(found, key=lambda item: item[0]):
        yield {**table, **changed}


@dataclass
class MeasuredTable:
    """A table with its measured distance from full precision, and the sum of its layers' KLs (nats per token)."""

    bits: Bits
    bytes: int
    distance: Distance
    sum_of_parts: float


class Allocator:
    """A search for tables within budgets.

    Args:
        exact: measures whole tables.
        manifest: has the cost of every layer.
        ranges: True to keep every layer in its range, min_bits to max_bits. The range follows from the layer's own
            cost, and is random for most layers: on SmolLM2 tables in their ranges were worse than a uniform gear.
        trials: tables to measure in search of a better one, by exchanges of bits.
        progress: called after every measured table.
    """

    def __init__(
        self,
        exact: ExactSensitivity,
        manifest: PrecisionManifest,
        ranges: bool = False,
        trials: int = EXCHANGES,
        progress: Callable[[], None] = lambda: None,
    ):
        self.exact, self.manifest, self.trials, self.progress = exact, manifest, trials, progress
        gearbox = exact.gearbox
        self.weights = sum(layer.weights for layer in manifest.layers.values())
        self.options: dict[str, list[Option]] = {}
        self._known: dict[frozenset[tuple[str, int]], MeasuredTable] = {}
        for layer in gearbox.layers:
            known = manifest.layers.get(layer.path)
            if known is None:
                continue
            widths = [bits for bits in known.kl if not ranges or known.min_bits <= bits <= known.max_bits]
            if not widths:
                shown = ", ".join(map(str, known.kl))
                raise GearbxError(
                    f"{layer.path}: no width in range {known.min_bits} to {known.max_bits}, got {shown}; omit ranges"
                )
            self.options[layer.path] = [
                Option(bits, gearbox.layer_bytes(layer, gearbox.ladder.find(bits)), known.kl[bits]) for bits in widths
            ]

    def bytes_of(self, bits: Mapping[str, int]) -> int:
        """Return bytes that one use of all layers reads in a table."""
        return sum(option.bytes for option in chosen(self.options, bits).values())

    def budget(self, bits_per_weight: float) -> float:
        """Return bytes of all layers at these bits per weight."""
        return bits_per_weight * self.weights / 8

    def for_bytes(self, budget: float) -> MeasuredTable:
        """Return the table of the least KL within a budget in bytes; if none fits, the table of the fewest bytes.

        Its measured KL is at most the KL of the best uniform gear within the budget: KLs do not always add up.
        """
        found = [within_bytes(self.options, budget).table, *self._uniform(budget)]
        return self._exchanged(min(map(self._measured, found), key=lambda made: made.distance.kl), budget)

    def _uniform(self, budget: float) -> list[Bits]:
        """Return the widest uniform table within a budget, in a list; empty if there is none."""
        widths = set.intersection(*({option.bits for option in choices} for choices in self.options.values()))
        tables = [dict.fromkeys(self.options, bits) for bits in sorted(widths)]
        return [table for table in tables if self.bytes_of(table) <= budget + KL_ROUNDING][-1:]

    def for_kl(self, kl: float) -> MeasuredTable:
        """Return the smallest table with at most this measured KL; if none has, the largest."""
        points = greedy_path(self.options)
        point = least_bytes(points, lambda table: self._measured(table).distance.kl, kl) or points[-1]
        return self._measured(point.table)

    def _measured(self, bits: Bits) -> MeasuredTable:
        """Return a table with its distance, measured once."""
        key = frozenset(bits.items())
        if key not in self._known:
            distance = self.exact.measure_caps(bits)
            self.progress()
            parts = sum(option.kl for option in chosen(self.options, bits).values())
            self._known[key] = MeasuredTable(dict(bits), self.bytes_of(bits), distance, parts)
        return self._known[key]

    def _exchanged(self, best: MeasuredTable, budget: float) -> MeasuredTable:
        """Try exchanges of one width between two layers, and keep tables that measure better."""
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


def gear_table(found: MeasuredTable, wish: str, weights: int) -> GearTable:
    """Return the table as the manifest stores it. wish: the target as text; weights: number of the layers' weights."""
    return GearTable(
        bits=found.bits,
        wish=wish,
        bits_per_weight=8 * found.bytes / weights,
        kl=found.distance.kl,
        perplexity_change=found.distance.perplexity_change,
        sum_of_parts=found.sum_of_parts,
    )
