"""One function decides how a model is to run: `decide`, from flags, files and the model, and says why in a sentence.

It is asked twice. Without the model it refuses what flags and files alone show to be wrong, before a weight is read.
With the model, whose weights need not be read yet, it knows codes, type and size too, and its decision is final.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bit_selection.precision import PrecisionManifest, read_precision
from ..compat.versions import program_versions
from ..decoding.caches import check_kv_mode
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
    made,
    mode_class,
)
from ..errors import GearbxError, about
from ..formats import DEFAULT_FORMAT, RECONSTRUCTED, get_format, split_name, with_cache
from ..formats.base import Format
from ..gears.activations import stored_dtype
from ..gears.discovery import is_quantized
from ..gears.in_place import OwnCodes, own_codes, without_gears
from ..gears.kernel_choices import AS_8_BITS, AS_EXACT, AS_IT_IS, choose_kernels, seconds_as_stored
from ..gears.ladder import DENSE, DRAFT_FORMAT, EXACT_FORMAT, EXACT_LADDER, Ladder, default_ladder
from ..gears.manifest import PRECISION, Manifest
from ..kernels import ACTIVATIONS
from ..kernels.device import available_memory, device_in_use
from ..kernels.dispatch import CPU, MLX, NATIVE, device, lacks_native
from ..kernels.tuner import Times
from ..loading import (
    DEMO_MODEL,
    adapter_contents,
    checkpoint_gears,
    find,
    fingerprint,
    is_packed,
    model_contents,
    model_name,
)
from ..ranks.place import current
from ..routing.gates import AUTO, ReadThresholds, check_thresholds
from ..settings import flag_of, human_bytes
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
from .terminal import show_compiling

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


class StoredGears(NamedTuple):
    """Say what the gears are and how they are stored; why, and what a user should know of it."""

    ladder: Ladder
    format: str
    manage: str
    group_size: int
    why: str
    note: str = ""


@dataclass(frozen=True)
class Decision:
    """A model as it is to run. What makes models, gearboxes and modes takes this, and decides nothing.

    settings: as given. saved: the gears of the checkpoint, if it is a geared one. precision: the manifest whose tables
    the gears have, or which says what to cap first. cap_bits: further bits that layers are stored at. takes_base:
    whether it has a calibrated base. codes: what can be done with those of a quantized model. observes: no layer may
    change gear. mode_by: the flag that chose the mode, in the place of --mode; "" where none did. drafts: gears and
    format may be those that drafts are fastest with. why: what decided about gears and format, in words. note: what a
    user should know of it.
    """

    settings: GearedSettings
    saved: Manifest | None
    ladder: Ladder
    format: Format
    manage: str
    group_size: int
    precision: PrecisionManifest | None
    cap_bits: tuple[int, ...]
    takes_base: bool
    codes: str
    observes: bool
    mode: Mode
    mode_by: str
    drafts: bool
    why: str
    note: str

    def with_draft(self) -> "Decision":
        """Return the same with the weights as they are and a draft beside them, as `of_drafts` decides on a GPU."""
        return replace(self, format=get_format(DRAFT_FORMAT), ladder=Ladder.parse(EXACT_LADDER))

    def inputs(self) -> dict[str, Any]:
        """Return all that every result of the model in these gears depends on."""
        model, gears = self.settings.model, self.settings.gears
        return {
            "model contents": model_contents(model.model),
            "dtype": model.dtype,
            "device": device_in_use(),
            "adapter_path": model.adapter_path,
            "adapter contents": adapter_contents(model.adapter_path),
            **program_versions(),
            "gears": str(self.ladder),
            "format": self.format.name,
            "manage": self.manage,
            "q_group_size": self.group_size,
            "kernels": gears.kernels.name,
            "activations": gears.kernels.activations,
            **({"low model contents": model_contents(gears.low_model)} if gears.low_model else {}),
            **({"base": gears.base_text} if gears.base_text is not None else {}),
            **({"manifest contents": fingerprint(Path(gears.manifest))} if gears.manifest else {}),
        }


def governed(settings: GearedSettings, mode: str) -> bool:
    """Return whether a controller caps the gears: for a speed, or for memory in a mode whose gears can be capped."""
    limited = settings.gears.residency.limit is not None and not mode_class(mode).uncapped
    return limited or settings.controller.target_tps is not None


def decide(settings: GearedSettings, model: nn.Module | None = None, several_modes: bool = False) -> Decision:
    """Decide about format, ladder, kernels, base and mode.

    Args:
        model: as loaded; None: what flags and files say so far.
        several_modes: later texts may have other modes, which use a prompt gear even if the first mode does not.

    Raises:
        GearbxError: flags that exclude each other, or do not fit the files or the model.
    """
    name, gears, layout = settings.model.model, settings.gears, settings.layout
    saved = checkpoint_gears(name)
    layout = layout_of_thresholds(layout, settings.mode)
    mode, by, asked = choose_mode(settings, layout, saved)
    check_flags(mode, settings.mode.given(), several_modes)
    check_governing(settings, mode)
    check_draft_model(mode, settings.cache.draft_model)
    if settings.cache.kv_gears is not None:
        check_kv_mode(mode, None)
    if model is not None and without_gears(model) and not asked:
        mode = TELEMETRY_ONLY
    observes = mode == TELEMETRY_ONLY or (model is not None and without_gears(model))
    codes = None if model is None else own_codes(model)
    drafting = mode == LOSSLESS and settings.cache.draft_model is None  # which drafts in the place of a gear
    drafts = drafting and not (saved or layout.gears or layout.format or gears.keeps_originals)
    precision = manifest_of(settings, saved, mode)
    if saved is not None:
        stored = of_checkpoint(name, saved, layout, gears)
    elif codes is not None:
        learns = drafts and settings.mode.draft_length is None and not (several_modes and device() == CPU)
        stored = of_codes(name, codes, layout, gears, observes, learns)
    elif precision is not None:
        stored = of_manifest(precision, layout, gears)
    elif drafts and model is not None and not is_quantized(model):
        stored = of_drafts(name, layout, gears, model)
    else:
        stored = of_original(layout, drafting)
    if saved or codes is not None or layout.gears or not is_packed(name):  # whose codes say later which gears it has
        check_in_ladder(settings.mode, stored.ladder)
    format = format_with(gears, stored.format, None if saved is None else name)
    cap_bits = widths(stored.ladder, stored.format, saved) if governed(settings, mode) else ()
    plain = not (saved or gears.low_model or gears.manifest or cap_bits or observes or current())
    return Decision(
        settings=settings,
        saved=saved,
        ladder=stored.ladder,
        format=format,
        manage=stored.manage,
        group_size=stored.group_size,
        precision=precision,
        cap_bits=cap_bits,
        takes_base=base_is_taken(settings, stored.ladder, drafting, plain, model),
        codes="" if codes is None else codes.told(None if observes else stored.ladder),
        observes=observes,
        mode=made(mode, settings.mode.given()),
        mode_by=by,
        drafts=drafts,
        why=stored.why,
        note=stored.note,
    )


# The mode.


def layout_of_thresholds(layout: LayoutSettings, flags: Any) -> LayoutSettings:
    """Return the layout with the gears of a file of thresholds, where it belongs to these alone."""
    source = flags.thresholds
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN and source.content.gears:
        return replace(layout, gears=layout.gears or Ladder(source.content.gears))
    return layout


def choose_mode(settings: GearedSettings, layout: LayoutSettings, saved: Manifest | None) -> tuple[str, str, bool]:
    """Choose the mode by its name, else by flags and files.

    Returns:
        the mode; the flag that chose it in the place of --mode, "" where none did; whether it has to be this mode: else
        nothing shifts where a model turns out to have no gears.
    """
    flags, given = settings.mode, settings.mode.given()
    asked = "draft_length" in given
    if flags.mode is not None:
        return flags.mode, "", True
    source = flags.thresholds
    if isinstance(source, ReadThresholds) and source.content.mode == KICKDOWN:
        return KICKDOWN, "thresholds", True
    if "thresholds" in given:
        return ROUTE, "thresholds", asked
    if settings.controller.target_tps is not None:
        return ROUTE, "target_tps", asked
    if "gear" in given:
        return STATIC, "gear", True
    ladder = layout.gears or (None if saved is None else saved.ladder)
    whole = ladder is not None and ladder[0].dense  # mlx-lm bit for bit
    drafts = given or settings.cache.draft_model is not None
    return (STATIC if whole and not drafts else LOSSLESS), "", asked


def check_flags(mode: str, given: Mapping[str, Any], several_modes: bool = False) -> None:
    """Raises GearbxError for a flag that the mode does not have."""
    kept = {"prompt_gear"} if several_modes else set()
    for name in given.keys() - flags_of_mode(mode).keys() - kept:
        modes = [each for each in SETTINGS if name in flags_of_mode(each) and each != PAIR]
        raise GearbxError(f"{flag_of(name)} is for --mode {' or '.join(modes)}; leave it out, or give that mode")


def check_governing(settings: GearedSettings, mode: str) -> None:
    """Raises GearbxError for a mode whose gears cannot be capped, or for tokens that cannot be timed.

    A limit of memory alone caps nothing in the modes lossless and static: there a `MemoryGuard` holds it.
    """
    timed = settings.controller.target_tps is not None
    flag = "--target-tps" if timed else "--residency with a size"
    reason = mode_class(mode).uncapped
    if reason and (timed or (settings.gears.residency.limit is not None and mode not in (LOSSLESS, STATIC))):
        raise GearbxError(f"--mode {mode} {reason}; leave out {flag}, or use --mode route")


def check_in_ladder(flags: Any, ladder: Ladder) -> None:
    """Raises GearbxError for thresholds or gears of a mode that the ladder does not have; it names the flag."""
    if isinstance(flags.thresholds, tuple):
        check_thresholds(flags.thresholds, len(ladder))
    for name in ("gear", "prompt_gear"):
        gear = getattr(flags, name)
        if gear not in (None, AUTO, SAME):
            with about(flag_of(name)):
                ladder.find(gear)


# The gears and their format.


def of_original(layout: LayoutSettings, drafting: bool) -> StoredGears:
    """Decide by flags, else by default: no gear in the middle where drafts and the top gear do all the work."""
    filled = layout.filled(None, "")
    why = "the defaults" if layout.gears is None else "the gears that were asked for"
    usual = default_ladder(filled["format"])
    if drafting:
        usual = Ladder([usual[0].bits, usual.top.bits])
    return StoredGears(layout.gears or usual, **filled, why=why)


def of_checkpoint(name: str | None, saved: Manifest, layout: LayoutSettings, flags: GearFlags) -> StoredGears:
    """Decide as the checkpoint has its gears. Raises GearbxError for a flag that differs."""
    if flags.base is not None:
        raise GearbxError(f"{name}: has its codes; leave out --base, or convert the original with --calibrate")
    with about(name):
        ladder = saved.chosen(layout.gears)
    return StoredGears(ladder, **layout.filled(saved, f"the gears of {name} have"), why="gears of the checkpoint")


def of_manifest(precision: PrecisionManifest, layout: LayoutSettings, flags: GearFlags) -> StoredGears:
    """Decide as the manifest was measured. Raises GearbxError for a flag that differs."""
    filled = layout.filled(precision, f"{flags.manifest} was measured with")
    return StoredGears(layout.gears or default_ladder(filled["format"]), **filled, why=f"tables of {flags.manifest}")


def of_codes(
    name: str | None, codes: OwnCodes, layout: LayoutSettings, flags: GearFlags, observes: bool, learns: bool
) -> StoredGears:
    """Decide by the codes that a quantized model has.

    Args:
        learns: the gears may be those that drafts are fastest with.

    Raises:
        GearbxError: a ladder that the codes do not have, or a flag for what is made of original weights.
    """
    filled, why = layout.filled(None, ""), "the checkpoint's own codes"
    if observes:
        return StoredGears(layout.gears or codes.watched(default_ladder(filled["format"])), **filled, why=why)
    given = {
        "--manifest": flags.manifest,
        f"--kernels {DEQUANT_CACHE}": flags.kernels.name == DEQUANT_CACHE,
        "--base": flags.base,
        f"--residency {flags.residency.name}": flags.residency.name != "resident",
    }
    with about(model_name(name)):
        ladder = ladder_of_codes(codes, layout, given)
    if learns:  # MLX's kernels would join split codes at each use, which a GPU feels
        by_mlx = device() != CPU and flags.kernels.name != NATIVE
        ladder = Ladder([codes.bits]) if by_mlx else codes.drafting()
    return StoredGears(ladder, **filled, why=why)


def ladder_of_codes(codes: OwnCodes, asked: LayoutSettings, given: Mapping[str, Any]) -> Ladder:
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


def of_drafts(name: str | None, layout: LayoutSettings, flags: GearFlags, model: nn.Module) -> StoredGears:
    """Decide how an original model is stored that drafts for itself: as it is, with a draft beside it.

    On a GPU both are MLX's own, so that the top gear is mlx-lm's bit for bit, and MLX makes the draft in one pass over
    the weights. On a CPU, format exact stores both once where memory is short; decoding takes time there.
    """
    filled, whole = layout.filled(None, ""), Ladder.parse(EXACT_LADDER)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    beside = weights * whole[0].bits // DENSE
    sizes = f"{human_bytes(beside)} beside the {human_bytes(weights)} of the checkpoint"
    if device() != CPU:
        why = f"the weights as they are, and a draft of {sizes}"
        return StoredGears(whole, **filled | {"format": DRAFT_FORMAT}, why=why)
    if lacking := lacks_native(flags.kernels.name):
        why = f"the weights as they are, since MLX's own kernels would draft too slowly ({lacking})"
        return StoredGears(Ladder([DENSE]), **filled, why=why, note=f"MLX's own kernels compute, slowly: {lacking}")
    short = 4 * beside > available_memory()  # the texts of a run need some too
    if short and takes_whole(flags, model):
        seconds = seconds_as_stored(model, ACTIVATIONS[flags.kernels.activations], filled["group_size"])
        note = f"memory is short for drafts of {sizes}: format exact stores both once{cost_of_whole(seconds)}"
        why = "one exact copy of the weights with its draft inside, since memory is short"
        return StoredGears(whole, **filled | {"format": EXACT_FORMAT}, why=why, note=note)
    note = ""
    if short:
        note = f"memory is short for drafts of {sizes}; one gear of 8 bits takes half of it: --mode static --gears 8"
    elif name is not None:  # else next to nothing
        less = "; --format exact takes less memory than the checkpoint, and is slower here"
        note = f"drafts take about {sizes}{less if stored_dtype(model) == mx.bfloat16 else ''}"
    return StoredGears(whole, **filled, why="a draft beside the weights as they are, which is fastest here", note=note)


def takes_whole(flags: GearFlags, model: nn.Module) -> bool:
    """Return whether a model can have format exact, and be fast: MLX's kernels on a CPU decode such weights slowly."""
    if stored_dtype(model) != mx.bfloat16 or flags.kernels.name == MLX:
        return False
    show_compiling()
    return choose_kernels(flags.kernels.name, True, flags.kernels.activations, ours_alone=True).native


