"""gears.json: the description of the gears in a geared checkpoint, beside a model that stock mlx-lm reads.

A part of it describes the model before conversion, so that `convert --restore` can write that back. msgspec validates
values when it reads them; type checkers see plain numbers and text.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..errors import GearbxError, check_choice
from ..files.reading import Count, parse_json, read_as, read_json, shown, typed
from ..formats import LIKE_MLX, SPLIT_CODES, get_format
from ..formats.base import Format, check_supported, stored_bits
from ..kernels import GROUP_SIZES
from .discovery import PREDICATES, at_least
from .ladder import DENSE, DTYPE_NAMES, WIDTHS, Ladder

Length = Annotated[int, Meta(ge=1, le=2**53)]
Shape = Annotated[tuple[Length, ...], Meta(min_length=2, max_length=3)]  # (O, I) of a matrix, (E, O, I) of experts
FileName = Annotated[str, Meta(pattern=r"^[\w-][\w.-]*\.safetensors\Z")]  # inside the directory, and not hidden
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

if TYPE_CHECKING:
    Width = int
    GroupSize = int
    Axis = int
    DtypeName = str
    LayerKind = str
else:
    Width, GroupSize, DtypeName, Axis = Literal[WIDTHS], Literal[GROUP_SIZES], Literal[DTYPE_NAMES], Literal[-1, -2]
    LayerKind = Literal["linear", "switch", "multi", "embedding", "table"]


ORIGINAL_FILE = "original.safetensors"  # parts of the original that the model's parameters do not contain

# A file inside a directory: not hidden, and without slashes, control characters and bytes that are not UTF-8.
NAME_PATTERN = r"[^/\\\x00-\x1f\ud800-\udfff.][^/\\\x00-\x1f\ud800-\udfff]*"
PlainName = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}\Z", max_length=255)]
ShardName = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}\.safetensors\Z", max_length=255)]


class View(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bytes of a parameter of the model, or of a part of it.

    matrix: index of one along the last two axes; None: all. transposed: each with its last two axes exchanged.
    """

    parameter: str
    matrix: Count | None = None
    transposed: bool = False


