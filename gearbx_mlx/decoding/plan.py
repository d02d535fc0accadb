"""Keywords (`Keywords`), settings (`DecodePlan`) and state (`DecodeState`) of a sequence in the decoding loop."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import does_model_support_input_embeddings

from ..compat.classes import generation_stream
from ..errors import GearbxError, GearbxWarning, one_line
from ..ranks.agreement import SINGLE_PROCESS, Agreement
from .caches import gears_of, length
from .drafters import Drafter
from .mode import encoded
from .policy import FixedPolicy, LearnedPolicy
from .response import GeneratedText
from .rows import Proposal, RunsPasses, Verification
from .sampling import MLX_READER, Chooser, LogitsReader, Processor, Sampler

PREFILL_STEP_SIZE = 2048  # tokens of a prompt per forward pass, as in mlx-lm
UNLIMITED = 2**40  # tokens: more than any output has
MAX_PAUSE = 0.2  # share of a queued round; if the consumer of tokens takes more, the round's time is not used


@dataclass(frozen=True)
class Keywords:
    """Keywords of mlx-lm's stream_generate. num_draft_tokens: the most tokens of one draft by a draft model.
    stream: of all computations; None: mlx-lm's own."""

    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[Processor] | None = None
    prompt_cache: list[Any] | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = PREFILL_STEP_SIZE
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START
    prompt_progress_callback: Callable[[int, int], None] | None = None
    input_embeddings: mx.array | None = None
    draft_model: nn.Module | None = None
    num_draft_tokens: int | None = None
    stream: mx.Stream | None = None

    def chooser(self) -> Chooser:
        return Chooser(self.sampler or greedy_sampler, tuple(self.logits_processors or ()))

    def text(self, model: nn.Module, tokenizer: TokenizerWrapper, prompt: Any) -> GeneratedText:
        """Return a sequence with its prompt (text or tokens).

        Raises:
            GearbxError: embeddings that the model does not take, or of a different prompt.
            ValueError: no prompt, or no room for a token, as in mlx-lm.
        """
        if self.input_embeddings is not None and not does_model_support_input_embeddings(model):
            raise GearbxError(f"{type(model).__name__}: takes no input_embeddings; pass tokens")
        tokens = encoded(tokenizer, prompt)
        if self.max_tokens == 0:
            raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
        if self.input_embeddings is not None and not tokens:
            tokens = [0] * len(self.input_embeddings)  # placeholders: the model reads the embeddings
        vectors = len(tokens) if self.input_embeddings is None else len(self.input_embeddings)
        if vectors != len(tokens):
            raise GearbxError(
                f"input_embeddings: must have one vector per token of the prompt, got {vectors} for {len(tokens)} "
                "tokens; pass the embeddings of this prompt"
            )
        if not tokens:
            raise ValueError("Either input_embeddings or prompt (or both) must be provided.")
        room = math.inf if self.max_tokens < 0 else self.max_tokens
        return GeneratedText(tokens, frozenset(tokenizer.eos_token_ids), room)

    def caches(self, model: nn.Module) -> tuple[list[Any], list[Any]]:
        """Return the entries of the model's KV cache, and the draft model's; [] if the prompt cache has none."""
        own = make_prompt_cache(model, self.max_kv_size)
        if self.prompt_cache is None:
            return own, []
        count = len(own)  # not the number of layers, as some share a cache
        return self.prompt_cache[:count], self.prompt_cache[count:]

    @property
    def keeps_cache(self) -> bool:
        """True if the caller passed a KV cache, which it may use after generation."""
        return self.prompt_cache is not None

    def quantize(self, cache: list[Any]) -> None:
        """Quantize the entries of a KV cache as mlx-lm does, also in the caller's prompt cache."""
        if self.kv_bits is None:
            return
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        if self.prompt_cache is not None:
            self.prompt_cache[: len(cache)] = cache

    def embedded(self, start: int, end: int) -> dict[str, mx.array]:
        """Return the model's keyword for a part of the prompt with embeddings; {} without."""
        given = self.input_embeddings
        return {} if given is None else {"input_embeddings": given[None, start:end]}

    def progress(self, read: int, tokens: int) -> None:
        """Report the number of prefilled tokens, and the prompt's."""
        if self.prompt_progress_callback is not None:
            self.prompt_progress_callback(read, tokens)


