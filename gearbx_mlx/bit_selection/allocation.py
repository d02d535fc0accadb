"""Bits for every layer: a byte more goes to the layer where it saves the most KL.

This module knows numbers only. The KLs of layers that are reduced alone add up to about the KL of all of them reduced
together. Tables are therefore found from the sum; the caller measures those that it uses.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Bits = dict[str, int]
EXCHANGES = 16  # tables with an exchange of bits between two layers that are measured, by default
ROUNDING = 1e-6  # bytes by which a computed budget may be off


@dataclass(frozen=True)
class Option:
    """One width of a layer: bytes that a use of it reads, and the KL that it costs (nats per token)."""

    bits: int
    bytes: int
    kl: float


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of KL over bytes, by bytes ascending.

    Each step saves less KL per byte than the step before. On a hull, a greedy choice minimises the sum of the KLs. An
    option that saves nothing is left out.
    """
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and gain(hull[-1], option) >= gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def gain(low: Option, high: Option) -> float:
    """The KL that a step saves per byte, in nats per token."""
    return (low.kl - high.kl) / (high.bytes - low.bytes)


@dataclass(frozen=True)
class PathPoint:
    """A table on the greedy path, its bytes, and the sum of its layers' KLs (nats per token)."""

    table: Bits
    bytes: int
    kl: float


def greedy_path(options: Mapping[str, Sequence[Option]]) -> list[PathPoint]:
    """Tables from the fewest bytes to the most: at each step, the layer that saves the most KL per byte gets more."""
    hulls = {path: lower_hull(choices) for path, choices in options.items()}
    place = dict.fromkeys(hulls, 0)
    table = {path: hull[0].bits for path, hull in hulls.items()}
    total, kl = (sum(getattr(hull[0], name) for hull in hulls.values()) for name in ("bytes", "kl"))
    points = [PathPoint(dict(table), total, kl)]
    steps = [(-gain(hull[0], hull[1]), path) for path, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, path = heapq.heappop(steps)
        hull, here = hulls[path], place[path] + 1
        place[path], table[path] = here, hull[here].bits
        total += hull[here].bytes - hull[here - 1].bytes
        kl += hull[here].kl - hull[here - 1].kl
        points.append(PathPoint(dict(table), total, kl))
        if here + 1 < len(hull):
            heapq.heappush(steps, (-gain(hull[here], hull[here + 1]), path))
    return points


def within_bytes(options: Mapping[str, Sequence[Option]], budget: float) -> PathPoint:
    """The last table of the greedy path within a budget, and single steps that the rest of the budget allows.

    Below the fewest bytes that layers can have, the table of the fewest.
    """
    points = greedy_path(options)
    budget = math.floor(budget + ROUNDING)
    best = points[max(bisect.bisect_right([point.bytes for point in points], budget) - 1, 0)]
    table, total, kl = dict(best.table), best.bytes, best.kl
    now = {path: next(o for o in choices if o.bits == table[path]) for path, choices in options.items()}
    while True:
        steps = [
            (gain(now[path], option), path, option)
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
    """The first point of a path with at most this KL, found by bisection; None where the last point has more.

    Args:
        measured: the measured KL of a table.
    """
    found = bisect.bisect_left(range(len(points)), True, key=lambda place: measured(points[place].table) <= kl)
    return points[found] if found < len(points) else None


def moves(options: Mapping[str, Sequence[Option]], table: Mapping[str, int], room: float) -> list[Bits]:
    """Tables in which one layer has its next width and another one its previous width; the least sum of KLs first.

    Args:
        room: the most bytes that a table may have more than the given one.
    """
    now = {path: next(o for o in choices if o.bits == table[path]) for path, choices in options.items()}

    def neighbour(path: str, step: int) -> Option | None:
        choices = sorted(options[path], key=lambda o: o.bits)
        place = choices.index(now[path]) + step
        return choices[place] if 0 <= place < len(choices) else None

    found = []
    for up, down in itertools.permutations(options, 2):
        more, less = neighbour(up, 1), neighbour(down, -1)
        if more is None or less is None:
            continue
        if more.bytes - now[up].bytes + less.bytes - now[down].bytes <= room:
            change = more.kl - now[up].kl + less.kl - now[down].kl
            found.append((change, {**table, up: more.bits, down: less.bits}))
    return [made for _, made in sorted(found, key=lambda item: item[0])]
