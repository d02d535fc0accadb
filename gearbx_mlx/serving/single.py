"""Answers of any mode: each is a stream of its own, and several take turns at the model, token by token."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.server import Vision

from ..compat.arrays import OwnRandomState
from ..decoding.stream import stream_generate
from .job import Job, keep_text
from .tokens import Progress


class Left(Exception):
    """The client has gone while its prompt was read."""


class Single:
    """An answer in the making, alone.

    Args:
        cache: KV cache that has the prompt's first tokens already, `cached` of them; None: there is none.
        settings: mlx-lm's flags.
        meanwhile: called between two parts of the prompt; returns whether the server stops.
    """

    def __init__(
        self, job: Job, cache: list[Any] | None, cached: int, settings: Any, meanwhile: Callable[["Single"], bool]
    ):
        self.job, self.meanwhile = job, meanwhile
        self.computing = False
        self.cache = cache or job.served.make_cache(settings.max_kv_size)
        self.random = OwnRandomState(job.seed)
        self.responses: Any = stream_generate(
            job.served.model,
            job.served.tokenizer,
            job.prompt[cached:],
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
        """Pass on how far the prompt is read, and let others go on. Raises Left where nobody waits for it any more."""
        self.job.asked.answers.put(Progress(done, total))
        if (done < total and self.meanwhile(self)) or self.job.asked.left.is_set():
            raise Left

    def step(self) -> bool:
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
        if response is None:
            return False
        return not self.job.emit(response, response.text, response.finish_reason)

    def close(self) -> None:
        """End the stream, in the thread that computes: mlx-lm tidies its cache up."""
        self.responses.close()

    def end(self, keep: Callable[[Job, list[int], list[Any]], None]) -> None:
        """End the stream, and keep what later texts may go on from."""
        self.close()
        keep_text(self.job, self.cache, keep)


def keywords_of(job: Job, cached: int, settings: Any) -> dict[str, Any]:
    """Keywords of stream_generate that the server's flags, and images, add."""
    served = job.served
    names = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start", "kv_gears", "kv_gear")
    keywords = {name: getattr(settings, name) for name in names}
    if served.draft_model is not None:
        keywords |= {"draft_model": served.draft_model, "num_draft_tokens": settings.num_draft_tokens}
    if served.controller is not None:
        keywords["controller"] = served.controller
    if job.vision is not None and (pixels := seen_after(job.vision, cached)):
        embeddings = served.model.embed_inputs(mx.array(job.prompt[cached:]), pixel_values=pixels)
        mx.eval(embeddings)  # the prompt is read on another stream
        keywords["input_embeddings"] = embeddings
    return keywords


def seen_after(vision: Vision, cached: int) -> list[mx.array]:
    """The images of a prompt that a KV cache of its first tokens does not have."""
    return vision.pixel_values[sum(start < cached for start in vision.starts) :]
