"""The part of gears.json that says what a model was converted from, so that `convert --restore` can write it back."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from ..files.reading import Count
from .values import Hash

ORIGINAL_FILE = "original.safetensors"  # of the original, what the model's parameters do not contain

# Of a file inside a directory: not hidden, and without slashes, control characters and bytes that are not UTF-8.
NAME = r"[^/\\\x00-\x1f\ud800-\udfff.][^/\\\x00-\x1f\ud800-\udfff]*"
PlainName = Annotated[str, Meta(pattern=rf"^{NAME}\Z", max_length=255)]
ShardName = Annotated[str, Meta(pattern=rf"^{NAME}\.safetensors\Z", max_length=255)]
if TYPE_CHECKING:
    Axis = int
else:
    Axis = Literal[-1, -2]


class View(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bytes of a parameter of the model, or of a part of it.

    matrix: which one of those along the last two axes; None: all. transposed: each with its last two axes exchanged.
    """

    parameter: str
    matrix: Count | None = None
    transposed: bool = False


class Tensor(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of the original.

    hash: the SHA-256 of its bytes. pieces: what they are; none: `original.safetensors` has them. Several pieces are
    equal, and side by side along `axis`, or take turns there if `interleaved`.
    """

    hash: Hash
    pieces: Annotated[tuple[View, ...], Meta(max_length=128)] = ()
    axis: Axis = -1
    interleaved: bool = False


class Shard(Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file of the original. header: the SHA-256 of its header. tensors: by name."""

    header: Hash
    tensors: Mapping[str, Tensor]


class Original(Struct, frozen=True, forbid_unknown_fields=True):
    """The files that a checkpoint was converted from, by name.

    shards: those with weights. files: the SHA-256 of the others. kept: those of them that `original.safetensors` has;
    the others are copies beside it.
    """

    shards: Annotated[Mapping[ShardName, Shard], Meta(min_length=1)]
    files: Mapping[PlainName, Hash]
    kept: tuple[PlainName, ...] = ()


def is_plain(name: str) -> bool:
    """Whether a file of this name can come back."""
    return re.fullmatch(NAME, name) is not None


def header_key(shard: str) -> str:
    """The name in `original.safetensors` of a shard's header."""
    return f"header/{shard}"


def tensor_key(shard: str, tensor: str) -> str:
    """That of a tensor."""
    return f"tensor/{shard}/{tensor}"


def file_key(name: str) -> str:
    """That of another file."""
    return f"file/{name}"
