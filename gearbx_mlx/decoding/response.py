"""What comes out for every token."""

from dataclasses import dataclass

from mlx_lm.generate import GenerationResponse

from ..machine.controller import Decision


@dataclass
class GearResponse(GenerationResponse):
    """mlx-lm's response and what the gearbox saw.

    entropy: of the distribution that the token was taken from, bits.
    mean_entropy: the rolling mean that the gate sees, bits.
    gear: name of the gear that computed this token (telemetry only: that would have). Lossless: the draft gear for a
        token that it drafted and the top gear confirmed, which `from_draft` says too.
    shifted: whether it is another gear than that of the token before.
    passes: over the weights since the token before, in each gear of the ladder; of a check that made several tokens,
        all with the first of them.
    weight_bytes: that those passes read.
    drafted: lossless: tokens drafted since the token before.
    near_tie: lossless: whether the check's two best logits are so close that rounding might have decided, and a pass of
        its own might have decided otherwise. Not where a row has the same bits in any company (docs/architecture.md).
    caught_up: pair: tokens that the model ("small" or "large", for the gear) had missed and read for this one.
    decision: of the controller after this token, where there was one.
    """

    entropy: float = 0.0
    mean_entropy: float = 0.0
    gear: str = ""
    shifted: bool = False
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    drafted: int = 0
    near_tie: bool = False
    caught_up: int = 0
    decision: Decision | None = None