class Tensor(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of the original.

    hash: the SHA-256 of its bytes. pieces: views with its bytes; none: `original.safetensors` has them. Several pieces
    are equal, and side by side along `axis`, or alternate there if `interleaved`.
    """

    hash: Hash
    pieces: Annotated[tuple[View, ...], Meta(max_length=128)] = ()
    axis: Axis = -1
    interleaved: bool = False


class OriginalShard(Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file of the original. header: the SHA-256 of its header. tensors: by name."""

    header: Hash
    tensors: Mapping[str, Tensor]


class OriginalModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The files of the original, by name.

    shards: files with weights. files: the SHA-256 of the others. kept: other files inside `original.safetensors`;
    the rest are copies next to it.
    """

    shards: Annotated[Mapping[ShardName, OriginalShard], Meta(min_length=1)]
    files: Mapping[PlainName, Hash]
    kept: tuple[PlainName, ...] = ()


def is_plain(name: str) -> bool:
    """Return True if a file of this name can be restored."""
    return re.fullmatch(NAME_PATTERN, name) is not None


GEARS_VERSION = 4
GEARS_FILE, MANIFEST = "gears.safetensors", "gears.json"
PRECISION = "precision.json"  # a precision manifest: order and limits of caps
WHAT = "a manifest of gears"
RESTORE = "download it again, or make it again with gearbx_mlx convert"


class SavedLayer(Struct, frozen=True):
    """One managed layer. Raises GearbxError for fields that contradict each other.

    kind: embedding: a tied output head; table: any other embedding. shape, dtype: of the original weight.
    lowest_bits: its floor. gears: bits to the arrays of that gear's module: its parameters' names, except the bias, to
    names in the files. rows: for embeddings, the bits of the gear that reads its own packed rows; other gears read the
    rows of the highest gear (the original ones, or all codes of a quantized checkpoint). 16: no gear has its own rows.
    """

    kind: LayerKind
    shape: Shape
    dtype: DtypeName
    lowest_bits: Annotated[int, Meta(ge=0, le=DENSE)]
    gears: Annotated[Mapping[Width, Mapping[str, str]], Meta(min_length=1)]
    rows: Width = DENSE

    def __post_init__(self) -> None:
        if (len(self.shape) == 3) != (self.kind in ("switch", "multi")):
            raise GearbxError(f"shape has {len(self.shape)} lengths, not allowed for kind {self.kind}")
        if self.rows not in (DENSE, min(self.gears)) or (self.rows != DENSE and not self.is_looked_up):
            raise GearbxError(f"rows is {self.rows}, which is only for embeddings with that lowest key of gears")

    @property
    def is_looked_up(self) -> bool:
        """Flag for embeddings."""
        return self.kind in ("embedding", "table")

    def rows_at(self, bits: int) -> int:
        """Return the bits of the embedding rows that are read in the gear of these bits."""
        return bits if bits == self.rows else max(self.gears)

    @property
    def looked_up(self) -> set[int]:
        """The bits of all embedding rows that some gear reads."""
        return {self.rows_at(bits) for bits in self.gears} if self.is_looked_up else set()


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of gears.json.

    format, gears, group_size, manage: as in `Gearbox`; gears are bits, ascending. dtype: the original's most common
    type. fingerprint: of the original model. stock: True if mlx-lm can run the base.
    base: hash of every file of the base. layers: by path. tables: embeddings with packed rows that are not layers, by
    path; they have affine arrays in every format. unmanaged: path to reason. hashes: SHA-256 of every array in
    the files, by name. gears_hash: of gears.safetensors, as in `base`. original: the files before conversion, in
    format `exact`.
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
    hashes: Mapping[str, Hash]
    gears_hash: Hash
    tables: Mapping[str, SavedLayer] = {}
    unmanaged: Mapping[str, str] = {}
    original: OriginalModel | None = None
    version: int = GEARS_VERSION

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.gears)

    @property
    def changing(self) -> dict[str, SavedLayer]:
        """Everything that changes with the gear, by path: layers and tables."""
        return {**self.layers, **self.tables}

    def place_of(self, path: str) -> str:
        """Return the location of a layer or a table in gears.json."""
        return f"{'tables' if path in self.tables else 'layers'}[{shown(path)}]"

    def format_of(self, path: str) -> Format:
        """Return the format of a layer or a table."""
        own = get_format(self.format)
        return get_format("affine") if path in self.tables and not own.ladders else own

    def stored(self, path: str) -> tuple[int, ...]:
        """Return the bits of a layer or table that its format stores, ascending; other bits are the original's."""
        return stored_bits(self.format_of(path), sorted(self.changing[path].gears))

    def chosen(self, gears: str | Ladder | None) -> Ladder:
        """Return some of the gears, or all. Raises GearbxError for a gear that the checkpoint lacks."""
        if gears is None:
            return self.ladder
        ladder = gears if isinstance(gears, Ladder) else Ladder.parse(gears)
        for gear in ladder:
            if gear.bits not in self.gears:
                choices = ", ".join(map(str, self.gears))
                raise GearbxError(f"the checkpoint has no {gear.bits}-bit gear; choose from {choices}")
        return ladder

    def as_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1)

    def check(self) -> None:
        """Validate fields against each other. Raises GearbxError."""
        check_supported(get_format(self.format), self.gears)
        check_choice("manage", self.manage, PREDICATES)
        for field, found in {"layers": self.layers, "tables": self.tables}.items():
            for path, layer in found.items():
                if (layer.kind == "table") != (field == "tables"):
                    raise GearbxError(f"{field}[{shown(path)}].kind is {layer.kind}, which is not allowed there")
        for path, layer in self.changing.items():
            place = self.place_of(path)
            format = self.format_of(path)
            quantized = sorted(layer.gears.keys() - {DENSE})
            misfit = format.fits(layer.shape[-1], self.group_size) if quantized else None
            if misfit:
                raise GearbxError(f"{place}.shape is {list(layer.shape)}: {misfit}")
            if layer.rows != DENSE and format.name not in LIKE_MLX:
                raise GearbxError(f"{place}.rows is {layer.rows}, and format {format.name} has no packed rows")
            for bits in quantized:
                format.check(bits)
            if format.name != SPLIT_CODES and layer.looked_up - {layer.rows, DENSE}:
                raise GearbxError(f"{place}.gears has no key {DENSE}, which an embedding needs")
            check_widths(place, layer, self.ladder)


def check_widths(place: str, layer: SavedLayer, ladder: Ladder) -> None:
    """Validate that a layer has exactly the bits of every gear, or the next above its floor. Raises GearbxError."""
    widths = sorted(layer.gears)
    served = layer.looked_up
    for gear in ladder:
        needed = at_least(widths, max(gear.bits, layer.lowest_bits))
        exact = layer.kind != "table"  # a table has the original rows in every gear but the lowest
        if needed not in widths or (exact and layer.lowest_bits <= gear.bits != needed):
            missing = gear.bits if exact else needed
            raise GearbxError(f"{place}.gears has no key {missing}, which the {gear.bits}-bit gear needs")
        served.add(needed)
    if served != {*widths}:
        raise GearbxError(f"{place}.gears has the key {min({*widths} - served)}, which no gear uses")


class ManifestVersion(Struct, frozen=True):
    """The field of gears.json that determines the meaning of the others."""

    version: Annotated[int, Meta(ge=1)]


def read_manifest(directory: Path) -> Manifest | None:
    """Return gears.json of a directory; None without gears. Raises GearbxError if it is missing or damaged."""
    file = directory / MANIFEST
    if not os.path.lexists(file):
        if os.path.lexists(directory / GEARS_FILE):
            raise GearbxError(f"{file}: missing beside {GEARS_FILE}; {RESTORE}")
        return None
    version = read_json(file, ManifestVersion, WHAT, RESTORE).version
    if version != GEARS_VERSION:
        remedy = "upgrade gearbx-mlx" if version > GEARS_VERSION else "convert the original again"
        raise GearbxError(f"{file}: unsupported version, got {version} instead of {GEARS_VERSION}; {remedy}")

    def parse(text: str) -> Manifest:
        manifest = typed(parse_json(text), Manifest)
        manifest.check()
        return manifest

    return read_as(file, parse, WHAT, RESTORE)
