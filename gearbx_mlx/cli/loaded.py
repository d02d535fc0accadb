"""The model that the settings name, and the room that a prompt leaves in its context."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from ..errors import GearbxError
from ..files.model_directory import context_length
from ..files.reading import shown
from ..gears.discovery import is_quantized
from ..gears.saved import saved_gears
from ..loading import load, model_name
from ..ranks.place import current
from .model import ModelSettings


def trust(trust_remote_code: bool) -> dict[str, Any]:
    """The keyword of `load` that trusts remote code; named only when asked for: mlx-lm before 0.32 does not know it."""
    return {"trust_remote_code": True} if trust_remote_code else {}


def load_model(settings: ModelSettings, chat_template: str = "") -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration. A `chat_template` replaces the tokenizer's.

    Raises:
        GearbxError: as `load`; a pipeline of one process; an end-of-text token that the vocabulary does not have.
    """
    keywords = trust(settings.trust_remote_code) | {"adapter_path": settings.adapter_path}
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is None and settings.pipeline:
        raise GearbxError("--pipeline is for several ranks, and this process runs alone; start them with mlx.launch")
    if run is not None:
        keywords |= {"group": run.group, "pipeline": settings.pipeline}
    model, tokenizer, config = load(settings.model, return_config=True, **keywords)
    known = tokenizer.get_vocab() if settings.extra_eos_token else {}
    for token in settings.extra_eos_token:
        if token not in known and token not in map(str, known.values()):  # mlx-lm takes others, for no token at all
            raise GearbxError(f"--extra-eos-token {shown(token)}: is not in the vocabulary; give a token or its number")
        tokenizer.add_eos_token(token)
    return model, tokenizer, config


def load_original(settings: ModelSettings) -> tuple[nn.Module, Any, dict]:
    """As `load_model`. Raises GearbxError for a model that is quantized, or whose checkpoint has gears."""
    model, tokenizer, config = load_model(settings)
    if is_quantized(model) or saved_gears(model) is not None:
        raise GearbxError(f"{model_name(settings.model)}: is no original model; give the one that it was made from")
    return model, tokenizer, config


def room_for(
    config: Mapping[str, Any],
    prompt_tokens: int,
    max_tokens: int,
    max_kv_size: int | None = None,
    what: str = "the prompt",
    remedy: str = "shorten the prompt",
) -> int:
    """How many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    `prompt_tokens` counts those of a prompt cache as well. `what` and `remedy` are the words of the error.

    Raises:
        GearbxError: the prompt leaves no room in the model's context.
    """
    context = context_length(dict(config))
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(f"{what} is {prompt_tokens} tokens, and the model's context {context}; {remedy}")
    if max_kv_size is not None:
        return max_tokens
    room = context - prompt_tokens
    return room if max_tokens == -1 else min(max_tokens, room)
