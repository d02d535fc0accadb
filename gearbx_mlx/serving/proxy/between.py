"""Two servers, the rule between them, and what is decided by it."""

from dataclasses import dataclass
from typing import Any

from ...routing.pair import NAMES
from .asking import Ways
from .first_tokens import Rule
from .handed_over import HandOver
from .upstream import Upstream


@dataclass(frozen=True)
class Decision:
    """Who answers, and why.

    server: SMALL or LARGE. why: "threshold", "prompt", "entropy", "undecided", "finished", "no logprobs" or "fallback".
    entropy: bits, bounds of the mean that was compared with the threshold. text: what the small server wrote, if it can
    be handed over; tokens: of it. reason: of a fallback.
    """

    server: int
    why: str
    entropy: tuple[float, float] | None = None
    text: str = ""
    tokens: int = 0
    reason: str | None = None

    def as_json(self, handed_over: int) -> dict[str, Any]:
        """As the client reads it."""
        entropy = {} if self.entropy is None else {"entropy": [round(bits, 4) for bits in self.entropy]}
        reason = {} if self.reason is None else {"reason": self.reason}
        return {"server": NAMES[self.server], "why": self.why, **entropy, "handed_over": handed_over, **reason}


class Between:
    """Two servers, and the rule between them; threads share it.

    Args:
        fallback: whether one server answers for the other one that fails.
    """

    def __init__(
        self,
        small: Upstream,
        large: Upstream,
        rule: Rule,
        fallback: bool = True,
    ):
        self.servers = small, large
        self.rule, self.fallback = rule, fallback
        self.ways = Ways()
        self.hand_over = HandOver(large)
