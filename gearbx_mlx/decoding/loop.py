"""Decoding loop of the modes lossless, kickdown and pair; the other modes use mlx-lm's loop.

    prefill
    while the sequence has not ended:
        proposal = propose()           # tokens of a drafter; often none
        found    = verify(proposal)    # one forward pass over the last token and the proposed ones
        tokens   = accept(found)       # the accepted tokens and one more; one read of the device

This is speculative decoding (Leviathan, Kalman, Matias, 2023, 2211.17192), with a different rule of acceptance. A
proposed token is accepted if it equals the token that the verifier samples there, not with probability min(1, p/q). So
the output equals the verifier's: a rejected proposal costs time only. In mode lossless the
verifier is the top gear. In kickdown it is the lowest gear that is certain of the token, in pair one of two models;
both have no proposals.

Common random numbers raise the acceptance rate: a token is drafted with the random numbers of its position, from logits
after the same processors (GEARBX 10.1).

Without logits processors, a device waits for Python once per round: draft and verification are queued without a read in
between. The next draft is queued before the round's tokens are yielded. Before the read, one graph of that draft's
first token is built for each possible number of accepted tokens.

Plain decoding runs one token ahead, as in mlx-lm: the next pass is queued before the previous token is known
(`decode_ahead`). Mode lossless uses it where a device computes and nothing is proposed, so the device never waits for
Python. Native CPU kernels return when a pass is done, so there each token is a round of one row.
"""

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..compat.arrays import set_random_state
from ..errors import GearbxError
from ..ranks.agreement import SINGLE_PROCESS
from .plan import DecodePlan, DecodeState
from .response import DRAFT, MODEL, GeneratedToken, Step
from .rows import NO_TOKENS, Proposal, Verification
from .sampling import Choice, ChosenRows, choose_rows, near_ties, take_kv_reads

CLEAR_EVERY = 256  # tokens between calls of mx.clear_cache, as in mlx-lm


def decode(plan: DecodePlan, state: DecodeState) -> Generator[GeneratedToken, None, None]:
    """Prefill the prompt, and yield the generated tokens.

    At the end, or when closed, the KV cache holds the prompt and exactly the yielded tokens, if a caller keeps it.
    """
    prefill(plan, state)
    rounds = generate_rounds(plan, state)
    try:
        for count, token in enumerate(itertools.chain.from_iterable(rounds)):
            state.shown += 1
            paused_at = plan.clock()
            yield token
            state.away += plan.clock() - paused_at
            if count % CLEAR_EVERY == 0:
                mx.clear_cache()
    except GeneratorExit:
        rounds.close()
    except BaseException:  # drafting may raise after a round's tokens joined the text, before they are yielded
        rewind_to_yielded(state)
        raise
    if plan.keywords.keeps_cache or plan.chooser.draws:
        finish_cache(plan, state)


def generate_rounds(plan: DecodePlan, state: DecodeState) -> Generator[list[GeneratedToken], None, None]:
    """Yield the first token, then the tokens of each round."""
    text = state.text
    tokens = run_round(plan, state, NO_TOKENS, is_first=True, **plan.keywords.embedded(text.prompt - 1, text.prompt))
    plan.keywords.progress(text.prompt, text.prompt)
    yield tokens
    while text.goes_on:
        proposal = propose(plan, state) if state.proposal is None else state.proposal
        if not proposal and state.is_queued:
            yield from decode_ahead(plan, state)
        else:
            yield run_round(plan, state, proposal)


def prefill(plan: DecodePlan, state: DecodeState) -> None:
    """Prefill all tokens of the prompt but the last, in the verifier and the drafters."""
    text = state.text
    tokens, last = text.array(), text.prompt - 1
    if state.kv_gears is not None:
        state.kv_gears.begin_prompt()
    plan.keywords.progress(0, text.prompt)
    for start in range(0, last, plan.keywords.prefill_step_size):
        end = min(start + plan.keywords.prefill_step_size, last)
        with plan.on_stream():
            hidden = plan.verifier.prefill(tokens[start:end], state.cache, **plan.keywords.embedded(start, end))
            plan.keywords.quantize(state.cache)
            mx.eval([part.state for part in state.cache])
            for drafter in state.drafters:
                drafter.prefill(tokens[start:end], hidden)
        plan.keywords.progress(end, text.prompt)
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
            state.drop(drafter, error)
    return state.proposal


