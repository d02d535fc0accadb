"""Bases of models are made once and kept: one file each, in the user's cache.

A base is to agree with the original where the original writes. So a model that chats answers requests at a temperature,
and reads its own answers beside the problems and the prose that ship. A model that does not chat reads answers that
another model wrote.

A base stands under the fingerprint of its model, with how gears are stored and the hash of the text. Its file has the
planes under the names that mlx-lm gives them.
"""

import hashlib
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..conversion.calibrated_base import MAX_LENGTH, calibrate_base, free_layers, steps
from ..decoding.stream import batch_generator
from ..errors import GearbxError, GearbxWarning
from ..files.reading import json_lines, read_text
from ..files.user_cache import CacheUnusable, cache_entry, check_owner, warn_of
from ..files.writing import replacing_arrays
from ..formats.base import Format
from ..formats.tied import linear_of
from ..gears.discovery import Layer, discover
from ..gears.gearbox import Gearbox, model_fingerprint
from ..kernels.bit_planes import Planes
from ..loading import DEMO_MODEL
from .decide import Decision
from .terminal import note, progress_bar

CHOOSING_TOKENS = 10_240  # tokens at most that choose codes: twice as many take twice as long, and are worth little
PLANE_ARRAYS = ("weight", "scales", "biases")
SHIPPED = Path(DEMO_MODEL) / "calibration"
TEXT_TOKENS = 16_384  # tokens of a text that are read
ANSWER_TOKENS = 128  # tokens of an answer at most
ANSWERS_TOGETHER = 24  # answers that are written at a time
PROBE = 1024  # rows and columns of a product that is timed
REINSTALL = "install the package again"


class ShippedAnswer(msgspec.Struct, frozen=True):
    """A line of answers.jsonl."""

    prompt: str
    answer: str


class BaseText(NamedTuple):
    """What calibrates a base, as tokens. texts: to be read. requests: that the model is to answer, and then to read."""

    texts: list[list[int]]
    requests: list[list[int]]


def text_of(tokenizer: Any, file: str | None) -> BaseText:
    """Return the text to calibrate with, `LONGEST` tokens at most in each piece.

    Args:
        file: text, or JSON Lines as in GSM8K; None or "": what ships, and requests if the tokenizer has a template.

    Raises:
        GearbxError: a file that cannot be read or is empty, or that is shorter than two tokens.

    Warns:
        GearbxWarning: a file that is shorter than one such piece.
    """
    from ..evaluation.predictions import read_documents  # few runs need it

    encoded = [tokenizer.encode(text) for text in read_documents(Path(file) if file else SHIPPED / "text.jsonl")]
    requests = [] if file else requests_of(tokenizer)
    if not file and not requests:
        place = SHIPPED / "answers.jsonl"
        lines = json_lines(place, read_text(place, "text", REINSTALL), ShippedAnswer, REINSTALL)
        encoded += [tokenizer.encode(f"{line.prompt}\n\n{line.answer}\n") for _, line in lines]
    pieces = [list(text[i : i + MAX_LENGTH]) for text in encoded for i in range(0, len(text), MAX_LENGTH)]
    texts, left = [], TEXT_TOKENS
    for piece in pieces:
        if len(piece) > 1 and left > 0:
            texts.append(piece[:left])
            left -= len(piece)
    if not texts:
        raise GearbxError(f"{file}: has no two tokens to calibrate with; give more text")
    tokens = sum(map(len, texts))
    if tokens < MAX_LENGTH:
        said = f"{file}: has {tokens} tokens; drafts agree more often after thousands: give more text"
        warnings.warn(said, GearbxWarning, stacklevel=2)
    return BaseText(texts, requests)


