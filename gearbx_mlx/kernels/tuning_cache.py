"""What the tuner measured on this machine, kept in a small JSON file from one process to the next.

An entry counts for one machine: device, system, MLX and our kernels. Anything wrong with the file costs a measurement,
and one line that says so.
"""

import functools
import hashlib
import os
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import msgspec
import platformdirs

from ..errors import GearbxError, GearbxWarning
from ..files.reading import read_json
from ..files.writing import write_text
from .candidates import CPU, device
from .compiler import SOURCES
from .library_cache import NAME
from .metal_text import metal_folder
from .target import processor_features

FILE = "tuning.json"
MOST_MACHINES = 16  # a new version of MLX makes another one

Times = dict[str, float]
"""Name of a candidate to seconds of a product."""


class Stored(msgspec.Struct):
    """The file: machine to kind of product to what was measured."""

    machines: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(gt=0)]]]] = {}


class TuningCache:
    """What was measured on this machine.

    Args:
        file: the user's, if not given.
    """

    def __init__(self, file: Path | None = None):
        self.file = file or platformdirs.user_cache_path(NAME, appauthor=False) / FILE
        self.machine = machine()
        self._fresh: dict[str, Times] = {}

    @functools.cached_property
    def times(self) -> dict[str, Times]:
        """By the name of a kind of product."""
        return dict(self._read().machines.get(self.machine, {}))

    def keep(self, name: str, times: Times) -> None:
        """Take what was measured for a kind of product; `save` writes it."""
        self.times[name] = self._fresh[name] = times

    def save(self) -> None:
        """Write what was measured since, beside what other processes wrote meanwhile."""
        if not self._fresh:
            return
        stored = self._read(quietly=True)
        mine = stored.machines.pop(self.machine, {}) | self._fresh
        newest = dict([*stored.machines.items(), (self.machine, mine)][-MOST_MACHINES:])
        self._fresh = {}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = msgspec.json.encode(Stored(newest))
            write_text(self.file, msgspec.json.format(text, indent=1).decode())
        except (GearbxError, OSError) as error:
            say(f"{error}; kernels will be measured again at the next start")

    def _read(self, quietly: bool = False) -> Stored:
        """The file's content; nothing, where there is none or it is not what `save` wrote."""
        if not self.file.is_file():
            return Stored()
        try:
            return read_json(self.file, Stored, "measurements of kernels", "it is written anew")
        except GearbxError as error:
            if not quietly:
                say(str(error))
            return Stored()


def say(text: str) -> None:
    warnings.warn(text, GearbxWarning, stacklevel=4)


@functools.cache
def kernels_hash() -> str:
    """8 hexadecimal digits that change with the text of our kernels."""
    digest = hashlib.sha256()
    for folder in (SOURCES, metal_folder()):
        for path in sorted(folder.iterdir()):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def machine() -> str:
    """What times depend on beside the product: device, system, MLX, our kernels; on a CPU also the threads."""
    on = device()
    name = f"{mx.device_info().get('device_name', '')} ({on})"
    if on == CPU:
        features = hashlib.sha256(processor_features().encode()).hexdigest()[:8]
        threads = os.environ.get("GEARBX_THREADS") or os.cpu_count()
        name = f"{name} {features}, {threads} threads"
    return f"{name}, {platform.system()} {platform.release()}, mlx {version('mlx')}, kernels {kernels_hash()}"
