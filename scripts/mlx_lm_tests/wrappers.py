"""What a user may give to mlx-lm in a model's place, by name."""

from collections.abc import Callable

import mlx.nn as nn

from gearbx_mlx import Gearbox, GearedModel, LosslessModel

PLAIN = "mlx-lm"  # the model itself


def in_gear(name: str) -> Callable[[nn.Module], nn.Module]:
    """Puts a gearbox on a model and one of its gears into it."""

    def shifted(model: nn.Module) -> nn.Module:
        Gearbox(model).shift(name)
        return model

    return shifted


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: lambda model: model,
    "low gear": in_gear("low"),
    "mid gear": in_gear("mid"),
    "high gear": in_gear("high"),
    "GearedModel": lambda model: GearedModel(Gearbox(model)),
    "LosslessModel": lambda model: LosslessModel(Gearbox(model)),
}