def requests_of(tokenizer: Any) -> list[list[int]]:
    """Return the requests that ship, in the model's own chat template; none if it has no template that takes them."""
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
    """Return the requests with the answers that the model writes to them: the same at every run on this machine.

    A gearbox is put on the model, if there are requests.
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
        sampler=make_sampler(0.7),
        completion_batch_size=ANSWERS_TOGETHER,
    )
    try:
        lengths = [min(ANSWER_TOKENS, MAX_LENGTH - len(request)) for request in made]
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


@dataclass
class Base:
    """A calibrated base.

    layers: path to the lowest gear's plane. rounded: path to reason of layers that have the nearest codes, all or some
    of their experts. file: in which it is kept, if it is.
    """

    layers: dict[str, Planes]
    rounded: dict[str, str] = field(default_factory=dict)
    file: Path | None = None


@dataclass(frozen=True)
class BaseKey:
    """What a base depends on. ladder: bits of all gears. text: hash of the tokens; "": of any text."""

    fingerprint: str
    format: str
    ladder: tuple[int, ...]
    manage: str
    group_size: int
    text: str = ""

    def file(self) -> Path:
        """Return the file, in the user's cache or in the folder GEARBX_BASES.

        Raises:
            CacheUnusable: another user could write to the folder, or the cache cannot be used.
            OSError: the folder cannot be read.
        """
        about = f"3 {self.format} {self.ladder} {self.manage} {self.group_size}"
        short = hashlib.sha256(about.encode()).hexdigest()[:8]
        name = f"{self.fingerprint[:16]}-{short}-{self.text or '*'}.safetensors"
        named = os.environ.get("GEARBX_BASES")
        folder = Path(named) if named else cache_entry("bases")
        check_owner(folder)
        return folder / name

    def find(self) -> "Base | None":
        """Return the base that is kept, the latest one for any text; None where there is none, or it is damaged.

        Warns:
            GearbxWarning: another user could have written it; it is not read.
        """
        try:
            file = self.file()
            files = sorted(file.parent.glob(file.name), key=lambda file: file.lstat().st_mtime)
            for latest in files[-1:]:
                check_owner(latest)
                return read_base(latest, self)
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        return None

    def keep(self, base: Base) -> None:
        """Write a base; warn where it cannot be kept."""
        arrays = {
            f"{path}.{name}": array
            for path, planes in base.layers.items()
            for name, array in zip(PLANE_ARRAYS, planes.arrays)
        }
        about = {"fingerprint": self.fingerprint, "group_size": str(self.group_size), "bits": str(self.ladder[0])}
        about["rounded"] = msgspec.json.encode(base.rounded).decode()
        try:
            file = self.file()
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing_arrays(file) as place:
                mx.save_safetensors(place, arrays, about)
            file.chmod(0o600)  # with any umask: what others may write to is never used
            base.file = file
        except (CacheUnusable, OSError) as error:
            warn_of(error)
        except GearbxError as error:
            warnings.warn(f"{error}; the base is made again at the next start", GearbxWarning, stacklevel=2)


def read_base(file: Path, key: BaseKey) -> Base | None:
    """Return the base of a file; None where it is another one's or damaged."""
    try:
        arrays, about = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(file), return_metadata=True))
        mx.eval(arrays)  # which a file that was cut off does not have
        if about["fingerprint"] != key.fingerprint:
            return None
        bits, group_size = int(about["bits"]), int(about["group_size"])
        layers = {}
        for path in {name.rpartition(".")[0] for name in arrays}:
            words, scales, biases = (arrays[f"{path}.{name}"] for name in PLANE_ARRAYS)
            layers[path] = Planes([words], scales, [biases], (bits,), group_size)
        return Base(layers, msgspec.json.decode(about["rounded"], type=dict[str, str]), file)
    except (RuntimeError, KeyError, ValueError):
        return None


def key_of(
    model: nn.Module,
    format: Format,
    ladder: Sequence[int],
    manage: str,
    group_size: int,
    text: BaseText | None = None,
) -> BaseKey:
    """Return what the base of a model depends on. text: None: of any."""
    digest = hashlib.sha256(msgspec.json.encode(text)).hexdigest()[:16] if text else ""
    return BaseKey(model_fingerprint(model), format.name, tuple(ladder), manage, group_size, digest)


