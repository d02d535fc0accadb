"""Settings (`DecodePlan`) and state (`DecodeState`) of a sequence in the decoding loop."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..ranks.agreement import ALONE, Agreement
from .caches import gears_of, length
from .drafters import Drafter
from .policy import FixedPolicy, LearnedPolicy
from .response import GeneratedText
from .rows import Proposal, RunsPasses, VerifiedPass
from .sampling import MLX_READER, Chooser, LogitsReader

UNLIMITED = 2**40  # no limit: more than any KV cache or output has
MAX_PAUSE = 0.2  # share of a round; if the consumer of tokens takes more, the round's time is not used


@dataclass(frozen=True)
class DecodePlan:
    """Settings of one sequence.

    Attributes:
        verifier: runs the passes whose logits choose the tokens.
        chooser, reader: choose tokens from logits.
        policy: chooses the number of proposed tokens.
        agreement: of ranks that share the model.
        quantize: quantizes the KV cache once it has `quantized_from` entries, as mlx-lm does.
        keeps_cache: True if a caller uses the KV cache afterwards.
        stream: MLX stream of all computations; None: the default stream.
        prefill_step: tokens of a prompt per forward pass.
        progress: called with the number of prefilled tokens, and the prompt's.
        embeddings: of the prompt's tokens (n, D); None: the model's own.
        clock: seconds.
    """

    verifier: RunsPasses
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    policy: LearnedPolicy = field(default_factory=FixedPolicy)
    agreement: Agreement = ALONE
    quantize: Callable[[list[Any]], None] = lambda cache: None
    quantized_from: int = UNLIMITED
    keeps_cache: bool = False
    stream: Any = None
    prefill_step: int = 2048
    progress: Callable[[int, int], None] = lambda read, tokens: None
    embeddings: mx.array | None = None
    clock: Callable[[], float] = time.perf_counter

    def embedded(self, start: int, end: int) -> dict[str, mx.array]:
        """Return the model's keyword for a part of the prompt with embeddings; {} without."""
        return {} if self.embeddings is None else {"input_embeddings": self.embeddings[None, start:end]}

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else mx.stream(self.stream)


@dataclass
class DecodeState:
    """State of a sequence during generation.

    Between rounds, `cache` holds all tokens of `text` but the last one. `text` already has all tokens of a round while
    they are yielded.

    Attributes:
        cache: the verifier's KV cache, one entry per layer.
        drafters: in order of priority.
        found: the latest verification.
        random_states: MLX's, after each token of `found`; empty for greedy decoding.
        shown: number of tokens of `found` that were yielded.
        proposal: the next one if it is already queued; None otherwise.
        started: start of the proposal's round, and `away` at that time, in seconds.
        away: seconds that consumers of the tokens took.
        is_last_read: True if the KV cache holds the last token too, because the next pass ran ahead.
    """

    text: GeneratedText
    cache: list[Any]
    drafters: list[Drafter] = field(default_factory=list)
    found: VerifiedPass | None = None
    random_states: Sequence[mx.array] = ()
    shown: int = 0
    proposal: Proposal | None = None
    started: tuple[float, float] = 0.0, 0.0
    away: float = 0.0
    is_last_read: bool = False

    def __post_init__(self) -> None:
        self.kv_gears = gears_of(self.cache)
        """Gears of the KV cache; None without."""

    def is_queued(self, plan: DecodePlan) -> bool:
        """Return whether passes are queued for a device, rather than computed in the call."""
        return not plan.verifier.is_synchronous(self.cache)

    def room(self, plan: DecodePlan) -> int:
        """Return the maximum length of a proposal: the verifier adds a token, and no pass crosses `quantized_from`."""
        room = self.text.room - 1
        if plan.quantized_from < UNLIMITED:
            until_quantized = plan.quantized_from - length(self.cache) - 1
            room = room if until_quantized < 0 else min(room, until_quantized)
        return int(min(room, UNLIMITED))

    def seconds(self, plan: DecodePlan) -> float | None:
        """Return the seconds since the round's start; None if the device may have waited for a consumer."""
        start, away = self.started
        whole, away = plan.clock() - start, self.away - away
        if not self.is_queued(plan):
            return whole - away
        return whole if away < MAX_PAUSE * whole else None

    def time_plain(self, plan: DecodePlan) -> None:
        """Report the time of a plain token to the policy, unless a thread slows it by making a draft gear."""
        seconds = self.seconds(plan)
        if seconds is not None and all(drafter.is_ready for drafter in self.drafters):
            plan.policy.add_plain(seconds)
