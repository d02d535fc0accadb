"""Names and settings of the decoding modes, readable without MLX.

A setting is a field with its default, its bounds and, if it is a flag, its help. The mode's class inherits the settings
and is imported on first use, so flags are parsed without MLX. A new mode is a file and a line in `MODES`; settings that
are flags have a line in `SETTINGS`.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
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
SHIFTING = ROUTE, KICKDOWN, LOSSLESS, STATIC  # modes of one model whose layers change gear
COLDEST = 0.001  # temperature: with a lower one, scaled half-precision logits overflow
OF_GATE = "window", "hysteresis", "min_gear_duration"  # settings that a thresholds file may contain


def thresholds_flag() -> Any:
    return flag(
        None,
        "Entropy thresholds in bits such as 1.8,3.5, auto (measured), or a file from gearbx_mlx calibrate",
        default_text="the paper's",
        name="thresholds",
        metavar="FILE|BITS|auto",
        named=True,
        parse=read_thresholds,
    )


def gear_flag(default: str | None = None) -> Any:
    return flag(
        default,
        "Gear of static, initial gear of route and pair: name or bits",
        default_text="top; route: by prompt; pair: small",
        name="gear",
        named=True,
    )


def prompt_gear_flag() -> Any:
    return flag(
        None,
        "Prefill gear of route, kickdown and static: name, bits, or same (the initial gear)",
        default_text="top; on a CPU 8",
        named=True,
        rare=True,
        kw_only=True,
    )


@dataclass(frozen=True)
class RouteSettings(Settings):
    """Settings of mode route: shifts by the rolling entropy.

    Args:
        thresholds: bits, one fewer than there are gears, or a file's name. "auto": found on three short prompts, once
            per gearbox (GEARBX 4.2). None: the paper's, scaled to the vocabulary.
        window: tokens in the rolling mean.
        hysteresis: bits.
        min_gear_duration: tokens.
        initial_gear: name or bits of the gear of the first token; "auto": by the prompt (GEARBX 11).
        prompt_gear: name or bits of the prefill gear, for all tokens of the prompt but the last, which has the initial
            gear; "same": the initial gear. None: the best one in memory (`best_prefill_gear`).
    """

    thresholds: Thresholds = thresholds_flag()
    window: int = setting(DEFAULT_WINDOW, minimum=1)
    hysteresis: float = setting(DEFAULT_HYSTERESIS, minimum=0)
    min_gear_duration: int = setting(DEFAULT_MIN_GEAR_DURATION, minimum=1)
    initial_gear: str | int = gear_flag(AUTO)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class KickdownSettings(Settings):
    """Settings of mode kickdown: uncertain tokens are computed again in higher gears.

    Args:
        thresholds: bits, one fewer than there are gears, or a file's name. None: the paper's, scaled to the vocabulary.
        window: tokens in the rolling mean that responses show.
        prompt_gear: as in `RouteSettings`; "same": the lowest.
    """

    thresholds: Thresholds = thresholds_flag()
    window: int = setting(DEFAULT_WINDOW, minimum=1)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class StaticSettings(Settings):
    """Settings of mode static: one gear.

    Args:
        gear: name or bits; None: the top gear.
        window: tokens in the rolling mean that responses show.
        prompt_gear: as in `RouteSettings`.
    """

    gear: str | int | None = gear_flag()
    window: int = setting(DEFAULT_WINDOW, minimum=1)
    prompt_gear: str | int | None = prompt_gear_flag()


@dataclass(frozen=True)
class LosslessSettings(Settings):
    """Settings of mode lossless: the top gear's output with fewer bytes of weights read.

    Args:
        draft: name or bits of the draft gear; None: the lowest. A `draft_model` takes its place.
        draft_length: a fixed number of tokens per draft; outputs do not depend on it. None: the fastest length,
            learned on this machine.
        lookup_tokens: the most tokens per proposal of prompt lookup; 0: no lookup. None: 15, or 0 with a draft_length.
        remember: file that keeps the tokens of prompts and outputs for prompt lookup in later starts; True: in the
            user's cache.
        share_lookup: whether prompt lookup learns from all sequences of the model, or each has its own.
        window: tokens in the rolling mean that responses show.
    """

    draft: str | int | None = setting(None)
    draft_length: int | None = flag(
        None,
        f"Fixed draft length in mode lossless, 1 to {MAX_DRAFTED}, without prompt lookup",
        default_text="as many as save time",
        name="num_draft_tokens",
        minimum=1,
        maximum=MAX_DRAFTED,
        metavar="N",
        rare=True,
    )
    lookup_tokens: int | None = setting(None, minimum=0, maximum=MAX_DRAFTED)
    remember: bool | str | Path = flag(
        False, "Keep all prompts and outputs in the user's cache, for prompt lookup in later starts", rare=True
    )
    share_lookup: bool = setting(True)
    window: int = setting(DEFAULT_WINDOW, minimum=1)


@dataclass(frozen=True)
class PairSettings(Settings):
    """Settings of mode pair: a small model generates while its entropy is low, and the large model the other tokens.

    Args:
        small_model: shares the large model's tokenizer; geared or quantized models run unchanged.
        threshold: bits; 0: large model only, infinity: small model only. None: EAD's 0.25, scaled to the vocabulary.
        window: tokens in the rolling mean.
        min_gear_duration: fewest tokens for which a model stays engaged.
        initial_gear: "small" or "large": the model that prefills and generates the first token; "auto": the small one,
            or the large one if the threshold is 0. The other model prefills when it is first engaged.
    """

    small_model: Any = flag(
        None,
        "Smaller model of mode pair, with the tokenizer of --model; --thresholds is then one number of bits",
        named=True,
    )
    threshold: float | None = flag(
        None, "One entropy threshold in bits", name="thresholds", parse=read_thresholds, metavar="BITS"
    )
    window: int = setting(ead.DEFAULT_WINDOW, minimum=1)
    min_gear_duration: int = setting(ead.DEFAULT_MIN_DURATION, minimum=1)
    initial_gear: str = gear_flag(AUTO)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "threshold", one_threshold(self.threshold))
        check_choice("gear of a pair", self.initial_gear, (AUTO, *ead.NAMES))


def one_threshold(given: Any) -> float | None:
    """Return the one threshold of a pair. Raises GearbxError for several, or for a value that is not a threshold."""
    if isinstance(given, ReadThresholds):
        given = given.content.thresholds
    if isinstance(given, str):
        raise GearbxError(f"--thresholds: --small-model needs bits, got {given}; use a number such as {ead.EAD_BITS:g}")
    if isinstance(given, list | tuple):
        if len(given) != 1:
            shown = ",".join(f"{bits:g}" for bits in given)
            raise GearbxError(f"--thresholds: --small-model needs one threshold, got {shown}; use one number of bits")
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
    """Validate that only mode lossless has a draft model. Raises GearbxError for other modes."""
    if draft_model is not None and mode != LOSSLESS:
        raise GearbxError(f"mode '{mode}': takes no draft model; omit it, or use mode '{LOSSLESS}'")


def make_mode(name: str, given: Mapping[str, Any]) -> "Mode":
    """Return a mode with its given flags; a thresholds file may set the gate's window, hysteresis and duration.

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
