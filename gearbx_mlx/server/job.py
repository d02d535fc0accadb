"""Sequences in generation: the pending request, the events of its answer, and the two ways to compute its tokens.

A `Job` is one sequence. `Single` generates one, and `Batch` several that share each forward pass: sequences in one
gear, or in a mode whose batches select one gear per step.
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

from ..cli.flags import CacheSettings
from ..compat.arrays import OwnRandomState
from ..decoding.caches import length
from ..decoding.mode import Mode
from ..decoding.modes import COLDEST
from ..decoding.response import BatchGearResponse, GearResponse
from ..decoding.sampling import GumbelSampler, sampler_for
from ..decoding.stream import NO_LOGPROBS, as_single, stream_generate
from ..routing.gates import policy_named
from . import AnswerSettings, ServerSettings
from .grammar import constraint_for
from .provider import SequenceBytes, ServedModel
from .requests import AnyRequest
from .web import Refused


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    served: ServedModel
    tokens: list[int]
    parts: list[list[int]]  # the tokens in parts, at whose ends other prompts may diverge
    kinds: list[str]  # role of each part: system, user or assistant
    state: str = "normal"  # initial state of mlx-lm's state machine
    vision: Vision | None = None  # images

    @property
    def key(self) -> list[int]:
        """Key of the prompt's KV cache: its tokens, with image tokens by image content."""
        return list(self.tokens) if self.vision is None else list(self.vision.cache_key)


@dataclass(frozen=True)
class GenerationContext:
    """The first event of an answer."""

    prompt: Prompt
    mode: Mode
    cached: int  # prompt tokens with a KV cache of an earlier request
    machine: TextStateMachine  # mlx-lm's; it separates text, reasoning and tool calls
    model: str


@dataclass(frozen=True)
class TokenEvent:
    """A token of an answer, as an event."""

    text: str  # newly final text
    response: GearResponse  # without the distribution
    finish_reason: str | None
    logprob: dict[str, Any] | None = None  # OpenAI's entry; None if not requested
    stop_word: str | None = None  # the one that ended the answer


@dataclass(frozen=True)
class PrefillProgress:
    """Prefilled tokens of the prompt, as an event."""

    done: int
    total: int


@dataclass
class PendingRequest:
    """A request for one sequence, and the queue for the events of its answer.

    The events are a GenerationContext or an error; PrefillProgress and TokenEvent; at last None or an error.
    """

    request: AnyRequest
    index: int  # among the sequences of the client's request
    events: asyncio.Queue[Any]  # (index, event) of all these sequences, in the server's event loop
    cancelled: threading.Event  # set when no one reads the answer
    model_key: tuple[str | None, str | None] = (None, None)  # path and adapter
    prompt: Prompt | None = None  # None until it is tokenized
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, event: Any) -> None:
        """Send an event, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, so no reader is left
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.index, event))


class StopWordFilter:
    """A filter that holds back the end of the text while it may be the start of a stop word.

    Attributes:
        found: the stop word that ended the text, or None.
    """

    def __init__(self, words: Sequence[str]):
        # State "" is plain text; each word leads to a state with its name.
        machine = TextStateMachine({"": [(word, word) for word in words], **{word: [] for word in words}})
        self.state = machine.make_state("")
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is now final."""
        self.state, segments = TextStateMachine.split(self.state, text)
        self.found = self.state[0] or None
        return str(segments[0][1])

    def flush(self) -> str:
        """Return the text that is still held back."""
        return str(TextStateMachine.flush(self.state)[1])


