"""Sequences that share their passes in mode lossless: the low gear drafts for all, the top gear verifies all drafts.

Between two rounds every sequence has a token that is sampled, and not yet in the KV cache, as in mlx-lm's batches. A
round drafts what follows it, takes the drafts' entries back, and reads token and draft in one pass of the top gear.
Each sequence gives out its token and what it accepted, its own number of tokens; the rest leaves its part of the cache.
mlx-lm's batches are padded on the left, so that all sequences end at the same entry: what a sequence loses at its end
has to go to its front, and its entries move to the right. Where rounds do not pay, the batch goes on as mlx-lm's own
does, running ahead.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.sample_utils import greedy_sampler

from ..compat.arrays import OwnRandomState
from ..compat.batches import GearedTokens, Pass
from ..compat.caches import drop_rows
from ..errors import GearbxWarning, one_line
from ..routing.acceptance import MOST_DRAFTED
from ..routing.gates import Reading, highest
from .batches import BatchGenerator, BatchText, OfOneText, RowSampler, SeenPass, SeenRow
from .caches import Cache, Snapshot, parts
from .draft_plans import BatchPlan, BatchPlans
from .drafting import BatchDrafter, Beginning, Chooser, Drafts, LookedUp, choose_all
from .response import DRAFT, LOOKUP, BatchGearResponse, Draft, Step
from .rows import Verifier
from .sampling import Entropy, Sampler, near_ties, noise_of


@dataclass(frozen=True)
class Accepted:
    """Of one sequence: the tokens that the top gear chose in a row, the last of which nobody drafted.

    logprobs (n, V), entropies (n, bits) and near_ties (n) are of these tokens, n.
    """

    tokens: list[int]
    logprobs: mx.array
    entropies: np.ndarray
    near_ties: np.ndarray


def accept(logits: mx.array, beginnings: Sequence[Beginning], drafts: Drafts, entropy: Entropy) -> list[Accepted]:
    """What every sequence accepts; its random numbers are then those after these tokens.

    Args:
        logits: (B, S, V), of the last token of every sequence and of its draft.
        entropy: in bits, of log-probabilities.
    """
    choosers = [beginning.chooser for beginning in beginnings]
    usable = [tokens[:count] for tokens, count in zip(drafts.tokens, drafts.usable)]
    chosen, logprobs = choose_all(choosers, logits, usable)
    counts = mx.arange(logits.shape[1]) <= mx.array(drafts.usable)[:, None]  # no padding, and no rejected ends of texts
    noise = mx.where(counts, noise_of(logits), 0).max(axis=-1, keepdims=True)
    near = near_ties(logprobs, noise)
    entropies = entropy(logprobs.reshape(-1, logprobs.shape[-1])).reshape(logprobs.shape[:-1])
    mx.eval([one.tokens for one in chosen], near, entropies)
    bits, ties = np.array(entropies), np.array(near)  # of which each token's is taken without another operation of MLX
    done = []
    for row, (one, chooser) in enumerate(zip(chosen, choosers)):
        tokens = np.array(one.tokens).tolist()
        unlike = (i for i, (token, drafted) in enumerate(zip(tokens, usable[row])) if token != drafted)
        count = 1 + next(unlike, len(usable[row]))
        chooser.rewind(one.random[count - 1])
        done.append(Accepted(tokens[:count], logprobs[row, :count], bits[row, :count], ties[row, :count]))
    return done


def other_than_rows(cache: Cache) -> str:
    """The class of a cache whose sequences cannot lose entries each on its own; "" if they all can."""
    return next((type(part).__name__ for part in parts(cache) if type(part) not in (KVCache, BatchKVCache)), "")


def is_alone(cache: Cache) -> bool:
    """Whether a cache is of one sequence, and has no room for others."""
    return any(type(part) is KVCache for part in parts(cache))


def drop(cache: Cache, dropped: Sequence[int]) -> None:
    """Drop the last entries of every sequence.

    Args:
        cache: of KVCache (one sequence) or BatchKVCache.
        dropped: how many, for each sequence.
    """
    for part in parts(cache):
        if type(part) is KVCache:
            part.trim(dropped[0])
        elif any(dropped):
            drop_rows(part, dropped)


class VerifiedToken(SeenPass):
    """What was seen of a token that was computed in one pass with others of its sequence.

    Args:
        entropy: (1,), bits.
        near_tie: whether rounding may have decided it.
        together: sequences that shared the pass.
    """

    def __init__(self, step: Step, entropy: np.ndarray, near_tie: bool, together: int):
        super().__init__(step, entropy)
        self.near_tie, self._together = near_tie, together

    def __len__(self) -> int:
        return self._together


class LosslessTokens(GearedTokens):
    """The sequences that have begun to write; a step may give out several tokens of each.

    plans: when to draft, for batches of any size. sequences: by id. shared: the sampler of those that have none; None:
    greedy.
    """

    prompt_cache: list[Any]
    _looked_up: dict[int, LookedUp]
    _can_draft: bool  # not with every kind of cache
    _failed: set[int]  # sequences whose draft has failed
    _plan: BatchPlan | None  # of the latest step, if nobody has joined since
    plans: BatchPlans
    sequences: Mapping[int, BatchText]
    shared: Sampler | None

    @classmethod
    def drafting(
        cls,
        plans: BatchPlans,
        sampler: RowSampler,
        begin: Pass,
        sequences: Mapping[int, BatchText],
        shared: Sampler | None,
    ) -> "LosslessTokens":
        """One without sequences."""
        batch = cls.of(plans.gearbox.model, sampler, begin)
        batch.plans, batch.sequences, batch.shared = plans, sequences, shared
        batch.gearbox, batch.top = plans.gearbox, plans.gearbox.ladder.top
        batch._verifier = Verifier(batch.gearbox, batch.top)
        batch._drafter = BatchDrafter(batch.gearbox, plans.draft, sampler.entropy)
        batch._can_draft, batch._looked_up = True, {}
        batch._failed, batch._plan = set(), None
        return batch

    def extend(self, batch: GenerationBatch) -> None:
        """Take over the sequences of another batch, whose first tokens are sampled."""
        self._in_rows()
        super().extend(batch)
        for uid, prompt in zip(batch.uids, batch.tokens):
            self._looked_up[uid] = LookedUp(self.plans.agreement, len(prompt))
        self._plan = None
        kind = other_than_rows(self.prompt_cache)
        if kind and self._can_draft:
            self._can_draft = False
            warn_of(f"the sequences of a {kind} cannot be cut each on its own")

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._looked_up = {uid: self._looked_up[uid] for uid in self.uids}
        self._failed.intersection_update(self.uids)

    def extract_cache(self, idx: int) -> list[Any]:
        """The KV cache of a sequence, as it would be alone."""
        return Snapshot(self.prompt_cache).second() if is_alone(self.prompt_cache) else super().extract_cache(idx)

    def _in_rows(self) -> None:
        """Let the cache take further sequences."""
        if is_alone(self.prompt_cache):
            self.prompt_cache = [part.merge([part]) for part in self.prompt_cache]

    def next(self) -> list[GenerationBatch.Response]:
        """The next tokens of every sequence, one or several, those of a sequence in their order."""
        if not self.uids:
            return []
        if len(self) == 1 and self._can_draft and not is_alone(self.prompt_cache):
            self.prompt_cache = self.extract_cache(0)
        rows, plan = len(self), self.plans.of(len(self))
        if plan is not self._plan:
            self._plan = plan
            plan.begin_texts()
        plan.begin()
        drafts = self._can_draft and self._failed.isdisjoint(self.uids) and plan.in_rounds()
        done = self._round(plan) if drafts else None
        responses = super().next() if done is None else done
        plan.end(len(responses) / rows)
        return responses

    def _passes(self, drafts: int) -> tuple[int, ...]:
        """In each gear: so many passes that draft, and one of the top gear."""
        counts = {self.plans.draft: drafts, self.top: 1}
        return tuple(counts.get(gear, 0) for gear in self.gearbox.ladder)

    def _round(self, plan: BatchPlan) -> list[GenerationBatch.Response] | None:
        """The tokens of a round with drafts; None where nothing can follow, or drafting has failed."""
        beginnings = self._beginnings()
        if not any(beginning.live for beginning in beginnings):
            return None
        try:
            drafts = self._drafted(plan, beginnings)
        except Exception as error:  # a text must not end where only a draft has failed
            self._failed.update(self.uids)
            warn_of(one_line(error))
            return None
        accepted = self._verified(plan, beginnings, drafts)
        if drafts.steps:
            plan.rule.end(drafts.steps, sum(len(one.tokens) for one in accepted))
        return self._give_out(accepted, drafts)

    def _beginnings(self) -> list[Beginning]:
        made = []
        for i, token in enumerate(np.array(self.coming).tolist()):
            owner, processors = self.sequences[self.uids[i]], self.logits_processors[i] or ()
            chooser = Chooser(owner, self.shared, processors, self.tokens[i], token)
            room = self.room_after(i)
            most = min(room, self.plans.most_looked_up // len(self))
            proposed = self._looked_up[self.uids[i]].proposed(self.tokens[i], token, most)
            made.append(Beginning(chooser, room, self.end_of(i), proposed))
        return made

    def _drafted(self, plan: BatchPlan, beginnings: Sequence[Beginning]) -> Drafts:
        start = time.perf_counter()
        drafts = self._drafter.draft(beginnings, self.coming, self.prompt_cache, plan.rule, MOST_DRAFTED)
        if drafts.steps:
            plan.costs.add_draft((time.perf_counter() - start) / drafts.steps)
        return drafts

    def _verified(self, plan: BatchPlan, beginnings: Sequence[Beginning], drafts: Drafts) -> list[Accepted]:
        """The pass that verifies. It leaves all its entries in the cache."""
        start = time.perf_counter()
        tokens = mx.array([[b.chooser.token, *drafted] for b, drafted in zip(beginnings, drafts.tokens)])
        before = Snapshot(self.prompt_cache)
        try:
            accepted = accept(self._verifier.run(tokens, self.prompt_cache), beginnings, drafts, self._drafter.entropy)
        except BaseException:
            before.restore()
            raise
        if plan.costs.wants_verification(drafts.width):
            plan.costs.add_verification(drafts.width, time.perf_counter() - start)
        return accepted

    def _give_out(self, accepted: Sequence[Accepted], drafts: Drafts) -> list[GenerationBatch.Response]:
        """Give out the tokens that were to come and all that are accepted but the last, which come next."""
        for row, one in enumerate(accepted):
            self._note(row, one, drafts)
        coming = np.array(self.coming).tolist()
        rows = [
            self.given_out(row, [coming[row], *one.tokens[:-1]], list(one.logprobs)) for row, one in enumerate(accepted)
        ]
        drop(self.prompt_cache, [drafts.width - len(row) for row in rows])
        self.let_come([one.tokens[-1] for one in accepted], [one.logprobs[-1] for one in accepted])
        keep = [i for i, row in enumerate(rows) if row[-1].finish_reason is None]
        for i in set(range(len(rows))).difference(keep):
            rows[i][-1].prompt_cache, rows[i][-1].all_tokens = self.extract_cache(i), self.tokens[i]
        if len(keep) < len(rows):
            self.filter(keep)
        return [token for row in rows for token in row]

    def _note(self, row: int, accepted: Accepted, drafts: Drafts) -> None:
        """Note how each accepted token of a sequence came about. The round's passes stand with the first of them."""
        text, usable = self.sequences[self.uids[row]], drafts.usable[row]
        read = drafts.steps * self.gearbox.weight_bytes_per_token(self.plans.draft, len(self))
        read += self.gearbox.weight_bytes_per_token(self.top, len(self) * drafts.width)
        entropies = tuple(drafts.entropies[row][:usable])
        looked_up = usable if drafts.sources[row] == LOOKUP else 0
        step = Step(
            self.top, entropies, self._passes(drafts.steps), read, drafted=usable - looked_up, looked_up=looked_up
        )
        proposed = [Draft(token, self.plans.draft, drafts.sources[row]) for token in drafts.tokens[row][:usable]]
        for place, (token, draft) in enumerate(zip(accepted.tokens, [*proposed, None])):
            known = replace(step, draft=draft).with_token(token)
            entropy, near_tie = accepted.entropies[place : place + 1], bool(accepted.near_ties[place])
            text.rows.append(SeenRow(VerifiedToken(known, entropy, near_tie, len(self)), 0, text.wish))
            step = Step(self.top, (), (0,) * len(self.gearbox.ladder))


