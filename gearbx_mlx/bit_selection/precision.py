"""The precision manifest: the cost of every layer's precision, the range of its bits, and the tables of gears.

The manifest is a JSON file, described by precision.schema.json in this directory.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import mlx.nn as nn
import msgspec
from msgspec import Meta, Struct, field, structs

from ..errors import GearbxError
from ..files.reading import Count, check_schema, parse_json, read_as, shown, typed
from ..formats import get_format
from ..formats.base import Format
from ..gears.discovery import Layer, discover
from ..gears.gearbox import model_fingerprint
from ..gears.ladder import DENSE, Ladder
from ..gears.manifest import Fingerprint, GroupSize, Length, Width
from . import ACCURACY_THRESHOLD

MANIFEST_SCHEMA, MANIFEST_VERSION = "gearbx-mlx precision", 1
SCHEMA_FILE = Path(__file__).parent / "precision.schema.json"
EXACT_KL, FIRST_ORDER = "exact", "first order"
MAKE = "make a new one with gearbx_mlx sensitivity"
SAFE = 0.02  # nats


if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[EXACT_KL, FIRST_ORDER]
PerWidth = Mapping[Width, float]
Nats = Annotated[float, Meta(ge=0, le=1e100)]


class LayerPrecision(Struct, frozen=True):
    """One managed layer. Raises GearbxError for an empty range.

    kind: its class (attention, mlp, shared, routed, head). weights: how many. min_bits, max_bits: its range; 16 means
    the original weight. kl: bits to KL of the model in which only this layer has them, nats per token.
    perplexity_change: in percent, likewise; empty if it was not measured.
    """

    kind: str = field(name="class")
    weights: Length
    min_bits: Width
    max_bits: Width
    kl: Annotated[Mapping[Width, Nats], Meta(min_length=1)]
    perplexity_change: PerWidth = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.min_bits > self.max_bits:
            raise GearbxError(f"min_bits is {self.min_bits} and max_bits {self.max_bits}; use an ascending range")


class GearTable(Struct, frozen=True):
    """Bits of every layer in one gear; wish: the target as text. bits_per_weight: as read, including scales.
    kl (nats per token), perplexity_change (percent): measured, of the whole model; sum_of_parts: of the layers' KLs."""

    bits: Annotated[Mapping[str, Width], Meta(min_length=1)]
    wish: str
    bits_per_weight: float
    kl: float
    perplexity_change: float
    sum_of_parts: float


