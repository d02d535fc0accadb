"""Names of mlx-lm that begin with an underscore or stand in no documentation, each behind a function of ours."""

import sys
from typing import Any

import mlx.core as mx


def frequencies_of(rope: Any) -> mx.array:
    """Positions per radian of mlx-lm's Llama3RoPE, (dims / 2,)."""
    return rope._freqs


def generation_stream() -> Any:
    """The stream on which mlx-lm generates, which it chooses when it is imported; None before."""
    return getattr(sys.modules.get("mlx_lm.generate"), "generation_stream", None)


def model_classes(config: dict) -> Any:
    """The class of a model's type and that of its arguments. Raises whatever mlx-lm does for a type that it lacks."""
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def own_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of transformers inside of mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)
