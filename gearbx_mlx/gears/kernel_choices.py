"""Give the linear layers of a model their kernels: the fastest ones, as measured with weights of the model itself."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..formats.native import Native
from ..formats.tied import TiedEmbedding
from ..kernels.candidates import Chosen, Kind, always
from ..kernels.dispatch import Choice
from ..kernels.tuner import Tuner

MOST_LAYERS = 32  # that a trial streams through; so many matrices do not stay in a cache
MOST_BYTES = 2**28

# Surrounds the measurements of a gear, which take up to two seconds: a command puts its spinner here.
while_measuring: Callable[[], AbstractContextManager] = nullcontext


class KernelChoices:
    """Chooses the kernels of a model's layers.

    Args:
        model: whose layers are taken as they are now.
        choice: whether it has native layers, and among what to choose.
        dtype: of the activations.
    """

    def __init__(self, model: nn.Module, choice: Choice, dtype: mx.Dtype):
        self.choice = choice
        self.tuner = Tuner(dtype, choice.x_bits, choice.ours_alone, choice.anew)
        for layer in natives(model.modules()):
            layer.chosen = None  # what an earlier gearbox chose
        self.take(model.modules())

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Let layers have their kernels chosen at their first product, those that nobody has taken yet.

        The weights of others of the same kind among `modules` are used to measure.
        """
        if not self.choice.native:
            return
        alike: dict[Kind, list[Native]] = {}
        for layer in natives(modules):
            if layer.chosen is None:
                layer.x_bits = self.choice.x_bits
                if kind := layer.kind():
                    alike.setdefault(kind, []).append(layer)
        for kind, layers in alike.items():
            choose = partial(self._choose, kind, [weakref.ref(layer) for layer in layers])
            for layer in layers:
                layer.chosen = Chosen(choose)

    def measure(self, modules: Iterable[nn.Module], vectors: Sequence[int] = (1,)) -> None:
        """Choose the kernels for products of these numbers of vectors now. The weights are in memory."""
        chosen = {kind: layer.chosen for layer in natives(modules) if layer.chosen and (kind := layer.kind())}
        with while_measuring():
            for kind in sorted(chosen, key=lambda kind: prod(kind.shape)):  # of sizes alike the smallest counts
                for count in vectors:
                    chosen[kind](count)

    def _choose(self, kind: Kind, members: Sequence[weakref.ref], vectors: int) -> str:
        name = self.tuner.choose(kind, vectors, partial(products, kind, members))
        self.tuner.cache.save()
        return name


def natives(modules: Iterable[nn.Module]) -> list[Native]:
    """The native layers among modules and among the heads of tied embeddings."""
    layers = (module.projection if isinstance(module, TiedEmbedding) else module for module in modules)
    return [layer for layer in layers if isinstance(layer, Native)]


def products(kind: Kind, members: Sequence[weakref.ref], candidate: str, x: mx.array) -> list[mx.array]:
    """Products of x with the layers of a kind that are in memory, by a candidate; not evaluated."""
    built: list[mx.array] = []
    size = 0
    for layer in filter(None, (member() for member in members)):
        if built and (size > MOST_BYTES or len(built) == MOST_LAYERS):
            break
        if layer.kind() != kind:  # its weights were given up for a while
            continue
        before, layer.chosen = layer.chosen, always(candidate)
        try:
            built.append(layer.product(x))
        finally:
            layer.chosen = before
        size += layer["weight"].nbytes if "weight" in layer else 0
    return built


def measure_gears(gearbox: Any, vectors: Sequence[int] = (1,)) -> None:
    """Choose the kernels of a Gearbox in every gear now, for products of these numbers of vectors."""
    with uncounted(gearbox):
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            gearbox.kernel_choices.measure(gearbox.model.modules(), vectors)


@contextmanager
def uncounted(gearbox: Any) -> Iterator[None]:
    """After the block the gear is the one before it, and the shifts in it do not count."""
    before, shifts, seconds = gearbox.gear, gearbox.shifts, gearbox.shift_seconds
    try:
        yield
    finally:
        gearbox.shift(before)
        gearbox.shifts, gearbox.shift_seconds = shifts, seconds
