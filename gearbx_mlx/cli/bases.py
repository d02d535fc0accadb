"""Calibrated bases, made once for a model and kept.

A base should agree with the original on the original's own outputs. A chat model therefore answers requests at a
temperature, and calibration reads these answers beside the bundled problems and prose. For other models it reads
bundled answers of a different model.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import msgspec
from mlx_lm.sample_utils import make_sampler

from ..conversion.calibrated_base import MAX_LENGTH, CalibratedBase, calibrate_base, free_layers, steps
from ..conversion.kept_bases import BaseKey, key_of
from ..decoding.stream import batch_generator
from ..errors import GearbxError, GearbxWarning
from ..files.reading import json_lines, read_text
from ..formats import get_format
from ..gears.gearbox import Gearbox
from ..loading import DEMO_MODEL
from .decide import Decision
from .terminal import note, progress_bar

CHOOSING_TOKENS = 10_240  # maximum number of calibration tokens: twice as many take twice as long, and help little
SHIPPED = Path(DEMO_MODEL) / "calibration"
TEXT_TOKENS = 16_384  # maximum number of tokens read for calibration
ANSWER_TOKENS = 128  # maximum number of tokens in an answer
ANSWERS_TOGETHER = 24  # answers in a batch
REINSTALL = "use a new installation of the package"


class ShippedAnswer(msgspec.Struct, frozen=True):
    """A line of answers.jsonl."""

    prompt: str
    answer: str


class BaseText(NamedTuple):
    """Calibration text as tokens. sequences: to read. requests: prompts that the model answers first."""

    sequences: list[list[int]]
    requests: list[list[int]]


def text_of(tokenizer: Any, file: str | None) -> BaseText:
    """Return the calibration text in pieces of at most `MAX_LENGTH` tokens; warn if it is shorter than one piece.

    Args:
        file: text, or JSON Lines as in GSM8K; None or "": the bundled text, and requests if there is a chat template.

    Raises:
        GearbxError: a file that cannot be read, or has fewer than two tokens.
    """
    from ..evaluation.predictions import read_documents  # few runs need it

    encoded = [tokenizer.encode(text) for text in read_documents(Path(file) if file else SHIPPED / "text.jsonl")]
    requests = [] if file else requests_of(tokenizer)
    if not file and not requests:
        place = SHIPPED / "answers.jsonl"
        lines = json_lines(place, read_text(place, "text", REINSTALL), ShippedAnswer, REINSTALL)
        encoded += [tokenizer.encode(f"{line.prompt}\n\n{line.answer}\n") for _, line in lines]
    pieces = [list(text[i : i + MAX_LENGTH]) for text in encoded for i in range(0, len(text), MAX_LENGTH)]
    sequences, left = [], TEXT_TOKENS
    for piece in pieces:
        if len(piece) > 1 and left > 0:
            sequences.append(piece[:left])
            left -= len(piece)
    if not sequences:
        raise GearbxError(f"{file}: calibration needs two tokens; use a longer text")
    tokens = sum(map(len, sequences))
    if tokens < MAX_LENGTH:
        warning = f"{file}: with {tokens} tokens, fewer drafts are accepted than with thousands; use a longer text"
        warnings.warn(warning, GearbxWarning, stacklevel=2)
    return BaseText(sequences, requests)


def requests_of(tokenizer: Any) -> list[list[int]]:
    """Return the bundled requests in the model's chat template; none without a template that accepts them."""
    if not getattr(tokenizer, "has_chat_template", False):
        return []
    lines = read_text(SHIPPED / "requests.txt", "text", REINSTALL).splitlines()
    try:
        messages = [[{"role": "user", "content": line}] for line in lines]
        made = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
        return [list(tokens)[:MAX_LENGTH] for tokens in made]
    except Exception:  # templates are programs, and some want other messages
        return []


