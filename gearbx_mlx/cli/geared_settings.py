"""What generate, chat and server have in common: the groups of settings that open a model in gears."""

from collections.abc import Mapping
from typing import Protocol

from ..errors import GearbxError
from .controller import ControllerSettings
from .floors import FloorSettings
from .gate import AUTO, GateSettings, RoutingSettings
from .gears import GearFlags, LayoutSettings
from .model import ModelSettings
from .modes import ModeSettings
from .sampling import CacheSettings
from .settings import flag_of


class GearedSettings(Protocol):
    """The groups of settings that open a model in gears."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def cache(self) -> CacheSettings: ...
    @property
    def layout(self) -> LayoutSettings: ...
    @property
    def gears(self) -> GearFlags: ...
    @property
    def floors(self) -> FloorSettings: ...
    @property
    def routing(self) -> RoutingSettings: ...
    @property
    def gate(self) -> GateSettings: ...
    @property
    def mode(self) -> ModeSettings: ...
    @property
    def controller(self) -> ControllerSettings: ...


def check_pair(settings: GearedSettings, further: Mapping[str, object]) -> None:
    """Check the flags of a pair, where there is a small model.

    Args:
        further: field to value, of flags that only the command has and a pair does not take.

    Raises:
        GearbxError: flags of a single model.
    """
    if settings.mode.small_model is None:
        return
    single = {
        "draft_model": settings.cache.draft_model,
        "kv_gears": settings.cache.kv_gears,
        **further,
        "gears": settings.layout.gears,
        "curve": settings.mode.curve,
        "draft_length": settings.mode.draft_length,
        "cost": settings.mode.cost,
        "lookup_tokens": settings.mode.lookup_tokens is not None,
        "telemetry_only": settings.mode.telemetry_only,
        "gear": settings.mode.gear,
    }
    for setting, value in single.items():
        if value:
            raise GearbxError(f"{flag_of(setting)} is of one model; leave it out with --small-model")
    if settings.routing.initial_gear not in (AUTO, "small", "large"):
        raise GearbxError(f"--initial-gear {settings.routing.initial_gear}: a pair has {AUTO}, small, large")
