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
from ..routing.rounds import (
    BYTES,
    MOST_ROWS,
    TIME,
    CostRule,
    Costs,
    JointRule,
    LearnedCosts,
    OneStretch,
    PassCosts,
    Rounds,
    Stretches,
    joint_rule,
)


class StreamCosts(PassCosts):
    """The costs of a drafted token and of a verification, in bytes of memory.

    While a verification reads the disk it computes, so that the slower of both counts. So rows have no share of
    their own.

    Args:
        gearbox: with residency `stream`.
        draft: the gear that drafts.
        texts: that share the passes.
    """

    def __init__(self, gearbox: Gearbox, stream: Stream, draft: Gear, texts: int = 1):
        top, positions = gearbox.ladder.top, (texts, 2 * texts)
        self._stream = stream
        self._draft = gearbox.weight_bytes_per_token(draft, texts)
        self._disk = [gearbox.disk_bytes_per_token(top, count) for count in positions]
        self._memory = [gearbox.weight_bytes_per_token(top, i) - disk for i, disk in zip(positions, self._disk)]

    def draft(self) -> float:
        return self._draft

    def verification(self, rows: int) -> float:
        one, two = (max(memory, disk * self._stream.slowdown) for memory, disk in zip(self._memory, self._disk))
        return one + (rows - 1) * (two - one)  # each further token of a mixture has experts of its own

    def add_draft(self, seconds: float, steps: int = 1) -> None:
        self._stream.memory.add(steps * self._draft, seconds)


def bytes_of_passes(gearbox: Gearbox, draft: Gear, texts: int = 1) -> PassCosts:
    """Bytes of weights that passes read; those of rank 0 where ranks share the model, as all have to draft alike."""
    top, agreement, stream = gearbox.ladder.top, agreement_of(gearbox.model), gearbox.residency
    if isinstance(stream, Stream):
        return StreamCosts(gearbox, stream, draft, texts)
    if agreement.group is None:
        return Costs(
            lambda: gearbox.weight_bytes_per_token(draft, texts),
            lambda rows: gearbox.weight_bytes_per_token(top, texts * rows),
        )
    passes = (gearbox.weight_bytes_per_token(top, rows + 1) for rows in range(MOST_ROWS))
    low, *shared = agreement.numbers([gearbox.weight_bytes_per_token(draft), *passes])
    return Costs(lambda: low, lambda rows: shared[rows - 1])


@dataclass(frozen=True)
class DraftPlan:
    """When a draft ends, which rounds draft, and where there are rounds at all, for so many texts."""

    rule: JointRule
    rounds: Rounds
    stretches: Stretches | OneStretch = field(default_factory=OneStretch)


@dataclass
class Learned:
    """Plans with costs in time, by the number of texts, and how often proposals of the texts are right."""

    plans: dict[int, DraftPlan] = field(default_factory=dict)
    agreement: LookupAgreement = field(default_factory=LookupAgreement)


LEARNED: WeakKeyDictionary[Gearbox, dict[Any, Learned]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


class DraftPlans:
    """How to draft at the costs of this machine, for any number of texts that share their passes.

    What one number has learned says nothing about another one. Plans with costs in time are the gearbox's, and learn
    over texts; with a curve of the user's own, over one text or batch. Where the top gear is streamed, costs are bytes
    at measured speeds, whatever the unit.

    Args:
        draft: the gear that drafts.
        rule: of a single text, for bytes; only one with a curve follows other costs. Another one always drafts.
        unit: one of COSTS; seconds are measured while texts are written. None: bytes for one text, unless there are
            times, and time for several, since what their rows cost is not in the bytes.
        most_looked_up: tokens that texts may propose at once; 0: none.
        times: seconds that were measured on this machine before, for one text.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        draft: Gear,
        rule: DraftRule,
        unit: str | None,
        most_looked_up: int = 0,
        times: DraftTimes | None = None,
    ):
        self.gearbox, self.draft, self.rule, self.unit = gearbox, draft, rule, unit
        self.most_looked_up, self.times = most_looked_up, times
        curve = shared_curve(rule) if isinstance(rule, ProductRule) else None
        key = draft, curve, most_looked_up, times and (times.draft, *times.verification)
        self._learned = Learned() if curve is None else LEARNED.setdefault(gearbox, {}).setdefault(key, Learned())
        self._of_bytes: dict[int, DraftPlan] = {}
        self.agreement = self._learned.agreement

    def of(self, texts: int = 1) -> DraftPlan:
        """For so many texts."""
        in_time = self.unit != BYTES and (self.unit == TIME or texts > 1 or self.times is not None)
        learns = in_time and isinstance(self.rule, ProductRule) and not isinstance(self.gearbox.residency, Stream)
        plans, make = (self._learned.plans, self._learning) if learns else (self._of_bytes, self._in_bytes)
        if texts not in plans:
            plans[texts] = make(texts)
        return plans[texts]

    def _learning(self, texts: int) -> DraftPlan:
        """A plan with costs in time that knows the times of one text, and learns from there."""
        assert isinstance(self.rule, ProductRule)
        known = None if self.times is None or texts > 1 else (self.times.draft, self.times.verification)
        costs = LearnedCosts(known, texts)
        return DraftPlan(CostRule(self.rule.agreement, costs), self._rounds(costs, texts), Stretches(texts=texts))

    def _in_bytes(self, texts: int) -> DraftPlan:
        costs = bytes_of_passes(self.gearbox, self.draft, texts)
        rule = joint_rule(self.rule)
        if texts > 1 and isinstance(self.rule, ProductRule | CostRule):
            rule = CostRule(self.rule.agreement, costs)
        return DraftPlan(rule, self._rounds(costs, texts))

    def _rounds(self, costs: PassCosts, texts: int) -> Rounds:
        most = self.most_looked_up // texts  # all texts together may propose as many as one
        return Rounds(costs, most, texts, self.agreement)


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


def drafting_gear(gearbox: Gearbox, draft: Gear | str | int | None) -> Gear:
    """The gear that drafts, the lowest if none is named. Raises GearbxError for the top one."""
    gear = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
    if gear == gearbox.ladder.top:
        raise GearbxError(f"gears {gearbox.ladder}: the top gear cannot draft for itself; give a lower one too")
    return gear
