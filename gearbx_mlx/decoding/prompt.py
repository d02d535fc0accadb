"""A prompt as tokens."""

from collections.abc import Sequence
from typing import Any

from ..errors import GearbxError


def encoded(tokenizer: Any, prompt: Any) -> Any:
    """A prompt as tokens, as mlx-lm's stream_generate makes them of text."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)


def check_known(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raises GearbxError for a token that a model does not know: MLX would read beyond its table.

    Args:
        name: of the prompt.
        vocabulary: how many tokens there are.
    """
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise GearbxError(f"{name} has token {unknown}, and the model knows 0 to {vocabulary - 1}")
