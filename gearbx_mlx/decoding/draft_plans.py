"""How lossless mode drafts: always so many tokens, by a rule of the user's, or at what passes cost here.

Costs are time; of a streamed top gear bytes at measured speeds. What was learned is kept for this model and machine, so
that the next start begins with it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ..compat.arrays import dtype_name
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..gears.streaming import Stream
from ..kernels.dispatch import is_tuning
from ..kernels.tuner import Times
from ..ranks.agreement import agreement_of
from ..routing.acceptance import USUAL_LENGTH, DraftRule, FixedLength, LearnedAgreement
from ..routing.rounds import (
    LONGEST,
    MOST_ROWS,
    TEXTS_DIFFER,
    UNMADE,
    CostRule,
    Costs,
    LearnedCosts,
    OneStretch,
    PassTimes,
    Rounds,
    Stretches,
)


class StreamCosts(Costs):
    """The costs of a drafted token and of a verification, in bytes of memory.

    While a verification reads the disk it computes, so that the slower of both counts. So rows have no share of
    their own.

    Args:
        gearbox: with residency `stream`.
        draft: the gear that drafts.
    """

    def __init__(self, gearbox: Gearbox, stream: Stream, draft: Gear):
        top, positions, read = gearbox.ladder.top, (1, 2), gearbox.weight_bytes_per_token(draft)
        of_disk = [gearbox.disk_bytes_per_token(top, count) for count in positions]
        of_memory = [gearbox.weight_bytes_per_token(top, i) - disk for i, disk in zip(positions, of_disk)]

        def verification(rows: int) -> float:
            one, two = (max(memory, disk * stream.slowdown) for memory, disk in zip(of_memory, of_disk))
            return one + (rows - 1) * (two - one)  # each further token of a mixture has experts of its own

        super().__init__(lambda: read, verification)
        self.row_share, self._stream, self._read = 0.0, stream, read

    def add_draft(self, seconds: float, steps: int = 1) -> None:
        self._stream.memory.add(steps * self._read, seconds)


def fixed_costs(gearbox: Gearbox, draft: Gear) -> Costs:
    """Costs that are the same on every machine: a drafted token costs its bits, as a share of the top gear's."""
    share = draft.bits / gearbox.ladder.top.bits
    return Costs(lambda: share, lambda rows: 1.0)


Trial = Callable[[Gearbox, Gear], PassTimes | None]


class Learning:
    """What is learned about drafts, beginning with what earlier starts on this machine kept.

    That stands beside the times of kernels (tuner.py). Nothing is known, and nothing is kept, where kernels are not
    measured either (GEARBX_TUNE=0).

    Args:
        draft: the gear that drafts.
        about: further settings that times depend on, in words.
        trial: measures times where nothing is known.

    Attributes:
        costs: in seconds. stretches: of rounds, and of the top gear alone. agreement: a(m) of the gear.
    """

    # Beside the rows of verifications: seconds, and the tokens until the way that lost is tried again.
    STEP, IN_ROUNDS, ALONE, LEFT = "drafted", "token in rounds", "token alone", "tokens until a trial"
    ROWS = tuple(map(str, range(1, MOST_ROWS + 1)))

    def __init__(self, gearbox: Gearbox, draft: Gear, about: str, trial: Trial):
        measured: PassTimes | None = None
        self._cache = gearbox.kernel_choices.tuner.cache
        self._name, self._drafts = f"rounds, {about}", f"agreement, {name_of(gearbox, draft)}"
        again = not is_tuning() or gearbox.kernels.again
        kept = self._kept = {} if again else self._cache.times.get(self._name, {})
        drafts = draft != gearbox.ladder.top
        if kept.keys() >= {*self.ROWS} and (self.STEP in kept or not drafts):
            measured = kept.get(self.STEP, 0.0), {int(rows): kept[rows] for rows in self.ROWS}
        if measured is None and is_tuning():
            measured = trial(gearbox, draft)
        self.costs = LearnedCosts(measured, drafts)
        # Where a trial has to make the gear first, it waits for so many times more tokens.
        self._scale = 1 if gearbox.has_made(draft) or self._rounds_win else UNMADE // LONGEST
        left = int(kept[self.LEFT] * self._scale) if self.LEFT in kept else None
        longest = LONGEST * self._scale
        self.stretches = Stretches(rounds_win=self._rounds_win, left=left, longest=longest)
        self.agreement = LearnedAgreement(None if again else self._cache.times.get(self._drafts))
        self._written = 0

    @property
    def _rounds_win(self) -> bool | None:
        """Whether rounds took less than the top gear alone, or may do so with another text; None: nothing is known."""
        rounds, alone = self._kept.get(self.IN_ROUNDS), self._kept.get(self.ALONE)
        return None if rounds is None or alone is None else rounds <= alone * (1 + TEXTS_DIFFER)

    @property
    def seconds(self) -> Times:
        """What is kept, with the times of the ways that were seen since."""
        ways = {self.IN_ROUNDS if way else self.ALONE: seconds for way, seconds in self.stretches.seconds.items()}
        return self._kept | ways

    def keep(self) -> None:
        """Keep what is known now, if it says something new."""
        if not is_tuning():
            return
        if self.agreement.drafted - self._written >= MUCH_WRITTEN:
            self._written = self.agreement.drafted
            self._cache.keep(self._drafts, self.agreement.state)
            self._cache.save_soon()
        if self.costs.seconds is None:
            return
        drafted, rows = self.costs.seconds
        scale = self._scale if self.stretches.untried else 1
        of_rows = {str(count): seconds for count, seconds in rows.items()}
        known = self.seconds | of_rows | {self.LEFT: self.stretches.left / scale}
        if drafted:  # else nothing drafts
            known[self.STEP] = drafted
        won, before, self._kept = self._rounds_win, self._kept, known
        news = any(not math.isclose(value, before.get(key, 0.0), rel_tol=NEWS) for key, value in known.items())
        written = (before.get(self.LEFT, 0.0) - known[self.LEFT]) * scale >= MUCH_WRITTEN
        if news or written or won != self._rounds_win:
            self._cache.keep(self._name, known)
            self._cache.save_soon()


