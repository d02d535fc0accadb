"""The decision on how a model runs: `decide` is a pure function of flags and the description of a model.

It runs once, before a weight is read, and reads no file (`describe` did). A refusal is one line. `build.py` decides
nothing. `gears_of` takes the first row that applies; `tests/cli/test_decisions.py` lists the consequences.

| the model        | flags                     | the machine            | gears, format                       |
| ---              | ---                       | ---                    | ---                                 |
| has saved gears  |                           |                        | those, or some of them              |
| is quantized     | telemetry only            |                        | its own, named and not made         |
|                  | drafts, without a ladder  | a GPU, MLX's kernels   | its own bits                        |
|                  | drafts, without a ladder  | other kernels          | its own, and 4 bits if faster       |
|                  | anything else             |                        | its own, and 4 bits below 5 to 8    |
| original weights | a manifest                |                        | as measured                         |
|                  | ladder, format, no drafts |                        | by flags, else the defaults         |
|                  | none                      | a CPU, MLX's kernels   | 16 bits: nothing is quantized       |
|                  | drafts, or none           | a GPU                  | 4,16 in affine                      |
|                  | drafts, or none           | a CPU, memory is short | 4,16 in exact, if bfloat16          |
|                  | drafts, or none           | a CPU                  | 4,16 in planes                      |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..bit_selection.precision import PrecisionManifest
from ..decoding.mode import SAME, Mode
from ..decoding.modes import (
    KICKDOWN,
    LOSSLESS,
    PAIR,
    ROUTE,
    SETTINGS,
    STATIC,
    TELEMETRY_ONLY,
    check_draft_model,
    flags_of_mode,
    make_mode,
    mode_class,
)
from ..errors import GearbxError, error_context
from ..formats import DEFAULT_FORMAT, RECONSTRUCTED, get_format, split_name, with_cache
from ..formats.base import Format, check_supported
from ..gears.in_place import Codes
from ..gears.ladder import DENSE, DRAFT_FORMAT, EXACT_FORMAT, EXACT_LADDER, Ladder, default_ladder
from ..gears.manifest import Manifest
from ..kernels.dispatch import CPU, MLX, NATIVE
from ..routing.gates import AUTO, ReadThresholds, check_thresholds
from ..settings import flag_of, human_bytes
from .describe import Description
from .flags import (
    DEQUANT_CACHE,
    CacheSettings,
    ControllerSettings,
    GearedSettings,
    GearFlags,
    LayoutSettings,
    ModeFlags,
    ModelSettings,
)
from .memory import StoredGears, check_limit, room_warnings

CAP_BITS = (4, 5, 6, 8)


@dataclass(frozen=True)
class JustGears:
    """Settings of a command that has a model in gears, and no mode of its own. Kept bases do not change its gears."""

    model: ModelSettings = field(default_factory=ModelSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    gears: GearFlags = field(default_factory=GearFlags)
    mode: Any = field(default_factory=lambda: ModeFlags(mode=STATIC))
    cache: CacheSettings = field(default_factory=CacheSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)


class ChosenMode(NamedTuple):
    """A mode by its name.

    Attributes:
        by: the flag that selected it in the place of --mode; "" without one.
        required: False if a model without gears may run in telemetry-only instead.
    """

    name: str
    by: str = ""
    required: bool = True


@dataclass(frozen=True)
class Case:
    """Input of `gears_of`. layout: the flags' layout, with the ladder of a thresholds file."""

    settings: GearedSettings
    layout: LayoutSettings
    model: Description
    chosen: ChosenMode
    several_modes: bool

    @property
    def observes(self) -> bool:
        """Observation only: no layer may change gear."""
        return self.chosen.name == TELEMETRY_ONLY or self.model.gearless

    @property
    def drafting(self) -> bool:
        """Drafting by the lowest gear, without a draft model."""
        return self.chosen.name == LOSSLESS and self.settings.cache.draft_model is None

    @property
    def drafts(self) -> bool:
        """Free choice of the gears and the format with the fastest drafts: no flag sets them."""
        by_flags = self.layout.gears or self.layout.format or self.settings.gears.keeps_originals
        return self.drafting and not by_flags and self.model.saved is None and not self.model.gearless

    @property
    def by_default(self) -> bool:
        """Drafts by default: no flag requests them either."""
        return self.drafts and self.settings.mode.mode is None and not self.settings.mode.given()

    @property
    def caps(self) -> bool:
        """Caps on the gears by a controller: for a speed, or for memory in a mode whose gears can be capped."""
        limited = self.settings.gears.residency.limit is not None and not mode_class(self.chosen.name).no_caps_reason
        return limited or self.settings.controller.target_tps is not None