def cost_of_whole(seconds: Times) -> str:
    """Say what products in format exact cost here, and those of one gear of 8 bits; "" where nothing was timed."""
    if not seconds:
        return ""
    exact, quantized = (f"{seconds[name] / seconds[AS_IT_IS]:.2f}" for name in (AS_EXACT, AS_8_BITS))
    return (
        f". Its products take {exact} times as long as with the weights as they are, and those of one gear of 8 bits "
        f"{quantized} times, for less memory and a small loss: --mode static --gears 8"
    )


def format_with(flags: GearFlags, format: str, geared: str | None) -> Format:
    """Return the format, with a cache of unpacked weights where that is asked for.

    Raises:
        GearbxError: such a cache of a geared checkpoint, or in a format that has packed weights of MLX's own.
    """
    if flags.kernels.name != DEQUANT_CACHE:
        return get_format(format)
    if geared is not None:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: {geared} has its gears packed; leave it out, or give the original"
        )
    if split_name(format)[0] not in RECONSTRUCTED:
        raise GearbxError(
            f"--kernels {DEQUANT_CACHE}: format {format} is multiplied packed; give --format {RECONSTRUCTED[0]}"
        )
    return with_cache(format)


# What belongs to the gears.


def manifest_of(settings: GearedSettings, saved: Manifest | None, mode: str) -> PrecisionManifest | None:
    """Return the manifest that is named, or for a controller the one that lies in a geared checkpoint.

    Raises:
        GearbxError: a file that cannot be read, or is another model's.
    """
    given, name = settings.gears.manifest, settings.model.model
    if saved is None:
        return None if given is None else read_precision(Path(given))
    file = Path(given) if given is not None else find(name or DEMO_MODEL) / PRECISION
    if given is None and not (governed(settings, mode) and file.exists()):
        return None
    precision = read_precision(file)
    with about(file):
        precision.check_model(saved.fingerprint)
    return precision


