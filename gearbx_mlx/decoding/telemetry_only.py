"""Mode telemetry-only: shift nothing, and name the gear that mode route would use."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.nn as nn

from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from .mode import of_model
from .route import Route


@dataclass(frozen=True)
class TelemetryOnly(Route):
    """As Route, for a model whose layers stay as they are: one that is quantized already, or that is only observed."""

    name: ClassVar[str] = "telemetry-only"
    uncapped: ClassVar[str] = "changes no gear, so there is nothing to cap"

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Observer:
        """The observer that is given, or a new one. Raises GearbxError for a gearbox that shifts."""
        if isinstance(gearbox, Gearbox):
            raise GearbxError("mode 'telemetry-only' shifts no gears: give an Observer, or no gearbox")
        observer = gearbox or Observer(model)
        of_model(observer, model)
        return observer
