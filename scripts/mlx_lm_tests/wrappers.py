"""What a user may give to mlx-lm in place of a model, by name."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gearbx_mlx import Gearbox
from gearbx_mlx.gears.gearbox import attached

PLAIN = "mlx-lm"  # the model itself


def computed(model: nn.Module) -> nn.Module:
    """The model itself, which computes its logits at once, as wrappers have to. mlx-lm's tests look at shapes alone."""

    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        logits = kind.__call__(self, *arguments, **keywords)
        mx.eval(logits)
        return logits

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return model


def gearbox_of(model: nn.Module) -> Gearbox:
    """The gearbox that an earlier test has put on a model, or a new one."""
    return attached(model) or Gearbox(model)


def in_gear(name: str) -> Callable[[nn.Module], nn.Module]:
    """Puts a gearbox on a model and one of its gears into it."""

    def shifted(model: nn.Module) -> nn.Module:
        gearbox_of(model).shift(name)
        return model

    return shifted


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: computed,
    "low gear": in_gear("low"),
    "mid gear": in_gear("mid"),
    "high gear": in_gear("high"),
}
