"""Steps that modules compile for themselves: such a step keeps the weights of the gear in which it first ran."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from .versions import untested

STEP = "_step"  # where mlx-lm's classes keep them: kimi_k3, on Metal
COMPILED = type(mx.compile(lambda: None))


class CompiledSteps:
    """The compiled steps of a model, of each gear its own."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules = [module for module in model.modules() if STEP in vars(module)]
        self._steps: dict[Hashable, list[Any]] = {}

    def change(self, before: Hashable, gear: Hashable) -> None:
        """Put the steps of a gear into the model: those that it had there, or none, so that they are compiled again.

        Raises:
            GearbxError: a version of mlx-lm that is not tested keeps steps in other places.
        """
        for path, module in self._model.named_modules() if untested() else ():
            for name, value in vars(module).items():
                if isinstance(value, COMPILED) and name != STEP:
                    raise GearbxError(f"{path} keeps a compiled step of one gear as {name}: {untested()}")
        self._steps[before] = [getattr(module, STEP) for module in self._modules]
        self._put(self._steps.get(gear, [None] * len(self._modules)))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In the block there are none, and what is compiled in it is forgotten."""
        steps = [getattr(module, STEP) for module in self._modules]
        try:
            self._put([None] * len(steps))
            yield
        finally:
            self._put(steps)

    def forget(self) -> None:
        """Have all steps compiled again: gears have other layers from now on."""
        self._steps.clear()
        self._put([None] * len(self._modules))

    def _put(self, steps: list[Any]) -> None:
        for module, step in zip(self._modules, steps):
            setattr(module, STEP, step)