def tell_cost(model: nn.Module, key: BaseKey, format: Format, text: BaseText, instead: str) -> None:
    """Say what a calibration does, for about how long, and what takes less (`instead`), before it begins.

    Raises:
        GearbxError: a format or a ladder whose lowest codes are not free.
    """
    layers, _ = free_layers(discover(model, key.manage, key.group_size, format)[0], format, key.ladder, key.group_size)
    tokens = min(CHOOSING_TOKENS, sum(map(len, text.texts)) + len(text.requests) * ANSWER_TOKENS)
    minutes = max(1, round(expected_seconds(layers, tokens) / 60))
    answers = f"the model answers {len(text.requests)} requests, and " if text.requests else ""
    note(
        f"base: {answers}{tokens} tokens choose the codes of {len(layers)} layers, which takes about {minutes} "
        f"minute{'s' * (minutes > 1)} here and is kept; {instead}"
    )


def expected_seconds(layers: Sequence[Layer], tokens: int) -> float:
    """Estimate how long a calibration takes, by a product of numpy, which does most of it.

    For each layer (O, I) the text is read twice and its inputs are summed up in two matrices (I, I). These are inverted
    and factored, and columns correct those that follow, for codes and scales.
    """
    work = 0.0
    for layer in layers:
        *experts, rows, width = linear_of(layer.module).weight.shape
        read, solved = 2 * width * (rows + width), 4 * width * width * (rows + width)
        work += tokens * read + math.prod(experts) * solved
    square, seconds = np.ones((PROBE, PROBE), np.float32), math.inf
    for _ in range(3):  # the first one wakes threads
        start = time.perf_counter()
        square @ square
        seconds = min(seconds, time.perf_counter() - start)
    return work * seconds / PROBE**3


def make_base(model: nn.Module, key: BaseKey, format: Format, texts: Sequence[list[int]], progress: Any) -> Base:
    """Calibrate the base of a model without gears, and keep it where the cache can be written.

    Raises:
        GearbxError: as `calibrate_base`.
    """
    layers, _ = discover(model, key.manage, key.group_size, format)
    task = progress.add_task("calibrating", total=steps(model))
    advance = partial(progress.advance, task)
    found = calibrate_base(model, layers, format, key.ladder, key.group_size, thinned(texts), advance)
    base = Base(found.layers, found.rounded)
    key.keep(base)
    return base


def thinned(texts: Sequence[list[int]]) -> list[list[int]]:
    """Return texts of CHOOSING_TOKENS in all, or a little more, from everywhere in them; all if they have fewer."""
    share = min(1.0, CHOOSING_TOKENS / max(1, sum(map(len, texts))))
    return [text for i, text in enumerate(texts) if math.ceil((i + 1) * share) > math.ceil(i * share)]


def find_base(decision: Decision, model: nn.Module, tokenizer: Any) -> Base | None:
    """Return the calibrated base of a model that takes one: one that is kept; else one that is made, if there is text
    for it.

    Raises:
        GearbxError: as `text_of` and `make_base`.
    """
    source = decision.settings.gears.base_text
    text = None if source is None else text_of(tokenizer, source)
    ladder = [gear.bits for gear in decision.ladder]
    key = key_of(model, decision.format, ladder, decision.manage, decision.group_size, text)
    base = key.find()
    if base is not None and base.file is not None:
        note(f"base: calibrated earlier, {base.file.parent}")
    elif text is not None:
        tell_cost(model, key, decision.format, text, "without --base drafts have the nearest codes")
        with progress_bar() as progress:
            texts = text.texts + answered(model, tokenizer, text.requests, progress)
            base = make_base(model, key, decision.format, texts, progress)
        kept = ", and kept" if base.file else ""
        note(f"base: {len(base.layers)} layers calibrated with {sum(map(len, texts))} tokens{kept}")
        show_rounded(base)
    return base


def show_rounded(base: Base) -> None:
    """Name the layers of a base that have the nearest codes, by their reason."""
    for reason in sorted({*base.rounded.values()}):
        paths = [path for path, why in base.rounded.items() if why == reason]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        note(f"base: {', '.join(paths[:3])}{more} rounded: {reason}")
