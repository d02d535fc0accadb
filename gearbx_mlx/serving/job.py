"""One answer in the making: from its tokens to what the client gets."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import TextStateMachine
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from mlx_lm.server import Vision

from ..decoding.caches import length
from ..decoding.mode import Mode
from ..decoding.response import GearResponse
from ..decoding.sampling import GumbelSampler, sampler_for
from .grammar import constraint_for
from .provider import Served
from .requests import BaseRequest
from .spelling import Spelling
from .web import Refused

COLDEST = 0.001  # a temperature below that is greedy: logits of half precision would overflow
NO_LOGPROBS = mx.zeros(0)
IMPOSSIBLE = -9999.0  # as OpenAI writes minus infinity


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it.

    parts: its tokens in parts, ends of which others may share, and their kinds: system, user or assistant. state: of
    mlx-lm's state machine, in which the answer begins. vision: its images.
    """

    served: Served
    tokens: list[int]
    parts: list[list[int]]
    kinds: list[str]
    state: str = "normal"
    vision: Vision | None = None

    @property
    def key(self) -> list[int]:
        """The tokens that a KV cache of this text belongs to; those of images by what they show."""
        return list(self.tokens) if self.vision is None else list(self.vision.cache_key)


@dataclass(frozen=True)
class Begun:
    """An answer that has begun.

    cached: tokens of its prompt that an earlier request had read. machine: mlx-lm's, which tells text from thoughts and
    calls. model: its name.
    """

    prompt: Prompt
    mode: Mode
    cached: int
    machine: TextStateMachine
    model: str


@dataclass(frozen=True)
class Emitted:
    """A token of an answer.

    text: what is certain of the answer by now and was not before. seen: what the gearbox saw, without the distribution.
    logprob: its log-probability and those of the likeliest, as OpenAI has them; None if not asked for. stop_word: that
    ended the answer.
    """

    text: str
    seen: GearResponse
    finish_reason: str | None
    logprob: dict[str, Any] | None = None
    stop_word: str | None = None


@dataclass(frozen=True)
class Progress:
    """How many tokens of the prompt have been read."""

    done: int
    total: int


@dataclass
class Asked:
    """A request for one text on its way to the model, and where its answer comes.

    index: of the text, among those of a client's request. answers: of all of them, by their indices, in the event loop
    of the server; of each Begun or an error, then Progress and Emitted as they come, and None or an error at the end.
    left: set when nothing waits for the answer any more. prompt: once its tokens are known.
    """

    request: BaseRequest
    index: int
    answers: asyncio.Queue[Any]
    left: threading.Event
    prompt: Prompt | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, found: Any) -> None:
        """Send on what was found, in any thread."""
        with suppress(RuntimeError):  # the loop has ended, and nothing is read any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, (self.index, found))


