"""One function decides how a model is to run: `decide`, from flags and the description of a model, with its reasons.

It is pure, and asked once, before a weight is read: it reads no file and asks no machine (`describe` did), and what it
refuses, it refuses in one line. What makes models, gearboxes and modes (`build.py`) decides nothing. The gears are
those of the first row that applies (`gears_of`); `tests/cli/test_decisions.py` lists what follows from it.

| the model        | what was asked for        | here                   | gears, format                       |
| ---              | ---                       | ---                    | ---                                 |
| has saved gears  |                           |                        | those, or some of them              |
| has codes        | telemetry only            |                        | its own, named and not made         |
|                  | drafts, without a ladder  | a GPU, MLX's kernels   | its codes whole                     |
|                  | drafts, without a ladder  | other kernels          | its codes, and 4 bits if drafts pay |
|                  | anything else             |                        | its codes, and 4 bits below 5 to 8  |
| original weights | a manifest                |                        | as it was measured                  |
|                  | ladder, format, no drafts |                        | as asked for, else the defaults     |
|                  | nothing                   | a CPU, MLX's kernels   | 16 bits: nothing is quantized       |
|                  | drafts, or nothing        | a GPU                  | 4,16 in affine                      |
|                  | drafts, or nothing        | a CPU, memory is short | 4,16 in exact, if bfloat16          |
|                  | drafts, or nothing        | a CPU                  | 4,16 in planes                      |
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
    """The settings of a command that has a model in gears, and no mode.

    It takes no base that happens to be kept: what it measures is what the flags say.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    gears: GearFlags = field(default_factory=GearFlags)
    mode: Any = field(default_factory=lambda: ModeFlags(mode=STATIC))
    cache: CacheSettings = field(default_factory=CacheSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)


class ChosenMode(NamedTuple):
    """A mode. by: the flag that chose it in the place of --mode; "" without one. asked: whether it has to be this one,
    else nothing shifts in a model without gears.
    """

    name: str
    by: str = ""
    asked: bool = True


@dataclass(frozen=True)
class Decision:
    """A model as it is to run.

    settings: as given. model: as described. cap_bits: further bits that layers are stored at. takes_base: whether it
    has a calibrated base. observes: no layer may change gear. drafts: nobody asked for gears or format, of which the
    low gear drafts. mode_by: the flag that chose the mode, in the place of --mode; "" without one. reasons: what
    decided, in words. notes, warnings: what a user should know before gears are made, and before weights are read.
    exact_for_room: format exact was chosen since memory is short.
    """

    settings: GearedSettings
    model: Description
    ladder: Ladder
    format: Format
    manage: str
    group_size: int
    cap_bits: tuple[int, ...]
    takes_base: bool
    observes: bool
    drafts: bool
    mode: Mode
    mode_by: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    exact_for_room: bool = False

    @property
    def saved(self) -> Manifest | None:
        """The gears of the checkpoint, if it is a geared one."""
        return self.model.saved

    @property
    def precision(self) -> PrecisionManifest | None:
        """The manifest whose tables the gears have, or which says what to cap first."""
        return self.model.precision if self.model.saved is None or self.settings.gears.manifest or self.caps else None

    @property
    def caps(self) -> bool:
        """True if a controller caps the gears."""
        return governed(self.settings, self.mode.name)

    @property
    def codes(self) -> str:
        """What can be done with the codes of a quantized model, in words; "" of others."""
        codes = None if self.model.gearless else self.model.codes
        return "" if codes is None else codes.summary(None if self.observes else self.ladder)

    @property
    def one_gear(self) -> bool:
        """True if a quantized model has no gears to compare."""
        return self.model.gearless or (bool(self.codes) and len(self.ladder) == 1)


