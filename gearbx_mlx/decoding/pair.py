"""Mode pair: two models of one tokenizer take turns (EAD 3): rolling entropy chooses the one for the next token.

Unlike a shift in mode `route`, a switch acts on the very next token, as in EAD's Algorithm 1. So the entropy is waited
for before the next pass begins. Pair is the loop of `loop.py` with nothing proposed, and a verifier that runs the model
whose turn it is.

Each model has a KV cache of its own. A model that was away has not read the tokens of the other one. When it comes
back, it reads all of them and the last token in one pass, so that every generated token is one pass of one model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from .caches import Snapshot, length, parts
from .generation import PREFILL_STEP_SIZE, Keywords, Telemetry, responses, tokenizer_for
from .governor import Governor
from .loop import DecodePlan, DecodeState
from .mode import Mode
from .modes import PairSettings
from .response import GearResponse, Step
from .sampling import not_finite, reader_of

GEARS = tuple(Gear(index, name, 0) for index, name in enumerate(NAMES))  # the models, as responses name them


class TrailingCache:
    """The KV cache of one model of a pair, and the tokens that it has not read yet; one entry of the pair's cache."""

    def __init__(self, entries: list[Any]):
        self.entries = entries
        self.missed: list[mx.array] = []  # each (1, n)

    @property
    def missing(self) -> int:
        """How many tokens the model has not read."""
        return sum(tokens.shape[1] for tokens in self.missed)

    def unread(self, tokens: mx.array) -> mx.array:
        """Return all that was missed, then `tokens` (1, n); as read from now on."""
        missed, self.missed = self.missed, []
        return mx.concatenate([*missed, tokens], axis=1) if missed else tokens

    # The face of mlx-lm's caches.

    @property
    def state(self) -> list[Any]:
        return [self.missed, [entry.state for entry in self.entries]]

    @property
    def given(self) -> int | None:
        """Tokens that were read or missed; None where the entries are states, which do not count."""
        counted = any(hasattr(part, "offset") for part in parts(self.entries))
        return length(self.entries) + self.missing if counted else None

    @property
    def offset(self) -> int:
        return length(self.entries)

    @property
    def nbytes(self) -> int:
        """Of what was read, for mlx-lm's store of prompts."""
        return sum(entry.nbytes for entry in self.entries)

    def is_trimmable(self) -> bool:
        return can_trim_prompt_cache(self.entries)

    def trim(self, n: int) -> int:
        """Forget the last n tokens: first those that were never read."""
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
    """Return bytes of weights that a token reads, in the type of the checkpoint, or in the gear that is engaged."""
    gearbox = attached(model)
    if gearbox is not None:
        return gearbox.weight_bytes_per_token(gearbox.gear)
    return token_bytes(model, {}, {"": stored_dtype(model)}, tied_head(model))


@dataclass
class PairPass:
    """One pass of one model over the last token, and over those that it had missed.

    Attributes:
        logits: (1, 1, V) after the last token.
        step: how the token comes about.
        kept: whether the last token is in the KV cache: 1, until `keep` changes it.
    """

    logits: mx.array
    step: Step
    undo: Callable[[], None]
    count: int = 1
    kept: int = 1

    def keep(self, rows: int) -> None:
        """Leave the cache as it is after the last token (1), or before the pass (0)."""
        self.kept = rows
        if not rows:
            self.undo()

    def steps(self, proposal: Any, accepted: int, **of_cache: Any) -> Iterator[Step]:
        yield self.step


class Turns:
    """The verifier of a pair: the engaged model computes, the cache of the other one notes what it misses.

    Args:
        small, large: mlx-lm models over the same tokens.
        engaged: SMALL or LARGE; it may be set before any pass.
        prefill_step_size: the most tokens that one pass catches up.

    Logits are as long as those of the smaller vocabulary: models of one tokenizer may be padded to different lengths.
    """

    def __init__(self, small: nn.Module, large: nn.Module, engaged: int, prefill_step_size: int = PREFILL_STEP_SIZE):
        self.models, self.engaged = (small, large), engaged
        self.vocabulary = min(vocabulary(small), vocabulary(large))
        self._prefill_step_size = prefill_step_size
        self._weight_bytes = bytes_read(small), bytes_read(large)

    def prefill(self, tokens: mx.array, cache: Any, **embedded: mx.array) -> None:
        """Read a part (n,) of the prompt with the engaged model."""
        self._logits(tokens[None], cache)

    def verify(self, tokens: Sequence[int], cache: Any, **embedded: mx.array) -> PairPass:
        """Return the logits of the engaged model after the last token, the only one."""
        own = cache[self.engaged]
        before, missed = Snapshot(own.entries), [list(each.missed) for each in cache]

        def undo() -> None:
            before.restore()
            for each, unread in zip(cache, missed):
                each.missed = unread

        caught_up = own.missing
        try:
            logits, count = self._logits(mx.array([[*tokens]], mx.uint32), cache)
        except BaseException:
            undo()
            raise
        passes = (0, count) if self.engaged else (count, 0)
        read = sum(n * size for n, size in zip(passes, self._weight_bytes))
        return PairPass(logits, Step(GEARS[self.engaged], passes, read, caught_up=caught_up), undo)

    def computes_at_once(self, cache: Any) -> bool:
        return True  # the entropy of a token is waited for before the next pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _logits(self, tokens: mx.array, cache: Sequence[TrailingCache]) -> tuple[mx.array, int]:
        """Return logits (1, n, V) of the engaged model after tokens (1, n), and the number of its passes."""
        model, own = self.models[self.engaged], cache[self.engaged]
        cache[1 - self.engaged].missed.append(tokens)
        new = tokens.shape[1]
        unread, passes = own.unread(tokens), 1
        while unread.shape[1] > max(new, self._prefill_step_size):
            step = min(self._prefill_step_size, unread.shape[1] - new)
            model(unread[:, :step], cache=own.entries)
            mx.eval([entry.state for entry in own.entries])
            unread, passes = unread[:, step:], passes + 1
        logits = model(unread, cache=own.entries)[:, -new:]
        return (logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]), passes


