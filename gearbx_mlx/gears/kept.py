"""Gears made from a model's weights, kept in the user's cache: the next start maps them.

An entry is a safetensors file, named by samples of the weights and by the settings of its gears. It is used if the hash
of all weights equals the entry's. That hash is remembered until the system reports a change of a model file. A
checksum of each array detects damage. The least recently used entries are removed if all entries together would
take more than a quarter of the disk space available to them.

A thread writes an entry in the background, at the lowest priority.
"""

import functools
import hashlib
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from .. import formats
from ..errors import GearbxError, GearbxWarning
from ..files.user_cache import CacheUnusable, check_owner, open_cache, unusable, warn_of
from ..files.writing import remove_parts, replacing
from ..kernels.proven import kernels_hash
from .mapped import Origin, load_arrays, origin_of
from .tensor_files import TYPE_NAMES, TensorFile, bits_in, header_of, sum_of_bytes

FOLDER, THREAD = "gears", "gearbx keep"
MIN_KEPT_BYTES = 2**25  # bytes of weights: gears of smaller models are made in milliseconds
SHARE_OF_ROOM = 4  # all entries take at most this fraction (1/4) of free space and their own together
HEADER_ROOM, ENTRY_ROOM = 4096, 192  # bytes of the header in all, and for each array beside its name

Arrays = dict[str, mx.array]
Gears = dict[str, dict[int, Arrays]]
"""Path to bits to the arrays of a gear, by their names in its module."""


def when_keeping(size: int, folder: Path) -> None:
    """Ignore that `size` bytes of gears will be written; a command replaces this function to report it."""


@functools.cache
def makers() -> str:
    """Return 16 hexadecimal digits that change with the code that makes gears from weights."""
    folder = Path(formats.__file__).parent
    sources = [path.read_bytes() for path in sorted((*folder.glob("*.py"), *(folder.parent / "kernels").glob("*.py")))]
    about = f"{kernels_hash()} {version('mlx')} {version('gearbx-mlx')}".encode()
    return hashlib.sha256(b"\0".join([about, *sources])).hexdigest()[:16]


@dataclass(frozen=True)
class KeptGears:
    """The kept gears of one model."""

    origin: Origin

    def find(self, wanted: Any) -> Gears | None:
        """Return kept gears, mapped; None if they must be made.

        wanted: the settings that the gears depend on, as JSON. A damaged entry is removed, with a warning.
        """
        try:
            place = self._place(wanted)
            if not place.is_file():
                return None
            check_owner(place)
            found = read_entry(place, wanted, self.origin.whole())
            os.utime(place)  # marks it as recently used
            return found
        except Damaged as error:
            warnings.warn(f"{error}; the gears are made again", GearbxWarning, stacklevel=2)
            place.unlink(missing_ok=True)
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        except GearbxError as error:
            warnings.warn(f"{error}; the gears are made again", GearbxWarning, stacklevel=2)
        return None

    def keep(self, wanted: Any, gears: Gears) -> None:
        """Write gears, evaluated, in a separate thread; warns on failure."""
        arrays, names = unshared(gears)
        bits = {name: (TYPE_NAMES[array.dtype], array.shape, bits_in(array)) for name, array in arrays.items()}
        size = sum(data.nbytes for _, _, data in bits.values())
        try:
            place = self._place(wanted)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            check_owner(place.parent)
            remove_parts(place.parent)
            fits = make_room(place.parent, size)
        except (CacheUnusable, OSError) as error:
            warn_of(error)
            return
        except GearbxError as error:
            warnings.warn(f"{error}; the gears are made again at the next start", GearbxWarning, stacklevel=2)
            return
        if not fits:
            return
        when_keeping(size, place.parent)
        in_background(functools.partial(self._write, place, wanted, bits, names))

    def _place(self, wanted: Any) -> Path:
        """Return the file of an entry. Raises CacheUnusable as `open_cache`."""
        about = hashlib.sha256(json.dumps([wanted, makers()]).encode()).hexdigest()
        try:
            sampled = self.origin.sampled()
        except OSError as error:
            raise unusable(error) from error
        return open_cache() / FOLDER / f"{sampled[:16]}-{about[:16]}.safetensors"

    def _write(self, place: Path, wanted: Any, bits: Mapping[str, tuple], names: Any) -> None:
        try:
            write_entry(place, wanted, self.origin.whole(), bits, names)
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        except GearbxError as error:
            warnings.warn(f"{error}; the gears are made again at the next start", GearbxWarning, stacklevel=2)


