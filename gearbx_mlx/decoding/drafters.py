"""What mode lossless proposes: tokens that may follow a text. The top gear verifies them in one pass (lossless.py).

Where the last tokens of a text occurred before, the text itself may propose what follows (routing/lookup.py). Else the
low gear drafts. Neither KV cache nor random numbers keep a trace of a draft. A token is drafted with the random numbers
that will sample its position, from logits that went through the same processors: so draft and verification choose the
same token wherever their distributions agree (GEARBX 10.1).

The entropy of a token says whether the draft goes on. To read it is to wait for the device, which has nothing to do
until the next step is queued. So steps may be queued ahead, as mlx-lm queues one: each takes the token before it as an
array that is still computed. Where the draft turns out to be over, the steps beyond its end are thrown away. They cost
passes, and change nothing.

The head of a draft looks twice: its best few tokens get their logits from the top gear's rows of the head. Many drafts
fail where the head is rounded, although what it reads would have chosen the right token: on SmolLM2 that is one token
in thirty. A few rows of the top gear's head are some kilobytes beside the megabytes of a draft's pass. Only drafts look
twice; a text that the low gear writes itself is its own.
"""

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.arrays import same_random_numbers
from ..formats.block import NativeDraft, PassParts, begin_draft, pass_parts
from ..formats.exact import ExactModule
from ..formats.tied import IN_DRAFTS, TiedEmbedding, linear_of
from ..gears.discovery import DENSE_LAYERS
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.sharding import sharding_of
from ..kernels.dispatch import on_cpu
from ..ranks.agreement import ALONE, Agreement
from ..routing.acceptance import MOST_DRAFTED, DraftRule, longest_draft, margin_worth
from ..routing.lookup import Lookup
from ..routing.rounds import Rounds, reads_margins
from .caches import Snapshot
from .draft_plans import DraftPlan
from .response import DRAFT, LOOKUP, Step
from .sampling import Chooser, GumbelSampler, LogitsReader

Following = Callable[[int, int], tuple[int, float, float]]
"""From a token, and its place in a draft from 0 on, to the next token, the entropy of all (bits), and its margin."""

HEAD = "lm_head"
SEEN_TWICE = 4  # with more, hardly another token wins
CHUNK = 256  # logits, of which the largest is found first: to sort all of a vocabulary takes ten times as long
RowsOf = Callable[[mx.array], mx.array]  # numbers (...) to rows (..., D) of a head


@dataclass
class Writer:
    """A text in a round, and how far it may be drafted.

    token: its last one, whose pass is the next one. room: the most tokens that may follow. ends: whether a token ends
    the text; asked once for each token, in order. text: with `token`; logits processors alone ask for it. lookup: of
    this text, if it may propose tokens.
    """

    chooser: Chooser
    token: int
    room: float
    ends: Callable[[int], bool]
    text: Sequence[int] = ()
    lookup: Lookup | None = None

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        """What is proposed."""
        self.source = DRAFT
        self.entropies: list[float] = []
        """Entropies of drafted tokens, bits."""
        self.margins: list[float] = []
        """Their margins (acceptance.LearnedAgreement), if they are known."""
        self.goes_on = self.room > 0 and not self.ends(self.token)

    @property
    def drafts(self) -> bool:
        """Whether the low gear may draft one more token."""
        return self.goes_on and self.source == DRAFT

    def take(self, token: int) -> None:
        """Add a token to what is proposed."""
        self.tokens.append(token)
        self.goes_on = len(self.tokens) < self.room and not self.ends(token)

    def draft(self, token: int, bits: float, margin: float | None) -> None:
        """Add a drafted token, with its entropy, and its margin if that is known."""
        self.take(token)
        self.entropies.append(bits)
        if margin is not None:
            self.margins.append(margin)

    def look_up(self, rounds: Rounds) -> None:
        """Take what the text itself proposes, as far as that is likely enough."""
        if self.lookup is None or not self.goes_on:
            return
        found = self.lookup.proposed(int(min(self.room, MOST_DRAFTED)))
        for token in found[: rounds.looked_up(self.lookup.run, len(found))]:
            if self.goes_on:
                self.source = LOOKUP
                self.take(token)

    def context(self) -> mx.array | None:
        """The text for its logits processors, if it has any."""
        return mx.array([*self.text], mx.uint32) if self.chooser.processors else None


