"""Mode kickdown: the low gear computes a token first; where it is in doubt, a higher gear computes the token again.

The entropy of the token's own distribution, before it is sampled, measures the doubt. What the low gear wrote into the
KV cache is undone first, so that the cache has the entries of the gear that each token was sampled from.

So kickdown is the loop of `loop.py` with nothing proposed, and a verifier that climbs the ladder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..ranks.agreement import Agreement, agreement_of
from ..routing.gates import Monitor
from ..telemetry.summary import Tally
from .caches import Cache
from .generation import Keywords, Telemetry, responses, tokenizer_for
from .governor import Governor
from .loop import DecodePlan, DecodeState
from .mode import Mode, gear_of_prompt, thresholds_for, vocabulary_of
from .modes import KickdownSettings
from .response import GearResponse, Step
from .rows import Tokens, Verification, Verifier
from .sampling import LogitsReader, blame_of, reader_of

RecomputeRule = Callable[[float, int, int], bool]
"""Whether to compute a token again, one gear higher: by its entropy in this gear (bits), how many tokens were decoded
before it, and the number of the gear, from 0."""


class Climbing(Verification):
    """A pass in one gear, after passes in all gears below it."""

    @property
    def step(self) -> Step:
        gearbox, gear = self._verifier.gearbox, self.gear
        ran = gearbox.ladder[: gear.index + 1]
        passes = tuple(int(each in ran) for each in gearbox.ladder)
        return Step(gear, passes, sum(map(gearbox.weight_bytes_per_token, ran)))


class Climb(Verifier):
    """Computes one token in the lowest gear, and again in the next one as long as the rule asks for it.

    Args:
        rule: whether to compute a token again.
        prefill_gear: reads the prompt: once for all of its tokens, so that a high gear costs little there.
    """

    def __init__(
        self, gearbox: Gearbox, rule: RecomputeRule, prefill_gear: Gear, reader: LogitsReader, agreement: Agreement
    ):
        super().__init__(gearbox, gearbox.ladder[0], prefill_gear)
        self._in_gear = [Verifier(gearbox, gear) for gear in gearbox.ladder]
        self._rule, self._reader, self._agreement = rule, reader, agreement
        self._position = 0

    def verify(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> Verification:
        for verifier in self._in_gear:
            found = Climbing(verifier, tokens, cache, **embedded)
            try:
                if verifier is self._in_gear[-1] or not self._is_unsure(found):
                    break
            except BaseException:  # of the rule, or an interrupt
                found.keep(0)
                raise
            found.keep(0)
        self._position += 1
        return found

    def computes_at_once(self, cache: Cache) -> bool:
        return True  # the entropy of a gear is waited for before the next one runs

    def _is_unsure(self, found: Verification) -> bool:
        (entropy,) = self._agreement.arrays(self._reader.entropy(found.logits[:, -1]))
        return self._rule(float(entropy), self._position, found.gear.index)  # bits, the same on all ranks


@dataclass(frozen=True)
class Kickdown(KickdownSettings, Mode):
    """Climb the ladder for the tokens that need it.

    Args:
        rule: whether to compute a token again, in place of thresholds.
        others: of `KickdownSettings`.
    """

    name: ClassVar[str] = "kickdown"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes")

    rule: RecomputeRule | None = None

    def settled(self, gearbox: Any, tokenizer: Any, prompt: Any) -> "Kickdown":
        if self.rule is not None or self.thresholds is None:
            return self
        return replace(self, thresholds=thresholds_for(self.thresholds, gearbox))

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        return gear_of_prompt(gearbox, self.prompt_gear, gearbox.ladder[0]), None

    def rule_for(self, gearbox: Gearbox) -> RecomputeRule:
        """Return the rule: the one that is given, or thresholds. Raises GearbxError if they do not fit the ladder."""
        if self.rule is not None:
            return self.rule
        bits = thresholds_for(self.thresholds, gearbox)
        return lambda entropy, position, gear: entropy > bits[gear]

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        how, tokenizer = Keywords(**kwargs), tokenizer_for(tokenizer)
        text = how.text(model, tokenizer, prompt)
        reader, agreement = reader_of(gearbox), agreement_of(model)
        prefill_gear, _ = self.gears_of_text(gearbox)
        climb = Climb(gearbox, self.rule_for(gearbox), prefill_gear, reader, agreement)
        plan = DecodePlan(climb, how.chooser(), reader, agreement=agreement, **how.of_plan())
        telemetry = Telemetry(Monitor(vocabulary_of(gearbox), self.window), blame_of(gearbox), controller)
        cache, _ = how.caches(model)
        return responses(plan, DecodeState(text, cache), tokenizer, telemetry, gearbox.arrays)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {"recomputed": tally.recomputed}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("recomputed", f"{summary['recomputed']} tokens, in a higher gear")]