@dataclass(frozen=True)
class Decision(Case):
    """A model as it is to run.

    Attributes:
        cap_bits: additional bits at which layers are stored.
        takes_base: True if the lowest gear is a calibrated base.
        warnings: lines to show before weights are read.
    """

    stored: StoredGears
    format: Format
    cap_bits: tuple[int, ...]
    takes_base: bool
    mode: Mode
    warnings: tuple[str, ...]

    @property
    def ladder(self) -> Ladder:
        return self.stored.ladder

    @property
    def precision(self) -> PrecisionManifest | None:
        """The manifest with the tables of the gears, or with the layers to cap first."""
        return self.model.precision if self.model.saved is None or self.settings.gears.manifest or self.caps else None

    @property
    def codes(self) -> str:
        """The gears of a quantized model, in words; "" for other models."""
        codes = None if self.model.gearless else self.model.codes
        return "" if codes is None else codes.summary(None if self.observes else self.ladder)

    @property
    def one_gear(self) -> bool:
        """Absence of gears to compare, in a quantized model."""
        return self.model.gearless or (bool(self.codes) and len(self.ladder) == 1)

    @property
    def reasons(self) -> tuple[str, str]:
        """The reasons for gears and mode."""
        by = f" (by {flag_of(self.chosen.by)})" if self.chosen.by else ""
        return self.stored.why, f"mode {self.mode.name}{by}"

    @property
    def notes(self) -> list[str]:
        """Lines to show before gears are made."""
        model, mode, notes = self.model, self.mode.name, [self.stored.note] if self.stored.note else []
        if self.chosen.by == "target_tps":
            notes.append(f"--target-tps: output in mixed gears (mode {mode}); omit it for the top gear's output")
        kernels = self.settings.gears.kernels.name
        if self.ladder[0].dense and not self.drafts and model.machine.device == CPU and kernels == "auto":
            notes.append(f"--gears {DENSE}: MLX's kernels, as in mlx-lm, slow on a CPU; use --kernels native for speed")
        if model.gearless and self.settings.mode.mode != TELEMETRY_ONLY:
            notes.append(
                f"{model.title}: quantized and divided between ranks, so no layer changes gear; "
                "use a checkpoint from gearbx_mlx convert for gears"
            )
        elif self.codes and self.observes:
            notes.append(f"{model.title}: no gear changes in mode {TELEMETRY_ONLY}; other modes use its {self.codes}")
        elif self.codes:
            notes.append(f"{model.title}: quantized to {self.codes}")
        return notes


def decide(settings: GearedSettings, model: Description, several_modes: bool = False) -> Decision:
    """Decide on format, ladder, kernels, base and mode.

    Args:
        several_modes: True if later outputs may have other modes, possibly with a prompt gear.

    Raises:
        GearbxError: flags that exclude each other, or do not fit the model or the machine.
    """
    layout = layout_of_thresholds(settings.layout, settings.mode)
    chosen = choose_mode(settings, layout, model.saved)
    check_flags(chosen.name, settings.mode.given(), several_modes)
    check_governing(settings, chosen.name)
    check_draft_model(chosen.name, settings.cache.draft_model)
    if model.gearless and not chosen.required:
        chosen = chosen._replace(name=TELEMETRY_ONLY)
    case = Case(settings, layout, model, chosen, several_modes)
    stored = gears_of(case)
    if model.original and not case.observes:
        check_supported(get_format(stored.format), [gear.bits for gear in stored.ladder])
    check_in_ladder(settings.mode, stored.ladder)
    cap_bits = widths(stored, model.saved) if case.caps else ()
    warnings: list[str] = []
    if not case.observes:
        check_limit(model, stored, settings.gears.residency.limit)
        warnings = room_warnings(model, stored, settings.gears.residency.name, case.drafts)
    return Decision(
        **vars(case),
        stored=stored,
        format=format_with(settings.gears, stored.format, model),
        cap_bits=cap_bits,
        takes_base=takes_base(case, stored.ladder, bool(cap_bits)),
        mode=make_mode(chosen.name, settings.mode.given()),
        warnings=tuple(warnings),
    )


# The mode.


def layout_of_thresholds(layout: LayoutSettings, flags: Any) -> LayoutSettings:
    """Return the layout, with the gears of a thresholds file that fits no others."""
    source = flags.thresholds
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN and source.content.gears:
        return replace(layout, gears=layout.gears or Ladder(source.content.gears))
    return layout


