"""mlx-lm's speculative decoding with a draft model, while the model itself is in gears: what each token cost."""

import sys
from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from ..gears.gearbox import Gearbox, Observer
from .cache_checks import check_draftable
from .entropy import fast_entropy
from .paired_model import bytes_read
from .prompt import encoded
from .step import SampledToken, Step, single_pass


def drafted_tokens(
    model: nn.Module,
    draft_model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    gearbox: Gearbox | Observer,
    max_tokens: int = 256,
    num_draft_tokens: int = 3,
    **kwargs: Any,
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """mlx-lm's responses, each with its entropy and step.

    A round drafts `num_draft_tokens`, verifies them in one pass of the model, and ends with a token of the model's own.
    Its cost, the drafts' bytes included, stands with its first token.

    Raises:
        GearbxError: a cache from which drafts cannot be taken back.
    """
    prompt, max_tokens = encoded(tokenizer, prompt), sys.maxsize if max_tokens < 0 else max_tokens
    given, layers = kwargs.pop("prompt_cache", None), len(model.layers)
    if given is not None:  # by mlx-lm's reckoning the model's caches come first, and then the draft model's
        given = given if len(given) > layers else [*given, *make_prompt_cache(draft_model)]
    longest = len(prompt) + max_tokens + min(num_draft_tokens, max_tokens)
    check_draftable(given[:layers] if given else make_prompt_cache(model), "model", longest)
    check_draftable(given[layers:] if given else make_prompt_cache(draft_model), "draft model", longest)
    entropy, draft_bytes = fast_entropy(gearbox), bytes_read(draft_model)
    new_round = True
    step = single_pass(gearbox, gearbox.gear)
    keywords = {"draft_model": draft_model, "num_draft_tokens": num_draft_tokens, "prompt_cache": given, **kwargs}
    responses = mlx_stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, **keywords)
    for number, response in enumerate(responses):
        if new_round:
            gear, drafted = gearbox.gear, min(num_draft_tokens, max_tokens - number)
            read = gearbox.weight_bytes_per_token(gear, drafted + 1) + drafted * draft_bytes
            step = Step(gear, (), single_pass(gearbox, gear).passes, read, drafted=drafted)
        else:
            step = Step(step.gear, (), (0,) * len(gearbox.ladder))
        yield response, SampledToken(entropy(response.logprobs), step)
        new_round = not response.from_draft  # the model's own token is the last of a round
