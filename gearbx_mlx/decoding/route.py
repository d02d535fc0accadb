"""Mode route (GEARBX 10.3): the entropies of past tokens choose the gear of coming ones.

mlx-lm runs one token ahead: when token t is handed out, the pass that computes t + 1 has been dispatched. A shift made
then first acts on t + 2.
"""

import collections.abc
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import mlx.nn as nn
from mlx_lm.generate import GenerationResponse

from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..ranks.agreement import agreement_of
from ..routing.batch_policy import BatchPolicy, highest
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, Gate, ThresholdGate
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..routing.prompt import first_gear
from ..routing.thresholds import check_thresholds, default_thresholds
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .auto_thresholds import auto_thresholds
from .batches.generator import BatchGenerator
from .batches.sequence import BatchText
from .draft_model import drafted_tokens
from .entropy import fast_entropy
from .entropy_sampler import sampled_tokens
from .finite import check_finite
from .governor import Governor
from .known_vocabulary import vocabulary_of
from .mode import AUTO, Mode
from .response import GearResponse
from .responses import gear_response, governed
from .step import SampledToken, Step, single_pass


@dataclass(frozen=True)
class Route(Mode):
    """Shift by the rolling entropy.

    Args:
        thresholds: bits, one fewer than there are gears; the paper's, scaled to the vocabulary, if not given; "auto":
            found on the first prompt, once for a gearbox (GEARBX 4.2).
        window: tokens in the rolling mean.
        hysteresis: bits.
        min_gear_duration: tokens.
        initial_gear: name or bits of the gear that reads the prompt and begins; "auto": chosen by the prompt
            (GEARBX 11).
        gate: a Gate of your own, in place of thresholds, hysteresis and duration.
    """

    name: ClassVar[str] = "route"

    thresholds: collections.abc.Sequence[float] | Literal["auto"] | None = None
    window: int = DEFAULT_WINDOW
    hysteresis: float = DEFAULT_HYSTERESIS
    min_gear_duration: int = DEFAULT_MIN_GEAR_DURATION
    initial_gear: str | int = AUTO
    gate: Gate | None = None

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        mode = self.settled(gearbox, tokenizer, prompt)
        gate, monitor = mode.gate_for(gearbox), Monitor(vocabulary_of(gearbox), self.window)
        first = self.first_gear(gearbox, tokenizer, prompt)
        gate.reset(first.index)
        gearbox.shift(first)
        tokens = in_engaged_gear(model, tokenizer, prompt, gearbox, **kwargs)
        return routed(tokens, gearbox, gate, monitor, first, controller)

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> BatchGenerator:
        return BatchGenerator(model, tokenizer, gearbox, self, policy, **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """What one text of a batch has of its own; of a gate that was given, a copy."""
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        gate = self.settled(gearbox, tokenizer, prompt).gate_for(gearbox)
        return BatchText(deepcopy(gate), monitor, self.first_gear(gearbox, tokenizer, prompt))

    def settled(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> "Route":
        if self.thresholds != AUTO or self.gate is not None:
            return self
        return replace(self, thresholds=auto_thresholds(gearbox, tokenizer, prompt).thresholds)

    def gate_for(self, gearbox: Gearbox | Observer) -> Gate:
        """The gate for a gearbox. Raises GearbxError for thresholds that do not fit its ladder."""
        if self.gate is not None:
            return self.gate
        return ThresholdGate(self.bits(gearbox), self.hysteresis, self.min_gear_duration)

    def bits(self, gearbox: Gearbox | Observer) -> tuple[float, ...]:
        """The thresholds of a settled mode. Raises GearbxError for those that do not fit the ladder."""
        gears, given = len(gearbox.ladder), self.thresholds
        if isinstance(given, str):
            raise GearbxError(f"thresholds are '{given}'; give numbers of bits, or \"auto\"")
        thresholds = default_thresholds(gears, vocabulary_of(gearbox)) if given is None else tuple(given)
        check_thresholds(thresholds, gears)
        return thresholds

    def first_gear(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> Gear:
        """Raises GearbxError for a gear that the ladder does not have."""
        ladder = gearbox.ladder
        if self.initial_gear == AUTO:
            return ladder[first_gear(prompt_text(tokenizer, prompt), len(ladder))]
        return ladder.find(self.initial_gear)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return draft_summary(tally, sum(tally.passes.values())) if tally.drafted else {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary)


def in_engaged_gear(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    gearbox: Gearbox | Observer,
    draft_model: nn.Module | None = None,
    **kwargs: Any,
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """mlx-lm's responses, each computed in the gear that is engaged at that moment; with a draft model as well."""
    if draft_model is not None and agreement_of(model).group is not None:
        raise GearbxError("ranks share this model, and mlx-lm's draft models run in one process; use mode 'lossless'")
    if draft_model is not None:
        return drafted_tokens(model, draft_model, tokenizer, prompt, gearbox, **kwargs)

    def step() -> Step:
        return single_pass(gearbox, gearbox.gear)

    return sampled_tokens(model, tokenizer, prompt, step, fast_entropy(gearbox), **kwargs)


def routed(
    tokens: Iterator[tuple[GenerationResponse, SampledToken]],
    gearbox: Gearbox | Observer,
    gate: Gate,
    monitor: Monitor,
    gear: Gear,
    controller: Governor | None = None,
) -> Iterator[GearResponse]:
    """Pass tokens on, and shift after each by the rolling entropy. Begins in the gear that is given."""
    before: Gear | None = None
    gearbox.shift(gear)
    for response, token, decision in governed(tokens, controller):
        entropy = float(token.entropy)
        check_finite(response.logprobs, entropy, gearbox, token.step.gear)
        seen = monitor.update(entropy)
        gear = gearbox.ladder[gate.update(seen)]
        gearbox.shift(gear)
        gearbox.prepare(gearbox.ladder[gate.peek(seen.forecast)])
        yield gear_response(response, token.step, entropy, seen.mean, before, decision=decision)
        gearbox.shift(gear)  # another text may have shifted meanwhile
        before = token.step.gear


def prompt_text(tokenizer: Any, prompt: Any) -> str:
    """The prompt as text, whether it came as text or as tokens."""
    if isinstance(prompt, str):
        return prompt
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    return tokenizer.decode(tokens, skip_special_tokens=True)  # whose brackets are no mathematics
