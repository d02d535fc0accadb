"""Mode pair: two models of one tokenizer take turns (EAD 3): rolling entropy chooses the one for the next token.

Unlike a shift in mode `route`, a switch acts on the very next token, as in EAD's Algorithm 1. So the entropy is waited
for before the next pass is dispatched: mlx-lm does not run ahead.

Both models stand behind the interface of one. Each has a KV cache of its own. A model that was away has not read what
the other one wrote meanwhile. When it comes back, it reads all of that and the last token in one pass, so that every
generated token is one pass of one model.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..errors import GearbxError
from ..gears.activations import model_dtype, stored_dtype
from ..gears.cost import token_bytes
from ..gears.discovery import tied_head, vocabulary
from ..gears.gearbox import attached
from ..routing.gates import AUTO, Gate, Monitor, Reading
from ..routing.pair import EAD_BITS, NAMES, SMALL, first_model, pair_gate, pair_monitor, scaled
from ..telemetry.summary import Tally
from .caches import length, parts
from .governor import Governor
from .mode import Mode
from .modes import PairSettings
from .response import GearResponse
from .sampling import has_nan, not_finite, reader_of

PREFILL_STEP_SIZE = 2048  # tokens of a prompt at once, as in mlx-lm


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


@dataclass(frozen=True)
class Call:
    """The model that ran, the passes over the weights of (small, large), and how many missed tokens they read."""

    engaged: int
    passes: tuple[int, int] = (0, 0)
    caught_up: int = 0


def bytes_read(model: nn.Module) -> int:
    """Return bytes of weights that a token reads, in the type of the checkpoint, or in the gear that is engaged."""
    gearbox = attached(model)
    if gearbox is not None:
        return gearbox.weight_bytes_per_token(gearbox.gear)
    return token_bytes(model, {}, {"": stored_dtype(model)}, tied_head(model))


class PairedModel(nn.Module):
    """Two models behind the interface of one: the engaged one computes, the other's cache notes what it misses.

    Args:
        small, large: mlx-lm models over the same tokens.
        prefill_step_size: the most tokens that one pass catches up.

    `engaged` is SMALL or LARGE and may be set before any call. Logits are as long as those of the smaller vocabulary:
    models of one tokenizer may be padded to different lengths. `last` tells of the last call, and `weight_bytes` what a
    pass of (small, large) reads.
    """

    def __init__(self, small: nn.Module, large: nn.Module, prefill_step_size: int = PREFILL_STEP_SIZE):
        super().__init__()
        self.small, self.large = small, large
        self.vocab_size = min(vocabulary(small), vocabulary(large))
        self.prefill_step_size = prefill_step_size
        self.engaged = SMALL
        self.last = Call(SMALL)
        self.weight_bytes = bytes_read(small), bytes_read(large)

    def make_cache(self, max_kv_size: int | None = None) -> list[TrailingCache]:
        return [TrailingCache(make_prompt_cache(model, max_kv_size)) for model in (self.small, self.large)]

    def __call__(self, tokens: mx.array, cache: Sequence[TrailingCache]) -> mx.array:
        """Logits (1, n, V) of the engaged model after tokens (1, n).

        Raises:
            GearbxError: a batch of more than one, or a cache that is not of a pair.
        """
        if len(tokens) != 1:
            raise GearbxError(f"two models take turns at one text, and this is a batch of {len(tokens)}")
        check_pair_cache(cache)
        model, own = (self.small, self.large)[self.engaged], cache[self.engaged]
        cache[1 - self.engaged].missed.append(tokens)
        caught_up, new = own.missing, tokens.shape[1]
        unread, passes = own.unread(tokens), 1
        while unread.shape[1] > max(new, self.prefill_step_size):
            step = min(self.prefill_step_size, unread.shape[1] - new)
            model(unread[:, :step], cache=own.entries)
            mx.eval([entry.state for entry in own.entries])
            unread, passes = unread[:, step:], passes + 1
        logits = model(unread, cache=own.entries)
        self.last = Call(self.engaged, (0, passes) if self.engaged else (passes, 0), caught_up)
        if caught_up:
            logits = logits[:, -new:]
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]


def check_pair_cache(cache: Sequence[Any]) -> None:
    """Raises GearbxError for a cache that was not made for a pair."""
    if len(cache) != len(NAMES) or not all(isinstance(entry, TrailingCache) for entry in cache):
        raise GearbxError("a pair has two models, and this prompt cache one; make it with PairedModel.make_cache()")


@dataclass(frozen=True)
class Pair(PairSettings, Mode):
    """Let a small model write what it is sure of, and the model that is given to stream_generate the rest.

    Keywords of stream_generate: `prompt_cache` is one of a PairedModel (`make_cache`), as an earlier call left it;
    the others are mlx-lm's.

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

    def stream(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        *,
        gearbox: Any = None,
        controller: Governor | None,
        max_kv_size: int | None = None,
        prompt_cache: Any = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        **kwargs: Any,
    ) -> Iterator[GearResponse]:
        assert self.small_model is not None
        if kwargs.pop("input_embeddings", None) is not None:
            raise GearbxError("mode 'pair' has no input_embeddings; leave it out")
        check_vocabularies(tokenizer, self.small_model, model)
        pair = PairedModel(self.small_model, model, prefill_step_size)
        gate = self.gate_for(pair)
        prompt_cache = pair.make_cache(max_kv_size) if prompt_cache is None else prompt_cache
        check_pair_cache(prompt_cache)
        monitor = pair_monitor(pair.vocab_size, self.window)
        sampler = kwargs.pop("sampler", None) or make_sampler()
        kwargs |= {"prompt_cache": prompt_cache, "prefill_step_size": prefill_step_size}
        return in_turns(pair, gate, monitor, sampler, tokenizer, prompt, **kwargs)

    def gate_for(self, pair: PairedModel) -> Gate:
        """Return the gate, after it has engaged the first model."""
        threshold = self.threshold_with(pair.large)
        gate = pair_gate(threshold, self.min_gear_duration) if self.gate is None else self.gate
        pair.engaged = first_model(threshold) if self.initial_gear == AUTO else NAMES.index(self.initial_gear)
        gate.reset(pair.engaged)
        return gate

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


