"""From the mode's flags, and the files that they name, to a mode."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ..decoding.draft_plans import read_draft_file, shipped
from ..decoding.mode import Mode
from ..decoding.modes import MODES, mode_class
from ..errors import GearbxError
from ..formats import DEFAULT_FORMAT, get_format
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..gears.ladder import DENSE, Ladder
from ..gears.manifest import Manifest
from ..routing.acceptance import DraftFile
from ..routing.gates import ThresholdFile
from .gate import AUTO, GateSettings, RoutingSettings, initial_gear, route_fields, routing_for
from .geared_settings import GearedSettings
from .modes import TELEMETRY_ONLY
from .settings import flag_of

ROUTE, KICKDOWN, LOSSLESS = "route", "kickdown", "lossless"


@dataclass(frozen=True)
class ModeChoice:
    """The mode (None: route, or telemetry-only for a quantized model), and what belongs to it, files followed.

    gears: the ladder as text; format: how it is stored. None: those of a geared checkpoint, or the defaults.
    """

    mode: str | None
    gears: str | None
    format: str | None
    routing: RoutingSettings
    gate: GateSettings
    gear: str | None
    curve: str | None
    draft_length: int | None
    cost: str | None
    lookup_tokens: int | None


def choose_mode(settings: GearedSettings, saved: Manifest | None) -> ModeChoice:
    """The mode, the ladder and its format that flags, files and checkpoint ask for together.

    Args:
        saved: the gears of the checkpoint, if it is a geared one.

    Raises:
        GearbxError: flags that exclude each other, a flag of another mode, a file that is no drafting file.
    """
    mode, curve = TELEMETRY_ONLY if settings.mode.observes else settings.mode.mode, settings.mode.curve
    routing, gears, format = settings.routing, settings.layout.gears, settings.layout.format
    made = calibrated(routing)
    if isinstance(made, DraftFile):
        if mode not in (None, LOSSLESS):
            raise GearbxError(f"{routing.thresholds}: is for --mode lossless; leave out the other mode")
        mode, curve = LOSSLESS, curve or routing.thresholds
        routing = RoutingSettings(initial_gear=routing.initial_gear)
    elif made is not None and made.mode != ROUTE:
        gears = gears or ",".join(map(str, made.gears))
        if made.mode == KICKDOWN and mode is None:  # a static gear needs no mode
            mode = KICKDOWN
    own = settings.mode
    one_mode = own.gear, curve, own.draft_length, own.cost, own.lookup_tokens
    choice = ModeChoice(mode, gears, format, routing, settings.gate, *one_mode)
    if mode is None and saved is not None and drafts_by_default(settings, choice, saved):
        choice = replace(choice, mode=LOSSLESS)
    if gears is None and choice.mode == LOSSLESS:
        file = default_drafting(curve, settings)
        if file is not None:
            format = file.format if saved is None and not settings.gears.other_codes else format
            choice = replace(choice, gears=",".join(map(str, file.gears)), format=settings.layout.format or format)
    check_flags(choice)
    return choice


def drafts_by_default(settings: GearedSettings, choice: ModeChoice, saved: Manifest) -> bool:
    """Whether a geared checkpoint starts in mode lossless: it has one copy of the original weights (format exact).

    Not where one gear alone is asked for, or something that this mode does not have.
    """
    whole = bool(get_format(saved.format).ladders)
    gears = saved.gears if choice.gears is None else Ladder.parse(choice.gears)
    others = settings.controller.wanted or settings.cache.draft_model is not None
    return whole and len(gears) > 1 and not others and given_flags(choice) <= settings_of_mode(LOSSLESS)


def takes_whole_weights(settings: GearedSettings, choice: ModeChoice, saved: Manifest | None) -> bool:
    """Whether bfloat16 weights are to be in format exact: in mode lossless, where nothing says which gears, and how."""
    given = saved or choice.gears or choice.format or settings.gears.keeps_originals
    return choice.mode == LOSSLESS and not given


def calibrated(routing: RoutingSettings) -> DraftFile | ThresholdFile | None:
    """The file that --thresholds names, if it names one: it may say for which mode and gears it was made."""
    if routing.thresholds in (None, AUTO):
        return None
    try:
        return read_draft_file(routing.thresholds)
    except GearbxError:
        return routing.source if isinstance(routing.source, ThresholdFile) else None


def default_drafting(curve: str | None, settings: GearedSettings) -> DraftFile | None:
    """The drafting file whose gears are the default: the one given, or for the demo model the one that saves most."""
    if curve is not None:
        return read_draft_file(curve)
    if settings.model.model is not None:
        return None
    format = DEFAULT_FORMAT if settings.gears.keeps_originals else settings.layout.format
    return max((file for file in shipped() if format in (None, file.format)), key=saving, default=None)


def saving(file: DraftFile) -> float:
    """How many times fewer bytes than the original weights are read; 0 where these are not the top gear."""
    return (file.gears[-1] == DENSE) * file.weight_bytes_per_token_of_original / file.weight_bytes_per_token


def check_flags(choice: ModeChoice) -> None:
    """Raises GearbxError for a flag that the mode does not have."""
    has = settings_of_mode(choice.mode or ROUTE)
    for field in FLAGS:
        if field in given_flags(choice) - has:
            modes = [mode for mode in MODES if field in settings_of_mode(mode) and mode != "pair"]
            raise GearbxError(f"{flag_of(field)} is for --mode {' or '.join(modes)}; leave it out, or give that mode")


OF_LOSSLESS = ("curve", "draft_length", "cost", "lookup_tokens")
FLAGS = ("gear", *OF_LOSSLESS, "thresholds", "initial_gear", "hysteresis", "min_gear_duration")


def given_flags(choice: ModeChoice) -> set[str]:
    """The fields of modes for which a flag was given."""
    values = {**vars(choice.routing), **vars(choice.gate), **vars(choice)}
    if choice.routing.initial_gear == AUTO:
        values["initial_gear"] = None
    return {field for field in FLAGS if values[field] is not None}


def settings_of_mode(mode: str) -> set[str]:
    return {item.name for item in fields(mode_class(mode))}


def make_mode(choice: ModeChoice, ladder: Ladder, gearbox: Gearbox | Observer, prompt: str) -> Mode:
    """The mode with its settings.

    Args:
        prompt: as typed, which chooses the first gear of mode route.

    Raises:
        GearbxError: thresholds that do not fit the ladder or the model.
    """
    kind = mode_class(choice.mode or (TELEMETRY_ONLY if isinstance(gearbox, Observer) else ROUTE))
    has = settings_of_mode(kind.name)
    given = {name: getattr(choice, name) for name in ("gear", *OF_LOSSLESS)}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "thresholds" in has:
        model = gearbox.model
        settings = choice.routing, choice.gate, ladder, vocabulary(model), partial(model_fingerprint, model)
        routed = kind.name in (ROUTE, TELEMETRY_ONLY)
        values |= route_fields(*settings) if routed else vars(routing_for(*settings))
        values |= {"initial_gear": initial_gear(choice.routing, ladder, prompt)}
    else:
        values["window"] = choice.gate.filled().window
    return kind(**{field: value for field, value in values.items() if field in has})
