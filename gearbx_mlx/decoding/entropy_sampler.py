"""The rev counter: the entropy of every token, and how the token came about, noted where mlx-lm samples."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_sampler

from ..routing.entropy import entropy_bits
from .entropy import Entropy
from .step import SampledToken, Step

Sampler = Callable[[mx.array], mx.array]


class EntropySampler:
    """A sampler that also notes the entropy and the step of each pass, then samples as another sampler does.

    The entropy is put on the stream here, before the next pass is. Computed from the response, it would stand behind
    that pass, and reading it would wait for a whole token (GEARBX 3.6).

    Args:
        sampler: of mlx-lm.
        step: returns how the latest logits came about.
        entropy: in bits, of log-probabilities.
    """

    def __init__(self, sampler: Sampler, step: Callable[[], Step], entropy: Entropy = entropy_bits):
        self.sampler = sampler
        self.step = step
        self.entropy = entropy
        self.tokens: deque[SampledToken] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        step, near_tie = self.step(), None
        entropy = self.entropy(logprobs) if step.entropy is None else step.entropy
        if step.noise is not None:
            best = mx.topk(logprobs, 2, axis=-1)
            near_tie = mx.abs(best[..., 0] - best[..., 1]) <= step.noise
            mx.async_eval(near_tie)
        mx.async_eval(entropy)
        self.tokens.append(SampledToken(entropy, step, near_tie))
        return self.sampler(logprobs)


def sampled_tokens(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    step: Callable[[], Step],
    entropy: Entropy = entropy_bits,
    **kwargs: Any,
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """mlx-lm's responses, each with what the sampler saw; `kwargs` are of mlx-lm's stream_generate."""
    sampler = EntropySampler(kwargs.pop("sampler", None) or make_sampler(), step, entropy)
    for response in mlx_stream_generate(model, tokenizer, prompt, sampler=sampler, **kwargs):
        yield response, sampler.tokens.popleft()
