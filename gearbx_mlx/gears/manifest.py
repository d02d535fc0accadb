"""gears.json: the description of the gears in a geared checkpoint, beside a model that stock mlx-lm reads."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ..errors import GearbxError
from ..files.problems import shown
from ..files.reading import parse_json, read_as, read_json, typed
from ..formats import get_format
from .discovery import MANAGE, at_least
from .ladder import DENSE, Ladder
from .values import DtypeName, Fingerprint, GroupSize, Shape, Width

VERSION = 2  # 1 had no hashes
GEARS_FILE, MANIFEST = "gears.safetensors", "gears.json"
WHAT = "a manifest of gears"
RESTORE = "download it again, or make it anew with python -m gearbx_mlx.convert"

FileName = Annotated[str, Meta(pattern=r"^[\w-][\w.-]*\.safetensors\Z")]  # inside the directory, and not hidden
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal["linear", "switch", "multi", "embedding"]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class SavedLayer(Struct, frozen=True):
    """One managed layer.

    shape, dtype: of the original weight. lowest_bits: its floor. gears: bits to the arrays of that gear's module: the
    names of its parameters, its bias aside, to their names in the files.

    Raises:
        GearbxError: fields that contradict each other.
    """

    kind: Kind
    shape: Shape
    dtype: DtypeName
    lowest_bits: Annotated[int, Meta(ge=0, le=DENSE)]
    gears: Annotated[Mapping[Width, Mapping[str, str]], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if (len(self.shape) == 3) != (self.kind in ("switch", "multi")):
            raise GearbxError(f"shape has {len(self.shape)} lengths, which kind {self.kind} does not allow")
        if self.kind == "embedding" and DENSE not in self.gears:
            raise GearbxError(f"gears has no key {DENSE}, which an embedding needs")

    @property
    def stored(self) -> tuple[int, ...]:
        """Bits of the quantized gears, ascending."""
        return tuple(sorted(bits for bits in self.gears if bits != DENSE))


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of gears.json.

    format, gears, group_size, manage: as the Gearbox takes them; gears are bits, ascending. dtype: that most of the
    original is in. fingerprint: of the original model. stock: whether mlx-lm can run the base.
    base: hash of every file of the base. layers: by path. unmanaged: path to reason. hashes: SHA-256 of every array in
    the files, by name. gears_hash: of gears.safetensors, as in `base`. Version 1 lacks the last two.
    """

    format: str
    gears: tuple[Width, ...]
    group_size: GroupSize
    manage: str
    dtype: DtypeName
    fingerprint: Fingerprint
    stock: bool
    base: Annotated[Mapping[FileName, Hash], Meta(min_length=1)]
    layers: Annotated[Mapping[str, SavedLayer], Meta(min_length=1)]
    unmanaged: Mapping[str, str] = {}
    hashes: Mapping[str, Hash] = {}
    gears_hash: Hash | None = None
    version: int = VERSION

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.gears)

    def chosen(self, gears: str | Ladder | None) -> Ladder:
        """Some of the gears, or all.

        Raises:
            GearbxError: one that the checkpoint does not have.
        """
        if gears is None:
            return self.ladder
        ladder = gears if isinstance(gears, Ladder) else Ladder.parse(gears)
        for gear in ladder:
            if gear.bits not in self.gears:
                choices = ", ".join(map(str, self.gears))
                raise GearbxError(f"the checkpoint holds no gear of {gear.bits} bits; choose from {choices}")
        return ladder

    def as_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1)

    def check(self) -> None:
        """Raises GearbxError for fields that contradict each other."""
        format = get_format(self.format)
        if self.manage not in MANAGE:
            raise GearbxError(f"manage '{self.manage}' is not one of {', '.join(MANAGE)}")
        for path, layer in self.layers.items():
            place = f"layers[{shown(path)}]"
            misfit = format.fits(layer.shape[-1], self.group_size) if layer.stored else None
            if misfit:
                raise GearbxError(f"{place}.shape is {list(layer.shape)}: {misfit}")
            for bits in layer.stored:
                format.check(bits)
            check_widths(place, layer, self.ladder)


def check_widths(place: str, layer: SavedLayer, ladder: Ladder) -> None:
    """Raises GearbxError unless a layer has the bits of every gear, or the next above its floor, and no others."""
    widths = sorted(layer.gears)
    served = {DENSE} if layer.kind == "embedding" else set()
    for gear in ladder:
        needed = at_least(widths, max(gear.bits, layer.lowest_bits))
        if needed not in widths or (layer.lowest_bits <= gear.bits != needed):
            raise GearbxError(f"{place}.gears has no key {gear.bits}, which is among the gears")
        served.add(needed)
    if served != {*widths}:
        raise GearbxError(f"{place}.gears has the key {min({*widths} - served)}, which no gear uses")


class Version(Struct, frozen=True):
    """The field of gears.json that says how to read the others."""

    version: Annotated[int, Meta(ge=1)]


def read_manifest(directory: Path) -> Manifest | None:
    """gears.json of a directory; None where there are no gears.

    Raises:
        GearbxError: it is missing beside gears.safetensors, of a newer version, or not what it should be.
    """
    file = directory / MANIFEST
    if not os.path.lexists(file):
        if os.path.lexists(directory / GEARS_FILE):
            raise GearbxError(f"{file}: missing beside {GEARS_FILE}; {RESTORE}")
        return None
    version = read_json(file, Version, WHAT, RESTORE).version
    if version > VERSION:
        raise GearbxError(
            f"{file}: of version {version}, and this gearbx-mlx reads up to {VERSION}; upgrade gearbx-mlx"
        )
    return read_as(file, lambda text: parse_manifest(parse_json(text)), WHAT, RESTORE)


def parse_manifest(content: Any) -> Manifest:
    """A manifest from the content of its JSON. Raises GearbxError for a field that is missing or cannot be."""
    manifest = typed(content, Manifest)
    manifest.check()
    return manifest
