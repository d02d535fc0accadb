"""--device: where a command computes."""

from typing import Any

from ..kernels import DEVICES
from .settings import flag


def device_flag() -> Any:
    """The flag --device as a field of settings."""
    return flag(None, "Where to compute. Default: MLX's choice, the GPU where there is one", choices=DEVICES)


def choose_device(settings: object) -> None:
    """Compute on the device that settings, or one of their groups, name. Call it before mlx-lm is imported.

    Raises:
        GearbxError: as `use_device`.
    """
    groups = settings, *vars(settings).values()
    name = next((group.device for group in groups if hasattr(group, "device")), None)
    if name is not None:
        from ..kernels.device import use_device  # imports mlx, which whoever names no device does not wait for here

        use_device(name)
