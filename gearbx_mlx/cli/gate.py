"""Flags of the gate, and the thresholds that route a model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import LARGEST_SHOWN, GearbxError, about
from ..files.reading import read_as
from ..gears.ladder import Ladder
from ..routing.gates import (
    DEFAULT_HYSTERESIS,
    DEFAULT_MIN_GEAR_DURATION,
    DEFAULT_WINDOW,
    ThresholdFile,
    check_thresholds,
    default_thresholds,
    first_gear,
    fitting,
    parse_thresholds,
)
from .settings import Settings, flag

AUTO: Literal["auto"] = "auto"
Thresholds = tuple[float, ...] | Literal["auto"]
MAKE_THRESHOLDS = "write a new one with python -m gearbx_mlx.calibrate"


@dataclass(frozen=True)
class GateSettings(Settings):
    """Settings of the gate as given: None means the file's, or the default."""

    title: ClassVar[str] = "gate"

    window: int | None = flag(
        None, f"Tokens in the rolling mean. Default: {DEFAULT_WINDOW}", least=1, most=LARGEST_SHOWN, rare=True
    )
    hysteresis: float | None = flag(
        None, f"Bits. Default: {DEFAULT_HYSTERESIS}", least=0, most=sys.float_info.max, rare=True
    )
    min_gear_duration: int | None = flag(
        None,
        f"Tokens for which a gear stays engaged at least. Default: {DEFAULT_MIN_GEAR_DURATION}",
        least=1,
        rare=True,
    )

    def filled(self, file: ThresholdFile | None = None) -> "GateValues":
        """Every setting: as given, else as calibrated, else by default."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        calibrated = GateValues() if file is None else GateValues(file.window, file.hysteresis, file.min_gear_duration)
        return replace(calibrated, **given)


@dataclass(frozen=True)
class GateValues:
    """Tokens in the rolling mean, bits, tokens."""

    window: int = DEFAULT_WINDOW
    hysteresis: float = DEFAULT_HYSTERESIS
    min_gear_duration: int = DEFAULT_MIN_GEAR_DURATION


@dataclass(frozen=True)
class Routing(GateValues):
    """A gate with its thresholds in bits."""

    thresholds: tuple[float, ...] = ()


@dataclass(frozen=True)
class RoutingSettings(Settings):
    """Thresholds as given (a file, or bits with commas between; None: the paper's), and the gear to begin in."""

    title: ClassVar[str] = "routing"

    thresholds: str | None = flag(
        None,
        "For --mode route, which it implies: a file from gearbx_mlx.calibrate, whose gate settings are then the "
        "defaults, bits such as 1.8,3.5, or auto: found on the first prompt.",
        metavar="FILE|BITS|auto",
        named=True,
    )
    initial_gear: str = flag(AUTO, "Name or bits; auto: chosen by the prompt.", rare=True)

    @cached_property
    def source(self) -> ThresholdFile | Thresholds | None:
        """What --thresholds names, read once. Raises GearbxError as `read_thresholds`."""
        return read_thresholds(self.thresholds)


def read_thresholds(text: str | None) -> ThresholdFile | Thresholds | None:
    """What --thresholds names: a file, numbers with commas between, or "auto".

    Raises:
        GearbxError: neither numbers nor a thresholds file.
    """
    if text is None or text == AUTO:
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return read_as(Path(text), parse_gate, "a thresholds file", MAKE_THRESHOLDS)


def parse_gate(text: str) -> ThresholdFile:
    """A thresholds file from its text. Raises GearbxError for gate settings that no gate can have, too."""
    content = parse_thresholds(text)
    GateSettings(content.window, content.hysteresis, content.min_gear_duration)
    return content


def check_routing(settings: RoutingSettings, ladder: Ladder) -> None:
    """Raises GearbxError for thresholds or a first gear that no model can have in this ladder."""
    thresholds = settings.source
    if isinstance(thresholds, tuple):
        check_thresholds(thresholds, len(ladder))
    if settings.initial_gear != AUTO:
        with about("--initial-gear"):
            ladder.find(settings.initial_gear)


def routing_for(
    settings: RoutingSettings, gate: GateSettings, ladder: Ladder, vocab_size: int, fingerprint: Callable[[], str]
) -> Routing:
    """The routing of a model.

    Args:
        fingerprint: returns the model's, which a file may belong to.

    Raises:
        GearbxError: thresholds that do not fit the ladder or the model, or that are to be found on a prompt.
    """
    source = settings.source
    if isinstance(source, str):
        raise GearbxError(
            "--thresholds auto is for mode route of generate, chat, server and analyze; "
            "give bits, or a file from python -m gearbx_mlx.calibrate"
        )
    if isinstance(source, ThresholdFile):
        try:
            thresholds = fitting(source, [gear.bits for gear in ladder], vocab_size, fingerprint())
        except GearbxError as error:
            raise GearbxError(f"{settings.thresholds}: {error}; {MAKE_THRESHOLDS}") from error
        return Routing(**vars(gate.filled(source)), thresholds=thresholds)
    thresholds = default_thresholds(len(ladder), vocab_size) if source is None else source
    check_thresholds(thresholds, len(ladder))
    return Routing(**vars(gate.filled()), thresholds=thresholds)


def route_fields(
    settings: RoutingSettings, gate: GateSettings, ladder: Ladder, vocab_size: int, fingerprint: Callable[[], str]
) -> dict[str, Any]:
    """The routing of mode route, which can find its thresholds on a prompt. Raises GearbxError as `routing_for`."""
    if settings.source == AUTO:
        return vars(gate.filled()) | {"thresholds": AUTO}
    return vars(routing_for(settings, gate, ladder, vocab_size, fingerprint))


def initial_gear(settings: RoutingSettings, ladder: Ladder, prompt: str) -> str:
    """The gear to begin in. The prompt is judged as typed: the words of a chat template are not the user's."""
    if settings.initial_gear == AUTO:
        return ladder[first_gear(prompt, len(ladder))].name
    return settings.initial_gear
