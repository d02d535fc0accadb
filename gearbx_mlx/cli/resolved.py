"""What a command is to run: flags, files and checkpoint brought together, once, before a weight is read."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..bit_selection.defaults import Floors
from ..bit_selection.precision import PrecisionManifest, read_precision
from ..compat.versions import versions
from ..decoding.caches import check_kv_mode
from ..decoding.mode import SAME
from ..decoding.modes import MODES, mode_class
from ..errors import GearbxError, about
from ..formats import RECONSTRUCTED, get_format, split_name, with_cache
from ..formats.base import Format
from ..gears.ladder import WHOLE, WHOLE_LADDER, Ladder
from ..gears.manifest import PRECISION, Manifest
from ..kernels.device import device_in_use
from ..loading import DEMO_MODEL, adapter_contents, find, fingerprint, gears_of, is_packed, model_contents
from ..routing.gates import ThresholdFile
from .flags import TELEMETRY_ONLY, ControllerSettings, GearedSettings, ModelSettings, ModeSettings
from .gears import (
    DEQUANT_CACHE,
    FloorSettings,
    GearFlags,
    LayoutSettings,
    check_routing,
    quality_ladder,
)
from .settings import flag_of

ROUTE, KICKDOWN, LOSSLESS, STATIC = "route", "kickdown", "lossless", "static"
GOVERNING = "target_tps", "watch_machine", "max_memory"  # flags of what caps gears, which route has
TOP_ALONE = "draft_model", "kv_gear"  # flags that lossless does not take, and the top gear alone does
NO_FLAGS, NO_FLOORS, UNGOVERNED = GearFlags(), FloorSettings(), ControllerSettings()


@dataclass(frozen=True)
class ModeChoice:
    """The mode, and what belongs to it, files followed.

    own: settings as given. by: the flag that chose the mode, in the place of --mode; "" where none did. asked: whether
    it has to be this mode; else nothing shifts where a model turns out to have no gears. changes: whether later texts
    may have other modes.
    """

    mode: str = LOSSLESS
    own: ModeSettings = field(default_factory=ModeSettings)
    by: str = ""
    asked: bool = False
    changes: bool = False

    def of(self, observes: bool) -> "ModeChoice":
        """The choice for a model. observes: it has no gears."""
        return replace(self, mode=TELEMETRY_ONLY) if observes and not self.asked else self


@dataclass(frozen=True)
class Resolved:
    """A model as it is to run. What makes models, gearboxes and modes takes this, and parses nothing.

    saved: the gears of the checkpoint, if it is a geared one. floors: bits follow from them. precision: the manifest
    whose tables the gears have. calibrate_base: the text that chooses the lowest gear's codes ("": what ships).
    cap_bits: further bits that layers are stored at.
    asked: gears, format and group size as given. drafts_best: mode lossless without any of these, so that they are
    chosen for the model: the draft of original weights (`layout_of_drafts`), and of codes (`OwnCodes.drafting`).
    why: what decided about gears and format, in words.
    """

    model: ModelSettings
    saved: Manifest | None
    ladder: Ladder
    format: Format
    manage: str
    group_size: int
    residency: str
    kernels: str
    activations: str
    low_model: str | None
    calibrate_base: str | None
    floors: Floors | None
    manifest: str | None
    precision: PrecisionManifest | None
    cap_bits: tuple[int, ...]
    controller: ControllerSettings
    asked: LayoutSettings = field(default_factory=LayoutSettings)
    kv_gears: tuple[int, ...] | None = None
    mode: ModeChoice = ModeChoice(STATIC)  # what measures gears takes no base that happens to be kept
    drafts_best: bool = False
    why: str = ""

    @property
    def observes(self) -> bool:
        """Whether no layer may change gear."""
        return self.mode.mode == TELEMETRY_ONLY

    def in_whole_weights(self) -> "Resolved":
        """The same with format exact: one copy of the weights that has its low gear inside."""
        return replace(self, format=get_format(WHOLE), ladder=Ladder.parse(WHOLE_LADDER))

    def check_mode(self) -> None:
        """Raises GearbxError for thresholds or gears of the mode that the ladder does not have."""
        check_in_ladder(self.mode, self.ladder)

    def inputs(self) -> dict[str, Any]:
        """All that every result of the model in these gears depends on."""
        return {
            **model_inputs(self.model),
            "gears": str(self.ladder),
            "format": self.format.name,
            "manage": self.manage,
            "q_group_size": self.group_size,
            "kernels": self.kernels,
            "activations": self.activations,
            **({"low model contents": model_contents(self.low_model)} if self.low_model else {}),
            **({"calibrate_base": self.calibrate_base} if self.calibrate_base is not None else {}),
            **({"floors": vars(self.floors)} if self.floors else {}),
            **({"manifest contents": fingerprint(Path(self.manifest))} if self.manifest else {}),
        }


def check_in_ladder(mode: ModeChoice, ladder: Ladder) -> None:
    """Raises GearbxError for thresholds or gears of a mode that the ladder does not have; it names the flag."""
    check_routing(mode.own, ladder)
    for name, gear in {"gear": mode.own.gear, "prompt_gear": mode.own.prompt_gear}.items():
        if gear is not None and (name, gear) != ("prompt_gear", SAME):
            with about(flag_of(name)):
                ladder.find(gear)


def resolve(settings: GearedSettings, mode_changes: bool = False) -> Resolved:
    """A model with its gears and its mode. Raises GearbxError for everything that can be wrong without weights.

    Args:
        mode_changes: later texts may have other modes, which use a prompt gear even if the first mode does not.
    """
    mode, layout = choose_mode(settings, gears_of(settings.model.model), mode_changes)
    check_governing(settings.controller, mode.mode, settings.cache.draft_model)
    kv_gears = settings.cache.kv_gears
    if kv_gears is not None:
        check_kv_mode(mode.mode, settings.cache.kv_gear)
    found = resolve_gears(settings.model, layout, settings.gears, settings.floors, settings.controller)
    chosen = found.saved or layout.gears or layout.format or settings.gears.keeps_originals
    found = replace(found, kv_gears=kv_gears, mode=mode, drafts_best=mode.mode == LOSSLESS and not chosen)
    if found.saved or layout.gears or not is_packed(settings.model.model):  # whose codes say later which gears it has
        found.check_mode()
    return found


def resolve_gears(
    model: ModelSettings,
    layout: LayoutSettings,
    flags: GearFlags = NO_FLAGS,
    floors: FloorSettings = NO_FLOORS,
    controller: ControllerSettings = UNGOVERNED,
) -> Resolved:
    """A model with its gears: of a geared checkpoint, else as flags and manifest say, else by default.

    Args:
        controller: where it caps layers, a manifest says the order; without a flag the one beside a geared checkpoint.

    Raises:
        GearbxError: a flag that differs from the checkpoint or the manifest, or floors where bits are given.
    """
    name, saved = model.model, gears_of(model.model)
    precision: PrecisionManifest | None = None
    ladder, why = layout.gears, "the defaults" if layout.gears is None else "the gears that were asked for"
    if saved is not None:
        if floors.wanted:
            raise GearbxError(f"the gears of {name} have their bits; leave out the floors, or give the original")
        if flags.calibrate_base is not None:
            raise GearbxError(
                f"{name}: has its codes; leave out --calibrate-base, or convert the original with --calibrate"
            )
        if controller.wanted or flags.manifest is not None:
            precision = precision_beside(name, saved, flags.manifest)
        with about(name):
            ladder = saved.chosen(ladder)
        filled, why = layout.filled(saved, f"the gears of {name} have"), "gears of the checkpoint"
    elif flags.manifest is not None:
        if floors.wanted:
            raise GearbxError("--manifest has the bits of every layer; leave out the floors")
        precision = read_precision(Path(flags.manifest))
        filled, why = layout.filled(precision, f"{flags.manifest} was measured with"), f"tables of {flags.manifest}"
    else:
        filled = layout.filled(None, "")
    format = filled.pop("format")
    cached = flags.kernels == DEQUANT_CACHE
    if cached:
        check_dequant_cache(None if saved is None else name, format)
    ladder = ladder or quality_ladder(format, floors.wanted)
    return Resolved(
        model=model,
        saved=saved,
        ladder=ladder,
        format=with_cache(format) if cached else get_format(format),
        **filled,
        **vars(flags),
        floors=floors.floors(format),
        precision=precision,
        cap_bits=controller.widths(ladder, format, None if saved is None else saved.gears),
        controller=controller,
        asked=layout,
        why=why,
    )


def check_dequant_cache(geared: str | None, format: str) -> None:
    """Raises GearbxError for a geared checkpoint, or a format that has packed weights of MLX's own."""
    if geared is not None:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: {geared} has its gears packed; leave it out, or give the original"
        )
    if split_name(format)[0] not in RECONSTRUCTED:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: format {format} is multiplied packed; give --format {RECONSTRUCTED[0]}"
        )


