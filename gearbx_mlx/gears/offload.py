"""Residency: what becomes of the arrays of idle gears (GEARBX 6.2, 6.3).

Weights are in pages of 2 MB, which a processor finds faster than the usual 4 KB. A token reads every weight once. On a
virtual machine, where each page is looked up in two tables, SmolLM2's tokens in 16 bits take 1.3 times as long from
small pages. Linux gives large ones to memory that asks for them before it is first written (`madvise`, where
/sys/kernel/mm/transparent_hugepage/enabled says so). MLX takes an array's memory from `malloc`; so a piece of the heap
that is large enough for the weights asks, and is freed again for them to be put there.
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
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of mallopt
# Bytes from which an array is beside the heap: as far as glibc raises that by itself, once such arrays are freed.
LARGE_BYTES = 32 << 20


@functools.cache
def glibc() -> Any:
    """Return the functions of glibc; None where another library allocates."""
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
def system_has_them() -> bool:
    """Return whether the system has large pages for memory that asks for them."""
    try:
        return "[never]" not in SYSTEM.read_text(encoding="utf-8")
    except OSError:
        return False


@contextlib.contextmanager
def large_pages(size: int) -> Iterator[None]:
    """In the block, `size` bytes of arrays are put into large pages, where the system has some; else nothing changes.

    Memory that is not needed after all is handed back at the end.
    """
    library = glibc() if on_cpu() and size >= PAGE and system_has_them() else None
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)  # everything comes from the heap
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # which would shrink at once
    try:
        place = library.malloc(size + 2 * PAGE)  # none under a limit of the process
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


Key = tuple[str, int]  # path of a layer, bits of one of its gears
EMPTY = mx.zeros((0,))  # in the place of an array that was given up


def hand_back() -> None:
    """Hand memory that was given up back to the system.

    MLX keeps what a GPU gave up for its next arrays, and glibc keeps it in its heap, whose size then never falls.
    """
    mx.clear_cache()
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


class Residency:
    """Gives up arrays of idle gears, and brings them back before their gear is engaged; this one keeps them all."""

    name = "resident"

    def leave(self, idle: Mapping[Key, nn.Module], model: nn.Module) -> None:
        """Give up the arrays of idle modules, except those that the model uses."""

    def enter(self, needed: Mapping[Key, nn.Module]) -> None:
        """Bring back everything that `leave` took from these modules; if that fails, nothing."""


class Disk(Residency):
    """Drops idle gears, and reads them again from files when they are entered."""

    name = "disk"

    def __init__(self, dtypes: Mapping[str, mx.Dtype]):
        self.dtypes = dtypes
        self._dropped: dict[Key, list[str]] = {}

    def has(self, key: Key) -> bool:
        """Return whether the files have the arrays of a gear."""
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
            hand_back()

    def enter(self, needed: Mapping[Key, nn.Module]) -> None:
        missing = {key: self._dropped[key] for key in needed if key in self._dropped}
        for key, arrays in (self.read(missing) if missing else {}).items():
            put_parameters(needed[key], arrays)
            del self._dropped[key]


class SavedDisk(Disk):
    """Reads all gears from the files of a geared checkpoint.

    dtypes: path to the type that the scales of a layer, and its weight at 16 bits, are put in.
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
    """Reads the dense originals from the checkpoint of a model without gears; others stay in memory.

    model: its class has the `sanitize` that maps the names in the files to the names of the model. dtypes: path to the
    type of each layer's weights in memory. Raises GearbxError for files that do not have these weights.
    """

    def __init__(self, model: nn.Module, checkpoint: str | Path | None, dtypes: Mapping[str, mx.Dtype]):
        super().__init__(dtypes)
        if checkpoint is None:
            raise GearbxError("residency 'disk' reads weights back from the checkpoint; give checkpoint=its directory")
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
            raise GearbxError(f"{self.directory}: {error} is not in the checkpoint; keep gears resident") from error
        except (RuntimeError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GearbxError:
        return GearbxError(f"{self.directory}: weights cannot be read back ({error}); restore the checkpoint")


def arrays_in_use(model: nn.Module) -> set[int]:
    """id() of every array of the model as it is now."""
    return {id(array) for _, array in tree_flatten(model.parameters())}


def idle_parameters(module: nn.Module, in_use: set[int]) -> dict[str, mx.array]:
    """Flat name to array of a module's arrays that the model does not use, without those given up before."""
    return {name: a for name, a in tree_flatten(module.parameters()) if a.size and id(a) not in in_use}


def put_parameters(module: nn.Module, arrays: Mapping[str, mx.array]) -> None:
    """Set parameters by their flat names, such as weights.1. (`Module.update` cannot set a part of a list.)"""
    for name, array in arrays.items():
        holder: Any = module
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        for part in path:
            holder = holder[part]
        holder[last] = array
