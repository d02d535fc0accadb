"""The precision manifest: what every layer's precision costs, the range that it may have, and tables of gears.

A JSON file, described by precision.schema.json beside this module.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import GearbxError, about
from ..formats import get_format
from ..formats.base import Format
from ..gears.attachment import model_fingerprint
from ..gears.discovery import Layer, discover
from ..gears.ladder import DENSE, SUPPORTED, WIDTHS, Ladder

SCHEMA, VERSION = "gearbx-mlx precision", 1
SCHEMA_FILE = Path(__file__).parent / "precision.schema.json"
EXACT, FIRST_ORDER = "exact", "first order"
# The manifest document: bits whose perplexity changes by less may be used; by the KL at 4 bits, 4, 6 or 8 are wanted.
PERPLEXITY_BOUND = 0.5  # percent
SAFE, CAREFUL = 0.02, 0.05  # nats
MAKE = "make a new one with python -m gearbx_mlx.sensitivity"


@dataclass(frozen=True)
class LayerPrecision:
    """One managed layer.

    kind: its class (attention, mlp, shared, routed, head). weights: how many. min_bits, max_bits: its range; 16 is
    the weight as it is. kl: bits to KL of the model in which it alone has them, nats per token. perplexity_change: in
    percent, likewise; empty where it was not measured. outliers: 99.9th percentile of |w| over sigma, a Gaussian's is
    3.29. clamp: what its weights are cut to before they are quantized. kl_clamped: the KL with that clamp, where tried.
    """

    kind: str
    weights: int
    min_bits: int
    max_bits: int
    kl: Mapping[int, float]
    perplexity_change: Mapping[int, float] = field(default_factory=dict)
    outliers: float | None = None
    clamp: float | None = None
    kl_clamped: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Bits of every layer in one gear; wish: what they were to meet. bits_per_weight: as read, scales included.
    kl (nats per token), perplexity_change (percent): measured, of the whole model; sum_of_parts: of the layers' KLs."""

    bits: Mapping[str, int]
    wish: str
    bits_per_weight: float
    kl: float
    perplexity_change: float
    sum_of_parts: float


@dataclass(frozen=True)
class PrecisionManifest:
    """Everything that the file says.

    method: "exact" or "first order". model: its name; fingerprint: of its weights. calibration: hash of the text's
    tokens; tokens: how many were predicted. format, group_size, manage: as the Gearbox takes them; bits: its widths.
    perplexity: at full precision. gears: bits of a gear of the ladder to its table. cost: what measuring took, as parts
    of passes that compute everything.
    """

    method: str
    model: str
    fingerprint: str
    calibration: str
    tokens: int
    format: str
    group_size: int
    manage: str
    bits: tuple[int, ...]
    perplexity: float | None
    layers: Mapping[str, LayerPrecision]
    gears: Mapping[int, Table] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    schema: str = SCHEMA
    version: int = VERSION

    @property
    def clamps(self) -> dict[str, float]:
        return {path: layer.clamp for path, layer in self.layers.items() if layer.clamp is not None}

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Path to range."""
        return {path: (layer.min_bits, layer.max_bits) for path, layer in self.layers.items()}

    def sensitivity(self, path: str, bits: int) -> float:
        """The KL of a layer at any width: where it was not measured, fourfold for every bit below the nearest.

        Nothing at 16 bits. A layer that is not known costs more than any other.
        """
        if bits == DENSE:
            return 0.0
        if path not in self.layers:
            return 1 + max(layer.kl[min(layer.kl)] for layer in self.layers.values())
        kl = self.layers[path].kl
        nearest = min(kl, key=lambda width: abs(width - bits))
        return kl[nearest] * 4.0 ** (nearest - bits)

    def as_json(self) -> str:
        content = dataclasses.asdict(self)
        content["layers"] = {
            path: {"class" if key == "kind" else key: value for key, value in layer.items()}
            for path, layer in content["layers"].items()
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def tables(self, ladder: Ladder) -> dict[str, dict[str, int]]:
        """What a Gearbox takes: names of the ladder's gears to their tables, where there are some."""
        return {gear.name: dict(self.gears[gear.bits].bits) for gear in ladder if gear.bits in self.gears}

    def check_model(self, fingerprint: str) -> None:
        """Raises GearbxError unless it was made for this model."""
        if self.fingerprint != fingerprint:
            raise GearbxError(f"made for another model ({self.model}), whose weights are not these; {MAKE}")

    def fitted(self, paths: Iterable[str]) -> tuple["PrecisionManifest", list[str]]:
        """The manifest for a model with these managed layers, and those of them that it does not know.

        A missing layer stays at the top: its full precision in every gear.

        Raises:
            GearbxError: it has a layer that the model does not have, or that does not change gear.
        """
        paths = list(paths)
        unknown = sorted(self.layers.keys() - {*paths})
        if unknown:
            raise GearbxError(f"has {unknown[0]}, which is no layer of this model that changes gear; {MAKE}")
        missing = [path for path in paths if path not in self.layers]
        top = dict.fromkeys(missing, DENSE)
        gears = {bits: dataclasses.replace(table, bits={**top, **table.bits}) for bits, table in self.gears.items()}
        return dataclasses.replace(self, gears=gears), missing


