"""Check the settings of a Gearbox, and choose its kernels for this machine."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GearbxError, GearbxWarning
from ..kernels import ACTIVATIONS, KERNELS, MEASURE
from ..kernels.dispatch import Choice, choose
from .discovery import Layer
from .ladder import SUPPORTED, WIDTHS, Ladder
from .manifest import Manifest


def check_settings(manifest: Manifest, **settings: Any) -> None:
    """Raises GearbxError for a setting of a Gearbox that differs from the checkpoint's."""
    for name, value in settings.items():
        own, value = getattr(manifest, name), getattr(value, "name", value)
        if value not in (None, own):
            shown = name.replace("_", " ")
            raise GearbxError(f"the checkpoint's gears are of {shown} {own}, not {value}; convert the original anew")


def check_tables(
    tables: Mapping[str, Mapping[str, int]], ladder: Ladder, layers: Sequence[Layer]
) -> dict[int, Mapping[str, int]]:
    """The tables by the bits of their gears.

    Raises:
        GearbxError: a gear, a layer or a width that does not exist.
    """
    paths = {layer.path for layer in layers}
    for name, table in tables.items():
        if table.keys() - paths:
            raise GearbxError(
                f"the table of {name} has {min(table.keys() - paths)}, which is not a layer that changes gear"
            )
        for path, bits in table.items():
            if bits not in WIDTHS:
                raise GearbxError(f"the table of {name} has {bits} bits for {path}; choose from {SUPPORTED}")
    return {ladder.find(name).bits: table for name, table in tables.items()}


def choose_kernels(
    kernels: str, quantized: bool, activations: str, ours_alone: bool = False, rounds: bool = True
) -> Choice:
    """The kernels that a Gearbox runs on; warns where native ones were asked for and cannot be used.

    Args:
        kernels, activations: names of KERNELS and ACTIVATIONS. With "auto" a ladder without quantized gears stays on
            MLX's kernels, so that the model is mlx-lm bit for bit, where MLX has a kernel for the top gear.
        quantized: whether the ladder has quantized gears.
        ours_alone: whether MLX has no kernel for the top gear.
        rounds: whether kernels of the format may round activations.

    Raises:
        GearbxError: a name that does not exist.
    """
    if kernels not in KERNELS:
        raise GearbxError(f"kernels '{kernels}' do not exist; choose from {', '.join(KERNELS)}")
    if kernels in ("auto", MEASURE) and not quantized and not ours_alone:
        return Choice(False, "the original weights alone stay mlx-lm bit for bit")
    if activations not in ACTIVATIONS:
        raise GearbxError(f"activations '{activations}' do not exist; choose from {', '.join(ACTIVATIONS)}")
    choice = choose(kernels, activations)
    if kernels != "mlx" and not choice.native:
        warnings.warn(f"MLX's own kernels are used: {choice.reason}", GearbxWarning, stacklevel=3)
    elif activations == "int8" and choice.x_bits and not rounds:
        what = (
            "codebooks take activations as they are; int8 rounds only those of other packed weights, if there are any"
        )
        warnings.warn(what, GearbxWarning, stacklevel=3)
    elif activations == "int8" and not choice.x_bits:
        warnings.warn("activations are not rounded: native kernels of a CPU do that", GearbxWarning, stacklevel=3)
    return choice