class Job:
    """A sequence in generation.

    Args:
        pending: its request.
        max_tokens: of the answer.
        prompt_cache: KV caches of finished sequences, by (model, lowest gear of their prefill).
        model: this model's key there.

    Attributes:
        cached: prompt tokens with a KV cache.
        cached_gear: lowest gear that computed any of these tokens.

    Raises:
        GearbxError: a response_format that no text can have, a tool_choice that cannot be enforced.
    """

    def __init__(
        self,
        pending: PendingRequest,
        prompt: Prompt,
        mode: Mode,
        max_tokens: int,
        prompt_cache: LRUPromptCache,
        model: Any,
    ):
        self.pending, self.prompt, self.mode, self.max_tokens = pending, prompt, mode, max_tokens
        self.served, self.prompt_cache, self.model = prompt.served, prompt_cache, model
        self.cached, self.cached_gear = 0, ""
        self.stop_words = StopWordFilter(pending.request.stop_words)
        self.tokens: list[int] = []  # the answer's tokens
        self.sequence_bytes = SequenceBytes(self.served.vocabulary_bytes)
        self.detokenizer: Any = None  # in a batch
        self.unread_kinds: list[str] = []  # in a batch: kinds of the prompt parts before prefill, the next one last
        self.error: Exception | None = None
        thinking, request = prompt.state == "reasoning", pending.request
        tokenizer, tools = self.served.tokenizer, request.required_tools
        self.constraint = constraint_for(tokenizer, request.response_format, thinking, tools)

    def fetch(self) -> list[Any] | None:
        """Return the longest, then most precise, KV cache of a prefix, and set `cached` and `cached_gear`.

        With a seed, only caches of the mode's own prefill gear count: earlier requests must not change the answer.
        """
        found, tokens, gears = None, self.prompt.key, self.served.cache_gears(self.mode)
        for gear in gears if self.pending.request.seed is None else gears[-1:]:
            if self.cached == len(tokens) - 1:  # each lookup copies a cache
                break
            cache, rest = self.prompt_cache.fetch_nearest_cache((self.model, gear), tokens)
            if cache is not None and not rest:  # the last token has to be computed
                rest = tokens[-1:]
                cache = cache if can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 1) else None
            if cache is not None and len(tokens) - len(rest) > self.cached:
                found, self.cached, self.cached_gear = cache, len(tokens) - len(rest), gear
        return found

    def store(self, tokens: list[int], cache: list[Any], kind: str = "assistant") -> None:
        """Store the KV cache of the sequence's first tokens; `kind` is system, user or assistant.

        The evaluation copies it out of a batch's arrays; otherwise it would keep them in memory.
        """
        mx.eval([part.state for part in cache])
        gear = self.cached_gear if len(tokens) <= self.cached else self.served.cache_gears(self.mode)[-1]
        self.prompt_cache.insert_cache((self.model, gear), tokens, cache, cache_type=kind)

    def store_sequence(self, cache: list[Any]) -> None:
        """Store the reusable part of a finished sequence's KV cache."""
        key = self.prompt.key
        tokens = (key + self.tokens)[: self.served.num_reusable(self.mode, len(key), len(self.tokens))]
        excess = length(cache) - len(tokens)
        if excess > 0 and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, excess)
        if tokens and length(cache) == len(tokens):
            self.store(tokens, cache)

    @property
    def seed(self) -> int:
        """Seed of the sequence's own random numbers; other sequences do not advance them."""
        seed = self.pending.request.seed
        return secrets.randbits(63) if seed is None else seed

    def emit(self, response: GearResponse, text: str, finish_reason: str | None) -> bool:
        """Send a token that adds `text`; return whether it is the last. Raises the error of its sampling."""
        if self.error is not None:
            raise self.error
        self.tokens.append(response.token)
        count = self.pending.request.num_logprobs
        logprob = None if count is None else self.logprobs(response, count, finish_reason)
        text = self.stop_words.feed(text)
        if self.stop_words.found is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self.stop_words.flush()
        response = GearResponse(**{**vars(response), "logprobs": NO_LOGPROBS})
        self.pending.put(TokenEvent(text, response, finish_reason, logprob, self.stop_words.found))
        return finish_reason is not None

    def logprobs(self, response: GearResponse, count: int, finish_reason: str | None) -> dict[str, Any]:
        """Return OpenAI's entry for a token, with at most `count` alternatives; impossible tokens are omitted."""
        values = np.array(response.logprobs.astype(mx.float32)).reshape(-1)
        count = min(count, len(values))
        best = np.argpartition(-values, count - 1)[:count] if count else np.zeros(0, int)
        order = best[np.argsort(-values[best], kind="stable")].tolist()
        alternatives = [
            logprob_entry(token, float(values[token]), self.sequence_bytes.alternative(token))
            for token in order
            if np.isfinite(values[token])
        ]
        text, added = self.sequence_bytes.add(response.token, finish_reason is not None, finish_reason == "stop")
        entry = logprob_entry(response.token, float(values[response.token]), added)
        return entry | {"token": text, "top_logprobs": alternatives}

    def sampler(self, defaults: AnswerSettings) -> Callable[[mx.array], mx.array]:
        """Return the request's sampler, with the server's defaults."""
        request = self.pending.request

        def value(name: str) -> Any:
            own = getattr(request, name)
            return getattr(defaults, name) if own is None else own

        temp = defaults.temp if request.temperature is None else request.temperature
        top_k = value("top_k")
        sampler = sampler_for(
            self.served.tokenizer,
            temp=temp if temp >= COLDEST else 0.0,
            top_p=value("top_p"),
            top_k=top_k if top_k < self.served.vocabulary else 0,  # the whole vocabulary is no restriction
            min_p=value("min_p"),
            xtc_probability=request.xtc_probability,
            xtc_threshold=request.xtc_threshold,
        )
        if sampler is greedy_sampler or isinstance(sampler, GumbelSampler):  # drafting needs their types
            return sampler
        return self.guarded(sampler, greedy_sampler)

    def logits_processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """Return the request's logits processors, the grammar last."""
        request = self.pending.request
        bias = {int(token): float(value) for token, value in (request.logit_bias or {}).items()}
        processors = make_logits_processors(
            bias or None,
            request.repetition_penalty,
            request.repetition_context_size,
            request.presence_penalty,
            request.presence_context_size,
            request.frequency_penalty,
            request.frequency_context_size,
        )
        if self.constraint is not None:
            processors.append(self.constraint)
        return [self.guarded(processor, lambda tokens, logits: logits) for processor in processors]

    def guarded(self, function: Callable[..., mx.array], fallback: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Return the function with errors that end only this sequence; a shared pass continues with `fallback`."""

        def call(*arguments: mx.array) -> mx.array:
            try:
                return function(*arguments)
            except Exception as error:
                self.error = error
                mx.random.seed(secrets.randbits(63))  # an error during compilation leaves a random state of tracers
                return fallback(*arguments)

        return call

    @property
    def refusal(self) -> Refused | None:
        """Refusal of a finished answer that violates its grammar, or None."""
        if self.constraint is None or self.constraint.error is None:
            return None
        return Refused(400, self.constraint.error, param=self.constraint.field)


def logprob_entry(token: int, logprob: float, added: bytes) -> dict[str, Any]:
    """Return OpenAI's entry for a token with its natural log-probability and the bytes that it adds."""
    number = logprob if np.isfinite(logprob) else -9999.0  # OpenAI's minus infinity
    return {"id": token, "token": added.decode("utf-8", "replace"), "logprob": number, "bytes": list(added)}


# Computation.


class Disconnected(Exception):
    """The client has disconnected during prefill."""


class Single:
    """One sequence with its own forward passes.

    Args:
        cache: KV cache of the first `job.cached` prompt tokens, or None.
        settings: the server's.
        between_chunks: called between two chunks of the prefill; returns whether the server stops.
    """

    def __init__(
        self, job: Job, cache: list[Any] | None, settings: ServerSettings, between_chunks: Callable[["Single"], bool]
    ):
        self.job, self.between_chunks, self.is_over = job, between_chunks, False
        self.has_chunks = len(job.prompt.tokens) - job.cached > settings.cache.prefill_step_size
        """True until a prompt of several chunks has been read."""
        self.cache = cache or job.served.make_cache(settings.cache.max_kv_size)
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
            sampler=job.sampler(settings.answers),
            logits_processors=job.logits_processors(),
            **generate_keywords(job, settings.cache),
        )

    def progress(self, done: int, total: int) -> None:
        """Report prefill progress, and let other sequences proceed. Raises Disconnected."""
        self.job.pending.put(PrefillProgress(done, total))
        if (0 < done < total and self.between_chunks(self)) or self.job.pending.cancelled.is_set():
            raise Disconnected

    @property
    def running(self) -> int:
        """Number of sequences in generation."""
        return int(not self.is_over)

    def step(self) -> None:
        """Generate and send one token; after the last one, store the KV cache."""
        response = None
        with suppress(Disconnected), self.random.drawn():
            response = None if self.job.pending.cancelled.is_set() else next(self.responses, None)
        self.has_chunks = False
        if response is not None and not self.job.emit(response, response.text, response.finish_reason):
            return
        self.close()
        self.job.store_sequence(self.cache)
        self.job.pending.put(self.job.refusal)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error."""
        self.close()
        traceback.clear_frames(error.__traceback__)  # generators have to end in the thread that started them
        self.job.pending.put(error)

    def close(self) -> None:
        """Close the generator, in the compute thread: mlx-lm cleans its cache up."""
        self.is_over = True
        self.responses.close()


def generate_keywords(job: Job, settings: CacheSettings) -> dict[str, Any]:
    """Return arguments of stream_generate from the server's flags and from images."""
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
        mx.eval(embeddings)  # prefill runs on a different stream
        keywords["input_embeddings"] = embeddings
    return keywords