@dataclass(frozen=True)
class DecodePlan:
    """Settings of one sequence.

    Attributes:
        verifier: runs the passes whose logits choose the tokens.
        keywords: of mlx-lm.
        chooser, reader: choose tokens from logits.
        policy: chooses the number of proposed tokens.
        agreement: gives ranks that share the model the same tokens.
        clock: seconds.
    """

    verifier: RunsPasses
    keywords: Keywords
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    policy: LearnedPolicy = field(default_factory=FixedPolicy)
    agreement: Agreement = SINGLE_PROCESS
    clock: Callable[[], float] = time.perf_counter

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which MLX computes on the sequence's stream."""
        return mx.stream(self.keywords.stream or generation_stream())


@dataclass
class DecodeState:
    """State of a sequence during generation.

    Between rounds, `cache` holds all tokens of `text` but the last one. `text` already has all tokens of a round while
    they are yielded.

    Attributes:
        cache: the verifier's KV cache, as its model makes it; pair: one entry per model.
        drafters: in order of priority.
        found: the latest round's verification; None before the first, and in `decode_ahead`.
        is_queued: True if a device may still compute the latest pass.
        random_states: MLX's, after each token of `found`; empty if the chooser draws no random numbers.
        shown: number of tokens of `found` that were yielded.
        proposal: the next one once chosen, NO_TOKENS if no drafter has one; None: not chosen yet.
        started: start of the proposal's round, and `away` at that time, in seconds.
        away: seconds that consumers of the tokens took.
        is_last_read: True if the KV cache holds the last token too, because the next pass ran ahead.
    """

    text: GeneratedText
    cache: list[Any]
    drafters: list[Drafter] = field(default_factory=list)
    found: Verification | None = None
    is_queued: bool = False
    random_states: Sequence[mx.array] = ()
    shown: int = 0
    proposal: Proposal | None = None
    started: tuple[float, float] = 0.0, 0.0
    away: float = 0.0
    is_last_read: bool = False

    def __post_init__(self) -> None:
        self.kv_gears = gears_of(self.cache)
        """Gears of the KV cache; None without."""

    def room(self, plan: DecodePlan) -> int:
        """Return the maximum length of a proposal.

        The verifier adds a token. A pass must not begin before `quantized_kv_start` and end after it.
        """
        room = min(self.text.room - 1, UNLIMITED)
        if plan.keywords.kv_bits is not None:
            until_quantized = plan.keywords.quantized_kv_start - length(self.cache) - 1
            room = room if until_quantized < 0 else min(room, until_quantized)
        return int(room)

    def seconds(self, plan: DecodePlan) -> float | None:
        """Return the seconds since the round's start; None if the device may have waited for a consumer."""
        start, away = self.started
        whole, away = plan.clock() - start, self.away - away
        if not self.is_queued:
            return whole - away
        return whole if away < MAX_PAUSE * whole else None

    def update_drafters(self, found: Verification | None) -> None:
        """Tell the drafters the new tokens after a pass; found: None at the end of the sequence."""
        for drafter in [*self.drafters]:
            try:
                drafter.update(self.text, found)
            except GearbxError:
                raise
            except Exception as error:
                self.drop(drafter, error)

    def drop(self, drafter: Drafter, error: Exception) -> None:
        """Continue without a drafter that failed: its error must not end the sequence."""
        self.drafters.remove(drafter)
        message = f"drafting failed ({drafter.name}: {one_line(error)}); this sequence continues without this drafter"
        warnings.warn(message, GearbxWarning, stacklevel=8)

    def time_plain(self, plan: DecodePlan) -> None:
        """Report the time of a plain token to the policy, unless a thread that makes a draft gear slowed it."""
        seconds = self.seconds(plan)
        if seconds is not None and all(drafter.is_ready for drafter in self.drafters):
            plan.policy.add_plain(seconds)
