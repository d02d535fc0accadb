"""The model of a study and its gears, as the flags of a study name them."""

from dataclasses import dataclass

from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.cli.gears import FloorSettings, GearFlags, LayoutSettings
from gearbx_mlx.cli.resolved import Resolved, resolve_gears
from gearbx_mlx.gears.ladder import Ladder


@dataclass(frozen=True)
class Model:
    """Flags of the same names; None: as the package chooses."""

    model: str | None = None
    gears: str | None = None
    format: str | None = None
    group_size: int | None = None
    manage: str | None = None
    kernels: str = "auto"
    activations: str = "int16"


def resolved_model(asked: Model) -> Resolved:
    """Everything that the package decides of a model from flags, files and the checkpoint."""
    layout = LayoutSettings(
        gears=None if asked.gears is None else Ladder.parse(asked.gears),
        format=asked.format,
        manage=asked.manage,
        q_group_size=asked.group_size,
    )
    flags = GearFlags(kernels=asked.kernels, activations=asked.activations)
    return resolve_gears(ModelSettings(asked.model), layout, flags, FloorSettings())