class Batch:
    """Sequences that share a batch generator.

    Args:
        mode: of the first sequence; each sequence has its own.
        settings: the server's, with the batch policy.
    """

    def __init__(self, served: ServedModel, mode: Mode, settings: ServerSettings):
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.is_over = False
        self.generator = mode.batch_generator(
            served.model,
            served.tokenizer,
            gearbox=served.gearbox,
            policy=policy_named(settings.concurrency.batch_policy),
            completion_batch_size=settings.concurrency.decode_concurrency,
            prefill_batch_size=settings.concurrency.prompt_concurrency,
            prefill_step_size=settings.cache.prefill_step_size,
        )

    @property
    def running(self) -> int:
        """Number of sequences in generation."""
        return len(self.jobs)

    def add(self, job: Job, cache: list[Any] | None) -> None:
        """Add a sequence; `cache` is the KV cache of its first `job.cached` prompt tokens."""
        segments, kinds = uncached_parts(job.prompt, job.cached)
        (uid,) = self.generator.insert_segments(
            segments=[segments],
            max_tokens=[job.max_tokens],
            caches=[cache],
            all_tokens=[job.prompt.tokens[: job.cached]],
            samplers=[job.sampler(self.settings.answers)],
            logits_processors=[job.logits_processors()],
            stop_sequences=[make_stop_sequences(job.served.tokenizer)],
            seeds=[job.seed],
            modes=[job.mode],
        )
        job.detokenizer, job.unread_kinds = job.served.tokenizer.detokenizer, kinds[::-1]
        self.jobs[uid] = job

    def step(self) -> None:
        """Generate one token of every sequence, and prefill a chunk of new ones."""
        self.remove([uid for uid, job in self.jobs.items() if job.pending.cancelled.is_set()])
        if not self.jobs:
            return
        prompts, tokens = self.generator.next()
        for prompt in prompts:
            self.jobs[prompt.uid].pending.put(PrefillProgress(*prompt.progress))
        self.store_prompts([r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt])
        for token in tokens:
            try:
                self.emit(token)
            except Exception as error:  # ends one sequence, not the batch
                self.jobs[token.uid].pending.put(error)
                self.remove([token.uid])

    def store_prompts(self, uids: list[int]) -> None:
        """Store the KV caches of prompt parts that have just been prefilled."""
        uids = [uid for uid in uids if self.jobs[uid].unread_kinds]
        for uid, (cache, tokens) in self.generator.extract_cache(uids).items():
            self.jobs[uid].store(tokens[:], cache, self.jobs[uid].unread_kinds.pop())

    def emit(self, token: BatchGearResponse) -> None:
        """Send a token, and end its sequence after the last one. Raises the token's error."""
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
            job.store_sequence(token.prompt_cache or [])
        self.remove([token.uid])
        job.pending.put(job.refusal)

    def remove(self, uids: list[int]) -> None:
        """Remove sequences from the batch."""
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self.jobs[uid]

    def fail(self, error: Exception) -> None:
        """End all sequences and the batch with an error: the generator's state is undefined."""
        for job in self.jobs.values():
            job.pending.put(error)
        self.jobs = {}
        self.close()

    def close(self) -> None:
        self.is_over = True
        self.generator.close()


def uncached_parts(prompt: Prompt, cached: int) -> tuple[list[list[int]], list[str]]:
    """Return the parts of a prompt and their kinds, without the first `cached` tokens."""
    parts, kinds = [], []
    for part, kind in zip(prompt.parts, prompt.kinds):
        left = part[cached:]
        cached = max(0, cached - len(part))
        if left:
            parts.append(left)
            kinds.append(kind)
    return parts, kinds