class Damaged(Exception):
    """An error for an entry that differs from the written one; the message has the cause."""


def unshared(gears: Gears) -> tuple[Arrays, dict[str, dict[int, dict[str, str]]]]:
    """Return each array once, by a name, and gears with names instead of arrays; the largest arrays first.

    Arrays whose size is a multiple of 64 bytes come first, so that only small arrays cross cache lines.
    """
    found: dict[int, tuple[str, mx.array]] = {}
    for path, made in gears.items():
        for bits, arrays in made.items():
            for name, array in arrays.items():
                found.setdefault(id(array), (f"{path}@{bits}.{name}", array))
    names = {
        path: {bits: {name: found[id(array)][0] for name, array in arrays.items()} for bits, arrays in made.items()}
        for path, made in gears.items()
    }
    ordered = sorted(found.values(), key=lambda item: (item[1].nbytes % 64 > 0, -item[1].nbytes))
    return dict(ordered), names


def write_entry(place: Path, wanted: Any, contents: str, bits: Mapping[str, tuple], names: Any) -> None:
    """Write an entry atomically."""
    about = {"wanted": json.dumps(wanted), "contents": contents, "names": json.dumps(names)}
    room = sum(ENTRY_ROOM + 2 * len(name) for name in bits) + 2 * sum(len(json.dumps(text)) for text in about.values())
    with replacing(place) as beside:
        file = TensorFile(beside, room + HEADER_ROOM, sum_of_bytes)
        try:
            sums = {name: file.append_data(name, *array) for name, array in bits.items()}
            file.finish(about | {"sums": json.dumps(sums)})
        finally:
            file.close()
    place.chmod(0o600)  # with any umask: files that other users can write are never used


def read_entry(place: Path, wanted: Any, contents: str) -> Gears:
    """Return the gears of an entry. Raises Damaged if the entry was changed, or is for different weights."""
    try:
        with safe_open(place, framework="np") as file:
            about = file.metadata() or {}
        if (about["wanted"], about["contents"]) != (json.dumps(wanted), contents):
            raise Damaged(f"{place}: was made of other weights")
        places = header_of(place).places
        for name, expected in json.loads(about["sums"]).items():  # read, since mapped pages would count twice
            if sum_of_bytes(np.fromfile(place, np.uint8, places[name].size, offset=places[name].begin)) != expected:
                raise Damaged(f"{place}: {name} is damaged")
        arrays = load_arrays(place)
        return {
            path: {int(bits): {name: arrays[stored] for name, stored in own.items()} for bits, own in made.items()}
            for path, made in json.loads(about["names"]).items()
        }
    except (SafetensorError, GearbxError, KeyError, ValueError, RuntimeError) as error:
        raise Damaged(f"{place}: is damaged, or was changed") from error


def make_room(folder: Path, size: int) -> bool:
    """Remove the least recently used entries until a new one fits; return False if it cannot fit."""
    entries = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    sizes = {path: path.stat().st_size for path in entries}
    limit = (shutil.disk_usage(folder).free + sum(sizes.values())) // SHARE_OF_ROOM
    if size > limit:
        return False
    for path in entries:
        if sum(sizes.values()) + size <= limit:
            break
        path.unlink(missing_ok=True)
        del sizes[path]
    return True


def in_background(write: Callable[[], None]) -> None:
    """Call a function in a thread that yields to all others, if the system supports thread priorities."""

    def run() -> None:
        if sys.platform == "linux":  # Linux has a priority per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        write()

    threading.Thread(target=run, name=THREAD).start()


def kept_gears(model: Any) -> KeptGears | None:
    """Return the kept gears of a model; None if it is small, or changed since it was loaded."""
    origin = origin_of(model)
    try:
        return KeptGears(origin) if origin is not None and origin.size >= MIN_KEPT_BYTES else None
    except OSError:  # a file was removed
        return None