def choose_mode(settings: GearedSettings, layout: LayoutSettings, saved: Manifest | None) -> ChosenMode:
    """Choose the mode by its name, else by flags and files."""
    flags, given = settings.mode, settings.mode.given()
    required, source = "num_draft_tokens" in given, flags.thresholds
    if flags.mode is not None:
        return ChosenMode(flags.mode)
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN:
        return ChosenMode(KICKDOWN, "thresholds")
    if "thresholds" in given:
        return ChosenMode(ROUTE, "thresholds", required)
    if settings.controller.target_tps is not None:
        return ChosenMode(ROUTE, "target_tps", required)
    if "gear" in given:
        return ChosenMode(STATIC, "gear")
    ladder = layout.gears or (None if saved is None else saved.ladder)
    as_mlx_lm = ladder is not None and ladder[0].dense and not given and settings.cache.draft_model is None
    return ChosenMode(STATIC if as_mlx_lm else LOSSLESS, required=required)


def check_flags(mode: str, given: Mapping[str, Any], several_modes: bool = False) -> None:
    """Validate that the mode has these flags."""
    kept = {"prompt_gear"} if several_modes else set()
    for name in given.keys() - flags_of_mode(mode).keys() - kept:
        modes = " or ".join(each for each in SETTINGS if name in flags_of_mode(each) and each != PAIR)
        raise GearbxError(f"{flag_of(name)}: only for --mode {modes}, got --mode {mode}; omit it, or use that mode")


def check_governing(settings: GearedSettings, mode: str) -> None:
    """Validate that the gears of a mode can be capped for a speed, and tokens timed.

    In the modes lossless and static a `MemoryGuard` holds a memory limit without caps.
    """
    timed = settings.controller.target_tps is not None
    flag = "--target-tps" if timed else "--residency with a size"
    reason = mode_class(mode).no_caps_reason
    if reason and (timed or (settings.gears.residency.limit is not None and mode not in (LOSSLESS, STATIC))):
        raise GearbxError(f"--mode {mode}: {reason}; omit {flag}, or use --mode route")


def check_in_ladder(flags: Any, ladder: Ladder) -> None:
    """Validate that a ladder has the thresholds and gears of a mode; an error names the flag."""
    if isinstance(flags.thresholds, tuple):
        check_thresholds(flags.thresholds, len(ladder))
    for name in ("gear", "prompt_gear"):
        gear = getattr(flags, name)
        if gear not in (None, AUTO, SAME):
            with error_context(flag_of(name)):
                ladder.find(gear)


# The gears and their format.


def gears_of(case: Case) -> StoredGears:
    """Return the gears of the first row of the module's table that applies."""
    model, layout, manifest = case.model, case.layout, case.settings.gears.manifest
    if model.saved is not None:
        if case.settings.gears.base is not None:
            raise GearbxError(
                f"{model.title}: has its codes; omit --base, or use the original with convert --calibrate"
            )
        with error_context(model.title):
            ladder = model.saved.chosen(layout.gears)
        filled = layout.filled(model.saved, f"the gears of {model.title} have")
        return StoredGears(ladder, **filled, why="gears of the checkpoint")
    if model.codes is not None and not model.gearless:
        return gears_of_codes(case, model.codes)
    if model.precision is not None:
        filled = layout.filled(model.precision, f"{manifest} was measured with")
        return StoredGears(layout.gears or default_ladder(filled["format"]), **filled, why=f"tables of {manifest}")
    if case.drafts:
        return gears_with_drafts(case)
    filled = layout.filled(None, "")
    usual = default_ladder(filled["format"])
    if case.drafting:  # drafts and the top gear do all the work
        usual = Ladder([usual[0].bits, usual.top.bits])
    why = "the defaults" if layout.gears is None else "the gears that were asked for"
    return StoredGears(layout.gears or usual, **filled, why=why)


def gears_of_codes(case: Case, codes: Codes) -> StoredGears:
    """Return the gears of a quantized model."""
    layout, flags, device = case.layout, case.settings.gears, case.model.machine.device
    filled, why = layout.filled(None, ""), "the checkpoint's own codes"
    if case.observes:
        return StoredGears(layout.gears or codes.watched(default_ladder(filled["format"])), **filled, why=why)
    given = {
        "--manifest": flags.manifest,
        f"--kernels {DEQUANT_CACHE}": flags.kernels.name == DEQUANT_CACHE,
        "--base": flags.base,
        f"--residency {flags.residency.name}": flags.residency.name != "resident",
    }
    with error_context(case.model.title):
        ladder = ladder_of_codes(codes, layout, given)
    other_modes = case.several_modes and device == CPU
    if case.drafts and case.settings.mode.num_draft_tokens is None and not other_modes:
        # MLX's kernels would join split codes at each use. This is slow on a GPU.
        by_mlx = device != CPU and flags.kernels.name != NATIVE
        ladder = Ladder([codes.bits]) if by_mlx else codes.drafting()
    return StoredGears(ladder, **filled, why=why)


