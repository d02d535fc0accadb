"""Mode lossless: a low gear drafts, the top gear verifies; the text is the top gear's (self-speculative decoding).

mlx-lm runs a `LosslessModel` like any other, and gets the top gear's logits. When it asks for one token, the model
proposes the next few (drafting.py) and computes the top gear's logits for all of them in one pass. As long as mlx-lm
then samples the tokens that were proposed, the model answers from these logits. So sampling, logits processors, stop
tokens and lengths stay mlx-lm's own, and a wrong draft costs time and changes nothing.

Both gears use one KV cache. What the low gear wrote there is undone before the top gear writes. What the top gear wrote
for tokens that mlx-lm does not have yet is hidden (rows.py).
"""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from ..errors import GearbxError, GearbxWarning, one_line
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, USUAL_LENGTH, DraftRule, FixedLength
from ..routing.gates import BatchPolicy, Monitor, OneGear, highest
from ..routing.lookup import Lookup
from ..routing.rounds import Rounds
from ..telemetry.summary import Tally, draft_rows, draft_summary, lookup_rows, lookup_summary
from .batches import BatchGenerator, BatchText, SharedMode
from .caches import gears_of
from .draft_plans import DraftPlan, drafting_gear, fixed_costs, plan_of
from .draft_trials import few_pass_times
from .drafting import Drafter, Proposals, Writer, steps_ahead
from .governor import Governor
from .mode import encoded, refuse_draft_model, vocabulary_of
from .modes import LosslessSettings
from .response import GearResponse, Step, single_pass
from .rows import Rows, Verifier, warn_of_other_paths
from .sampling import Chooser, geared_responses, sampled
from .wrapper import ModelWrapper


@dataclass
class Verified:
    """A token and what is proposed after it, verified in one pass; of `cache` mlx-lm has got as many rows as are shown.

    tokens: of the pass. steps: how each of its rows came about.
    """

    tokens: list[int]
    proposals: Proposals
    rows: Rows
    steps: Iterator[Step]
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


