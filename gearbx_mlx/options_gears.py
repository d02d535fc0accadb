"""Flags of the gears, and the gearbox that is built from them or from a geared checkpoint."""

import argparse
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .errors import GearbxError, about
from .floors import add_floor_flags, select_bits, selection_lines, wanted_floors
from .formats import DEFAULT_FORMAT, FORMATS
from .gears.discovery import MANAGE, Predicate, with_clamps
from .gears.gearbox import DEFAULT_ACTIVATIONS, DEFAULT_GROUP_SIZE, DEFAULT_LADDER, Gearbox
from .gears.ladder import Ladder
from .gears.observer import Observer
from .gears.precision import PrecisionManifest, fit, read_precision
from .gears.residency import NAMES as RESIDENCIES
from .gears.saved import without_gears
from .gears.values import GROUP_SIZES
from .kernels.dispatch import ACTIVATIONS, KERNELS
from .loading import DEMO_MODEL, find, gears_of, load
from .terminal import note, show_compiling


def add_ladder_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gears")
    group.add_argument(
        "--gears",
        help="Bits of the gears, ascending; 16: the weights as they are. Default: those of a geared checkpoint, or "
        f"{DEFAULT_LADDER}",
    )


def add_gear_flags(parser: argparse.ArgumentParser) -> None:
    add_ladder_flags(parser)
    group = parser.add_argument_group("gearbox")
    add_format_flags(group)
    group.add_argument(
        "--manifest",
        metavar="FILE",
        help="Tables of gears, bits for every layer, from gearbx_mlx.allocate; its format, group size and layers.",
    )
    group.add_argument(
        "--residency",
        choices=RESIDENCIES,
        default="resident",
        help="Of gears not engaged: kept, moved out of MLX's memory, or dense originals read again from disk.",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="MLX's own, or native ones: for the CPU, compiled when first used, or for Metal; auto: native on a CPU "
        "that has them, but for the original weights alone (--gears 16), which stay mlx-lm bit for bit. "
        "Default: auto",
    )
    group.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default=DEFAULT_ACTIVATIONS,
        help="What native kernels of the CPU multiply packed weights by: activations as they are, or rounded to so "
        f"many bits for each group of inputs, which is faster. Default: {DEFAULT_ACTIVATIONS}",
    )
    group.add_argument(
        "--low-model",
        metavar="PATH",
        help="The same model as mlx-lm's DWQ, AWQ, GPTQ or dynamic quantization wrote it: it is the lowest gear.",
    )
    add_floor_flags(parser)


def add_format_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", choices=list(FORMATS), help=f"Default: {DEFAULT_FORMAT}")
    group.add_argument("--manage", choices=list(MANAGE), help="Linear layers that change gear. Default: all")
    group.add_argument(
        "--q-group-size",
        type=int,
        choices=GROUP_SIZES,
        help=f"Group size of planes and affine. Default: {DEFAULT_GROUP_SIZE}",
    )


CODEBOOKS = ("codebook", "codebook-library")
CODEBOOK_LADDER = "4,16"  # they have no 8 bits
QUALITY = ("auto_bits", "min_cos_strict", "min_cos_lazy", "memory_budget", "target_bpw")
QUALITY_LADDER = "2,16"  # a gear of 2 bits has every layer at the bits that were found for it
DEFAULTS = {"format": DEFAULT_FORMAT, "manage": "all", "q_group_size": DEFAULT_GROUP_SIZE}


