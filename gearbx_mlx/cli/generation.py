"""What mlx-lm's stream_generate is called with: sampler, draft model, prompt cache."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..decoding.cache_checks import check_prompt_cache
from ..decoding.caches import length
from ..errors import GearbxError, about, one_line
from ..gears.activations import compute_in
from ..gears.discovery import is_quantized
from ..loading import load
from .sampling import CacheSettings, SamplingSettings, cache_keywords, check_sampling


def generation_keywords(
    sampling: SamplingSettings, cache: CacheSettings, tokenizer: Any, prompt_cache: Any = None
) -> dict[str, Any]:
    """Keywords of mlx-lm's stream_generate.

    Raises:
        GearbxError: numbers beyond the vocabulary, a draft model that cannot be loaded or has another vocabulary.
    """
    check_sampling(sampling, tokenizer.vocab_size)
    sampler = make_sampler(
        sampling.temp,
        sampling.top_p,
        sampling.min_p,
        sampling.min_tokens_to_keep,
        top_k=sampling.top_k,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    draft_model = load_draft_model(cache.draft_model, tokenizer)
    return {**cache_keywords(cache), "sampler": sampler, "prompt_cache": prompt_cache, "draft_model": draft_model}


def load_draft_model(path: str | None, tokenizer: Any) -> Any:
    """mlx-lm's draft model, or None. Raises GearbxError for another vocabulary."""
    if path is None:
        return None
    model, own = load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise GearbxError(f"--draft-model {path}: its vocabulary is not that of the model")
    compute_in(model, "auto", is_quantized(model))
    return model


def load_cache(file: str | None, model: str | None) -> tuple[Any, str | None]:
    """The prompt cache (None without a file), and the model: without --model the one that the cache was made with.

    Raises:
        GearbxError: not a prompt cache, or one of another model.
    """
    if file is None:
        return None, model
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        mx.eval([part.state for part in cache])  # reads the values, which a truncated file does not have
        made_with = metadata["model"]
    except Exception as error:  # a file of another kind fails in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, not {model}; name that one")
    return cache, made_with


def length_of(file: str | None, cache: Any, model: nn.Module) -> int:
    """Tokens that a prompt cache holds; 0 without one. Raises GearbxError for one that does not suit the model."""
    if cache is None:
        return 0
    with about(file):
        check_prompt_cache(cache, model)
    return length(cache)
