"""A model that drafts in a low gear and verifies the whole draft in one pass of the top gear.

mlx-lm runs it like any other model, and gets the top gear's logits. When mlx-lm asks for one token, the model drafts
the next few and computes the top gear's logits for all of them in one pass. As long as mlx-lm then samples the tokens
that were drafted, the model answers from these logits. So sampling, logits processors, stop tokens and lengths stay
mlx-lm's own, and a wrong draft costs time and changes nothing.

Draft and verification share their noise (GEARBX 10.1; drafting.py).

Where the text's last tokens occurred before, the text itself may propose what follows (routing/lookup.py); such tokens
are verified in the same way, and the low gear does not run.

Both gears use one KV cache. What the low gear wrote there is undone before the top gear writes. What the top gear wrote
for tokens that mlx-lm does not have yet is hidden (rows.py).
"""

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import GearbxError, GearbxWarning, one_line
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, DraftRule, default_rule
from ..routing.lookup import Lookup
from ..routing.rounds import Rounds, Stretches
from .caches import in_prompt
from .draft_plans import note_drafts
from .drafting import Drafter
from .response import LOOKUP, Draft, Proposal, Step
from .rows import Rows, Verifier, warn_of_other_paths
from .sampling import noise_of
from .texts import History
from .wrapper import ModelWrapper


@dataclass
class Verified:
    """A token and the proposal after it, verified in one pass; of `cache` mlx-lm has got as many rows as are shown."""

    tokens: list[int]
    proposal: Proposal
    rows: Rows
    noise: mx.array
    cache: list[Any]

    def continued_by(self, token: int, cache: Any) -> bool:
        """Whether the next row is what the model computes for this token."""
        place = self.rows.rows
        return (
            place < len(self.tokens)
            and self.tokens[place] == token
            and len(cache) == len(self.cache)
            and all(a is b for a, b in zip(cache, self.cache))  # else mlx-lm has begun to quantize it, say
            and self.rows.untouched()
        )

    def drafted(self, gear: Gear) -> Draft | None:
        """The proposal for the token that the last row shown predicts; `gear` drafts."""
        place = self.rows.rows
        return Draft(self.tokens[place], gear, self.proposal.source) if place < len(self.tokens) else None

    def logits(self) -> mx.array:
        """(1, 1, V), of the last row shown."""
        return self.rows.logits[:, self.rows.rows - 1 : self.rows.rows]


