"""What a Metal kernel is made of: a text of metal/, and the macros that specialize it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..errors import GearbxError

CODES = 16  # codes that a lane reads at a time
TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}  # MLX's names for them in a text
UNROLL = '_Pragma("clang loop unroll(full)")'  # arrays that a lane indexes in a loop stay in registers only then
UNREAD = re.compile(r"[ \t]*//[^\n]*|[ \t]+(?=\\\n)")  # comments, and spaces before the end of a macro's line


def source_text(name: str) -> str:
    """The text of metal/<name>.metal."""
    file = metal_folder() / f"{name}.metal"
    if not file.is_file():
        raise GearbxError(f"metal/{name}.metal is missing from this installation; install gearbx-mlx again")
    return file.read_text(encoding="utf-8")


def metal_folder() -> Path:
    """The folder of the kernels' texts: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next((each for each in (package / "metal", package.parent / "metal") if each.is_dir()), package / "metal")


def without_comments(text: str) -> str:
    """The same program in fewer bytes: MLX copies and hashes the text of a kernel at each launch."""
    return "\n".join(line for line in UNREAD.sub("", text).splitlines() if line.strip()) + "\n"


def definitions(macros: Mapping[str, object], dtype: mx.Dtype) -> str:
    """The lines that define UNROLL, macros with these names and values, and T, the type of activations and result.

    Template arguments could say the same, but MLX writes those anew at each launch.
    """
    defined = "".join(f"#define {name} {value}\n" for name, value in ({"UNROLL": UNROLL} | dict(macros)).items())
    return f"{defined}using T = {TYPES[dtype]};\n"


class Kernel(Protocol):
    """What `metal.build` needs of a kernel.

    name: unique, because MLX finds compiled kernels by name and types. text: its file in metal/. strided: whether it
    reads inputs by their strides, so that MLX does not copy those that are not contiguous. read_once: buffers of which
    a launch reads no byte twice.
    """

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def strided(self) -> bool: ...
    @property
    def input_names(self) -> Sequence[str]: ...
    @property
    def header(self) -> str: ...
    @property
    def read_once(self) -> Sequence[str]: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TextKernel:
    """A kernel made of one text of metal/, its T and the macros that specialize it; other fields as in `Kernel`.

    library: a second text of metal/, with functions that the first one calls; "" for none.
    """

    text: str
    dtype: mx.Dtype
    input_names: tuple[str, ...]
    macros: tuple[tuple[str, int], ...]
    strided: bool = False
    read_once: tuple[str, ...] = ()
    library: str = ""

    @property
    def name(self) -> str:
        return "_".join(["gearbx", self.text, TYPES[self.dtype], *(str(value) for _, value in self.macros)])

    @property
    def header(self) -> str:
        return definitions(dict(self.macros), self.dtype) + (source_text(self.library) if self.library else "")


@dataclass(frozen=True)
class Layout:
    """How a matrix is packed, as buffers and macros of metal/matvec.metal.

    name: unique. bits: of a code, all planes together. arrays: names of the buffers. macros: names and values.
    codes: that a lane reads at a time. tables: how many codebooks a threadgroup reads, if any.
    """

    name: str
    bits: int
    arrays: tuple[str, ...]
    macros: tuple[tuple[str, object], ...]
    codes: int = CODES
    tables: object = 0
