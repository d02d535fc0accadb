"""What the linear layers of a pass computed, so that a pass over the first of its tokens need not read their weights.

A linear layer computes every token alone. So the outputs of a pass over K tokens contain those of a pass over the first
n of them, whether the layer was given all tokens at once or one after the other. With these outputs at hand, the second
pass costs little: its norms, convolutions and recurrences.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..gears.discovery import QUANTIZED
from .pass_classes import of_classes

LINEAR = (nn.Linear, *QUANTIZED)
NOTES = "outputs_of_a_pass"  # attribute of a layer during a pass


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Those of the gear that is engaged."""
    return [module for module in model.modules() if isinstance(module, LINEAR)]


class LayerOutputs:
    """The outputs of linear layers in one pass over K tokens.

    Args:
        layers: of the gear of the pass.
        count: K, two or more.
    """

    def __init__(self, layers: Sequence[nn.Module], count: int):
        self.count = count
        self._layers = layers
        self._outputs: list[list[mx.array | None]] = [[] for _ in layers]

    def recorded(self) -> AbstractContextManager[None]:
        """In the block, layers note their outputs."""
        return self._with_notes(self._outputs, recording)

    def recalled(self) -> AbstractContextManager[None]:
        """In the block, layers that are given the first n tokens of the pass return what they computed for them."""
        return self._with_notes(map(self._usable, self._outputs), recalling)

    def _usable(self, outputs: list[mx.array | None]) -> Iterator[mx.array | None]:
        """A layer that was given single vectors was given the tokens one by one if it had as many calls as tokens."""
        alone = len(outputs) == self.count
        return iter([y if y is not None and (y.ndim == 3 or alone) else None for y in outputs])

    @contextlib.contextmanager
    def _with_notes(self, notes: Iterable[Any], kind_of: Callable[[Any, int], type[nn.Module]]) -> Iterator[None]:
        for layer, its_notes in zip(self._layers, notes):
            object.__setattr__(layer, NOTES, its_notes)  # not into the dictionary of parameters
        try:
            with of_classes((layer, kind_of(type(layer), self.count)) for layer in self._layers):
                yield
        finally:
            for layer in self._layers:
                vars(layer).pop(NOTES, None)


@functools.cache
def recording(kind: Any, count: int) -> type[nn.Module]:
    """A subclass of a linear layer's class that notes its outputs: None where an input is not (1, K, I) or (1, I)."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = kind.__call__(self, x, *args, **kwargs)
        by_position = x.shape[:-1] == y.shape[:-1] and x.shape[:-1] in ((1, count), (1,))
        getattr(self, NOTES).append(y if by_position else None)
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def recalling(kind: Any, count: int) -> type[nn.Module]:
    """A subclass of a linear layer's class that returns what it noted, as much of it as there are tokens."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array | None = next(getattr(self, NOTES), None)
        if y is None or x.ndim != y.ndim:
            return kind.__call__(self, x, *args, **kwargs)
        return y if x.ndim == 2 else y[:, : x.shape[1]]

    return type(kind.__name__, (kind,), {"__call__": call})
