"""What a Metal kernel is made of: a text of metal/, and the macros that specialize it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


def definitions(macros: Mapping[str, object]) -> str:
    """The lines that define macros with these names and values."""
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


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
    """A kernel made of one text of metal/ and the macros that specialize it; fields as in `Kernel`."""

    text: str
    input_names: tuple[str, ...]
    macros: tuple[tuple[str, int], ...]
    strided: bool = False
    read_once: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "_".join(["gearbx", self.text, *(str(value) for _, value in self.macros)])

    @property
    def header(self) -> str:
        return definitions(dict(self.macros))