class LosslessModel(ModelWrapper):
    """A model that computes the top gear's logits, those of a whole draft in one pass.

    Args:
        gearbox: of the model, with two gears or more.
        rule: when to stop drafting; the uncalibrated one if not given.
        draft: the gear that drafts; the lowest if not given.
        rounds: where to look up tokens and where to draft; always to draft, and nothing else, if not given.
        stretches: where to work in rounds at all; everywhere, if not given.
        sampler, logits_processors: mlx-lm's own, so that drafts are what it will choose; greedy without.
        stop_tokens: tokens after which nothing is drafted.
        prompt_tokens: how many tokens the prompt has.
        max_tokens: how many will be generated; -1: no limit.
        draft_ahead: steps of a draft that are queued beyond the one whose entropy is read.

    Raises:
        GearbxError: a ladder of one gear, a draft gear that is the top one.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        rule: DraftRule | None = None,
        *,
        draft: Gear | str | int | None = None,
        rounds: Rounds | None = None,
        stretches: Stretches | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
        stop_tokens: Collection[int] = (),
        prompt_tokens: int = 0,
        max_tokens: int = -1,
        draft_ahead: int = 0,
    ):
        super().__init__(gearbox)
        self.top = gearbox.ladder.top
        self.draft = drafting_gear(gearbox, draft)
        warn_of_other_paths(gearbox)
        self.rule = rule or default_rule()
        self.rounds, self.stretches = rounds, stretches
        if stretches is not None:
            stretches.begin()  # a prompt of one token looks like any token
        self._lookup = Lookup(rounds.agreement) if rounds is not None and rounds.most_looked_up else None
        self.logits_processors = tuple(logits_processors)
        self.stop_tokens = frozenset(stop_tokens)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self._history = History(counted_only=not self.logits_processors and self._lookup is None)
        self._verifier = Verifier(gearbox, self.top)
        self._drafter = Drafter(
            gearbox,
            self.draft,
            self.rule,
            self.entropy,
            sampler,
            self.logits_processors,
            self.stop_tokens,
            draft_ahead,
            self.agreement,
        )
        self._drafting = True
        self._verified: Verified | None = None

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None, **kwargs: Any
    ) -> mx.array:
        kwargs = self.model_keywords(input_embeddings, kwargs)
        self._history.add(inputs, cache)
        if inputs.size != 1 or cache is None or kwargs:
            self._verified = None
            if self.stretches is not None:
                self.stretches.begin()
            read = self.gearbox.weight_bytes_per_token(self.top)
            self.step = Step(self.top, (), self.passes(self.top), read)
            return self.run(self.top, inputs, cache, **kwargs)
        if self.stretches is not None and not self.stretches.in_rounds and not self.stretches.over:
            self.stretches.token()
            return self._alone(inputs, cache)
        token = np.array(inputs).item()
        known = self._verified if self._verified is not None and self._verified.continued_by(token, cache) else None
        if self.stretches is not None:
            self.stretches.token(begins_round=known is None)
        if known is not None:
            return self._next_row(known)
        if self.stretches is not None and self.stretches.over:
            self.stretches.turn()
            if not self.stretches.in_rounds:
                return self._alone(inputs, cache)
        return self._draft_and_verify(token, cache)

    def _alone(self, inputs: mx.array, cache: Any) -> mx.array:
        """The top gear's logits (1, 1, V) of one token, which may still be computed: mlx-lm runs ahead."""
        self._count_round()
        self.step = Step(self.top, (), self.passes(self.top), self.gearbox.weight_bytes_per_token(self.top))
        return self.run(self.top, inputs, cache)

    def _next_row(self, verified: Verified) -> mx.array:
        """Logits (1, 1, V) from the last verification."""
        verified.rows.show(verified.rows.rows + 1)
        self.step = Step(self.top, (), self.passes(), 0, verified.drafted(self.draft), 0, verified.noise)
        return verified.logits()

    def _draft_and_verify(self, token: int, cache: Any) -> mx.array:
        """The logits (1, 1, V) of the token itself, after proposing what follows it and verifying the proposal."""
        self._count_round()
        proposal, rows = self._proposal_and_rows(token, cache)
        tokens = [token, *proposal.tokens]
        noise = noise_of(rows.logits).max()
        verified = Verified(tokens, proposal, rows, noise, list(cache))
        ran = [self.draft] * proposal.draft_passes + [self.top]
        read = self.gearbox.weight_bytes_per_token(self.top, len(tokens))
        if proposal.drafted:  # else the gear may not have been made yet, and to count its bytes takes long
            read += proposal.draft_passes * self.gearbox.weight_bytes_per_token(self.draft)
        self.step = Step(
            self.top,
            proposal.entropies,
            self.passes(*ran),
            read,
            verified.drafted(self.draft),
            proposal.drafted,
            noise if proposal.tokens else None,
            looked_up=proposal.looked_up,
            discarded=proposal.discarded,
        )
        self._verified = verified
        return verified.logits()

    def _count_round(self) -> None:
        """Tell the rounds what became of the last draft."""
        done, self._verified = self._verified, None
        if self.rounds is not None and done is not None and done.proposal.drafted:
            self.rounds.note_drafts(done.proposal.drafted, done.rows.rows, done.proposal.discarded)

    def _proposal_and_rows(self, token: int, cache: Any) -> tuple[Proposal, Rows]:
        """What may follow a token, and the pass that verifies it.

        A text must not end where only a draft has failed: in a server, that would end the thread. Without drafts the
        top gear goes on as mlx-lm would alone.
        """
        if self._drafting:
            try:
                proposal = self._proposal(token, cache, 0 if in_prompt(cache) else self._most(token))
                return proposal, self._rows(token, proposal, cache)
            except GearbxError:
                raise
            except Exception as error:
                self._drafting = False
                said = f"mode 'lossless' cannot draft for this model ({one_line(error)}); the top gear goes on alone"
                warnings.warn(said, GearbxWarning, stacklevel=4)
        return Proposal([]), self._rows(token, Proposal([]), cache)

    def _rows(self, token: int, proposal: Proposal, cache: Any) -> Rows:
        """The pass that verifies, measured where its time is wanted: mlx-lm would wait for it a little later."""
        tokens = [token, *proposal.tokens]
        costs = self.rounds.costs if self.rounds is not None else None
        wanted = costs is not None and costs.wants_verification(len(tokens))
        if wanted and proposal.discarded:
            mx.synchronize()  # steps that were thrown away are none of this pass's time
        start = time.perf_counter()
        rows = self._verifier.rows(mx.array([tokens]), cache)
        if costs is not None and wanted:
            mx.eval(rows.logits)
            costs.add_verification(len(tokens), time.perf_counter() - start)
        return rows

    def _proposal(self, token: int, cache: Any, most: int) -> Proposal:
        """What the text itself proposes, or else the low gear, or nobody: `most` tokens at most."""
        if most >= 1 and self.rounds is not None:
            found = self._looked_up(self.rounds, most)
            if found:
                return Proposal(found, LOOKUP)
            if not self.rounds.drafts():
                return Proposal([])
        return self._drafts(token, cache, most)

    def _looked_up(self, rounds: Rounds, most: int) -> list[int]:
        """What followed where the last tokens occurred before, as far as that is likely enough to follow again."""
        if self._lookup is None:
            return []
        self._lookup.follow(self._history.tokens(), self.prompt_tokens)
        found = self._lookup.proposed(most)
        stop = next((place for place, token in enumerate(found, 1) if token in self.stop_tokens), len(found))
        return found[: rounds.looked_up(self._lookup.run, stop)]

    def _most(self, token: int) -> int:
        """The most tokens to draft: none past the end of the text."""
        made = len(self._history) - self.prompt_tokens + 1  # tokens, the one of this step included
        if made < 1 or token in self.stop_tokens:
            return 0
        left = self.max_tokens - made if self.max_tokens >= 0 else MOST_DRAFTED
        return int(min(MOST_DRAFTED, left))

    def _drafts(self, token: int, cache: Any, most: int) -> Proposal:
        """What the low gear drafts, timed where its time is wanted."""
        start = time.perf_counter()
        proposal = self._drafter.draft(token, cache, most, self._history.tokens() if self.logits_processors else ())
        if proposal.tokens:
            seconds = time.perf_counter() - start
            note_drafts(self.gearbox, self.draft, proposal.drafted, seconds)
            if self.rounds is not None:
                self.rounds.costs.add_draft(seconds / proposal.drafted)
        return proposal


def drafting_gear(gearbox: Gearbox, draft: Gear | str | int | None) -> Gear:
    """The gear that drafts, the lowest if none is named. Raises GearbxError for the top one."""
    gear = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
    if gear == gearbox.ladder.top:
        raise GearbxError(f"gears {gearbox.ladder}: the top gear cannot draft for itself; give a lower one too")
    return gear
