"""What drafting costs here: time, or bytes of weights; of a streamed top gear bytes at measured speeds."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.streaming import Stream
from ..ranks.agreement import agreement_of
from ..routing.acceptance import AcceptanceCurve, DraftRule, ProductRule, typical_agreement
from ..routing.draft_costs import CostRule
from ..routing.draft_file import DraftTimes
from ..routing.pass_costs import BYTES, MOST_ROWS, Costs, FixedCosts, LearnedCosts, PassCosts
from ..routing.rounds import Rounds
from ..routing.stretches import Stretches


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
class Plan:
    """When a draft ends, which rounds draft, and where there are rounds at all (None: everywhere).

    With costs in time it is the gearbox's, and learns over texts; with a curve of the user's own, over one text.
    """

    rule: DraftRule
    rounds: Rounds
    stretches: Stretches | None = None


LEARNED: WeakKeyDictionary[Gearbox, dict[Any, Plan]] = WeakKeyDictionary()  # nothing here may refer to the gearbox


def plan_of(
    rule: DraftRule, gearbox: Gearbox, draft: Gear, unit: str, most_looked_up: int, times: DraftTimes | None = None
) -> Plan:
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
        return Plan(rule, Rounds(StreamCosts(gearbox, stream, draft), most_looked_up))
    if unit == BYTES or not isinstance(rule, ProductRule):
        return Plan(rule, Rounds(bytes_read(gearbox, draft), most_looked_up))
    curve = shared_curve(rule)
    if curve is None:
        return learning_plan(rule, most_looked_up, times)
    known = LEARNED.setdefault(gearbox, {})
    key = draft, curve, most_looked_up, times and (times.draft, *times.verification)
    if key not in known:
        known[key] = learning_plan(rule, most_looked_up, times)
    return known[key]


def learning_plan(rule: ProductRule, most_looked_up: int, times: DraftTimes | None) -> Plan:
    """A plan with costs in time that knows `times`, and learns from there."""
    costs = LearnedCosts(None if times is None else (times.draft, times.verification))
    return Plan(CostRule(rule.agreement, costs), Rounds(costs, most_looked_up), Stretches())


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
