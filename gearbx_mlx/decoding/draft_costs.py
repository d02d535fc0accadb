"""What drafting costs where the top gear is read from the disk: bytes, counted at the speeds of disk and memory."""

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.streaming import Stream
from ..routing.acceptance import DraftRule, ProductRule
from ..routing.draft_costs import CostRule


class StreamCosts:
    """The costs of a drafted token and of a verification, in bytes of memory.

    While a verification reads the disk it computes, so that the slower of both counts.

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

    def __call__(self) -> tuple[float, float]:
        one, two = (max(memory, disk * self._stream.slowdown) for memory, disk in zip(self._memory, self._disk))
        return self._draft + two - one, one  # each further token of a mixture has experts of its own


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
