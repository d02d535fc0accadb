"""Flags of the gears and of the gate between them, as given and as they are once the checkpoint is known."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..bit_selection.defaults import LAZY, STRICT, Floors
from ..errors import LARGEST_SHOWN, GearbxError, about, numbers
from ..files.reading import read_as
from ..formats import (
    CODEBOOKS,
    DEFAULT_FORMAT,
    FORMATS,
    RECONSTRUCTED,
    CodebookOptions,
    has_codebooks,
    name_with,
    split_name,
)
from ..gears.ladder import (
    DEFAULT_ACTIVATIONS,
    DEFAULT_GROUP_SIZE,
    DEFAULT_LADDER,
    GROUP_SIZES,
    MANAGE,
    RESIDENCIES,
    WHOLE,
    WHOLE_LADDER,
    Ladder,
)
from ..gone import gone
from ..kernels import ACTIVATIONS, KERNELS
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
from .settings import Settings, flag, flag_of

AUTO: Literal["auto"] = "auto"
DEQUANT_CACHE = "dequant-cache"  # a choice of --kernels (GEARBX 7.1)
Thresholds = tuple[float, ...] | Literal["auto"]
MAKE_THRESHOLDS = "write a new one with python -m gearbx_mlx.calibrate"


def parse_floors(text: str) -> tuple[float, ...]:
    """--auto-bits as numbers, two at most. Raises GearbxError for anything else."""
    floors = numbers("--auto-bits", text, float, "0.98,0.93") if text else ()
    if len(floors) > 2:
        raise GearbxError(f"--auto-bits is {text}; give two floors at most, such as 0.98,0.93")
    return floors


@dataclass(frozen=True)
class FloorSettings(Settings):
    """Floors as given; none or one: the others by default."""

    title: ClassVar[str] = "quality floors (format codebook or codebook-library)"

    auto_bits: tuple[float, ...] | None = flag(
        None,
        "Give every layer the fewest bits whose cosine reaches its floor: one for attention, shared experts, dense "
        "MLPs and the head, and one for routed experts. A gear of fewer bits has a layer at those. "
        f"Default: XFP_MIN_COS_STRICT or {STRICT}, XFP_MIN_COS_LAZY or {LAZY}",
        metavar="STRICT,LAZY",
        nargs="?",
        const="",
        parse=parse_floors,
        rare=True,
    )

    @property
    def wanted(self) -> bool:
        return self.auto_bits is not None

    def floors(self, format: str | None) -> Floors | None:
        """The floors for a format; None where none are asked for.

        Raises:
            GearbxError: a floor outside (0, 1), or a format that has no codebooks.
        """
        if self.auto_bits is None:
            return None
        floors = Floors.chosen(*self.auto_bits, *[None] * (2 - len(self.auto_bits)))
        if not has_codebooks(format):
            raise GearbxError(f"quality floors choose codebooks, and the format is {format}; give --format codebook")
        return floors


if TYPE_CHECKING:
    from ..bit_selection.precision import PrecisionManifest
    from ..gears.manifest import Manifest


OF_LIBRARY = ("library", "group")


def parse_format(text: str) -> str:
    """--format as the name of a format. Raises GearbxError for one that does not exist, or has not these choices."""
    base, choices = split_name(text)
    if base not in FORMATS:
        raise GearbxError(f"--format is {text}; choose from {', '.join(FORMATS)}")
    if not choices:
        return base
    if base not in CODEBOOKS:
        raise GearbxError(f"--format is {text}, and only codebooks have choices; give --format {base}")
    with about("--format"):
        chosen = CodebookOptions.parse(choices)
    for name in OF_LIBRARY:
        if base != CODEBOOKS[1] and f"{name}=" in choices:
            raise GearbxError(f"--format is {text}, and {name} belongs to format {CODEBOOKS[1]}; give that one")
    return name_with(base, chosen)


@dataclass(frozen=True)
class FormatSettings(Settings):
    """How layers are stored, as given; None: as the checkpoint or the manifest says, else the default."""

    title: ClassVar[str] = "gears"

    format: str | None = flag(
        None,
        f"How gears are stored: {', '.join(FORMATS)}. Codebooks have choices: codebook-library:sigma=3,cap=0.02,"
        f"rounds=20,library=32,group=128. Default: {DEFAULT_FORMAT}",
        parse=parse_format,
        metavar="FORMAT",
    )
    manage: str | None = flag(None, "Linear layers that change gear. Default: all", choices=MANAGE, rare=True)
    q_group_size: int | None = flag(
        None, f"Group size of planes and affine. Default: {DEFAULT_GROUP_SIZE}", choices=GROUP_SIZES, rare=True
    )

    @property
    def chosen_format(self) -> str:
        """The format as flags say, else the default."""
        return self.format or DEFAULT_FORMAT

    def filled(self, source: "Manifest | PrecisionManifest | None", why: str) -> dict[str, Any]:
        """Format, manage and group size: those of `source`, which flags may repeat and not change, else the defaults.

        Args:
            why: ends the error's first half, such as "the gears of DIR have".

        Raises:
            GearbxError: a flag that differs from `source`.
        """
        defaults = {"format": DEFAULT_FORMAT, "manage": "all", "group_size": DEFAULT_GROUP_SIZE}
        found = {}
        for key, default in defaults.items():
            field = "q_group_size" if key == "group_size" else key
            there = default if source is None else getattr(source, key)
            wanted = getattr(self, field)
            if source is not None and wanted not in (None, there):
                name = flag_of(field)
                raise GearbxError(f"{name} is {wanted}, and {why} {there}; leave out {name}")
            found[key] = there if wanted is None else wanted
        return found


@dataclass(frozen=True)
class LadderSettings(Settings):
    """Which gears, as given."""

    title: ClassVar[str] = "gears"

    gears: Ladder | None = flag(
        None,
        "Bits of the gears, ascending; 16: the weights as they are. Default: those of a geared checkpoint, or "
        f"{DEFAULT_LADDER}; with format {WHOLE} {WHOLE_LADDER}",
        parse=Ladder.parse,
    )


@dataclass(frozen=True)
class LayoutSettings(LadderSettings, FormatSettings):
    """Which gears, and how they are stored; as given."""


@dataclass(frozen=True)
class GearFlags(Settings):
    """How the gears run, as given."""

    title: ClassVar[str] = "gearbox"

    manifest: str | None = flag(
        None,
        "Tables of gears, bits for every layer, from gearbx_mlx.allocate; its format, group size and layers.",
        metavar="FILE",
        named=True,
        rare=True,
    )
    residency: str = flag(
        "resident",
        "Where idle gears are: in memory, or read again from disk; stream: the top gear is never in memory.",
        choices=RESIDENCIES,
    )
    kernels: str = flag(
        "auto",
        "MLX's own, or native ones: for the CPU, compiled when first used, or for Metal; auto: for each kind of layer "
        "the fastest, measured once on this machine, except for the original weights alone (--gears 16), which stay "
        f"mlx-lm bit for bit; measure: measures again, with a table. {DEQUANT_CACHE}: MLX's, over weights that are "
        "unpacked once after a shift and kept, for formats without packed weights of MLX "
        f"({', '.join(RECONSTRUCTED)}); it costs the memory of dense weights.",
        choices=(*KERNELS, DEQUANT_CACHE),
        rare=True,
    )
    activations: str = flag(
        DEFAULT_ACTIVATIONS,
        "What native kernels of the CPU multiply weights by: activations as they are, or rounded to 16 or 8 bits for "
        "each group of inputs, beside weights of bfloat16 to that type, which is faster.",
        choices=tuple(ACTIVATIONS),
        rare=True,
    )
    low_model: str | None = flag(
        None,
        "The same model as mlx-lm's DWQ, AWQ, GPTQ or dynamic quantization wrote it: it is the lowest gear.",
        metavar="PATH",
        named=True,
        rare=True,
    )

    calibrate_base: str | None = flag(
        None,
        "Choose the lowest gear's codes for the inputs of its layers in a text: UTF-8, or JSON Lines as in GSM8K. "
        "Drafts then agree more often, in as many bits. It takes minutes, once: the result stays in the user's cache. "
        "Without TEXT: what ships.",
        nargs="?",
        const="",
        metavar="TEXT",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate_base is not None and self.other_codes:
            raise GearbxError("--calibrate-base chooses codes; leave it out, or leave out --manifest and --low-model")

    @property
    def other_codes(self) -> bool:
        """Whether a file says which codes layers have."""
        return self.manifest is not None or self.low_model is not None

    @property
    def keeps_originals(self) -> bool:
        """Whether format exact is not the default: other codes, originals that are read again, MLX's kernels."""
        return self.other_codes or self.residency == "disk" or self.kernels in ("mlx", DEQUANT_CACHE)


