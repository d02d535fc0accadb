"""One rank's part of a geared checkpoint: of every array of a divided layer it reads its own rows or columns."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from msgspec.structs import replace

from ..errors import GearbxError
from ..files.reading import unreadable
from .dividing import Ranks, own_parts, take_parts
from .manifest import RESTORE, Manifest
from .part_reader import PartReader, Stored
from .parts import Part, misfit
from .saved import SavedGears
from .sharding import SHARDED, Sharding, parts_of


class SavedPart(SavedGears):
    """Makes a rank's modules of any gear. The manifest has the shapes of the rank's parts.

    No hash says whether a part is whole: those of arrays that are read in parts are not compared.

    Args:
        saved: the whole checkpoint.
        parts: path to what the rank has of a layer.
    """

    def __init__(self, saved: SavedGears, parts: dict[str, Part]):
        super().__init__(saved.directory, with_shapes(saved.manifest, parts), saved.hashes)
        self.parts, self.reader = parts, PartReader()
        self._stored = {
            name: Stored(self.hashes.places[name], array.dtype, array.shape) for name, array in self._open().items()
        }
        self._gears: dict[str, tuple[str, str, dict[str, str]]] = {}  # array to its layer, parameter, and all of a gear
        for path, layer in self.manifest.changing.items():
            for names in layer.gears.values() if path in parts else ():
                self._gears |= {array: (path, parameter, dict(names)) for parameter, array in names.items()}
        unmanaged = {name for name in self._stored if name.rpartition(".")[0] in parts}
        self.partial = frozenset(self._gears.keys() | unmanaged)
        self._kept: list[mx.array] = []  # what was read before there is a gearbox, which finds it here

    def take(self, path: str, name: str, array: mx.array, part: Part) -> mx.array:
        """The rank's part of a parameter of the base. array: the whole one, which stays unread if it can."""
        full = f"{path}.{name}"
        if full in self._gears:
            return self._array(full)
        if path in self.manifest.changing and name != "bias":
            return mx.zeros(part.shape, array.dtype)  # nobody reads it: the lowest gear takes its place
        if full in self._stored and self._stored[full].shape == array.shape:
            return self._read(path, name, {name: full})
        own = part.of(array, name)
        mx.eval(own)
        return own

    def read(self, arrays: object) -> None:
        super().read(arrays)
        self._kept.clear()

    def _take(self, name: str) -> mx.array:
        if name not in self._gears:
            return super()._take(name)
        self._kept.append(self._read(*self._gears[name]))
        return self._kept[-1]

    def _read(self, path: str, parameter: str, names: dict[str, str]) -> mx.array:
        """The rank's part of a parameter. names: parameters of the same module to their arrays."""
        try:
            return self.reader.read(parameter, self.parts[path], lambda each: self._stored[names[each]])
        except OSError as error:
            raise unreadable(self.hashes.places[names[parameter]].file, error) from error
        except GearbxError as error:
            raise GearbxError(f"{self.directory}: {path}: {error}; {RESTORE}") from error


def with_shapes(manifest: Manifest, parts: Mapping[str, Part]) -> Manifest:
    """The manifest of a rank's part."""
    layers = {path: replace(layer, shape=parts[path].shape) for path, layer in manifest.layers.items() if path in parts}
    return replace(manifest, layers={**manifest.layers, **layers})


def divide_saved(model: nn.Module, saved: SavedGears, ranks: Ranks) -> SavedPart:
    """Leave a rank its part of the base of a geared checkpoint, and return its part of the gears.

    A layer whose format stores whole rows, or whose groups a part would cut, always gathers.

    Raises:
        GearbxError: layers of the manifest that the model does not have; a model that cannot be divided.
    """
    saved.check(model)
    group = ranks.group
    parts = parts_of(model, group)
    own = own_parts(parts, group, lambda path: ranks.gather or not fits(saved, path, parts[path]))
    part = SavedPart(saved, own)
    take_parts(model, group, parts, own, part.take)
    setattr(model, SHARDED, Sharding(group, own, saved.manifest.fingerprint))
    return part


def fits(saved: SavedGears, path: str, part: Part) -> bool:
    """Whether the gears of a layer can be cut between the columns of a part."""
    managed = path in saved.manifest.changing
    return not managed or misfit(part, saved.manifest.format_of(path), saved.manifest.group_size) is None
