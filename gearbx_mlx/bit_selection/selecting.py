"""The bits of every layer that follow from quality floors (XFP 4.3)."""

from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn
from rich.progress import Progress

from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.discovery import Layer, Predicate, discover
from ..gears.offload import EMPTY
from .codebook_selection import Selection, measure, select
from .floors import Floors
from .selection_report import class_rows


def select_bits(
    model: nn.Module,
    format: str,
    manage: str | Predicate,
    floors: Floors,
    progress: Progress,
    group_size: int = 64,
    give_up: bool = False,
) -> Selection:
    """The fewest bits of every managed layer that reach its floor.

    Args:
        give_up: drop the weights of a layer once it is judged: of a lazily read model, one layer is in memory at a
            time.
    """
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    layers, _ = discover(model, manage, group_size, codebooks)
    task = progress.add_task("judging codebooks", total=len(layers))
    judged = dropping_weights(layers) if give_up else layers
    return select(measure(judged, codebooks, floors, lambda path: progress.advance(task)), floors)


def dropping_weights(layers: Iterable[Layer]) -> Iterator[Layer]:
    """The layers one by one; each loses its weights when the next one is asked for."""
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
