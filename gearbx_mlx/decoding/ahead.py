"""Plain decoding one token ahead, as in mlx-lm: the next pass is queued before the previous token is known.

Mode lossless uses it where a device computes and nothing is proposed, so the device never waits for Python. Native CPU
kernels return when a pass is done, so there each token is a round of one row.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import mlx.core as mx

from ..ranks.agreement import ALONE
from .plan import DecodePlan, DecodeState
from .response import GeneratedToken, Step
from .rows import NO_TOKENS, Verification
from .sampling import Choice, ChosenRows, choose_rows, take_kv_reads


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
        with nullcontext() if ahead is None else ahead.found.undone_by_errors():
            tokens, choices, _ = coming.rows.read(ALONE)  # rank 0's already, by `queue_token`
        text.add(tokens[0])
        state.found, state.is_last_read = None, ahead is not None
        state.settle(coming.found)
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
        # Without the magnitude of logits, which finds near-ties: a pass over one token has none.
        rows = replace(rows, choices=plan.agreement.arrays(rows.choices)[0], sampled=rows.sampled[:1])
        token = rows.tokens
        mx.async_eval(token, rows.choices, rows.logprobs)  # otherwise they wait for the next pass: 10% slower
    (step,) = found.steps(NO_TOKENS, 0, **take_kv_reads(state.kv_gears))
    return QueuedToken(found, rows, token, step, context)