@dataclass
class Proposals:
    """What may follow a text. steps: of the draft gear, which took `seconds`; discarded: those beyond its end."""

    writer: Writer
    steps: int = 0
    discarded: int = 0
    seconds: float = 0.0

    def note(self, plan: DraftPlan, tokens: int) -> None:
        """Tell a plan how many tokens of text came of these proposals, with the one that was not proposed."""
        if not self.steps:
            return
        plan.rounds.note_drafts(self.steps, tokens, self.discarded)
        if plan.agreement is not None:
            plan.agreement.add(self.writer.margins, tokens - 1)

    def row(self) -> list[int]:
        """The tokens of the pass that verifies, the last one of the text first."""
        return [self.writer.token, *self.writer.tokens]


@dataclass
class SecondHead:
    """The head of the top gear, a linear layer or an embedding, and where a draft looks for its own: `holder[name]`.

    look: what stands there in drafts. It is one object for all of them, since native programs of a model know its
    modules by their identity (formats/block.py), and take milliseconds to be made again.
    """

    top: nn.Module
    holder: nn.Module
    name: str
    look: "SecondLook | None" = None


@dataclass(frozen=True)
class Drafter:
    """Proposes tokens of a text, and says what that took.

    Args:
        gear: that drafts; it may be engaged after a draft.
        ahead: steps that are queued beyond the one whose entropy is read.
        agreement: of the ranks that share the model.
    """

    gearbox: Gearbox
    gear: Gear
    reader: LogitsReader
    ahead: int = 0
    agreement: Agreement = ALONE
    parts: list[PassParts] = field(default_factory=list)
    """What the gear has of it, if native drafts have some."""

    def propose(self, writer: Writer, cache: Any, plan: DraftPlan) -> Proposals:
        """What the text itself proposes, or else the low gear; perhaps nothing."""
        writer.look_up(plan.rounds)
        if not writer.drafts or not plan.rounds.drafts(plan.stretches.tries_rounds):
            return Proposals(writer)
        proposals = self.draft(writer, cache, plan.rule, MOST_DRAFTED)
        plan.rounds.costs.add_draft(proposals.seconds, proposals.steps)
        return proposals

    def draft(self, writer: Writer, cache: Any, rule: DraftRule, most: int) -> Proposals:
        """What the low gear writes after the text, `most` tokens at most."""
        rule.begin()
        start = time.perf_counter()
        native = self._native(cache)
        most = min(most, longest_draft(rule), most if native is None else native.room)
        following = None if native is None else natively(native, writer.chooser)
        if following is not None:
            with rewound(writer.chooser):
                return write(writer, following, rule, most)
        with contextlib.ExitStack() as drafting:
            if native is None:
                self.gearbox.shift(self.gear)
                drafting.enter_context(Snapshot(cache).borrowed())
                drafting.enter_context(looking(self.second))
            drafting.enter_context(rewound(writer.chooser))
            # Nothing is queued beyond an end that is known.
            steps = itertools.islice(self._steps(writer, self._logits(native, cache), reads_margins(rule)), most)
            queued = deque(itertools.islice(steps, 1 + self.ahead))
            drafted = 0
            while queued:
                drafted += 1
                if not self._take(writer, *queued.popleft(), rule):
                    break
                queued.extend(itertools.islice(steps, 1))
        return Proposals(writer, drafted, len(queued), time.perf_counter() - start)

    def _native(self, cache: Any) -> NativeDraft | None:
        """What drafts in one call a token, without MLX's graph.

        The gear is engaged for the first draft. Its parts then run beside the gear that verifies.
        """
        if self.ahead or self.agreement is not ALONE:
            return None
        draft = begin_draft(self.parts[0], cache) if self.parts else None
        if draft is None:
            self.gearbox.shift(self.gear)
            better = None if self.second is None else self.second.top
            self.parts[:] = filter(None, [pass_parts(self.gearbox.model, better)])
            draft = begin_draft(self.parts[0], cache) if self.parts else None
        return draft

    def _logits(self, native: NativeDraft | None, cache: Any) -> Callable[[mx.array], mx.array]:
        """A token (1,) to the logits (1, V) after it: by the model in the gear that is engaged, or natively."""
        if native is None:
            return lambda inputs: self.gearbox.model(inputs[:, None], cache=cache)[:, -1]
        places = itertools.count()
        return lambda inputs: native.logits(np.array(inputs).item(), next(places))

    @functools.cached_property
    def second(self) -> SecondHead | None:
        """The head that looks twice; asked for once both gears are made."""
        return second_head(self.gearbox, self.gear)

    def _steps(
        self, writer: Writer, logits_after: Callable[[mx.array], mx.array], margins: bool
    ) -> Iterator[tuple[mx.array, mx.array, mx.array | None]]:
        """The tokens (1,) that follow, without end, the entropies (bits) of their distributions, and perhaps margins.

        The device still computes them; processors get the tokens so far as such an array too, as from mlx-lm.
        """
        chooser, context = writer.chooser, writer.context()
        inputs = mx.array([writer.token], mx.uint32)
        while True:
            logprobs = self.reader.normalized(chooser.processed(context, logits_after(inputs)))
            sampled, entropy = self.agreement.arrays(chooser.sample(logprobs), self.reader.entropy(logprobs))
            margin = self.reader.margins(logprobs) if margins else None
            mx.async_eval(sampled, entropy, [] if margin is None else margin)
            yield sampled, entropy, margin
            inputs = sampled.reshape(-1)
            context = None if context is None else mx.concatenate([context, inputs.astype(mx.uint32)])

    @staticmethod
    def _take(writer: Writer, sampled: mx.array, entropy: mx.array, margin: mx.array | None, rule: DraftRule) -> bool:
        """Add a step to the draft; returns whether another one pays."""
        token, bits = np.array(sampled).item(), np.array(entropy).item()
        won = None if margin is None else np.array(margin).item()
        known = won is not None and writer.chooser.greedy
        writer.draft(token, bits, won if known else None)
        reading = bits if won is None else won if known else margin_worth(bits)
        return rule.goes_on(reading) and writer.drafts

    def steps_of(self, proposals: Proposals, noise: mx.array | None = None) -> Iterator[Step]:
        """How each token comes about that a verification may make, its own one after all proposed ones.

        The passes of the round, and what was read in them, stand with the first token. `noise` says how much rounding
        may move a logit in the verification.
        """
        gearbox, writer = self.gearbox, proposals.writer
        ran = {gearbox.ladder.top: 1}
        read = gearbox.weight_bytes_per_token(gearbox.ladder.top, len(proposals.row()))
        if proposals.steps:  # else the gear may not have been made yet, and to count its bytes takes long
            ran[self.gear] = proposals.steps + proposals.discarded
            read += ran[self.gear] * gearbox.weight_bytes_per_token(self.gear)
        counted = {"drafted": len(writer.entropies), "discarded": proposals.discarded}
        counted["looked_up"] = len(writer.tokens) - len(writer.entropies)
        for place, token in enumerate([*writer.tokens, None]):
            passes = tuple(0 if place else ran.get(gear, 0) for gear in gearbox.ladder)
            of_round: dict[str, Any] = (
                {} if place else {"entropies": (*writer.entropies,), "weight_bytes": read, **counted}
            )
            of_round |= {"proposed": token, "proposer": writer.source, "drafts": self.gear}
            yield Step(gearbox.ladder.top, passes=passes, noise=noise, **of_round)


