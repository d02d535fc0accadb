"""Mode kickdown: the low gear computes a token first; where it is in doubt, a higher gear computes the token again.

The entropy of the token's own distribution, before it is sampled, measures the doubt. What the low gear wrote into the
KV cache is undone first, so that the cache has the entries of the gear that each token was sampled from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.gates import Monitor, check_thresholds, default_thresholds
from ..telemetry.summary import Tally
from .caches import Snapshot
from .governor import Governor
from .mode import Mode, gear_of_prompt, thresholds_for
from .modes import KickdownSettings
from .response import GearResponse, Step
from .sampling import geared_responses, sampled
from .wrapper import ModelWrapper

RecomputeRule = Callable[[float, int, int], bool]
"""Whether to compute a token again, one gear higher: by its entropy in this gear (bits), how many tokens were decoded
before it, and the number of the gear, from 0."""


class GearedModel(ModelWrapper):
    """A model that climbs its ladder for the tokens that need it; mlx-lm runs it as it runs any model.

    Steps of one token (batch 1) begin in the lowest gear. Prompts and batches are computed in the gear `prefill`: a
    prompt reads the weights once for all of its tokens, so that a high gear costs little there, and every later token
    attends to it.

    Args:
        gearbox: of the model.
        thresholds: bits, one for each step of the ladder; the paper's, scaled to the vocabulary, if not given.
        rule: whether to compute a token again, in place of thresholds.
        prefill: the gear for prompts; the top one if not given.
        share_entropy: the distribution that is sampled is that of the logits, so that its entropy is known already.

    `step` is the latest step, `positions` how many there were. While `in_prompt` is set, a single token is computed as
    a prompt, too.

    Raises:
        GearbxError: thresholds that do not fit the ladder.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        thresholds: Sequence[float] | None = None,
        *,
        rule: RecomputeRule | None = None,
        prefill: Gear | str | int | None = None,
        share_entropy: bool = False,
    ):
        super().__init__(gearbox)
        gears = len(gearbox.ladder)
        if rule is None:
            bits = default_thresholds(gears, vocabulary(gearbox.model)) if thresholds is None else tuple(thresholds)
            check_thresholds(bits, gears)
        self.rule = rule or (lambda entropy, position, gear: entropy > bits[gear])
        self.prefill = gearbox.ladder.top if prefill is None else gearbox.ladder.find(prefill)
        self.share_entropy = share_entropy
        self.positions, self.in_prompt = 0, False

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None, **kwargs: Any
    ) -> mx.array:
        kwargs = self.model_keywords(input_embeddings, kwargs)
        if inputs.size != 1 or self.in_prompt:
            return self.run(self.prefill, inputs, cache, **kwargs)
        ladder = self.gearbox.ladder
        before = None if cache is None or len(ladder) == 1 else Snapshot(cache)
        entropies: list[float] = []
        entropy: mx.array | None = None
        for gear in ladder:
            logits, entropy = self.run(gear, inputs, cache, **kwargs), None
            if gear == ladder.top:
                break
            (entropy,) = self.agreement.arrays(self.reader.entropy(logits[:, -1]))
            entropies.append(float(entropy))
            if not self.rule(entropies[-1], self.positions, gear.index):
                break
            if before is not None:
                before.restore()
        passes = tuple(int(ran.index <= gear.index) for ran in ladder)
        read = sum(self.gearbox.weight_bytes_per_token(ran) for ran in ladder[: gear.index + 1])
        shared = entropy if self.share_entropy else None
        self.step = Step(gear, tuple(entropies), passes, read, entropy=shared)
        self.positions += 1
        return logits


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

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        # Logits processors change the distribution that is sampled, so that its entropy is not the one computed here.
        share = not kwargs.get("logits_processors")
        prefill, _ = self.gears_of_text(gearbox)
        bits = None if self.rule is not None else thresholds_for(self.thresholds, gearbox)
        geared = GearedModel(gearbox, bits, rule=self.rule, prefill=prefill, share_entropy=share)

        def reading(read: int, tokens: int) -> None:
            geared.in_prompt = read < tokens - 1  # the last part of a prompt may be one token

        source = sampled(geared, tokenizer, prompt, lambda: geared.step, geared.reader, reading, **kwargs)
        return geared_responses(source, gearbox, Monitor(vocabulary(model), self.window), controller)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {"recomputed": tally.recomputed}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("recomputed", f"{summary['recomputed']} tokens, in a higher gear")]
