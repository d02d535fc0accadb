"""From the settings of the gears to a gearbox, or to an observer where nothing can shift."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..bit_selection.defaults import Floors
from ..bit_selection.precision import PrecisionManifest, fit, read_precision
from ..errors import GearbxError, about
from ..formats import RECONSTRUCTED, split_name, with_cache
from ..gears.activations import stored_dtype
from ..gears.discovery import Predicate, with_clamps
from ..gears.gearbox import Gearbox, Observer
from ..gears.kernel_choices import choose_kernels, measure_gears
from ..gears.ladder import DEFAULT_LADDER, WHOLE, WHOLE_LADDER, Ladder
from ..gears.manifest import PRECISION, Manifest
from ..gears.saved import saved_gears, without_gears
from ..kernels import MEASURE
from ..loading import DEMO_MODEL, find, gears_of, load, model_name
from .floors import FloorSettings
from .gears import GearFlags, GearSettings, LayoutSettings, quality_ladder
from .kernels_table import kernels_table
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
