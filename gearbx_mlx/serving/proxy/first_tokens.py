"""Which of two servers answers: by the prompt, then by the entropy of the first tokens that the small one writes.

The rule is that of two models that take turns (routing/pair.py), at the first moment at which it lets go of the small
model: after `min_gear_duration` tokens, by the mean of the last `window`. Of a server's tokens the entropy is known
within bounds; the rule is applied to both.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...routing.bounds import BoundedRouting
from ...routing.gates import first_gear
from ...routing.pair import (
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    LARGE,
    SMALL,
    pair_gate,
    pair_monitor,
)
from ..names import ASSUMED_VOCABULARY


@dataclass(frozen=True)
class Rule:
    """When the large server answers.

    threshold: bits of mean entropy above which it does, 0 (always) to infinity (never). window: tokens in the mean.
    min_gear_duration: tokens that the small server writes before it is judged. vocab_size: of the small model, which
    bounds the entropy of the tokens that its server does not list.
    """

    threshold: float
    window: int = DEFAULT_WINDOW
    min_gear_duration: int = DEFAULT_MIN_DURATION
    vocab_size: int = ASSUMED_VOCABULARY

    def by_itself(self) -> int | None:
        """The server that the threshold chooses for every request; None between its ends."""
        return {0.0: LARGE, math.inf: SMALL}.get(self.threshold)


def by_prompt(body: dict[str, Any]) -> int:
    """LARGE for a prompt that looks hard (GEARBX 11), else SMALL. Judged is what the user typed last."""
    return LARGE if first_gear(typed_last(body), 2) == 1 else SMALL


def typed_last(body: dict[str, Any]) -> str:
    """The last message of a user, or the prompt of a text completion; "" where there is no text."""
    messages = body.get("messages")
    if isinstance(messages, list):
        own = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        return " ".join(texts(own[-1].get("content"))) if own else ""
    return " ".join(texts(body.get("prompt")))


def texts(content: Any) -> Iterator[str]:
    """The texts of a message or a prompt: a string, or a list of strings or of parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


class FirstTokens:
    """The first tokens of the small server, and what follows from them.

    seen: tokens. means: bounds of the mean over the window, in bits. choice: SMALL, LARGE, or None where the two bounds
    would choose differently.
    """

    def __init__(self, rule: Rule):
        self.rule, self.seen = rule, 0
        self.means: tuple[float, float] | None = None
        self.choice: int | None = SMALL
        self._routing = BoundedRouting(
            lambda: pair_monitor(rule.vocab_size, rule.window),
            lambda: pair_gate(rule.threshold, rule.min_gear_duration),
            first=SMALL,
            delay=0,
        )

    def add(self, bounds: tuple[float, float]) -> None:
        """Take the bounds of the next token's entropy, in bits; after the decision they change nothing."""
        if not self.complete:
            found = self._routing.update(bounds)
            self.means = found.means
            self.choice = min(found.possible) if len(found.possible) == 1 else None
        self.seen += 1

    @property
    def complete(self) -> bool:
        return self.seen >= self.rule.min_gear_duration
