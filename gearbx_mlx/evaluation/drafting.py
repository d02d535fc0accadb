"""Lossless along a text: the low gear drafts, the top gear verifies the draft in one pass.

Along a given text the low gear reads the text's own tokens. A drafted token is accepted where both gears have the same
most likely token, even if the text has another. The first token on which they differ ends the draft, and the top gear's
prediction stands there. So the passes are those of a greedy generation that would have written this text.
"""

import itertools
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.rows import Verifier
from ..decoding.snapshots import Snapshot
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, AcceptanceCurve, DraftRule, best_bound, fit_curve
from .metrics import entropy_of_logprobs, log_softmax
from .replay import Recording, ReplayStep, logprobs_of, next_logprobs


def sequences_of(recorded: Recording) -> list[tuple[list[float], list[bool]]]:
    """Entropies and agreements of each window."""
    inside = [recorded.window == number for number in np.unique(recorded.window)]
    return [(recorded.entropy[chosen].tolist(), recorded.agree[chosen].tolist()) for chosen in inside]


def best_rule(recorded: Recording, low_bytes: float, top_bytes: float) -> tuple[AcceptanceCurve, float, float]:
    """The rule that reads the fewest bytes on the recorded tokens.

    Args:
        recorded: the low gear alone.
        low_bytes, top_bytes: weight bytes of a pass in either gear.

    Returns:
        the curve a(H), the bound on its product, and weight bytes per token.
    """
    curve = fit_curve(recorded.entropy.tolist(), recorded.agree.tolist())
    return curve, *best_bound(sequences_of(recorded), curve, low_bytes, top_bytes)


def drafted(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], low: Gear, top: Gear, rule: DraftRule
) -> Iterator[ReplayStep]:
    """The predictions of lossless mode along the windows.

    After every verification the KV cache consists of the top gear's entries alone. The first prediction of a draft
    counts the passes of the draft and of its verification.
    """
    verifier = Verifier(gearbox, top)
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model)
        place, last = 0, len(window) - 1  # nothing follows the last token
        while place < last:
            most = min(MOST_DRAFTED, last - place - 1)  # the verification reads one token more than the draft
            gearbox.shift(low)
            with Snapshot(cache).borrowed():
                drafts = draft(gearbox, window[place : place + most], cache, rule)
            read = mx.array([window[place : place + len(drafts) + 1]])
            rows = verifier.rows(read, cache)
            verified = logprobs_of(rows.logits)
            same = (int(row.argmax()) == token for row, token in zip(verified, drafts))
            kept = sum(itertools.takewhile(bool, same)) + 1
            rows.show(kept)
            passes = [0] * len(gearbox.ladder)
            passes[low.index] += len(drafts)
            passes[top.index] += 1
            for offset in range(kept):
                yield ReplayStep(number, window[place + offset + 1], verified[offset], top, passes)
                passes = [0] * len(gearbox.ladder)
            place += kept


def draft(gearbox: Gearbox, tokens: Sequence[int], cache: object, rule: DraftRule) -> list[int]:
    """The engaged gear's most likely token after each of the tokens, until the rule stops the draft."""
    rule.begin()
    drafts: list[int] = []
    for token in tokens:
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        drafts.append(int(logprobs.argmax()))
        if not rule.goes_on(float(entropy_of_logprobs(log_softmax(logprobs)))):
            break
    return drafts
