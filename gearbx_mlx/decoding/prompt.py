"""A prompt as tokens."""

from typing import Any


def encoded(tokenizer: Any, prompt: Any) -> Any:
    """A prompt as tokens, as mlx-lm's stream_generate makes them of text."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)
