"""How many steps of a draft to queue ahead on this machine (drafting.py).

Each step ahead may save the time for which the device would wait until a token is read and the next step is queued. It
costs a pass of the draft gear where the draft ends before it.
"""

import statistics
import time
from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..compat.arrays import dtype_name
from ..gears.gearbox import Gearbox
from ..gears.kernel_choices import uncounted
from ..gears.ladder import Gear
from ..gears.offload import Resident
from ..kernels.dispatch import is_tuning, on_cpu
from ..routing.acceptance import DraftRule, FixedLength, ProductRule
from .draft_times import filled_cache
from .drafting import Drafter
from .entropy import fast_entropy
from .rows import Verifier
from .snapshots import Snapshot

DEPTHS = (0, 1, 2)
DRAFTED = 8  # tokens of a usual draft
TRIALS = 9
FEW_TRIALS, FEW_DRAFTED, FEW_BEFORE = 2, 4, 32  # some 50 passes of the draft gear; FEW_BEFORE: tokens before a draft
NEARLY = 1.02  # of the least time is as good: what is queued ahead in vain costs energy


def default_depth() -> int:
    """Steps to queue ahead where nothing is measured.

    On a CPU none: the device that waits is the one that would queue the next step, and steps that are thrown away
    delay the verification. On a GPU one, as mlx-lm does: it hides the wait after every token, and costs one pass of
    the draft gear in a draft.
    """
    return 0 if on_cpu() else 1


def depth_here(gearbox: Gearbox, draft: Gear, rule: DraftRule) -> int:
    """Steps to queue ahead when `draft` drafts, by what was measured here; measured now if that was not done yet.

    The times are kept with those of kernels (kernels/tuner.py). Nothing is measured where it would change
    nothing (a CPU, drafts of a fixed length), where it would read weights from a disk, and with GEARBX_TUNE=0.
    """
    if isinstance(rule, FixedLength):
        return 0
    if on_cpu() or not is_tuning() or not isinstance(gearbox.residency, Resident):
        return default_depth()
    tuner, name = gearbox.kernel_choices.tuner, name_of(gearbox, draft)
    known = tuner.measured if gearbox.kernels.anew else tuner.cache.times
    if not known.get(name, {}).keys() >= {*map(str, DEPTHS)}:
        try:
            found = few_round_times(gearbox, draft)
        except RuntimeError:  # without memory for it, say: the text must not end for that
            return default_depth()
        tuner.seconds += sum(map(sum, found.values()))
        tuner.measured[name] = {str(depth): statistics.median(seconds) for depth, seconds in found.items()}
        tuner.cache.keep(name, tuner.measured[name])
        tuner.cache.save()
    return shallowest({depth: tuner.cache.times[name][str(depth)] for depth in DEPTHS})


def name_of(gearbox: Gearbox, draft: Gear) -> str:
    """What the times depend on beside the machine, as a key of the cache."""
    kernels = "native" if gearbox.kernels.native else "mlx"
    how = f"{gearbox.format.name}, {dtype_name(gearbox.compute_dtype)}, {kernels} kernels"
    return f"drafts of {draft.bits} bits for {gearbox.ladder.top.bits}, model {gearbox.fingerprint[:8]}, {how}"


def few_round_times(gearbox: Gearbox, draft: Gear) -> dict[int, list[float]]:
    """`round_times` of short drafts in few trials, since a text waits for them; the gearbox counts no shifts."""
    with uncounted(gearbox):
        return round_times(gearbox, draft, FEW_BEFORE, FEW_TRIALS, FEW_DRAFTED)


def shallowest(seconds: Mapping[int, float]) -> int:
    """The smallest depth that takes hardly longer than the fastest one, from the seconds of each."""
    enough = NEARLY * min(seconds.values())
    return min(depth for depth, value in seconds.items() if value <= enough)


def round_times(
    gearbox: Gearbox,
    draft: Gear,
    context: int,
    trials: int = TRIALS,
    drafted: int = DRAFTED,
    depths: Sequence[int] = DEPTHS,
) -> dict[int, list[float]]:
    """Seconds of a draft and its verification, by depth, of each of the trials, which take turns.

    The rule ends each draft, so that all steps beyond are thrown away, and their time counts. The top gear is engaged
    afterwards.

    Args:
        draft: the gear that drafts.
        context: tokens in the KV cache before the draft.
        trials: after one that does not count.
        drafted: tokens of a draft. depths: that are tried.
    """
    verifier = Verifier(gearbox, gearbox.ladder.top)
    gearbox.shift(gearbox.ladder.top)
    cache = filled_cache(gearbox.model, context)
    before = Snapshot(cache)
    rule = ProductRule(lambda entropy: 0.5, 0.5 ** (drafted - 0.5))  # ends after so many tokens, whatever they are
    entropy = fast_entropy(gearbox)
    drafters = {depth: Drafter(gearbox, draft, rule, entropy, ahead=depth) for depth in depths}
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    for _ in range(trials + 1):
        for depth, drafter in drafters.items():
            with before.borrowed():
                begun = time.perf_counter()
                tokens = drafter.draft(1, cache, drafted + max(depths)).tokens
                mx.eval(verifier.rows(mx.array([[1, *tokens]]), cache).logits)
                seconds[depth].append(time.perf_counter() - begun)
    return {depth: found[1:] for depth, found in seconds.items()}  # the first one compiles and fills caches
