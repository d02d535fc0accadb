"""What the sequences of a batch propose themselves: what followed where their last tokens occurred before."""

from collections.abc import Sequence

from ...routing.acceptance import DEFAULT_BOUND
from ...routing.lookup import Lookup, LookupAgreement


class LookedUp:
    """The proposals of one sequence.

    Args:
        agreement: counts how often proposals are right.
        prompt: tokens at its beginning that no model wrote.
    """

    def __init__(self, agreement: LookupAgreement, prompt: int):
        self._agreement, self._prompt = agreement, prompt
        self._lookup = Lookup(agreement)
        self._tokens: list[int] = []

    def proposed(self, written: Sequence[int], token: int, most: int) -> list[int]:
        """What may follow: as many tokens as are more likely right than not, all of them.

        Args:
            written: the tokens so far. token: the one after them.
            most: how many.
        """
        self._tokens += written[len(self._tokens) :]
        self._tokens.append(token)
        self._lookup.follow(self._tokens, self._prompt)
        if most < 1 or not self._lookup.run:
            return []
        likely = self._agreement.probabilities(self._lookup.run, most)
        return self._lookup.proposed(sum(probability >= DEFAULT_BOUND for probability in likely))
