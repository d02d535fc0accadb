"""Flags that say how gears become tokens."""

from dataclasses import dataclass
from typing import ClassVar

from ..decoding.modes import MODES
from ..errors import GearbxError
from ..gears.ladder import WHOLE, WHOLE_LADDER
from ..routing.acceptance import MOST_DRAFTED, FixedLength
from ..routing.rounds import COSTS
from .pair import SMALL_MODEL
from .settings import Settings, flag

TELEMETRY_ONLY, PAIR = "telemetry-only", "pair"


@dataclass(frozen=True)
class ModeSettings(Settings):
    """The mode as given (None: as files, model and small model say), and the settings of single modes."""

    title: ClassVar[str] = "mode"

    mode: str | None = flag(
        None,
        "route: the entropy of past tokens shifts. kickdown: a token in doubt is computed again in a higher gear. "
        "lossless: the low gear drafts, the top gear verifies; token for token the text of --mode static, with the "
        "same --gears, --kernels and --dtype; where nothing else is said, bfloat16 weights are stored once, in format "
        f"{WHOLE} with gears {WHOLE_LADDER}. static: one gear throughout. pair: --model and --small-model take "
        "turns. Default: pair where there is a --small-model, telemetry-only for quantized checkpoints, lossless for "
        "geared ones of format exact, else route",
        choices=tuple(MODES),
    )
    telemetry_only: bool = flag(False, "Shift nothing, show the gear that would be used.", rare=True)
    gear: str | None = flag(None, "For --mode static: name or bits of the gear. Default: the top gear", named=True)
    curve: str | None = flag(
        None,
        "For --mode lossless, when to stop drafting: a file from gearbx_mlx.calibrate --mode lossless, whose gears are "
        "then the default. Default: what ships for the demo model, or a rule for any model.",
        metavar="FILE",
        named=True,
        rare=True,
    )
    draft_length: int | None = flag(
        None, f"For --mode lossless: always draft N tokens, 1 to {MOST_DRAFTED}.", metavar="N", rare=True
    )
    cost: str | None = flag(
        None,
        "For --mode lossless, what drafts are to save: time, which is measured while the text is written, or bytes of "
        "weights, as calibrated. The text is the same. Default: time, if the file of --curve has times of this "
        "machine, else bytes",
        choices=COSTS,
        rare=True,
    )
    lookup_tokens: int | None = flag(
        None,
        "For --mode lossless: where the last tokens of the text occurred before, up to N tokens that followed there "
        f"are proposed, for nothing (prompt lookup); 0 turns that off. Default: {MOST_DRAFTED}; 0 with --draft-length",
        least=0,
        most=MOST_DRAFTED,
        metavar="N",
        rare=True,
    )
    small_model: str | None = flag(None, SMALL_MODEL, named=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.telemetry_only and self.mode not in (None, TELEMETRY_ONLY):
            raise GearbxError(f"--telemetry-only and --mode {self.mode} exclude each other; give one")
        if self.curve is not None and self.draft_length is not None:
            raise GearbxError("--curve and --draft-length exclude each other; give one")
        if self.cost is not None and self.draft_length is not None:
            raise GearbxError("--cost and --draft-length exclude each other; give one")
        if self.draft_length is not None:
            FixedLength(self.draft_length)
        if self.small_model is not None and self.mode not in (None, PAIR):
            raise GearbxError(f"--mode {self.mode} has one model; leave --small-model out, or give --mode pair")
        if self.small_model is None and self.mode == PAIR:
            raise GearbxError("--mode pair needs --small-model, a smaller model with the tokenizer of --model")

    @property
    def observes(self) -> bool:
        """Whether no layer may change gear."""
        return self.telemetry_only or self.mode == TELEMETRY_ONLY
