"""Residency: location of the arrays of idle gears (GEARBX 6.2, 6.3).

Weights are in pages of 2 MB: a processor finds them faster than pages of 4 KB. A token reads every weight once. On a
virtual machine, where page tables have two levels of lookups, 16-bit tokens of SmolLM2 take 1.3 times as long with
small pages. Linux provides large ones for memory that requests them before it is first written (`madvise`, if
/sys/kernel/mm/transparent_hugepage/enabled allows it). MLX takes an array's memory from `malloc`. So a piece of the
heap as large as the weights requests large pages, and is freed again to be reused for the weights.
"""

import contextlib
import copy
import ctypes
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GearbxError
from ..kernels.dispatch import on_cpu
from .ladder import DENSE
from .saved import SavedGears
from .weight_files import arrays_in, weight_files

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGE = 2 << 20  # bytes
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # parameters of mallopt
# Bytes from which an array is outside of the heap: the maximum to which glibc itself raises this threshold.
LARGE_BYTES = 32 << 20


@functools.cache
def glibc() -> Any:
    """Return the functions of glibc; None with other C libraries."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version, library.malloc_trim, library.mallopt  # noqa: B018 - musl has none of them
    except (AttributeError, OSError):
        return None
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = library.malloc_trim.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def has_large_pages() -> bool:
    """Return True if the system has large pages for memory that requests them."""
    try:
        return "[never]" not in SYSTEM.read_text(encoding="utf-8")
    except OSError:
        return False


@contextlib.contextmanager
def large_pages(size: int) -> Iterator[None]:
    """Put `size` bytes of the block's arrays into large pages, if the system has some.

    Unused memory is returned to the system at the end.
    """
    library = glibc() if on_cpu() and size >= PAGE and has_large_pages() else None
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)  # everything comes from the heap
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # otherwise the heap would shrink at once
    try:
        place = library.malloc(size + 2 * PAGE)  # NULL if it exceeds a limit of the process
        if place:
            first = -(-place // PAGE) * PAGE
            library.madvise(first, size, 14)  # MADV_HUGEPAGE
            library.free(place)
        yield
    finally:
        library.mallopt(M_MMAP_MAX, 2**16)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGE_BYTES)
        library.malloc_trim(0)


Key = tuple[str, int]  # path of a layer, bits of a gear
EMPTY = mx.zeros((0,))  # replaces a dropped array


def return_memory() -> None:
    """Return freed memory to the system.

    MLX keeps freed GPU memory for its next arrays, and glibc keeps it in its heap, whose size then never falls.
    """
    mx.clear_cache()
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


class Residency:
    """Residency of idle gears: drops their arrays, and restores them before use. This class keeps all in memory."""

    name = "resident"

    def leave(self, idle: Mapping[Key, nn.Module], model: nn.Module) -> None:
        """Drop the arrays of idle modules, except those that the model uses."""

    def enter(self, needed: Mapping[Key, nn.Module]) -> None:
        """Restore all arrays that `leave` dropped from these modules; if that fails, none."""


class Disk(Residency):
    """A residency that drops idle gears, and reads them again from files when they are entered."""

    name = "disk"

    def __init__(self, dtypes: Mapping[str, mx.Dtype]):
        self.dtypes = dtypes
        self._dropped: dict[Key, list[str]] = {}

    def has(self, key: Key) -> bool:
        """Return True if the files have the arrays of a gear."""
        return True

    def read(self, wanted: Mapping[Key, list[str]]) -> dict[Key, dict[str, mx.array]]:
        """Return the arrays of gears by their flat names, in memory."""
        raise NotImplementedError

    def leave(self, idle: Mapping[Key, nn.Module], model: nn.Module) -> None:
        in_use = arrays_in_use(model)
        idle = {key: module for key, module in idle.items() if self.has(key)}
        dropped = {key: names for key, module in idle.items() if (names := [*idle_parameters(module, in_use)])}
        for key, names in dropped.items():
            self._dropped.setdefault(key, []).extend(names)
            put_parameters(idle[key], dict.fromkeys(names, EMPTY))
        if dropped:
            return_memory()

    def enter(self, needed: Mapping[Key, nn.Module]) -> None:
        missing = {key: self._dropped[key] for key in needed if key in self._dropped}
        for key, arrays in (self.read(missing) if missing else {}).items():
            put_parameters(needed[key], arrays)
            del self._dropped[key]


class SavedDisk(Disk):
    """A residency that reads all gears from the files of a geared checkpoint.

    dtypes: path to the type of a layer's scales, and of its 16-bit weight.
    """

    def __init__(self, saved: SavedGears, dtypes: Mapping[str, mx.Dtype]):
        super().__init__(dtypes)
        self._saved = saved

    def read(self, wanted: Mapping[Key, list[str]]) -> dict[Key, dict[str, mx.array]]:
        back = {
            (path, bits): {name: self._saved.parameter(path, bits, name, self.dtypes[path]) for name in names}
            for (path, bits), names in wanted.items()
        }
        self._saved.read(back)
        return back


class OriginalDisk(Disk):
    """A residency that reads the dense originals from a checkpoint without gears; other gears stay in memory.

    model: its class's `sanitize` maps the names in the files to the names of the model. dtypes: path to the
    type of each layer's weights in memory. Raises GearbxError for files without these weights.
    """

    def __init__(self, model: nn.Module, checkpoint: str | Path | None, dtypes: Mapping[str, mx.Dtype]):
        super().__init__(dtypes)
        if checkpoint is None:
            raise GearbxError("residency 'disk' reads weights back from the checkpoint; pass checkpoint=its directory")
        self.directory = Path(checkpoint)
        # Some models change themselves in `sanitize` (a tied gemma3 drops its head), so it runs on a blank model.
        self._blank = type(model)(model.args) if hasattr(model, "args") else copy.deepcopy(model)
        self._blank.apply(lambda array: EMPTY)
        self._find(f"{path}.weight" for path in dtypes if path)

    def has(self, key: Key) -> bool:
        return key[1] == DENSE

    def read(self, wanted: Mapping[Key, list[str]]) -> dict[Key, dict[str, mx.array]]:
        stored = self._find(f"{path}.{name}" for (path, _), names in wanted.items() for name in names)
        back = {
            (path, bits): {name: stored[f"{path}.{name}"].astype(self.dtypes[path]) for name in names}
            for (path, bits), names in wanted.items()
        }
        try:
            mx.eval(list(back.values()))
        except RuntimeError as error:
            raise self._unreadable(error) from error
        return back

    def _find(self, names: Iterable[str]) -> dict[str, mx.array]:
        """Return the arrays of these names, unread."""
        if not weight_files(self.directory):
            raise GearbxError(
                f"{self.directory}: no model*.safetensors to read weights back from; restore the checkpoint"
            )
        try:
            weights = arrays_in(self.directory)
            if hasattr(self._blank, "sanitize"):
                weights = copy.deepcopy(self._blank).sanitize(weights)
            return {name: weights[name] for name in names}
        except KeyError as error:
            raise GearbxError(f"{self.directory}: {error} is not in the checkpoint; use residency resident") from error
        except (RuntimeError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GearbxError:
        return GearbxError(f"{self.directory}: weights cannot be read back ({error}); restore the checkpoint")


def arrays_in_use(model: nn.Module) -> set[int]:
    """Return id() of every current array of the model."""
    return {id(array) for _, array in tree_flatten(model.parameters())}


def idle_parameters(module: nn.Module, in_use: set[int]) -> dict[str, mx.array]:
    """Return flat name to array of a module's arrays that the model does not use, without dropped ones."""
    return {name: a for name, a in tree_flatten(module.parameters()) if a.size and id(a) not in in_use}


def put_parameters(module: nn.Module, arrays: Mapping[str, mx.array]) -> None:
    """Set parameters by their flat names, such as weights.1. (`Module.update` cannot set a part of a list.)"""
    for name, array in arrays.items():
        holder: Any = module
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        for part in path:
            holder = holder[part]
        holder[last] = array
