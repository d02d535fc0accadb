"""The H-Process on a model: finds the quality floors that meet a budget in memory or in bits per weight (XFP 6.3)."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from rich.progress import Progress
from rich.table import Table

from ..errors import GearbxError
from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.activations import stored_dtype
from ..gears.cost import layer_bytes
from ..gears.discovery import Predicate, discover
from ..gears.gearbox import Gearbox
from ..kernels.dispatch import choose
from .codebook_selection import Selection, measure
from .floors import Floors
from .garbage import KL_BOUND, GarbageCheck, Sense, continuation
from .h_process import LAZY_FLOORS, STRICT_FLOORS, FloorSearch, OperatingPoint, encoding_spike, operating_points, search

MOST_PROMPTS, WRITTEN = 16, 48  # calibration texts, and tokens that the original model writes after each prompt


def fit_floors(
    model: nn.Module,
    tokenizer: Any,
    format: str,
    manage: str,
    prompts: Sequence[str],
    memory_budget: int | None,
    target_bpw: float | None,
    progress: Progress,
    reserve: int = 0,
) -> FloorSearch:
    """`fit_budget` on text that the model writes after the prompts."""
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    ends = tokenizer.eos_token_ids
    starts = [tokenizer.encode(prompt) for prompt in prompts[:MOST_PROMPTS]]
    fast_gearbox(model, codebooks, manage)
    texts = [
        start + continuation(model, start, WRITTEN, ends)
        for start in progress.track(starts, description="writing calibration text")
    ]
    judging, trying = progress.add_task("judging codebooks", total=None), progress.add_task("trying", total=None)
    return fit_budget(
        model,
        texts,
        codebooks,
        manage,
        memory_budget,
        target_bpw,
        ends,
        reserve=reserve,
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
    reserve: int = 0,
    judged: Callable[[str], None] = lambda path: None,
    progress: Callable[[OperatingPoint], None] = lambda point: None,
) -> FloorSearch:
    """The last point of a grid of floors that meets the budget and passes the garbage check.

    The model is left in its top gear.

    Args:
        model: not quantized.
        texts: tokens of calibration texts.
        memory_budget: bytes, for the model and the more of what its encoding needs at its peak, and the reserve.
        target_bpw: most effective bits per weight of the managed layers.
        ends: tokens that end a text.
        reserve: bytes that generation needs beside the model.
        judged, progress: called with the path of each layer that has been measured, and with each point tried.

    Raises:
        GearbxError: no point meets the budget, or none of those passes the check.
    """
    layers, _ = discover(model, manage, 64, format)
    if not layers:
        raise GearbxError("codebooks can store no layer of this model")
    storage = stored_dtype(model)
    rest = layer_bytes(model, storage) - storage.size * sum(layer.module.weight.size for layer in layers)
    fast_gearbox(model, format, manage)
    check = GarbageCheck(model, texts, kl_bound, ends=ends)
    measured = measure(layers, format, Floors(STRICT_FLOORS[-1], LAZY_FLOORS[-1]), judged)

    def judge(selection: Selection) -> Sense:
        gearbox = fast_gearbox(model, format, selection.predicate)
        gearbox.shift("low")
        try:
            return check(model)
        finally:
            gearbox.shift("high")

    spike = encoding_spike(layers, format, max(format.layer_bits))
    return search(operating_points(measured, rest, spike, reserve=reserve), judge, memory_budget, target_bpw, progress)


def fast_gearbox(model: nn.Module, format: CodebookFormat, manage: str | Predicate) -> Gearbox:
    """A gearbox in its top gear whose low gear is fast here: native kernels, or weights that are reconstructed once."""
    native = choose("native", "float").native and format.native
    fast = format if native else type(format)(cache=True, options=format.options)
    kernels = "native" if native else "mlx"
    return Gearbox(model, "2,16", format=fast, manage=manage, kernels=kernels, activations="float")


def points_table(found: FloorSearch) -> Table:
    """All points that were tried, in the form of XFP's table 10."""
    table = Table(title="Points tried, from aggressive to conservative")
    for name in ("strict", "lazy", "steady", "peak", "bits", "KL", "repeats", ""):
        table.add_column(name, justify="left" if not name else "right")
    for point in found.tried:
        table.add_row(*point_cells(point.row), style="bold" if point is found.best else None)
    return table


def point_rows(found: FloorSearch) -> list[dict[str, Any]]:
    """The rows of `points_table` as numbers."""
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
