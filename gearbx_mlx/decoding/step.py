"""How one token came about: which gears ran for it, and what they read."""

from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear

MODEL, DRAFT, LOOKUP = "model", "draft", "lookup"  # who chose a token first: the model itself, a draft, the text


@dataclass(frozen=True)
class Draft:
    """A token that somebody proposed for the top gear to verify: a gear that drafts, or the text itself.

    gear: that drafts. source: DRAFT or LOOKUP.
    """

    token: int
    gear: Gear
    source: str = DRAFT


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow, who proposed them (DRAFT or LOOKUP), and the entropies (bits) of drafts.

    discarded: steps that the draft gear computed beyond the end of its draft.
    """

    tokens: list[int]
    source: str = ""
    entropies: tuple[float, ...] = ()
    discarded: int = 0

    @property
    def drafted(self) -> int:
        return len(self.tokens) if self.source == DRAFT else 0

    @property
    def draft_passes(self) -> int:
        """Passes of the gear that drafted, those beyond the end of the draft included."""
        return self.drafted + self.discarded

    @property
    def looked_up(self) -> int:
        return len(self.tokens) if self.source == LOOKUP else 0


@dataclass(frozen=True)
class Step:
    """How the logits of one token came about.

    gear: computed them. entropies: of the distributions that decided about the gear, bits, in order. passes: over the
    weights, in each gear of the ladder. weight_bytes: what these passes read. draft: of this token, if there is one.
    drafted: tokens drafted in this step. noise: how much rounding may move a logit, where several positions were
    computed in one pass. source: of the token, once it is known. entropy: of the distribution that is sampled, bits,
    where the model has computed it already. looked_up: tokens that the text itself proposed in this step. discarded:
    steps that the draft gear computed beyond the end of a draft; `passes` and `weight_bytes` count them. kv_bytes: of
    keys and values that the passes read, by the bits of the KV cache's gear; kv_caches: how many layers' caches. Both
    are empty where the cache has no gears.
    """

    gear: Gear
    entropies: tuple[float, ...] = ()
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    draft: Draft | None = None
    drafted: int = 0
    noise: mx.array | None = None
    source: str = MODEL
    entropy: mx.array | None = None
    looked_up: int = 0
    discarded: int = 0
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_caches: dict[int, int] = field(default_factory=dict)

    def with_token(self, token: int) -> "Step":
        """The step once its token is known. A token that was drafted and accepted counts as the draft gear's."""
        if self.draft is None or self.draft.token != token:
            return self
        gear = self.draft.gear if self.draft.source == DRAFT else self.gear
        return replace(self, gear=gear, source=self.draft.source)


@dataclass(frozen=True)
class SampledToken:
    """What the sampler saw of one token: its entropy in bits, its step, and whether rounding might have decided it."""

    entropy: mx.array
    step: Step
    near_tie: mx.array | None = None


def single_pass(gearbox: Gearbox | Observer, gear: Gear, rows: int = 1) -> Step:
    """The step of a token that took one pass in one gear, over so many sequences."""
    passes = tuple(int(gear == other) for other in gearbox.ladder)
    return Step(gear, (), passes, gearbox.weight_bytes_per_token(gear, rows))
