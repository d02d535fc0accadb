"""A table of what `decide` decides, or refuses in one line, about models that exist as descriptions alone."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gearbx_mlx import GearbxError
from gearbx_mlx.bit_selection.precision import PrecisionManifest
from gearbx_mlx.cli.decide import decide
from gearbx_mlx.cli.describe import Description, Machine
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.gears.cost import ModelFiles
from gearbx_mlx.gears.manifest import Manifest
from gearbx_mlx.gears.tensor_files import TensorEntry
from gearbx_mlx.generate import GenerateSettings, setup_arg_parser
from gearbx_mlx.kernels.dispatch import CPU, GPU, METAL

SIDE = 4096
PATH = "model.layers.0.mlp.up_proj"


def entries(**shapes: tuple[str, int, int]) -> dict[str, TensorEntry]:
    """The header of one layer: array to type, rows and columns."""
    return {f"{PATH}.{name}": TensorEntry(dtype, shape, (0, 0)) for name, (dtype, *shape) in shapes.items()}


def model(files: ModelFiles, **config: object) -> Description:
    return Description("M", Path("M"), config, files, Machine(CPU, available=10**12, whole=10**12))


def original(dtype: str) -> Description:
    return model(ModelFiles(entries(weight=(dtype, SIDE, SIDE)), None))


def coded(bits: int, mode: str = "affine") -> Description:
    size, scales = (64, "BF16") if mode == "affine" else (32, "U8")
    arrays = entries(weight=("U32", SIDE, SIDE * bits // 32), scales=(scales, SIDE, SIDE // size))
    return model(ModelFiles(arrays, None), quantization={"bits": bits, "group_size": size, "mode": mode})


def geared(format: str, *gears: int) -> Description:
    sizes = {"format": format, "gears": gears, "group_size": 64, "manage": "all", "dtype": "bfloat16"}
    none = {"base": {}, "layers": {}, "hashes": {}, "gears_hash": "", "fingerprint": "", "stock": True}
    return model(ModelFiles(entries(weight=("BF16", SIDE, SIDE)), Manifest(**sizes, **none)))


def measured(format: str, *bits: int) -> PrecisionManifest:
    return PrecisionManifest("exact", "M", "", "", 1, format, 64, "mlp", bits, None, {})


MODELS = {
    **{dtype: original(dtype) for dtype in ("BF16", "F16", "F32")},
    **{f"{bits} bits": coded(bits) for bits in (8, 6, 5, 4, 3)},
    "mxfp4": coded(4, "mxfp4"),
    "gptq": model(ModelFiles({}, None), quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "measured": replace(original("BF16"), precision=measured("affine", 4, 8)),
    "geared 4,8": geared("planes", 4, 8),
    "geared 4,8,16": geared("planes", 4, 8, 16),
    "geared exact": geared("exact", 4, 16),
    "geared 16": geared("planes", 16),
}
HERE = {
    "cpu": {},
    "little memory": {"available": 2 * SIDE * SIDE},
    "no compiler": {"no_kernels": "no C++ compiler"},
    "gpu": {"device": GPU},
    "mac": {"device": METAL, "recommended": 10**12},
    "small mac": {"device": METAL, "recommended": 2 * SIDE * SIDE + 1},
    "tiny mac": {"device": METAL, "recommended": 10**6, "whole": 10**6},
    "ranks": {"ranked": True},
}

# The model, flags, where it runs; then mode, gears and format, "base" where a calibrated one is taken, "caps" where
# layers are stored at further bits, "observed" where nothing shifts; or the words of one line of error.
ROWS = [
    # original weights: nothing is asked for
    ("BF16", "", "cpu", "lossless 4,16 planes base"),
    ("F16", "", "cpu", "lossless 4,16 planes base"),
    ("F32", "", "cpu", "lossless 4,16 planes base"),
    ("BF16", "", "gpu", "lossless 4,16 affine base"),
    ("F16", "", "mac", "lossless 4,16 affine base"),
    ("BF16", "", "little memory", "lossless 4,16 exact base"),
    ("F16", "", "little memory", "lossless 4,16 planes base"),
    ("BF16", "--kernels mlx --mode lossless", "little memory", "lossless 4,16 planes base"),
    ("BF16", "", "no compiler", "lossless 16 planes"),
    ("BF16", "", "ranks", "lossless 4,16 planes"),
    # a mode or a flag of one
    ("BF16", "--mode lossless", "no compiler", "lossless 4,16 planes base"),
    ("BF16", "--num-draft-tokens 3", "no compiler", "lossless 4,16 planes base"),
    ("BF16", "--mode route", "cpu", "route 4,8,16 planes"),
    ("BF16", "--mode route", "gpu", "route 4,8,16 planes"),
    ("BF16", "--mode kickdown", "no compiler", "kickdown 4,8,16 planes"),
    ("BF16", "--mode static", "cpu", "static 4,8,16 planes"),
    ("BF16", "--mode telemetry-only", "cpu", "telemetry-only 4,8,16 planes observed"),
    ("BF16", "--gear low", "cpu", "static 4,8,16 planes"),
    ("BF16", "--gear 5", "cpu", "--gear: no gear '5' in the ladder 4,8,16"),
    ("BF16", "--thresholds 1,2", "cpu", "route 4,8,16 planes"),
    ("BF16", "--thresholds 1", "cpu", "3 gears need 2 thresholds"),
    ("BF16", "--target-tps 9", "cpu", "route 4,8,16 planes caps"),
    ("BF16", "--target-tps 9 --mode lossless", "cpu", "omit --target-tps, or use --mode route"),
    ("BF16", "--draft-model D", "cpu", "lossless 4,8,16 planes"),
    ("BF16", "--draft-model D --mode route", "cpu", "takes no draft model"),
    (
        "BF16",
        "--prompt-gear 8 --mode lossless",
        "cpu",
        "--prompt-gear: only for --mode route or kickdown or static or telemetry-only, got --mode lossless",
    ),
    (
        "BF16",
        "--mode static --num-draft-tokens 2",
        "cpu",
        "--num-draft-tokens: only for --mode lossless, got --mode static; omit it",
    ),
    # gears and formats
    ("BF16", "--gears 16", "cpu", "static 16 planes"),
    ("BF16", "--gears 16 --mode lossless", "cpu", "lossless 16 planes"),
    ("BF16", "--gears 4,8,16", "gpu", "lossless 4,8,16 planes base"),
    ("BF16", "--gears 4,8", "cpu", "lossless 4,8 planes"),
    ("BF16", "--format affine", "cpu", "lossless 4,16 affine base"),
    ("BF16", "--format codebook", "cpu", "lossless 4,16 codebook base"),
    ("BF16", "--format exact --mode route", "cpu", "route 4,16 exact"),
    ("BF16", "--format groupwise --gears 4,8,16", "cpu", "format 'groupwise' has no 8-bit gear"),
    ("BF16", "--format exact --gears 4,8,16", "cpu", "got 8; use 4,16, or choose format planes"),
    ("BF16", "--kernels dequant-cache", "cpu", "format planes is multiplied packed; use --format rowwise"),
    ("BF16", "--kernels dequant-cache --format rowwise", "cpu", "lossless 4,16 rowwise base"),
    # where idle gears are
    ("BF16", "--residency disk", "cpu", "lossless 4,16 planes base"),
    ("BF16", "--residency disk", "little memory", "lossless 4,16 planes base"),
    (
        "BF16",
        "--residency disk:1MB",
        "cpu",
        "--residency disk:1 MB: too small for the largest gear of M, got about 33.6 MB; use a larger",
    ),
    ("BF16", "--residency disk:1GB --mode route", "cpu", "route 4,8,16 planes caps"),
    ("BF16", "--residency disk:1GB", "cpu", "lossless 4,16 planes base"),
    ("BF16", "", "tiny mac", "M: 33.6 MB of weights exceed this machine's 1 MB of memory; use a checkpoint in fewer"),
    # the lowest gear's codes
    ("BF16", "--base", "cpu", "lossless 4,16 planes base"),
    ("BF16", "--base --mode route", "cpu", "route 4,8,16 planes base"),
    ("BF16", "--base --gears 16", "cpu", "--base TEXT: needs an original model in one process"),
    ("BF16", "--base", "ranks", "--base TEXT: needs an original model in one process"),
    ("BF16", "--base other-model", "cpu", "lossless 4,16 planes"),
    ("measured", "--manifest F", "cpu", "lossless 4,8,16 affine"),
    ("measured", "--manifest F --gears 4,8", "gpu", "lossless 4,8 affine"),
    (
        "measured",
        "--manifest F --format planes",
        "cpu",
        "--format: F was measured with affine, got planes; omit --format",
    ),
    ("measured", "--manifest F --base", "cpu", "--base: chooses codes, as --manifest does; omit one of them"),
    # a quantized checkpoint
    ("8 bits", "", "cpu", "lossless 4,8 planes"),
    ("6 bits", "", "cpu", "lossless 6 planes"),
    ("8 bits", "", "gpu", "lossless 8 planes"),
    ("8 bits", "--kernels native", "mac", "lossless 4,8 planes"),
    ("8 bits", "--num-draft-tokens 3", "gpu", "lossless 4,8 planes"),
    ("6 bits", "--gears 4,6", "cpu", "lossless 4,6 planes"),
    ("6 bits", "--mode route", "cpu", "route 4,6 planes"),
    ("5 bits", "--mode static", "no compiler", "static 4,5 planes"),
    ("4 bits", "", "cpu", "lossless 4 planes"),
    ("3 bits", "--mode route", "cpu", "route 3 planes"),
    ("mxfp4", "", "cpu", "lossless 4 planes"),
    ("mxfp4", "--gears 2,4", "cpu", "in codes without coarser ones inside; choose from only 4"),
    ("gptq", "--gears 2,4", "cpu", "lossless 2,4 planes"),
    ("8 bits", "--gears 4,16", "cpu", "the model is quantized to 8 bits"),
    (
        "8 bits",
        "--format exact",
        "cpu",
        "M: quantized already, with the first bits of its codes as gears; omit --format",
    ),
    ("8 bits", "--base", "cpu", "omit --base"),
    ("8 bits", "--residency stream", "cpu", "omit --residency stream"),
    ("8 bits", "--kernels dequant-cache", "cpu", "omit --kernels dequant-cache"),
    ("8 bits", "--mode telemetry-only", "cpu", "telemetry-only 4,8 planes observed"),
    ("4 bits", "--mode telemetry-only", "cpu", "telemetry-only 4,8,16 planes observed"),
    ("8 bits", "", "ranks", "telemetry-only 4,8,16 planes observed"),
    ("8 bits", "", "tiny mac", "M: 17.3 MB of weights exceed this machine's 1 MB of memory; use a checkpoint in fewer"),
    # a checkpoint with gears
    ("geared 4,8", "", "cpu", "lossless 4,8 planes"),
    ("geared 4,8,16", "--gears 4,16", "gpu", "lossless 4,16 planes"),
    ("geared 4,8,16", "", "no compiler", "lossless 4,8,16 planes"),
    ("geared 4,8", "--gears 3,8", "cpu", "M: the checkpoint has no 3-bit gear; choose from 4, 8"),
    ("geared 4,8", "--format affine", "cpu", "--format: the gears of M have planes, got affine; omit --format"),
    ("geared 4,8", "--base", "cpu", "M: has its codes; omit --base"),
    ("geared 4,8", "--kernels dequant-cache", "cpu", "M has packed gears; omit it"),
    ("geared 4,8,16", "--target-tps 9", "cpu", "route 4,8,16 planes caps"),
    ("geared exact", "--target-tps 9", "cpu", "route 4,16 exact"),
    ("geared exact", "", "ranks", "lossless 4,16 exact"),
    ("geared 16", "", "cpu", "static 16 planes"),
    ("geared 16", "--num-draft-tokens 2", "cpu", "lossless 16 planes"),
]


def settings_of(flags: str) -> GenerateSettings:
    """The settings that a command line becomes."""
    parser = setup_arg_parser()
    return command_settings(parser.kind, vars(parser.parse_args(["--model", "M", *shlex.split(flags)])))


def described(name: str, here: str) -> Description:
    model = MODELS[name]
    return replace(model, machine=replace(model.machine, **HERE[here]))


def words_of(flags: str, model: Description) -> str:
    """A decision in the words of the table."""
    found = decide(settings_of(flags), model)
    further = {"base": found.takes_base, "caps": bool(found.cap_bits), "observed": found.observes}
    names = [name for name, holds in further.items() if holds]
    return " ".join([found.mode.name, str(found.ladder), found.format.name, *names])


@pytest.mark.parametrize(("name", "flags", "here", "expected"), ROWS, ids=[" ".join(row[:3]) for row in ROWS])
def test_decisions(name, flags, here, expected):
    try:
        found = words_of(flags, described(name, here))
    except GearbxError as error:
        found = str(error)
        assert "\n" not in found
        assert expected in found
    else:
        assert found == expected
