"""Mode kickdown: the lowest gear computes each token, and uncertain tokens are computed again in higher gears.

The entropy of the token's own distribution, before sampling, measures uncertainty. Before a higher gear computes it,
the lower gear's KV cache entry is removed, so each pass leaves the entry of its last gear.

Kickdown is the loop of `loop.py` without proposals, with a verifier that climbs the ladder.
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
from .generation import Telemetry, responses
from .governor import Governor
from .mode import Mode, gear_of_prompt, thresholds_for, vocabulary_of
from .modes import KickdownSettings
from .plan import DecodePlan, DecodeState, Keywords
from .response import GearResponse, Step
from .rows import Tokens, Verification, Verifier
from .sampling import LogitsReader, blame_of, reader_of

RecomputeRule = Callable[[float, int, int], bool]
"""Function of a token's entropy (bits), the number of tokens decoded before it, and the gear's number (from 0). It
returns whether a higher gear computes the token again."""


class KickdownPass(Verification):
    """A pass in one gear, after passes in all gears below it."""

    @property
    def step(self) -> Step:
        gearbox, gear = self._verifier.gearbox, self.gear
        ran = gearbox.ladder[: gear.index + 1]
        passes = tuple(int(each in ran) for each in gearbox.ladder)
        return Step(gear, passes, sum(map(gearbox.weight_bytes_per_token, ran)))


class KickdownVerifier(Verifier):
    """Verifier that computes a token in the lowest gear, and again in the next one as long as the rule requires it.

    Args:
        rule: decides whether a token is computed again.
        prefill_gear: reads its weights once for many tokens, so a high gear costs little.
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
            found = KickdownPass(verifier, tokens, cache, **embedded)
            with found.undone_by_errors():  # also of the rule
                if verifier is self._in_gear[-1] or not self._is_unsure(found):
                    break
            found.keep(0)
        self._position += 1
        found.is_queued = False  # as each gear's entropy is read before the next gear runs
        return found

    def _is_unsure(self, found: Verification) -> bool:
        (entropy,) = self._agreement.arrays(self._reader.entropy(found.logits[:, -1]))
        return self._rule(float(entropy), self._position, found.gear.index)  # bits, the same on all ranks


@dataclass(frozen=True)
class Kickdown(KickdownSettings, Mode):
    """Mode kickdown: uncertain tokens are computed again in higher gears.

    Args:
        rule: decides whether a token is computed again; None: thresholds do.
        others: of `KickdownSettings`.
    """

    name: ClassVar[str] = "kickdown"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes")

    rule: RecomputeRule | None = None

    def resolved(self, gearbox: Any, tokenizer: Any, prompt: Any) -> "Kickdown":
        if self.rule is not None or self.thresholds is None:
            return self
        return replace(self, thresholds=thresholds_for(self.thresholds, gearbox))

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        return gear_of_prompt(gearbox, self.prompt_gear, gearbox.ladder[0]), None

    def rule_for(self, gearbox: Gearbox) -> RecomputeRule:
        """Return the given rule, or a rule from thresholds. Raises GearbxError if they do not fit the ladder."""
        if self.rule is not None:
            return self.rule
        bits = thresholds_for(self.thresholds, gearbox)
        return lambda entropy, position, gear: entropy > bits[gear]

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        how = Keywords(**kwargs)
        text = how.text(model, tokenizer, prompt)
        reader, agreement = reader_of(gearbox), agreement_of(model)
        prefill_gear, _ = self.gears_of_text(gearbox)
        verifier = KickdownVerifier(gearbox, self.rule_for(gearbox), prefill_gear, reader, agreement)
        plan = DecodePlan(verifier, how, how.chooser(), reader, agreement=agreement)
        telemetry = Telemetry(Monitor(vocabulary_of(gearbox), self.window), blame_of(gearbox), controller)
        cache, _ = how.caches(model)
        return responses(plan, DecodeState(text, cache), tokenizer, telemetry)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {"recomputed": tally.recomputed}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("recomputed", f"{summary['recomputed']} tokens, in a higher gear")]