def answered(model: nn.Module, tokenizer: Any, requests: Sequence[list[int]], progress: Any) -> list[list[int]]:
    """Return the requests with the model's answers, the same in every run on this machine.

    The model gets a gearbox if there are requests.
    """
    if not requests:
        return []
    task = progress.add_task("answering requests", total=len(requests))
    answers = [list(request) for request in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the final gearbox gives the same warnings
        gearbox = Gearbox(model, "4,16")
    generator = batch_generator(
        model,
        tokenizer,
        mode="static",
        gearbox=gearbox,
        sampler=make_sampler(0.7),
        completion_batch_size=ANSWERS_TOGETHER,
    )
    try:
        lengths = [min(ANSWER_TOKENS, MAX_LENGTH - len(request)) for request in requests]
        uids = generator.insert([*map(list, requests)], lengths, seeds=[*range(len(requests))])
        by_uid, left = dict(zip(uids, answers)), len(requests)
        while left:
            for response in generator.next_generated():
                if response.error is not None:
                    raise response.error
                by_uid[response.uid].append(response.token)
                if response.finish_reason is not None:
                    left -= 1
                    progress.advance(task)
    finally:
        generator.close()
    return answers


def make_base(model: nn.Module, key: BaseKey, sequences: Sequence[list[int]], progress: Any) -> CalibratedBase:
    """Calibrate the base of a model without gears, and keep it if the cache is writable.

    Raises:
        GearbxError: as `calibrate_base`.
    """
    advance = partial(progress.advance, progress.add_task("calibrating", total=steps(model)))
    storage = get_format(key.format), key.ladder, key.group_size
    found = calibrate_base(model, key.layers(model), *storage, thinned(sequences), advance)
    key.keep(found)
    return found


def thinned(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Return evenly spaced sequences of about CHOOSING_TOKENS tokens in all; all sequences if they have fewer."""
    share = min(1.0, CHOOSING_TOKENS / max(1, sum(map(len, sequences))))
    return [each for i, each in enumerate(sequences) if math.ceil((i + 1) * share) > math.ceil(i * share)]


def calibrated(
    model: nn.Module,
    key: BaseKey,
    text: BaseText,
    open_answering: Callable[[], tuple[nn.Module, Any]],
    alternative: str,
) -> CalibratedBase:
    """Return a new calibrated base of a model without gears, kept for later runs.

    Args:
        open_answering: returns the model that answers requests, and its tokenizer.
        alternative: the remedy of a user who does not want to wait.

    Raises:
        GearbxError: a format or a ladder whose lowest codes are not free.
    """
    layers, _ = free_layers(key.layers(model), get_format(key.format), key.ladder, key.group_size)
    tokens = min(CHOOSING_TOKENS, sum(map(len, text.sequences)) + len(text.requests) * ANSWER_TOKENS)
    answering = f", {len(text.requests)} answers of the model" if text.requests else ""
    note(f"base: calibrating {len(layers)} layers on {tokens} tokens{answering}: minutes, once; {alternative}")
    with progress_bar() as progress:
        answers = answered(*open_answering(), text.requests, progress) if text.requests else []
        sequences = text.sequences + answers
        base = make_base(model, key, sequences, progress)
    kept = ", and kept" if base.file else ""
    note(f"base: {len(base.layers)} layers calibrated with {sum(map(len, sequences))} tokens{kept}")
    for reason in sorted({*base.rounded.values()}):
        paths = [path for path, why in base.rounded.items() if why == reason]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        note(f"base: {', '.join(paths[:3])}{more} rounded to nearest: {reason}")
    return base


def find_base(decision: Decision, model: nn.Module, tokenizer: Any) -> CalibratedBase | None:
    """Return the kept base of a decision that takes one; else a new one if --base names a text, or None."""
    source, stored = decision.settings.gears.base_text, decision.stored
    text = None if source is None else text_of(tokenizer, source)
    ladder = [gear.bits for gear in decision.ladder]
    key = key_of(model, decision.format, ladder, stored.manage, stored.group_size, text)
    base = key.find()
    if base is not None and base.file is not None:
        note(f"base: calibrated earlier, {base.file.parent}")
    elif text is not None:
        alternative = "omit --base for drafts that are rounded to nearest"
        base = calibrated(model, key, text, lambda: (model, tokenizer), alternative)
    return base
