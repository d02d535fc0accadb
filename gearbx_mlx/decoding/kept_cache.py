"""A KV cache that is kept from one turn of a chat to the next, and the tokens that it holds.

A chat template may change earlier turns: it leaves out what was thought, or a date changes. So every turn gives all
tokens of the conversation. The cache is cut to what they begin with, and the model reads only the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import GearbxError
from .caches import cut, given, parts


class KeptCache:
    """The caches of a model's layers, and what was read into them.

    Args:
        make: returns empty caches, as mlx-lm's `prompt_cache`; with a draft model its caches follow the model's.

    `entries` is what `stream_generate` takes as its prompt_cache.
    """

    def __init__(self, make: Callable[[], list[Any]]):
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Begin with empty caches."""
        self.entries, self.tokens = list[Any](), list[int]()  # also if a signal comes while they are made
        self.entries = self._make()

    def unread(self, tokens: Sequence[int]) -> list[int]:
        """Cut the cache to what the tokens begin with, and return the rest of them.

        The last token is always unread, since logits come from reading. A cache that cannot be cut, a state or a window
        that has begun to slide, is made anew.
        """
        kept = min(shared(self.tokens, tokens), len(tokens) - 1)
        states = any(given(part) is None for part in parts(self.entries))
        if not self.entries or (states and kept < len(self.tokens)) or not cut(self.entries, kept):
            self.forget()
            kept = 0
        del self.tokens[kept:]
        return list(tokens[kept:])

    def note(self, read: Sequence[int], whole: bool = True) -> None:
        """Note what the model was given after `tokens`.

        The cache says how much of it is there. mlx-lm runs ahead, so that it may hold one token more; with a draft
        model it holds the last tokens not yet, or not in both models.

        Args:
            whole: all of it was given, and nothing else. States do not count, and so are lost where that is not known.
        """
        known = [*self.tokens, *read]
        counts = [given(part) for part in parts(self.entries)]
        counted = [count for count in counts if count is not None]
        if None in counts and not (whole and set(counted) <= {len(known)}):
            self.forget()
        else:
            self.tokens = known[: min(counted, default=len(known))]

    def cut_to_tokens(self) -> list[Any]:
        """The entries, with `tokens` in them and nothing else. Raises GearbxError where they cannot be cut."""
        if not cut(self.entries, len(self.tokens)):
            self.forget()
            raise GearbxError("the KV cache cannot be cut to what was shown; it is read anew with the next message")
        return self.entries


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
