"""What comes out for every token."""

from dataclasses import dataclass, field

from mlx_lm.generate import GenerationBatch, GenerationResponse

from ..machine.controller import Decision


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
    discarded: lossless: steps that the draft gear computed beyond the end of a draft since the token before. They are
        in `passes` and `weight_bytes`, and not in `drafted`.
    looked_up: lossless: tokens that the text itself proposed since the token before (prompt lookup).
    source: lossless: who proposed this token, which the top gear then accepted: `draft`, the low gear; `lookup`, the
        text; `model`, nobody but the top gear. Other modes: `model`.
    near_tie: lossless: the two best logits are so close that rounding may have decided between them, so that a pass
        over this token alone may have chosen the other one. Always false where kernels give a row the same bits in
        any company (docs/architecture.md).
    caught_up: pair: tokens that the model had missed and read for this one.
    kv_bytes: with `kv_gears`: bytes of keys and values that passes have read since the token before, by the bits of
        the KV cache's gear; a prompt's are not counted.
    kv_caches: with `kv_gears`: how many layers' caches these passes have read, by the same bits.
    decision: of the controller after this token, if it made one.
    wish: batches: name of the gear that this sequence alone would have had for the token; "" elsewhere.
    together: sequences that shared the pass; `weight_bytes` is the share of one of them.
    """

    entropy: float = 0.0
    mean_entropy: float = 0.0
    gear: str = ""
    shifted: bool = False
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    drafted: int = 0
    discarded: int = 0
    looked_up: int = 0
    source: str = "model"
    near_tie: bool = False
    caught_up: int = 0
    kv_bytes: dict[int, int] = field(default_factory=dict)
    kv_caches: dict[int, int] = field(default_factory=dict)
    decision: Decision | None = None
    wish: str = ""
    together: int = 1


@dataclass
class GearResponse(Seen, GenerationResponse):
    """mlx-lm's response, and what the gearbox saw."""


@dataclass
class BatchGearResponse(Seen, GenerationBatch.Response):
    """mlx-lm's response for a sequence of a batch, and what the gearbox saw.

    from_draft: lossless: the draft gear drafted the token, and the top gear accepted it.
    error: why the sequence ended without a token to believe, if it did: its logits are no numbers.
    """

    from_draft: bool = False
    error: Exception | None = None