def quality_ladder(format: str, by_quality: bool) -> Ladder:
    """The default ladder of a format: codebooks have no 8 bits, and quality floors begin at 2."""
    if format == WHOLE:
        return Ladder.parse(WHOLE_LADDER)
    if not has_codebooks(format):
        return Ladder.parse(DEFAULT_LADDER)
    return Ladder((2, 16) if by_quality else (4, 16))


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
        own = {name: getattr(self, name) for name in GateValues.__match_args__}
        given = {name: value for name, value in own.items() if value is not None}
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
class RoutingSettings(GateSettings):
    """Thresholds as given (a file, or bits with commas between; None: the paper's), their gate, and the first gear."""

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
    said = gone(f"a file for mode '{content.mode}'")
    if said is not None:
        raise GearbxError(said)
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


def routing_for(settings: RoutingSettings, ladder: Ladder, vocab_size: int, fingerprint: Callable[[], str]) -> Routing:
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
        return Routing(**vars(settings.filled(source)), thresholds=thresholds)
    thresholds = default_thresholds(len(ladder), vocab_size) if source is None else source
    check_thresholds(thresholds, len(ladder))
    return Routing(**vars(settings.filled()), thresholds=thresholds)


def route_fields(
    settings: RoutingSettings, ladder: Ladder, vocab_size: int, fingerprint: Callable[[], str]
) -> dict[str, Any]:
    """The routing of mode route, which can find its thresholds on a prompt. Raises GearbxError as `routing_for`."""
    if settings.source == AUTO:
        return vars(settings.filled()) | {"thresholds": AUTO}
    return vars(routing_for(settings, ladder, vocab_size, fingerprint))


def initial_gear(settings: RoutingSettings, ladder: Ladder, prompt: str) -> str:
    """The gear to begin in. The prompt is judged as typed: the words of a chat template are not the user's."""
    if settings.initial_gear == AUTO:
        return ladder[first_gear(prompt, len(ladder))].name
    return settings.initial_gear
