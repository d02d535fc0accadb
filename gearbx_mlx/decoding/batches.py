"""mlx-lm's continuous batching in gears: all sequences of a step share the weights, and therefore the gear.

The prompt of a new sequence and its first token are computed in its own gears. So the KV cache of the prompt does not
depend on other sequences. Prompts with the same gears share a pass. Models with recurrent layers prefill one prompt at
a time, since some of mlx-lm's classes include the padding of shorter prompts in their state.

Afterwards a policy chooses the gear of each step from all requested gears. mlx-lm runs one token ahead, so a request
affects the second token after it.

All arguments for new sequences are validated before any sequence is added.
"""

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from numbers import Integral
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator as MlxBatchGenerator
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..compat.arrays import OwnRandomState
from ..compat.loops import GearedPrompts, GearedTokens, StagedGenerator
from ..errors import GearbxError, choose, one_line
from ..files.model_directory import context_length
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..routing.gates import BatchPolicy, Gate, Monitor, Reading, highest
from .caches import Cache, parts
from .mode import Mode, check_known, decode_lock, vocabulary_of
from .response import BatchGearResponse, Step, single_pass, telemetry_of
from .sampling import Chooser, Processor, Sampler, blame_of, has_nan, reader_of, sampled_rows, sampler_beside

BATCH_SIZES = ("max_tokens", "completion_batch_size", "prefill_batch_size", "prefill_step_size")
BATCH_SETTINGS = frozenset(inspect.signature(MlxBatchGenerator.__init__).parameters) - {"self", "model"}


@dataclass(frozen=True)
class RowTelemetry:
    """One row of a pass, and the gear that its sequence requested then.

    Attributes:
        step: of the pass; its bytes are the share of one row.
        batch_size: number of sequences in the pass.
        entropies: waits for the pass and returns its entropies, bits.
    """

    step: Step
    batch_size: int
    entropies: Callable[[], np.ndarray]
    row: int
    requested_gear: Gear

    @property
    def entropy(self) -> float:
        return float(self.entropies()[self.row])


@dataclass
class SequenceState:
    """A sequence of a batch, with its own monitor, gate and chooser.

    first: gear of the first pass that generates; it reads the prompt's last token. prompt_gear: of the other tokens.
    """

    gate: Gate
    monitor: Monitor
    first: Gear
    prompt_gear: Gear
    chooser: Chooser = field(default_factory=Chooser)
    before: Gear | None = None  # the previous token's gear
    rows: deque[RowTelemetry] = field(default_factory=deque)
    """Rows of tokens that are computed and not yet returned, since mlx-lm runs one token ahead."""

    def __post_init__(self) -> None:
        self.requested_gear = self.first
        self.gate.reset(self.first.index)


@dataclass(frozen=True)
class SharedMode(Mode):
    """Base class of modes whose sequences share passes."""

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> SequenceState:
        """Return the state of a sequence from its prompt, which is text or tokens."""
        raise NotImplementedError

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> "BatchGenerator":
        return BatchGenerator(model, tokenizer, gearbox, self, policy, **kwargs)


