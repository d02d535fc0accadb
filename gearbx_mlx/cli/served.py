"""From a model in gears to one that is served: which modes requests may ask for, and how they choose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ..decoding.governor import Governor
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.modes import mode_class
from ..decoding.pair import Pair
from ..errors import GearbxError
from ..files.model_directory import context_length
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..routing.pair import NAMES, check_threshold
from ..serving.provider import Served
from ..serving.requests import Options
from .gate import RoutingSettings
from .geared import Geared
from .loaded_pair import LoadedPair
from .modes import PAIR, TELEMETRY_ONLY
from .pair import Turns

SHIFTING = ("route", "kickdown", "lossless", "static")
GOVERNED = ("route", "kickdown")


def serve_geared(
    geared: Geared, draft_model: nn.Module | None, controller: Governor | None, close: Callable[[], None]
) -> Served:
    """A model with its gearbox, as it is served. `close` ends what watches the machine for it."""
    modes = modes_of(geared, draft_model is not None, controller is not None)
    default_mode = geared.mode("").settled(geared.gearbox, geared.loaded.tokenizer, None).name
    return Served(
        model=geared.loaded.model,
        tokenizer=geared.loaded.tokenizer,
        config=geared.loaded.config,
        gearbox=geared.gearbox,
        mode=lambda options, prompt: mode_for(geared, modes, default_mode, options, prompt),
        modes=modes,
        default_mode=default_mode,
        gears=tuple(gear.name for gear in geared.gears.gears),
        context=context_length(geared.loaded.config),
        vocabulary=vocabulary(geared.loaded.model),
        draft_model=draft_model,
        controller=controller,
        close=close,
    )


def modes_of(geared: Geared, has_draft_model: bool, governed: bool) -> tuple[str, ...]:
    """The modes that requests may ask for."""
    if not isinstance(geared.gearbox, Gearbox):
        return (TELEMETRY_ONLY,)
    if governed:
        return GOVERNED
    if has_draft_model:
        return ("route", "static")
    alone = len(geared.gearbox.ladder) == 1
    return tuple(mode for mode in SHIFTING if not (alone and mode == "lossless"))


def mode_for(geared: Geared, modes: tuple[str, ...], default_mode: str, options: Options, prompt: str) -> Mode:
    """The mode of a request: the server's own, changed as its options say.

    Raises:
        GearbxError: a mode or a gear that the server was not started for, options of another mode.
    """
    choice = geared.loaded.settled.choice
    wanted = options.mode or ("static" if options.gear is not None else None)
    if wanted is not None and wanted not in modes:
        raise GearbxError(f"gearbx.mode '{wanted}' is not served here; choose from {', '.join(modes)}")
    if wanted is not None:
        choice = replace(choice, mode=wanted)
    kind = mode_class(choice.mode or default_mode)
    if options.gear is not None:
        refuse_unless(kind.name == "static", "gear", kind.name)
        choice = replace(choice, gear=geared.gearbox.ladder.find(options.gear).name)
    if options.thresholds is not None:
        refuse_unless(hasattr(kind, "thresholds"), "thresholds", kind.name)
        bits = ",".join(repr(float(each)) for each in options.thresholds)
        choice = replace(choice, routing=RoutingSettings(bits, choice.routing.initial_gear))
    mode = geared.mode(prompt, choice).settled(geared.gearbox, geared.loaded.tokenizer, None)
    if options.draft is not None:
        refuse_unless(isinstance(mode, Lossless), "draft", kind.name)
        mode = replace(mode, draft=geared.gearbox.ladder.find(options.draft).name)  # type: ignore[call-arg]
    return mode


def refuse_unless(fits: bool, field: str, mode: str) -> None:
    if not fits:
        raise GearbxError(f"gearbx.{field} is of another mode than '{mode}'; leave it out, or give gearbx.mode")


def serve_pair(pair: LoadedPair, turns: Turns, initial_gear: str) -> Served:
    """Two models that take turns, as they are served."""

    def mode(options: Options, prompt: str) -> Mode:
        if options.mode not in (None, PAIR):
            raise GearbxError(f"gearbx.mode '{options.mode}' is not served here; two models take turns: {PAIR}")
        for field in ("gear", "draft"):
            refuse_unless(getattr(options, field) is None, field, PAIR)
        threshold = turns.threshold(pair.vocab_size)
        if options.thresholds is not None:
            if len(options.thresholds) != 1:
                raise GearbxError("gearbx.thresholds: two models have one threshold between them")
            (threshold,) = options.thresholds
            check_threshold(threshold)
        return Pair(pair.small, threshold, turns.window, turns.min_duration, initial_gear=initial_gear)

    further: dict[str, Any] = {"modes": (PAIR,), "default_mode": PAIR, "gears": NAMES}
    return Served(
        model=pair.large,
        tokenizer=pair.tokenizer,
        config=pair.config,
        gearbox=None,
        mode=mode,
        context=context_length(pair.config),
        vocabulary=pair.vocab_size,
        small_model=pair.small,
        **further,
    )
