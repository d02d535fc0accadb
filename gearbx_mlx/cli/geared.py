"""A model in gears, opened as a command's settings say: what generate, chat and server have in common."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn

from ..decoding.caches import check_heads, check_kv_mode
from ..decoding.mode import Mode
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import kv_ladder
from ..loading import gears_of, model_name
from .gate import check_routing
from .gearbox import in_whole_weights, make_gearbox, settle_gears
from .geared_settings import GearedSettings
from .gears import GearSettings
from .governing import check_governing
from .loaded import load_model
from .mode_choice import ModeChoice, choose_mode, make_mode, takes_whole_weights
from .room import warn_of_memory
from .terminal import note


@dataclass(frozen=True)
class Settled:
    """Mode and gears that flags, files and checkpoint ask for together, before a weight is read."""

    settings: GearedSettings
    choice: ModeChoice
    gears: GearSettings
    takes_whole: bool

    def load(self, path: str | None, chat_template: str = "") -> "Loaded":
        """The model at `path`, without gears as yet; None: the demo model.

        Args:
            chat_template: replaces the tokenizer's.

        Raises:
            GearbxError: as `load_model`.
        """
        if not self.settings.mode.observes:
            warn_of_memory(path, self.gears, self.takes_whole)
        return Loaded(self, path, *load_model(replace(self.settings.model, model=path), chat_template))


@dataclass(frozen=True)
class Loaded:
    """A model as loaded, before anything takes long."""

    settled: Settled
    path: str | None
    model: nn.Module
    tokenizer: Any
    config: dict

    @property
    def name(self) -> str:
        return model_name(self.path)

    def in_gears(self) -> "Geared":
        """The model with its gearbox. Raises GearbxError for settings that do not fit the model."""
        settings, gears = self.settled.settings, self.settled.gears
        if settings.cache.kv_gears is not None:
            check_heads(self.model, kv_ladder(settings.cache.kv_gears))
        if self.settled.takes_whole:
            gears = in_whole_weights(gears, self.model)
        gearbox = make_gearbox(gears, self.model, self.path, settings.model.dtype, settings.mode.observes)
        if isinstance(gearbox, Observer) and not settings.mode.observes:
            note(f"{self.name} is quantized already: telemetry only, no layer changes gear")
        return Geared(self, gearbox, gears)


@dataclass(frozen=True)
class Geared:
    """A loaded model with its gearbox, or with an observer where nothing shifts."""

    loaded: Loaded
    gearbox: Gearbox | Observer
    gears: GearSettings

    def mode(self, prompt: str, choice: ModeChoice | None = None) -> Mode:
        """The mode for a prompt, as typed; `choice` replaces that of the settings. Raises GearbxError as make_mode."""
        return make_mode(choice or self.loaded.settled.choice, self.gears.gears, self.gearbox, prompt)


def settle(settings: GearedSettings) -> Settled:
    """Everything that can be wrong without weights.

    Raises:
        GearbxError: settings that do not fit together.
    """
    model = settings.model.model
    saved = gears_of(model)
    choice = choose_mode(settings, saved)
    check_governing(settings.controller, choice.mode, settings.cache.draft_model)
    if settings.cache.kv_gears is not None:
        check_kv_mode(choice.mode or "", settings.cache.kv_gear)
    layout = replace(settings.layout, gears=choice.gears, format=choice.format)
    gears = settle_gears(model, layout, settings.gears, settings.floors, capped=settings.controller.wanted)
    cap_bits = settings.controller.widths(model, gears.gears, gears.format, None if saved is None else saved.gears)
    check_routing(choice.routing, gears.gears)
    if choice.gear is not None:
        gears.gears.find(choice.gear)
    takes_whole = takes_whole_weights(settings, choice, saved)
    return Settled(settings, choice, replace(gears, cap_bits=cap_bits), takes_whole)
