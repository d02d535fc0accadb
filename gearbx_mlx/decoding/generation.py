"""mlx-lm's keywords and responses for the own loop of the modes lossless, kickdown and pair."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import does_model_support_input_embeddings

from ..compat.classes import generation_stream
from ..errors import GearbxError
from ..gears.ladder import Gear
from ..gears.mapped import mapped_bytes
from ..kernels.device import recommended_memory
from ..routing.gates import Monitor, Reading
from .governor import Governor, MemoryGuard
from .loop import decode
from .mode import encoded
from .plan import UNLIMITED, DecodePlan, DecodeState
from .response import GearResponse, GeneratedText, GeneratedToken, telemetry_of
from .sampling import Chooser, Processor, Sampler, has_nan

PREFILL_STEP_SIZE = 2048  # tokens of a prompt per forward pass, as in mlx-lm


@dataclass(frozen=True)
class Keywords:
    """Keywords of mlx-lm's stream_generate. num_draft_tokens: the most tokens of one draft by a draft model."""

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
        tokens: list[int] = np.array(encoded(tokenizer, prompt), int).reshape(-1).tolist()
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
        """Return the entries of the model's KV cache, and a draft model's after them."""
        own = make_prompt_cache(model, self.max_kv_size)
        if self.prompt_cache is None:
            return own, []
        count = len(own)  # not the number of layers, as some share a cache
        return self.prompt_cache[:count], self.prompt_cache[count:]

    def of_plan(self) -> dict[str, Any]:
        """Return the fields of a DecodePlan that these keywords set."""
        return {
            "quantize": self._quantize,
            "quantized_from": UNLIMITED if self.kv_bits is None else self.quantized_kv_start,
            "keeps_cache": self.prompt_cache is not None,
            "stream": generation_stream(),
            "prefill_step": self.prefill_step_size,
            "progress": self.prompt_progress_callback or (lambda read, tokens: None),
            "embeddings": self.input_embeddings,
        }

    def _quantize(self, cache: list[Any]) -> None:
        """Quantize the entries of a KV cache as mlx-lm does, also in the caller's prompt cache."""
        if self.kv_bits is None:
            return
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        if self.prompt_cache is not None:
            self.prompt_cache[: len(cache)] = cache


def tokenizer_for(tokenizer: Any) -> TokenizerWrapper:
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


class Telemetry:
    """Responses of one sequence with telemetry: entropy, gears, passes and bytes; a controller gets the times.

    Args:
        monitor: of the rolling entropy, for responses and for the gate.
        blame: returns the error for logits of a gear that are not finite.
        controller: caps the gears, or watches memory; None without.
    """

    def __init__(
        self,
        monitor: Monitor,
        blame: Callable[[Gear], Exception],
        controller: Governor | MemoryGuard | None = None,
    ):
        self._monitor, self._blame, self._controller = monitor, blame, controller
        self._clock = time.perf_counter if controller is None else controller.clock
        self._before: Gear | None = None  # of the previous token
        self.resume()

    def governing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the controller acts."""
        return contextlib.nullcontext() if self._controller is None else self._controller.governing()

    def resume(self) -> None:
        """Start the clock of a token: time that a caller takes between tokens does not count."""
        self._start = self._clock()

    def response(self, response: GenerationResponse, token: GeneratedToken) -> tuple[GearResponse, Reading]:
        """Return the response for a token, and the reading for the gate.

        Raises:
            GearbxError: log-probabilities that are not finite.
        """
        gear, decision = token.step.gear, None
        if self._controller is not None:
            seconds = None if self._before is None else self._clock() - self._start
            decision = self._controller.after(token.step, seconds)
        if has_nan(token.logprobs, token.entropy):
            raise self._blame(gear)
        reading = self._monitor.update(token.entropy)
        shown = vars(response) | telemetry_of(token.step, token.entropy, reading.mean, self._before, token.near_tie)
        self._before = gear
        return GearResponse(**shown, decision=decision), reading


def responses(
    plan: DecodePlan,
    state: DecodeState,
    tokenizer: TokenizerWrapper,
    telemetry: Telemetry,
    arrays: Callable[[], list[mx.array]] = list,
    on_reading: Callable[[Reading], None] = lambda reading: None,
    finish: Callable[[int], None] = lambda tokens: None,
) -> Iterator[GearResponse]:
    """Yield the tokens of a sequence as mlx-lm's stream_generate does, with telemetry.

    Args:
        arrays: returns the arrays that a GPU keeps in memory.
        on_reading: takes the reading after each token, before the next one is computed.
        finish: takes the number of generated tokens at the end.
    """
    text, detokenizer = state.text, tokenizer.detokenizer
    with contextlib.ExitStack() as generating:
        generating.callback(lambda: finish(len(text.tokens) - text.prompt))
        held = [] if recommended_memory() is None else arrays()
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints warnings of too large models
            generating.enter_context(wired_limit(held, [plan.stream]))
        generating.enter_context(telemetry.governing())  # until closing has run the last pass
        tokens = generating.enter_context(contextlib.closing(decode(plan, state)))
        telemetry.resume()
        start, mapped = time.perf_counter(), mapped_bytes()
        for count, token in enumerate(tokens, 1):
            if count == 1:
                prompt_tps = text.prompt / (time.perf_counter() - start)
                start = time.perf_counter()
            stopped, over = token.id in text.ends, text.has_ended_after(count)
            if not stopped:
                detokenizer.add_token(token.id)
            if over:
                detokenizer.finalize()
                next(tokens, None)  # lets the loop leave the cache as mlx-lm does
            response = GenerationResponse(
                text=detokenizer.last_segment,
                token=token.id,
                logprobs=token.logprobs,
                from_draft=False,
                prompt_tokens=text.prompt,
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=(mx.get_peak_memory() + mapped) / 1e9,
                finish_reason=("stop" if stopped else "length") if over else None,
            )
            shown, reading = telemetry.response(response, token)
            on_reading(reading)
            yield shown
            telemetry.resume()