@dataclass(frozen=True)
class Case:
    """What `gears_of` looks at. layout: that of the flags, with the ladder of a file of thresholds."""

    settings: GearedSettings
    layout: LayoutSettings
    model: Description
    mode: ChosenMode
    several_modes: bool

    @property
    def observes(self) -> bool:
        return self.mode.name == TELEMETRY_ONLY or self.model.gearless

    @property
    def drafting(self) -> bool:
        """True if the lowest gear drafts, and not another model."""
        return self.mode.name == LOSSLESS and self.settings.cache.draft_model is None

    @property
    def asked(self) -> bool:
        """True if flags say which gears there are, or how they are made."""
        return bool(self.layout.gears or self.layout.format or self.settings.gears.keeps_originals)

    @property
    def drafts(self) -> bool:
        """True if gears and format may be those that drafts are fastest with."""
        return self.drafting and not self.asked and self.model.saved is None and not self.model.gearless

    @property
    def unasked(self) -> bool:
        """True if nobody asked for drafts either."""
        return self.drafts and self.settings.mode.mode is None and not self.settings.mode.given()

    @property
    def learns(self) -> bool:
        """True if drafts may have the gears that measure fastest: their length is free, and other modes need none."""
        free = self.settings.mode.num_draft_tokens is None
        return self.drafts and free and not (self.several_modes and self.model.machine.device == CPU)


def governed(settings: GearedSettings, mode: str) -> bool:
    """Return whether a controller caps the gears: for a speed, or for memory in a mode whose gears can be capped."""
    limited = settings.gears.residency.limit is not None and not mode_class(mode).uncapped
    return limited or settings.controller.target_tps is not None


def decide(settings: GearedSettings, model: Description, several_modes: bool = False) -> Decision:
    """Decide about format, ladder, kernels, base and mode.

    Args:
        several_modes: later texts may have other modes, which use a prompt gear even if the first mode does not.

    Raises:
        GearbxError: flags that exclude each other, or do not fit the model or the machine.
    """
    layout = layout_of_thresholds(settings.layout, settings.mode)
    mode = choose_mode(settings, layout, model.saved)
    check_flags(mode.name, settings.mode.given(), several_modes)
    check_governing(settings, mode.name)
    check_draft_model(mode.name, settings.cache.draft_model)
    if model.gearless and not mode.asked:
        mode = mode._replace(name=TELEMETRY_ONLY)
    case = Case(settings, layout, model, mode, several_modes)
    stored = gears_of(case)
    if model.original and not case.observes:
        check_supported(get_format(stored.format), [gear.bits for gear in stored.ladder])
    check_in_ladder(settings.mode, stored.ladder)
    cap_bits = widths(stored, model.saved) if governed(settings, mode.name) else ()
    warnings: list[str] = []
    if not case.observes:
        check_limit(model, stored, settings.gears.residency.limit)
        warnings = room_warnings(model, stored, settings.gears.residency.name, case.drafts)
    decision = Decision(
        settings=settings,
        model=model,
        ladder=stored.ladder,
        format=format_with(settings.gears, stored.format, model),
        manage=stored.manage,
        group_size=stored.group_size,
        cap_bits=cap_bits,
        takes_base=takes_base(case, stored.ladder, bool(cap_bits)),
        observes=case.observes,
        drafts=case.drafts,
        mode=make_mode(mode.name, settings.mode.given()),
        mode_by=mode.by,
        reasons=(stored.why, f"mode {mode.name}" + (f" (by {flag_of(mode.by)})" if mode.by else "")),
        warnings=tuple(warnings),
        exact_for_room=case.drafts and stored.format == EXACT_FORMAT,
    )
    return replace(decision, notes=(*filter(None, [stored.note]), *notes_of(decision)))


