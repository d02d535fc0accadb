"""Which gearbox a model has, and which model it is."""

from typing import TYPE_CHECKING

import mlx.nn as nn

from .fingerprint import fingerprint
from .saved import saved_gears

if TYPE_CHECKING:
    from .gearbox import Gearbox

ATTACHED = "attached_gearbox"  # attribute of a model that has one


def attached(model: nn.Module) -> "Gearbox | None":
    """The gearbox that was last put on a model."""
    return getattr(model, ATTACHED, None)


def model_fingerprint(model: nn.Module) -> str:
    """Of the model as it was loaded, whatever gear it is in."""
    gearbox, saved = attached(model), saved_gears(model)
    if gearbox is not None:
        return gearbox.fingerprint
    return fingerprint(model) if saved is None else saved.manifest.fingerprint
