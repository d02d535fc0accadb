"""How lossless mode drafts: the rule of a file, of a number of tokens, or the one that ships, at what passes cost here.

Costs are time, or bytes of weights; of a streamed top gear bytes at measured speeds. What was learned is kept for this
model and machine, so that the next start begins with it.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mlx_lm.sample_utils import greedy_sampler

from ..compat.arrays import dtype_name
from ..errors import GearbxError, GearbxWarning
from ..files.reading import read_as
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..gears.streaming import Stream
from ..kernels.dispatch import is_tuning
from ..kernels.tuner import Times
from ..ranks.agreement import agreement_of
from ..routing.acceptance import (
    AcceptanceCurve,
    DraftFile,
    DraftRule,
    DraftTimes,
    FixedLength,
    LearnedAgreement,
    ProductRule,
    default_rule,
    parse_draft_file,
    typical_agreement,
)
from ..routing.lookup import LookupAgreement
from ..routing.rounds import (
    LONGEST,
    MOST_ROWS,
    TEXTS_DIFFER,
    TIME,
    UNMADE,
    CostRule,
    Costs,
    LearnedCosts,
    OneStretch,
    PassTimes,
    Rounds,
    Stretches,
)
from .mode import vocabulary_of
from .sampling import Tolerance


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


def bytes_of_passes(gearbox: Gearbox, draft: Gear) -> Costs:
    """Bytes of weights that passes read; those of rank 0 where ranks share the model, as all have to draft alike."""
    top, agreement, stream = gearbox.ladder.top, agreement_of(gearbox.model), gearbox.residency
    if isinstance(stream, Stream):
        return StreamCosts(gearbox, stream, draft)
    if agreement.group is None:
        return Costs(
            lambda: gearbox.weight_bytes_per_token(draft), lambda rows: gearbox.weight_bytes_per_token(top, rows)
        )
    passes = (gearbox.weight_bytes_per_token(top, rows + 1) for rows in range(MOST_ROWS))
    low, *shared = agreement.numbers([gearbox.weight_bytes_per_token(draft), *passes])
    return Costs(lambda: low, lambda rows: shared[rows - 1])


@dataclass(frozen=True)
class DraftPlan:
    """When a draft ends, which rounds draft, and where there are rounds at all.

    learning: what the costs in time are learned with. agreement: a(m), where it is learned.
    """

    rule: DraftRule
    rounds: Rounds
    stretches: Stretches | OneStretch = field(default_factory=OneStretch)
    learning: "Learning | None" = None
    agreement: LearnedAgreement | None = None


Trial = Callable[[Gearbox, Gear], PassTimes | None]


class Learning:
    """What is learned about drafts, beginning with what earlier starts on this machine kept.

    That stands beside the times of kernels (tuner.py). Nothing is known, and nothing is kept, where kernels are not
    measured either (GEARBX_TUNE=0).

    Args:
        plans: with the times that count instead of kept ones, and what measures them where nothing is known, if it can.
    """

    # Beside the rows of verifications: seconds, and the tokens until the way that lost is tried again.
    STEP, IN_ROUNDS, ALONE, LEFT = "drafted", "token in rounds", "token alone", "tokens until a trial"
    ROWS = tuple(map(str, range(1, MOST_ROWS + 1)))

    def __init__(self, plans: "DraftPlans"):
        gearbox, draft, times, trial = plans.gearbox, plans.draft, plans.times, plans.trial
        measured: PassTimes | None = None
        if times is not None:
            measured = times.draft, dict(enumerate(times.verification, 1))
        self._cache = gearbox.kernel_choices.tuner.cache
        self._name = f"rounds, lookup of {plans.most_looked_up}, {plans.name}"
        again = not is_tuning() or gearbox.kernels.again
        kept = self._kept = {} if again else self._cache.times.get(self._name, {})
        drafts = draft != gearbox.ladder.top
        if measured is None and kept.keys() >= {*self.ROWS} and (self.STEP in kept or not drafts):
            measured = kept.get(self.STEP, 0.0), {int(rows): kept[rows] for rows in self.ROWS}
        if measured is None and trial is not None and is_tuning():
            measured = trial(gearbox, draft)
        self.costs = LearnedCosts(measured, drafts)
        # Where a trial has to make the gear first, it waits for so many times more tokens.
        self._scale = 1 if gearbox.has_made(draft) or self._rounds_win else UNMADE // LONGEST
        left = int(kept[self.LEFT] * self._scale) if self.LEFT in kept else None
        longest = LONGEST * self._scale
        self.stretches = Stretches(rounds_win=self._rounds_win, left=left, longest=longest)

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
        if self.costs.seconds is None or not is_tuning():
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


class KeptAgreement:
    """a(m) of a gear that drafts, which texts share, and which the next start on this machine goes on with."""

    def __init__(self, plans: "DraftPlans"):
        within = f" within {plans.tolerance:g} nats" if plans.tolerance else ""
        self._cache, self._name = plans.gearbox.kernel_choices.tuner.cache, f"agreement{within}, {plans.name}"
        known = is_tuning() and not plans.gearbox.kernels.again
        self.agreement = LearnedAgreement(self._cache.times.get(self._name) if known else None)
        self._written = 0

    def keep(self) -> None:
        """Keep what is known now, if enough was drafted since."""
        if is_tuning() and self.agreement.drafted - self._written >= MUCH_WRITTEN:
            self._written = self.agreement.drafted
            self._cache.keep(self._name, self.agreement.state)
            self._cache.save_soon()


@dataclass
class Learned:
    """The plan with costs in time; how often proposals are right, of lookup and of drafts."""

    plan: DraftPlan | None = None
    lookup: LookupAgreement = field(default_factory=LookupAgreement)
    drafts: KeptAgreement | None = None


NEWS, MUCH_WRITTEN = 0.25, 32  # of a time, and tokens: what differs by less from what is kept is not written again
LEARNED: WeakKeyDictionary[Gearbox, dict[Any, Learned]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


@dataclass
class DraftPlans:
    """How to draft at the costs of this machine.

    A plan with costs in time is the gearbox's, and learns over texts; with a curve of the user's own, over one text.
    Where the top gear is streamed, costs are bytes at measured speeds, whatever the unit.

    Args:
        draft: the gear that drafts.
        rule: for bytes; only one with a curve follows other costs. Another one always drafts.
        unit: one of COSTS. Seconds are measured while texts are written.
        most_looked_up: tokens that the text may propose at once; 0: none.
        times: seconds that were measured on this machine before; else what earlier starts kept.
        trial: measures them where nothing is known.
        tolerance: nats within which proposed tokens stay; 0: lossless.
        has_kernel: whether native kernels may choose the tokens. Drafts with other samplers take longer and know no
            margins, so that what is learned with either says nothing about the other.
    """

    gearbox: Gearbox
    draft: Gear
    rule: DraftRule
    unit: str
    most_looked_up: int = 0
    times: DraftTimes | None = None
    trial: Trial | None = None
    tolerance: float = 0.0
    has_kernel: bool = True

    def __post_init__(self) -> None:
        curve = shared_curve(self.rule) if isinstance(self.rule, ProductRule) else None
        key = (
            self.draft,
            curve,
            self.most_looked_up,
            self.tolerance,
            self.has_kernel,
            self.times and (self.times.draft, *self.times.verification),
        )
        learned = {} if curve is None else LEARNED.setdefault(self.gearbox, {})
        self._learned = learned.setdefault(key, Learned())
        self._shared = curve is not None
        self.lookup = self._learned.lookup

    @property
    def name(self) -> str:
        """What learned times depend on, as part of a key of the cache."""
        return name_of(self.gearbox, self.draft) + ("" if self.has_kernel else ", another sampler")

    def tolerance_for(self, sampler: Any) -> Tolerance | None:
        """What lets proposed tokens stay that the top gear did not choose, with a sampler (None: greedy)."""
        return Tolerance(self.tolerance, sampler in (None, greedy_sampler)) if self.tolerance else None

    @cached_property
    def plan(self) -> DraftPlan:
        """With costs in time it is the gearbox's, else this text's."""
        learns = self.unit == TIME and isinstance(self.rule, ProductRule)
        learns = learns and not isinstance(self.gearbox.residency, Stream)
        if learns and self._learned.plan is not None:
            return self._learned.plan
        learning = Learning(self) if learns else None
        costs = bytes_of_passes(self.gearbox, self.draft) if learning is None else learning.costs
        rule, agreement = self.rule, self._agreement() if learns else None
        if isinstance(rule, ProductRule | CostRule) and learns:
            rule = CostRule(agreement or rule.agreement, costs)
        rounds = Rounds(costs, self.most_looked_up, self.lookup, self.draft != self.gearbox.ladder.top)
        made = DraftPlan(rule, rounds, learning.stretches if learning else OneStretch(), learning, agreement)
        if learns:
            self._learned.plan = made
        return made

    def _agreement(self) -> LearnedAgreement | None:
        """a(m) that is learned; a user's own function stays as it is."""
        if not self._shared:
            return None
        if self._learned.drafts is None:
            self._learned.drafts = KeptAgreement(self)
        return self._learned.drafts.agreement

    def keep(self) -> None:
        """Keep what was learned, for the next start."""
        if self._learned.drafts is not None:
            self._learned.drafts.keep()
        if self._learned.plan is not None and self._learned.plan.learning is not None:
            self._learned.plan.learning.keep()


