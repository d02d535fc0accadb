"""The windows of a calibration text, and a gearbox whose layers can be reduced one at a time."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.progress import Progress

from ..errors import GearbxError
from ..evaluation.text import read_documents, windows_of
from ..files.model_directory import context_length
from ..gears.discovery import with_clamps
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Ladder
from ..loading import DEMO_MODEL
from .sensitivity import ExactSensitivity

CALIBRATION = DEMO_MODEL / "calibration" / "text.jsonl"


def calibration_windows(
    tokenizer: Any, config: dict, data: str | Path | None, num_samples: int, sequence_length: int
) -> list[list[int]]:
    """The windows of a calibration text, as tokens.

    Args:
        config: of the model, which bounds the length.
        data: a text or JSON Lines; None: the text that ships.
        num_samples: the most windows.
        sequence_length: the most tokens of a window.

    Raises:
        GearbxError: no such text, or windows longer than the model's context.
    """
    longest = context_length(config)
    if longest and sequence_length > longest:
        raise GearbxError(
            f"--sequence-length is {sequence_length}, and the model was made for {longest}; give at most that"
        )
    file = Path(data or CALIBRATION)
    documents = read_documents(file)[:num_samples]
    windows = windows_of(tokenizer, documents, sequence_length, num_samples * sequence_length, str(file))
    return windows[:num_samples]


def single_layer_gearbox(
    model: nn.Module,
    bits: Iterable[int],
    format: str,
    group_size: int,
    manage: str,
    clamps: Mapping[str, float],
    dtype: str = "auto",
    kernels: str = "auto",
) -> Gearbox:
    """A gearbox at full precision that can give any one layer each of these bits.

    Args:
        format, group_size, manage, dtype, kernels: as `Gearbox` takes them.
        clamps: path to the largest magnitude that a layer's weights keep in a quantized gear.
    """
    return Gearbox(
        model,
        Ladder([*sorted({*bits} - {DENSE}), DENSE]),
        format=format,
        manage=with_clamps(manage, clamps) if clamps else manage,
        group_size=group_size,
        dtype=dtype,
        kernels=kernels,
        activations="float",
    )


def exact_of(gearbox: Gearbox, windows: Sequence[Sequence[int]], progress: Progress) -> ExactSensitivity:
    """Measures layers of a gearbox; the pass at full precision is done."""
    task = progress.add_task("full precision", total=len(windows))
    return ExactSensitivity(gearbox, windows, lambda: progress.advance(task))