def least_bits(kl: Mapping[int, float], perplexity_change: Mapping[int, float]) -> int:
    """min_bits by the rules of the manifest document.

    The lowest width whose perplexity rises by less than 0.5 %, but not below what the KL at 4 bits (or the first
    measured width above) says: under 0.02 nats 4 are safe, up to 0.05 it wants 6, above that it stays at 8. Below 4
    bits the KL has to be under 0.02 as well. Where no width is good enough, the highest that was measured.
    """
    widths = sorted(kl)
    at_four = kl[next((bits for bits in widths if bits >= 4), widths[-1])]
    floor = 0 if at_four < SAFE else 6 if at_four <= CAREFUL else 8
    good = (
        bits
        for bits in widths
        if bits >= floor and (bits >= 4 or kl[bits] < SAFE) and perplexity_change.get(bits, 0.0) < PERPLEXITY_BOUND
    )
    return next(good, widths[-1])


def fit(
    manifest: PrecisionManifest, model: nn.Module, format: Format | None = None
) -> tuple[PrecisionManifest, list[Layer], list[str]]:
    """The manifest for a model, the layers whose bits it says, and the paths of those that it does not know.

    Args:
        format: what the layers are to be stored in. Default: the manifest's.

    Raises:
        GearbxError: it is another model's, or has a layer that this one does not have.
    """
    manifest.check_model(model_fingerprint(model))
    layers, _ = discover(model, manifest.manage, manifest.group_size, format or get_format(manifest.format))
    manifest, missing = manifest.fitted([layer.path for layer in layers])
    return manifest, layers, missing


def read_precision(file: Path) -> PrecisionManifest:
    """A precision manifest.

    Raises:
        GearbxError: it cannot be read, is of another schema or version, or says something that cannot be.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise GearbxError(f"{file}: cannot be read as a precision manifest ({error}); {MAKE}") from error
    with about(file):
        return parse_precision(content)


def parse_precision(content: Any) -> PrecisionManifest:
    """From what JSON holds. Raises GearbxError as read_precision."""
    if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
        raise GearbxError(f"is no precision manifest: its schema is not '{SCHEMA}'; {MAKE}")
    if content.get("version") != VERSION:
        raise GearbxError(f"is of version {content.get('version')}, and this gearbx-mlx reads {VERSION}; {MAKE}")
    try:
        layers = {path: parse_layer(path, layer) for path, layer in content["layers"].items()}
        gears = {int(bits): parse_table(bits, table, layers) for bits, table in content.get("gears", {}).items()}
        made = PrecisionManifest(
            method=str(content["method"]),
            model=str(content["model"]),
            fingerprint=str(content["fingerprint"]),
            calibration=str(content["calibration"]),
            tokens=int(content["tokens"]),
            format=str(content["format"]),
            group_size=int(content["group_size"]),
            manage=str(content["manage"]),
            bits=tuple(map(width, content["bits"])),
            perplexity=content["perplexity"] and number("perplexity", content["perplexity"]),
            layers=layers,
            gears=gears,
            cost=dict(content.get("cost", {})),
        )
    except GearbxError:
        raise
    except KeyError as error:
        raise GearbxError(f"has no field {error}; {MAKE}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise GearbxError(f"is damaged ({type(error).__name__}: {error}); {MAKE}") from error
    if not layers:
        raise GearbxError(f"has no layers; {MAKE}")
    return made


def parse_layer(path: str, content: Mapping[str, Any]) -> LayerPrecision:
    def numbers(name: str) -> dict[int, float]:
        return {width(bits): number(f"{path}: {name} at {bits} bits", v) for bits, v in content.get(name, {}).items()}

    low, high = width(content["min_bits"]), width(content["max_bits"])
    if low > high:
        raise GearbxError(f"{path}: min_bits is {low} and max_bits {high}; give a range")
    kl = numbers("kl")
    if not kl or min(kl.values()) < 0:
        raise GearbxError(f"{path}: kl is {'missing' if not kl else 'negative'}; {MAKE}")
    clamp, outliers = content.get("clamp"), content.get("outliers")
    if clamp is not None and number(f"{path}: clamp", clamp) <= 0:
        raise GearbxError(f"{path}: clamp is {clamp}; give a size above 0, or null")
    return LayerPrecision(
        kind=str(content["class"]),
        weights=int(content["weights"]),
        min_bits=low,
        max_bits=high,
        kl=kl,
        perplexity_change=numbers("perplexity_change"),
        outliers=None if outliers is None else number(f"{path}: outliers", outliers),
        clamp=clamp,
        kl_clamped=numbers("kl_clamped"),
    )


def parse_table(gear: str, content: Mapping[str, Any], layers: Mapping[str, Any]) -> Table:
    bits = {path: width(value) for path, value in content["bits"].items()}
    unknown = sorted(bits.keys() - layers.keys())
    if unknown:
        raise GearbxError(f"the table of gear {gear} has {unknown[0]}, which is not among the layers; {MAKE}")
    figures = ("bits_per_weight", "kl", "perplexity_change", "sum_of_parts")
    return Table(bits, str(content["wish"]), *(number(f"gear {gear}: {name}", content[name]) for name in figures))


def width(value: Any) -> int:
    """Raises GearbxError for bits that no kernel reads."""
    if int(value) not in WIDTHS or isinstance(value, float | bool):
        raise GearbxError(f"has {value} bits; choose from {SUPPORTED}")
    return int(value)


def number(name: str, value: Any) -> float:
    """Raises GearbxError for what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GearbxError(f"{name} is {value}, which is no number; {MAKE}")
    return float(value)
