"""The model that the settings name, and the room that a prompt leaves in its context."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from ..errors import GearbxError, one_line
from ..loading import context_length, load
from .model import ModelSettings


def trust(settings: ModelSettings) -> dict[str, Any]:
    """Keywords of `load` that trust remote code, only where they are needed: mlx-lm before 0.32 does not know them."""
    keywords: dict[str, Any] = {"trust_remote_code": True} if settings.trust_remote_code else {}
    return {"tokenizer_config": dict(keywords), **keywords}


def load_model(settings: ModelSettings) -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration.

    Raises:
        GearbxError: as `load`, or an end-of-text token that the vocabulary does not have.
    """
    model, tokenizer, config = load(
        settings.model, return_config=True, adapter_path=settings.adapter_path, **trust(settings)
    )
    for token in settings.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError as error:
            raise GearbxError(
                f"--extra-eos-token {token}: {one_line(error)}; give a token of the vocabulary"
            ) from error
    return model, tokenizer, config


def room_for(config: Mapping[str, Any], prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None) -> int:
    """How many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    `prompt_tokens` counts those of a prompt cache as well.

    Raises:
        GearbxError: the prompt leaves no room in the model's context.
    """
    context = context_length(dict(config))
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(
            f"the prompt is {prompt_tokens} tokens, and the model's context {context}; shorten the prompt"
        )
    if max_kv_size is not None:
        return max_tokens
    room = context - prompt_tokens
    return room if max_tokens == -1 else min(max_tokens, room)
