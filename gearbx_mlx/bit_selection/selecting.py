"""The bits of every layer that follow from quality floors (XFP 4.3)."""

from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.progress import Progress

from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.discovery import Layer, Predicate, discover
from ..gears.offload import EMPTY
from .codebook_selection import Selection, measure, select
from .floors import Floors
from .selection_report import class_rows


def select_bits(
    model: nn.Module, format: str, manage: str | Predicate, floors: Floors, group_size: int = 64, give_up: bool = False
) -> Selection:
    """Judge every layer that is managed, with progress on standard error.

    Args:
        give_up: weights, once they are judged, so that of a model that is read lazily one layer is in memory at a time.
    """
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    layers, _ = discover(model, manage, group_size, codebooks)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("judging codebooks", total=len(layers))
        measured = measure(
            each_given_up(layers) if give_up else layers, codebooks, floors, lambda path: progress.advance(task)
        )
    return select(measured, floors)


def each_given_up(layers: Iterable[Layer]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        layer.module.weight = EMPTY
        mx.clear_cache()


def selection_lines(selection: Selection) -> list[str]:
    """What was chosen, a line for each class: "attention: 24×xfp3, 4.04 bits per weight (floor 0.98)"."""
    return [
        f"{row['component']}: {row['selected']}, {row['effective_bits']:.2f} bits per weight"
        + (f" (floor {row['floor']:g})" if row["floor"] is not None else "")
        for row in class_rows(selection)
    ]
