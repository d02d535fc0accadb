"""How one token came about: which gears ran for it, and what they read."""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.observer import Observer


@dataclass(frozen=True)
class Draft:
    """A token that a gear proposed, for the top gear to verify."""

    token: int
    gear: Gear


@dataclass(frozen=True)
class Step:
    """How the logits of one token came about.

    gear: computed them. entropies: of the distributions that decided about the gear, bits, in order. passes: over the
    weights, in each gear of the ladder. weight_bytes: what these passes read. draft: of this token, if there is one.
    drafted: tokens drafted in this step. noise: how much rounding may move a logit, where several positions were
    computed in one pass. accepted: the token is the one that was drafted. entropy: of
    the distribution that is sampled, bits, where the model has computed it already.
    """

    gear: Gear
    entropies: tuple[float, ...] = ()
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    draft: Draft | None = None
    drafted: int = 0
    noise: mx.array | None = None
    accepted: bool = False
    entropy: mx.array | None = None

    def with_token(self, token: int) -> "Step":
        """The step once its token is known. A token that was drafted and accepted counts as the draft gear's."""
        if self.draft is None or self.draft.token != token:
            return self
        return replace(self, gear=self.draft.gear, accepted=True)


@dataclass(frozen=True)
class SampledToken:
    """What the sampler saw of one token: its entropy in bits, its step, and whether rounding might have decided it."""

    entropy: mx.array
    step: Step
    near_tie: mx.array | None = None


def single_pass(gearbox: Gearbox | Observer, gear: Gear) -> Step:
    """The step of a token that took one pass in one gear."""
    passes = tuple(int(gear == other) for other in gearbox.ladder)
    return Step(gear, (), passes, gearbox.weight_bytes_per_token(gear))
