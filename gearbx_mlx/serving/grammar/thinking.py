"""Where an answer begins that a model thinks before."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Thinking:
    """The thinking part of an answer: which tokens begin and end it.

    Args:
        start, end: tokens.
        opened: the prompt has begun it, so that the text is in it from its first token on.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    opened: bool

    def over(self, text: np.ndarray) -> int | None:
        """How many of a text's first tokens belong to the thinking part, 0 without one; None while it goes on.

        Args:
            text: tokens after the prompt, (n,).
        """
        if not self.opened and not (len(text) and text[0] == self.start[0]):
            return 0
        size = len(self.end)
        places = np.flatnonzero(text == self.end[0])
        return next((int(p) + size for p in places if tuple(text[p : p + size].tolist()) == self.end), None)

    def may_start(self, text: np.ndarray) -> bool:
        """Whether the next token may begin the thinking part."""
        return not self.opened and not len(text)


def thinking_of(tokenizer: Any, opened: bool) -> Thinking | None:
    """How a model of mlx-lm's tokenizer thinks; None if it does not."""
    if not tokenizer.has_thinking:
        return None
    return Thinking(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), opened)
