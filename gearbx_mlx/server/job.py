"""Answers in the making: what is asked and what comes of it, and what computes the tokens.

A `Job` is one answer. `Single` computes one alone, and `Batch` several, which share each pass over the weights: answers
in one gear, or in a mode whose batches have a gear a step.
"""

import asyncio
import secrets
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import TextStateMachine, make_stop_sequences
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from mlx_lm.server import Vision

from ..compat.arrays import OwnRandomState
from ..decoding.caches import length
from ..decoding.mode import Mode
from ..decoding.modes import COLDEST
from ..decoding.response import BatchGearResponse, GearResponse
from ..decoding.sampling import GumbelSampler, sampler_for
from ..decoding.stream import NO_LOGPROBS, as_single, stream_generate
from ..routing.gates import policy_named
from .grammar import constraint_for
from .provider import Served, ServingSettings, Spelling
from .requests import AnyRequest
from .web import Refused


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
    left: set when nothing waits for the answer any more. key: path and adapter of its model. prompt: once it is
    tokens.
    """

    request: AnyRequest
    index: int
    answers: asyncio.Queue[Any]
    left: threading.Event
    key: tuple[str | None, str | None] = (None, None)
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

    def feed(self, text: str) -> str:
        """Return the text that is certain now."""
        self.state, segments = TextStateMachine.split(self.state, text)
        self.found = self.state[0] or None
        return str(segments[0][1])

    def rest(self) -> str:
        """Return what is still held back, once the text has ended by itself."""
        return str(TextStateMachine.flush(self.state)[1])


class Job:
    """One answer in the making.

    Args:
        asked: the request, and where its answer goes.
        max_tokens: of the answer.
        kept: KV caches of finished texts, by models, which `model` is one of, and by the lowest gears that read them.

    `cached` tokens of its prompt have a KV cache already; the lowest gear that read any of them is `cached_by`.

    Raises:
        GearbxError: a response_format that no text can have, a tool_choice that nothing enforces.
    """

    def __init__(self, asked: Asked, prompt: Prompt, mode: Mode, max_tokens: int, kept: LRUPromptCache, model: Any):
        self.asked, self.prompt, self.mode, self.max_tokens = asked, prompt, mode, max_tokens
        self.served, self.kept, self.model = prompt.served, kept, model
        self.cached, self.cached_by = 0, ""
        self.stops = StopWords(asked.request.stop_words)
        self.tokens: list[int] = []  # of the answer
        self.spelling = Spelling(self.served.spelled)
        self.detokenizer: Any = None  # of an answer in a batch
        self.unread: list[str] = []  # kinds of the prompt's parts that a batch has still to read, the next one last
        self.error: Exception | None = None
        thinking, request = prompt.state == "reasoning", asked.request
        self.constraint = constraint_for(self.served.tokenizer, request.response_format, thinking, request.must_call)

    def fetch(self) -> list[Any] | None:
        """Return the longest KV cache that the text may go on from, and of those the most precise; notes what it has.

        With a seed it is one of the text's own gear of prompts, so that the text does not depend on earlier requests.
        """
        found, tokens, gears = None, self.prompt.key, self.served.keys(self.mode)
        for gear in gears if self.asked.request.seed is None else gears[-1:]:
            if self.cached == len(tokens) - 1:  # a cache is copied when it is looked for
                break
            cache, rest = self.kept.fetch_nearest_cache((self.model, gear), tokens)
            if cache is not None and not rest:  # the last token is left to be computed
                rest = tokens[-1:]
                cache = cache if can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 1) else None
            if cache is not None and len(tokens) - len(rest) > self.cached:
                found, self.cached, self.cached_by = cache, len(tokens) - len(rest), gear
        return found

    def keep(self, tokens: list[int], cache: list[Any], kind: str = "assistant") -> None:
        """Keep the KV cache of these tokens, the first of the text: a system prompt, a user's or an assistant's text.

        It is copied out of the arrays of a batch now: until then it has all of them in memory.
        """
        mx.eval([part.state for part in cache])
        gear = self.cached_by if len(tokens) <= self.cached else self.served.keys(self.mode)[-1]
        self.kept.insert_cache((self.model, gear), tokens, cache, cache_type=kind)

    def keep_text(self, cache: list[Any]) -> None:
        """Keep what later texts may go on from of an answer that has ended."""
        key = self.prompt.key
        tokens = (key + self.tokens)[: self.served.kept(self.mode, len(key), len(self.tokens))]
        beyond = length(cache) - len(tokens)
        if beyond > 0 and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, beyond)
        if tokens and length(cache) == len(tokens):
            self.keep(tokens, cache)

    @property
    def seed(self) -> int:
        """The seed of the answer's own random numbers: others may draw while its prompt is read."""
        asked = self.asked.request.seed
        return secrets.randbits(63) if asked is None else asked

    def emit(self, response: GearResponse, text: str, finish_reason: str | None) -> bool:
        """Send a token on that adds `text`; return whether the answer has ended. Raises what failed in its choice."""
        if self.error is not None:
            raise self.error
        self.tokens.append(response.token)
        most = self.asked.request.alternatives
        logprob = None if most is None else self.logprobs(response, most, finish_reason)
        text = self.stops.feed(text)
        if self.stops.found is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self.stops.rest()
        seen = GearResponse(**{**vars(response), "logprobs": NO_LOGPROBS})
        self.asked.put(Emitted(text, seen, finish_reason, logprob, self.stops.found))
        return finish_reason is not None

    def logprobs(self, response: GearResponse, most: int, finish_reason: str | None) -> dict[str, Any]:
        """Return the token as OpenAI lists it, with the likeliest ones, so many at most.

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

    def sampler(self, defaults: ServingSettings) -> Callable[[mx.array], mx.array]:
        """Return the request's sampler; `defaults` are the server's."""
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
        """Return the request's processors; what the answer has to fit comes last."""
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
        """Return the function, whose errors end this answer alone; a pass that others share goes on with `instead`."""

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
    """Return a token as OpenAI lists it, with its log-probability (natural) and what it adds to the text."""
    number = logprob if np.isfinite(logprob) else -9999.0  # as OpenAI writes minus infinity
    return {"id": token, "token": added.decode("utf-8", "replace"), "logprob": number, "bytes": list(added)}


