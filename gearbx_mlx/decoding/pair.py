"""Mode pair: a small and a large model of one tokenizer (entropy adaptive decoding, EAD, section 3).

Rolling entropy chooses the model of the next token.

A switch affects the very next token, as in EAD's Algorithm 1, while a shift of mode `route` acts two tokens later. The
entropy is therefore read before the next pass. Pair is the loop of `loop.py` without proposals; its verifier runs the
engaged model.

Each model has its own KV cache. An engaged model first prefills all tokens that it missed, including the prompt,
together with the last token, in passes of at most `prefill_step_size` tokens; usually in one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..errors import GearbxError
from ..gears.activations import model_dtype, stored_dtype
from ..gears.cost import token_bytes
from ..gears.discovery import tied_head, vocabulary
from ..gears.gearbox import attached
from ..gears.ladder import Gear
from ..routing.gates import AUTO, Gate, Reading
from ..routing.pair import EAD_BITS, NAMES, first_model, pair_gate, pair_monitor, scaled
from ..telemetry.summary import Tally
from .caches import length, parts
from .generation import Telemetry, responses
from .governor import Governor
from .hidden import Hidden
from .mode import Mode, check_known
from .modes import PairSettings
from .plan import PREFILL_STEP_SIZE, DecodePlan, DecodeState, Keywords
from .response import GearResponse, Step
from .rows import Verification
from .sampling import not_finite, reader_of

GEARS = tuple(Gear(index, name, 0) for index, name in enumerate(NAMES))  # the models, with their names in responses


class TrailingCache:
    """KV cache of one model of a pair, and the tokens that it has not prefilled; one entry of the pair's cache."""

    def __init__(self, entries: list[Any]):
        self.entries = entries
        self.missed: list[mx.array] = []  # each (1, n)

    @property
    def missing(self) -> int:
        """Number of tokens that the model has not prefilled."""
        return sum(tokens.shape[1] for tokens in self.missed)

    def unread(self, tokens: mx.array) -> mx.array:
        """Return all missed tokens, then `tokens` (1, n), and mark them as prefilled."""
        missed, self.missed = self.missed, []
        return mx.concatenate([*missed, tokens], axis=1) if missed else tokens

    # Interface of mlx-lm's caches.

    @property
    def state(self) -> list[Any]:
        return [self.missed, [entry.state for entry in self.entries]]

    @property
    def total_tokens(self) -> int | None:
        """Number of prefilled and missed tokens; None for caches of states, as they do not count tokens."""
        counted = any(hasattr(part, "offset") for part in parts(self.entries))
        return length(self.entries) + self.missing if counted else None

    @property
    def offset(self) -> int:
        return length(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the prefilled tokens, for mlx-lm's store of prompts."""
        return sum(entry.nbytes for entry in self.entries)

    def is_trimmable(self) -> bool:
        return can_trim_prompt_cache(self.entries)

    def trim(self, n: int) -> int:
        """Remove the last n tokens, missed ones first, and return their number."""
        unread = min(n, self.missing)
        if unread:
            kept = self.missing - unread
            self.missed = [mx.concatenate(self.missed, axis=1)[:, :kept]] if kept else []
        return unread + (trim_prompt_cache(self.entries, n - unread) if n > unread else 0)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "TrailingCache":
        self.entries = [
            entry.to_quantized(group_size=group_size, bits=bits) if hasattr(entry, "to_quantized") else entry
            for entry in self.entries
        ]
        return self


def bytes_read(model: nn.Module) -> int:
    """Return the bytes of weights that a token reads, in the checkpoint's type or in the engaged gear."""
    gearbox = attached(model)
    if gearbox is not None:
        return gearbox.weight_bytes_per_token(gearbox.gear)
    return token_bytes(model, {}, {"": stored_dtype(model)}, tied_head(model))


class PairPass(Verification):
    """A pass of the engaged model over the last token, after the tokens that this model has missed."""

    def __init__(self, verifier: Any, tokens: Sequence[int], cache: Sequence[TrailingCache]):
        engaged = cache[verifier.engaged]
        self._caught_up, self._pair = engaged.missing, verifier
        super().__init__(verifier, tokens, [*engaged.entries, *cache])  # all caches that the pass changes

    @property
    def step(self) -> Step:
        count, passes = math.ceil((self._caught_up + 1) / self._pair.prefill_step_size), [0, 0]
        passes[self.gear.index] = count
        read = count * self._pair.weight_bytes[self.gear.index]
        return Step(self.gear, tuple(passes), read, caught_up=self._caught_up)


class PairVerifier:
    """Verifier of a pair: the engaged model computes, and the other model's cache records the missed tokens.

    Logits have the length of the smaller vocabulary: models of one tokenizer may be padded to different lengths.

    Args:
        small, large: mlx-lm models with the same tokens.
        engaged: 0 for the small model, 1 for the large one; may change between passes.
        prefill_step_size: the most missed tokens per pass.
    """

    def __init__(self, small: nn.Module, large: nn.Module, engaged: int, prefill_step_size: int = PREFILL_STEP_SIZE):
        self.models, self.engaged = (small, large), engaged
        self.vocabulary = min(vocabulary(small), vocabulary(large))
        self.prefill_step_size = prefill_step_size
        self.weight_bytes = bytes_read(small), bytes_read(large)

    @property
    def gear(self) -> Gear:
        return GEARS[self.engaged]

    def prefill(self, tokens: mx.array, cache: Any, **embedded: mx.array) -> Hidden:
        """Prefill a part (n,) of the prompt with the engaged model."""
        self._logits(tokens[None], cache)
        return {}

    def verify(self, tokens: Sequence[int], cache: Any, **embedded: mx.array) -> PairPass:
        """Return a pass of the engaged model over the last token, the only one of `tokens`."""
        return PairPass(self, tokens, cache)

    def run(self, tokens: Sequence[int], cache: Any) -> tuple[mx.array, Hidden, bool]:
        """Return logits (1, 1, V), no states, and False: the pass is not queued, as its entropy is read first.

        Args:
            cache: that of `PairPass`, whose last two entries are the pair's.
        """
        return self._logits(mx.array([[*tokens]], mx.uint32), cache[-len(NAMES) :]), {}, False

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _logits(self, tokens: mx.array, cache: Sequence[TrailingCache]) -> mx.array:
        """Return logits (1, n, V) of the engaged model after tokens (1, n)."""
        model, own = self.models[self.engaged], cache[self.engaged]
        cache[1 - self.engaged].missed.append(tokens)
        new, unread = tokens.shape[1], own.unread(tokens)
        while unread.shape[1] > max(new, self.prefill_step_size):
            step = min(self.prefill_step_size, unread.shape[1] - new)
            model(unread[:, :step], cache=own.entries)
            mx.eval([entry.state for entry in own.entries])
            unread = unread[:, step:]
        logits = model(unread, cache=own.entries)[:, -new:]
        return logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]


