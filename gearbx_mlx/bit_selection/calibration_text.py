"""What sensitivity and allocate have in common: the text, and a model of which single layers can be reduced."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from ..cli import options, terminal
from ..errors import GearbxError
from ..evaluation.text import read_documents, windows_of
from ..gears.discovery import is_quantized, with_clamps
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Ladder
from ..gears.saved import saved_gears
from ..kernels.names import KERNELS
from ..loading import DEMO_MODEL, context_length, model_name
from .sensitivity import Exact

CALIBRATION = DEMO_MODEL / "calibration" / "text.jsonl"
SAMPLES, LENGTH = 8, 256


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration text")
    group.add_argument(
        "--data",
        help="A text, or JSON Lines with text, or question and answer (GSM8K). Default: sums, prose, verse that ship",
    )
    group.add_argument("--num-samples", type=int, default=SAMPLES, help=f"Windows of it. Default: {SAMPLES}")
    group.add_argument("--sequence-length", type=int, default=LENGTH, help=f"Most tokens of each. Default: {LENGTH}")
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="As for generate; what is measured are weights: activations stay as they are. Default: auto",
    )


def windows(args: argparse.Namespace, tokenizer: Any, config: dict) -> list[list[int]]:
    """The calibration text as tokens.

    Raises:
        GearbxError: no such text, or numbers that cannot be.
    """
    for name in ("num_samples", "sequence_length"):
        if getattr(args, name) < 1:
            raise GearbxError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give 1 or more")
    longest = context_length(config)
    if longest and args.sequence_length > longest:
        raise GearbxError(
            f"--sequence-length is {args.sequence_length}, and the model was made for {longest}; give at most that"
        )
    file = Path(args.data or CALIBRATION)
    documents, length = read_documents(file), args.sequence_length
    found = windows_of(tokenizer, documents[: args.num_samples], length, args.num_samples * length, str(file))
    return found[: args.num_samples]


def load_original(args: argparse.Namespace) -> tuple[nn.Module, Any, dict]:
    """Raises GearbxError for a model that is quantized, or whose gears are on disk."""
    model, tokenizer, config = options.load_model(args)
    if is_quantized(model) or saved_gears(model) is not None:
        raise GearbxError(f"{model_name(args.model)}: is no original model; give the one that it was made from")
    return model, tokenizer, config


def geared(
    args: argparse.Namespace,
    model: nn.Module,
    bits: Iterable[int],
    format: str,
    group_size: int,
    manage: str,
    clamps: Mapping[str, float],
) -> Gearbox:
    """At full precision, with every layer stored at these widths."""
    return Gearbox(
        model,
        Ladder([*sorted({*bits} - {DENSE}), DENSE]),
        format=format,
        manage=with_clamps(manage, clamps) if clamps else manage,
        group_size=group_size,
        dtype=args.dtype,
        kernels=args.kernels,
        activations="float",
    )


def exact_of(gearbox: Gearbox, texts: Sequence[Sequence[int]], bar: Progress) -> Exact:
    """With the first pass done."""
    task = bar.add_task("full precision", total=len(texts))
    return Exact(gearbox, texts, lambda: bar.advance(task))


def progress_bar() -> Progress:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=terminal.messages, transient=True)