def verify(plan: DecodePlan, state: DecodeState, proposal: Proposal, **embedded: mx.array) -> Verification:
    """Return the verifier's logits after the last token and each proposed one, from one forward pass."""
    last = [state.text.last]
    if proposal.is_known:
        rows: Any = [*last, *proposal.tokens]
    else:
        rows = mx.concatenate([mx.array(last, mx.uint32), proposal.array()])
    found = plan.verifier.verify(rows, state.cache, **embedded)
    state.found, state.is_queued, state.shown = found, found.is_queued, 0
    return found


def accept(
    plan: DecodePlan, state: DecodeState, proposal: Proposal, found: Verification
) -> tuple[list[GeneratedToken], list[float]]:
    """Choose a token after each row. Add the accepted tokens and the one after them to the text.

    Returns:
        the tokens, and the margins of the proposed tokens if they are known.
    """
    text, chooser, logits = state.text, plan.chooser, found.logits[0]
    for_processors = (text.array(), proposal.array()) if chooser.processors else ()
    rows = choose_rows(chooser, plan.reader, plan.agreement, logits, *for_processors)
    queued = [each for each in (proposal.tokens, proposal.margins) if isinstance(each, mx.array)]
    meanwhile = partial(build_ahead, state, found, rows) if state.is_queued else None
    tokens, choices, read = rows.read(plan.agreement, *queued, meanwhile=meanwhile)
    proposed: Sequence[int] = read.pop(0) if isinstance(proposal.tokens, mx.array) else proposal.tokens
    accepted = next((place for place, each in enumerate(proposed) if each != tokens[place]), len(proposed))
    near = near_ties(choices, logits.dtype) if found.count > 1 else [False]
    entropies, generated = choices[:, Choice.ENTROPY].tolist(), list[GeneratedToken]()
    for place, step in enumerate(found.steps(proposal, accepted, **take_kv_reads(state.kv_gears))):
        generated.append(GeneratedToken(tokens[place], rows.logprobs[place], entropies[place], step, near[place]))
        text.add(tokens[place])
        if not text.goes_on:
            break
    state.random_states = rows.states
    if len(generated) < len(rows.states):
        set_random_state(rows.states[len(generated) - 1])
    return generated, read[0] if read else [*(proposal.margins or ())]


def build_ahead(state: DecodeState, found: Verification, rows: ChosenRows) -> None:
    """Let drafters build graphs while the device verifies. `propose` repeats what failed here, and warns."""
    for drafter in state.drafters:
        with contextlib.suppress(Exception):
            drafter.build_ahead(found, rows)


def run_round(
    plan: DecodePlan, state: DecodeState, proposal: Proposal, is_first: bool = False, **embedded: mx.array
) -> list[GeneratedToken]:
    """Verify a proposal and return the next tokens. The KV cache then holds all tokens but the last.

    A device drafts the next proposal while the tokens are yielded. After an error in `verify` or `accept`, the cache is
    as before the round; after one in later drafting, `decode` drops the tokens of the round.

    Args:
        is_first: whether the pass reads the last token of the prompt.
    """
    with plan.on_stream():
        if not is_first:  # not after the pass, as in mlx-lm, since `found` may cut its caches until now
            plan.keywords.quantize(state.cache)
        found = verify(plan, state, proposal, **embedded)
        with found.undone_by_errors():
            tokens, margins = accept(plan, state, proposal, found)
        found.keep(len(tokens))
        state.update_drafters(found)
    state.proposal, state.is_last_read = None, False
    if proposal:
        counts = {
            "drafted": len(proposal) * (proposal.source == DRAFT),
            # the verifier chose the last token, unless an accepted one ended the sequence
            "accepted": len(tokens) - (tokens[-1].step.source == MODEL),
            "tokens": len(tokens),
            "rows": found.count,
        }
        plan.policy.add_round(**counts, seconds=state.seconds(plan), margins=margins)
    elif not is_first:
        state.time_plain(plan)
    if state.is_queued and state.text.goes_on:
        propose(plan, state)
    return tokens


