"""Decoding loop of the modes that inspect a token before sampling: lossless, kickdown and pair.

    prefill
    while the sequence has not ended:
        proposal = propose()           # tokens of a drafter; often none
        found    = verify(proposal)    # one forward pass over the last token and the proposed ones
        tokens   = accept(found)       # the accepted tokens and one more; one read of the device

This is speculative decoding (Leviathan, Kalman, Matias, 2023, 2211.17192, Algorithm 1). Every token is chosen from the
verifier's logits, so the output equals the verifier's: a rejected proposal costs time only. In mode lossless the
verifier is the top gear. In kickdown it is the lowest gear that is certain of the token, in pair one of two models;
both have no proposals.

Sampling is exact by common random numbers: a token is drafted with the random numbers of its position, from logits
after the same processors (GEARBX 10.1).

A GPU is never idle: draft and verification are queued without a read in between. The next draft is queued before the
round's tokens are yielded.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
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
SLOW_READER = 0.2  # share of a round's time; slower consumers of the tokens may keep a device waiting
CLEARED = 256  # tokens between calls of mx.clear_cache, as in mlx-lm


@dataclass(frozen=True)
class DecodePlan:
    """Settings of one sequence.

    Attributes:
        verifier: runs the passes whose logits choose the tokens.
        chooser, reader: choose tokens from logits.
        policy: chooses the number of proposed tokens.
        agreement: of ranks that share the model.
        quantize: quantizes the KV cache once it has `quantized_from` entries, as mlx-lm does.
        keeps_cache: True if a caller uses the KV cache afterwards.
        stream: MLX stream of all computations; None: the default stream.
        prefill_step: tokens of a prompt per forward pass.
        progress: called with the number of prefilled tokens, and the prompt's.
        embeddings: of the prompt's tokens (n, D); None: the model's own.
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

    def embedded(self, start: int, end: int) -> dict[str, mx.array]:
        """Return the model's keyword for a part of the prompt with embeddings; {} without."""
        return {} if self.embeddings is None else {"input_embeddings": self.embeddings[None, start:end]}

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else mx.stream(self.stream)


@dataclass
class DecodeState:
    """State of a sequence during generation.

    Between rounds, `cache` holds all tokens of `text` but the last one. `text` already has all tokens of a round while
    they are yielded.

    Attributes:
        cache: the verifier's KV cache, one entry per layer.
        drafters: in order of priority.
        found: the latest verification.
        random_states: MLX's, after each of its tokens; empty for greedy decoding.
        shown: number of its tokens that were yielded.
        proposal: the next one if it is already queued; None otherwise.
        started: start of its round, and `away` at that time, in seconds.
        away: seconds that consumers of the tokens took.
        is_last_read: True if the KV cache holds the last token too, because the next pass ran ahead.
    """

    text: GeneratedText
    cache: list[Any]
    drafters: list[Drafter] = field(default_factory=list)
    found: VerifiedPass | None = None
    random_states: Sequence[mx.array] = ()
    shown: int = 0
    proposal: Proposal | None = None
    started: tuple[float, float] = 0.0, 0.0
    away: float = 0.0
    is_last_read: bool = False

    def __post_init__(self) -> None:
        self.kv_gears = gears_of(self.cache)
        """Gears of the KV cache; None without."""

    def is_queued(self, plan: DecodePlan) -> bool:
        """Return whether passes are queued for a device, rather than computed in the call."""
        return not plan.verifier.computes_at_once(self.cache)

    def room(self, plan: DecodePlan) -> int:
        """Return the most tokens to propose: the verifier adds one, and a KV cache is quantized between passes."""
        room = self.text.room - 1
        if plan.quantized_from < UNLIMITED:
            until_quantized = plan.quantized_from - length(self.cache) - 1
            room = room if until_quantized < 0 else min(room, until_quantized)
        return int(min(room, UNLIMITED))

    def seconds(self, plan: DecodePlan) -> float | None:
        """Return the seconds since the round's start; None if the device may have waited for a consumer."""
        start, away = self.started
        whole, away = plan.clock() - start, self.away - away
        if not self.is_queued(plan):
            return whole - away
        return whole if away < SLOW_READER * whole else None

    def time_plain(self, plan: DecodePlan) -> None:
        """Report the time of a plain token to the policy, unless a gear made at the same time has slowed it."""
        seconds = self.seconds(plan)
        if seconds is not None and all(drafter.is_ready for drafter in self.drafters):
            plan.policy.add_plain(seconds)