def in_turns(
    pair: PairedModel,
    gate: Gate,
    monitor: Monitor,
    sampler: Callable[[mx.array], mx.array],
    tokenizer: Any,
    prompt: Any,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """mlx-lm's responses, each with what its sampler read, which engages the model for the next token, then samples.

    The entropy is that before temperature (EAD 3.1), after logits processors if there are any.

    Args:
        kwargs: of mlx-lm's stream_generate.
    """
    entropy = reader_of().entropy
    before: int | None = None
    readings: deque[tuple[Reading, Call]] = deque()

    def sample(logprobs: mx.array) -> mx.array:
        reading = monitor.update(float(entropy(logprobs).squeeze()))
        readings.append((reading, pair.last))
        pair.engaged = gate.update(reading)
        return sampler(logprobs)

    for response in mlx_stream_generate(pair, tokenizer, prompt, sampler=sample, **kwargs):
        reading, call = readings.popleft()
        if has_nan(response.logprobs, reading.value):
            model = (pair.small, pair.large)[call.engaged]
            raise not_finite(model, f"the {NAMES[call.engaged]} model", model_dtype(model))
        yield GearResponse(
            **vars(response),
            entropy=reading.value,
            mean_entropy=reading.mean,
            gear=NAMES[call.engaged],
            shifted=before is not None and call.engaged != before,
            passes=call.passes,
            weight_bytes=sum(n * read for n, read in zip(call.passes, pair.weight_bytes)),
            caught_up=call.caught_up,
        )
        before = call.engaged


def check_vocabularies(tokenizer: Any, *models: nn.Module) -> None:
    """Raises GearbxError for a model that has fewer tokens than the tokenizer."""
    tokens = len(tokenizer.get_vocab())
    for name, model in zip(NAMES, models):
        if vocabulary(model) < tokens:
            raise GearbxError(
                f"the {name} model has a vocabulary of {vocabulary(model)}, and the tokenizer one of {tokens}; "
                "a pair needs models of one tokenizer"
            )
