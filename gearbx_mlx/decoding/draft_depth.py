"""How many steps of a draft to queue ahead on this machine (drafting.py).

Each step ahead may save the time for which the device would wait until a token is read and the next step is queued. It
costs a pass of the draft gear where the draft ends before it.
"""

import statistics
import time
from collections.abc import Mapping

import mlx.core as mx

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..kernels.candidates import is_tuning
from ..kernels.dispatch import on_cpu
from ..routing.acceptance import ProductRule
from .draft_times import filled_cache
from .drafting import Drafter
from .entropy import fast_entropy
from .rows import Verifier
from .snapshots import Snapshot

DEPTHS = (0, 1, 2, 4)
DRAFTED = 8  # tokens of a usual draft
TRIALS, FEW_TRIALS = 9, 3  # of a script; of the first text in mode lossless, which waits for them
CONTEXT = 256  # tokens before the draft
NEARLY = 1.02  # of the least time is as good: what is queued ahead in vain costs energy


def default_depth() -> int:
    """Steps to queue ahead where nothing is measured.

    On a CPU none: the device that waits is the one that would queue the next step, and steps that are thrown away
    delay the verification. On a GPU one, as mlx-lm does: it hides the wait after every token, and costs one pass of
    the draft gear in a draft.
    """
    return 0 if on_cpu() else 1


def depth_here(gearbox: Gearbox, draft: Gear) -> int:
    """Steps to queue ahead when `draft` drafts, by what was measured here; measured now if that was not done yet.

    The times are kept with those of kernels (kernels/tuning_cache.py). Nothing is measured on a CPU or with
    GEARBX_TUNE=0.
    """
    if on_cpu() or not is_tuning():
        return default_depth()
    tuner = gearbox.kernel_choices.tuner
    name = f"drafts of {draft.bits} bits for {gearbox.ladder.top.bits}, model {gearbox.fingerprint[:8]}"
    known = tuner.measured if gearbox.kernels.anew else tuner.cache.times
    if name not in known:
        times = round_times(gearbox, draft, CONTEXT, FEW_TRIALS)
        tuner.measured[name] = {str(depth): statistics.median(seconds) for depth, seconds in times.items()}
        tuner.cache.keep(name, tuner.measured[name])
        tuner.cache.save()
    return shallowest({int(depth): seconds for depth, seconds in tuner.cache.times[name].items()})


def shallowest(seconds: Mapping[int, float]) -> int:
    """The smallest depth that takes hardly longer than the fastest one, from the seconds of each."""
    enough = NEARLY * min(seconds.values())
    return min(depth for depth, value in seconds.items() if value <= enough)


def round_times(gearbox: Gearbox, draft: Gear, context: int, trials: int = TRIALS) -> dict[int, list[float]]:
    """Seconds of a draft of DRAFTED tokens and its verification, by depth, of each of the trials, which take turns.

    The rule ends each draft, so that all steps beyond are thrown away, and their time counts. The top gear is engaged
    afterwards.

    Args:
        draft: the gear that drafts.
        context: tokens in the KV cache before the draft.
        trials: after one that does not count.
    """
    verifier = Verifier(gearbox, gearbox.ladder.top)
    gearbox.shift(gearbox.ladder.top)
    cache = filled_cache(gearbox.model, context)
    before = Snapshot(cache)
    rule = ProductRule(lambda entropy: 0.5, 0.5 ** (DRAFTED - 0.5))  # ends after so many tokens, whatever they are
    entropy = fast_entropy(gearbox)
    drafters = {depth: Drafter(gearbox, draft, rule, entropy, ahead=depth) for depth in DEPTHS}
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(trials + 1):
        for depth, drafter in drafters.items():
            with before.borrowed():
                begun = time.perf_counter()
                tokens = drafter.draft(1, cache, DRAFTED + max(DEPTHS)).tokens
                mx.eval(verifier.rows(mx.array([[1, *tokens]]), cache).logits)
                seconds[depth].append(time.perf_counter() - begun)
    return {depth: found[1:] for depth, found in seconds.items()}  # the first one compiles and fills caches
