"""From the mode's flags, and the files that they name, to a mode."""

from dataclasses import dataclass, fields
from typing import Any

from ..decoding.draft_rules import read_draft_file, shipped
from ..decoding.mode import Mode
from ..decoding.modes import MODES, mode_class
from ..errors import GearbxError
from ..gears.attachment import model_fingerprint
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Ladder
from ..gears.observer import Observer
from ..gears.output_head import vocabulary
from ..routing.draft_file import DraftFile
from ..routing.thresholds import ThresholdFile
from .gate import AUTO, GateSettings, RoutingSettings, initial_gear, routing_for
from .modes import TELEMETRY_ONLY, ModeSettings
from .settings import flag_of

ROUTE, KICKDOWN, LOSSLESS = "route", "kickdown", "lossless"


@dataclass(frozen=True)
class ModeChoice:
    """The mode (None: route, or telemetry-only for a quantized model), and what belongs to it, files followed.

    gears: the ladder as text; None: the default.
    """

    mode: str | None
    gears: str | None
    routing: RoutingSettings
    gate: GateSettings
    gear: str | None
    curve: str | None
    draft_length: int | None


def choose_mode(
    settings: ModeSettings, routing: RoutingSettings, gate: GateSettings, gears: str | None, model: str | None
) -> ModeChoice:
    """The mode and the ladder that flags and files ask for together.

    Args:
        gears: as given.
        model: as given; for the demo model drafting files ship.

    Raises:
        GearbxError: flags that exclude each other, a flag of another mode, a file that is no drafting file.
    """
    mode, curve = TELEMETRY_ONLY if settings.observes else settings.mode, settings.curve
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
    if gears is None and mode == LOSSLESS:
        gears = ladder_for_drafts(curve, model)
    choice = ModeChoice(mode, gears, routing, gate, settings.gear, curve, settings.draft_length)
    check_flags(choice)
    return choice


def calibrated(routing: RoutingSettings) -> DraftFile | ThresholdFile | None:
    """The file that --thresholds names, if it names one: it may say for which mode and gears it was made."""
    if routing.thresholds is None:
        return None
    try:
        return read_draft_file(routing.thresholds)
    except GearbxError:
        return routing.source if isinstance(routing.source, ThresholdFile) else None


def ladder_for_drafts(curve: str | None, model: str | None) -> str | None:
    """The gears of the drafting file, or of the one that ships for the demo model and saves most."""
    file = read_draft_file(curve) if curve is not None else None
    if file is None and model is None:
        file = max(shipped(), key=saving, default=None)
    return None if file is None else ",".join(map(str, file.gears))


def saving(file: DraftFile) -> float:
    """How many times fewer bytes of weights than the top gear reads; 0 where that is not the original weights."""
    return (file.gears[-1] == DENSE) * file.weight_bytes_per_token_top / file.weight_bytes_per_token


def check_flags(choice: ModeChoice) -> None:
    """Raises GearbxError for a flag that the mode does not have."""
    given = {
        "gear": choice.gear,
        "curve": choice.curve,
        "draft_length": choice.draft_length,
        "thresholds": choice.routing.thresholds,
        "initial_gear": None if choice.routing.initial_gear == AUTO else choice.routing.initial_gear,
        "hysteresis": choice.gate.hysteresis,
        "min_gear_duration": choice.gate.min_gear_duration,
    }
    has = settings_of_mode(choice.mode or ROUTE)
    for field, value in given.items():
        if value is not None and field not in has:
            modes = [mode for mode in MODES if field in settings_of_mode(mode) and mode != "pair"]
            raise GearbxError(f"{flag_of(field)} is for --mode {' or '.join(modes)}; leave it out, or give that mode")


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
    values: dict[str, Any] = {"gear": choice.gear, "curve": choice.curve, "draft_length": choice.draft_length}
    if "thresholds" in has:
        model = gearbox.model
        routing = routing_for(choice.routing, choice.gate, ladder, vocabulary(model), lambda: model_fingerprint(model))
        values |= vars(routing) | {"initial_gear": initial_gear(choice.routing, ladder, prompt)}
    else:
        values["window"] = choice.gate.filled().window
    return kind(**{field: value for field, value in values.items() if field in has})
