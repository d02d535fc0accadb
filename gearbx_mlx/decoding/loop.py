"""The loop of the modes that look at a token before it is sampled: lossless, kickdown and pair.

    prefill
    while the text goes on:
        proposal = propose()           # tokens that drafters propose; often none
        found    = verify(proposal)    # one forward pass over the last token and the proposed ones
        tokens   = accept(found)       # one token more than the verifier agrees with; one read of the device

This is speculative decoding (Leviathan, Kalman, Matias, 2023, 2211.17192, Algorithm 1). The tokens are those that the
verifier alone would generate, since each is chosen from its logits: a wrong proposal costs time and changes nothing. In
mode lossless the verifier is the top gear. In mode kickdown it is the lowest gear that is sure of the token, in mode
pair one of two models, and nothing is proposed.

Sampling is exact by common random numbers: a token is drafted with the random numbers that will choose at its place,
from logits that went through the same processors (GEARBX 10.1).

Where a device computes by itself, nothing is read between the queued draft and its verification, and the next draft is
queued before the tokens of a round are handed out: the device works while a terminal or a client takes them.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..compat.arrays import set_random_state
from ..errors import GearbxError, GearbxWarning, one_line
from ..ranks.agreement import ALONE, Agreement
from .caches import gears_of, in_common, length
from .drafters import Drafter
from .policy import FixedPolicy, LearnedPolicy
from .response import DRAFT, GeneratedText, GeneratedToken, Step
from .rows import NO_TOKENS, Proposal, RunsPasses, VerifiedPass
from .sampling import MLX_READER, Choice, Chooser, ChosenRows, LogitsReader, choose_rows, kv_read, rounding_of

UNLIMITED = 2**40  # entries of a KV cache
SLOW_READER = 0.2  # of a round's time: readers that take more may keep a device waiting
CLEARED = 256  # tokens between two times that MLX gives back the memory that it keeps, as in mlx-lm


@dataclass(frozen=True)
class DecodePlan:
    """The settings of one text.

    Attributes:
        verifier: runs the passes whose logits choose the tokens.
        chooser, reader: choose tokens from logits.
        policy: how much to propose.
        agreement: of ranks that share the model.
        quantize: puts the KV cache into fewer bits once it has `quantized_from` entries, as mlx-lm does.
        keeps_cache: True if a caller goes on with the KV cache.
        stream: of MLX, on which all of it is computed.
        prefill_step: tokens of a prompt that are read at once.
        progress: called with the tokens of the prompt that were read, and with all of them.
        embeddings: of the tokens of the prompt (n, D), in place of the model's own.
        clock: seconds.
    """

    verifier: RunsPasses
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    policy: LearnedPolicy = field(default_factory=FixedPolicy)
    agreement: Agreement = ALONE
    quantize: Callable[[list[Any]], None] = lambda cache: None
    quantized_from: int = UNLIMITED
    keeps_cache: bool = False
    stream: Any = None
    prefill_step: int = 2048
    progress: Callable[[int, int], None] = lambda read, tokens: None
    embeddings: mx.array | None = None
    clock: Callable[[], float] = time.perf_counter

    def embedded(self, begin: int, end: int) -> dict[str, mx.array]:
        """Return the keyword of the model for a part of the prompt that has embeddings."""
        return {} if self.embeddings is None else {"input_embeddings": self.embeddings[None, begin:end]}

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else mx.stream(self.stream)


@dataclass
class DecodeState:
    """A text while it is generated.

    Between rounds, `cache` holds all tokens of `text` but the last one. While the tokens of a round are handed out, the
    text has all of them already.

    Attributes:
        cache: the KV cache of the verifier, one entry a layer.
        drafters: in the order in which they are asked.
        found: the latest verification.
        shown: how many of its tokens were handed out.
        proposal: the next one, if it was queued before its round.
        began: when its round began, and `away` then.
        away: seconds that readers of the tokens took.
        is_last_read: the last token is in the KV cache, too: the next pass ran ahead.
    """

    text: GeneratedText
    cache: list[Any]
    drafters: list[Drafter] = field(default_factory=list)
    found: VerifiedPass | None = None
    shown: int = 0
    proposal: Proposal | None = None
    began: tuple[float, float] = 0.0, 0.0
    away: float = 0.0
    is_last_read: bool = False

    def __post_init__(self) -> None:
        self.kv_gears = gears_of(self.cache)
        """Of the KV cache, if it has gears."""

    def is_queued(self, plan: DecodePlan) -> bool:
        """Return whether a device computes by itself what it is given."""
        return not plan.verifier.computes_at_once(self.cache)

    def room(self, plan: DecodePlan) -> int:
        """Return the most tokens to propose: the verifier adds one, and a KV cache is quantized between passes."""
        room = self.text.room - 1
        if plan.quantized_from < UNLIMITED:
            until_quantized = plan.quantized_from - length(self.cache) - 1
            room = room if until_quantized < 0 else min(room, until_quantized)
        return int(min(room, UNLIMITED))

    def seconds(self, plan: DecodePlan) -> float | None:
        """Return the seconds since the round began; None if the device may have waited for a reader of the tokens."""
        begin, away = self.began
        whole, away = plan.clock() - begin, self.away - away
        if not self.is_queued(plan):
            return whole - away
        return whole if away < SLOW_READER * whole else None

    def time_plain(self, plan: DecodePlan) -> None:
        """Give the policy the time of a plain token, unless a gear that is made meanwhile has slowed it."""
        seconds = self.seconds(plan)
        if seconds is not None and all(drafter.is_ready for drafter in self.drafters):
            plan.policy.add_plain(seconds)


def decode(plan: DecodePlan, state: DecodeState) -> Generator[GeneratedToken, None, None]:
    """Read the prompt, and yield the tokens of the text.

    When it ends or is closed, the KV cache holds the tokens that were yielded, and nothing else.
    """
    prefill(plan, state)
    rounds = decoded(plan, state)
    try:
        for count, token in enumerate(rounds):
            left = plan.clock()
            yield token
            state.away += plan.clock() - left
            if count % CLEARED == 0:
                mx.clear_cache()
    except GeneratorExit:
        rounds.close()
        if plan.keeps_cache:
            leave(plan, state)
        raise
    except BaseException:  # while a draft was queued: some tokens were not handed out
        cut(state)
        raise
    if plan.keeps_cache or plan.chooser.draws:
        leave(plan, state)


def decoded(plan: DecodePlan, state: DecodeState) -> Generator[GeneratedToken, None, None]:
    """Yield the tokens after the prompt: the first one, then those of rounds."""
    text = state.text
    tokens = round_of(plan, state, NO_TOKENS, is_timed=False, **plan.embedded(text.prompt - 1, text.prompt))
    plan.progress(text.prompt, text.prompt)
    yield from handed_out(plan, state, tokens)
    while text.goes_on:
        proposal = propose(plan, state) if state.proposal is None else state.proposal
        if not proposal and state.is_queued(plan):
            yield from plain(plan, state)
        else:
            yield from handed_out(plan, state, round_of(plan, state, proposal))


def handed_out(plan: DecodePlan, state: DecodeState, tokens: list[GeneratedToken]) -> Iterator[GeneratedToken]:
    """Yield the tokens of a round. A device drafts the next ones meanwhile."""
    if state.is_queued(plan) and state.text.goes_on:
        propose(plan, state)
    for token in tokens:
        state.shown += 1
        yield token


def prefill(plan: DecodePlan, state: DecodeState) -> None:
    """Read the prompt, but for its last token, into the KV caches of the verifier and of the drafters."""
    text = state.text
    tokens, last = text.array(), text.prompt - 1
    if state.kv_gears is not None:
        state.kv_gears.begin_prompt()
    plan.progress(0, text.prompt)
    for begin in range(0, last, plan.prefill_step):
        end = min(begin + plan.prefill_step, last)
        with plan.on_stream():
            plan.verifier.prefill(tokens[begin:end], state.cache, **plan.embedded(begin, end))
            plan.quantize(state.cache)
            mx.eval([part.state for part in state.cache])
            for drafter in state.drafters:
                drafter.prefill(tokens[begin:end])
        plan.progress(end, text.prompt)
        mx.clear_cache()


def propose(plan: DecodePlan, state: DecodeState) -> Proposal:
    """Return the proposal of the first drafter that has one. Where a device computes, it is queued."""
    state.began, state.proposal = (plan.clock(), state.away), NO_TOKENS
    room = state.room(plan)
    for drafter in [*state.drafters] if room > 0 else ():
        try:
            with plan.on_stream():
                count = drafter.length(state.text, room, plan.policy)
                if count > 0:
                    state.proposal = drafter.propose(state.text, count, plan.policy)
                    break
        except GearbxError:
            raise
        except Exception as error:  # a text must not end where only a draft has failed
            state.drafters.remove(drafter)
            said = f"mode 'lossless' cannot draft for this model ({one_line(error)}); plain decoding goes on"
            warnings.warn(said, GearbxWarning, stacklevel=7)
    return state.proposal


def verify(plan: DecodePlan, state: DecodeState, proposal: Proposal, **of_prompt: mx.array) -> VerifiedPass:
    """Return the verifier's logits after the last token and after each proposed one: one pass."""
    last = [state.text.last]
    if proposal.is_known:
        rows: Any = [*last, *proposal.tokens]
    else:
        rows = mx.concatenate([mx.array(last, mx.uint32), proposal.array()])
    state.found, state.shown = plan.verifier.verify(rows, state.cache, **of_prompt), 0
    return state.found


