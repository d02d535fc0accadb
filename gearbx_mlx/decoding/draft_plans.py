"""How lossless mode drafts: the rule of a file, of a number of tokens, or the one that ships, at what passes cost here.

Costs are time, or bytes of weights; of a streamed top gear bytes at measured speeds. Batches learn for every number of
sequences apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import GearbxError
from ..files.reading import read_as
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.streaming import Stream
from ..ranks.agreement import agreement_of
from ..routing.acceptance import (
    AcceptanceCurve,
    DraftFile,
    DraftRule,
    DraftTimes,
    FixedLength,
    ProductRule,
    default_rule,
    parse_draft_file,
    typical_agreement,
)
from ..routing.lookup import LookupAgreement
from ..routing.pass_costs import BYTES, MOST_ROWS, TIME, Costs, FixedCosts, LearnedCosts, PassCosts
from ..routing.rounds import BatchCostRule, BatchRule, CostRule, EachRule, Rounds, Stretches


class StreamCosts(FixedCosts):
    """The costs of a drafted token and of a verification, in bytes of memory.

    While a verification reads the disk it computes, so that the slower of both counts. So rows have no share of
    their own.

    Args:
        gearbox: with residency `stream`.
        draft: the gear that drafts.
    """

    def __init__(self, gearbox: Gearbox, stream: Stream, draft: Gear):
        top = gearbox.ladder.top
        self._stream = stream
        self._draft = gearbox.weight_bytes_per_token(draft)
        self._disk = [gearbox.disk_bytes_per_token(top, positions) for positions in (1, 2)]
        self._memory = [gearbox.weight_bytes_per_token(top, i) - disk for i, disk in zip((1, 2), self._disk)]

    def draft(self) -> float:
        return self._draft

    def verification(self, rows: int) -> float:
        one, two = (max(memory, disk * self._stream.slowdown) for memory, disk in zip(self._memory, self._disk))
        return one + (rows - 1) * (two - one)  # each further token of a mixture has experts of its own


def bytes_read(gearbox: Gearbox, draft: Gear) -> PassCosts:
    """Bytes of weights that passes read; those of rank 0 where ranks share the model, as all have to draft alike."""
    top, low = gearbox.ladder.top, gearbox.weight_bytes_per_token(draft)
    agreement = agreement_of(gearbox.model)
    if agreement.group is None:
        return Costs(lambda: low, lambda rows: gearbox.weight_bytes_per_token(top, rows))
    passes = (gearbox.weight_bytes_per_token(top, rows + 1) for rows in range(MOST_ROWS))
    low, *shared = agreement.numbers([low, *passes])
    return Costs(lambda: low, lambda rows: shared[rows - 1])


@dataclass(frozen=True)
class DraftPlan:
    """When a draft ends, which rounds draft, and where there are rounds at all (None: everywhere).

    With costs in time it is the gearbox's, and learns over texts; with a curve of the user's own, over one text.
    """

    rule: DraftRule
    rounds: Rounds
    stretches: Stretches | None = None


LEARNED: WeakKeyDictionary[Gearbox, dict[Any, DraftPlan]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


def plan_of(
    rule: DraftRule, gearbox: Gearbox, draft: Gear, unit: str, most_looked_up: int, times: DraftTimes | None = None
) -> DraftPlan:
    """How to draft at the costs of this machine.

    Where the top gear is streamed, these are bytes at measured speeds, whatever the unit.

    Args:
        rule: for bytes; only a ProductRule, which has a curve, follows other costs. Another one always drafts.
        draft: the gear that drafts.
        unit: one of COSTS. Seconds are measured while texts are written.
        most_looked_up: tokens that the text may propose at once; 0: none.
        times: seconds that were measured on this machine before.
    """
    stream = gearbox.residency
    if isinstance(stream, Stream):
        return DraftPlan(rule, Rounds(StreamCosts(gearbox, stream, draft), most_looked_up))
    if unit == BYTES or not isinstance(rule, ProductRule):
        return DraftPlan(rule, Rounds(bytes_read(gearbox, draft), most_looked_up))
    curve = shared_curve(rule)
    if curve is None:
        return learning_plan(rule, most_looked_up, times)
    known = LEARNED.setdefault(gearbox, {})
    key = draft, curve, most_looked_up, times and (times.draft, *times.verification)
    if key not in known:
        known[key] = learning_plan(rule, most_looked_up, times)
    return known[key]


def learning_plan(rule: ProductRule, most_looked_up: int, times: DraftTimes | None) -> DraftPlan:
    """A plan with costs in time that knows `times`, and learns from there."""
    costs = LearnedCosts(None if times is None else (times.draft, times.verification))
    return DraftPlan(CostRule(rule.agreement, costs), Rounds(costs, most_looked_up), Stretches())


def shared_curve(rule: ProductRule) -> Any:
    """A key that is equal for rules of equal curves; None for a user's own function, which nobody can compare."""
    curve = rule.agreement
    if isinstance(curve, AcceptanceCurve):
        return tuple(curve.edges), tuple(curve.agreement)
    return curve if curve is typical_agreement else None


def at_measured_speeds(rule: DraftRule, gearbox: Gearbox, draft: int | None) -> DraftRule:
    """The rule for what drafting costs here: the rule itself, unless the top gear is read from the disk.

    Args:
        rule: for costs of memory; only one that has a curve can follow others.
        draft: bits of the gear that drafts; None: the lowest.
    """
    stream = gearbox.residency
    if not isinstance(stream, Stream) or not isinstance(rule, ProductRule) or len(gearbox.ladder) < 2:
        return rule
    gear = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
    return CostRule(rule.agreement, StreamCosts(gearbox, stream, gear))