def decode(plan: DecodePlan, state: DecodeState) -> Generator[GeneratedToken, None, None]:
    """Prefill the prompt, and yield the generated tokens.

    At the end, or when closed, the KV cache holds exactly the tokens that were yielded.
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
    except BaseException:  # a queued draft may have failed before all tokens were yielded
        cut(state)
        raise
    if plan.keeps_cache or plan.chooser.draws:
        leave(plan, state)


def decoded(plan: DecodePlan, state: DecodeState) -> Generator[GeneratedToken, None, None]:
    """Yield the first token, then the tokens of rounds."""
    text = state.text
    tokens = round_of(plan, state, NO_TOKENS, is_first=True, **plan.embedded(text.prompt - 1, text.prompt))
    plan.progress(text.prompt, text.prompt)
    yield from handed_out(plan, state, tokens)
    while text.goes_on:
        proposal = propose(plan, state) if state.proposal is None else state.proposal
        if not proposal and state.is_queued(plan):
            yield from plain(plan, state)
        else:
            yield from handed_out(plan, state, round_of(plan, state, proposal))


def handed_out(plan: DecodePlan, state: DecodeState, tokens: list[GeneratedToken]) -> Iterator[GeneratedToken]:
    """Yield the tokens of a round. A device drafts the next ones at the same time."""
    if state.is_queued(plan) and state.text.goes_on:
        propose(plan, state)
    for token in tokens:
        state.shown += 1
        yield token


def prefill(plan: DecodePlan, state: DecodeState) -> None:
    """Prefill all tokens of the prompt but the last, in the verifier and the drafters."""
    text = state.text
    tokens, last = text.array(), text.prompt - 1
    if state.kv_gears is not None:
        state.kv_gears.begin_prompt()
    plan.progress(0, text.prompt)
    for start in range(0, last, plan.prefill_step):
        end = min(start + plan.prefill_step, last)
        with plan.on_stream():
            plan.verifier.prefill(tokens[start:end], state.cache, **plan.embedded(start, end))
            plan.quantize(state.cache)
            mx.eval([part.state for part in state.cache])
            for drafter in state.drafters:
                drafter.prefill(tokens[start:end])
        plan.progress(end, text.prompt)
        mx.clear_cache()


def propose(plan: DecodePlan, state: DecodeState) -> Proposal:
    """Return the proposal of the first drafter that has one, queued if a device computes it."""
    state.started, state.proposal = (plan.clock(), state.away), NO_TOKENS
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
        except Exception as error:  # a failed draft must not end the sequence
            state.drafters.remove(drafter)
            message = f"mode 'lossless' cannot draft for this model ({one_line(error)}); plain decoding takes over"
            warnings.warn(message, GearbxWarning, stacklevel=7)
    return state.proposal


def verify(plan: DecodePlan, state: DecodeState, proposal: Proposal, **of_prompt: mx.array) -> VerifiedPass:
    """Return the verifier's logits after the last token and each proposed one, from one forward pass."""
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
    """Choose a token after each row, up to the first rejected proposal, and add the tokens to the text.

    Returns:
        the tokens, and the margins of the proposed tokens if they are known.
    """
    text, chooser, logits = state.text, plan.chooser, found.logits[0]
    context = text.array() if chooser.processors else None
    rows = choose_rows(chooser, plan.reader, plan.agreement, logits, context, proposal.array())
    queued = [each for each in (proposal.tokens, proposal.margins) if isinstance(each, mx.array)]
    tokens, choices, read = rows.read(plan.agreement, *queued)
    accepted = in_common(tokens, [*proposal.tokens] if proposal.is_known else read.pop(0))
    rounding = rounding_of(choices[:, Choice.MAGNITUDE].max(), logits.dtype)
    with np.errstate(invalid="ignore"):  # Telemetry refuses logits that are not finite
        near = (choices[:, Choice.BEST] - choices[:, Choice.NEXT] <= rounding) & (found.count > 1)
    generated = list[GeneratedToken]()
    for place, step in enumerate(found.steps(proposal, accepted, **kv_read(state.kv_gears))):
        token, bits = int(tokens[place]), float(choices[place, Choice.ENTROPY])
        generated.append(GeneratedToken(token, rows.logprobs[place], bits, step, bool(near[place])))
        text.add(token)
        if not text.goes_on:
            break
    state.random_states = rows.states
    if rows.states:
        set_random_state(rows.states[len(generated) - 1])
    return generated, read[0].tolist() if read else [*(proposal.margins or ())]