def accept(
    plan: DecodePlan, state: DecodeState, proposal: Proposal, found: VerifiedPass
) -> tuple[list[GeneratedToken], list[float]]:
    """Choose a token after each row, as far as the ones before it were proposed, and add them to the text.

    Returns them, and the margins of the proposed tokens, if they are known.
    """
    text, chooser, logits = state.text, plan.chooser, found.logits[0]
    context = text.array() if chooser.processors else None
    rows = choose_rows(chooser, plan.reader, plan.agreement, logits, context, proposal.array())
    queued = [each for each in (proposal.tokens, proposal.margins) if isinstance(each, mx.array)]
    tokens, seen, read = rows.read(plan.agreement, *queued)
    accepted = in_common(tokens, [*proposal.tokens] if proposal.is_known else read.pop(0))
    rounding = rounding_of(seen[:, Choice.MAGNITUDE].max(), logits.dtype)
    with np.errstate(invalid="ignore"):  # logits that are not finite are refused later, by name
        near = (seen[:, Choice.BEST] - seen[:, Choice.NEXT] <= rounding) & (found.count > 1)
    generated = list[GeneratedToken]()
    for place, step in enumerate(found.steps(proposal, accepted, **kv_read(state.kv_gears))):
        token, bits = int(tokens[place]), float(seen[place, Choice.ENTROPY])
        generated.append(GeneratedToken(token, rows.logprobs[place], bits, step, bool(near[place])))
        text.add(token)
        if not text.goes_on:
            break
    if rows.states:
        set_random_state(rows.states[len(generated) - 1])
    return generated, read[0].tolist() if read else [*(proposal.margins or ())]


