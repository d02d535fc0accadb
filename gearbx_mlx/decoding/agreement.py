"""What each gear would have drafted along the top gear's own text, for `calibrate --mode lossless`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..errors import GearbxError
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import AcceptanceCurve, best_bound, best_length, fit_curve
from ..routing.draft_costs import predicted_cost
from ..routing.draft_file import DraftFile, DraftTimes
from ..routing.entropy import entropy_bits
from ..routing.pass_costs import LearnedCosts
from .draft_times import machine_of, measure_times
from .snapshots import Snapshot

BLOCK = 8  # tokens that a gear reads on the top gear's cache before it is put right again: the length of a usual draft


@dataclass
class GearRecord:
    """Of one gear, for each token of a text: its entropy (bits), and whether it would choose the top gear's token."""

    entropies: list[float]
    agrees: list[bool]


def record_agreement(
    gearbox: Gearbox, top: Gear, gears: Sequence[Gear], prompt: Sequence[int], text: Sequence[int]
) -> list[GearRecord]:
    """Run the gears over a text that the top gear wrote, each on the top gear's KV cache, as when it drafts.

    Args:
        top: the gear that verifies.
        gears: those that might draft.
        prompt: tokens, one or more.
        text: tokens that the top gear wrote after it, greedily.

    Returns:
        for each gear, len(text) entropies and answers. The top gear is engaged afterwards.
    """
    model = gearbox.model
    cache = make_prompt_cache(model)
    gearbox.shift(top)
    if len(prompt) > 1:
        model(mx.array(list(prompt[:-1]))[None], cache=cache)
    inputs = [prompt[-1], *text[:-1]]
    found = [GearRecord([], []) for _ in gears]
    for start in range(0, len(inputs), BLOCK):
        block = mx.array(inputs[start : start + BLOCK])[None]
        chosen = mx.array(list(text[start : start + BLOCK]))
        before = Snapshot(cache)
        for gear, agreement in zip(gears, found):
            gearbox.shift(gear)
            logits = model(block, cache=cache)[0]
            before.restore()
            agreement.entropies += np.array(entropy_bits(logits)).tolist()
            agreement.agrees += np.array(mx.argmax(logits, axis=-1) == chosen).tolist()
        gearbox.shift(top)
        mx.eval(model(block, cache=cache))
    return found


def draft_files(
    gearbox: Gearbox,
    top: Gear,
    recorded: dict[Gear, list[GearRecord]],
    name: str,
    group_size: int,
    format: str,
    context: int | None = None,
) -> Iterable[DraftFile]:
    """For each gear that was recorded, the curve and the bound that cost the fewest bytes of weights per token.

    Args:
        context: measure what passes take after so many tokens, too.

    Raises:
        GearbxError: no tokens were recorded.
    """
    verification, original = gearbox.weight_bytes_per_token(top), gearbox.original_bytes_per_token()
    for gear, texts in recorded.items():
        sequences = [(text.entropies, text.agrees) for text in texts if text.entropies]
        if not sequences:
            raise GearbxError("calibration has no tokens; give prompts that the model answers")
        entropies = [value for text in texts for value in text.entropies]
        agrees = [value for text in texts for value in text.agrees]
        curve = fit_curve(entropies, agrees)
        draft = gearbox.weight_bytes_per_token(gear)
        bound, read = best_bound(sequences, curve, draft, verification)
        length, fixed = best_length(sequences, draft, verification)
        yield DraftFile(
            gears=[g.bits for g in gearbox.ladder if g.bits <= top.bits],
            draft=gear.bits,
            bound=bound,
            edges=list(curve.edges),
            agreement=list(curve.agreement),
            vocab_size=vocabulary(gearbox.model),
            fingerprint=gearbox.fingerprint,
            model=name,
            group_size=group_size,
            format=format,
            tokens=len(entropies),
            agreement_overall=sum(agrees) / len(agrees),
            weight_bytes_per_token=read,
            weight_bytes_per_token_top=verification,
            best_fixed_length=length,
            fixed_weight_bytes_per_token=fixed,
            weight_bytes_per_token_original=None if original == verification else original,
            times=None if context is None else draft_times(gearbox, top, gear, context, sequences, curve),
        )


def draft_times(
    gearbox: Gearbox,
    top: Gear,
    draft: Gear,
    context: int,
    sequences: Sequence[tuple[Sequence[float], Sequence[bool]]],
    curve: AcceptanceCurve,
) -> DraftTimes:
    """What passes take after `context` tokens, measured now, and what a token of the recorded texts takes with them."""
    alone, token, verifications = measure_times(gearbox, top, draft, context)
    predicted = predicted_cost(sequences, curve, LearnedCosts((token, verifications)))
    return DraftTimes(machine_of(gearbox), context, alone, token, verifications, predicted)
