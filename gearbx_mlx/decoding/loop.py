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

import warnings
from collections.abc import Generator, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ..compat.arrays import set_random_state
from ..errors import GearbxError, GearbxWarning, one_line
from .ahead import plain
from .caches import in_common
from .plan import DecodePlan, DecodeState
from .response import DRAFT, GeneratedToken
from .rows import NO_TOKENS, Proposal, VerifiedPass
from .sampling import Choice, choose_rows, kv_read, rounding_of

CLEARED = 256  # tokens between calls of mx.clear_cache, as in mlx-lm


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