def round_of(
    plan: DecodePlan, state: DecodeState, proposal: Proposal, is_timed: bool = True, **of_prompt: mx.array
) -> list[GeneratedToken]:
    """Verify a proposal, and return the tokens that follow; the KV cache holds all but the last. If it fails, none."""
    draft_seconds = state.seconds(plan) if proposal.is_known and proposal.source == DRAFT else None
    with plan.on_stream():
        plan.quantize(state.cache)  # before a pass, so that the one before can still be cut
        found = verify(plan, state, proposal, **of_prompt)
        try:
            tokens, margins = accept(plan, state, proposal, found)
        except BaseException:  # of a sampler or a logits processor, or an interrupt
            found.keep(0)
            raise
        found.keep(len(tokens))
        for drafter in state.drafters:
            drafter.settle(state.text, found)
    state.proposal, state.is_last_read = None, False
    if is_timed and proposal:
        drafted, accepted = len(proposal) * (proposal.source == DRAFT), len(tokens) - 1
        times = {"seconds": state.seconds(plan), "draft_seconds": draft_seconds}
        plan.policy.add_round(drafted=drafted, accepted=accepted, rows=found.count, margins=margins, **times)
    elif is_timed:
        state.time_plain(plan)
    return tokens


@dataclass
class Queued:
    """A token that the device computes.

    Attributes:
        found: the pass.
        rows: of its logits, one.
        id: (1,), the token.
        step: how it comes about.
        context: the text before it (n,), for logits processors.
    """

    found: VerifiedPass
    rows: ChosenRows
    id: mx.array
    step: Step
    context: mx.array | None