# What computes them.


class Left(Exception):
    """The client has gone while its prompt was read."""


class Single:
    """An answer in the making, alone.

    Args:
        cache: of the prompt's first tokens, as many as `job.cached`; None: there is none.
        settings: of the server.
        meanwhile: called between two parts of the prompt; returns whether the server stops.
    """

    def __init__(
        self, job: Job, cache: list[Any] | None, settings: ServingSettings, meanwhile: Callable[["Single"], bool]
    ):
        self.job, self.meanwhile, self.is_over = job, meanwhile, False
        self.cache = cache or job.served.make_cache(settings.max_kv_size)
        self.random = OwnRandomState(job.seed)
        self.responses: Any = stream_generate(
            job.served.model,
            job.served.tokenizer,
            job.prompt.tokens[job.cached :],
            job.max_tokens,
            mode=job.mode,
            gearbox=job.served.gearbox,
            prompt_cache=self.cache,
            prompt_progress_callback=self.progress,
            sampler=job.sampler(settings),
            logits_processors=job.logits_processors(),
            **keywords_of(job, settings),
        )

    def progress(self, done: int, total: int) -> None:
        """Pass on how far the prompt is read, and let others go on. Raises Left where the client has gone."""
        self.job.asked.put(Progress(done, total))
        if (done < total and self.meanwhile(self)) or self.job.asked.left.is_set():
            raise Left

    @property
    def running(self) -> int:
        """How many answers are in the making."""
        return int(not self.is_over)

    def step(self) -> None:
        """Compute one token and send it on; after the last one, keep what later texts may go on from."""
        response = None
        with suppress(Left), self.random.drawn():
            response = None if self.job.asked.left.is_set() else next(self.responses, None)
        if response is not None and not self.job.emit(response, response.text, response.finish_reason):
            return
        self.close()
        self.job.keep_text(self.cache)
        self.job.asked.put(self.job.failed)

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        self.close()
        traceback.clear_frames(error.__traceback__)  # a stream ends in the thread that began it
        self.job.asked.put(error)

    def close(self) -> None:
        """End the stream, in the thread that computes: mlx-lm tidies its cache up."""
        self.is_over = True
        self.responses.close()