class LosslessModel(ModelWrapper):
    """A model that computes the top gear's logits, those of a whole draft in one pass.

    Args:
        gearbox: of the model; of one gear, the text alone proposes tokens.
        plan: where to look up tokens, where to work in rounds, and when a draft ends. A rule stands for rounds
            everywhere, which always draft and look nothing up; without either, drafts are of always the same length.
        draft: the gear that drafts; the lowest if not given.
        sampler, logits_processors: the text's, so that drafts are what it will choose; greedy without.
        stop_tokens: tokens after which nothing is drafted.
        prompt_tokens: how many tokens the prompt has.
        max_tokens: how many will be generated; -1: no limit.
        draft_ahead: steps of a draft that are queued beyond the one whose entropy is read.

    Raises:
        GearbxError: a draft gear that is the top one of several.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        plan: DraftPlan | DraftRule | None = None,
        *,
        draft: Gear | str | int | None = None,
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
        if not isinstance(plan, DraftPlan):
            plan = DraftPlan(plan or FixedLength(USUAL_LENGTH), Rounds(fixed_costs(gearbox, self.draft), 0))
        self.plan, rounds = plan, plan.rounds
        self.plan.stretches.begin()  # a prompt of one token looks like any token
        self.stop_tokens = frozenset(stop_tokens)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = math.inf if max_tokens < 0 else max_tokens
        self._chooser = Chooser(sampler or greedy_sampler, tuple(logits_processors))
        self._lookup = Lookup(rounds.agreement) if rounds.most_looked_up else None
        self._history = History(counted_only=not self._chooser.processors and self._lookup is None)
        self._verifier = Verifier(gearbox, self.top)
        self._drafter = Drafter(gearbox, self.draft, self.reader, draft_ahead, self.agreement)
        self._drafting = True
        self._verified: Verified | None = None

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None, **kwargs: Any
    ) -> mx.array:
        kwargs = self.model_keywords(input_embeddings, kwargs)
        self._history.add(inputs, cache)
        stretches = self.plan.stretches
        if inputs.size != 1 or cache is None or kwargs:
            self._verified = None
            stretches.begin()
            return self._alone(inputs, cache, **kwargs)
        known = None
        if stretches.in_rounds:
            token, known = np.array(inputs).item(), self._verified
            if known is not None and not known.continued_by(token, cache):
                known = None
            stretches.token(begins_round=known is None)
        else:
            stretches.token()  # nothing waits for the token that is to be read
        if known is not None:
            known.rows.show(known.rows.rows + 1)
        else:
            alone = not stretches.in_rounds
            if stretches.over:
                stretches.turn()
            if not stretches.in_rounds:
                return self._alone(inputs, cache)
            if alone:
                token = np.array(inputs).item()
                stretches.waited()
            self._count_round()
            known = self._verified = self._round(token, cache)
        self.step = next(known.steps)
        return known.rows.logits[:, known.rows.rows - 1 : known.rows.rows]

    def _alone(self, inputs: mx.array, cache: Any, **kwargs: Any) -> mx.array:
        """The top gear's logits (B, N, V), which may still be computed: mlx-lm runs ahead."""
        self._count_round()
        self.step = single_pass(self.gearbox, self.top)
        return self.run(self.top, inputs, cache, **kwargs)

    def _count_round(self) -> None:
        """Tell the rounds what became of the last draft."""
        done, self._verified = self._verified, None
        if done is not None:
            done.proposals.note(self.plan, done.rows.rows)

    def _round(self, token: int, cache: Any) -> Verified:
        """What may follow a token, and the pass that verifies it.

        A text must not end where only a draft has failed: in a server, that would end the thread. Without drafts the
        top gear goes on as mlx-lm would alone.
        """
        if self._drafting:
            try:
                if self.gearbox.make(self.draft):
                    self.plan.stretches.begin()  # the time that this took belongs to no token
                start = time.perf_counter()
                proposals = self._drafter.propose(self._writer(token, cache), cache, self.plan)
                return self._verify(proposals, cache, start + proposals.seconds)
            except GearbxError:
                raise
            except Exception as error:
                self._drafting = False
                said = f"mode 'lossless' cannot draft for this model ({one_line(error)}); the top gear goes on alone"
                warnings.warn(said, GearbxWarning, stacklevel=4)
        alone = Proposals(Writer(self._chooser, token, 0, self.stop_tokens.__contains__))
        return self._verify(alone, cache, time.perf_counter())

    def _writer(self, token: int, cache: Any) -> Writer:
        """The text, which may be drafted to its end, and not before it begins."""
        made = len(self._history) - self.prompt_tokens + 1  # tokens, the one of this step included
        gears = gears_of(cache)
        in_prompt = made < 1 or (gears is not None and gears.in_prompt)
        room = 0 if in_prompt else self.max_tokens - made
        text = () if self._history.counted_only else self._history.tokens()
        if self._lookup is not None:
            self._lookup.follow(text, self.prompt_tokens)
        return Writer(self._chooser, token, room, self.stop_tokens.__contains__, text, self._lookup)

    def _verify(self, proposals: Proposals, cache: Any, start: float) -> Verified:
        """The pass that verifies, measured where its time is wanted: mlx-lm would wait for it a little later.

        All that a round does beside its draft counts: `start` is when it began, and the draft took no time.
        """
        tokens, costs = proposals.row(), self.plan.rounds.costs
        wanted = costs.wants_verification(len(tokens))
        if wanted and proposals.discarded:
            begun = time.perf_counter()
            mx.synchronize()  # steps that were thrown away do not count in this pass's time
            start += time.perf_counter() - begun
        rows = self._verifier.rows(mx.array([tokens]), cache)
        if wanted:
            mx.eval(rows.logits)
            costs.add_verification(len(tokens), time.perf_counter() - start)
        noise = self.reader.noise(rows.logits).max() if len(tokens) > 1 else None
        return Verified(tokens, proposals, rows, self._drafter.steps_of(proposals, noise), list(cache))


class History:
    """The tokens that a model was called with since the text began: for logits processors, and to look up proposals in.

    A text begins with another cache, or with several tokens (a prompt) after the single ones of the text before.

    Args:
        counted_only: nothing will ask for the tokens themselves.
    """

    def __init__(self, counted_only: bool):
        self.counted_only = counted_only
        self._tokens: list[int] = []
        self._new: list[mx.array] = []  # which may still be computed
        self._count = 0
        self._cache: Any = None
        self._decoding = False

    def add(self, inputs: mx.array, cache: Any) -> None:
        """Take the tokens of a call; `cache` is the one that it was called with."""
        if cache is not self._cache or (self._decoding and inputs.size > 1):
            self._tokens, self._new, self._count = [], [], 0
        self._cache, self._decoding = cache, inputs.size == 1
        if not self.counted_only:
            self._new.append(inputs.reshape(-1))
        self._count += inputs.size

    def __len__(self) -> int:
        return self._count

    def tokens(self) -> list[int]:
        """The tokens, in the same list as long as the text is the same; it grows at its end."""
        for part in self._new:
            self._tokens += np.array(part).tolist()
        self._new = []
        return self._tokens


