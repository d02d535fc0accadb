"""The rev counter: the entropy of every token, and how the token came about, noted where mlx-lm samples."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_sampler

from ..formats.kv_cache import KVGears
from ..ranks.agreement import ALONE, Agreement, agreement_of
from ..routing.entropy import entropy_bits
from .entropy import Entropy
from .kv_gears import gears_of
from .near_ties import near_ties
from .sampler import Sampler
from .step import SampledToken, Step


class EntropySampler:
    """A sampler that also notes the entropy and the step of each pass, then samples as another sampler does.

    The entropy is put on the stream here, before the next pass is. Computed from the response, it would stand behind
    that pass, and reading it would wait for a whole token (GEARBX 3.6).

    Args:
        sampler: of mlx-lm.
        step: returns how the latest logits came about.
        entropy: in bits, of log-probabilities.
        agreement: of the ranks that share the model.
        gears: of a KV cache. The prompt that they read ends with the first call.
    """

    def __init__(
        self,
        sampler: Sampler,
        step: Callable[[], Step],
        entropy: Entropy = entropy_bits,
        agreement: Agreement = ALONE,
        gears: KVGears | None = None,
    ):
        self.sampler = sampler
        self.step = step
        self.entropy = entropy
        self.agreement = agreement
        self.gears = gears
        self.tokens: deque[SampledToken] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        step, near_tie = self.step(), None
        if self.gears is not None:
            self.gears.end_prompt()
            read, caches = self.gears.meter.take()
            step = replace(step, kv_bytes=read, kv_caches=caches)
        entropy = self.entropy(logprobs) if step.entropy is None else step.entropy
        if step.noise is not None:
            near_tie = near_ties(logprobs, step.noise)
            mx.async_eval(near_tie)
        token, entropy = self.agreement.arrays(self.sampler(logprobs), entropy)
        mx.async_eval(entropy)
        self.tokens.append(SampledToken(entropy, step, near_tie))
        return token


def sampled_tokens(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    step: Callable[[], Step],
    entropy: Entropy = entropy_bits,
    **kwargs: Any,
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """mlx-lm's responses, each with what the sampler saw; `kwargs` are of mlx-lm's stream_generate."""
    gears = gears_of(kwargs.get("prompt_cache"))
    if gears is not None:
        gears.begin_prompt()
    sampler = EntropySampler(kwargs.pop("sampler", None) or make_sampler(), step, entropy, agreement_of(model), gears)
    for response in mlx_stream_generate(model, tokenizer, prompt, sampler=sampler, **kwargs):
        yield response, sampler.tokens.popleft()
