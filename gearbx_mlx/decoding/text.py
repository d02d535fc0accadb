"""A text while it is generated: its tokens, and where it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass
class GeneratedText:
    """A text while it is generated.

    Args:
        tokens: of the prompt, and those generated after it.
        ends: tokens that end the text.
        room: how many tokens may still be generated; infinite without a limit.
    """

    tokens: list[int]
    ends: frozenset[int] = frozenset()
    room: float = math.inf

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        """Tokens of the prompt."""

    @property
    def last(self) -> int:
        """The token that the next pass reads."""
        return self.tokens[-1]

    @property
    def goes_on(self) -> bool:
        """True until a token ends the text, or there is no room."""
        generated = len(self.tokens) > self.prompt
        return self.room > 0 and not (generated and self.last in self.ends)

    def ends_with(self, count: int) -> bool:
        """True if the text has ended, and so many tokens were generated."""
        return not self.goes_on and len(self.tokens) == self.prompt + count

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.room -= 1

    def until_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to the first one that ends the text, which is among them."""
        last = next((place for place, token in enumerate(tokens, 1) if token in self.ends), len(tokens))
        return list(tokens[:last])

    def array(self) -> mx.array:
        return mx.array(self.tokens, mx.uint32)
