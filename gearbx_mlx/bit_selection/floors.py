"""Flags of quality floors, and the bits of every layer that follow from them (XFP 4.3)."""

import argparse
from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.progress import Progress

from ..errors import GearbxError
from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.discovery import Layer, Predicate, discover
from ..gears.offload import EMPTY
from .codebook_selection import LAZY, STRICT, Floors, Selection, measure, select
from .selection_report import class_rows


def add_floor_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quality floors (format codebook or codebook-library)")
    group.add_argument(
        "--auto-bits",
        action="store_true",
        help="Give every layer the fewest bits that reach its floor; a gear of fewer bits has it at those.",
    )
    group.add_argument(
        "--min-cos-strict",
        type=float,
        metavar="COSINE",
        help="Floor of attention, shared experts, dense MLPs and the head; implies --auto-bits. "
        f"Default: XFP_MIN_COS_STRICT or {STRICT}",
    )
    group.add_argument(
        "--min-cos-lazy",
        type=float,
        metavar="COSINE",
        help=f"Floor of routed experts; implies --auto-bits. Default: XFP_MIN_COS_LAZY or {LAZY}",
    )


def wanted_floors(args: argparse.Namespace) -> Floors | None:
    """The floors that the flags ask for, if they do.

    Raises:
        GearbxError: a floor outside (0, 1), or a format that has no codebooks.
    """
    given = getattr(args, "min_cos_strict", None), getattr(args, "min_cos_lazy", None)
    if not getattr(args, "auto_bits", False) and given == (None, None):
        return None
    floors = Floors.chosen(*given)
    if not isinstance(get_format(args.format), CodebookFormat):
        raise GearbxError(f"quality floors choose codebooks, and the format is {args.format}; give --format codebook")
    return floors


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