def pair_cache(small: nn.Module, large: nn.Module, max_kv_size: int | None = None) -> list[TrailingCache]:
    """Return empty KV caches of two models."""
    return [TrailingCache(make_prompt_cache(model, max_kv_size)) for model in (small, large)]


def check_pair_cache(cache: Sequence[Any]) -> None:
    """Validate that a cache was made for a pair. Raises GearbxError if it was not."""
    if len(cache) != len(NAMES) or not all(isinstance(entry, TrailingCache) for entry in cache):
        raise GearbxError("prompt_cache: must be for two models, got a cache of one; use Pair.make_cache(model)")


@dataclass(frozen=True)
class Pair(PairSettings, Mode):
    """Mode pair: a small model generates while its entropy is low, and the given model the other tokens.

    The keyword `prompt_cache` of stream_generate is a cache of `make_cache`, also after earlier calls. The other
    keywords are mlx-lm's.

    Args:
        gate: replaces threshold and duration, with gear 0 for the small model and 1 for the large one; None: EAD's.
        others: of `PairSettings`.
    """

    name: ClassVar[str] = "pair"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes", "caught_up")
    no_caps_reason: ClassVar[str] = "changes no gear that could be capped"

    gate: Gate | None = None

    def gearbox_for(self, model: nn.Module, gearbox: Any) -> None:
        """Return None, as both models run unchanged. Raises GearbxError for a gearbox, or without a small model."""
        if self.small_model is None:
            raise GearbxError("mode 'pair': needs a small model, got none; pass Pair(small_model)")
        if gearbox is not None:
            raise GearbxError("mode 'pair': runs both models unchanged, got a gearbox; omit it")

    def make_cache(self, model: nn.Module, max_kv_size: int | None = None) -> list[TrailingCache]:
        """Return empty KV caches of the small model and of the large one, `model`, for `prompt_cache`."""
        return pair_cache(self.small_model, model, max_kv_size)

    def stream(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        *,
        gearbox: Any = None,
        controller: Governor | None,
        **kwargs: Any,
    ) -> Iterator[GearResponse]:
        how = Keywords(**kwargs)
        if how.input_embeddings is not None:
            raise GearbxError("mode 'pair': takes no input_embeddings; omit them")
        check_vocabularies(tokenizer, self.small_model, model)
        text = how.text(model, tokenizer, prompt)
        check_known("prompt", text.tokens, min(vocabulary(self.small_model), vocabulary(model)))
        cache = self.make_cache(model, how.max_kv_size) if how.prompt_cache is None else how.prompt_cache
        check_pair_cache(cache)
        threshold = self.threshold_with(model)
        gate = pair_gate(threshold, self.min_gear_duration) if self.gate is None else deepcopy(self.gate)
        first = first_model(threshold) if self.initial_gear == AUTO else NAMES.index(self.initial_gear)
        gate.reset(first)
        verifier = PairVerifier(self.small_model, model, first, how.prefill_step_size)

        def blame(gear: Gear) -> Exception:
            blamed = verifier.models[gear.index]
            return not_finite(blamed, f"the {gear.name} model", model_dtype(blamed))

        def on_reading(reading: Reading) -> None:
            verifier.engaged = gate.update(reading)

        # As in EAD 3.1, the entropy is measured before temperature, but after logits processors.
        telemetry = Telemetry(pair_monitor(verifier.vocabulary, self.window), blame)
        plan = DecodePlan(verifier, how, how.chooser(), reader_of())
        return responses(plan, DecodeState(text, cache), tokenizer, telemetry, on_reading=on_reading)

    def threshold_with(self, large: nn.Module) -> float:
        """Return the given threshold in bits, or EAD's, scaled to the vocabulary."""
        both = min(vocabulary(self.small_model), vocabulary(large))
        return scaled(EAD_BITS, both) if self.threshold is None else self.threshold

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {
            "shares": {name: tally.mean(count) for name, count in tally.gear_tokens.items()},
            "caught_up_tokens": tally.caught_up,
        }

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("switches", f"{summary['shifts']}; {summary['caught_up_tokens']} tokens prefilled by the other model")]


def check_vocabularies(tokenizer: Any, *models: nn.Module) -> None:
    """Validate that models have all tokens of the tokenizer. Raises GearbxError if one does not."""
    tokens = len(tokenizer.get_vocab())
    for name, model in zip(NAMES, models):
        if vocabulary(model) < tokens:
            raise GearbxError(
                f"{name} model: must have a vocabulary of {tokens} tokens or more, got {vocabulary(model)}; "
                "use two models of one tokenizer"
            )