def precision_beside(model: str | None, saved: Manifest, given: str | None) -> PrecisionManifest | None:
    """What says which layers of a geared checkpoint to cap first: a file that is given, or the one that lies in it.

    Raises:
        GearbxError: a file that cannot be read, or is another model's.
    """
    file = Path(given) if given is not None else find(model or DEMO_MODEL) / PRECISION
    if given is None and not file.exists():
        return None
    precision = read_precision(file)
    with about(file):
        precision.check_model(saved.fingerprint)
    return precision


def choose_mode(
    settings: GearedSettings, saved: Manifest | None, mode_changes: bool = False
) -> tuple[ModeChoice, LayoutSettings]:
    """The mode, and the ladder with its format, that flags, files and checkpoint ask for together.

    Args:
        saved: the gears of the checkpoint, if it is a geared one.
        mode_changes: as in `resolve`.

    Raises:
        GearbxError: flags that exclude each other, a flag of another mode.
    """
    own, layout = settings.mode, settings.layout
    mode, by = TELEMETRY_ONLY if own.observes else own.mode, ""
    made = own.source if isinstance(own.source, ThresholdFile) else None  # it may say for which mode and gears
    if made is not None and made.mode == KICKDOWN:
        layout = replace(layout, gears=layout.gears or Ladder(made.gears))
        if mode is None:
            mode, by = KICKDOWN, "thresholds"
    choice = ModeChoice(mode or LOSSLESS, own, by, mode is not None, mode_changes)
    if mode is None:
        ladder = layout.gears or (saved.ladder if saved is not None else None)
        choice = without_mode(settings, choice, whole=ladder is not None and ladder[0].dense)
    check_flags(choice.mode, given_flags(own) - {"prompt_gear"} if mode_changes else given_flags(own))
    return choice, layout


