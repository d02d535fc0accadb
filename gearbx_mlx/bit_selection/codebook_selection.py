"""Bits by quality: for every layer the smallest codebook that reaches a floor (XFP 4.3).

A floor is the least median cosine between the rows of a weight and their reconstruction: a strict one for attention,
shared experts, dense MLPs and the output head, a lazy one for routed experts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import GearbxError
from ..formats.codebook import CodebookFormat
from ..formats.codebook_quality import Quality, qualities
from ..gears.discovery import Layer, Predicate, is_attention, with_bits
from ..gears.ladder import DENSE
from .floors import Floors

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
        bits = sum(choice.weights * choice.effective_bits for choice in self.choices)
        return bits / sum(choice.weights for choice in self.choices)

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
