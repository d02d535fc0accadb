"""Plain decoding one token ahead, as in mlx-lm: the next pass is queued before the token before it is known.

It serves mode lossless where MLX computes and nothing is worth a verification. A device then never waits for Python.
Native kernels of a CPU return when they are done, so there is nothing to hide, and each token is a round of one row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from ..ranks.agreement import ALONE
from .plan import DecodePlan, DecodeState
from .response import GeneratedToken, Step
from .rows import NO_TOKENS, VerifiedPass
from .sampling import Choice, ChosenRows, choose_rows, kv_read


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