def seconds_of_ways(gearbox: Gearbox | Observer) -> dict[str, float | bool]:
    """Fields of a summary: what a token took in rounds and by the top gear alone, where that is known.

    The time of a way that was not tried in this process is that of an earlier start, and `alone_at_earlier_start` says
    so of the top gear's: a machine is faster at one start than at another.
    """
    known: dict[str, float] = {}
    seen: set[bool] = set()
    for learned in LEARNED.get(gearbox, {}).values() if isinstance(gearbox, Gearbox) else ():
        learning = None if learned.plan is None else learned.plan.learning
        if learning is not None:
            known |= learning.seconds
            seen |= learning.stretches.seconds.keys()
    names = {Learning.IN_ROUNDS: "seconds_in_rounds", Learning.ALONE: "seconds_alone"}
    found: dict[str, float | bool] = {field: known[name] for name, field in names.items() if name in known}
    return found | {"alone_at_earlier_start": False not in seen} if Learning.ALONE in known else found


def shared_curve(rule: ProductRule) -> Any:
    """A key that is equal for rules of equal curves; None for a user's own function, which cannot be compared."""
    curve = rule.agreement
    if isinstance(curve, AcceptanceCurve):
        return tuple(curve.edges), tuple(curve.agreement)
    return curve if curve is typical_agreement else None