def widths(ladder: Ladder, format: str, saved: Manifest | None) -> tuple[int, ...]:
    """Return further bits to which a controller can cap layers: those of the checkpoint, or that are made now."""
    if format == EXACT_FORMAT:  # whose layers have the widths of its ladder alone
        return ()
    if saved is not None:
        return tuple(bits for bits in saved.gears if bits < ladder.top.bits)
    if format != DEFAULT_FORMAT:  # in which alone further bits take hardly more memory
        return ()
    return tuple(bits for bits in CAP_BITS if bits < ladder.top.bits)


def base_is_taken(
    settings: GearedSettings, ladder: Ladder, drafting: bool, plain: bool, model: nn.Module | None
) -> bool:
    """Return whether the lowest gear has calibrated codes: where that is asked for, or where some are kept for drafts.

    Mode lossless takes those that are there without being asked: its text is the top gear's, with any drafts.

    Args:
        drafting: the lowest gear drafts.
        plain: nothing else says which codes layers have.

    Raises:
        GearbxError: a base is asked for, and the model cannot have one.
    """
    if model is None:
        return False
    able = plain and not is_quantized(model) and not ladder[0].dense
    if settings.gears.base_text is not None and not able:
        raise GearbxError("--base TEXT is for an original model in one process, without other codes; leave it out")
    return able and (settings.gears.base_text is not None or (drafting and ladder.top.dense))
