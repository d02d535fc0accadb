"""What passes of drafts and verifications take here, measured before the first text that drafts."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.kernel_choices import uncounted
from ..gears.ladder import Gear
from ..gears.offload import Resident
from ..routing.acceptance import MOST_DRAFTED, FixedLength
from ..routing.rounds import PassTimes
from .caches import Snapshot
from .drafting import Drafter, Writer
from .rows import Verifier
from .sampling import GREEDY, reader_of

TRIALS, ROWS = 4, (1, 4, 8, 16)  # after one that compiles; rows of verifications: others cost what lies between
DRAFTED, BEFORE = 4, 32  # tokens of a draft, and before it


def few_pass_times(gearbox: Gearbox, draft: Gear) -> PassTimes | None:
    """Seconds of a drafted token, and of verifications of a few rows, in few trials, since a text waits for them.

    None where that would read weights from a disk, and where there is no memory for it.
    """
    top = gearbox.ladder.top
    if draft == top or not isinstance(gearbox.residency, Resident):
        return None
    try:
        with uncounted(gearbox):
            passes = TimedPasses(gearbox, top, draft, BEFORE)
            trials: list[Callable[[], float]] = [passes.drafted, *(partial(passes.verified, rows) for rows in ROWS)]
            step, *verified = map(statistics.median_low, passes.seconds(trials, TRIALS))
    except RuntimeError:  # the text must not end for that
        return None
    return step, dict(zip(ROWS, verified))


class TimedPasses:
    """Passes over a KV cache with so many tokens, each of which returns the seconds that it took."""

    def __init__(self, gearbox: Gearbox, top: Gear, draft: Gear, context: int):
        self.gearbox, self.top = gearbox, top
        gearbox.shift(top)
        self._size, self.cache = vocabulary(gearbox.model), make_prompt_cache(gearbox.model)
        mx.eval(gearbox.model(mx.arange(context)[None] % self._size, cache=self.cache))
        self._verifier, self._drafter = Verifier(gearbox, top), Drafter(gearbox, draft, reader_of(gearbox))

    def drafted(self) -> float:
        """A token of a draft that is chosen greedily."""
        begun = time.perf_counter()
        text = Writer(GREEDY, 1, MOST_DRAFTED, lambda token: False)
        self._drafter.draft(text, self.cache, FixedLength(DRAFTED), DRAFTED)
        return (time.perf_counter() - begun) / DRAFTED

    def verified(self, rows: int) -> float:
        """A verification."""
        begun = time.perf_counter()
        mx.eval(self._verifier.rows(mx.arange(rows)[None] % self._size, self.cache).logits)
        return time.perf_counter() - begun

    def seconds(self, trials: Sequence[Callable[[], float]], count: int) -> list[list[float]]:
        """Of each of the trials, which take turns `count` times, after one that compiles and fills caches.

        The top gear is then engaged.
        """
        before, seconds = Snapshot(self.cache), [list[float]() for _ in trials]
        for _ in range(count + 1):
            for trial, found in zip(trials, seconds):
                with before.borrowed():
                    found.append(trial())
        self.gearbox.shift(self.top)
        return [found[1:] for found in seconds]
