"""The H-Process: the highest two floors whose model fits a budget and gives no garbage (XFP 6.3).

Memory bounds the floors from above. While the model is encoded, the layers that are encoded already and the layer in
work are in memory together; while it generates, the model and a reserve for its cache and activations (reserve.py).
Garbage bounds them from below, and only an end-to-end check shows it. The search therefore tries points from aggressive
to conservative, and takes the last one that fits and passes the check.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from ..errors import GearbxError
from ..formats.codebook import CodebookFormat
from ..gears.discovery import Layer
from .codebook_selection import Floors, LayerQualities, Selection, select

STRICT_FLOORS = (0.90, 0.93, 0.96, 0.98, 0.99, 0.995)
LAZY_FLOORS = (0.80, 0.88, 0.92, 0.93, 0.935, 0.94, 0.96, 0.98, 0.99)
MOST_POINTS = 8
FITS, OVER = "fits", "over budget"


class Sense(Protocol):
    """The outcome of the garbage check. kl: from the original, nats per token. looped: texts that repeat themselves."""

    @property
    def passed(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def kl(self) -> float: ...

    @property
    def looped(self) -> int: ...


@dataclass(frozen=True)
class OperatingPoint:
    """One operating point. steady: bytes of the model. spike: bytes at the peak, while the model is encoded.

    reserve: bytes that generation needs beside the model.
    """

    selection: Selection
    steady: int
    spike: int
    outcome: str = ""
    verdict: Sense | None = None
    reserve: int = 0

    @property
    def needed(self) -> int:
        """The most bytes at any time: while the model is encoded, or while it generates."""
        return max(self.spike, self.steady + self.reserve)

    @property
    def row(self) -> dict[str, Any]:
        """The point as a row of XFP's table 10."""
        verdict = self.verdict
        return {
            "strict": self.selection.floors.strict,
            "lazy": self.selection.floors.lazy,
            "steady": self.steady,
            "spike": self.spike,
            "reserve": self.reserve,
            "effective_bits": self.selection.effective_bits,
            "kl": verdict.kl if verdict else None,
            "looped": verdict.looped if verdict else None,
            "outcome": self.outcome,
        }


@dataclass(frozen=True)
class FloorSearch:
    """The chosen point, and all points that were tried, from aggressive to conservative."""

    best: OperatingPoint
    tried: Sequence[OperatingPoint]


def encoding_spike(layers: Sequence[Layer], format: CodebookFormat, bits: int) -> int:
    """Bytes at the peak of encoding the largest layer, the layer itself included; measured by encoding it.

    Resets MLX's peak memory.
    """
    largest = max(layers, key=lambda layer: layer.module.weight.size).module
    mx.eval(largest.weight)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = format.modules(largest, bits, (bits,), 64, largest.weight.dtype)
    needed = max(0, mx.get_peak_memory() - before)
    del made
    mask = largest.weight.size  # bytes of the mask of outliers, which numpy allocates
    return needed + largest.weight.nbytes + mask


def operating_points(
    measured: Sequence[LayerQualities],
    unmanaged: int,
    spike: int,
    grid: Iterable[tuple[float, float]] | None = None,
    most: int = MOST_POINTS,
    reserve: int = 0,
) -> list[OperatingPoint]:
    """Points of a grid of floors with different bits for the layers, by bytes ascending.

    The strict floor is never below the lazy one. Pairs of floors that give the same bits are one point, named by the
    highest of them. More points than `most` are thinned out evenly.

    Args:
        measured: layers, each measured up to the first bits that reach the highest floors.
        unmanaged: bytes of the rest of the model.
        spike: see `encoding_spike`.
        grid: pairs of strict and lazy floors.
        reserve: bytes that generation needs beside the model.
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
    return [OperatingPoint(s, s.bytes + unmanaged, s.bytes + unmanaged + spike, reserve=reserve) for s in ordered]


def search(
    points: Sequence[OperatingPoint],
    judge: Callable[[Selection], Sense],
    memory_budget: int | None = None,
    target_bpw: float | None = None,
    progress: Callable[[OperatingPoint], None] = lambda point: None,
) -> FloorSearch:
    """Try points from aggressive to conservative, and take the last that fits and passes the check.

    The first point beyond the budget ends the search, because more conservative points are larger. It is not made.

    Args:
        points: ascending in bytes.
        judge: makes the model of a selection and checks it end to end.
        memory_budget: the most bytes, while the model is encoded and while it generates.
        target_bpw: most effective bits per weight of the managed layers.

    Raises:
        GearbxError: no point meets the budget, or none of those passes the check; the message names the closest.
    """
    tried: list[OperatingPoint] = []
    for point in points:
        over = memory_budget is not None and point.needed > memory_budget
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
        return FloorSearch(good[-1], tried)
    failed = [point for point in tried if point.verdict]
    if failed:
        closest = min(failed, key=lambda point: point.verdict.kl if point.verdict else 0.0)
        raise GearbxError(
            f"every point within the budget gives garbage; the closest has {described(closest)} and "
            f"{closest.outcome}; give a larger budget"
        )
    raise GearbxError(f"no point meets the budget; the smallest has {described(points[0])}; give that much or more")


def described(point: OperatingPoint) -> str:
    return (
        f"floors {point.selection.floors.strict:g} and {point.selection.floors.lazy:g}, "
        f"{point.selection.effective_bits:.2f} bits per weight, {point.needed / 1e9:.3g} GB at its peak"
    )