def steps_ahead() -> int:
    """How many steps to queue ahead: on a CPU none, since the device that waits is the one that would queue them.

    On a GPU one, as mlx-lm does: it hides the wait after every token, and costs one pass of the draft gear in a draft.
    """
    return 0 if on_cpu() else 1


def natively(draft: NativeDraft, chooser: Chooser) -> Following | None:
    """A function that drafts the next token in one native call; None for a chooser without a kernel."""
    sampler = chooser.sampler
    if not chooser.has_kernel:
        return None
    if not isinstance(sampler, GumbelSampler):
        return draft.best
    kept = (sampler.top_p, sampler.min_p, sampler.top_k)
    return lambda token, place: draft.sampled(token, place, sampler.temp, *kept, key=chooser.next_key())


def write(writer: Writer, following: Following, rule: DraftRule, most: int) -> Proposals:
    """Draft as far as a rule wants to, `most` tokens at most; nothing is ahead of what is read."""
    token, place, wants, start = writer.token, 0, True, time.perf_counter()
    by_margin = reads_margins(rule)
    while wants and place < most:
        token, bits, margin = following(token, place)
        writer.draft(token, bits, margin)
        wants = rule.goes_on(margin if by_margin else bits) and writer.drafts
        place += 1
    return Proposals(writer, place, seconds=time.perf_counter() - start)


