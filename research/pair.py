"""evaluate --small-model: EAD's Table 1 for a sweep of thresholds, with a random control for each."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.flags import Turns, turns_of
from ..cli.loaded import LoadedPair, load_pair
from ..cli.resolved import model_inputs
from ..compat.arrays import dtype_name
from ..errors import GearbxError
from ..evaluation import pair
from ..evaluation.answers import TASKS, grouped, problem_files
from ..evaluation.pair import draw_pair
from ..evaluation.report import Report
from ..evaluation.session import EvaluationSession, hash_of_tokens
from ..evaluation.text import answer_windows, read_documents, read_rows, windows_of
from ..gears.activations import model_dtype
from ..loading import fingerprint, model_contents, model_name
from ..routing.pair import NAMES
from . import WRITTEN, EvaluateSettings
from .answers import answers_inputs, problems_of, prompts_of
from .text import context_for, note_or_raise

SCHEMA, VERSION = "gearbx-mlx pair evaluation", 1
PICTURES = {f"evaluation.{kind}": draw_pair for kind in ("png", "svg")}


def measured(settings: EvaluateSettings, small_model: str, out: Path) -> Report:
    """The report of two models that take turns, along a text or writing answers.

    Args:
        out: directory of the session.

    Raises:
        KeyboardInterrupt: before any threshold was complete.
    """
    turns = turns_of(settings.task.thresholds, settings.gate, several=True)
    if settings.task.task in WRITTEN:
        examples, problems = problems_of(settings.task)
        models = load_pair(settings.model, small_model)
        prompts = prompts_of(settings.prompt, settings.task.task, models.tokenizer, models.config, examples, problems)
        report = answers_report(settings, turns, models, prompts, out)
        report["policies"] = grouped(problems, report["policies"])
        page = pair.answers_page(report)
        return Report(report, page, pair.ANSWER_COLUMNS, pair.FIRST_OF_ANSWERS, PICTURES)
    report = text_report(settings, turns, small_model, out)
    return Report(report, pair.markdown(report), pair.COLUMNS, pair.FIRST, PICTURES)


def text_report(settings: EvaluateSettings, turns: Turns, small_model: str, out: Path) -> dict[str, Any]:
    """Both models read texts; the gate takes turns between their predictions."""
    task, tokens = settings.task, settings.comparison.tokens
    rows = read_rows(Path(task.data), ("question", "answer")) if task.answers_only else []
    documents = [] if rows else read_documents(Path(task.data))
    models = load_pair(settings.model, small_model)
    context = context_for(settings.comparison.context, models.config)
    if rows:
        windows = answer_windows(models.tokenizer, rows, context, tokens)
    else:
        windows = [(w, 0) for w in windows_of(models.tokenizer, documents, context, tokens, task.data)]
    if not windows:
        raise GearbxError(f"{task.data}: no question leaves room for its answer in {context} tokens; raise --context")
    depends_on = {"context": context, "tokens": tokens, "answers_only": task.answers_only}
    read = {"windows": hash_of_tokens([window for window, _ in windows])}
    session = EvaluationSession(out, inputs_of(settings, turns) | depends_on | read)
    with terminal.progress_bar() as progress:
        tracked = progress.track(windows, description="both models")
        recording = pair.record_pair(models.small, models.large, tracked, models.vocab_size, session)
    thresholds = turns.sweep(models.vocab_size)
    policies = pair.sweep(
        recording, thresholds, turns.window, turns.min_duration, models.parameters, models.weight_bytes
    )
    return about(settings, turns, models) | {
        "complete": True,
        "context": context,
        "answers_only": task.answers_only,
        "tokens": len(recording.large.nll),
        "windows": len(windows),
        "policies": policies,
    }


def answers_report(
    settings: EvaluateSettings, turns: Turns, models: LoadedPair, prompts: Sequence[pair.Prompt], out: Path
) -> dict[str, Any]:
    """The models write answers. The session keeps every row as soon as it is complete."""
    seed, task = settings.comparison.seed, TASKS[settings.task.task]
    session = EvaluationSession(out, inputs_of(settings, turns) | answers_inputs(settings, prompts) | {"seed": seed})
    solve = partial(pair.solve_in_turns, models.small, models.large, models.tokenizer, task, prompts, turns.window)
    attempts: dict[str, list[pair.PairAttempt]] = {}
    thresholds: dict[str, float] = {}
    complete = False
    with terminal.progress_bar() as progress:

        def attempt(name: str, threshold: float, gate_of: Callable) -> list[pair.PairAttempt]:
            numbers = progress.track(range(len(prompts)), description=name)
            attempts[name] = session.rows(name, partial(solve, gate_of), pair.PairAttempt, numbers)
            thresholds[name] = threshold
            return attempts[name]

        try:
            for threshold in sorted({*turns.sweep(models.vocab_size), 0.0}):
                gate = pair.by_entropy(threshold, turns.min_duration)
                share = pair.share_of(attempt(f"pair-{threshold:g}", threshold, gate))
                if 0 < share < 1:
                    coin = pair.by_chance(share, turns.min_duration, seed)
                    attempt(f"random-{threshold:g}", threshold, coin)
            complete = True
        except KeyboardInterrupt:
            note_or_raise(attempts, out)
    return about(settings, turns, models) | {
        "complete": complete,
        "policies": pair.answer_rows(attempts, thresholds, models.parameters),
    }


def inputs_of(settings: EvaluateSettings, turns: Turns) -> dict[str, Any]:
    """All that results depend on but the thresholds: a sweep may be extended."""
    return {
        **model_inputs(settings.model),
        "small model contents": model_contents(settings.task.small_model),
        "data contents": fingerprint(*problem_files(Path(settings.task.data))),
        "task": settings.task.task,
        "window": turns.window,
        "min_duration": turns.min_duration,
    }


def about(settings: EvaluateSettings, turns: Turns, models: LoadedPair) -> dict[str, Any]:
    """What a report says of how it was made."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": model_name(settings.model.model),
        "small_model": settings.task.small_model,
        "data": settings.task.data,
        "parameters": dict(zip(NAMES, models.parameters)),
        "weight_bytes": dict(zip(NAMES, models.weight_bytes)),
        "compute_dtype": dtype_name(model_dtype(models.large)),
        "gate": {"window": turns.window, "min_duration": turns.min_duration},
        "seed": settings.comparison.seed,
    }
