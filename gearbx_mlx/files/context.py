"""How long a text a model was made for."""

from collections.abc import Mapping
from typing import Any


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model was made for, if its configuration says so."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, Mapping))
    for part in parts:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            if type(part.get(key)) is int:
                return part[key]
    return None
