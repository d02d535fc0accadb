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


def tokenized(generator: Any, tokenizer: Any, request: Any, arguments: Any) -> Any:
    """Tokens of a request's prompt, as the generator of mlx-lm's server makes them.

    Returns:
        the tokens, the prompt's parts and their kinds, the state that the answer begins in, and images.
    """
    return generator._tokenize(tokenizer, request, arguments)


def text_machine(generator: Any, tokenizer: Any) -> Any:
    """What tells thoughts and calls of tools from the text of an answer, as mlx-lm's server does."""
    _, machine = generator._make_state_machine(generator.model_provider.model_key, tokenizer, [])
    return machine