def plain(plan: DecodePlan, state: DecodeState) -> Iterator[GeneratedToken]:
    """Yield the verifier's tokens until the text ends or a drafter proposes."""
    text, state.proposal = state.text, None
    context = text.array() if plan.chooser.processors else None
    coming: Queued | None = queue(plan, state, mx.array([text.last], mx.uint32), context)
    while coming is not None:
        state.began = plan.clock(), state.away
        ahead = None
        if stays_plain(plan, state):
            known = coming.context
            context = None if known is None else mx.concatenate([known, coming.id.astype(known.dtype)])
            ahead = queue(plan, state, coming.id, context)
        tokens, seen, _ = coming.rows.read(ALONE)
        text.add(int(tokens[0]))
        state.found, state.is_last_read = None, ahead is not None
        for drafter in state.drafters:
            drafter.settle(text, coming.found)
        state.time_plain(plan)
        yield GeneratedToken(text.last, coming.rows.logprobs[0], float(seen[0, Choice.ENTROPY]), coming.step)
        coming = ahead if text.goes_on else None


def stays_plain(plan: DecodePlan, state: DecodeState) -> bool:
    """Return whether nothing will be proposed after the token that is computed now."""
    if state.text.room <= 1:
        return False  # it is the last one
    room = state.room(plan) - 1
    return room < 1 or not any(drafter.length(state.text, room, plan.policy) for drafter in state.drafters)


def queue(plan: DecodePlan, state: DecodeState, last: mx.array, context: mx.array | None) -> Queued:
    """Begin to compute the token after `last` (1,)."""
    with plan.on_stream():
        plan.quantize(state.cache)
        found = plan.verifier.verify(last, state.cache)
        try:
            rows = choose_rows(plan.chooser, plan.reader, plan.agreement, found.logits[0], context)
        except BaseException:  # of a sampler or a logits processor, or an interrupt
            found.keep(0)
            raise
        rows = replace(rows, seen=plan.agreement.arrays(rows.seen)[0])
        token = rows.sampled[0] if rows.sampled else rows.seen[:, Choice.TOKEN].astype(mx.uint32)
        mx.async_eval(token, rows.seen, rows.logprobs)  # left for later, they made the next passes a tenth slower
    (step,) = found.steps(NO_TOKENS, 0, **kv_read(state.kv_gears))
    return Queued(found, rows, token, step, context)


def leave(plan: DecodePlan, state: DecodeState) -> None:
    """Leave the KV caches as mlx-lm does: the last token is in them, too."""
    text = state.text
    with plan.verifier.aside(), plan.on_stream():
        if not cut(state) and not state.is_last_read:
            context = text.array() if plan.chooser.processors else None
            plan.quantize(state.cache)
            last = plan.verifier.verify([text.last], state.cache)
            rows = choose_rows(plan.chooser, plan.reader, plan.agreement, last.logits[0], context)
            mx.async_eval(rows.logprobs, *rows.sampled)
        plan.quantize(state.cache)
        for drafter in state.drafters:
            drafter.settle(text, None)


def cut(state: DecodeState) -> bool:
    """Cut text and KV cache to the tokens that were handed out. Returns whether some of a round were not."""
    found, text = state.found, state.text
    if found is None or state.shown >= found.kept:
        return False
    del text.tokens[len(text.tokens) - (found.kept - state.shown) :]
    found.keep(state.shown + 1)
    return True
