"""Bits by quality: for every layer the smallest codebook that reaches a floor (XFP 4.3).

A floor is the lowest median cosine between the rows of a weight and their reconstruction: a strict one for attention,
shared experts, dense MLPs and the output head, a lazy one for routed experts. A selection is reported as in XFP's
table 3.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear
from rich.progress import Progress

from ..errors import GearbxError
from ..formats import codebook, codebook_library, get_format
from ..formats.codebook import Codebook, CodebookFormat, SortedRows, all_outliers, lloyd
from ..gears.discovery import Layer, Predicate, discover, is_attention, with_bits
from ..gears.ladder import DENSE
from ..gears.offload import EMPTY
from . import Floors

# The quality of codebooks for a matrix

EXPERTS_JUDGED = 4
# XFP judges every channel. The median of 1024 of 4096 is within 0.0002 of all, in a quarter of the time.
WEIGHTS_JUDGED = 2**22


@dataclass(frozen=True)
class Quality:
    """The quality of one matrix at `bits`.

    cosine: median over channels. bulk_cosine: without separate outliers, with codebooks fitted to all weights.
    error: squared error over the sum of the squared weights. outlier_share: of the weights.
    effective_bits: per weight, including all stored arrays.
    """

    bits: int
    cosine: float
    bulk_cosine: float
    error: float
    outlier_share: float
    effective_bits: float


@dataclass(frozen=True)
class Match:
    """Sums over each row, (R,) float32: `own`, its squares; `made`, the reconstruction's; `product`, of both."""

    own: mx.array
    made: mx.array
    product: mx.array

    def cosine(self) -> float:
        """Return the median cosine; a row of zeros counts as 1."""
        norm = mx.sqrt(self.own * self.made)
        return float(np.median(np.array(mx.where(norm > 0, self.product / mx.maximum(norm, 1e-38), self.own == 0))))

    def error(self) -> float:
        """Return the squared error over the sum of the squared weights."""
        off = mx.maximum((self.own - 2 * self.product + self.made).sum(), 0)
        return float(np.array(off / mx.maximum(self.own.sum(), 1e-38)))


def match_of(rows: mx.array, made: mx.array) -> Match:
    """Compare rows (R, I) with their reconstruction."""
    return Match(mx.square(rows).sum(-1), mx.square(made).sum(-1), (rows * made).sum(-1))


def compare_cells(rows: SortedRows, own: mx.array, kept: mx.array, codebook: mx.array) -> Match:
    """Compare rows with their reconstruction by a codebook (R, K), using only the sums of its cells.

    own, kept: (R,) sums of the squares of the rows, and of their outliers, whose reconstruction is exact.
    """
    codebook = codebook.astype(mx.float16).astype(mx.float32)
    counts, sums = rows.cells(codebook)
    return Match(own, (counts * mx.square(codebook)).sum(-1) + kept, (sums * codebook).sum(-1) + kept)


