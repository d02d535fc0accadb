"""Arrays over mapped safetensors files: no copies, and only pages in use take memory.

Native CPU kernels make such arrays. On other devices, and for arrays that are not aligned to their type, MLX reads
them. A loaded model knows its files (`Origin`), so that its kept gears can be found again.
"""

import atexit
import copy
import hashlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError, GearbxWarning
from ..files.unpacked import contents, state_and_contents, state_of
from ..kernels import cpu
from ..kernels.dispatch import on_cpu
from .adapters import base_arrays
from .tensor_files import TYPE_NAMES, header_of

TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
ORIGIN = "origin"  # attribute of a model that has the weights of files
_mapped: dict[Path, Sequence[Any]] = {}  # files to their states when they were mapped


@dataclass(frozen=True)
class Known:
    """An array of a file. An edit in place keeps the Python object and gives it other memory.

    before: shares the memory of the file's array, so that MLX does not reuse that memory for an edit's result.
    """

    array: "weakref.ref[mx.array]"
    before: mx.array
    is_mapped: bool


_known: dict[int, Known] = {}  # by id()


def note_array(array: mx.array, is_mapped: bool) -> None:
    """Remember an array as it is now, until its Python object ends."""
    key = id(array)
    _known[key] = Known(weakref.ref(array, lambda _: _known.pop(key, None)), copy.copy(array), is_mapped)


def is_unedited(array: mx.array) -> bool:
    """Return whether an array of `note_array` was not edited in place since then."""
    known, kernels = _known.get(id(array)), mapping_kernels()
    return known is not None and (kernels is None or kernels.is_same(array, known.before))


def is_mapped(array: mx.array) -> bool:
    return is_unedited(array) and _known[id(array)].is_mapped


def mapping_kernels() -> ModuleType | None:
    """Return the native kernels, if MLX computes on the CPU and they are already compiled."""
    return cpu.native() if on_cpu() and cpu.is_compiled() else None


def load_arrays(file: str | Path) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file, mapped if possible, else unread. Raises RuntimeError as MLX."""
    kernels = mapping_kernels()
    if kernels is not None:
        with suppress(GearbxError, OSError):  # no such file, or a damaged one: MLX raises
            return dict(mapped(kernels, Path(file)))
    return cast(dict[str, mx.array], mx.load(str(file)))


def mapped(kernels: ModuleType, path: Path) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of a safetensors file by their names. Raises OSError and GearbxError as `header_of`."""
    header, unread = header_of(path), dict[str, mx.array]()
    with open(path, "rb") as file:
        for name, entry in header.entries.items():
            offset = header.start + entry.data_offsets[0]
            try:
                yield name, map_array(kernels, file.fileno(), offset, entry.shape, TYPES[entry.dtype])
            except (KeyError, ValueError):
                unread = unread or cast(dict[str, mx.array], mx.load(str(path)))
                yield name, unread[name]


def map_array(kernels: ModuleType, file: int, offset: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an array of an open file, mapped. Raises ValueError for a place that is not on the bounds of its type."""
    array: mx.array = kernels.map_array(file, offset, shape, dtype)
    note_array(array, is_mapped=True)
    return array


def forget(array: mx.array) -> None:
    """Release the pages of a mapped array; its next use reads them again. Other and edited arrays are not affected."""
    kernels = mapping_kernels()
    if kernels is not None and is_mapped(array):
        kernels.forget_pages(array)


def mapped_bytes() -> int:
    """Return the bytes of all mapped arrays; MLX does not count them as memory."""
    return sum(known.before.nbytes for known in list(_known.values()) if known.is_mapped)


def active_memory() -> int:
    """Return the bytes of MLX's arrays, including mapped ones."""
    return mx.get_active_memory() + mapped_bytes()


@dataclass(frozen=True)
class Origin:
    """The files of a model's weights.

    states: of each file when it was read. arrays: as they were loaded, by name.
    """

    states: Mapping[Path, Sequence[Any]]
    arrays: Mapping[str, "weakref.ref[mx.array]"]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self.states)

    def sampled(self) -> str:
        """Return 64 hexadecimal digits of names, types and shapes, and of the middle of every array."""
        return sampled(self.states)

    def whole(self) -> str:
        """Return 64 hexadecimal digits of all bytes. Raises GearbxError for files that changed since they were read."""
        found = {path: state_and_contents(path) for path in sorted(self.states)}
        for path, state in self.states.items():
            if found[path][0] != state:
                raise GearbxError(f"{path}: changed while it was in use; start again")
        return hashlib.sha256(" ".join(whole for _, whole in found.values()).encode()).hexdigest()


def sampled(files: Iterable[Path]) -> str:
    """Return 64 hexadecimal digits of files of weights, as `Origin.sampled`."""
    return hashlib.sha256(" ".join(map(sample_of, sorted(files))).encode()).hexdigest()


def sample_of(path: Path) -> str:
    """Return 64 hexadecimal digits of the middle of every array of safetensors; of all bytes of other files."""
    return header_of(path).hash if path.suffix == ".safetensors" else contents(path)


def note_mapped(states: Mapping[Path, Sequence[Any]]) -> None:
    """Remember the states of files that are mapped from now on, for `warn_of_changes`."""
    _mapped.update(states)


def into_memory(model: nn.Module) -> None:
    """Copy the mapped arrays of a model into memory, in large pages if the system has some.

    A 16-bit token of SmolLM2 then takes 0.87 of the time: files are mapped in pages of 4 KB. So this is for weights
    that each token reads, and not for originals from which gears are made.
    """
    places = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.items()
        if isinstance(value, mx.array) and is_mapped(value)
    ]
    kernels, mapped_arrays = mapping_kernels(), [*{id(value): value for _, _, value in places}.values()]
    if kernels is None or not places:
        return
    copies = dict(zip(map(id, mapped_arrays), kernels.in_large_pages(mapped_arrays)))
    for module, name, value in places:
        module[name] = copies[id(value)]
    origin: Origin | None = getattr(model, ORIGIN, None)
    if origin is not None:
        set_origin(model, origin.states)


@atexit.register
def warn_of_changes() -> None:
    """Warn of files that were modified after they were mapped; replacing a file is safe."""
    for path, state in _mapped.items():
        with suppress(OSError):
            now = state_of(path)
            if now[:3] == state[:3] and now[3:5] != state[3:5]:  # the same file, with a new size or time
                message = f"{path}: was modified while it was in use, so the output may be wrong; start again"
                warnings.warn(message, GearbxWarning, stacklevel=2)
    _mapped.clear()


def set_origin(model: nn.Module, states: Mapping[Path, Sequence[Any]]) -> None:
    """Record that the current weights of a model come from files in these states."""
    arrays = {}
    for name, array in base_arrays(model).items():
        if not is_unedited(array):
            note_array(array, is_mapped=False)
        arrays[name] = weakref.ref(array)
    setattr(model, ORIGIN, Origin(states, arrays))


def origin_of(model: nn.Module) -> Origin | None:
    """Return the files of a model's weights; None if a weight was replaced or edited since it was loaded."""
    origin: Origin | None = getattr(model, ORIGIN, None)
    if origin is None:
        return None
    now = base_arrays(model)
    same = now.keys() == origin.arrays.keys() and all(
        origin.arrays[name]() is array and is_unedited(array) for name, array in now.items()
    )
    return origin if same else None
