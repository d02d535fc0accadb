"""Lossless along a text: the low gear drafts, the top gear checks the draft in one pass.

Along a given text the draft reads the text's own tokens. A token of the draft is accepted where both gears like the
same one best, whatever the text says; the first on which they differ ends what is kept, and the top gear's own
prediction there is kept as well. So the passes are those of greedy generation that wrote this text.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.caches import room, take_back, untrimmable
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, AcceptanceCurve, DraftRule, best_bound, fit_curve
from .metrics import entropy_bits, log_softmax
from .replay import Recording, Step, next_logprobs


def sequences_of(recorded: Recording) -> list[tuple[list[float], list[bool]]]:
    """Entropies and agreements of each window."""
    inside = [recorded.window == number for number in np.unique(recorded.window)]
    return [(recorded.entropy[chosen].tolist(), recorded.agree[chosen].tolist()) for chosen in inside]


def best_rule(recorded: Recording, low_bytes: float, top_bytes: float) -> tuple[AcceptanceCurve, float, float]:
    """The curve a(H) of what the low gear recorded, the bound on its product at which the least is read, and the weight
    bytes per token that this comes to over the recorded tokens themselves."""
    curve = fit_curve(recorded.entropy.tolist(), recorded.agree.tolist())
    return curve, *best_bound(sequences_of(recorded), curve, low_bytes, top_bytes)


def drafted(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], low: Gear, top: Gear, rule: DraftRule
) -> Iterator[Step]:
    """Read the windows in lossless mode. Once a draft is checked, the cache holds entries of the top gear alone.

    The passes of a draft and of its check are counted with the first prediction that is kept.

    Raises:
        GearbxError: nothing can be taken back from the model's cache.
    """
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model)
        if room(cache) < len(window):
            raise untrimmable(cache, "lossless")
        place, last = 0, len(window) - 1  # nothing follows the last token
        while place < last:
            most = min(MOST_DRAFTED, last - place - 1)  # the check reads one token more than the draft
            gearbox.shift(low)
            liked = draft(gearbox, window[place : place + most], cache, rule)
            if liked:
                take_back(cache, len(liked))
            gearbox.shift(top)
            checked = next_logprobs(gearbox.model, window[place : place + len(liked) + 1], cache)
            same = (int(row.argmax()) == like for row, like in zip(checked, liked))
            kept = sum(itertools.takewhile(bool, same)) + 1
            if kept <= len(liked):
                take_back(cache, len(liked) + 1 - kept)
            passes = [0] * len(gearbox.ladder)
            passes[low.index] += len(liked)
            passes[top.index] += 1
            for offset in range(kept):
                yield Step(number, window[place + offset + 1], checked[offset], top, passes)
                passes = [0] * len(gearbox.ladder)
            place += kept


def draft(gearbox: Gearbox, tokens: Sequence[int], cache: object, rule: DraftRule) -> list[int]:
    """What the engaged gear likes best after each token, for as long as the rule goes on."""
    rule.begin()
    liked: list[int] = []
    for token in tokens:
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        liked.append(int(logprobs.argmax()))
        if not rule.goes_on(float(entropy_bits(log_softmax(logprobs)))):
            break
    return liked
