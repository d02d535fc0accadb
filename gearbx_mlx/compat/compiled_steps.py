"""Steps that modules compile for themselves: such a step keeps the weights of the gear in which it first ran."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import mlx.nn as nn

STEP = "_step"  # where mlx-lm's classes keep them: kimi_k3, on Metal


class CompiledSteps:
    """The compiled steps of a model, of each gear its own."""

    def __init__(self, model: nn.Module):
        self._modules = [module for module in model.modules() if STEP in vars(module)]
        self._steps: dict[Hashable, list[Any]] = {}

    def change(self, before: Hashable, gear: Hashable) -> None:
        """Put the steps of a gear into the model: those that it had there, or none, so that they are compiled anew."""
        self._steps[before] = [getattr(module, STEP) for module in self._modules]
        for module, step in zip(self._modules, self._steps.get(gear, [None] * len(self._modules))):
            setattr(module, STEP, step)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In the block there are none, and what is compiled in it is forgotten."""
        steps = [getattr(module, STEP) for module in self._modules]
        try:
            for module in self._modules:
                setattr(module, STEP, None)
            yield
        finally:
            for module, step in zip(self._modules, steps):
                setattr(module, STEP, step)

    def forget(self) -> None:
        """Have all steps compiled anew: gears have other layers from now on."""
        self._steps.clear()
        for module in self._modules:
            setattr(module, STEP, None)
