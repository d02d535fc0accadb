"""Distance of a new checkpoint's gears from the original, measured on its own files, for the model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from ..cli.terminal import note, progress_bar
from ..conversion.model_card import CardQuality
from ..errors import one_line
from ..evaluation.predictions import (
    Recording,
    check_windows,
    context_for,
    joined_recordings,
    logprobs_along,
    quality,
    read_at_once,
    read_documents,
    recording_of,
    three_digits,
    windows_of,
)
from ..gears.cost import read_files
from ..gears.gearbox import Gearbox, in_one_gear
from ..gears.ladder import Gear, Ladder
from ..gears.manifest import Manifest
from ..kernels.device import available_memory
from ..loading import load
from ..settings import human_bytes

# Two texts written for this purpose, a passage of Grimms' Fairy Tales and one of Richard III (both public domain). No
# calibration reads them.
HELD_OUT = Path(__file__).parents[1] / "evaluation" / "held_out.jsonl"
TOKENS = 1000  # predictions, at most
COLUMNS: Mapping[str, Callable[[Mapping[str, float]], str]] = {
    "KL mean": lambda row: three_digits(row["kl_mean"]),
    "median": lambda row: three_digits(row["kl_median"]),
    "99 %": lambda row: three_digits(row["kl_p99"]),
    "max": lambda row: three_digits(row["kl_max"]),
    "same top": lambda row: f"{100 * row['top1_agreement']:.1f} %",
    "PPL ratio": lambda row: f"{row['perplexity_ratio']:.4f}",
}


def card_quality(
    work: Path, source: Path, manifest: Manifest, original: Callable[..., tuple[nn.Module, Any]]
) -> CardQuality | None:
    """Return the distance of each quantized gear of a new checkpoint from its original; None with a note without it.

    Args:
        work: directory of the checkpoint, whose gears are read from its files. source: of the original.
        original: loads it, as `Loads` of `convert`.
    """
    needed, room = read_files(source).total + read_files(work).total, available_memory()
    if needed > room:
        note(f"model card: without KL, since it needs {human_bytes(needed)} and {human_bytes(room)} are free")
        return None
    try:
        return measured(work, manifest, original)
    except Exception as error:  # classes of models fail in their own ways, and the checkpoint is complete without it
        note(f"model card: without KL, since {one_line(error)}")
        return None


def measured(work: Path, manifest: Manifest, original: Callable[..., tuple[nn.Module, Any]]) -> CardQuality:
    """Return the distances. Raises GearbxError for a model that cannot read the text."""
    model, tokenizer = original(lazy=True)
    config = json.loads((work / "config.json").read_text(encoding="utf-8"))
    windows = windows_of(tokenizer, read_documents(HELD_OUT), context_for(None, config), TOKENS, HELD_OUT.name)
    check_windows(windows, model, HELD_OUT.name)
    in_one_gear(model)
    gearbox = Gearbox(load(work)[0], Ladder([bits for bits in manifest.gears if not Gear(0, "", bits).dense]))
    with progress_bar() as progress:
        tracked = progress.track(windows, description="comparing with the original")
        parts = [compared_with(model, gearbox, window) for window in tracked]
    reference_nll = np.concatenate([nll for nll, _ in parts])
    rows = []
    for index, gear in enumerate(gearbox.ladder):
        found = joined_recordings([recordings[index] for _, recordings in parts])
        figures = quality(found.nll, found.kl, found.kl_reverse, found.agree, reference_nll)
        rows.append((str(gear.bits), *(show(figures) for show in COLUMNS.values())))
    return CardQuality(len(reference_nll), ("bits", *COLUMNS), rows)


def compared_with(model: nn.Module, gearbox: Gearbox, window: Sequence[int]) -> tuple[np.ndarray, list[Recording]]:
    """Return the original's negative log-likelihoods (n,), nats, along a window, and a recording of each gear."""
    reference = list(logprobs_along(model, window))
    nll = -np.array([logprobs[target] for logprobs, target in zip(reference, window[1:])])
    return nll, [recording_of(read_at_once(gearbox, window, gear), reference) for gear in gearbox.ladder]
