"""The tokens of a text so far, which logits processors are given, and in which proposals are looked up."""

from typing import Any

import mlx.core as mx
import numpy as np


class History:
    """The tokens that a model was called with since the text began.

    A text begins with another cache, or with several tokens (a prompt) after the single ones of the text before.

    Args:
        counted_only: nobody will ask for the tokens themselves.
    """

    def __init__(self, counted_only: bool):
        self._counted_only = counted_only
        self._tokens: list[int] = []
        self._new: list[mx.array] = []  # which may still be computed
        self._count = 0
        self._cache: Any = None
        self._decoding = False

    def add(self, inputs: mx.array, cache: Any) -> None:
        """Take the tokens of a call; `cache` is the one that it was called with."""
        if cache is not self._cache or (self._decoding and inputs.size > 1):
            self._tokens, self._new, self._count = [], [], 0
        self._cache, self._decoding = cache, inputs.size == 1
        if not self._counted_only:
            self._new.append(inputs.reshape(-1))
        self._count += inputs.size

    def __len__(self) -> int:
        return self._count

    def tokens(self) -> list[int]:
        """The tokens, in the same list as long as the text is the same; it grows at its end."""
        for part in self._new:
            self._tokens += np.array(part).tolist()
        self._new = []
        return self._tokens