class PrecisionManifest(Struct, frozen=True):
    """The content of the file.

    method: "exact" or "first order". model: its name; fingerprint: of its weights. calibration: hash of the text's
    tokens; tokens: how many were predicted. format, group_size, manage: as in `Gearbox`; bits: its widths.
    perplexity: at full precision. gears: bits of a gear of the ladder to its table. cost: the cost of measuring, as
    shares of full passes. accuracy_threshold: percent that a layer at min_bits may add to perplexity.
    """

    method: Method
    model: str
    fingerprint: Fingerprint
    calibration: str
    tokens: Count
    format: str
    group_size: GroupSize
    manage: str
    bits: tuple[Width, ...]
    perplexity: float | None
    layers: Annotated[Mapping[str, LayerPrecision], Meta(min_length=1)]
    gears: Mapping[Width, GearTable] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    accuracy_threshold: Annotated[float, Meta(gt=0)] = ACCURACY_THRESHOLD
    schema: str = MANIFEST_SCHEMA
    version: int = MANIFEST_VERSION

    def check_tables(self) -> None:
        """Validate that tables have no layers that are missing in `layers`. Raises GearbxError."""
        for gear, table in self.gears.items():
            unknown = sorted(table.bits.keys() - self.layers.keys())
            if unknown:
                raise GearbxError(f"the table of gear {gear} has {shown(unknown[0])}, but layers do not")

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Path to range."""
        return {path: (layer.min_bits, layer.max_bits) for path, layer in self.layers.items()}

    def sensitivity(self, path: str, bits: int) -> float:
        """Return the KL of a layer at any width; an unmeasured one is fourfold for every bit below the nearest.

        At 16 bits it is 0. An unknown layer costs more than any other.
        """
        if bits == DENSE:
            return 0.0
        if path not in self.layers:
            return 1 + max(layer.kl[min(layer.kl)] for layer in self.layers.values())
        kl = self.layers[path].kl
        nearest = min(kl, key=lambda width: abs(width - bits))
        return kl[nearest] * 4.0 ** (nearest - bits)

    def as_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1, allow_nan=False) + "\n"

    def tables(self, ladder: Ladder) -> dict[str, dict[str, int]]:
        """Return names of the ladder's gears to their tables, for a Gearbox; only gears with tables."""
        return {gear.name: dict(self.gears[gear.bits].bits) for gear in ladder if gear.bits in self.gears}

    def check_model(self, fingerprint: str) -> None:
        """Validate that the manifest is for this model. Raises GearbxError."""
        if self.fingerprint != fingerprint:
            raise GearbxError(f"made for a model with different weights ({self.model}); {MAKE}")

    def fitted(self, paths: Iterable[str]) -> tuple["PrecisionManifest", list[str]]:
        """Return the manifest for a model with these managed layers, and the layers that the manifest lacks.

        Missing layers have full precision in every gear. Raises GearbxError for a layer that the model does not have,
        or that does not change gear.
        """
        paths = list(paths)
        unknown = sorted(self.layers.keys() - {*paths})
        if unknown:
            raise GearbxError(f"has {unknown[0]}, which is not a layer of this model that changes gear; {MAKE}")
        missing = [path for path in paths if path not in self.layers]
        top = dict.fromkeys(missing, DENSE)
        gears = {bits: structs.replace(table, bits={**top, **table.bits}) for bits, table in self.gears.items()}
        return structs.replace(self, gears=gears), missing


def least_bits(
    kl: Mapping[int, float], perplexity_change: Mapping[int, float], threshold: float = ACCURACY_THRESHOLD
) -> int:
    """Return min_bits of a layer, from KL (nats) and change of perplexity (percent) by its bits.

    It is the lowest width whose perplexity rises by less than the threshold. The 4-bit KL (or the KL of the first
    measured width above) gives a floor. It is 4 bits under 0.02 nats, 6 up to 0.05, else 8. Below 4 bits the KL must
    also be under 0.02. If no width is good enough, it is the highest measured one.
    """
    widths = sorted(kl)
    at_four = kl[next((bits for bits in widths if bits >= 4), widths[-1])]
    floor = 0 if at_four < SAFE else 6 if at_four <= 0.05 else 8
    good = (
        bits
        for bits in widths
        if bits >= floor and (bits >= 4 or kl[bits] < SAFE) and perplexity_change.get(bits, 0.0) < threshold
    )
    return next(good, widths[-1])


def fitted_to(
    manifest: PrecisionManifest, model: nn.Module, format: Format | None = None
) -> tuple[PrecisionManifest, list[Layer], list[str]]:
    """Return the manifest for a model, the layers with bits in it, and the paths of layers that it lacks.

    format: of the layers; None: the manifest's. Raises GearbxError for a different model, or one without its layers.
    """
    manifest.check_model(model_fingerprint(model))
    layers, _ = discover(model, manifest.manage, manifest.group_size, format or get_format(manifest.format))
    manifest, missing = manifest.fitted([layer.path for layer in layers])
    return manifest, layers, missing


def read_precision(file: Path) -> PrecisionManifest:
    """Return a precision manifest. Raises GearbxError for an unreadable file or an invalid field."""
    return read_as(file, lambda text: parse_precision(parse_json(text)), "a precision manifest", MAKE)


def parse_precision(content: Any) -> PrecisionManifest:
    """Return a precision manifest from the content of its JSON. Raises GearbxError as `read_precision`."""
    check_schema(content, "a precision manifest", MANIFEST_SCHEMA, MANIFEST_VERSION)
    made = typed(content, PrecisionManifest)
    made.check_tables()
    return made
