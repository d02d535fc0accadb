"""The gearbox that a model has, and the fingerprint that names the model in any gear."""

from typing import Any

import mlx.nn as nn

from ..errors import GearbxError
from ..kernels.device import check_device
from .fingerprint import fingerprint, with_adapters
from .saved import saved_gears
from .sharding import sharding_of

ATTACHED = "attached_gearbox"  # attribute of a model that has one


def attached(model: nn.Module) -> Any:
    """The Gearbox that was last put on a model, or None."""
    return getattr(model, ATTACHED, None)


def check_attached(gearbox: Any) -> None:
    """Raise GearbxError unless a Gearbox is the one that its model has, and MLX computes on its device."""
    if attached(gearbox.model) is not gearbox:
        raise GearbxError("another gearbox was put on this model since; use that one")
    check_device(gearbox.device)


def model_fingerprint(model: nn.Module) -> str:
    """The fingerprint of the model as it was loaded, in any gear; of a rank's part that of the whole model."""
    gearbox, saved, sharding = attached(model), saved_gears(model), sharding_of(model)
    if gearbox is not None:
        return gearbox.fingerprint
    if sharding is not None:
        return sharding.fingerprint
    return fingerprint(model) if saved is None else with_adapters(saved.manifest.fingerprint, model)
