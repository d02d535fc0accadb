"""What all texts share: prompts as tokens, the length of the logits, and turns with one gearbox, also from threads."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import GearbxError
from ..gears.discovery import vocabulary
from .response import GearResponse

making = threading.RLock()  # a model gets one gearbox, however many threads ask for it at once


_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


_known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


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


def vocabulary_of(gearbox: Any) -> int:
    """V of the gearbox's (or Observer's) model. Raises GearbxError for a model that turns no token into logits."""
    if gearbox not in _known:
        _known[gearbox] = vocabulary(gearbox.model)
    return _known[gearbox]


def turn(gearbox: Any) -> AbstractContextManager:
    """The lock that a text has while it shifts a gearbox and computes a token with it."""
    with making:
        return _locks.setdefault(gearbox, threading.RLock())


def in_turn(responses: Iterator[GearResponse], gearbox: Any) -> Iterator[GearResponse]:
    """Responses, each of them computed while no other text uses the gearbox. Between two of them it is free."""
    lock = turn(gearbox)
    while True:
        with lock:
            response = next(responses, None)
        if response is None:
            return
        yield response
