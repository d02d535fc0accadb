"""A model in gears, opened as a command's settings say: what generate, chat and server have in common."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..bit_selection.defaults import Floors
from ..bit_selection.precision import PrecisionManifest, fit, read_precision
from ..decoding.caches import check_heads, check_kv_mode
from ..decoding.draft_plans import read_draft_file, shipped
from ..decoding.governor import Governor
from ..decoding.mode import Mode
from ..decoding.modes import MODES, mode_class
from ..errors import GearbxError, about
from ..evaluation.session import adapter_contents, fingerprint, model_contents, versions
from ..formats import DEFAULT_FORMAT, RECONSTRUCTED, get_format, split_name, with_cache
from ..gears.activations import stored_dtype
from ..gears.discovery import Predicate, vocabulary, with_clamps
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..gears.kernel_choices import choose_kernels, measure_gears
from ..gears.ladder import DEFAULT_LADDER, DENSE, WHOLE, WHOLE_LADDER, Ladder, kv_ladder
from ..gears.manifest import PRECISION, Manifest
from ..gears.saved import saved_gears, without_gears
from ..kernels import MEASURE
from ..kernels.device import device_in_use
from ..loading import DEMO_MODEL, find, gears_of, load, model_name
from ..machine.readers import OwnMemory, Reader, Scripted, Watch, this_machine
from ..routing.acceptance import DraftFile
from ..routing.gates import ThresholdFile
from .flags import TELEMETRY_ONLY, ControllerSettings, GearedSettings, ModelSettings
from .gate import AUTO, GateSettings, RoutingSettings, check_routing, initial_gear, route_fields, routing_for
from .gears import FloorSettings, GearFlags, GearSettings, LayoutSettings, quality_ladder
from .loaded import load_model, warn_of_memory
from .settings import flag_of, human_bytes
from .tables import kernels_table
from .terminal import measuring, messages, note, progress_bar, show_compiling, show_encoding

NO_FLOORS = FloorSettings()
VECTORS = (1, 2, 4, 8, 16)  # in one product: those that share a measurement with all up to 16


def settle_gears(
    model: str | None,
    layout: LayoutSettings,
    flags: GearFlags | None = None,
    floors: FloorSettings = NO_FLOORS,
    default: str | None = DEFAULT_LADDER,
    capped: bool = False,
) -> GearSettings:
    """The settings of a gearbox: of a geared checkpoint, else as flags and manifest say, else by default.

    Args:
        model: path or Hub repository; None: the demo model.
        default: the ladder where neither a flag nor the checkpoint has one; None: none.
        capped: whether a controller is to cap layers, for which a manifest says the order, of a geared checkpoint too.

    Raises:
        GearbxError: a flag that differs from the checkpoint or the manifest, or floors where bits are given.
    """
    flags = flags or GearFlags()
    saved = gears_of(model)
    ladder = layout.gears
    precision: PrecisionManifest | None = None
    if saved is not None:
        for given, what in ((flags.manifest and not capped, "--manifest"), (floors.wanted, "the floors")):
            if given:
                raise GearbxError(f"the gears of {model} have their bits; leave out {what}, or give the original")
        precision = precision_beside(model, saved, flags.manifest) if capped else None
        with about(model):
            ladder = str(saved.chosen(ladder))
        filled = layout.filled(saved, f"the gears of {model} have")
    elif flags.manifest is not None:
        if floors.wanted:
            raise GearbxError("--manifest has the bits of every layer; leave out the floors")
        precision = read_precision(Path(flags.manifest))
        filled = layout.filled(precision, f"{flags.manifest} was measured with")
    else:
        filled = layout.filled(None, "")
    if flags.dequant_cache:
        check_dequant_cache(model if saved is not None else None, filled["format"])
    if ladder is None and default is not None:
        ladder = quality_ladder(filled["format"] if saved is None else None, floors.wanted, default)
    return GearSettings(
        ladder=None if ladder is None else Ladder.parse(ladder),
        **filled,
        **vars(flags),
        floors=floors.floors(filled["format"]),
        precision=precision,
    )


def check_dequant_cache(geared: str | None, format: str) -> None:
    """Raises GearbxError for a geared checkpoint, or a format that has packed weights of MLX's own."""
    if geared is not None:
        raise GearbxError(f"--dequant-cache: {geared} has its gears packed; leave it out, or give the original")
    if split_name(format)[0] not in RECONSTRUCTED:
        raise GearbxError(f"--dequant-cache: format {format} is multiplied packed; give --format {RECONSTRUCTED[0]}")


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