SHIPPED = Path(__file__).parent.parent / "demo_model" / "drafting"
MAKE_DRAFTING = "write a new one with python -m gearbx_mlx.calibrate --mode lossless"

How = DraftFile | DraftRule | str | Path | int | None


def read_draft_file(path: str | Path) -> DraftFile:
    """Raises GearbxError for a file that cannot be read, or is something else."""
    return read_as(Path(path), parse_draft_file, "a drafting file", MAKE_DRAFTING)


@cache
def shipped() -> tuple[DraftFile, ...]:
    """The drafting files that ship with the package, for the demo model."""
    return tuple(read_draft_file(path) for path in sorted(SHIPPED.glob("*.json")))


CALIBRATED: WeakKeyDictionary[Gearbox, DraftFile] = WeakKeyDictionary()
"""How the calibrated base of a gearbox drafts."""
DRAFTING = "drafting.json"  # of a geared checkpoint whose base is calibrated


def fitting(gearbox: Gearbox) -> Iterator[DraftFile]:
    """The files for this model and ladder: of its calibrated base, else those that ship, of its format first."""
    own = [CALIBRATED[gearbox]] if gearbox in CALIBRATED else []
    beside = None if gearbox.saved is None else gearbox.saved.directory / DRAFTING
    own += [read_draft_file(beside)] if beside is not None and beside.exists() else []
    for made in [*own, *sorted(shipped(), key=lambda made: made.format != gearbox.format.name)]:
        try:
            check_file(made, gearbox)
        except GearbxError:
            continue
        yield made


def check_file(made: DraftFile, gearbox: Gearbox) -> None:
    """Raises GearbxError unless a file was made for this model and ladder."""
    made.check([gear.bits for gear in gearbox.ladder], vocabulary_of(gearbox), gearbox.fingerprint)


def find_file(gearbox: Gearbox, how: How = None) -> DraftFile | None:
    """The drafting file that `how` means, as in `find_rule`; None where it means something else.

    Warns of one for another format or group size, in which the low gear agrees on other tokens.

    Raises:
        GearbxError: a file for another model, vocabulary or ladder.
    """
    if how is None:
        return next(fitting(gearbox), None)
    if isinstance(how, str | Path):
        made = read_draft_file(how)
        try:
            check_file(made, gearbox)
        except GearbxError as error:
            raise GearbxError(f"{how}: {error}; {MAKE_DRAFTING}") from error
    elif isinstance(how, DraftFile):
        made = how
        check_file(made, gearbox)
    else:
        return None
    stored = ("format", made.format, gearbox.format.name), ("group size", made.group_size, gearbox.group_size)
    for what, there, here in stored:
        if there != here and (isinstance(how, str | Path) or made not in shipped()):
            text = f"the drafting file was made for {what} {there}, not {here}: drafts may be accepted less often"
            warnings.warn(text, GearbxWarning, stacklevel=2)
    return made


def find_rule(gearbox: Gearbox, how: How = None) -> tuple[DraftRule, int | None]:
    """When to stop drafting, and the bits of the gear that drafts (None: the lowest).

    Args:
        how: a file or its path, a fixed number of tokens, a rule; without, what ships for this model and ladder, or
            the rule that is used where nothing was calibrated. Where the top gear is read from the disk, curves
            count and bounds do not: those follow from the speed of the disk.

    Raises:
        GearbxError: a file for another model, vocabulary or ladder.
    """
    how = find_file(gearbox, how) or how
    if isinstance(how, int):
        return FixedLength(how), None
    if how is not None and not isinstance(how, DraftFile):
        assert not isinstance(how, str | Path)  # a path was read
        return how, None
    rule, draft = (default_rule(), None) if how is None else (how.rule(), how.draft)
    stream = gearbox.residency
    if isinstance(stream, Stream) and len(gearbox.ladder) > 1:
        return CostRule(rule.agreement, StreamCosts(gearbox, stream, drafting_gear(gearbox, draft))), draft
    return rule, draft


def drafting_gear(gearbox: Gearbox, draft: Gear | str | int | None) -> Gear:
    """The gear that drafts, the lowest if none is named; of one gear that one, and then the text alone proposes tokens.

    Raises:
        GearbxError: the top one of several.
    """
    gear = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
    if gear == gearbox.ladder.top and len(gearbox.ladder) > 1:
        raise GearbxError(f"gears {gearbox.ladder}: the top gear cannot draft for itself; give a lower one too")
    return gear
