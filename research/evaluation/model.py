"""The model of a study and its gears, as the flags of a study name them."""

from dataclasses import dataclass

from gearbx_mlx.cli.decide import JustGears
from gearbx_mlx.cli.flags import GearFlags, LayerSettings, ModelSettings
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


def settings_of(asked: Model) -> JustGears:
    """Everything that the package decides from, beside files and the checkpoint."""
    layout = LayerSettings(
        gears=None if asked.gears is None else Ladder.parse(asked.gears),
        format=asked.format,
        manage=asked.manage,
        q_group_size=asked.group_size,
    )
    return JustGears(ModelSettings(asked.model), layout, GearFlags(kernels=f"{asked.kernels}:{asked.activations}"))