def in_whole_weights(settings: GearSettings, model: nn.Module) -> GearSettings:
    """For a model of bfloat16 the settings with format exact, one copy of the weights that has its low gear inside.

    Not where MLX's kernels run on a CPU: they decode such weights slowly.
    """
    if without_gears(model) or stored_dtype(model) != mx.bfloat16:
        return settings
    show_compiling()
    if not choose_kernels(settings.kernels, True, settings.activations, ours_alone=True).native:
        return settings
    return replace(settings, format=WHOLE, ladder=Ladder.parse(WHOLE_LADDER))


def make_gearbox(
    settings: GearSettings, model: nn.Module, checkpoint: str | None, dtype: str = "auto", observe: bool = False
) -> Gearbox | Observer:
    """A gearbox with everything that the settings ask for; an observer for a model without gears.

    Args:
        checkpoint: what the model was loaded from; None: the demo model.
        dtype: the type to compute in.
        observe: return an observer for any model.

    Raises:
        GearbxError: settings that do not fit the model.
    """
    if observe or without_gears(model):
        if settings.kernels == MEASURE:
            note("kernels: nothing is measured without gears")
        return Observer(model, settings.gears, dtype=dtype)
    show_compiling()
    show_encoding()
    low_model = None if settings.low_model is None else load(settings.low_model)[0]
    layers: dict[str, Any] = {"manage": settings.manage, "widths": settings.cap_bits}
    if settings.precision is not None and saved_gears(model) is None:
        layers = layers_of_manifest(settings, settings.precision, model)
    elif settings.floors is not None:
        layers["manage"] = predicate_of_floors(model, settings, settings.floors)
    gearbox = Gearbox(
        model,
        settings.gears,
        format=with_cache(settings.format) if settings.dequant_cache else settings.format,
        group_size=settings.group_size,
        low_model=low_model,
        residency=settings.residency,
        checkpoint=find(checkpoint or DEMO_MODEL) if settings.residency == "disk" else None,
        dtype=dtype,
        kernels="mlx" if settings.dequant_cache else settings.kernels,
        activations=settings.activations,
        **layers,
    )
    if settings.kernels == MEASURE:
        with measuring():
            measure_gears(gearbox, VECTORS)
        show_kernels(gearbox)
    return gearbox


def show_kernels(gearbox: Gearbox) -> None:
    """Print, on stderr, which kernels were chosen by what was measured."""
    tuner = gearbox.kernel_choices.tuner
    if tuner.used:
        messages.print(kernels_table(tuner.used))
        note(f"kernels: measured in {tuner.seconds:.2f} s" if tuner.seconds else "kernels: as measured earlier")
    else:
        note("kernels: nothing to choose, for layers so small, with GEARBX_TUNE=0 or without native kernels")


def require_gearbox(settings: GearSettings, model: nn.Module, checkpoint: str | None, dtype: str = "auto") -> Gearbox:
    """As `make_gearbox`. Raises GearbxError for a model that has no gears."""
    gearbox = make_gearbox(settings, model, checkpoint, dtype)
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            f"{model_name(checkpoint)}: is quantized already and has no gears to compare; "
            "give the model that it was made from"
        )
    return gearbox


