"""What a request's tokens pass through on their way from the model to the client, and what is counted of them."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.server import GenerationContext

from ..decoding.mode import Mode
from ..decoding.response import GearResponse
from ..telemetry.summary import Tally
from .requests import Request


@dataclass(frozen=True)
class Alternative:
    """A token of the vocabulary and its log-probability (natural)."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Emitted:
    """A token of an answer.

    text: what is certain of the answer by now and was not before. seen: what the gearbox saw, without the distribution.
    logprob: of the token (natural); None where nobody asked. likeliest: as many as were asked for, the likeliest first.
    stop_word: that ended the answer.
    """

    text: str
    seen: GearResponse
    finish_reason: str | None
    logprob: Alternative | None = None
    likeliest: tuple[Alternative, ...] = ()
    stop_word: str | None = None


@dataclass(frozen=True)
class Begun:
    """An answer that has begun.

    context: mlx-lm's. gears: that its tokens may have. thresholds: bits, between the gears; empty where none decide.
    """

    context: GenerationContext
    mode: Mode
    gears: tuple[str, ...]
    thresholds: tuple[float, ...]
    model: str

    def tally(self) -> Tally:
        return Tally.of(self.gears)


@dataclass(frozen=True)
class Progress:
    """How many tokens of the prompt have been read."""

    done: int
    total: int


@dataclass
class Asked:
    """A request on its way to the model, and the queue in which its answer comes.

    The queue has Begun or an error, then Progress and Emitted as they come, and None or an error at the end.
    """

    request: Request
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of a chat, with all fields that the client sent."""
    answers: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    read: tuple[Any, Any] | None = None
    """A model that is served, and the tokens that it reads the prompt as, once they are known."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for the answer any more."""


def gearbox_report(mode: Mode, tally: Tally) -> dict[str, Any]:
    """The `gearbx` of an answer: which gears wrote it, and what they read.

    Returns:
        mode, tokens and passes by gear, shifts, mean entropy (bits), bytes of weights that a token read on average, and
        what the mode adds, such as tokens drafted and accepted.
    """
    return {
        "mode": mode.name,
        "gear_tokens": tally.gear_tokens,
        "passes": tally.passes,
        "shifts": tally.shifts,
        "mean_entropy_bits": tally.mean(tally.entropy_sum),
        "weight_bytes_per_token": tally.mean(tally.weight_bytes),
        **mode.summary(tally),
    }


def token_reports(emitted: Sequence[Emitted]) -> list[dict[str, Any]]:
    """The `gearbx.tokens` of a chunk: gear, entropy and its rolling mean (bits) of every token in it."""
    return [
        {
            "gear": one.seen.gear,
            "entropy": round(one.seen.entropy, 4),
            "mean_entropy": round(one.seen.mean_entropy, 4),
        }
        for one in emitted
    ]
