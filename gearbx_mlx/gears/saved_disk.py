"""Residency `disk` of a geared checkpoint."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from .offload import EMPTY, Key, arrays_in_use, idle_parameters, put
from .saved import SavedGears


class SavedDisk:
    """Drops idle gears, and reads them again from the files of the checkpoint when they are entered.

    Args:
        dtypes: path to the type that the scales of a layer, and its weight at 16 bits, are put in.
    """

    name = "disk"

    def __init__(self, saved: SavedGears, dtypes: Mapping[str, mx.Dtype]):
        self._saved, self._dtypes = saved, dtypes
        self._dropped: dict[Key, list[str]] = {}

    def leave(self, idle: Mapping[Key, nn.Module], model: nn.Module) -> None:
        in_use = arrays_in_use(model)
        for key, module in idle.items():
            names = list(idle_parameters(module, in_use))
            if names:
                self._dropped.setdefault(key, []).extend(names)
                put(module, dict.fromkeys(names, EMPTY))

    def enter(self, needed: Mapping[Key, nn.Module]) -> None:
        back = {
            key: {name: self._saved.parameter(*key, name, self._dtypes[key[0]]) for name in self._dropped[key]}
            for key in needed
            if key in self._dropped
        }
        self._saved.read(back)
        for key, arrays in back.items():
            put(needed[key], arrays)
            del self._dropped[key]
