"""What the next round of lossless mode does: take what the text proposes, let the low gear draft, or neither.

A round ends with a verification by the top gear, which makes one token more than it accepts. Be r what a token costs
in rounds with drafts, or with the top gear alone where that is less. A proposal of the text pays where its round costs
less than r for each token that it is expected to make; it is as long as saves most. Drafts pay while a token of theirs
costs less than one of the top gear alone. What loses is tried once in a while, since texts and machines change. Costs
that nobody measures say nothing about this machine: with them, drafts are as calibrated.
"""

from .acceptance import MOST_DRAFTED
from .lookup import LookupAgreement
from .pass_costs import PassCosts, RoundCounts

KEPT_ROUNDS = 0.97  # of the weight of earlier rounds with drafts, at each further one
PRIOR_TOKENS = 16.0  # tokens for which drafts are taken to cost what the top gear alone costs
PROBED = 32  # rounds between two that try what loses


class Rounds:
    """Chooses what a round does, by the costs of passes and the results of earlier rounds. Texts do not depend on it.

    Args:
        costs: of passes.
        most_looked_up: tokens of a proposal of the text; 0: none.

    `agreement` is of proposals of the text.
    """

    def __init__(self, costs: PassCosts, most_looked_up: int = MOST_DRAFTED):
        self.costs, self.most_looked_up = costs, most_looked_up
        self.agreement = LookupAgreement()
        self._counts = RoundCounts(KEPT_ROUNDS)
        self._since_probe = 0

    def with_drafts(self) -> float:
        """What a token costs in rounds with drafts, at the costs of now."""
        prior = PRIOR_TOKENS * self.costs.verification(1)
        return (self._counts.spent(self.costs) + prior) / (self._counts.tokens + PRIOR_TOKENS)

    def looked_up(self, run: int, room: int) -> int:
        """How many tokens to take of what the text proposes; 0: none.

        Args:
            run: tokens that occurred before, as in `Lookup`; 0: none.
            room: the most that there are, or that are wanted.
        """
        count = min(room, self.most_looked_up)
        if count < 1 or not run or not self.costs.ready:
            return 0
        token = min(self.with_drafts(), self.costs.verification(1))
        best, most, tokens = 0, 0.0, 1.0
        for taken, probability in enumerate(self.agreement.probabilities(run, count), 1):
            tokens += probability
            saved = token * tokens - self._proposal(taken)
            if saved > most:
                best, most = taken, saved
        return best

    def _proposal(self, taken: int) -> float:
        """What a round with so many tokens of the text costs: its bytes may be those of one row, but not its time."""
        computed = self.costs.verification(1) * (1 + self.costs.row_share * taken)
        return max(self.costs.verification(1 + taken), computed)

    def drafts(self) -> bool:
        """Whether the low gear drafts in this round: always, unless costs are measured, and drafts lose.

        Call it once for each round without a proposal of the text.
        """
        if not self.costs.measured:
            return True
        if not self.costs.ready:
            return False
        pays = self.with_drafts() <= self.costs.verification(1)
        self._since_probe += 1
        if self._since_probe < PROBED:
            return pays
        self._since_probe = 0
        return not pays

    def note_drafts(self, drafted: int, tokens: int, discarded: int = 0) -> None:
        """Count a round with drafts, as `RoundCounts.add` does."""
        self._counts.add(drafted, tokens, discarded)
