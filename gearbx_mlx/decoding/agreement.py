"""What each gear would have drafted: recorded on the top gear's own text, for `calibrate --mode lossless`."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.entropy import entropy_bits
from .caches import take_back

BLOCK = 8  # tokens that a gear reads on the top gear's cache before it is put right again: the length of a usual draft


@dataclass
class Agreement:
    """Of one gear, for each token of a text: its entropy (bits), and whether it would choose the top gear's token."""

    entropies: list[float]
    agrees: list[bool]


def record_agreement(gearbox: Gearbox, gears: Sequence[Gear], prompt: Sequence[int], text: Sequence[int]) -> list[Agreement]:
    """Run the gears over a text that the top gear wrote, each on the top gear's KV cache, as when it drafts.

    Args:
        gears: those that might draft.
        prompt: tokens, one or more.
        text: tokens that the top gear wrote after it, greedily.

    Returns:
        for each gear, len(text) entropies and answers. The top gear is engaged afterwards.
    """
    model, top = gearbox.model, gearbox.ladder.top
    cache = make_prompt_cache(model)
    gearbox.shift(top)
    if len(prompt) > 1:
        model(mx.array(prompt[:-1])[None], cache=cache)
    inputs = [prompt[-1], *text[:-1]]
    found = [Agreement([], []) for _ in gears]
    for start in range(0, len(inputs), BLOCK):
        block = mx.array(inputs[start : start + BLOCK])[None]
        chosen = mx.array(text[start : start + BLOCK])
        for gear, agreement in zip(gears, found):
            gearbox.shift(gear)
            logits = model(block, cache=cache)[0]
            take_back(cache, block.size)
            agreement.entropies += entropy_bits(logits).tolist()
            agreement.agrees += (mx.argmax(logits, axis=-1) == chosen).tolist()
        gearbox.shift(top)
        mx.eval(model(block, cache=cache))
    return found
