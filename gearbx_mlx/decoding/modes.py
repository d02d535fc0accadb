"""The modes and their settings.

The settings of a mode are declared here, once: a field with its default, its bounds and, if it is a flag, its help.
The mode itself is a class that inherits them, in a file of its own, which is not imported before it is used: flags are
read without MLX. One more mode is such a file, and a line in `MODES`; its settings are flags with a line in `SETTINGS`.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import GearbxError, check_choice
from ..routing import pair as ead
from ..routing.gates import (
    AUTO,
    DEFAULT_HYSTERESIS,
    DEFAULT_MIN_GEAR_DURATION,
    DEFAULT_WINDOW,
    ReadThresholds,
    Thresholds,
    read_thresholds,
)
from ..settings import Settings, flag, flags_in, setting
from .policy import MAX_DRAFTED

if TYPE_CHECKING:
    from .mode import Mode

ROUTE, KICKDOWN, LOSSLESS, PAIR, STATIC = "route", "kickdown", "lossless", "pair", "static"
TELEMETRY_ONLY = "telemetry-only"
MODES = {
    ROUTE: "gearbx_mlx.decoding.route:Route",
    KICKDOWN: "gearbx_mlx.decoding.kickdown:Kickdown",
    LOSSLESS: "gearbx_mlx.decoding.lossless:Lossless",
    PAIR: "gearbx_mlx.decoding.pair:Pair",
    STATIC: "gearbx_mlx.decoding.route:Static",
    TELEMETRY_ONLY: "gearbx_mlx.decoding.route:TelemetryOnly",
}
SHIFTING = ROUTE, KICKDOWN, LOSSLESS, STATIC  # those of one model whose layers change gear
COLDEST = 0.001  # temperature; divided by less, logits of half precision overflow
OF_GATE = "window", "hysteresis", "min_gear_duration"  # settings that a thresholds file has


def thresholds_flag() -> Any:
    return flag(
        None,
        "For --mode route, which it implies: bits such as 1.8,3.5, auto (found on three short prompts), or a file from "
        "gearbx_mlx calibrate, which may have window, hysteresis and duration of the gate too. Default: the paper's",
        name="thresholds",
        metavar="FILE|BITS|auto",
        named=True,
        parse=read_thresholds,
    )


def gear_flag(default: str | None = None) -> Any:
    return flag(
        default,
        "The gear of --mode static, which it implies: name or bits; in the modes route and pair the one that begins "
        "the text. Default: static: the top gear, route: by the prompt, pair: the small model",
        name="gear",
        named=True,
    )


def prompt_gear_flag() -> Any:
    return flag(
        None,
        "The gear that reads the prompt, for --mode route, kickdown and static: name, bits, or same (the one that "
        "begins the text). Default: the top gear, on a CPU 8 bits where the ladder has them",
        named=True,
        rare=True,
        kw_only=True,
    )


@dataclass(frozen=True)
class RouteSettings(Settings):
    """Shift by the rolling entropy.

    Args:
        thresholds: bits, one fewer than there are gears; the paper's, scaled to the vocabulary, if not given; "auto":
            found on three short prompts, once for a gearbox (GEARBX 4.2); or the name of a file.
        window: tokens in the rolling mean.
        hysteresis: bits.
        min_gear_duration: tokens.
        initial_gear: name or bits of the gear that begins the text; "auto": chosen by the prompt (GEARBX 11).
        prompt_gear: name or bits of the gear that reads the prompt, but for its last token, whose pass makes the first
            token of the text; "same": the one that begins the text. Without it the best one that is in memory
            (`best_reader`).
    """

    thresholds: Thresholds = thresholds_flag()
    window: int = setting(DEFAULT_WINDOW, least=1)
    hysteresis: float = setting(DEFAULT_HYSTERESIS, least=0)
    min_gear_duration: int = setting(DEFAULT_MIN_GEAR_DURATION, least=1)
    initial_gear: str | int = gear_flag(AUTO)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class KickdownSettings(Settings):
    """Climb the ladder for the tokens that need it.

    Args:
        thresholds: bits, one fewer than there are gears, or the name of a file; the paper's, scaled to the vocabulary,
            if not given.
        window: tokens in the rolling mean that responses show.
        prompt_gear: as of `RouteSettings`; "same": the lowest.
    """

    thresholds: Thresholds = thresholds_flag()
    window: int = setting(DEFAULT_WINDOW, least=1)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class StaticSettings(Settings):
    """Stay in one gear.

    Args:
        gear: name or bits; the top gear if not given.
        window: tokens in the rolling mean that responses show.
        prompt_gear: as of `RouteSettings`.
    """

    gear: str | int | None = gear_flag()
    window: int = setting(DEFAULT_WINDOW, least=1)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class LosslessSettings(Settings):
    """Write the top gear's text, and read fewer bytes of weights for it.

    Args:
        draft: name or bits of the gear that drafts; the lowest if not given. A `draft_model` drafts in its place.
        draft_length: a fixed number of tokens to draft. Without it drafts are as long as saves time here, which is
            learned. Texts do not depend on it.
        lookup_tokens: the most tokens that the text itself may propose at once, where its last tokens occurred before
            (prompt lookup); 0: none. Without it 15, and none with a draft_length.
        window: tokens in the rolling mean that responses show.
    """

    draft: str | int | None = setting(None)
    draft_length: int | None = flag(
        None,
        f"For --mode lossless: always draft N tokens, 1 to {MAX_DRAFTED}, and look nothing up. Default: as many as "
        "save time",
        name="num_draft_tokens",
        least=1,
        most=MAX_DRAFTED,
        metavar="N",
        rare=True,
    )
    lookup_tokens: int | None = setting(None, least=0, most=MAX_DRAFTED)
    window: int = setting(DEFAULT_WINDOW, least=1)


@dataclass(frozen=True)
class PairSettings(Settings):
    """Let a small model write what it is sure of, and the model that is given to stream_generate the rest.

    Args:
        small_model: of the model's tokenizer; geared or quantized models run as they are.
        threshold: bits; 0 is the large model alone, infinity the small one. EAD's 0.25, scaled to the vocabulary, if
            not given.
        window: tokens in the rolling mean.
        min_gear_duration: tokens for which a model stays engaged at least.
        initial_gear: "small" or "large": the model that reads the prompt and begins; "auto": the small one, unless the
            threshold is 0. The other one reads the prompt when its turn comes.
    """

    small_model: Any = flag(
        None,
        "Local directory or Hub repository of a smaller model with the tokenizer of --model (EAD). For it --thresholds "
        f"is bits, 0 (large alone) to inf (small alone; default: {ead.EAD_BITS:g}, scaled to the vocabulary).",
        named=True,
    )
    threshold: float | None = flag(
        None, "As of the other modes.", name="thresholds", parse=read_thresholds, metavar="BITS"
    )
    window: int = setting(ead.DEFAULT_WINDOW, least=1)
    min_gear_duration: int = setting(ead.DEFAULT_MIN_DURATION, least=1)
    initial_gear: str = gear_flag(AUTO)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "threshold", one_threshold(self.threshold))
        check_choice("gear of a pair", self.initial_gear, (AUTO, *ead.NAMES))


def one_threshold(given: Any) -> float | None:
    """Return the one threshold of two models. Raises GearbxError for several, or what is none."""
    if isinstance(given, ReadThresholds):
        given = given.content.thresholds
    if isinstance(given, str):
        raise GearbxError(f"--thresholds {given}: with --small-model give bits, such as {ead.EAD_BITS:g}")
    if isinstance(given, list | tuple):
        if len(given) != 1:
            shown = ",".join(f"{bits:g}" for bits in given)
            raise GearbxError(f"--thresholds {shown}: two models have one threshold between them")
        given = given[0]
    if given is not None:
        ead.check_threshold(given)
    return given


SETTINGS: dict[str, type[Settings]] = {
    ROUTE: RouteSettings,
    KICKDOWN: KickdownSettings,
    LOSSLESS: LosslessSettings,
    PAIR: PairSettings,
    STATIC: StaticSettings,
    TELEMETRY_ONLY: RouteSettings,
}


def mode_class(name: str) -> "type[Mode]":
    """Return the class of a mode. Raises GearbxError for a name that is not in `MODES`."""
    check_choice("mode", name, MODES)
    return pkgutil.resolve_name(MODES[name])


def flags_of_mode(name: str) -> dict[str, Field]:
    """Return the settings of a mode that are flags, by the flag's name."""
    return flags_in(SETTINGS[name]) if name in SETTINGS else {}


def check_draft_model(mode: str, draft_model: object) -> None:
    """Raises GearbxError for a draft model, or its name, in another mode than lossless."""
    if draft_model is not None and mode != LOSSLESS:
        raise GearbxError(f"mode '{mode}' takes no draft model; leave it out, or use mode '{LOSSLESS}'")


def make_mode(name: str, given: Mapping[str, Any]) -> "Mode":
    """Return a mode with the flags that are given and belong to it; a file of thresholds says more of its gate.

    Raises:
        GearbxError: as the mode's settings.
    """
    kind, flags = mode_class(name), flags_of_mode(name)
    values = {item.name: given[flag] for flag, item in flags.items() if given.get(flag) is not None}
    source = given.get("thresholds")
    if isinstance(source, ReadThresholds):
        found = {each: getattr(source.content, each) for each in OF_GATE if each in {one.name for one in fields(kind)}}
        values |= {each: value for each, value in found.items() if value is not None}
    return kind(**values)
