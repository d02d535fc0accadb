"""What the loop knows of one text: its settings (`DecodePlan`), and how far it is (`DecodeState`)."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..ranks.agreement import ALONE, Agreement
from .caches import gears_of, length
from .drafters import Drafter
from .policy import FixedPolicy, LearnedPolicy
from .response import GeneratedToken
from .rows import Proposal, RunsPasses, VerifiedPass
from .sampling import MLX_READER, Chooser, LogitsReader
from .text import GeneratedText

UNLIMITED = 2**40  # entries of a KV cache
SLOW_READER = 0.2  # of a round's time: readers that take more may keep a device waiting


@dataclass(frozen=True)
class DecodePlan:
    """The settings of one text.

    Attributes:
        verifier: runs the passes whose logits choose the tokens.
        chooser, reader: choose tokens from logits.
        policy: how much to propose.
        plain: decodes one token ahead while nothing is proposed; None: each token is a round of one row.
        agreement: of ranks that share the model.
        quantize: puts the KV cache into fewer bits once it has `quantized_from` entries, as mlx-lm does.
        keeps_cache: True if a caller goes on with the KV cache.
        stream: of MLX, on which all of it is computed.
        prefill_step: tokens of a prompt that are read at once.
        progress: called with the tokens of the prompt that were read, and with all of them.
        embeddings: of the tokens of the prompt (n, D), in place of the model's own.
        clock: seconds.
    """

    verifier: RunsPasses
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    policy: LearnedPolicy = field(default_factory=FixedPolicy)
    plain: "Callable[[DecodePlan, DecodeState], Iterator[GeneratedToken]] | None" = None
    agreement: Agreement = ALONE
    quantize: Callable[[list[Any]], None] = lambda cache: None
    quantized_from: int = UNLIMITED
    keeps_cache: bool = False
    stream: Any = None
    prefill_step: int = 2048
    progress: Callable[[int, int], None] = lambda read, tokens: None
    embeddings: mx.array | None = None
    clock: Callable[[], float] = time.perf_counter

    def embedded(self, begin: int, end: int) -> dict[str, mx.array]:
        """Return the keyword of the model for a part of the prompt that has embeddings."""
        return {} if self.embeddings is None else {"input_embeddings": self.embeddings[None, begin:end]}

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else mx.stream(self.stream)


@dataclass
class DecodeState:
    """A text while it is generated.

    Between rounds, `cache` holds all tokens of `text` but the last one. While the tokens of a round are handed out, the
    text has all of them already.

    Attributes:
        cache: the KV cache of the verifier, one entry a layer.
        drafters: in the order in which they are asked.
        found: the latest verification.
        random_states: of MLX, after each of its tokens; empty for greedy ones.
        shown: how many of its tokens were handed out.
        proposal: the next one, if it was queued before its round.
        began: when its round began, and `away` then.
        away: seconds that readers of the tokens took.
        is_last_read: the last token is in the KV cache, too: the next pass ran ahead.
    """

    text: GeneratedText
    cache: list[Any]
    drafters: list[Drafter] = field(default_factory=list)
    found: VerifiedPass | None = None
    random_states: Sequence[mx.array] = ()
    shown: int = 0
    proposal: Proposal | None = None
    began: tuple[float, float] = 0.0, 0.0
    away: float = 0.0
    is_last_read: bool = False

    def __post_init__(self) -> None:
        self.kv_gears = gears_of(self.cache)
        """Of the KV cache, if it has gears."""

    def is_queued(self, plan: DecodePlan) -> bool:
        """Return whether a device computes by itself what it is given."""
        return not plan.verifier.computes_at_once(self.cache)

    def room(self, plan: DecodePlan) -> int:
        """Return the most tokens to propose: the verifier adds one, and a KV cache is quantized between passes."""
        room = self.text.room - 1
        if plan.quantized_from < UNLIMITED:
            until_quantized = plan.quantized_from - length(self.cache) - 1
            room = room if until_quantized < 0 else min(room, until_quantized)
        return int(min(room, UNLIMITED))

    def seconds(self, plan: DecodePlan) -> float | None:
        """Return the seconds since the round began; None if the device may have waited for a reader of the tokens."""
        begin, away = self.began
        whole, away = plan.clock() - begin, self.away - away
        if not self.is_queued(plan):
            return whole - away
        return whole if away < SLOW_READER * whole else None

    def time_plain(self, plan: DecodePlan) -> None:
        """Give the policy the time of a plain token, unless a gear that is made meanwhile has slowed it."""
        seconds = self.seconds(plan)
        if seconds is not None and all(drafter.is_ready for drafter in self.drafters):
            plan.policy.add_plain(seconds)
