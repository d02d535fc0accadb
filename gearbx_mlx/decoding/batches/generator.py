"""mlx-lm's continuous batching in gears: all sequences of a step share the weights, and so its gear.

A newcomer's prompt and its first token are computed in its own first gear, as they would be alone, so that its KV cache
does not depend on its company; prompts share a pass with those of the same first gear. Recurrent layers read prompts
one by one: not all of mlx-lm's classes leave the padding of a shorter prompt out of their state.

From then on the gear of a step is what a policy makes of all wishes. mlx-lm runs one token ahead, so a wish acts two
tokens after the one that caused it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator as MlxBatchGenerator
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.sample_utils import make_sampler

from ...errors import GearbxError
from ...gears.gearbox import Gearbox, Observer
from ...gears.ladder import Gear
from ...routing.batch_policy import BatchPolicy
from ...routing.monitor import Reading
from ..entropy import fast_entropy
from ..finite import check_finite
from ..known_vocabulary import vocabulary_of
from ..random_state import OwnRandomState
from ..response import BatchGearResponse
from ..responses import seen_of
from ..sampler import Sampler
from ..step import Step, single_pass
from ..turns import turn
from .checks import Sequences, check_mergeable, check_settings, gear_of, has_states
from .processors import guarded
from .row_sampler import RowSampler
from .sequence import BatchText, SeenRow
from .stages import GearedPrompts, GearedTokens


class OfOneText(Protocol):
    """A mode whose texts share passes."""

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """What a text has of its own, by the tokens of its prompt."""
        ...


class BatchGenerator(MlxBatchGenerator):
    """Writes many texts at once; sequences join and leave at any step.

    Args:
        mode: of sequences that bring none.
        policy: the gear of a step, by the wishes of its sequences.
        sampler: of sequences that bring none.
        settings: further keywords of mlx-lm's BatchGenerator.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        gearbox: Gearbox | Observer,
        mode: OfOneText,
        policy: BatchPolicy,
        sampler: Sampler | None = None,
        **settings: Any,
    ):
        self._old_wired_limit = None  # mlx-lm looks at it at the end, and it may never come to be set
        check_settings(settings)
        check_mergeable(model)
        self._has_states = has_states(model)
        self.tokenizer, self.gearbox, self.mode, self.policy = tokenizer, gearbox, mode, policy
        self.sequences: dict[int, BatchText] = {}
        rows = RowSampler(sampler or make_sampler(), self._single_pass, fast_entropy(gearbox))
        stops = [[token] for token in tokenizer.eos_token_ids]
        super().__init__(model, **{"stop_tokens": stops, **settings}, sampler=rows)
        self._rows = rows
        self._generation_batch = GearedTokens.of(model, rows, self._writing)
        self._prompt_batch = GearedPrompts.of(model, rows, self.prefill_step_size, self._reading)

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
        modes: Sequence[OfOneText] | None = None,
    ) -> list[int]:
        """Add sequences, as mlx-lm's method does; returns their ids.

        Args:
            segments: the prompts of N sequences, each in parts.
            seeds: of sequences that draw random numbers of their own, so that their texts are those that they get
                alone after `mx.random.seed(seed)`.
            modes: with the settings of each sequence, such as its thresholds.

        Raises:
            GearbxError: an empty prompt, one beyond the context, no room for a token, lists of unlike length. No
                sequence is added then.
        """
        given = Sequences(
            segments, max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences, seeds, modes
        )
        given.check(self.model, vocabulary_of(self.gearbox))
        count = len(segments)
        begun = all_tokens or [[]] * count
        prompts = [[*before, *(t for part in parts for t in part)] for before, parts in zip(begun, segments)]
        joined = [
            mode.sequence(self.gearbox, self.tokenizer, prompt)
            for mode, prompt in zip(modes or [self.mode] * count, prompts)
        ]
        for each, sampler, seed in zip(joined, samplers or [None] * count, seeds or [None] * count):
            each.sampler, each.random = sampler, None if seed is None else OwnRandomState(seed)
        own = [guarded(*given) for given in zip(logits_processors or [self.logits_processors] * count, joined)]
        uids = super().insert_segments(segments, max_tokens, caches, all_tokens, None, own, stop_sequences)
        self.sequences |= zip(uids, joined)
        return uids

    def insert(self, prompts: list[list[int]], *arguments: Any, **keywords: Any) -> list[int]:
        """As `insert_segments`, of prompts that are not in parts."""
        return self.insert_segments([[prompt] for prompt in prompts], *arguments, **keywords)

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        caches = super().remove(uids, return_prompt_caches)
        for uid in uids:
            self.sequences.pop(uid, None)
        return caches

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        """Prompts that are read next, at most n: those of one first gear; one by one where padding leaves traces."""
        waiting = [self.sequences[each[0]].first for each in self._unprocessed_sequences][:n]
        reading = self.sequences[self._prompt_batch.uids[0]].first if self._prompt_batch.uids else waiting[0]
        alike = next((place for place, gear in enumerate(waiting) if gear != reading), n)
        if self._has_states:
            alike = min(alike, 1 - len(self._prompt_batch))
        return super()._make_batch(alike)

    def _next(self) -> tuple[list[Any], list[BatchGearResponse]]:
        with turn(self.gearbox):
            prompts, tokens = super()._next()
            return prompts, self._seen(tokens)

    @contextmanager
    def _writing(self, uids: Sequence[int]) -> Iterator[None]:
        """A pass of all texts, in the gear of the policy."""
        sequences = [self.sequences[uid] for uid in uids]
        self.gearbox.shift(self._policy_gear([each.wish.index for each in sequences]))
        with self._rows.of(sequences):
            yield

    @contextmanager
    def _reading(self, uids: Sequence[int]) -> Iterator[None]:
        """Passes over prompts, and over their last tokens, in the gear that they have in common."""
        sequences = [self.sequences[uid] for uid in uids]
        if sequences:
            self.gearbox.shift(sequences[0].first)
        with self._rows.of(sequences):
            yield

    def _single_pass(self, rows: int) -> Step:
        return single_pass(self.gearbox, self.gearbox.gear, rows)

    def _policy_gear(self, wishes: Sequence[int]) -> Gear:
        return gear_of(self.policy(wishes), self.gearbox.ladder)

    def _seen(self, tokens: Sequence[GenerationBatch.Response]) -> list[BatchGearResponse]:
        """mlx-lm's responses with what was seen of them; each sequence's wish follows its token."""
        responses, forecasts = [], []
        failed: set[int] = set()
        for token in tokens:
            if token.uid in failed:  # mode lossless makes several tokens of a sequence
                continue
            each = self.sequences[token.uid]
            seen = each.rows.popleft()
            reading = each.monitor.update(seen.entropy)
            each.wish = self.gearbox.ladder[each.gate.update(reading)]
            forecasts.append(each.gate.peek(reading.forecast))
            responses.append(self._response(token, each, seen, reading))
            each.before = seen.seen.step.gear
            if responses[-1].error is not None:
                failed.add(token.uid)
            if token.finish_reason is not None:
                del self.sequences[token.uid]
        if forecasts:
            self.gearbox.prepare(self._policy_gear(forecasts))
        self.remove([*failed])
        return responses

    def _response(
        self, token: GenerationBatch.Response, each: BatchText, seen: SeenRow, reading: Reading
    ) -> BatchGearResponse:
        step, together, error = seen.seen.step, len(seen.seen), None
        try:
            check_finite(token.logprobs, seen.entropy, self.gearbox, step.gear)
        except GearbxError as not_finite:
            error = each.error or not_finite
        shown = seen_of(step, seen.entropy, reading.mean, each.before)
        share = {"weight_bytes": step.weight_bytes // together, "together": together, "wish": seen.wish.name}
        return BatchGearResponse(**vars(token), **{**shown, **share}, error=error)