def notes_of(decision: Decision) -> list[str]:
    """Return what a user should know of a decision, whatever its gears are."""
    model, mode, found = decision.model, decision.mode.name, list[str]()
    if decision.mode_by == "target_tps":
        found.append(
            f"with --target-tps the text is a mixture of gears (mode {mode}), and not the top gear's; "
            f"leave it out for mode {LOSSLESS}"
        )
    kernels = decision.settings.gears.kernels.name
    if decision.ladder[0].dense and not decision.drafts and model.machine.device == CPU and kernels == "auto":
        found.append(
            f"--gears {DENSE} is mlx-lm bit for bit, with MLX's kernels, which are slow on a CPU; --kernels native "
            "is many times as fast, and rounds otherwise"
        )
    if model.gearless and decision.settings.mode.mode != TELEMETRY_ONLY:
        found.append(
            f"{model.title} is quantized and divided between ranks: telemetry only, no layer changes gear; "
            "of what gearbx_mlx convert makes of it, ranks can divide the gears"
        )
    elif decision.codes and decision.observes:
        found.append(f"{model.title} changes no gear in mode {TELEMETRY_ONLY}; other modes use its {decision.codes}")
    elif decision.codes:
        found.append(f"{model.title} is quantized to {decision.codes}")
    return found


# The mode.


def layout_of_thresholds(layout: LayoutSettings, flags: Any) -> LayoutSettings:
    """Return the layout with the gears of a file of thresholds, where it belongs to these alone."""
    source = flags.thresholds
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN and source.content.gears:
        return replace(layout, gears=layout.gears or Ladder(source.content.gears))
    return layout


def choose_mode(settings: GearedSettings, layout: LayoutSettings, saved: Manifest | None) -> ChosenMode:
    """Choose the mode by its name, else by flags and files."""
    flags, given = settings.mode, settings.mode.given()
    asked, source = "num_draft_tokens" in given, flags.thresholds
    if flags.mode is not None:
        return ChosenMode(flags.mode)
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN:
        return ChosenMode(KICKDOWN, "thresholds")
    if "thresholds" in given:
        return ChosenMode(ROUTE, "thresholds", asked)
    if settings.controller.target_tps is not None:
        return ChosenMode(ROUTE, "target_tps", asked)
    if "gear" in given:
        return ChosenMode(STATIC, "gear")
    ladder = layout.gears or (None if saved is None else saved.ladder)
    whole = ladder is not None and ladder[0].dense  # mlx-lm bit for bit
    drafts = given or settings.cache.draft_model is not None
    return ChosenMode(STATIC if whole and not drafts else LOSSLESS, asked=asked)


def check_flags(mode: str, given: Mapping[str, Any], several_modes: bool = False) -> None:
    """Validate flags of modes. Raises GearbxError for a flag that the mode does not have."""
    kept = {"prompt_gear"} if several_modes else set()
    for name in given.keys() - flags_of_mode(mode).keys() - kept:
        modes = [each for each in SETTINGS if name in flags_of_mode(each) and each != PAIR]
        raise GearbxError(f"{flag_of(name)} is for --mode {' or '.join(modes)}; leave it out, or give that mode")


def check_governing(settings: GearedSettings, mode: str) -> None:
    """Validate what a controller is to hold.

    A limit of memory alone caps nothing in the modes lossless and static: there a `MemoryGuard` holds it.

    Raises:
        GearbxError: a mode whose gears cannot be capped, or tokens that cannot be timed.
    """
    timed = settings.controller.target_tps is not None
    flag = "--target-tps" if timed else "--residency with a size"
    reason = mode_class(mode).uncapped
    if reason and (timed or (settings.gears.residency.limit is not None and mode not in (LOSSLESS, STATIC))):
        raise GearbxError(f"--mode {mode} {reason}; leave out {flag}, or use --mode route")


def check_in_ladder(flags: Any, ladder: Ladder) -> None:
    """Validate thresholds and gears of a mode. Raises GearbxError, naming the flag, for those that a ladder lacks."""
    if isinstance(flags.thresholds, tuple):
        check_thresholds(flags.thresholds, len(ladder))
    for name in ("gear", "prompt_gear"):
        gear = getattr(flags, name)
        if gear not in (None, AUTO, SAME):
            with error_context(flag_of(name)):
                ladder.find(gear)


