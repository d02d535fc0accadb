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
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..compat.arrays import OwnRandomState
from ..compat.batches import GearedTokens, Pass
from ..compat.caches import drop_rows
from ..errors import GearbxWarning, one_line
from ..routing.gates import highest
from ..routing.lookup import Lookup
from .batches import BatchGenerator, BatchText, RowSampler, SeenRow, SharedMode
from .caches import Cache, Snapshot, parts
from .draft_plans import DraftPlan, DraftPlans
from .drafting import Accepted, Drafter, Proposals, Writer, accept
from .rows import Verifier
from .sampling import Sampler


class LosslessTokens(GearedTokens):
    """The sequences that have begun to write; a step may give out several tokens of each.

    plans: when to draft, for batches of any size. sequences: by id.
    """

    prompt_cache: list[Any]
    _lookups: dict[int, tuple[Lookup, int, list[int]]]  # of each sequence, tokens of its prompt, and all that it knows
    _can_draft: bool  # not with every kind of cache
    _failed: set[int]  # sequences whose draft has failed
    _plan: DraftPlan | None  # of the latest step, if nothing has joined since
    plans: DraftPlans
    sequences: Mapping[int, BatchText]

    @classmethod
    def drafting(
        cls, plans: DraftPlans, sampler: RowSampler, begin: Pass, sequences: Mapping[int, BatchText]
    ) -> "LosslessTokens":
        """One without sequences."""
        batch = cls.of(plans.gearbox.model, sampler, begin, sampler.reader.logsumexp)
        batch.plans, batch.sequences = plans, sequences
        batch._verifier = Verifier(plans.gearbox, plans.gearbox.ladder.top)
        batch._drafter = Drafter(plans.gearbox, plans.draft, sampler.reader)
        batch._can_draft, batch._lookups = True, {}
        batch._failed, batch._plan = set(), None
        return batch

    def extend(self, batch: GenerationBatch) -> None:
        """Take over the sequences of another batch, whose first tokens are sampled."""
        if is_alone(self.prompt_cache):
            self.prompt_cache = [part.merge([part]) for part in self.prompt_cache]
        super().extend(batch)
        for uid, prompt in zip(batch.uids, batch.tokens):
            self._lookups[uid] = Lookup(self.plans.lookup), len(prompt), []
        self._plan = None
        others = [type(part).__name__ for part in parts(self.prompt_cache) if type(part) not in (KVCache, BatchKVCache)]
        if others and self._can_draft:
            self._can_draft = False
            warn_of(f"the sequences of a {others[0]} cannot be cut each on its own")

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._lookups = {uid: self._lookups[uid] for uid in self.uids}
        self._failed.intersection_update(self.uids)

    def extract_cache(self, idx: int) -> list[Any]:
        """The KV cache of a sequence, as it would be alone."""
        return Snapshot(self.prompt_cache).second() if is_alone(self.prompt_cache) else super().extract_cache(idx)

    def next(self) -> list[GenerationBatch.Response]:
        """The next tokens of every sequence, one or several, those of a sequence in their order."""
        if not self.uids:
            return []
        if len(self) == 1 and self._can_draft and not is_alone(self.prompt_cache):
            self.prompt_cache = self.extract_cache(0)
        texts, plan = len(self), self.plans.of(len(self))
        stretches = plan.stretches
        if plan is not self._plan:  # texts begin, or go on in a batch of another size
            self._plan = plan
            stretches.begin()
        stretches.token()
        if stretches.over:
            stretches.turn()
        drafts = self._can_draft and self._failed.isdisjoint(self.uids) and stretches.in_rounds
        done = self._round(plan) if drafts else None
        responses = super().next() if done is None else done
        stretches.made(len(responses) / texts)
        if any(response.finish_reason is not None for response in responses):
            self.plans.keep()
        return responses

    def _round(self, plan: DraftPlan) -> list[GenerationBatch.Response] | None:
        """The tokens of a round with drafts; None where nothing can follow, or drafting has failed."""
        try:
            writers = [self._writer(row, token) for row, token in enumerate(np.array(self.coming).tolist())]
            if not any(writer.goes_on for writer in writers):
                return None
            if self.plans.gearbox.make(self.plans.draft):
                plan.stretches.begin()  # the time that this took belongs to no token
            proposals = self._drafter.propose(writers, self.prompt_cache, plan, self.coming)
        except Exception as error:  # a text must not end where only a draft has failed
            self._failed.update(self.uids)
            warn_of(one_line(error))
            return None
        accepted = self._verified(plan, proposals)
        proposals.note(plan, [len(one.tokens) for one in accepted])
        return self._give_out(accepted, proposals)

    def _writer(self, row: int, token: int) -> Writer:
        """A sequence, whose last token is sampled, and not in the KV cache yet."""
        uid, written = self.uids[row], self.tokens[row]
        lookup, prompt, known = self._lookups[uid]
        known += [*written[len(known) :], token]
        lookup.follow(known, prompt)
        ends = self.end_of(row).advance
        return Writer(self.sequences[uid].chooser, token, self.room_after(row), ends, known, lookup)

    def _verified(self, plan: DraftPlan, proposals: Proposals) -> list[Accepted]:
        """The pass that verifies. It leaves all its entries in the cache."""
        start, before, costs = time.perf_counter(), Snapshot(self.prompt_cache), plan.rounds.costs
        try:
            logits = self._verifier.run(mx.array(proposals.rows()), self.prompt_cache)
            tolerance = self.plans.tolerance_for(proposals.of[0].chooser.sampler)
            accepted = accept(logits, proposals, self._drafter.reader, tolerance)
        except BaseException:
            before.restore()
            raise
        if costs.wants_verification(proposals.width):
            costs.add_verification(proposals.width, time.perf_counter() - start)
        return accepted

    def _give_out(self, accepted: Sequence[Accepted], proposals: Proposals) -> list[GenerationBatch.Response]:
        """Give out the tokens that were to come and all that are accepted but the last, which come next."""
        for row, one in enumerate(accepted):
            self._note(row, one, proposals)
        rows = [
            self.given_out(row, [writer.token, *one.tokens[:-1]], list(one.logprobs))
            for row, (writer, one) in enumerate(zip(proposals.of, accepted))
        ]
        dropped = [proposals.width - len(row) for row in rows]
        for part in parts(self.prompt_cache):
            if type(part) is KVCache:  # of one sequence
                part.trim(dropped[0])
            elif any(dropped):
                drop_rows(part, dropped)
        self.let_come([one.tokens[-1] for one in accepted], [one.logprobs[-1] for one in accepted])
        keep = [i for i, row in enumerate(rows) if row[-1].finish_reason is None]
        for i in set(range(len(rows))).difference(keep):
            rows[i][-1].prompt_cache, rows[i][-1].all_tokens = self.extract_cache(i), self.tokens[i]
        if len(keep) < len(rows):
            self.filter(keep)
        return [token for row in rows for token in row]

    def _note(self, row: int, accepted: Accepted, proposals: Proposals) -> None:
        """Note how each accepted token of a sequence came about."""
        text, steps = self.sequences[self.uids[row]], self._drafter.steps_of(proposals, row)
        for place, (token, step) in enumerate(zip(accepted.tokens, steps)):
            near_tie, given_up = bool(accepted.near_ties[place]), float(accepted.given_up[place])
            read = step.with_token(token), len(self), lambda: accepted.entropies
            text.rows.append(SeenRow(*read, place, text.wish, near_tie, given_up))


def is_alone(cache: Cache) -> bool:
    """Whether a cache belongs to one sequence, and has no room for others."""
    return any(type(part) is KVCache for part in parts(cache))


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
        self, tokenizer: Any, mode: SharedMode, plans: DraftPlans, sampler: Sampler | None = None, **settings: Any
    ):
        gearbox = plans.gearbox
        super().__init__(gearbox.model, tokenizer, gearbox, mode, highest, sampler, **settings)
        self.use(LosslessTokens.drafting(plans, self._rows, self._writing, self.sequences))

    def insert_segments(self, *arguments: Any, **keywords: Any) -> list[int]:
        """Like BatchGenerator's. A sequence that samples draws random numbers of its own, without a seed too."""
        uids = super().insert_segments(*arguments, **keywords)
        for uid in uids:
            chooser = self.sequences[uid].chooser
            if chooser.random is None and not chooser.greedy:
                chooser.random = OwnRandomState(np.array(mx.random.randint(0, 2**31 - 1)).item())
        return uids
