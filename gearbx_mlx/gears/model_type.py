"""A type that a model is given after its gearbox was made, as by `set_dtype`: gears follow when they are engaged."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..formats.native import Native, NativeEmbedding
from ..formats.tied import QuantizedTable, TiedEmbedding, linear_of
from .discovery import Layer


class Typed:
    """The type that a model is in now, by a parameter that no gear changes.

    Args:
        layers: the managed ones, which are in gears.
        dtype: of the model as it is.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], dtype: mx.Dtype):
        managed = {id(layer.module) for layer in layers}
        own = (
            (module, name)
            for module in model.modules()
            if id(module) not in managed and not isinstance(module, Native)
            for name, value in module.items()
            if isinstance(value, mx.array) and value.dtype == dtype
        )
        self._place = next(own, None)
        self._made_in, self._changed = dtype, False

    def follow(self, modules: Any) -> None:
        """Put a tree of modules into the type of now. Native ones keep that of their arrays, and read any."""
        if self._place is None:
            return
        module, name = self._place
        dtype = module[name].dtype
        if dtype == self._made_in and not self._changed:
            return
        self._changed = True
        for _, module in tree_flatten(modules, is_leaf=lambda value: isinstance(value, nn.Module)):
            if isinstance(module, TiedEmbedding | QuantizedTable):
                module.dtype = dtype
            if isinstance(module, NativeEmbedding):
                module.activations = dtype
            if not isinstance(linear_of(module), Native):
                module.set_dtype(dtype)
