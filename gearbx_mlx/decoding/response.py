"""What comes out for every token."""

from dataclasses import dataclass

from mlx_lm.generate import GenerationResponse


@dataclass
class GearResponse(GenerationResponse):
    """mlx-lm's response and what the gearbox saw.

    entropy: of the distribution that the token was taken from, bits.
    mean_entropy: the rolling mean that the gate sees, bits.
    gear: name of the gear that computed this token (telemetry only: that would have).
    shifted: whether it is another gear than that of the token before.
    """

    entropy: float = 0.0
    mean_entropy: float = 0.0
    gear: str = ""
    shifted: bool = False
