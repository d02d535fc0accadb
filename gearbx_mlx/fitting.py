"""The H-Process on a model: from a memory budget or a number of bits to the floors that meet it (XFP 6.3)."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from rich.table import Table

from .decoding.garbage import KL_BOUND, GarbageCheck, Sense
from .errors import GearbxError
from .formats.codebook import Codebook
from .formats.codebook_library import CodebookLibrary
from .gears.activations import stored_dtype
from .gears.codebook_selection import Floors, Selection, measure
from .gears.cost import layer_bytes
from .gears.discovery import Predicate, discover
from .gears.gearbox import Gearbox
from .gears.h_process import LAZY_FLOORS, STRICT_FLOORS, Found, Point, encoding_spike, operating_points, search

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of "3GB", "3 GiB", "500M" or "1e9".

    Raises:
        GearbxError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    try:
        count = float(found[1]) * UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise GearbxError(f"'{text}' is no size; give bytes such as 3GB, 500MB or 2GiB")
    return round(count)


def fit_budget(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    format: Codebook | CodebookLibrary,
    manage: str | Predicate = "all",
    memory_budget: int | None = None,
    target_bpw: float | None = None,
    ends: Sequence[int] = (),
    kl_bound: float = KL_BOUND,
    judged: Callable[[str], None] = lambda path: None,
    progress: Callable[[Point], None] = lambda point: None,
) -> Found:
    """The point of a grid of floors that meets the budget and makes sense; the model is as before afterwards.

    Args:
        model: not quantized.
        texts: tokens of calibration texts.
        memory_budget: bytes, for the model and what encoding it needs at its peak.
        target_bpw: most effective bits per weight of the managed layers.
        ends: tokens that end a text.
        judged, progress: called with the path of each layer that has been measured, and with each point tried.

    Raises:
        GearbxError: no point meets the budget, or none that does makes sense.
    """
    layers, _ = discover(model, manage, 64, format)
    if not layers:
        raise GearbxError("there is no layer that codebooks could hold")
    check = GarbageCheck(model, texts, kl_bound, ends=ends)
    measured = measure(layers, format, Floors(STRICT_FLOORS[-1], LAZY_FLOORS[-1]), judged)
    storage = stored_dtype(model)
    rest = layer_bytes(model, storage) - storage.size * sum(layer.module.weight.size for layer in layers)

    def judge(selection: Selection) -> Sense:
        gearbox = Gearbox(model, "2,16", format=format, manage=selection.predicate)
        gearbox.shift("low")
        try:
            return check(model)
        finally:
            gearbox.shift("high")

    spike = encoding_spike(layers, format, max(format.layer_bits))
    return search(operating_points(measured, rest, spike), judge, memory_budget, target_bpw, progress)


def points_table(found: Found) -> Table:
    """All points tried, in the form of XFP's table 10."""
    table = Table(title="Points tried, from aggressive to conservative")
    for name in ("strict", "lazy", "steady", "peak", "bits", "KL", "repeats", ""):
        table.add_column(name, justify="left" if not name else "right")
    for point in found.tried:
        table.add_row(*point_cells(point.row), style="bold" if point is found.best else None)
    return table


def point_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['strict']:g}",
        f"{row['lazy']:g}",
        f"{row['steady'] / 1e9:.3f} GB",
        f"{row['spike'] / 1e9:.3f} GB",
        f"{row['effective_bits']:.2f}",
        "-" if row["kl"] is None else f"{row['kl']:.4f}",
        "-" if row["looped"] is None else str(row["looped"]),
        row["outcome"],
    ]
