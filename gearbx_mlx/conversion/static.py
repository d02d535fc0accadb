"""One table of bits as a checkpoint of stock mlx-lm, with every layer at its own bits."""

import contextlib
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model, save

from ..errors import one_line
from ..gears.discovery import Layer
from ..gears.ladder import DENSE

AFFINE = "affine"  # the format of mlx-lm's own quantized layers


def write_table(
    model: nn.Module,
    tokenizer: Any,
    config: dict[str, Any],
    source: Path,
    work: Path,
    bits: Mapping[str, int],
    group_size: int,
) -> dict[str, Any]:
    """Quantize a model and write it into a directory; what is in the directory before is removed.

    Args:
        source: directory of the original, for the files beside the weights.
        work: the directory to write.
        bits: path to the bits of a layer; layers that are missing keep their weights.

    Returns:
        mlx-lm's configuration of the checkpoint.
    """

    def bits_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        width = bits.get(path, DENSE)
        return {"bits": width, "group_size": group_size, "mode": AFFINE} if width != DENSE else False

    with contextlib.redirect_stdout(sys.stderr):  # where mlx-lm prints the bits per weight
        model, config = quantize_model(model, config, group_size, min(bits.values()), quant_predicate=bits_of)
        for before in work.iterdir():  # the directory itself is locked
            shutil.rmtree(before) if before.is_dir() else before.unlink()
        try:
            save(work, source, model, tokenizer, config)
        except Exception as error:  # MLX and tokenizers have errors of their own for a disk that is full
            if not isinstance(error, OSError | RuntimeError) and type(error) is not Exception:
                raise
            raise OSError(getattr(error, "errno", None), one_line(error)) from error
    return config


def clip_weights(layers: Iterable[Layer], clamps: Mapping[str, float], bits: Mapping[str, int]) -> None:
    """Clip the weights of layers that have a clamp and are quantized: path to the largest magnitude that stays."""
    for layer in layers:
        if layer.path in clamps and bits.get(layer.path, DENSE) != DENSE:
            size = clamps[layer.path]
            layer.module.weight = mx.clip(layer.module.weight, -size, size)