def pair_cache(small: nn.Module, large: nn.Module, max_kv_size: int | None = None) -> list[TrailingCache]:
    """Return empty KV caches of two models."""
    return [TrailingCache(make_prompt_cache(model, max_kv_size)) for model in (small, large)]


def check_pair_cache(cache: Sequence[Any]) -> None:
    """Raises GearbxError for a cache that was not made for a pair."""
    if len(cache) != len(NAMES) or not all(isinstance(entry, TrailingCache) for entry in cache):
        raise GearbxError("a pair has two models, and this prompt cache one; make it with Pair.make_cache(model)")


@dataclass(frozen=True)
class Pair(PairSettings, Mode):
    """Let a small model write what it is sure of, and the model that is given to stream_generate the rest.

    Keywords of stream_generate: `prompt_cache` is one of `make_cache`, as an earlier call left it; the others are
    mlx-lm's.

    Args:
        gate: a Gate of your own in place of threshold and duration, 0 for the small model and 1 for the large one.
        others: of `PairSettings`.
    """

    name: ClassVar[str] = "pair"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes", "caught_up")
    uncapped: ClassVar[str] = "changes no gear, so there is nothing to cap"

    gate: Gate | None = None

    def gearbox_for(self, model: nn.Module, gearbox: Any) -> None:
        """None: both models run as they are. Raises GearbxError for a gearbox, or without a small model."""
        if self.small_model is None:
            raise GearbxError("mode 'pair' needs a small model; give Pair(small_model)")
        if gearbox is not None:
            raise GearbxError("mode 'pair' runs both models as they are; leave the gearbox out")

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
        how, tokenizer = Keywords(**kwargs), tokenizer_for(tokenizer)
        if how.input_embeddings is not None:
            raise GearbxError("mode 'pair' has no input_embeddings; leave it out")
        check_vocabularies(tokenizer, self.small_model, model)
        text = how.text(model, tokenizer, prompt)
        cache = self.make_cache(model, how.max_kv_size) if how.prompt_cache is None else how.prompt_cache
        check_pair_cache(cache)
        threshold = self.threshold_with(model)
        gate = pair_gate(threshold, self.min_gear_duration) if self.gate is None else self.gate
        first = first_model(threshold) if self.initial_gear == AUTO else NAMES.index(self.initial_gear)
        gate.reset(first)
        turns = Turns(self.small_model, model, first, how.prefill_step_size)

        def blame(gear: Gear) -> Exception:
            blamed = turns.models[gear.index]
            return not_finite(blamed, f"the {gear.name} model", model_dtype(blamed))

        def judge(reading: Reading) -> None:
            turns.engaged = gate.update(reading)

        # The entropy is that before temperature (EAD 3.1), after logits processors if there are any.
        telemetry = Telemetry(pair_monitor(turns.vocabulary, self.window), blame)
        plan = DecodePlan(turns, how.chooser(), reader_of(), **how.of_plan())
        return responses(plan, DecodeState(text, cache), tokenizer, telemetry, judge=judge)

    def threshold_with(self, large: nn.Module) -> float:
        """Return the threshold in bits: the one that is given, or EAD's, scaled to the vocabulary."""
        both = min(vocabulary(self.small_model), vocabulary(large))
        return scaled(EAD_BITS, both) if self.threshold is None else self.threshold

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {
            "shares": {name: tally.mean(count) for name, count in tally.gear_tokens.items()},
            "caught_up_tokens": tally.caught_up,
        }

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("switches", f"{summary['shifts']}; {summary['caught_up_tokens']} tokens read to catch up")]


def check_vocabularies(tokenizer: Any, *models: nn.Module) -> None:
    """Raises GearbxError for a model that has fewer tokens than the tokenizer."""
    tokens = len(tokenizer.get_vocab())
    for name, model in zip(NAMES, models):
        if vocabulary(model) < tokens:
            raise GearbxError(
                f"the {name} model has a vocabulary of {vocabulary(model)}, and the tokenizer one of {tokens}; "
                "a pair needs models of one tokenizer"
            )
