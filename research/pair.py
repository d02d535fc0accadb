"""EAD: two models that take turns, along a text and writing answers, at every threshold and against chance."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from gearbx_mlx.cli.build import LoadedPair, load_pair
from gearbx_mlx.cli.flags import ModelSettings
from gearbx_mlx.compat.arrays import dtype_name
from gearbx_mlx.decoding.modes import PairSettings
from gearbx_mlx.decoding.pair import bytes_read
from gearbx_mlx.decoding.stream import parameters_of
from gearbx_mlx.errors import GearbxError, numbers
from gearbx_mlx.evaluation.predictions import PROMPT, context_for, encode, read_documents, read_rows, windows_of
from gearbx_mlx.files.journal import Journal, hash_of_tokens
from gearbx_mlx.files.writing import make_directory
from gearbx_mlx.gears.activations import model_dtype
from gearbx_mlx.loading import model_name
from gearbx_mlx.routing.pair import DEFAULT_MIN_DURATION, DEFAULT_WINDOW, NAMES, check_threshold, scaled

from .evaluation import pair
from .evaluation.answers import TASKS, group_tables, grouped
from .evaluation.report import markdown_table
from .final_answers import problems_of, prompts_of
from .studies import Found, keep_report, study

SWEEP = (
    math.inf,
    1.0,
    0.5,
    0.25,
    0.125,
    0.0625,
    0.03125,
    0.0,
)  # bits, EAD's Table 1; its 99 is more than any vocabulary has


@study("research/evidence.md", minutes=90)
def pair_sweep(
    small_model: str,
    data: Path,
    out: Path = Path("evaluation"),
    model: str | None = None,
    task: Literal["text", "gsm8k", "math"] = "text",
    thresholds: str | None = None,
    window: int = DEFAULT_WINDOW,
    min_duration: int = DEFAULT_MIN_DURATION,
    answers_only: bool = False,
    context: int | None = None,
    tokens: int = 2000,
    num_problems: int = 50,
    num_shots: int = 0,
    max_tokens: int = 256,
    no_coin: bool = False,
    seed: int = 0,
) -> Found:
    """EAD's Table 1 and Figure 1: two models in turns, at every threshold, with random controls.

    Where they write, the small model as draft model of the large one stands beside them: it writes what the large one
    writes alone.

    Args:
        small_model: A directory or a Hub repository.
        data: A text, JSON Lines, or problems of the task.
        out: Directory for evaluation.json and pictures; and for attempts at problems, which are kept one by one.
        model: The large model; the model that ships if not given.
        task: text: both read the data. gsm8k, math: they write, and final answers are right or wrong.
        thresholds: Bits with commas between, such as inf,1,0.5,0; the paper's if not given.
        window: Tokens over which entropy is averaged.
        min_duration: Tokens that a model computes in a row at least.
        answers_only: Count the answers alone, not the questions, which are given in use.
        context: Tokens in a window; 256, or the model's context if less.
        tokens: Predictions in all, along a text.
        num_problems: Problems to solve.
        num_shots: First problems, to show as examples.
        max_tokens: Of an answer.
        no_coin: Where they write, toss no coin beside the thresholds, which halves the time.
        seed: Of the coin.
    """
    turns = PairSettings(window=window, min_gear_duration=min_duration)
    limits = None if thresholds is None else limits_of(thresholds)
    models = load_pair(ModelSettings(model), small_model)
    limits = limits or tuple(bits if math.isinf(bits) else scaled(bits, models.vocab_size) for bits in SWEEP)
    found: dict[str, Any]
    if task == "text":
        found, columns = along_text(models, data, turns, limits, answers_only, context, tokens), pair.COLUMNS
    else:
        examples, problems = problems_of(data, task, num_shots, num_problems)
        prompts = prompts_of(max_tokens, task, models.tokenizer, models.config, examples, problems)
        make_directory(out)
        rows = grouped(problems, writing(models, task, prompts, turns, limits, not no_coin, seed, out))
        found, columns = {"policies": rows}, pair.ANSWER_COLUMNS
    report: dict[str, Any] = {
        "model": model_name(model),
        "small_model": small_model,
        "data": str(data),
        "parameters": dict(zip(NAMES, parameters_in(models))),
        "weight_bytes": dict(zip(NAMES, weight_bytes_in(models))),
        "compute_dtype": dtype_name(model_dtype(models.large)),
        "gate": {"window": turns.window, "min_duration": turns.min_gear_duration},
        "seed": seed,
    } | found
    keep_report(out, report, {f"evaluation.{kind}": partial(pair.draw_pair, report) for kind in ("png", "svg")})
    of_all = "pair_read" if task == "text" else "pair_answers"
    tables = {of_all: markdown_table(columns, report["policies"]), "table_1": pair.table_1(report)}
    return Found(tables | group_tables(report["policies"]), report)


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
    """For each question and answer a window, and how many of its tokens are before the answer.

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


def writing(
    models: LoadedPair,
    task: str,
    prompts: Sequence[pair.Prompt],
    turns: PairSettings,
    limits: Sequence[float],
    tosses: bool,
    seed: int,
    out: Path,
) -> list[dict[str, Any]]:
    """The models write answers: a row for each threshold, one for a coin with the large model's share, and one for the
    small model as draft model of the large one.

    Every attempt is kept at once, problem by problem, so that the same command goes on where it ended.
    """
    journal = Journal(out / "attempts.jsonl", about_writing(models, prompts, turns, seed), pair.PairAttempt)
    solve = partial(
        pair.solve_in_turns, models.small, models.large, models.tokenizer, TASKS[task], prompts, turns.window
    )
    draft = partial(pair.solve_with_draft, models.small, models.large, models.tokenizer, TASKS[task], prompts)
    thresholds = {f"pair-{threshold:g}": threshold for threshold in sorted({*limits, 0.0})}
    works: dict[str, Callable[[int], pair.PairAttempt]] = {
        name: partial(solve, pair.by_entropy(threshold, turns.min_gear_duration))
        for name, threshold in thresholds.items()
    }
    attempts = kept(journal, works | {pair.DRAFT: draft}, len(prompts))
    coins: dict[str, Callable[[int], pair.PairAttempt]] = {}
    for name, threshold in list(thresholds.items()):
        share = pair.share_of(attempts[name])
        if tosses and 0 < share < 1:
            coin = f"random-{threshold:g}"
            coins[coin] = partial(solve, pair.by_chance(share, turns.min_gear_duration, seed))
            thresholds[coin] = threshold
    return pair.answer_rows(
        attempts | kept(journal, coins, len(prompts)), thresholds | {pair.DRAFT: 0.0}, parameters_in(models)
    )


def about_writing(models: LoadedPair, prompts: Sequence[pair.Prompt], turns: PairSettings, seed: int) -> dict[str, Any]:
    """Return what attempts depend on."""
    return {
        "parameters": parameters_in(models),
        "prompts": hash_of_tokens([tokens for tokens, _, _ in prompts]),
        "room": max(room for _, room, _ in prompts),
        "window": turns.window,
        "min_duration": turns.min_gear_duration,
        "seed": seed,
    }


def kept(
    journal: Journal, works: Mapping[str, Callable[[int], pair.PairAttempt]], problems: int
) -> dict[str, list[pair.PairAttempt]]:
    """Return the attempts of each work at every problem; all works make one problem before the next."""
    attempts: dict[str, list[pair.PairAttempt]] = {name: [] for name in works}
    for number in track(range(problems), "problems"):
        for name, work in works.items():
            attempts[name].append(journal.made(f"{name} {number}", partial(work, number)))
    return attempts