class StopWords:
    """Holds back the end of a text as long as it may be the beginning of a stop word.

    found: the word that ended the text.
    """

    def __init__(self, words: Sequence[str]):
        # In state "" the text goes on; a word leads to the state that bears its name.
        machine = TextStateMachine({"": [(word, word) for word in words], **{word: [] for word in words}})
        self.state = machine.make_state("")
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop word ended it."""
        self.state, segments = TextStateMachine.split(self.state, text)
        self.found = self.state[0] or None
        return segments[0][1], self.found is not None

    def rest(self) -> str:
        """What is still held back, once the text has ended by itself."""
        return str(TextStateMachine.flush(self.state)[1])


class Job:
    """One answer in the making.

    Args:
        asked: the request, and where its answer goes.
        max_tokens: of the answer.

    Raises:
        GearbxError: a response_format that no text can have, a tool_choice that nothing enforces.
    """

    def __init__(self, asked: Asked, prompt: Prompt, mode: Mode, max_tokens: int):
        self.asked, self.prompt, self.mode, self.max_tokens = asked, prompt, mode, max_tokens
        self.served = prompt.served
        self.stops = StopWords(asked.request.stop_words)
        self.tokens: list[int] = []  # of the answer
        self.spelling = Spelling(self.served.spelled)
        self.detokenizer: Any = None  # of an answer in a batch
        self.unread: list[str] = []  # kinds of the prompt's parts that a batch has still to read, the next one last
        self.error: Exception | None = None
        thinking = prompt.state == "reasoning"
        request, tokenizer = asked.request, self.served.tokenizer
        self.constraint = constraint_for(tokenizer, request.response_format, thinking, request.must_call)

    @property
    def seed(self) -> int:
        """The seed of the answer's own random numbers: others may draw while its prompt is read."""
        asked = self.asked.request.seed
        return secrets.randbits(63) if asked is None else asked

    def emit(self, response: GearResponse, text: str, finish_reason: str | None) -> bool:
        """Send a token on; returns whether the answer has ended. `text` is what the token adds to it.

        Raises:
            Exception: what failed while it was chosen.
        """
        if self.error is not None:
            raise self.error
        self.tokens.append(response.token)
        most = self.asked.request.alternatives
        logprob = None if most is None else self.logprobs(response, most, finish_reason)
        text, stopped = self.stops.feed(text)
        if stopped:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self.stops.rest()
        seen = GearResponse(**{**vars(response), "logprobs": NO_LOGPROBS})
        self.asked.put(Emitted(text, seen, finish_reason, logprob, self.stops.found))
        return finish_reason is not None

    def logprobs(self, response: GearResponse, most: int, finish_reason: str | None) -> dict[str, Any]:
        """The token as OpenAI lists it, with the likeliest ones, so many at most.

        Impossible ones are none of them: a response_format leaves fewer tokens than may be asked for.
        """
        values = np.array(response.logprobs.astype(mx.float32)).reshape(-1)
        most = min(most, len(values))
        best = np.argpartition(-values, most - 1)[:most] if most else np.zeros(0, int)
        order = best[np.argsort(-values[best], kind="stable")].tolist()
        likeliest = [
            listed(one, float(values[one]), self.spelling.alternative(one)) for one in order if np.isfinite(values[one])
        ]
        text, added = self.spelling.add(response.token, finish_reason is not None, finish_reason == "stop")
        own = listed(response.token, float(values[response.token]), added)
        return own | {"token": text, "top_logprobs": likeliest}

    def sampler(self, defaults: Any) -> Callable[[mx.array], mx.array]:
        """The request's sampler; `defaults` are the server's flags."""
        asked = self.asked.request

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        temp, top_k = given(asked.temperature, defaults.temp), given(asked.top_k, defaults.top_k)
        sampler = sampler_for(
            self.served.tokenizer,
            temp=temp if temp >= COLDEST else 0.0,
            top_p=given(asked.top_p, defaults.top_p),
            top_k=top_k if top_k < self.served.vocabulary else 0,  # as many as there are: no choice among them
            min_p=given(asked.min_p, defaults.min_p),
            xtc_probability=asked.xtc_probability,
            xtc_threshold=asked.xtc_threshold,
        )
        if sampler is greedy_sampler or isinstance(sampler, GumbelSampler):  # drafts have to know them
            return sampler
        return self.safely(sampler, greedy_sampler)

    def logits_processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """The request's processors; what the answer has to fit comes last."""
        asked = self.asked.request
        bias = {int(token): float(value) for token, value in (asked.logit_bias or {}).items()}
        processors = make_logits_processors(
            bias or None,
            asked.repetition_penalty,
            asked.repetition_context_size,
            asked.presence_penalty,
            asked.presence_context_size,
            asked.frequency_penalty,
            asked.frequency_context_size,
        )
        if self.constraint is not None:
            processors.append(self.constraint)
        return [self.safely(processor, lambda tokens, logits: logits) for processor in processors]

    def safely(self, function: Callable[..., mx.array], instead: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """The function, whose errors end this answer alone: others may share the pass in which it is called.

        Args:
            instead: computes what the pass goes on with.
        """

        def call(*arguments: mx.array) -> mx.array:
            try:
                return function(*arguments)
            except Exception as error:
                self.error = error
                mx.random.seed(secrets.randbits(63))  # what fails while MLX compiles it leaves no numbers behind
                return instead(*arguments)

        return call

    @property
    def failed(self) -> Refused | None:
        """Why the answer, which has ended, is not what was asked for; None if it is."""
        if self.constraint is None or self.constraint.error is None:
            return None
        return Refused(400, self.constraint.error, param=self.constraint.field)


def listed(token: int, logprob: float, added: bytes) -> dict[str, Any]:
    """A token of the vocabulary as OpenAI lists it, with what it adds to the text and its log-probability (natural)."""
    number = logprob if np.isfinite(logprob) else IMPOSSIBLE
    return {"id": token, "token": added.decode("utf-8", "replace"), "logprob": number, "bytes": list(added)}


def keep_text(job: Job, cache: list[Any], keep: Callable[[Job, list[int], list[Any]], None]) -> None:
    """Hand over what later texts may go on from: the first tokens of an answer that has ended, and their entries."""
    key = job.prompt.key
    tokens = (key + job.tokens)[: job.served.kept(job.mode, len(key), len(job.tokens))]
    beyond = length(cache) - len(tokens)
    if beyond > 0 and can_trim_prompt_cache(cache):
        trim_prompt_cache(cache, beyond)
    if length(cache) == len(tokens):
        keep(job, tokens, cache)
