"""What is known of every token: how its logits came about, and the response that comes out for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, GenerationResponse

from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..machine.controller import CapDecision
from ..telemetry.trace import LOOKUP as LOOKUP

MODEL, DRAFT = "model", "draft"  # who chose a token first: the model itself, a draft; LOOKUP: the text


@dataclass
class GeneratedText:
    """A text while it is generated.

    Args:
        tokens: of the prompt, and those generated after it.
        ends: tokens that end the text.
        room: how many tokens may still be generated; infinite without a limit.
    """

    tokens: list[int]
    ends: frozenset[int] = frozenset()
    room: float = math.inf

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        """Tokens of the prompt."""

    @property
    def last(self) -> int:
        """The token that the next pass reads."""
        return self.tokens[-1]

    @property
    def goes_on(self) -> bool:
        """True until a token ends the text, or there is no room."""
        generated = len(self.tokens) > self.prompt
        return self.room > 0 and not (generated and self.last in self.ends)

    def ends_with(self, count: int) -> bool:
        """True if the text has ended, and so many tokens were generated."""
        return not self.goes_on and len(self.tokens) == self.prompt + count

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.room -= 1

    def until_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to the first one that ends the text, which is among them."""
        last = next((place for place, token in enumerate(tokens, 1) if token in self.ends), len(tokens))
        return list(tokens[:last])

    def array(self) -> mx.array:
        return mx.array(self.tokens, mx.uint32)


@dataclass(frozen=True)
class Step:
    """How one token came about.

    Attributes:
        gear: computed it; of a drafted token that was accepted, the gear that drafted it.
        passes, weight_bytes, drafted, lookup_drafted, source, caught_up, kv_bytes, kv_caches: as in `Seen`, per step.
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
        id: of the vocabulary.
        logprobs: (V,), of the distribution that it was sampled from.
        entropy: of this distribution, bits.
        step: how the logits came about.
        near_tie: rounding may have decided between the two best logits.
    """

    id: int
    logprobs: mx.array
    entropy: float
    step: Step
    near_tie: bool = False


def single_pass(gearbox: Gearbox | Observer, gear: Gear, rows: int = 1) -> Step:
    """Return the step of a token that took one pass in one gear, over so many sequences."""
    passes = tuple(int(gear == other) for other in gearbox.ladder)
    return Step(gear, passes, gearbox.weight_bytes_per_token(gear, rows))


@dataclass
class Seen:
    """What the gearbox saw of a token.

    entropy: of the distribution that the token was sampled from, bits.
    mean_entropy: the rolling mean that the gate sees, bits.
    gear: name of the gear that computed this token; telemetry only: of the gear that mode route would use. Lossless:
        the draft gear, for a token that it drafted and the top gear accepted (`from_draft` is true then).
    shifted: whether the token before had another gear.
    passes: over the weights since the token before, in each gear of the ladder. The passes of a verification that
        made several tokens stand with the first of them.
    weight_bytes: what these passes read.
    drafted: tokens drafted since the token before.
    lookup_drafted: lossless: tokens that the text itself proposed since the token before (prompt lookup).
    source: lossless: who proposed this token, which the top gear then accepted: `draft`, the low gear; `lookup`, the
        text; `model`, the top gear alone. Other modes: `model`.
    near_tie: lossless: the two best logits are so close that rounding may have decided between them, so that a pass
        over this token alone may have chosen the other one. Always false where kernels give a row the same bits in
        any company (docs/architecture.md).
    caught_up: pair: tokens that the model had missed and read for this one.
    kv_bytes: with `kv_gears`: bytes of keys and values that passes have read since the token before, by the bits of
        the KV cache's gear; a prompt's are not counted.
    kv_caches: with `kv_gears`: how many layers' caches these passes have read, by the same bits. Both are empty where
        the cache has no gears.
    decision: of the controller after this token, if it made one.
    requested_gear: batches: name of the gear that this sequence would have had by itself; "" elsewhere.
    batch_size: sequences that shared the pass; `weight_bytes` is the share of one of them.
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
class GearResponse(Seen, GenerationResponse):
    """mlx-lm's response, and what the gearbox saw."""


@dataclass
class BatchGearResponse(Seen, GenerationBatch.Response):
    """mlx-lm's response for a sequence of a batch, and what the gearbox saw.

    from_draft: lossless: the draft gear drafted the token, and the top gear accepted it.
    error: why the sequence ended without a token to believe, if it did: its logits are not numbers.
    """

    from_draft: bool = False
    error: Exception | None = None


OF_STEP = ("passes", "weight_bytes", "drafted", "lookup_drafted", "source", "caught_up", "kv_bytes", "kv_caches")


def seen_of(step: Step, entropy: float, mean: float, before: Gear | None, near_tie: bool = False) -> dict[str, Any]:
    """Return the fields of `Seen` that follow from a step, and `from_draft`, by name.

    Args:
        entropy: of this token, bits.
        mean: the rolling mean, bits.
        before: the gear of the token before, if there was one.
    """
    return {
        **{name: getattr(step, name) for name in OF_STEP},
        "entropy": entropy,
        "mean_entropy": mean,
        "gear": step.gear.name,
        "shifted": before is not None and step.gear != before,
        "from_draft": step.source == DRAFT,
        "near_tie": near_tie,
    }