def keywords_of(job: Job, settings: ServingSettings) -> dict[str, Any]:
    """Keywords of stream_generate that the server's flags, and images, add."""
    served = job.served
    names = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start", "kv_gears")
    keywords = {name: getattr(settings, name) for name in names}
    if served.draft_model is not None:
        keywords["draft_model"] = served.draft_model
    if served.controller is not None:
        keywords["controller"] = served.controller
    vision = job.prompt.vision
    if vision is not None and (pixels := vision.pixel_values[sum(start < job.cached for start in vision.starts) :]):
        embeddings = served.model.embed_inputs(mx.array(job.prompt.tokens[job.cached :]), pixel_values=pixels)
        mx.eval(embeddings)  # the prompt is read on another stream
        keywords["input_embeddings"] = embeddings
    return keywords


class Batch:
    """The answers that one batch generator writes.

    mode: of the first of them; each brings its own. settings: of the server, with the batch's policy.
    """

    def __init__(self, served: Served, mode: Mode, settings: ServingSettings):
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.is_over = False
        self.generator = mode.batch_generator(
            served.model,
            served.tokenizer,
            gearbox=served.gearbox,
            policy=policy_named(settings.batch_policy),
            completion_batch_size=settings.decode_concurrency,
            prefill_batch_size=settings.prompt_concurrency,
            prefill_step_size=settings.prefill_step_size,
            max_kv_size=settings.max_kv_size,
        )

    @property
    def running(self) -> int:
        """How many answers are in the making."""
        return len(self.jobs)

    def add(self, job: Job, cache: list[Any] | None) -> None:
        """Begin an answer; `cache` has the prompt's first tokens, as many as `job.cached`."""
        segments, kinds = rest_of(job.prompt, job.cached)
        (uid,) = self.generator.insert_segments(
            segments=[segments],
            max_tokens=[job.max_tokens],
            caches=[cache],
            all_tokens=[job.prompt.tokens[: job.cached]],
            samplers=[job.sampler(self.settings)],
            logits_processors=[job.logits_processors()],
            stop_sequences=[make_stop_sequences(job.served.tokenizer)],
            seeds=[job.seed],
            modes=[job.mode],
        )
        job.detokenizer, job.unread = job.served.tokenizer.detokenizer, kinds[::-1]
        self.jobs[uid] = job

    def step(self) -> None:
        """One token for every answer, and a part of prompts that are still to be read."""
        self.remove([uid for uid, job in self.jobs.items() if job.asked.left.is_set()])
        if not self.jobs:
            return
        prompts, tokens = self.generator.next()
        for read in prompts:
            self.jobs[read.uid].asked.put(Progress(*read.progress))
        self.keep_prompts([r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt])
        for token in tokens:
            try:
                self.emit(token)
            except Exception as error:  # of one answer; the others go on
                self.jobs[token.uid].asked.put(error)
                self.remove([token.uid])

    def keep_prompts(self, uids: list[int]) -> None:
        """Keep the KV caches of prompts' parts that have just been read."""
        uids = [uid for uid in uids if self.jobs[uid].unread]
        for uid, (cache, tokens) in self.generator.extract_cache(uids).items():
            self.jobs[uid].keep(tokens[:], cache, self.jobs[uid].unread.pop())

    def emit(self, token: BatchGearResponse) -> None:
        """Send a token on, and end its answer where it is the last. Raises what the token failed of."""
        if token.error is not None:
            raise token.error
        job = self.jobs[token.uid]
        if token.finish_reason != "stop":
            job.detokenizer.add_token(token.token)
        if token.finish_reason is not None:
            job.detokenizer.finalize()
        response = as_single(token, "", len(job.prompt.tokens), len(job.tokens) + 1)
        response.logprobs = token.logprobs
        if not job.emit(response, job.detokenizer.last_segment, token.finish_reason):
            return
        if token.finish_reason is not None:
            job.keep_text(token.prompt_cache or [])
        self.remove([token.uid])
        job.asked.put(job.failed)

    def remove(self, uids: list[int]) -> None:
        """Take answers out of the batch."""
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self.jobs[uid]

    def fail(self, error: Exception) -> None:
        """End all answers with an error, and the batch with them: what mlx-lm left of it is not known."""
        for job in self.jobs.values():
            job.asked.put(error)
        self.jobs = {}
        self.close()

    def close(self) -> None:
        self.is_over = True
        self.generator.close()


def rest_of(prompt: Prompt, cached: int) -> tuple[list[list[int]], list[str]]:
    """Parts of a prompt and their kinds, without the first tokens, `cached` of them."""
    parts, kinds = [], []
    for part, kind in zip(prompt.parts, prompt.kinds):
        left = part[cached:]
        cached = max(0, cached - len(part))
        if left:
            parts.append(left)
            kinds.append(kind)
    return parts, kinds
