"""The noise floor: how far the reference is from itself where arithmetic is as coarse as bfloat16's."""

import contextlib
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from ..formats.base import dense_weight
from ..gears.adapters import layers_of, places_of, put_modules, tree_of
from ..gears.gearbox import Gearbox

UNIT_ROUNDOFF = 2.0**-8  # of bfloat16: the most by which rounding to it changes a number, relatively


class Noisy(nn.Module):
    """A layer that changes each of its outputs by a random relative error, uniform within bfloat16's unit roundoff."""

    def __init__(self, layer: nn.Module, seed: int):
        super().__init__()
        self.layer = layer
        self._key = mx.random.key(seed)

    def __call__(self, *args, **kwargs) -> mx.array:
        return self.blur(self.layer(*args, **kwargs))

    def as_linear(self, x: mx.array) -> mx.array:
        """The product of an embedding that is the output head as well."""
        return self.blur(self.layer.as_linear(x))

    def dense_weight(self) -> mx.array:
        """The weight (O, I), whose norms an adapter may need."""
        return dense_weight(self.layer)

    def blur(self, y: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return y * (1 + mx.random.uniform(-UNIT_ROUNDOFF, UNIT_ROUNDOFF, y.shape, key=key)).astype(y.dtype)


@contextlib.contextmanager
def noisy(gearbox: Gearbox, seed: int) -> Iterator[None]:
    """The top gear with noise on the output of every managed layer; do not shift inside the context."""
    gearbox.shift(gearbox.ladder.top)
    modules, places = layers_of(gearbox.model), places_of(gearbox.model)
    engaged = {layer.path: modules[layer.path] for layer in gearbox.layers}
    wrapped = {path: Noisy(module, seed + i) for i, (path, module) in enumerate(engaged.items())}
    put_modules(gearbox.model, tree_of(wrapped, places))
    try:
        with gearbox.compiled.aside():
            yield
    finally:
        put_modules(gearbox.model, tree_of(engaged, places))