def name_of(gearbox: Gearbox, draft: Gear) -> str:
    """What times depend on beside the machine, as a key of the cache."""
    kernels = "native" if gearbox.kernels.native else "mlx"
    if gearbox.base:
        kernels += ", calibrated,"
    if gearbox.kernels.x_bits:
        kernels += f" with activations of {gearbox.kernels.x_bits} bits"
    how = f"{gearbox.format.name}, {dtype_name(gearbox.compute_dtype)}, {kernels} kernels"
    return f"drafts of {draft.bits} bits for {gearbox.ladder.top.bits}, model {gearbox.fingerprint[:8]}, {how}"


NEWS, MUCH_WRITTEN = 0.25, 32  # of a time, and tokens: what differs by less from what is kept is not written again


@dataclass(frozen=True)
class DraftPlan:
    """When a draft ends, which rounds draft, and where there are rounds at all.

    learning: where costs are learned. agreement: a(m), where it is.
    """

    rule: DraftRule
    rounds: Rounds
    stretches: Stretches | OneStretch = field(default_factory=OneStretch)
    learning: Learning | None = None
    agreement: LearnedAgreement | None = None

    def keep(self) -> None:
        """Keep what was learned, for the next start."""
        if self.learning is not None:
            self.learning.keep()


LEARNED: WeakKeyDictionary[Gearbox, dict[Any, DraftPlan]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


def learned_plan(
    gearbox: Gearbox, draft: Gear, most_looked_up: int, trial: Trial, has_kernel: bool = True
) -> DraftPlan:
    """Drafts at the costs in time of this machine, which the gearbox learns over its texts.

    Args:
        draft: the gear that drafts.
        most_looked_up: tokens that the text may propose at once; 0: none.
        trial: measures times where nothing is known.
        has_kernel: whether native kernels may choose the tokens. Drafts with other samplers take longer and know no
            margins, so that what is learned with either says nothing about the other.
    """
    plans, key = LEARNED.setdefault(gearbox, {}), (draft, most_looked_up, has_kernel)
    if key not in plans:
        sampler = "" if has_kernel else ", another sampler"
        about = f"lookup of {most_looked_up}, {name_of(gearbox, draft)}{sampler}"
        learning = Learning(gearbox, draft, about, trial)
        rounds = Rounds(learning.costs, most_looked_up, drafts=draft != gearbox.ladder.top)
        rule = CostRule(learning.agreement, learning.costs)
        plans[key] = DraftPlan(rule, rounds, learning.stretches, learning, learning.agreement)
    return plans[key]


def plan_of(
    gearbox: Gearbox,
    draft: Gear,
    rule: DraftRule | None,
    most_looked_up: int,
    trial: Trial,
    has_kernel: bool = True,
) -> DraftPlan:
    """How to draft: by a rule; without one as is learned, and where nothing may be measured always as many tokens.

    Ranks have to draft alike, and their clocks differ. Where the top gear is streamed, the speed of the disk decides.
    Other arguments are those of `learned_plan`.
    """
    stream = gearbox.residency
    if rule is None and isinstance(stream, Stream) and len(gearbox.ladder) > 1:
        agreement, costs = LearnedAgreement(), StreamCosts(gearbox, stream, draft)
        return DraftPlan(CostRule(agreement, costs), Rounds(costs, most_looked_up), agreement=agreement)
    if rule is None and is_tuning() and agreement_of(gearbox.model).group is None:
        return learned_plan(gearbox, draft, most_looked_up, trial, has_kernel)
    fixed = StreamCosts(gearbox, stream, draft) if isinstance(stream, Stream) else fixed_costs(gearbox, draft)
    rounds = Rounds(fixed, most_looked_up, drafts=draft != gearbox.ladder.top)
    return DraftPlan(rule or FixedLength(USUAL_LENGTH), rounds)


def seconds_of_ways(gearbox: Gearbox | Observer) -> dict[str, float | bool]:
    """Fields of a summary: what a token took in rounds and by the top gear alone, where that is known.

    The time of a way that was not tried in this process is that of an earlier start, and `alone_at_earlier_start` says
    so of the top gear's: a machine is faster at one start than at another.
    """
    known: dict[str, float] = {}
    seen: set[bool] = set()
    for plan in LEARNED.get(gearbox, {}).values() if isinstance(gearbox, Gearbox) else ():
        if plan.learning is not None:
            known |= plan.learning.seconds
            seen |= plan.learning.stretches.seconds.keys()
    names = {Learning.IN_ROUNDS: "seconds_in_rounds", Learning.ALONE: "seconds_alone"}
    found: dict[str, float | bool] = {field: known[name] for name, field in names.items() if name in known}
    return found | {"alone_at_earlier_start": False not in seen} if Learning.ALONE in known else found


def drafting_gear(gearbox: Gearbox, draft: Gear | str | int | None) -> Gear:
    """The gear that drafts, the lowest if none is named; of one gear that one, and then the text alone proposes tokens.

    Raises:
        GearbxError: the top one of several.
    """
    gear = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
    if gear == gearbox.ladder.top and len(gearbox.ladder) > 1:
        raise GearbxError(f"gears {gearbox.ladder}: the top gear cannot draft for itself; give a lower one too")
    return gear