def predicate_of_floors(model: nn.Module, settings: GearSettings, floors: Floors) -> Predicate:
    """Which layers change gear, each with the fewest bits that reach its floor; prints what was chosen."""
    from ..bit_selection.codebook_selection import select_bits, selection_lines  # codebooks: few runs need them

    with progress_bar() as progress:
        selection = select_bits(model, settings.format, settings.manage, floors, progress)
    for line in selection_lines(selection):
        note(line)
    return selection.predicate


def layers_of_manifest(settings: GearSettings, precision: PrecisionManifest, model: nn.Module) -> dict[str, Any]:
    """The manifest's part of a gearbox's keywords: manage, tables and widths.

    Raises:
        GearbxError: it belongs to another model, or names a layer that this model does not have.
    """
    with about(settings.manifest):
        manifest, _, missing = fit(precision, model)
    for path in missing:
        note(f"{settings.manifest}: has no {path}, which stays at full precision in the tables")
    tables = manifest.tables(settings.gears)
    uniform = [gear.name for gear in settings.gears if gear.name not in tables and not gear.dense]
    if uniform:
        note(
            f"{settings.manifest}: has no table for {', '.join(uniform)}: all layers alike; "
            "gearbx_mlx.allocate makes one"
        )
    manage = with_clamps(settings.manage, manifest.clamps) if manifest.clamps else settings.manage
    return {"manage": manage, "tables": tables, "widths": sorted({*manifest.bits, *settings.cap_bits})}


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


@contextlib.contextmanager
def governor(settings: ControllerSettings, gearbox: Any, verbose: bool, **keywords: Any) -> Iterator[Governor | None]:
    """What caps the gears while the context lasts; None where nothing is to be capped.

    Args:
        verbose: print which readers of this machine work.
        keywords: what a manifest says: `sensitivity`, `bounds`.

    Raises:
        GearbxError: a model that changes no gear, or whose layers cannot be capped or timed.
    """
    if not settings.wanted:
        yield None
        return
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            "the model changes no gear, so nothing can be capped; leave out --target-tps and --watch-machine"
        )
    own = [] if (limit := settings.limit()) is None else [own_memory(limit)]
    with make_watch(settings, own, verbose) as watch:
        yield Governor(gearbox, settings.target_tps, watch=watch, **keywords)


def own_memory(limit: int) -> OwnMemory:
    """Reads this process's memory. Raises GearbxError where the model alone takes more."""
    reader = OwnMemory(limit, mx.get_active_memory)
    if reader.bytes() > limit:
        raise GearbxError(
            f"--max-memory {human_bytes(limit)}: with the model loaded this process has {human_bytes(reader.bytes())}; "
            "give more, or use fewer --gears, --format exact or --residency disk"
        )
    return reader


def make_watch(settings: ControllerSettings, own: Sequence[Reader], verbose: bool) -> Watch:
    """Reads a script, or this machine; prints which readers of this machine work, and why the others do not.

    Args:
        own: readers of this process, which are read in any case.
    """
    if settings.machine is not None:
        return Watch([Scripted.from_file(settings.machine), *own])
    if own and not (settings.watch_machine or settings.target_tps is not None):
        return Watch(own)
    readers, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for reader, reason in absent.items():
        reasons.setdefault(reason, []).append(reader)
    missing = "".join(f"; no {' and '.join(names)} ({reason})" for reason, names in reasons.items())
    if verbose:
        names = [reader.name for reader in readers] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine{missing}")
    return Watch([*readers, *own])


def check_governing(settings: ControllerSettings, mode: str | None, draft_model: str | None) -> None:
    """Raises GearbxError for a mode whose gears cannot be capped, or for tokens that cannot be timed."""
    if not settings.wanted:
        return
    if mode is not None and (reason := mode_class(mode).uncapped):
        raise GearbxError(f"--mode {mode} {reason}; leave out --target-tps and --watch-machine, or use --mode route")
    if draft_model is not None:
        raise GearbxError("with --draft-model tokens come several at a time and cannot be timed; leave it out")


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