def note_drafts(gearbox: Gearbox, gear: Gear, tokens: int, seconds: float) -> None:
    """Take the time of drafted tokens as a measurement of how fast they read memory, where that matters."""
    if isinstance(gearbox.residency, Stream) and tokens:
        gearbox.residency.memory.add(tokens * gearbox.weight_bytes_per_token(gear), seconds)


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


def fitting(gearbox: Gearbox) -> Iterator[DraftFile]:
    """The files that ship for this model and ladder; those of its format first."""
    for made in sorted(shipped(), key=lambda made: made.format != gearbox.format.name):
        try:
            check_file(made, gearbox)
        except GearbxError:
            continue
        yield made


def check_file(made: DraftFile, gearbox: Gearbox) -> None:
    """Raises GearbxError unless a file was made for this model and ladder."""
    made.check([gear.bits for gear in gearbox.ladder], vocabulary(gearbox.model), gearbox.fingerprint)


def find_file(gearbox: Gearbox, how: How = None) -> DraftFile | None:
    """The drafting file that `how` means, as in `find_rule`; None where it means something else.

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
        return made
    if isinstance(how, DraftFile):
        check_file(how, gearbox)
        return how
    return None


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
    if isinstance(how, DraftFile):
        return at_measured_speeds(how.rule(), gearbox, how.draft), how.draft
    if isinstance(how, int):
        return FixedLength(how), None
    rule = default_rule() if how is None else how
    assert not isinstance(rule, str | Path)  # a path was read
    return at_measured_speeds(rule, gearbox, None) if how is None else rule, None


@dataclass
class BatchPlan:
    """Of batches of one size.

    costs: that a rule follows. stretches: divide the text into rounds and stretches of the top gear alone; None: rounds
    everywhere.
    """

    rule: BatchRule
    costs: PassCosts
    stretches: Stretches | None = None

    def __post_init__(self) -> None:
        self._owed = 0.0

    def in_rounds(self) -> bool:
        """Whether the next step drafts."""
        if self.stretches is not None and self.stretches.over:
            self.stretches.turn()
        return self.stretches is None or self.stretches.in_rounds

    def begin_texts(self) -> None:
        """Texts begin, or go on in a batch of another size: the time since the last step does not count."""
        if self.stretches is not None:
            self.stretches.begin()

    def begin(self) -> None:
        """A step begins."""
        if self.stretches is not None:
            self.stretches.token()

    def end(self, tokens: float) -> None:
        """A step has ended that made so many tokens of a text, on average over the sequences."""
        self._owed += tokens - 1
        while self.stretches is not None and self._owed >= 1:
            self._owed -= 1
            self.stretches.token(begins_round=False)


@dataclass
class Learned:
    """Plans in time by the number of sequences, and how often proposals of texts are right."""

    plans: dict[int, BatchPlan] = field(default_factory=dict)
    agreement: LookupAgreement = field(default_factory=LookupAgreement)


class BatchPlans:
    """Of batches of any size; what one size has learned says nothing about another one.

    Args:
        draft: the gear that drafts.
        rule: for single texts. One with a curve follows costs, others end drafts by themselves.
        unit: TIME, measured while texts are written, or BYTES; None: bytes for one sequence, as alone, and time for
            several, since what their rows cost is not in the bytes.
        most_looked_up: rows that texts may propose themselves in a pass, over all sequences.
        known: what was learned before.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        draft: Gear,
        rule: DraftRule,
        unit: str | None,
        most_looked_up: int = 0,
        known: Learned | None = None,
    ):
        self.gearbox, self.draft, self.rule, self.unit = gearbox, draft, rule, unit
        self.most_looked_up = most_looked_up
        self._learned = known or Learned()
        self._of_bytes: dict[int, BatchPlan] = {}
        self.agreement = self._learned.agreement

    def of(self, rows: int) -> BatchPlan:
        """For batches of so many sequences."""
        plans = self._of_bytes if self._unit(rows) == BYTES else self._learned.plans
        if rows not in plans:
            plans[rows] = self._make(rows)
        return plans[rows]

    def _unit(self, rows: int) -> str:
        return self.unit or (BYTES if rows == 1 else TIME)

    def _make(self, rows: int) -> BatchPlan:
        unit = self._unit(rows)
        costs: PassCosts = bytes_of_batch(self.gearbox, self.draft, rows) if unit == BYTES else LearnedCosts(texts=rows)
        if not isinstance(self.rule, ProductRule):
            return BatchPlan(EachRule(self.rule), costs)
        rule = BatchCostRule(self.rule.agreement, costs)
        return BatchPlan(rule, costs, None if unit == BYTES else Stretches(texts=rows))


LEARNED_IN_BATCHES: WeakKeyDictionary[Gearbox, dict[Any, Learned]] = WeakKeyDictionary()


def batch_plans(gearbox: Gearbox, draft: Gear, rule: DraftRule, unit: str | None, most_looked_up: int) -> BatchPlans:
    """The plans of a gearbox, which learn over batches; of bytes, or of a rule that nobody can compare, new ones."""
    curve = shared_curve(rule) if isinstance(rule, ProductRule) and unit != BYTES else None
    if curve is None:
        return BatchPlans(gearbox, draft, rule, unit, most_looked_up)
    known = LEARNED_IN_BATCHES.setdefault(gearbox, {}).setdefault((draft, curve), Learned())
    return BatchPlans(gearbox, draft, rule, unit, most_looked_up, known)


def bytes_of_batch(gearbox: Gearbox, draft: Gear, rows: int) -> PassCosts:
    """Bytes of weights that passes over so many sequences read."""
    top = gearbox.ladder.top
    return Costs(
        lambda: gearbox.weight_bytes_per_token(draft, rows),
        lambda tokens: gearbox.weight_bytes_per_token(top, rows * tokens),
    )
