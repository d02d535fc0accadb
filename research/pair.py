"""EAD: two models that take turns along a text, at every threshold and against a random baseline."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from gearbx_mlx.cli.build import LoadedPair, load_pair
from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.compat.arrays import dtype_name
from gearbx_mlx.decoding.modes import PairSettings
from gearbx_mlx.decoding.pair import bytes_read
from gearbx_mlx.decoding.stream import parameters_of
from gearbx_mlx.errors import GearbxError, numbers
from gearbx_mlx.evaluation.predictions import PROMPT, context_for, encode, read_documents, read_rows, windows_of
from gearbx_mlx.gears.activations import model_dtype
from gearbx_mlx.loading import model_name
from gearbx_mlx.routing.pair import DEFAULT_MIN_DURATION, DEFAULT_WINDOW, NAMES, check_threshold, scaled

from .answers import SWEEP
from .evaluation import pair
from .evaluation.report import markdown_table
from .studies import Found, keep_report, study


@study("research/evidence.md", minutes=90)
def pair_sweep(
    small_model: str,
    data: Path,
    out: Path = Path("evaluation"),
    model: str | None = None,
    thresholds: str | None = None,
    window: int = DEFAULT_WINDOW,
    min_duration: int = DEFAULT_MIN_DURATION,
    answers_only: bool = False,
    context: int | None = None,
    tokens: int = 2000,
) -> Found:
    """Run two alternating models along a text, at every threshold of EAD's Table 1, against random controls.

    The study `answers` has this table for correct answers.

    Args:
        small_model: Directory or Hub repository.
        data: Text or JSON Lines.
        out: Directory for evaluation.json and pictures.
        model: The large model; the bundled one if omitted.
        thresholds: Comma-separated bits, such as inf,1,0.5,0; the paper's if omitted.
        window: Tokens in the rolling mean of the entropy.
        min_duration: Minimum number of tokens in a turn.
        answers_only: Count only answers, and not the questions, which are given in use.
        context: Tokens in a window; 256, or the model's context if shorter.
        tokens: Total number of predictions.
    """
    turns = PairSettings(window=window, min_gear_duration=min_duration)
    limits = None if thresholds is None else limits_of(thresholds)
    models = load_pair(ModelSettings(model), small_model)
    limits = limits or tuple(bits if math.isinf(bits) else scaled(bits, models.vocab_size) for bits in SWEEP)
    report: dict[str, Any] = {
        "model": model_name(model),
        "small_model": small_model,
        "data": str(data),
        "parameters": dict(zip(NAMES, parameters_in(models))),
        "weight_bytes": dict(zip(NAMES, weight_bytes_in(models))),
        "compute_dtype": dtype_name(model_dtype(models.large)),
        "gate": {"window": turns.window, "min_duration": turns.min_gear_duration},
    } | along_text(models, data, turns, limits, answers_only, context, tokens)
    keep_report(out, report, {f"evaluation.{kind}": partial(pair.draw_pair, report) for kind in ("png", "svg")})
    rows = report["policies"]
    return Found({"pair_read": markdown_table(pair.COLUMNS, rows), "table_1": pair.table_1(report)}, report)


def limits_of(text: str) -> tuple[float, ...]:
    """--thresholds as bits, from 0 to infinity. Raises GearbxError for anything else."""
    bits = numbers("--thresholds", text, float, "inf,1,0")
    for each in bits:
        check_threshold(each)
    return bits


def parameters_in(models: LoadedPair) -> tuple[int, int]:
    """Return the numbers of parameters (small, large); quantized ones count as the weights that they stand for."""
    return parameters_of((models.small, models.large))


def weight_bytes_in(models: LoadedPair) -> tuple[int, int]:
    """Return the bytes of weights that a token reads (small, large), in the type of the checkpoint."""
    return bytes_read(models.small), bytes_read(models.large)


def along_text(
    models: LoadedPair,
    data: Path,
    turns: PairSettings,
    limits: Sequence[float],
    answers_only: bool,
    context: int | None,
    tokens: int,
) -> dict[str, Any]:
    """Both models read texts; the gate takes turns between their predictions."""
    rows = read_rows(data, ("question", "answer")) if answers_only else []
    documents = [] if rows else read_documents(data)
    most = context_for(context, models.config)
    if rows:
        windows = answer_windows(models.tokenizer, rows, most, tokens)
    else:
        windows = [(each, 0) for each in windows_of(models.tokenizer, documents, most, tokens, str(data))]
    if not windows:
        raise GearbxError(f"{data}: no question leaves room for its answer in {most} tokens; raise --context")
    recording = pair.record_pair(models.small, models.large, track(windows, "both models"), models.vocab_size)
    rates = turns.window, turns.min_gear_duration, parameters_in(models), weight_bytes_in(models)
    return {
        "context": most,
        "answers_only": answers_only,
        "tokens": len(recording.large.nll),
        "windows": len(windows),
        "policies": pair.sweep(recording, limits, *rates),
    }


def answer_windows(
    tokenizer: Any, rows: list[dict[str, str]], context: int, tokens: int
) -> list[tuple[list[int], int]]:
    """Return a window for each question and answer, and the number of its tokens before the answer.

    Args:
        rows: with question and answer.
        context, tokens: as in windows_of; a question that fills the context is left out.
    """
    windows, left = [], tokens
    for row in rows:
        prompt = PROMPT.format(**row)
        start = len(encode(tokenizer, prompt))
        window = encode(tokenizer, f"{prompt} {row['answer']}")[: min(context, start + left)]
        if left > 0 and len(window) > start:
            windows.append((window, start))
            left -= len(window) - start
    return windows
