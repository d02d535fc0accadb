"""Records of a sequence and of its tokens, from the forward pass to the response."""

import math
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, GenerationResponse

from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..machine.controller import CapDecision
from ..routing.gates import Reading
from ..telemetry.trace import LOOKUP as LOOKUP

MODEL, DRAFT = "model", "draft"  # source of a token: the model or a drafter; LOOKUP: prompt lookup


@dataclass
class GeneratedText:
    """A sequence during generation.

    Args:
        tokens: of the prompt, then generated ones.
        ends: end-of-sequence tokens.
        room: number of tokens that may still be generated; infinite without a limit.

    Attributes:
        prompt: number of tokens of the prompt.
        goes_on: False after an end-of-sequence token, or without room.
    """

    tokens: list[int]
    ends: frozenset[int] = frozenset()
    room: float = math.inf

    def __post_init__(self) -> None:
        self.prompt, self.goes_on = len(self.tokens), self.room > 0

    @property
    def last(self) -> int:
        """Input token of the next forward pass."""
        return self.tokens[-1]

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.room -= 1
        self.goes_on = self.room > 0 and token not in self.ends

    def array(self) -> mx.array:
        return mx.array(self.tokens, mx.uint32)


@dataclass(frozen=True)
class Step:
    """Passes, bytes and source of one token.

    Attributes:
        gear: that computed it; for an accepted draft token, the gear that drafted it.
        passes, weight_bytes, drafted, lookup_drafted, source, caught_up, kv_bytes, kv_caches: see TokenTelemetry.
    """

    gear: Gear
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    drafted: int = 0
    lookup_drafted: int = 0
    source: str = MODEL
    caught_up: int = 0
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_caches: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token.

    Attributes:
        id: in the vocabulary.
        logprobs: (V,), of the distribution that it was sampled from.
        entropy: of this distribution, bits.
        step: passes and bytes of its logits.
        near_tie: whether rounding may have decided which of the two best logits is larger.
    """

    id: int
    logprobs: mx.array
    entropy: float
    step: Step
    near_tie: bool = False


def single_pass(gearbox: Gearbox | Observer, gear: Gear, rows: int = 1, **of_cache: Any) -> Step:
    """Return the step of a token from one forward pass in one gear, over a number of rows.

    Args:
        of_cache: fields of a step about the KV cache.
    """
    passes = tuple(int(gear == other) for other in gearbox.ladder)
    return Step(gear, passes, gearbox.weight_bytes_per_token(gear, rows), **of_cache)


@dataclass
class TokenTelemetry:
    """Telemetry of a token.

    Attributes:
        entropy: of the distribution that the token was sampled from, bits.
        mean_entropy: the rolling mean that the gate compares with its thresholds, bits.
        gear: name of the gear that computed the token. An accepted draft token has its draft gear (`from_draft` is
            true then). Telemetry-only: the gear that mode route would use.
        shifted: whether the previous token had a different gear.
        passes: over the weights since the previous token, in each gear of the ladder. The passes of a verification
            that yields several tokens count for the first of them.
        weight_bytes: read by these passes.
        drafted: tokens drafted since the previous token.
        lookup_drafted: lossless: tokens that prompt lookup proposed since the previous token.
        source: lossless: `draft` or `lookup` for an accepted proposal, else `model`. Other modes: `model`.
        near_tie: lossless: the two best logits are so close that a pass over one token might choose the other one;
            with batch-invariant kernels (docs/architecture.md) it cannot.
        caught_up: pair: tokens of the prompt or of the other model that this model prefilled before the token.
        kv_bytes: with `kv_gears`: for each number of bits, the bytes of keys and values read since the previous token,
            without prefill.
        kv_caches: with `kv_gears`: for each number of bits, the layer caches that these passes read.
        decision: of the controller after this token; None without one.
        requested_gear: batches: name of the gear that this sequence requested; "" elsewhere.
        batch_size: sequences that shared the pass; `weight_bytes` is the share of one sequence.
    """

    entropy: float = 0.0
    mean_entropy: float = 0.0
    gear: str = ""
    shifted: bool = False
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    drafted: int = 0
    lookup_drafted: int = 0
    source: str = "model"
    near_tie: bool = False
    caught_up: int = 0
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_caches: dict[int, int] = field(default_factory=dict)
    decision: CapDecision | None = None
    requested_gear: str = ""
    batch_size: int = 1


@dataclass
class GearResponse(TokenTelemetry, GenerationResponse):
    """mlx-lm's response with telemetry."""


@dataclass
class BatchGearResponse(TokenTelemetry, GenerationBatch.Response):
    """mlx-lm's response for a sequence of a batch, with telemetry.

    Attributes:
        from_draft: False, as batches do not draft.
        error: why the sequence ended without a valid token, such as logits that are NaN; None if it did not.
    """

    from_draft: bool = False
    error: Exception | None = None


def telemetry_of(step: Step, reading: Reading, before: Gear | None) -> dict[str, Any]:
    """Return the fields of `TokenTelemetry` that follow from a token's step and reading, and `from_draft`, by name.

    Args:
        before: the gear of the previous token; None for the first one.
    """
    return {
        **vars(step),
        "entropy": reading.value,
        "mean_entropy": reading.mean,
        "gear": step.gear.name,
        "shifted": before is not None and step.gear != before,
        "from_draft": step.source == DRAFT,
    }
