"""What computes answers: `Single` one alone, and `Batch` several, which share each pass over the weights.

A batch has answers in one gear, or in a mode whose batches have a gear a step.
"""

import traceback
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import make_stop_sequences
from mlx_lm.server import Vision

from ..compat.arrays import OwnRandomState
from ..decoding.mode import Mode
from ..decoding.response import BatchGearResponse
from ..decoding.stream import as_single, stream_generate
from ..routing.gates import policy_named
from .job import Job, Progress, Prompt, keep_text
from .provider import Served


class Left(Exception):
    """The client has gone while its prompt was read."""


class Single:
    """An answer in the making, alone.

    Args:
        cache: KV cache that has the prompt's first tokens already, `cached` of them; None: there is none.
        settings: mlx-lm's flags.
        keep: takes the KV cache that later requests may go on from.
        meanwhile: called between two parts of the prompt; returns whether the server stops.
    """

    def __init__(
        self,
        job: Job,
        cache: list[Any] | None,
        cached: int,
        settings: Any,
        keep: "Keep",
        meanwhile: Callable[["Single"], bool],
    ):
        self.job, self.keep, self.meanwhile = job, keep, meanwhile
        self.computing = self.is_over = False
        self.cache = cache or job.served.make_cache(settings.max_kv_size)
        self.random = OwnRandomState(job.seed)
        self.responses: Any = stream_generate(
            job.served.model,
            job.served.tokenizer,
            job.prompt.tokens[cached:],
            job.max_tokens,
            mode=job.mode,
            gearbox=job.served.gearbox,
            prompt_cache=self.cache,
            prompt_progress_callback=self.progress,
            sampler=job.sampler(settings),
            logits_processors=job.logits_processors(),
            **keywords_of(job, cached, settings),
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
        if self.has_more():
            return
        self.close()
        keep_text(self.job, self.cache, self.keep)
        self.job.asked.put(self.job.failed)

    def has_more(self) -> bool:
        """Compute one token and send it on; returns whether there may be more."""
        if self.job.asked.left.is_set():
            return False
        self.computing = True
        try:
            with self.random.drawn():
                response = next(self.responses, None)
        except Left:
            return False
        finally:
            self.computing = False
        return response is not None and not self.job.emit(response, response.text, response.finish_reason)

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        self.close()
        traceback.clear_frames(error.__traceback__)  # a stream ends in the thread that began it
        self.job.asked.put(error)

    def close(self) -> None:
        """End the stream, in the thread that computes: mlx-lm tidies its cache up."""
        self.is_over = True
        self.responses.close()


def keywords_of(job: Job, cached: int, settings: Any) -> dict[str, Any]:
    """Keywords of stream_generate that the server's flags, and images, add."""
    served = job.served
    names = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start", "kv_gears", "kv_gear")
    keywords = {name: getattr(settings, name) for name in names}
    if served.draft_model is not None:
        keywords |= {"draft_model": served.draft_model, "num_draft_tokens": settings.num_draft_tokens}
    if served.controller is not None:
        keywords["controller"] = served.controller
    if job.prompt.vision is not None and (pixels := seen_after(job.prompt.vision, cached)):
        embeddings = served.model.embed_inputs(mx.array(job.prompt.tokens[cached:]), pixel_values=pixels)
        mx.eval(embeddings)  # the prompt is read on another stream
        keywords["input_embeddings"] = embeddings
    return keywords


def seen_after(vision: Vision, cached: int) -> list[mx.array]:
    """The images of a prompt that a KV cache of its first tokens does not have."""
    return vision.pixel_values[sum(start < cached for start in vision.starts) :]


class Keep(Protocol):
    """Takes an answer, tokens, their KV cache, and what kind of text it is: system, user or assistant."""

    def __call__(self, job: Job, tokens: list[int], cache: list[Any], kind: str = "assistant") -> None: ...


class Batch:
    """The answers that one batch generator writes.

    Args:
        mode: of the first of them; each brings its own.
        settings: mlx-lm's flags, and the batch's policy.
        keep: takes KV caches that later requests may go on from.
    """

    computing = False

    def __init__(self, served: Served, mode: Mode, settings: Any, keep: Keep):
        self.settings, self.keep = settings, keep
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

    def add(self, job: Job, cache: list[Any] | None, cached: int) -> None:
        """Begin an answer; `cache` has the prompt's first tokens, `cached` of them."""
        segments, kinds = rest_of(job.prompt, cached)
        (uid,) = self.generator.insert_segments(
            segments=[segments],
            max_tokens=[job.max_tokens],
            caches=[cache],
            all_tokens=[job.prompt.tokens[:cached]],
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
            if token.uid not in self.jobs:  # a stop word has ended the answer before this one of several tokens
                continue
            try:
                self.emit(token)
            except Exception as error:  # of one answer; the others go on
                self.jobs[token.uid].asked.put(error)
                self.remove([token.uid])

    def keep_prompts(self, uids: list[int]) -> None:
        """Keep the KV caches of prompts' parts that have just been read."""
        uids = [uid for uid in uids if self.jobs[uid].unread]
        for uid, (cache, tokens) in self.generator.extract_cache(uids).items():
            self.store(self.jobs[uid], tokens[:], cache, self.jobs[uid].unread.pop())

    def store(self, job: Job, tokens: list[int], cache: list[Any], kind: str = "assistant") -> None:
        """Keep a KV cache. It is copied out of the batch's arrays now: until then it has all of them in memory."""
        mx.eval([part.state for part in cache])
        self.keep(job, tokens, cache, kind)

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
            keep_text(job, token.prompt_cache or [], self.store)
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
