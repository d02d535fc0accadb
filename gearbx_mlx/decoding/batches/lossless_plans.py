"""When batches of mode lossless draft: by what passes cost with so many sequences."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...routing.acceptance import DraftRule, ProductRule
from ...routing.batch_drafts import BatchCostRule, BatchRule, EachRule
from ...routing.lookup import LookupAgreement
from ...routing.pass_costs import BYTES, TIME, Costs, LearnedCosts, PassCosts
from ...routing.stretches import Stretches
from ..draft_costs import shared_curve


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


LEARNED: WeakKeyDictionary[Gearbox, dict[Any, Learned]] = WeakKeyDictionary()


def batch_plans(gearbox: Gearbox, draft: Gear, rule: DraftRule, unit: str | None, most_looked_up: int) -> BatchPlans:
    """The plans of a gearbox, which learn over batches; of bytes, or of a rule that nobody can compare, new ones."""
    curve = shared_curve(rule) if isinstance(rule, ProductRule) and unit != BYTES else None
    if curve is None:
        return BatchPlans(gearbox, draft, rule, unit, most_looked_up)
    known = LEARNED.setdefault(gearbox, {}).setdefault((draft, curve), Learned())
    return BatchPlans(gearbox, draft, rule, unit, most_looked_up, known)


def bytes_of_batch(gearbox: Gearbox, draft: Gear, rows: int) -> PassCosts:
    """Bytes of weights that passes over so many sequences read."""
    top = gearbox.ladder.top
    return Costs(
        lambda: gearbox.weight_bytes_per_token(draft, rows),
        lambda tokens: gearbox.weight_bytes_per_token(top, rows * tokens),
    )
