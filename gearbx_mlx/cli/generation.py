"""What mlx-lm's stream_generate is called with: sampler, draft model, prompt cache."""

from typing import Any

from ..decoding.sampling import sampler_for
from ..errors import GearbxError
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
    chosen = {name: value for name, value in vars(sampling).items() if name != "seed"}
    sampler = sampler_for(tokenizer, **chosen)
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