def warn_of(why: str) -> None:
    """Say why sequences go on without drafts."""
    said = f"mode 'lossless' cannot draft in this batch ({why}); the top gear goes on alone, with the same texts"
    warnings.warn(said, GearbxWarning, stacklevel=5)


class LosslessGenerator(BatchGenerator):
    """Writes many texts at once, each of them the one that the top gear writes of its prompt alone.

    Args:
        mode: makes the sequence of a prompt's tokens.
        plans: when to draft.
        sampler: of sequences that bring none; greedy without.
        settings: further keywords of mlx-lm's BatchGenerator.
    """

    def __init__(
        self, tokenizer: Any, mode: OfOneText, plans: BatchPlans, sampler: Sampler | None = None, **settings: Any
    ):
        gearbox = plans.gearbox
        super().__init__(gearbox.model, tokenizer, gearbox, mode, highest, sampler, **settings)
        self._shared = sampler
        self.use(LosslessTokens.drafting(plans, self._rows, self._writing, self.sequences, sampler))

    def insert_segments(self, *arguments: Any, **keywords: Any) -> list[int]:
        """As BatchGenerator's. A sequence that samples draws random numbers of its own, without a seed too."""
        uids = super().insert_segments(*arguments, **keywords)
        for uid in uids:
            text = self.sequences[uid]
            if text.random is None and (text.sampler or self._shared or greedy_sampler) is not greedy_sampler:
                text.random = OwnRandomState(np.array(mx.random.randint(0, 2**31 - 1)).item())
        return uids

    def _response(
        self, token: GenerationBatch.Response, each: BatchText, seen: SeenRow, reading: Reading
    ) -> BatchGearResponse:
        response, verified = super()._response(token, each, seen, reading), seen.seen
        near_tie = isinstance(verified, VerifiedToken) and verified.near_tie
        return replace(response, from_draft=response.source == DRAFT, near_tie=near_tie)