# The gears and their format.


def gears_of(case: Case) -> StoredGears:
    """Return the gears of the first row of the table above that applies. Raises GearbxError as the row."""
    model, precision = case.model, case.model.precision
    if model.saved is not None:
        return of_checkpoint(case, model.saved)
    if model.codes is not None and not model.gearless:
        return of_codes(case, model.codes)
    if precision is not None:
        return of_manifest(case, precision)
    if not case.drafts:
        return of_flags(case)
    if case.unasked and not model.machine.native_kernels:
        return of_originals(case)
    return of_drafts(case)


def of_flags(case: Case) -> StoredGears:
    """Decide by flags, else by default: no gear in the middle where drafts and the top gear do all the work."""
    layout, filled = case.layout, case.layout.filled(None, "")
    why = "the defaults" if layout.gears is None else "the gears that were asked for"
    usual = default_ladder(filled["format"])
    if case.drafting:
        usual = Ladder([usual[0].bits, usual.top.bits])
    return StoredGears(layout.gears or usual, **filled, why=why)


def of_checkpoint(case: Case, saved: Manifest) -> StoredGears:
    """Decide as the checkpoint has its gears. Raises GearbxError for a flag that differs."""
    name, layout = case.model.title, case.layout
    if case.settings.gears.base is not None:
        raise GearbxError(f"{name}: has its codes; leave out --base, or convert the original with --calibrate")
    with error_context(name):
        ladder = saved.chosen(layout.gears)
    return StoredGears(ladder, **layout.filled(saved, f"the gears of {name} have"), why="gears of the checkpoint")


def of_manifest(case: Case, precision: PrecisionManifest) -> StoredGears:
    """Decide as the manifest was measured. Raises GearbxError for a flag that differs."""
    file = case.settings.gears.manifest
    filled = case.layout.filled(precision, f"{file} was measured with")
    return StoredGears(case.layout.gears or default_ladder(filled["format"]), **filled, why=f"tables of {file}")


def of_codes(case: Case, codes: Codes) -> StoredGears:
    """Decide by the codes that a quantized model has.

    Raises:
        GearbxError: a ladder that the codes do not have, or a flag for what is made of original weights.
    """
    layout, flags = case.layout, case.settings.gears
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
    if case.learns:  # MLX's kernels would join split codes at each use, which a GPU feels
        by_mlx = case.model.machine.device != CPU and flags.kernels.name != NATIVE
        ladder = Ladder([codes.bits]) if by_mlx else codes.drafting()
    return StoredGears(ladder, **filled, why=why)


def ladder_of_codes(codes: Codes, asked: LayoutSettings, given: Mapping[str, Any]) -> Ladder:
    """Return the gears of a quantized model that are asked for.

    Args:
        given: flags for what is made of original weights, with their values.

    Raises:
        GearbxError: one of them, another format or group size, or gears that the codes do not have.
    """
    refused = {
        "--format": asked.format not in (None, DEFAULT_FORMAT),
        "--q-group-size": getattr(asked, "q_group_size", None) not in (None, codes.group_size),
        **given,
    }
    for flag in (flag for flag, value in refused.items() if value not in (None, False)):
        raise GearbxError(
            f"is quantized already, and its gears are the first bits of its codes; leave out {flag}, or give "
            "the original"
        )
    return codes.chosen(asked.gears)


def of_originals(case: Case) -> StoredGears:
    """Quantize nothing unasked where MLX's kernels compute on a CPU: they take ten times as long with fewer bits."""
    why = "the weights as they are, since MLX's kernels are slow on a CPU with quantized ones"
    why_not = case.model.machine.no_kernels
    note = f"no native kernels ({why_not}): the weights stay as they are, and drafts come by lookup alone"
    return StoredGears(Ladder([DENSE]), **case.layout.filled(None, ""), why=why, note=note)