def judged_rows(weight: mx.array, mask: np.ndarray) -> tuple[mx.array, mx.array]:
    """Return evenly spaced rows of a weight (..., O, I) and its mask, at most WEIGHTS_JUDGED weights: float32, bool."""
    width = weight.shape[-1]
    rows, outlying = weight.reshape(-1, width), mask.reshape(-1, width)
    count = max(1, min(len(rows), WEIGHTS_JUDGED // width))
    chosen = np.arange(count) * len(rows) // count
    return rows[mx.array(chosen)].astype(mx.float32), mx.array(outlying[chosen])


def some_experts(weight: mx.array) -> mx.array:
    """Return EXPERTS_JUDGED evenly spaced experts of (E, O, I), or all if there are fewer; a matrix is unchanged."""
    if weight.ndim == 2 or len(weight) <= EXPERTS_JUDGED:
        return weight
    return weight[mx.arange(EXPERTS_JUDGED) * len(weight) // EXPERTS_JUDGED]


def match_rows(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    """Yield bits, and the match of one codebook per row with separate outliers, and without."""
    rows, outlying = judged_rows(weight, mask)
    own = mx.square(rows).sum(-1)
    kept = mx.where(outlying, mx.square(rows), 0).sum(-1)
    split, whole = SortedRows.of(rows, outlying), SortedRows.of(rows, mx.zeros_like(outlying))
    for bits in format.layer_bits:
        yield (
            bits,
            compare_cells(split, own, kept, lloyd(split, bits, format.options.rounds)),
            compare_cells(whole, own, mx.zeros_like(kept), lloyd(whole, bits, format.options.rounds)),
        )


def match_library(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    """Yield bits, and the match of a library with separate outliers, and without."""
    rows, outlying = judged_rows(weight, mask)
    for bits in format.layer_bits:
        made = []
        for left_out in (np.array(outlying), np.zeros(outlying.shape, bool)):
            arrays = codebook_library.encode(rows, bits, format.options, left_out)
            made.append(match_of(rows, codebook.decode(arrays, bits, rows.shape[-1])))
        yield bits, made[0], made[1]


def qualities(format: CodebookFormat, weight: mx.array) -> Iterator[Quality]:
    """Yield the quality of a matrix (O, I), or of some experts of (E, O, I), at ascending bits of the format."""
    judged = some_experts(weight)
    mask = all_outliers(judged, format.options)
    share = float(mask.mean())
    match = match_rows if isinstance(format, Codebook) else match_library
    for bits, kept, whole in match(format, judged, mask):
        effective = 8 * format.stored_bytes(weight.shape, bits, share) / weight.size
        yield Quality(bits, kept.cosine(), whole.cosine(), kept.error(), share, effective)


# The quality of layers

HEADS = {"lm_head", "embed_out", "output", "ff_out", "head"}  # names of the output head in model classes


def component_kind(path: str, module: nn.Module) -> str:
    """Return the class of component, for its floor: routed, shared, attention, head or mlp."""
    if isinstance(module, SwitchLinear):
        return "routed"
    if "shared" in path:
        return "shared"
    if path.split(".")[-1] in HEADS or isinstance(module, nn.Embedding):  # a tied one
        return "head"
    return "attention" if is_attention(path, module) else "mlp"


@dataclass(frozen=True)
class LayerQualities:
    """A layer and its quality at several widths, ascending."""

    path: str
    kind: str
    weights: int
    lowest_bits: int
    qualities: tuple[Quality, ...]


def measure_qualities(
    layers: Iterable[Layer],
    format: CodebookFormat,
    enough: Floors,
    progress: Callable[[str], None] = lambda path: None,
) -> list[LayerQualities]:
    """Return layers' qualities at ascending bits, up to `enough`. Raises GearbxError for NaN and infinities."""
    measured = []
    for layer in layers:
        kind = component_kind(layer.path, layer.module)
        found: list[Quality] = []
        weight = layer.module.weight
        if not mx.isfinite(weight).all().item():
            raise GearbxError(f"{layer.path}: weights are not finite and cannot be quantized; check the checkpoint")
        for quality in qualities(format, weight):
            found.append(quality)
            if quality.bits >= layer.lowest_bits and quality.cosine >= enough.of(kind):
                break
        measured.append(LayerQualities(layer.path, kind, weight.size, layer.lowest_bits, tuple(found)))
        progress(layer.path)
    return measured


@dataclass(frozen=True)
class CodebookChoice:
    """The bits of a layer, and its quality at these bits.

    If no codebook reaches the floor, `bits` is 16 and `quality` is of the largest codebook.
    """

    path: str
    kind: str
    weights: int
    floor: float
    bits: int
    quality: Quality

    @property
    def effective_bits(self) -> float:
        return float(DENSE) if self.bits == DENSE else self.quality.effective_bits


@dataclass(frozen=True)
class Selection:
    """The bits of every layer, with reasons."""

    floors: Floors
    choices: Sequence[CodebookChoice]

    @property
    def bits(self) -> Mapping[str, int]:
        """Path to bits."""
        return {choice.path: choice.bits for choice in self.choices}

    @property
    def effective_bits(self) -> float:
        """Bits per weight, over all layers."""
        return effective(self.choices)

    @property
    def bytes(self) -> int:
        return round(self.effective_bits * sum(choice.weights for choice in self.choices) / 8)

    @property
    def predicate(self) -> Predicate:
        """Argument for `Gearbox(manage=...)`: a layer's chosen bits are its floor; a 2-bit gear is the selection."""
        return with_bits(self.bits)


def select(measured: Iterable[LayerQualities], floors: Floors) -> Selection:
    """Return the first bits of each layer that reach its floor; 16 (the original weights) if none do."""
    choices = []
    for layer in measured:
        floor = floors.of(layer.kind)
        allowed = [q for q in layer.qualities if q.bits >= layer.lowest_bits]
        good = next((q for q in allowed if q.cosine >= floor), None)
        bits = good.bits if good else DENSE
        quality = good or layer.qualities[-1]
        choices.append(CodebookChoice(layer.path, layer.kind, layer.weights, floor, bits, quality))
    return Selection(floors, choices)


def effective(choices: Sequence[CodebookChoice]) -> float:
    """Return bits per weight."""
    return sum(c.weights * c.effective_bits for c in choices) / sum(c.weights for c in choices)


def class_rows(selection: Selection) -> list[dict[str, Any]]:
    """Return XFP's table 3: class, layers, floor, bits, effective bits per weight; last row: total."""
    classes: dict[str, list[CodebookChoice]] = defaultdict(list)
    for choice in selection.choices:
        classes[choice.kind].append(choice)
    rows = [class_row(kind, choices, choices[0].floor) for kind, choices in classes.items()]
    return [*rows, class_row("total", selection.choices, None)]


def class_row(name: str, choices: Sequence[CodebookChoice], floor: float | None) -> dict[str, Any]:
    counts = Counter(choice.bits for choice in choices)
    names = {bits: f"xfp{bits}" for bits in counts} | {DENSE: "dense"}  # if no codebook reaches the floor
    return {
        "component": name,
        "layers": len(choices),
        "floor": floor,
        "selected": ", ".join(f"{count}×{names[bits]}" for bits, count in sorted(counts.items())),
        "effective_bits": effective(choices),
    }


def layer_rows(selection: Selection) -> list[dict[str, Any]]:
    """Return a row for each layer."""
    return [
        {
            "layer": choice.path,
            "type": f"{choice.kind} {choice.path.split('.')[-1]}",  # such as attention q_proj
            "floor": choice.floor,
            "bits": choice.bits,
            "cos_bulk": choice.quality.bulk_cosine,
            "cos_outlier": choice.quality.cosine,
            "outlier_share": choice.quality.outlier_share,
            "effective_bits": choice.effective_bits,
        }
        for choice in selection.choices
    ]


def selection_as_dict(selection: Selection) -> dict[str, Any]:
    """Return the whole report, for a JSON file."""
    return {"floors": vars(selection.floors), "classes": class_rows(selection), "layers": layer_rows(selection)}


def select_bits(
    model: nn.Module,
    format: str,
    manage: str | Predicate,
    floors: Floors,
    progress: Progress,
    give_up: bool = False,
) -> Selection:
    """Return the fewest bits of every managed layer that reach its floor.

    give_up: True to drop a layer's weights once measured: of a lazily read model, one layer is in memory at a time.
    """
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    layers, _ = discover(model, manage, format=codebooks)
    task = progress.add_task("judging codebooks", total=len(layers))
    judged = dropping_weights(layers) if give_up else layers
    return select(measure_qualities(judged, codebooks, floors, lambda path: progress.advance(task)), floors)


def dropping_weights(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield the layers one by one; each one's weights are dropped before the next."""
    for layer in layers:
        yield layer
        layer.module.weight = EMPTY
        mx.clear_cache()


def selection_lines(selection: Selection) -> list[str]:
    """Return the selection, a line for each class: "attention: 24×xfp3, 4.04 bits per weight (floor 0.98)"."""
    return [
        f"{row['component']}: {row['selected']}, {row['effective_bits']:.2f} bits per weight"
        + (f" (floor {row['floor']:g})" if row["floor"] is not None else "")
        for row in class_rows(selection)
    ]
