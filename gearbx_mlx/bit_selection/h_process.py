"""The H-Process: the best two floors whose model fits a budget and still makes sense (XFP 6.3).

Two things bound the search. Too high floors need more memory than there is, while encoding above all: what is encoded
already and the layer in hand are there together. Too low ones pass every cosine and yet give garbage, which only shows
end to end. So points are tried from aggressive to conservative, and the last one is taken that fits and makes sense.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from ..errors import GearbxError
from ..formats.codebook import CodebookFormat
from ..gears.discovery import Layer
from .codebook_selection import Floors, Measured, Selection, select

STRICT_FLOORS = (0.90, 0.93, 0.96, 0.98, 0.99, 0.995)
LAZY_FLOORS = (0.80, 0.88, 0.92, 0.93, 0.935, 0.94, 0.96, 0.98, 0.99)
MOST_POINTS = 8
FITS, OVER = "fits", "over budget"


class Verdict(Protocol):
    """What the garbage check says of a model. kl: nats per token against the original. looped: texts that repeat."""

    @property
    def passed(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def kl(self) -> float: ...

    @property
    def looped(self) -> int: ...


@dataclass(frozen=True)
class Point:
    """One operating point. steady, spike: bytes of the model, and of it with what encoding needs in passing."""

    selection: Selection
    steady: int
    spike: int
    outcome: str = ""
    verdict: Verdict | None = None

    @property
    def row(self) -> dict[str, Any]:
        """As in Table 10."""
        verdict = self.verdict
        return {
            "strict": self.selection.floors.strict,
            "lazy": self.selection.floors.lazy,
            "steady": self.steady,
            "spike": self.spike,
            "effective_bits": self.selection.effective_bits,
            "kl": verdict.kl if verdict else None,
            "looped": verdict.looped if verdict else None,
            "outcome": self.outcome,
        }


@dataclass(frozen=True)
class Found:
    """The point that was taken, and all that were tried, from aggressive to conservative."""

    best: Point
    tried: Sequence[Point]


def encoding_spike(layers: Sequence[Layer], format: CodebookFormat, bits: int) -> int:
    """Bytes that encoding the largest layer needs at most, the layer itself included; measured by encoding it.

    MLX's peak memory is counted from here on.
    """
    largest = max(layers, key=lambda layer: layer.module.weight.size).module
    mx.eval(largest.weight)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = format.modules(largest, bits, (bits,), 64, largest.weight.dtype)
    needed = max(0, mx.get_peak_memory() - before)
    del made
    mask = largest.weight.size  # the mask of outliers is numpy's, a byte for a weight
    return needed + largest.weight.nbytes + mask


def operating_points(
    measured: Sequence[Measured],
    unmanaged: int,
    spike: int,
    grid: Iterable[tuple[float, float]] | None = None,
    most: int = MOST_POINTS,
) -> list[Point]:
    """Points of a grid of floors, strict not below lazy, with different bits, from few bytes to many.

    Of points that differ in floors alone, the highest floors name them. More than `most` are thinned out evenly.

    Args:
        measured: layers, each up to bits that reach the highest floors.
        unmanaged: bytes of the rest of the model.
        spike: see `encoding_spike`.
        grid: pairs of strict and lazy floors.
    """
    pairs = itertools.product(STRICT_FLOORS, LAZY_FLOORS) if grid is None else grid
    different: dict[tuple, Selection] = {}
    for strict, lazy in sorted(pairs):
        if strict >= lazy:
            selection = select(measured, Floors(strict, lazy))
            different[tuple(selection.bits.values())] = selection
    ordered = sorted(different.values(), key=lambda s: (s.bytes, s.floors.strict, s.floors.lazy))
    if len(ordered) > most:
        ordered = [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]
    return [Point(s, s.bytes + unmanaged, s.bytes + unmanaged + spike) for s in ordered]


def search(
    points: Sequence[Point],
    judge: Callable[[Selection], Verdict],
    memory_budget: int | None = None,
    target_bpw: float | None = None,
    progress: Callable[[Point], None] = lambda point: None,
) -> Found:
    """Try points from aggressive to conservative, and take the last that fits and makes sense.

    Points beyond the budget are not made: more conservative ones are larger still, so the first ends the search.

    Args:
        points: ascending in bytes.
        judge: makes the model of a selection and checks it end to end.
        memory_budget: bytes, for the spike.
        target_bpw: most effective bits per weight of the managed layers.

    Raises:
        GearbxError: no point meets the budget, or none that does makes sense; the closest one is named.
    """
    tried: list[Point] = []
    for point in points:
        over = memory_budget is not None and point.spike > memory_budget
        over = over or (target_bpw is not None and point.selection.effective_bits > target_bpw)
        if over:
            tried.append(replace(point, outcome=OVER))
        else:
            verdict = judge(point.selection)
            tried.append(replace(point, verdict=verdict, outcome=FITS if verdict.passed else verdict.reason))
        progress(tried[-1])
        if over:
            break
    good = [point for point in tried if point.outcome == FITS]
    if good:
        return Found(good[-1], tried)
    failed = [point for point in tried if point.verdict]
    if failed:
        closest = min(failed, key=lambda point: point.verdict.kl if point.verdict else 0.0)
        raise GearbxError(
            f"every point within the budget gives garbage; the closest has {described(closest)} and "
            f"{closest.outcome}; give a larger budget"
        )
    raise GearbxError(f"no point meets the budget; the smallest has {described(points[0])}; give that much or more")


def described(point: Point) -> str:
    return (
        f"floors {point.selection.floors.strict:g} and {point.selection.floors.lazy:g}, "
        f"{point.selection.effective_bits:.2f} bits per weight, {point.spike / 1e9:.3g} GB at its peak"
    )
