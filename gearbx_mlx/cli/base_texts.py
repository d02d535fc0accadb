"""Which text calibrates a base: a file's, or what ships, with answers that the model itself writes.

A base is to agree with the original where the original writes. So a model that chats answers requests at a temperature,
and reads its own answers beside the problems and the prose that ship. A model that does not chat reads answers that
another model wrote.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import msgspec
from mlx_lm.sample_utils import make_sampler

from ..conversion.calibrated_base import LONGEST
from ..decoding.stream import batch_generator
from ..errors import GearbxError, GearbxWarning
from ..files.reading import json_lines, read_text
from ..gears.gearbox import Gearbox
from ..loading import DEMO_MODEL

SHIPPED = Path(DEMO_MODEL) / "calibration"
MOST = 16_384  # tokens of a text that are read
ANSWER = 128  # tokens of an answer at most
TOGETHER = 24  # answers that are written at a time
TEMPERATURE = 0.7
AGAIN = "install the package again"


class ShippedAnswer(msgspec.Struct, frozen=True):
    """A line of answers.jsonl."""

    prompt: str
    answer: str


class BaseText(NamedTuple):
    """What calibrates a base, as tokens. texts: to be read. requests: that the model is to answer, and then to read."""

    texts: list[list[int]]
    requests: list[list[int]]


def text_of(tokenizer: Any, file: str | None) -> BaseText:
    """The text to calibrate with, `LONGEST` tokens at most in each piece.

    Args:
        file: text, or JSON Lines as in GSM8K; None or "": what ships, and requests if the tokenizer has a template.

    Raises:
        GearbxError: a file that cannot be read or is empty, or that is shorter than two tokens.

    Warns:
        GearbxWarning: a file that is shorter than one such piece.
    """
    from ..evaluation.text import read_documents  # few runs need it

    encoded = [tokenizer.encode(text) for text in read_documents(Path(file) if file else SHIPPED / "text.jsonl")]
    requests = [] if file else requests_of(tokenizer)
    if not file and not requests:
        place = SHIPPED / "answers.jsonl"
        lines = json_lines(place, read_text(place, "text", AGAIN), ShippedAnswer, AGAIN)
        encoded += [tokenizer.encode(f"{line.prompt}\n\n{line.answer}\n") for _, line in lines]
    pieces = [list(text[i : i + LONGEST]) for text in encoded for i in range(0, len(text), LONGEST)]
    texts, left = [], MOST
    for piece in pieces:
        if len(piece) > 1 and left > 0:
            texts.append(piece[:left])
            left -= len(piece)
    if not texts:
        raise GearbxError(f"{file}: has no two tokens to calibrate with; give more text")
    tokens = sum(map(len, texts))
    if tokens < LONGEST:
        said = f"{file}: has {tokens} tokens; drafts agree more often after thousands: give more text"
        warnings.warn(said, GearbxWarning, stacklevel=2)
    return BaseText(texts, requests)


def requests_of(tokenizer: Any) -> list[list[int]]:
    """The requests that ship, in the model's own chat template; none if it has no template that takes them."""
    if not getattr(tokenizer, "has_chat_template", False):
        return []
    lines = read_text(SHIPPED / "requests.txt", "text", AGAIN).splitlines()
    try:
        return [in_template(tokenizer, line)[:LONGEST] for line in lines]
    except Exception:  # templates are programs, and some want other messages
        return []


def in_template(tokenizer: Any, request: str) -> list[int]:
    """The tokens of a request, up to where the answer begins."""
    message = [{"role": "user", "content": request}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def answered(model: nn.Module, tokenizer: Any, requests: Sequence[list[int]], progress: Any) -> list[list[int]]:
    """The requests with the answers that the model writes to them: the same at every run on this machine.

    Args:
        model: not quantized; a gearbox is put on it, if there are requests.
        progress: a bar (`progress_bar`).
    """
    if not requests:
        return []
    task = progress.add_task("writing text", total=len(requests))
    made = [list(request) for request in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gearbox that is made with the base warns of the same
        gearbox = Gearbox(model, "4,16")
    generator = batch_generator(
        model,
        tokenizer,
        mode="static",
        gearbox=gearbox,
        sampler=make_sampler(TEMPERATURE),
        completion_batch_size=TOGETHER,
    )
    try:
        lengths = [min(ANSWER, LONGEST - len(request)) for request in made]
        uids = generator.insert([*map(list, requests)], lengths, seeds=[*range(len(made))])
        texts, left = dict(zip(uids, made)), len(made)
        while left:
            for response in generator.next_generated():
                if response.error is not None:
                    raise response.error
                texts[response.uid].append(response.token)
                if response.finish_reason is not None:
                    left -= 1
                    progress.advance(task)
    finally:
        generator.close()
    return made