def ladder_of_codes(codes: Codes, asked: LayoutSettings, given: Mapping[str, Any]) -> Ladder:
    """Return the requested gears of a quantized model.

    Args:
        given: values of flags that need original weights.

    Raises:
        GearbxError: any of these flags, a different format or group size, or gears that the codes lack.
    """
    refused = {
        "--format": asked.format not in (None, DEFAULT_FORMAT),
        "--q-group-size": getattr(asked, "q_group_size", None) not in (None, codes.group_size),
        **given,
    }
    for flag in (flag for flag, value in refused.items() if value not in (None, False)):
        raise GearbxError(
            f"quantized already, with the first bits of its codes as gears; omit {flag}, or use the original"
        )
    return codes.chosen(asked.gears)


def gears_with_drafts(case: Case) -> StoredGears:
    """Return the gears of an original model that drafts for itself: its own weights, with a draft beside them.

    On a GPU, both use MLX's kernels, so the top gear is bit-identical to mlx-lm's. On a CPU, format exact stores both
    once if memory is short; decoding takes time there. Without native kernels nothing is quantized by default, because
    MLX's CPU kernels are ten times as slow with fewer bits.
    """
    model, filled, ladder = case.model, case.layout.filled(None, ""), Ladder.parse(EXACT_LADDER)
    no_kernels = model.machine.no_kernels
    if case.by_default and no_kernels:
        note = f"no native kernels ({no_kernels}): original weights, and drafts by prompt lookup only"
        why = "the original weights, since MLX's kernels are slow on a CPU with quantized ones"
        return StoredGears(Ladder([DENSE]), **filled, why=why, note=note)
    draft_bytes = model.size * ladder[0].bits // DENSE
    sizes = f"{human_bytes(draft_bytes)} beside the {human_bytes(model.size)} of the checkpoint"
    if model.machine.device != CPU:
        why = f"the original weights, and a draft of {sizes}"
        return StoredGears(ladder, **filled | {"format": DRAFT_FORMAT}, why=why)
    short = 4 * draft_bytes > model.machine.available - model.size  # outputs need memory too
    is_bfloat16, uses_mlx = model.dtype == "BF16", case.settings.gears.kernels.name == MLX or no_kernels
    if short and is_bfloat16 and not uses_mlx:  # MLX's CPU kernels decode such weights slowly
        note = f"memory is short for drafts of {sizes}: format exact stores both once"
        why = "one exact copy of the weights with its draft inside, since memory is short"
        return StoredGears(ladder, **filled | {"format": EXACT_FORMAT}, why=why, note=note)
    note = ""
    if short:
        note = f"memory is short for drafts of {sizes}; use --mode static --gears 8 for half the memory"
    elif model.name is not None:  # the demo model takes next to nothing
        less = "; use --format exact for less memory than the checkpoint, slower here" if is_bfloat16 else ""
        note = f"drafts take about {sizes}{less}"
    return StoredGears(ladder, **filled, why="a draft beside the original weights, which is fastest here", note=note)


def format_with(flags: GearFlags, format: str, model: Description) -> Format:
    """Return the format, with a cache of unpacked weights if --kernels dequant-cache requests it."""
    if flags.kernels.name != DEQUANT_CACHE:
        return get_format(format)
    name = f"--kernels {DEQUANT_CACHE}"
    if model.saved is not None:
        raise GearbxError(f"{name}: {model.title} has packed gears; omit it, or use the original")
    if split_name(format)[0] not in RECONSTRUCTED:
        raise GearbxError(f"{name}: format {format} is multiplied packed; use --format {RECONSTRUCTED[0]}")
    return with_cache(format)


# Parts of the gears.


def widths(stored: StoredGears, saved: Manifest | None) -> tuple[int, ...]:
    """Return additional bits to which a controller can cap layers: the checkpoint's, or bits to make."""
    if stored.format == EXACT_FORMAT:  # its layers have only the bits of its ladder
        return ()
    if saved is None and stored.format != DEFAULT_FORMAT:  # only planes store additional bits in little memory
        return ()
    return tuple(bits for bits in (CAP_BITS if saved is None else saved.gears) if bits < stored.ladder.top.bits)


def takes_base(case: Case, ladder: Ladder, capped: bool) -> bool:
    """Return whether the lowest gear has calibrated codes, either requested or kept for drafts.

    Mode lossless uses kept ones by default: its output is the top gear's, whatever drafts.
    """
    flags, model = case.settings.gears, case.model
    excluded = flags.low_model or flags.manifest or capped or case.observes or model.machine.ranked
    able = not excluded and model.original and not ladder[0].dense
    if flags.base_text is not None and not able:
        raise GearbxError("--base TEXT: needs an original model in one process, without other codes; omit it")
    return able and (flags.base_text is not None or (case.drafting and ladder.top.dense))