def round_of(
    plan: DecodePlan, state: DecodeState, proposal: Proposal, is_first: bool = False, **of_prompt: mx.array
) -> list[GeneratedToken]:
    """Verify a proposal and return the next tokens; the KV cache holds all but the last. An error leaves it as is.

    Args:
        is_first: whether the pass reads the last token of the prompt.
    """
    draft_seconds = state.seconds(plan) if proposal.is_known and proposal.source == DRAFT else None
    with plan.on_stream():
        if not is_first:  # mlx-lm quantizes after a pass, this loop before the next one, so that entries can be cut
            plan.quantize(state.cache)
        found = verify(plan, state, proposal, **of_prompt)
        try:
            tokens, margins = accept(plan, state, proposal, found)
        except BaseException:  # an interrupt, or an error of a sampler or logits processor
            found.keep(0)
            raise
        found.keep(len(tokens))
        for drafter in state.drafters:
            drafter.settle(state.text, found)
    state.proposal, state.is_last_read = None, False
    if proposal:
        drafted, accepted = len(proposal) * (proposal.source == DRAFT), len(tokens) - 1
        times = {"seconds": state.seconds(plan), "draft_seconds": draft_seconds}
        plan.policy.add_round(drafted=drafted, accepted=accepted, rows=found.count, margins=margins, **times)
    elif not is_first:
        state.time_plain(plan)
    return tokens


@dataclass
class Queued:
    """A token that the device computes.

    Attributes:
        found: the forward pass.
        rows: tokens chosen from its logits (one row).
        id: (1,), the token.
        step: passes and bytes of the token.
        context: the tokens before it (n,), for logits processors.
    """

    found: VerifiedPass
    rows: ChosenRows
    id: mx.array
    step: Step
    context: mx.array | None


def plain(plan: DecodePlan, state: DecodeState) -> Iterator[GeneratedToken]:
    """Yield tokens without proposals, one pass ahead, until the sequence ends or a drafter proposes.

    As in mlx-lm, the next pass is queued before the previous token is read, so a device never waits for Python. Native
    CPU kernels compute in the call, so their plain tokens are rounds of one row.
    """
    text, state.proposal = state.text, None
    context = text.array() if plan.chooser.processors else None
    coming: Queued | None = queue(plan, state, mx.array([text.last], mx.uint32), context)
    while coming is not None:
        state.started = plan.clock(), state.away
        ahead = None
        if stays_plain(plan, state):
            known = coming.context
            context = None if known is None else mx.concatenate([known, coming.id.astype(known.dtype)])
            ahead = queue(plan, state, coming.id, context)
        tokens, choices, _ = coming.rows.read(ALONE)
        text.add(int(tokens[0]))
        state.found, state.is_last_read = None, ahead is not None
        for drafter in state.drafters:
            drafter.settle(text, coming.found)
        state.time_plain(plan)
        yield GeneratedToken(text.last, coming.rows.logprobs[0], float(choices[0, Choice.ENTROPY]), coming.step)
        coming = ahead if text.goes_on else None


def stays_plain(plan: DecodePlan, state: DecodeState) -> bool:
    """Return whether no drafter will propose tokens after the one in computation."""
    if state.text.room <= 1:
        return False  # this token is the last one
    room = state.room(plan) - 1
    return room < 1 or not any(drafter.length(state.text, room, plan.policy) for drafter in state.drafters)


def queue(plan: DecodePlan, state: DecodeState, last: mx.array, context: mx.array | None) -> Queued:
    """Queue the token after `last` (1,)."""
    with plan.on_stream():
        plan.quantize(state.cache)
        found = plan.verifier.verify(last, state.cache)
        try:
            rows = choose_rows(plan.chooser, plan.reader, plan.agreement, found.logits[0], context)
        except BaseException:  # an interrupt, or an error of a sampler or logits processor
            found.keep(0)
            raise
        rows = replace(rows, choices=plan.agreement.arrays(rows.choices)[0])
        token = rows.sampled[0] if rows.sampled else rows.choices[:, Choice.TOKEN].astype(mx.uint32)
        mx.async_eval(token, rows.choices, rows.logprobs)  # evaluated later, they slow the next passes by a tenth
    (step,) = found.steps(NO_TOKENS, 0, **kv_read(state.kv_gears))
    return Queued(found, rows, token, step, context)


def leave(plan: DecodePlan, state: DecodeState) -> None:
    """Leave the KV caches as mlx-lm does: they hold the last token too."""
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
    """Cut text, KV cache and random state to the tokens that were yielded. Return whether some of a round were not.

    As in mlx-lm's loop, the cache holds the last of them, and the numbers of the next one are drawn.
    """
    found, text = state.found, state.text
    if found is None or state.shown >= found.kept:
        return False
    del text.tokens[len(text.tokens) - (found.kept - state.shown) :]
    found.keep(state.shown + 1)
    if state.random_states:
        set_random_state(state.random_states[state.shown])
    return True
