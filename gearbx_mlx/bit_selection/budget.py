"""The H-Process on a model: from a memory budget or a number of bits to the floors that meet it (XFP 6.3)."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..cli.prompts import HARD, MIXED, TRIVIAL, read_prompts
from ..errors import GearbxError
from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.activations import stored_dtype
from ..gears.cost import layer_bytes
from ..gears.discovery import Predicate, discover
from ..gears.gearbox import Gearbox
from ..kernels.dispatch import choose
from .codebook_selection import Floors, Selection, measure
from .floors import wanted_floors
from .garbage import KL_BOUND, GarbageCheck, Sense, continuation
from .h_process import LAZY_FLOORS, STRICT_FLOORS, Found, Point, encoding_spike, operating_points, search

MOST_PROMPTS, WRITTEN = 16, 48  # calibration texts, and tokens that the original adds to each prompt
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


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budget (format codebook or codebook-library; in the place of floors)")
    group.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="Such as 3GB: find the floors whose model fits, while it is encoded too, and makes sense.",
    )
    group.add_argument(
        "--target-bpw", type=float, metavar="BITS", help="The same for bits per weight of the layers that change gear."
    )
    group.add_argument(
        "--prompts",
        help="One prompt per line, or JSON Lines, on which the original is compared. Default: some that ship.",
    )


def wanted_budget(args: argparse.Namespace) -> dict[str, Any] | None:
    """memory_budget (bytes), target_bpw and prompts, where one of the first two is asked for.

    Raises:
        GearbxError: no such size or bits, a format that has no codebooks, floors beside the budget.
    """
    if args.memory_budget is None and args.target_bpw is None:
        return None
    size = None if args.memory_budget is None else parse_bytes(args.memory_budget)
    if args.target_bpw is not None and not 0 < args.target_bpw < 16:
        raise GearbxError(f"--target-bpw is {args.target_bpw:g}; give bits between 0 and 16")
    if not isinstance(get_format(args.format), CodebookFormat):
        raise GearbxError(f"a budget is met by codebooks, and the format is {args.format}; give --format codebook")
    if wanted_floors(args) is not None:
        raise GearbxError("a budget finds the floors; leave out --auto-bits and --min-cos-strict, --min-cos-lazy")
    return {"memory_budget": size, "target_bpw": args.target_bpw, "prompts": args.prompts}


def fit(model: nn.Module, tokenizer: Any, format: str, manage: str, budget: Mapping[str, Any]) -> Found:
    """`fit_budget` for what `wanted_budget` says, on text that the model writes itself, with progress."""
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    own = MIXED + TRIVIAL + HARD if budget["prompts"] is None else read_prompts(Path(budget["prompts"]))
    ends = tokenizer.eos_token_ids
    prompts = [tokenizer.encode(prompt) for prompt in own[:MOST_PROMPTS]]
    geared(model, codebooks, manage)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        texts = [
            prompt + continuation(model, prompt, WRITTEN, ends)
            for prompt in progress.track(prompts, description="writing calibration text")
        ]
        judging, trying = progress.add_task("judging codebooks", total=None), progress.add_task("trying", total=None)
        return fit_budget(
            model,
            texts,
            codebooks,
            manage,
            budget["memory_budget"],
            budget["target_bpw"],
            ends,
            judged=lambda path: progress.advance(judging),
            progress=lambda point: progress.advance(trying),
        )


def fit_budget(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    format: CodebookFormat,
    manage: str | Predicate = "all",
    memory_budget: int | None = None,
    target_bpw: float | None = None,
    ends: Sequence[int] = (),
    kl_bound: float = KL_BOUND,
    judged: Callable[[str], None] = lambda path: None,
    progress: Callable[[Point], None] = lambda point: None,
) -> Found:
    """The point of a grid of floors that meets the budget and makes sense; the model is left in its top gear.

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
    storage = stored_dtype(model)
    rest = layer_bytes(model, storage) - storage.size * sum(layer.module.weight.size for layer in layers)
    geared(model, format, manage)
    check = GarbageCheck(model, texts, kl_bound, ends=ends)
    measured = measure(layers, format, Floors(STRICT_FLOORS[-1], LAZY_FLOORS[-1]), judged)

    def judge(selection: Selection) -> Sense:
        gearbox = geared(model, format, selection.predicate)
        gearbox.shift("low")
        try:
            return check(model)
        finally:
            gearbox.shift("high")

    spike = encoding_spike(layers, format, max(format.layer_bits))
    return search(operating_points(measured, rest, spike), judge, memory_budget, target_bpw, progress)


def geared(model: nn.Module, format: CodebookFormat, manage: str | Predicate) -> Gearbox:
    """A model in its top gear that writes text as fast as it can here: natively, else from a weight that is kept."""
    native = choose("native", "float").native
    fast = format if native else type(format)(cache=True, rounds=format.rounds)
    kernels = "native" if native else "mlx"
    return Gearbox(model, "2,16", format=fast, manage=manage, kernels=kernels, activations="float")


def points_table(found: Found) -> Table:
    """All points tried, in the form of XFP's table 10."""
    table = Table(title="Points tried, from aggressive to conservative")
    for name in ("strict", "lazy", "steady", "peak", "bits", "KL", "repeats", ""):
        table.add_column(name, justify="left" if not name else "right")
    for point in found.tried:
        table.add_row(*point_cells(point.row), style="bold" if point is found.best else None)
    return table


def point_rows(found: Found) -> list[dict[str, Any]]:
    """The same as numbers."""
    return [point.row for point in found.tried]


def point_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['strict']:g}",
        f"{row['lazy']:g}",
        f"{row['steady'] / 1e9:.3g} GB",
        f"{row['spike'] / 1e9:.3g} GB",
        f"{row['effective_bits']:.2f}",
        "-" if row["kl"] is None else f"{row['kl']:.4f}",
        "-" if row["looped"] is None else str(row["looped"]),
        row["outcome"],
    ]