def settle_gears(args: argparse.Namespace, default: str | None = DEFAULT_LADDER) -> None:
    """Fill in --gears, --format, --manage and --q-group-size: from a geared checkpoint, else by default.

    Raises:
        GearbxError: gears that make no ladder, a flag that says otherwise than the checkpoint, or floors that there
            are not.
    """
    if args.gears is not None:
        Ladder.parse(args.gears)
    saved = gears_of(args.model)
    args.precision = precision_of(args, saved is not None)
    if saved is not None:
        with about(args.model):
            args.gears = str(saved.chosen(args.gears))
    if args.gears is None:
        args.gears = default
        if default and saved is None and getattr(args, "format", None) in CODEBOOKS:
            by_quality = any(getattr(args, flag, None) for flag in QUALITY)
            args.gears = QUALITY_LADDER if by_quality else CODEBOOK_LADDER
    for name, fallback in DEFAULTS.items():
        given = getattr(args, name, None)
        held = fallback if saved is None else getattr(saved, name.removeprefix("q_"))
        if saved is not None and given not in (None, held):
            flag = f"--{name.replace('_', '-')}"
            raise GearbxError(f"{flag} is {given}, and the gears of {args.model} have {held}; leave out {flag}")
        setattr(args, name, held if given is None else given)
    if wanted_floors(args) and saved is not None:
        raise GearbxError(f"the gears of {args.model} have their bits; leave out the floors, or convert the original")


def precision_of(args: argparse.Namespace, has_gears: bool) -> PrecisionManifest | None:
    """What --manifest says, None without it; fills in --format, --manage and --q-group-size.

    Raises:
        GearbxError: a manifest that cannot be read, or a flag that says otherwise.
    """
    file = getattr(args, "manifest", None)
    if file is None:
        return None
    if has_gears:
        raise GearbxError(f"the gears of {args.model} have their bits; leave out --manifest, or give the original")
    if wanted_floors(args):
        raise GearbxError("--manifest has the bits of every layer; leave out the floors")
    manifest = read_precision(Path(file))
    for name in DEFAULTS:
        held, given = getattr(manifest, name.removeprefix("q_")), getattr(args, name)
        if given not in (None, held):
            flag = f"--{name.replace('_', '-')}"
            raise GearbxError(f"{flag} is {given}, and {file} was measured with {held}; leave out {flag}")
        setattr(args, name, held)
    return manifest


def for_gearbox(args: argparse.Namespace, model: nn.Module, ladder: Ladder) -> dict[str, Any]:
    """What a Gearbox is told by --manifest: manage, tables and widths.

    Raises:
        GearbxError: it is another model's, or has a layer that this one does not have.
    """
    if args.precision is None:
        return {}
    with about(args.manifest):
        manifest, _, missing = fit(args.precision, model)
    for path in missing:
        note(f"{args.manifest}: has no {path}, which stays at full precision in the tables")
    tables = manifest.tables(ladder)
    uniform = [gear.name for gear in ladder if gear.name not in tables and not gear.dense]
    if uniform:
        note(f"{args.manifest}: has no table for {', '.join(uniform)}: all layers alike; gearbx_mlx.allocate makes one")
    manage = with_clamps(args.manage, manifest.clamps) if manifest.clamps else args.manage
    widths = sorted({*manifest.bits, *getattr(args, "widths", ())})
    return {"manage": manage, "tables": tables, "widths": widths}


def for_governor(args: argparse.Namespace) -> dict[str, Any]:
    """What a Governor is told by --manifest: which layers to cap first, and how far."""
    if args.precision is None:
        return {}
    return {"sensitivity": args.precision.sensitivity, "bounds": args.precision.bounds}


def make_gearbox(args: argparse.Namespace, model: nn.Module, ladder: Ladder) -> Gearbox | Observer:
    """A Gearbox, or an Observer where nothing can or may shift."""
    if args.telemetry_only or without_gears(model):
        return Observer(model, ladder, dtype=args.dtype)
    show_compiling()
    manage: str | Predicate = args.manage
    further = for_gearbox(args, model, ladder)
    floors = wanted_floors(args)
    if floors:
        selection = select_bits(model, args.format, manage, floors)
        manage = selection.predicate
        for line in selection_lines(selection):
            note(line)
    low_model = None if args.low_model is None else load(args.low_model)[0]
    return Gearbox(
        model,
        ladder,
        format=args.format,
        group_size=args.q_group_size,
        low_model=low_model,
        residency=args.residency,
        checkpoint=find(args.model or DEMO_MODEL) if args.residency == "disk" else None,
        dtype=args.dtype,
        kernels=args.kernels,
        activations=args.activations,
        **{"manage": manage, "widths": getattr(args, "widths", ()), **further},
    )