@contextlib.contextmanager
def rewound(chooser: Chooser) -> Iterator[None]:
    """Random numbers that a text draws in the block will be drawn again after it."""
    # A greedy text draws nothing; to put numbers back for each of its drafts would only make MLX's graph longer.
    draws = not chooser.greedy or chooser.processors
    with same_random_numbers() if draws else contextlib.nullcontext():
        yield


def second_head(gearbox: Gearbox, gear: Gear) -> SecondHead | None:
    """What a draft of this gear looks at twice; None where the top gear has the same head, or none in memory."""
    path = next((layer.path for layer in gearbox.layers if layer.path.split(".")[-1] == HEAD), gearbox.head)
    if path is None or not gearbox.keeps_all or sharding_of(gearbox.model) is not None:
        return None
    own, top = gearbox.module_in(path, gear), gearbox.module_in(path, gearbox.ladder.top)
    if own is None or top is None or own is top:
        return None
    if isinstance(own, TiedEmbedding):
        return SecondHead(top, own, IN_DRAFTS)
    place, _, name = path.rpartition(".")
    return SecondHead(top, dict(gearbox.model.named_modules())[place], name)


@contextlib.contextmanager
def looking(second: SecondHead | None) -> Iterator[None]:
    """The head of the gear that is engaged looks twice, where rows are looked up fast. Nothing may shift meanwhile."""
    rows = None if second is None else rows_of(linear_of(second.top))
    if second is None or rows is None:
        yield
        return
    holder, name = second.holder, second.name
    before = holder.get(name)  # none in a tied embedding, whose rows are looked up in its projection
    head = holder["projection"] if before is None else before
    if second.look is None or second.look.head is not head:
        second.look = SecondLook(head, rows)
    holder[name] = second.look
    try:
        yield
    finally:
        if before is None:
            del holder[name]
        else:
            holder[name] = before


def rows_of(head: nn.Module) -> RowsOf | None:
    """The rows of dense weights, and on a GPU of exact ones.

    To decode some rows by MLX's operations takes a CPU a third of a draft's pass; natively it takes nothing
    (formats/block.py).
    """
    if type(head) in DENSE_LAYERS:
        return lambda chosen: head["weight"][chosen]
    return head.rows if isinstance(head, ExactModule) and not on_cpu() else None


class SecondLook(nn.Module):
    """A linear layer (..., D) -> (..., V) whose largest outputs come from the rows of another weight (V, D).

    Here activations stay as they are; the native kernels of a draft may round them to bfloat16.
    """

    def __init__(self, head: nn.Module, rows: RowsOf):
        super().__init__()
        self.head, self._rows = head, rows

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.head(x)
        best = largest(logits, min(SEEN_TWICE, logits.shape[-1]))
        again = (self._rows(best).astype(mx.float32) * x[..., None, :].astype(mx.float32)).sum(axis=-1)
        if "bias" in self.head:
            again = again + self.head.bias[best]
        return mx.put_along_axis(logits, best, again.astype(logits.dtype), axis=-1)


def largest(logits: mx.array, count: int) -> mx.array:
    """Where the largest numbers of each row (..., V) are: (..., count), in no order."""
    *lead, size = logits.shape
    if size <= CHUNK * count:
        return mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    filled = mx.pad(logits, [*[(0, 0)] * len(lead), (0, -size % CHUNK)], constant_values=-mx.inf)
    chunks = filled.reshape(*lead, -1, CHUNK)
    # A number that is among the largest lies in a chunk whose own largest is among those of all chunks.
    chosen = mx.argpartition(-chunks.max(axis=-1), count - 1, axis=-1)[..., :count]
    among = mx.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*lead, -1)
    places = mx.argpartition(-among, count - 1, axis=-1)[..., :count]
    return mx.take_along_axis(chosen, places // CHUNK, axis=-1) * CHUNK + places % CHUNK
