"""evaluate --small-model: EAD's Table 1 for a sweep of thresholds, with a random control for each."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..cli import pair as pairing
from ..cli import terminal
from ..evaluation import gsm8k_pair, pair
from ..evaluation.session import Session, fingerprint
from ..files.writing import write_text
from ..gears.activations import dtype_name, model_dtype
from ..loading import DEMO_MODEL, find, model_name
from ..telemetry.summary import as_json

SCHEMA, VERSION = "gearbx-mlx pair evaluation", 1
FILES = ("evaluation.json", "evaluation.md")


def inputs_of(args: argparse.Namespace, turns: pairing.Turns, *names: str) -> dict[str, Any]:
    """All that results depend on but the thresholds: a sweep may be extended."""
    from importlib.metadata import version

    def contents(model: str | None) -> str:
        directory = find(model or DEMO_MODEL)
        return fingerprint(*(file for kind in ("*.safetensors", "*.json") for file in directory.glob(kind)))

    return {
        "model contents": contents(args.model),
        "small model contents": contents(args.small_model),
        "data contents": fingerprint(Path(args.data)),
        **{name: getattr(args, name) for name in ("task", "dtype", "adapter_path", *names)},
        "window": turns.window,
        "min_duration": turns.min_duration,
        "gearbx_mlx": version("gearbx-mlx"),
        "mlx": version("mlx"),
    }


def told_by(args: argparse.Namespace, models: pairing.Pair, turns: pairing.Turns) -> dict[str, Any]:
    """What a report says of how it was made."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": model_name(args.model),
        "small_model": args.small_model,
        "data": args.data,
        "parameters": dict(zip(("small", "large"), models.parameters)),
        "weight_bytes": dict(zip(("small", "large"), models.weight_bytes)),
        "compute_dtype": dtype_name(model_dtype(models.large)),
        "gate": {"window": turns.window, "min_duration": turns.min_duration},
        "seed": args.seed,
    }


def write(out: Path, report: dict[str, Any], page: str, columns: Mapping[str, Callable[[Any], str]]) -> None:
    """The files, and the rows in the terminal."""
    from rich import box
    from rich.table import Table

    write_text(out / FILES[0], as_json(finite(report)))
    write_text(out / FILES[1], page)
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in report["policies"]:
        table.add_row(*(show(row) for show in columns.values()))
    terminal.messages.print(table)
    for name in FILES:
        print(out / name)


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: the first becomes "inf", the second null."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None if np.isnan(value) else str(value)
    return value


def run_text(
    args: argparse.Namespace,
    turns: pairing.Turns,
    models: pairing.Pair,
    windows: Sequence[tuple[Sequence[int], int]],
    progress: Any,
) -> int:
    """Teacher-forced along texts.

    Args:
        windows: tokens, and how many of them are a prompt.
    """
    out = Path(args.out)
    Session(out, inputs_of(args, turns, "context", "tokens", "answers_only"))
    tracked = progress.track(windows, description="both models")
    recording = pair.record_pair(models.small, models.large, tracked, models.vocab_size)
    thresholds = turns.sweep(models.vocab_size)
    report = told_by(args, models, turns) | {
        "complete": True,
        "context": args.context,
        "answers_only": args.answers_only,
        "tokens": len(recording.large.nll),
        "windows": len(windows),
        "policies": pair.sweep(
            recording, thresholds, turns.window, turns.min_duration, models.parameters, models.weight_bytes
        ),
    }
    write(out, report, pair.markdown(report), {name: pair.COLUMNS[name] for name in pair.SHOWN})
    return 0


def run_gsm8k(
    args: argparse.Namespace, turns: pairing.Turns, models: pairing.Pair, prompts: Sequence[Any], progress: Any
) -> int:
    """Free-running, by final numbers. Every row is kept as soon as it is complete.

    Args:
        prompts: tokens, length and answer of each problem.
    """
    out = Path(args.out)
    session = Session(out, inputs_of(args, turns, "num_problems", "num_shots", "max_tokens", "seed"))
    solve = partial(gsm8k_pair.solve, models.small, models.large, models.tokenizer)
    attempts: dict[str, list[gsm8k_pair.PairAttempt]] = {}
    thresholds: dict[str, float] = {}

    def attempt(name: str, threshold: float, gate_of: Callable) -> list[gsm8k_pair.PairAttempt]:
        tracked = progress.track(prompts, description=name)
        attempts[name] = session.rows(
            name, partial(solve, tracked, turns.window, gate_of), gsm8k_pair.PairAttempt, len(prompts)
        )
        thresholds[name] = threshold
        return attempts[name]

    status = 0
    try:
        for threshold in sorted({*turns.sweep(models.vocab_size), 0.0}):
            tried = attempt(f"pair-{threshold:g}", threshold, gsm8k_pair.by_entropy(threshold, turns.min_duration))
            share = gsm8k_pair.share_of(tried)
            if 0 < share < 1:
                coin = gsm8k_pair.by_chance(share, turns.min_duration, args.seed)
                attempt(f"random-{threshold:g}", threshold, coin)
    except KeyboardInterrupt:
        status = terminal.INTERRUPTED
    if not attempts:
        terminal.note(f"{out}: no threshold is finished; the same command goes on")
        return status
    report = told_by(args, models, turns) | {
        "complete": status == 0,
        "policies": gsm8k_pair.rows_of(attempts, thresholds, models.parameters),
    }
    write(out, report, gsm8k_pair.markdown(report), {name: gsm8k_pair.COLUMNS[name] for name in gsm8k_pair.SHOWN})
    return status