def gear_inputs(gears: GearSettings) -> dict[str, Any]:
    """The inputs that every result of a model in gears depends on."""
    return {
        "gears": str(gears.ladder),
        "format": gears.format,
        "manage": gears.manage,
        "q_group_size": gears.group_size,
        "kernels": gears.kernels,
        "activations": gears.activations,
        **({"low model contents": model_contents(gears.low_model)} if gears.low_model else {}),
        **({"floors": vars(gears.floors)} if gears.floors else {}),
        **({"manifest contents": fingerprint(Path(gears.manifest))} if gears.manifest else {}),
    }


@dataclass(frozen=True)
class Settled:
    """Mode and gears that flags, files and checkpoint ask for together, before a weight is read."""

    settings: GearedSettings
    choice: ModeChoice
    gears: GearSettings
    takes_whole: bool

    def load(self, path: str | None, chat_template: str = "") -> "Loaded":
        """The model at `path`, without gears as yet; None: the demo model.

        Args:
            chat_template: replaces the tokenizer's.

        Raises:
            GearbxError: as `load_model`.
        """
        if not self.settings.mode.observes:
            warn_of_memory(path, self.gears, self.takes_whole)
        return Loaded(self, path, *load_model(replace(self.settings.model, model=path), chat_template))


@dataclass(frozen=True)
class Loaded:
    """A model as loaded, before anything takes long."""

    settled: Settled
    path: str | None
    model: nn.Module
    tokenizer: Any
    config: dict

    @property
    def name(self) -> str:
        return model_name(self.path)

    def in_gears(self) -> "Geared":
        """The model with its gearbox. Raises GearbxError for settings that do not fit the model."""
        settings, gears = self.settled.settings, self.settled.gears
        if settings.cache.kv_gears is not None:
            check_heads(self.model, kv_ladder(settings.cache.kv_gears))
        if self.settled.takes_whole:
            gears = in_whole_weights(gears, self.model)
        gearbox = make_gearbox(gears, self.model, self.path, settings.model.dtype, settings.mode.observes)
        if isinstance(gearbox, Observer) and not settings.mode.observes:
            note(f"{self.name} is quantized already: telemetry only, no layer changes gear")
        return Geared(self, gearbox, gears)


@dataclass(frozen=True)
class Geared:
    """A loaded model with its gearbox, or with an observer where nothing shifts."""

    loaded: Loaded
    gearbox: Gearbox | Observer
    gears: GearSettings

    def mode(self, prompt: str, choice: ModeChoice | None = None) -> Mode:
        """The mode for a prompt, as typed; `choice` replaces that of the settings. Raises GearbxError as make_mode."""
        return make_mode(choice or self.loaded.settled.choice, self.gears.gears, self.gearbox, prompt)


def settle(settings: GearedSettings) -> Settled:
    """Everything that can be wrong without weights.

    Raises:
        GearbxError: settings that do not fit together.
    """
    model = settings.model.model
    saved = gears_of(model)
    choice = choose_mode(settings, saved)
    check_governing(settings.controller, choice.mode, settings.cache.draft_model)
    if settings.cache.kv_gears is not None:
        check_kv_mode(choice.mode or "", settings.cache.kv_gear)
    layout = replace(settings.layout, gears=choice.gears, format=choice.format)
    gears = settle_gears(model, layout, settings.gears, settings.floors, capped=settings.controller.wanted)
    cap_bits = settings.controller.widths(model, gears.gears, gears.format, None if saved is None else saved.gears)
    check_routing(choice.routing, gears.gears)
    if choice.gear is not None:
        gears.gears.find(choice.gear)
    takes_whole = takes_whole_weights(settings, choice, saved)
    return Settled(settings, choice, replace(gears, cap_bits=cap_bits), takes_whole)