def guarded_processor(processor: Processor, owner: Chooser) -> Processor:
    """Return a processor that raises no errors: it sets the owner's error, and NaN logits end the sequence."""

    def processed(tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            return processor(tokens, logits)
        except Exception as error:
            owner.error = GearbxError(f"logits processor: failed with {one_line(error)}; omit it")
            owner.error.__cause__ = error
            return mx.full(logits.shape, mx.nan, logits.dtype)

    return processed


class RowSampler:
    """Sampler of all rows of a pass: for mlx-lm, all sequences have the same one.

    It records entropy and step of each row, and samples the row as its sequence would on its own. Rows without their
    own sampler and seed are sampled together, as in mlx-lm.
    """

    def __init__(self, gearbox: Gearbox | Observer):
        self.gearbox, self.reader = gearbox, reader_of(gearbox)
        self.sequences: Sequence[SequenceState] = ()
        """Sequences of the rows of a pass, in order."""

    def __call__(self, logprobs: mx.array) -> mx.array:
        entropies = self.reader.entropy(logprobs)
        step = single_pass(self.gearbox, self.gearbox.gear, len(logprobs))
        step = replace(step, weight_bytes=step.weight_bytes // len(logprobs))
        read = cache(lambda: np.array(entropies).reshape(-1))
        for row, each in enumerate(self.sequences):
            each.rows.append(RowTelemetry(step, len(logprobs), read, row, each.requested_gear))
        sampled = sampled_rows([each.chooser for each in self.sequences], logprobs)
        return mx.depends([sampled], [entropies])[0]  # so that one evaluation computes tokens and entropies


class BatchGenerator(StagedGenerator):
    """Generator of sequences that join and leave at any step.

    Args:
        mode: of sequences without their own.
        policy: chooses the gear of a step from the requested gears.
        sampler: of sequences without their own.
        settings: other keywords of mlx-lm's BatchGenerator.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        gearbox: Gearbox | Observer,
        mode: SharedMode,
        policy: BatchPolicy,
        sampler: Sampler | None = None,
        **settings: Any,
    ):
        check_batch_settings(settings)
        empty = make_prompt_cache(model)
        if kind := unmergeable(empty):
            raise GearbxError(f"batch: sequences cannot share the model's {kind}; use stream_generate for each prompt")
        # Recurrent layers have a state instead of keys and values.
        self._has_states = any(isinstance(part, ArraysCache) for part in parts(empty))
        self.tokenizer, self.gearbox, self.mode, self.policy = tokenizer, gearbox, mode, policy
        self.sequences: dict[int, SequenceState] = {}
        self._sampler = sampler
        self._rows = rows = RowSampler(gearbox)
        stops = [[token] for token in tokenizer.eos_token_ids]
        super().__init__(model, **{"stop_tokens": stops, **settings}, sampler=rows)
        prefill_pass = partial(self._pass, lambda batch: batch[0].prompt_gear)  # the same gear for all of them
        first_token_pass = partial(self._pass, lambda batch: batch[0].first)
        decode_pass = partial(self._pass, lambda batch: self._policy_gear([one.requested_gear.index for one in batch]))
        passes, logsumexp = (prefill_pass, first_token_pass), rows.reader.logsumexp
        prompts = GearedPrompts.of(model, rows, self.prefill_step_size, passes, logsumexp)
        self.use(GearedTokens.of(model, rows, decode_pass, logsumexp), prompts)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[Any] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: list[Any] | None = None,
        logits_processors: list[Any] | None = None,
        stop_sequences: list[Any] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        modes: Sequence[SharedMode] | None = None,
    ) -> list[int]:
        """Add sequences as mlx-lm's method does, and return their ids.

        Args:
            segments: the prompts of N sequences, each in parts.
            seeds: of sequences with their own random numbers: those of single sequences after
                `mx.random.seed(seed)`.
            modes: with the settings of each sequence, such as its thresholds.

        Raises:
            GearbxError: an empty prompt, one beyond the context, no room for a token, lists of different lengths. No
                sequence is added then.
        """
        lists = {"max_tokens": max_tokens, "caches": caches, "all_tokens": all_tokens, "samplers": samplers}
        lists |= {"logits_processors": logits_processors, "stop_sequences": stop_sequences}
        check_sequences(self.model, vocabulary_of(self.gearbox), segments, {**lists, "seeds": seeds, "modes": modes})
        count = len(segments)
        read = all_tokens or [[]] * count
        prompts = [[*before, *itertools.chain(*segment)] for before, segment in zip(read, segments)]
        chosen = zip(modes or [self.mode] * count, prompts)
        joined = [mode.sequence(self.gearbox, self.tokenizer, prompt) for mode, prompt in chosen]
        none = [None] * count
        processors = logits_processors or [self.logits_processors] * count
        for text, sampler, seed, given in zip(joined, samplers or none, seeds or none, processors):
            chooser = text.chooser = Chooser(sampler_beside(self.gearbox, sampler or self._sampler))
            chooser.random = None if seed is None else OwnRandomState(seed)
            chooser.processors = [guarded_processor(each, chooser) for each in given or ()]
        guarded = [text.chooser.processors for text in joined]
        uids = super().insert_segments(segments, max_tokens, caches, all_tokens, None, guarded, stop_sequences)
        self.sequences |= zip(uids, joined)
        return uids

    def insert(self, prompts: list[list[int]], *arguments: Any, **keywords: Any) -> list[int]:
        """Add prompts that are not in parts; see `insert_segments`."""
        return self.insert_segments([[prompt] for prompt in prompts], *arguments, **keywords)

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        caches = super().remove(uids, return_prompt_caches)
        for uid in uids:
            self.sequences.pop(uid, None)
        return caches

    def readable(self, waiting: Sequence[int], reading: Sequence[int], most: int) -> int:
        """Return how many waiting prompts may join: those with the same gears, or one if padding changes states."""
        batch = [self.sequences[uid] for uid in (*reading[:1], *waiting)]
        gears = [(text.prompt_gear, text.first) for text in batch]
        alike = next((place for place, gear in enumerate(gears[-len(waiting) :]) if gear != gears[0]), most)
        return min(alike, 1 - len(reading)) if self._has_states else alike

    def seen(self, step: Callable[[], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[BatchGearResponse]]:
        """Run a step of mlx-lm's generator under the gearbox's lock; return its responses with telemetry."""
        with decode_lock(self.gearbox):
            prompts, tokens = step()
            return prompts, self._seen(tokens)

    @contextmanager
    def _pass(self, gear: Callable[[Sequence[SequenceState]], Gear], uids: Sequence[int]) -> Iterator[None]:
        """Run a pass over rows of these sequences in the chosen gear."""
        batch = [self.sequences[uid] for uid in uids]
        if batch:
            self.gearbox.shift(gear(batch))
        before, self._rows.sequences = self._rows.sequences, batch
        try:
            yield
        finally:
            self._rows.sequences = before

    def _policy_gear(self, requested: Sequence[int]) -> Gear:
        """Return the policy's gear. Raises GearbxError if it is not in the ladder."""
        chosen, ladder = self.policy(requested), self.gearbox.ladder
        if not is_whole_number(chosen, 0) or chosen >= len(ladder):
            raise GearbxError(f"batch policy: must return 0 to {len(ladder) - 1}, got {chosen!r}; use one of these")
        return ladder[int(chosen)]

    def _seen(self, tokens: Sequence[GenerationBatch.Response]) -> list[BatchGearResponse]:
        """Return mlx-lm's responses with telemetry, and update each sequence's requested gear."""
        responses, forecasts = [], []
        failed: set[int] = set()
        for token in tokens:
            each = self.sequences[token.uid]
            row = each.rows.popleft()
            reading = each.monitor.update(row.entropy)
            each.requested_gear = self.gearbox.ladder[each.gate.update(reading)]
            forecasts.append(each.gate.peek(reading.forecast))
            responses.append(self._response(token, each, row, reading))
            each.before = row.step.gear
            if responses[-1].error is not None:
                failed.add(token.uid)
            if token.finish_reason is not None:
                del self.sequences[token.uid]
        if forecasts:
            self.gearbox.prepare(self._policy_gear(forecasts))
        self.remove([*failed])
        return responses

    def _response(
        self, token: GenerationBatch.Response, each: SequenceState, row: RowTelemetry, reading: Reading
    ) -> BatchGearResponse:
        error = None
        if has_nan(token.logprobs, row.entropy):
            error = each.chooser.error or blame_of(self.gearbox)(row.step.gear)
        shown = vars(token) | telemetry_of(row.step, reading, each.before)
        requested = row.requested_gear.name
        return BatchGearResponse(**shown, batch_size=row.batch_size, requested_gear=requested, error=error)


def check_sequences(
    model: nn.Module,
    vocabulary: int,
    segments: Sequence[Sequence[Sequence[int]]],
    lists: Mapping[str, Sequence[Any] | None],
) -> None:
    """Validate the arguments of new sequences. Raises GearbxError for the first invalid one.

    Args:
        lists: the other arguments of `insert_segments`, with one entry per sequence, or None.
    """
    for name, given in lists.items():
        if given is not None and len(given) != len(segments):
            raise GearbxError(f"{name}: must have one entry per prompt, got {len(given)} for {len(segments)}; pass all")
    context = context_length(vars(model.args)) if hasattr(model, "args") else None
    layers = len(make_prompt_cache(model)) if lists["caches"] else 0
    for place, prompt in enumerate(segments):
        own = {name: given[place] for name, given in lists.items() if given is not None}
        tokens = [*itertools.chain(*prompt)]
        if not tokens:
            raise GearbxError(f"prompts[{place}]: must have tokens, got none; pass one token or more")
        count = len(own.get("all_tokens", ())) + len(tokens)
        if context is not None and count >= context:
            raise GearbxError(
                f"prompts[{place}]: must be below the context of {context}, got {count}; use fewer tokens"
            )
        check_known(f"prompts[{place}]", tokens, vocabulary)
        if not is_whole_number(own.get("max_tokens", 1), 1):
            raise GearbxError(f"max_tokens[{place}]: must be 1 or more, got {own['max_tokens']!r}; set a larger number")
        if own.get("seeds") is not None and not is_whole_number(own["seeds"], 0):
            raise GearbxError(f"seeds[{place}]: must be a whole number from 0, got {own['seeds']!r}; use one, or None")
        if own.get("caches") is not None:
            check_shared_cache(f"prompt_caches[{place}]", own["caches"], layers)
        processors = own.get("logits_processors")
        if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
            raise GearbxError(f"logits_processors[{place}]: must be functions, got {processors!r}; pass a list")


def is_whole_number(value: Any, least: int) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_shared_cache(name: str, cache: Sequence[Any], layers: int) -> None:
    """Validate that a KV cache has the model's layers and can join a batch. Raises GearbxError if it cannot."""
    if len(cache) != layers:
        raise GearbxError(f"{name}: must have {layers} layers for this model, got {len(cache)}; use this model's cache")
    if kind := unmergeable(cache):
        raise GearbxError(f"{name}: sequences cannot share a {kind}; use stream_generate for this prompt")


def check_batch_settings(settings: Mapping[str, Any]) -> None:
    """Validate keywords of mlx-lm's BatchGenerator. Raises GearbxError for unknown ones, and for sizes below 1."""
    for name, value in settings.items():
        if name.startswith("kv_") or (name == "max_kv_size" and value is not None):
            raise GearbxError(f"{name}: is not available in batches; omit it, or use stream_generate for each prompt")
        if name not in BATCH_SETTINGS:
            raise GearbxError(f"batch: has no {name}; {choose(name, sorted(BATCH_SETTINGS))}")
        if name in BATCH_SIZES and not is_whole_number(value, 1):
            raise GearbxError(f"{name}: must be 1 or more, got {value!r}; set a larger number")


def unmergeable(cache: Cache) -> str | None:
    """Return the class of the first part of a KV cache that cannot join a batch; None without."""
    return next((type(part).__name__ for part in cache if not hasattr(part, "merge")), None)