@dataclass(frozen=True)
class Lossless(LosslessSettings, SharedMode):
    """Write the top gear's text, and read fewer bytes of weights for it.

    The seconds of passes and how often tokens of a margin are accepted are learned while texts are written, and kept
    for the next start; where drafts lose, the top gear goes on without. Where nothing may be measured (ranks that share
    the model, GEARBX_TUNE=0), drafts have 3 tokens.

    Args:
        rule: a DraftRule of your own, in place of a length.
        others: of `LosslessSettings`.

    Raises:
        GearbxError: both a draft_length and a rule, or a number that does not exist.
    """

    name: ClassVar[str] = "lossless"
    trace_fields: ClassVar[tuple[str, ...]] = (
        "passes",
        "weight_bytes",
        "drafted",
        "discarded",
        "from_draft",
        "looked_up",
        "source",
    )
    uncapped: ClassVar[str] = "writes the top gear's text, which a cap would change"

    rule: DraftRule | None = None

    def __post_init__(self) -> None:
        if self.draft_length is not None and self.rule is not None:
            raise GearbxError("draft_length and rule exclude each other; give one")
        if self.draft_length is not None:
            FixedLength(self.draft_length)
        most = self.lookup_tokens
        if most is not None and (type(most) is not int or not 0 <= most <= MOST_DRAFTED):
            raise GearbxError(f"lookup_tokens is {most!r}; give 0 to {MOST_DRAFTED}")

    @property
    def most_looked_up(self) -> int:
        """The most tokens that the text itself may propose at once."""
        if self.lookup_tokens is not None:
            return self.lookup_tokens
        return MOST_DRAFTED if self.rule is None and self.draft_length is None else 0

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        refuse_draft_model(self.name, kwargs)
        prompt = encoded(tokenizer, prompt)
        sampler, processors = kwargs.get("sampler"), kwargs.get("logits_processors") or ()
        has_kernel = Chooser(sampler or greedy_sampler, processors).has_kernel
        plan, gear = self.plan(gearbox, has_kernel), drafting_gear(gearbox, self.draft)
        if plan.stretches.in_rounds:
            gearbox.make(gear)  # and not in the middle of the text
        ahead = 0 if isinstance(plan.rule, FixedLength) or gear == gearbox.ladder.top else steps_ahead()
        wrapped = LosslessModel(
            gearbox,
            plan,
            draft=gear,
            sampler=sampler,
            logits_processors=processors,
            stop_tokens=tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_tokens=kwargs.get("max_tokens", -1),
            draft_ahead=ahead,
        )
        source = sampled(wrapped, tokenizer, prompt, lambda: wrapped.step, wrapped.reader, **kwargs)
        return keeping(plan, geared_responses(source, gearbox, Monitor(vocabulary_of(gearbox), self.window)))

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> BatchGenerator:
        """Like Mode's. The top gear writes all texts, whatever the policy; drafts pay for one text at a time."""
        return BatchGenerator(model, tokenizer, gearbox, self, highest, **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """What one text of a batch has of its own."""
        top = gearbox.ladder.top
        return BatchText(OneGear(top.index), Monitor(vocabulary_of(gearbox), self.window), top, top)

    def plan(self, gearbox: Gearbox, has_kernel: bool = True) -> DraftPlan:
        """How to draft with a gearbox. Raises GearbxError for a gear that cannot draft.

        Args:
            has_kernel: whether native kernels may choose the tokens.
        """
        rule = self.rule if self.draft_length is None else FixedLength(self.draft_length)
        gear = drafting_gear(gearbox, self.draft)
        return plan_of(gearbox, gear, rule, self.most_looked_up, few_pass_times, has_kernel)

    def about(self) -> str:
        looked_up = f"up to {self.most_looked_up} tokens at once" if self.most_looked_up else "nothing"
        drafts = "drafts save time"
        if self.draft_length is not None:
            drafts = f"drafts of {self.draft_length} token{'s' * (self.draft_length != 1)}"
        return f"lossless: {drafts}; lookup proposes {looked_up}"

    def summary(self, tally: Tally) -> dict[str, Any]:
        verifications = list(tally.passes.values())[-1]  # by the top gear
        drafts = draft_summary(tally, verifications) | {"discarded": tally.discarded}
        return drafts | lookup_summary(tally) | {"near_ties": tally.near_ties}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary) + lookup_rows(summary) + speed_rows(summary)


def keeping(plan: DraftPlan, responses: Iterator[GearResponse]) -> Iterator[GearResponse]:
    """The responses; when the text ends, what was learned with it is kept."""
    try:
        yield from responses
    finally:
        plan.keep()


def speed_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the text's speed compares with the top gear's alone, as a line of a table, where both ways were seen."""
    alone, rounds = summary.get("seconds_alone"), summary.get("seconds_in_rounds")
    if not alone or not rounds or not summary.get("tokens_per_second"):
        return []
    times = f"{summary['tokens_per_second'] * alone:.2f} times that of the top gear alone"
    if summary.get("alone_at_earlier_start"):
        times += " at an earlier start"
    if rounds > alone:
        times += f"; drafts do not pay on this machine: {1000 * rounds:.3g} ms a token, {1000 * alone:.3g} without"
    return [("speed", times)]