def without_mode(settings: GearedSettings, choice: ModeChoice, whole: bool) -> ModeChoice:
    """The choice where no mode is named: the one whose flags were given, else lossless, or the top gear alone.

    Args:
        whole: the original weights are the only gear, which is mlx-lm bit for bit.
    """
    flags, controller = given_flags(choice.own), settings.controller
    asked = bool(flags - settings_of_mode(TELEMETRY_ONLY))
    governed = [name for name in GOVERNING if getattr(controller, name) is not None]
    others = flags - settings_of_mode(LOSSLESS) - {"prompt_gear"}  # which several modes have, so that it names none
    if governed or others:
        mode = ROUTE if governed or others <= settings_of_mode(ROUTE) else STATIC
        return replace(choice, mode=mode, by=min(others or governed, key=(*FLAGS, *GOVERNING).index), asked=asked)
    alone = [name for name in TOP_ALONE if getattr(settings.cache, name) is not None]
    if alone or (whole and not flags):
        return replace(choice, mode=STATIC, by=min(alone, default=""), asked=asked)
    return replace(choice, asked=asked)


def check_governing(settings: ControllerSettings, mode: str, draft_model: str | None) -> None:
    """Raises GearbxError for a mode whose gears cannot be capped, or for tokens that cannot be timed."""
    if not settings.wanted:
        return
    if reason := mode_class(mode).uncapped:
        raise GearbxError(f"--mode {mode} {reason}; leave out --target-tps and --watch-machine, or use --mode route")
    if draft_model is not None:
        raise GearbxError("with --draft-model tokens come several at a time and cannot be timed; leave it out")


def check_flags(mode: str, given: set[str]) -> None:
    """Raises GearbxError for a flag that the mode does not have."""
    has = settings_of_mode(mode)
    for name in FLAGS:
        if name in given - has:
            modes = [each for each in MODES if name in settings_of_mode(each) and each != "pair"]
            raise GearbxError(f"{flag_of(name)} is for --mode {' or '.join(modes)}; leave it out, or give that mode")


EVERY_MODE = {"mode", "small_model", "window"}  # flags that say no mode
FLAGS = tuple(item.name for item in fields(ModeSettings) if item.name not in EVERY_MODE)


def given_flags(own: ModeSettings) -> set[str]:
    """Flags that belong to some modes, and were given."""
    default = ModeSettings()
    return {name for name in FLAGS if getattr(own, name) != getattr(default, name)}


def settings_of_mode(mode: str) -> set[str]:
    return {item.name for item in fields(mode_class(mode))}


def model_inputs(settings: ModelSettings) -> dict[str, Any]:
    """The inputs that every result of a model depends on."""
    return {
        "model contents": model_contents(settings.model),
        "dtype": settings.dtype,
        "device": device_in_use(),
        "adapter_path": settings.adapter_path,
        "adapter contents": adapter_contents(settings.adapter_path),
        **versions(),
    }