def of_drafts(case: Case) -> StoredGears:
    """Decide how an original model is stored that drafts for itself: as it is, with a draft beside it.

    On a GPU both are MLX's own, so that the top gear is mlx-lm's bit for bit, and MLX makes the draft in one pass over
    the weights. On a CPU, format exact stores both once where memory is short; decoding takes time there.
    """
    model, filled, whole = case.model, case.layout.filled(None, ""), Ladder.parse(EXACT_LADDER)
    beside = model.size * whole[0].bits // DENSE
    sizes = f"{human_bytes(beside)} beside the {human_bytes(model.size)} of the checkpoint"
    if model.machine.device != CPU:
        why = f"the weights as they are, and a draft of {sizes}"
        return StoredGears(whole, **filled | {"format": DRAFT_FORMAT}, why=why)
    short = 4 * beside > model.machine.available - model.size  # the texts of a run need some too
    is_bfloat16, ours = model.dtype == "BF16", case.settings.gears.kernels.name != MLX and model.machine.native_kernels
    if short and is_bfloat16 and ours:  # MLX's kernels on a CPU decode such weights slowly
        note = f"memory is short for drafts of {sizes}: format exact stores both once"
        why = "one exact copy of the weights with its draft inside, since memory is short"
        return StoredGears(whole, **filled | {"format": EXACT_FORMAT}, why=why, note=note)
    note = ""
    if short:
        note = f"memory is short for drafts of {sizes}; one gear of 8 bits takes half of it: --mode static --gears 8"
    elif model.name is not None:  # else next to nothing
        less = "; --format exact takes less memory than the checkpoint, and is slower here" if is_bfloat16 else ""
        note = f"drafts take about {sizes}{less}"
    return StoredGears(whole, **filled, why="a draft beside the weights as they are, which is fastest here", note=note)


def format_with(flags: GearFlags, format: str, model: Description) -> Format:
    """Return the format, with a cache of unpacked weights where that is asked for.

    Raises:
        GearbxError: such a cache of a geared checkpoint, or in a format that has packed weights of MLX's own.
    """
    if flags.kernels.name != DEQUANT_CACHE:
        return get_format(format)
    if model.saved is not None:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: {model.title} has its gears packed; leave it out, or give the original"
        )
    if split_name(format)[0] not in RECONSTRUCTED:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: format {format} is multiplied packed; give --format {RECONSTRUCTED[0]}"
        )
    return with_cache(format)


# What belongs to the gears.


def widths(stored: StoredGears, saved: Manifest | None) -> tuple[int, ...]:
    """Return further bits to which a controller can cap layers: those of the checkpoint, or that are made now."""
    top = stored.ladder.top.bits
    if stored.format == EXACT_FORMAT:  # whose layers have the widths of its ladder alone
        return ()
    if saved is not None:
        return tuple(bits for bits in saved.gears if bits < top)
    if stored.format != DEFAULT_FORMAT:  # in which alone further bits take hardly more memory
        return ()
    return tuple(bits for bits in CAP_BITS if bits < top)


def takes_base(case: Case, ladder: Ladder, capped: bool) -> bool:
    """Return whether the lowest gear has calibrated codes: where that is asked for, or where some are kept for drafts.

    Mode lossless takes those that are there without being asked: its text is the top gear's, with any drafts.

    Raises:
        GearbxError: a base is asked for, and the model cannot have one.
    """
    flags, model = case.settings.gears, case.model
    alone = not (flags.low_model or flags.manifest or capped or case.observes or model.machine.ranked)
    able = alone and model.original and not ladder[0].dense
    if flags.base_text is not None and not able:
        raise GearbxError("--base TEXT is for an original model in one process, without other codes; leave it out")
    return able and (flags.base_text is not None or (case.drafting and ladder.top.dense))