@dataclass
class QueuedToken:
    """A token that the device computes.

    Attributes:
        found: the forward pass.
        rows: tokens chosen from its logits (one row).
        id: (1,), the token.
        step: passes and bytes of the token.
        context: the tokens before it (n,), for logits processors.
    """

    found: Verification
    rows: ChosenRows
    id: mx.array
    step: Step
    context: mx.array | None


def decode_ahead(plan: DecodePlan, state: DecodeState) -> Iterator[list[GeneratedToken]]:
    """Yield single tokens without proposals, one pass ahead, until the sequence ends or a drafter proposes."""
    text, state.proposal = state.text, None
    context = text.array() if plan.chooser.processors else None
    state.started = plan.clock(), state.away
    coming: QueuedToken | None = queue_token(plan, state, mx.array([text.last], mx.uint32), context)
    while coming is not None:
        ahead = None
        if stays_plain(plan, state):
            known = coming.context
            context = None if known is None else mx.concatenate([known, coming.id.astype(known.dtype)])
            ahead = queue_token(plan, state, coming.id, context)
        with contextlib.nullcontext() if ahead is None else ahead.found.undone_by_errors():
            tokens, choices, _ = coming.rows.read(SINGLE_PROCESS)  # `queue_token` has exchanged them among ranks
        text.add(tokens[0])
        state.found, state.is_last_read = None, ahead is not None
        state.update_drafters(coming.found)
        state.time_plain(plan)
        state.started = plan.clock(), state.away  # the device computes the next token while the consumer takes this one
        yield [GeneratedToken(text.last, coming.rows.logprobs[0], float(choices[0, Choice.ENTROPY]), coming.step)]
        coming = ahead if text.goes_on else None


def stays_plain(plan: DecodePlan, state: DecodeState) -> bool:
    """Return whether to queue one more pass: its token has room, and no drafter can propose after the known tokens."""
    if state.text.room <= 1:
        return False  # this token is the last one
    room = state.room(plan) - 1
    return room < 1 or not any(drafter.length(state.text, room, plan.policy) for drafter in state.drafters)


def queue_token(plan: DecodePlan, state: DecodeState, last: mx.array, context: mx.array | None) -> QueuedToken:
    """Queue the token after `last` (1,)."""
    with plan.on_stream():
        plan.keywords.quantize(state.cache)
        found = plan.verifier.verify(last, state.cache)
        with found.undone_by_errors():
            rows = choose_rows(plan.chooser, plan.reader, plan.agreement, found.logits[0], context)
        # Without the logits' magnitude, which only near-ties need: passes over one token report none.
        rows = replace(rows, choices=plan.agreement.arrays(rows.choices)[0], sampled=rows.sampled[:1])
        token = rows.tokens
        mx.async_eval(token, rows.choices, rows.logprobs)  # otherwise they wait for the next pass: 10% slower
    (step,) = found.steps(NO_TOKENS, 0, **take_kv_reads(state.kv_gears))
    return QueuedToken(found, rows, token, step, context)


def finish_cache(plan: DecodePlan, state: DecodeState) -> None:
    """Add the last token to the KV caches, and draw the next token's random numbers, as mlx-lm does one token ahead."""
    text = state.text
    with plan.verifier.exclusive(), plan.on_stream():
        if not rewind_to_yielded(state) and not state.is_last_read:
            context = text.array() if plan.chooser.processors else None
            plan.keywords.quantize(state.cache)
            last = plan.verifier.verify([text.last], state.cache)
            rows = choose_rows(plan.chooser, plan.reader, plan.agreement, last.logits[0], context)
            mx.async_eval(rows.logprobs, *rows.sampled)
        plan.keywords.quantize(state.cache)
        state.update_drafters(None)


def rewind_to_yielded(state: DecodeState) -> bool:
    """Rewind text, KV cache and random state to the yielded tokens. Return True if tokens of the round were dropped.

    If so, the cache also holds the last yielded token, and the next one's random numbers are drawn, as in mlx-lm.
    """
    found, text = state.found, state.text
    if found is None or state.shown >= found.kept:
        return False
    del text.tokens[len(text.tokens) - (found.kept - state.shown) :]
    found.keep(state.shown + 1)
    if state.random_states:
        set_random_state(state.random_states[state.shown])
    return True
