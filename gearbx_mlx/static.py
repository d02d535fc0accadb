"""convert --manifest: one table of a precision manifest as a checkpoint of stock mlx-lm, every layer at its bits."""

import argparse
import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model, save

from . import terminal
from .errors import GearbxError, about
from .formats import get_format
from .gears.discovery import is_quantized
from .gears.ladder import DENSE
from .gears.precision import PrecisionManifest, fit, read_precision
from .loading import load

AFFINE = "affine"  # what mlx-lm's own quantized layers are


def chosen(args: argparse.Namespace) -> tuple[PrecisionManifest, int]:
    """The manifest, and the gear whose table is written.

    Raises:
        GearbxError: a manifest that cannot be read or has no such table, or flags that do not go with it.
    """
    file = Path(args.manifest)
    manifest = read_precision(file)
    if args.format not in (None, AFFINE):
        raise GearbxError(f"--format {args.format}: a checkpoint with the bits of a manifest is mlx-lm's own, affine")
    if args.q_group_size not in (None, manifest.group_size):
        raise GearbxError(f"--q-group-size is {args.q_group_size}, and {file} was measured with {manifest.group_size}")
    held = ", ".join(map(str, manifest.gears))
    if not held:
        raise GearbxError(f"{file}: has no tables; make some with python -m gearbx_mlx.allocate --manifest {file}")
    if args.gears is None and len(manifest.gears) > 1:
        raise GearbxError(f"{file}: has tables for gears {held}; choose one with --gears")
    wanted = args.gears or held
    if not wanted.isdecimal() or int(wanted) not in manifest.gears:
        raise GearbxError(f"{file}: has no table for gears {wanted}; choose one of {held}")
    if manifest.format != AFFINE:
        terminal.note(
            f"{file}: was measured with {manifest.format}, and mlx-lm's affine layers differ a little from it"
        )
    return manifest, int(wanted)


def convert(args: argparse.Namespace, source: Path, work: Path) -> dict[str, Any]:
    """Fill the directory `work`; anew, if something is in it.

    Returns:
        mlx-lm's configuration of the checkpoint.

    Raises:
        GearbxError: as `chosen`; a quantized model, another model, or a layer that it does not have.
    """
    manifest, gear = chosen(args)
    trust: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    model, tokenizer, config = load(source, return_config=True, lazy=True, tokenizer_config=dict(trust), **trust)
    if is_quantized(model):
        raise GearbxError(f"{source}: is quantized already; convert the original")
    with about(args.manifest):
        manifest, layers, missing = fit(manifest, model, get_format(AFFINE))
    for path in missing:
        terminal.note(f"{args.manifest}: has no {path}, which stays as it is")
    table, clamps = manifest.gears[gear].bits, manifest.clamps
    for layer in layers:
        if layer.path in clamps and table.get(layer.path, DENSE) != DENSE:
            size = clamps[layer.path]
            layer.module.weight = mx.clip(layer.module.weight, -size, size)

    def bits_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        bits = table.get(path, DENSE)
        return {"bits": bits, "group_size": manifest.group_size, "mode": AFFINE} if bits != DENSE else False

    lowest = min(table.values())
    with terminal.messages.status("quantizing"), contextlib.redirect_stdout(sys.stderr):  # mlx-lm says how many bits
        model, config = quantize_model(model, config, manifest.group_size, lowest, quant_predicate=bits_of)
        shutil.rmtree(work, ignore_errors=True)
        save(work, source, model, tokenizer, config)
    return config
