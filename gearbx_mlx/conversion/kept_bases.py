"""Calibrated bases, kept in the user's cache: one file each.

A file's name has the fingerprint of the model, the storage of its gears and the hash of the text. The file has the
planes under mlx-lm's names.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec

from ..errors import GearbxError, GearbxWarning
from ..files.user_cache import CacheUnusable, cache_entry, check_owner, warn_of
from ..files.writing import replacing_arrays
from ..formats.base import Format
from ..gears.discovery import Layer, discover
from ..gears.gearbox import model_fingerprint
from ..kernels.bit_planes import Planes
from .calibrated_base import CalibratedBase

PLANE_ARRAYS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class BaseKey:
    """Key of a kept base. ladder: bits of all gears. text: hash of the tokens; "": any text."""

    fingerprint: str
    format: str
    ladder: tuple[int, ...]
    manage: str
    group_size: int
    text: str = ""

    def layers(self, model: nn.Module) -> list[Layer]:
        """Return the managed layers of a model."""
        return discover(model, self.manage, self.group_size, self.format)[0]

    def file(self) -> Path:
        """Return the file, in the user's cache or in $GEARBX_BASES.

        Raises:
            CacheUnusable: other users could write to the folder, or the cache cannot be used.
            OSError: the folder cannot be read.
        """
        storage = f"3 {self.format} {self.ladder} {self.manage} {self.group_size}"
        digest = hashlib.sha256(storage.encode()).hexdigest()[:8]
        folder = Path(os.environ.get("GEARBX_BASES") or cache_entry("bases"))
        check_owner(folder)
        return folder / f"{self.fingerprint[:16]}-{digest}-{self.text or '*'}.safetensors"

    def find(self) -> CalibratedBase | None:
        """Return the kept base, the latest one for any text; None if none is kept, or it is damaged.

        A base that other users could have written is ignored with a warning.
        """
        try:
            file = self.file()
            files = sorted(file.parent.glob(file.name), key=lambda file: file.lstat().st_mtime)
            for latest in files[-1:]:
                check_owner(latest)
                return read_base(latest, self)
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        return None

    def keep(self, base: CalibratedBase) -> None:
        """Write a base; warn if it cannot be kept."""
        arrays = {
            f"{path}.{name}": array
            for path, planes in base.layers.items()
            for name, array in zip(PLANE_ARRAYS, planes.arrays)
        }
        metadata = {"fingerprint": self.fingerprint, "group_size": str(self.group_size), "bits": str(self.ladder[0])}
        metadata["rounded"] = msgspec.json.encode(base.rounded).decode()
        try:
            file = self.file()
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing_arrays(file) as place:
                mx.save_safetensors(place, arrays, metadata)
            file.chmod(0o600)  # with any umask: a file that others may write to is ignored
            base.file = file
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        except GearbxError as error:
            warnings.warn(f"{error}; the base is made again at the next start", GearbxWarning, stacklevel=2)


def read_base(file: Path, key: BaseKey) -> CalibratedBase | None:
    """Return the base of a file; None if it belongs to a different model or is damaged."""
    try:
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(file), return_metadata=True))
        mx.eval(arrays)  # fails for a truncated file
        if metadata["fingerprint"] != key.fingerprint:
            return None
        bits, group_size = int(metadata["bits"]), int(metadata["group_size"])
        layers = {}
        for path in {name.rpartition(".")[0] for name in arrays}:
            words, scales, biases = (arrays[f"{path}.{name}"] for name in PLANE_ARRAYS)
            layers[path] = Planes([words], scales, [biases], (bits,), group_size)
        return CalibratedBase(layers, msgspec.json.decode(metadata["rounded"], type=dict[str, str]), file)
    except (RuntimeError, KeyError, ValueError):
        return None


def key_of(
    model: nn.Module,
    format: Format,
    ladder: Sequence[int],
    manage: str,
    group_size: int,
    text: Any = None,
) -> BaseKey:
    """Return the key of a model's base. text: None for any text."""
    digest = hashlib.sha256(msgspec.json.encode(text)).hexdigest()[:16] if text else ""
    return BaseKey(model_fingerprint(model), format.name, tuple(ladder), manage, group_size, digest)
