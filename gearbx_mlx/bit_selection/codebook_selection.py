"""Bits by quality: for every layer the smallest codebook that reaches a floor (XFP 4.3).

A floor is the least median cosine between the rows of a weight and their reconstruction: a strict one for attention,
shared experts, dense MLPs and the output head, a lazy one for routed experts. A selection is reported as in XFP's
table 3.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from rich.progress import Progress

from ..errors import GearbxError
from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..formats.codebook_quality import Quality, qualities
from ..gears.discovery import Layer, Predicate, discover, is_attention, with_bits
from ..gears.ladder import DENSE
from ..gears.offload import EMPTY
from .defaults import Floors

ROUTED = "routed"
HEADS = {"lm_head", "embed_out", "output", "ff_out", "head"}  # what model classes call their output head


def kind_of(path: str, module: nn.Module) -> str:
    """The class of component that decides the floor: routed, shared, attention, head or mlp."""
    if isinstance(module, SwitchLinear):
        return ROUTED
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


def measure(
    layers: Iterable[Layer],
    format: CodebookFormat,
    enough: Floors,
    progress: Callable[[str], None] = lambda path: None,
) -> list[LayerQualities]:
    """The quality of every layer at ascending bits, up to the first that reaches `enough`.

    Raises:
        GearbxError: weights that are not finite.
    """
    measured = []
    for layer in layers:
        kind = kind_of(layer.path, layer.module)
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

    Where no codebook reaches the floor, `bits` is 16 and `quality` that of the largest codebook.
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
    """The bits of every layer, and why."""

    floors: Floors
    choices: Sequence[CodebookChoice]

    @property
    def bits(self) -> Mapping[str, int]:
        """Path to bits."""
        return {choice.path: choice.bits for choice in self.choices}

    @property
    def effective_bits(self) -> float:
        """Per weight, over all layers."""
        return effective(self.choices)

    @property
    def bytes(self) -> int:
        return round(self.effective_bits * sum(choice.weights for choice in self.choices) / 8)

    @property
    def predicate(self) -> Predicate:
        """For `Gearbox(manage=...)`: no gear has a layer below its chosen bits; a gear of 2 is the selection."""
        return with_bits(self.bits)


def select(measured: Iterable[LayerQualities], floors: Floors) -> Selection:
    """The first bits of each layer that reach its floor; 16, the weights as they are, where none do."""
    choices = []
    for layer in measured:
        floor = floors.of(layer.kind)
        allowed = [q for q in layer.qualities if q.bits >= layer.lowest_bits]
        good = next((q for q in allowed if q.cosine >= floor), None)
        choices.append(
            CodebookChoice(
                *(layer.path, layer.kind, layer.weights, floor),
                good.bits if good else DENSE,
                good or layer.qualities[-1],
            )
        )
    return Selection(floors, choices)


def component(choice: CodebookChoice) -> str:
    """The class and the last name of a layer, such as attention q_proj."""
    return f"{choice.kind} {choice.path.split('.')[-1]}"


def grouped_choices(selection: Selection, key) -> dict[str, list[CodebookChoice]]:
    groups: dict[str, list[CodebookChoice]] = defaultdict(list)
    for choice in selection.choices:
        groups[key(choice)].append(choice)
    return dict(groups)


def bits_text(choices: Sequence[CodebookChoice]) -> str:
    """How many layers have which bits, such as 233×xfp3, 2×xfp4; dense: no codebook reaches the floor."""
    counts = Counter(choice.bits for choice in choices)
    return ", ".join(f"{n}×{'dense' if bits == DENSE else f'xfp{bits}'}" for bits, n in sorted(counts.items()))


def effective(choices: Sequence[CodebookChoice]) -> float:
    """Bits per weight."""
    return sum(c.weights * c.effective_bits for c in choices) / sum(c.weights for c in choices)


def class_rows(selection: Selection) -> list[dict[str, Any]]:
    """XFP's table 3: class, layers, floor, selected bits, effective bits per weight; the last row is the total."""
    classes = grouped_choices(selection, lambda choice: choice.kind)
    rows = [class_row(kind, choices, choices[0].floor) for kind, choices in classes.items()]
    return [*rows, class_row("total", selection.choices, None)]


def class_row(name: str, choices: Sequence[CodebookChoice], floor: float | None) -> dict[str, Any]:
    return {
        "component": name,
        "layers": len(choices),
        "floor": floor,
        "selected": bits_text(choices),
        "effective_bits": effective(choices),
    }


def layer_rows(selection: Selection) -> list[dict[str, Any]]:
    """A row for each layer."""
    return [
        {
            "layer": choice.path,
            "type": component(choice),
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
    """The whole report, for a JSON file."""
    return {
        "floors": vars(selection.floors),
        "classes": class_rows(selection),
        "layers": layer_rows(selection),
    }


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
