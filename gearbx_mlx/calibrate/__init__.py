"""Flags and settings of gearbx_mlx.calibrate."""

import argparse
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from ..cli.flags import GearFlags, LayerSettings, ModelSettings
from ..cli.parser import command_settings, parser_of
from ..cli.prompt import PromptSettings
from ..cli.start import call, command
from ..decoding.modes import KICKDOWN, ROUTE
from ..errors import LARGEST_SHOWN, GearbxError, numbers
from ..routing.calibration import check_shares
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, DEFAULT_WINDOW, ThresholdFile
from ..settings import Settings, as_text, flag


def parse_shares(text: str) -> tuple[float, ...]:
    """Parse --shares. Raises GearbxError for anything but parts of 1."""
    shares = numbers("--shares", text, float, "0.6,0.3,0.1")
    check_shares(shares)
    return shares


@dataclass(frozen=True)
class CalibrationSettings(Settings):
    """Mode, shares and prompts of a calibration, and its file."""

    title: ClassVar[str] = "calibration"

    mode: str = flag(ROUTE, "Mode of the thresholds", choices=(ROUTE, KICKDOWN))
    shares: tuple[float, ...] | None = flag(
        None, "Shares of tokens, lowest gear first, such as 0.6,0.3,0.1", default_text="equal", parse=parse_shares
    )
    prompts: str | None = flag(
        None, "File with one prompt per line, or JSON Lines as in GSM8K", default_text="three bundled ones", named=True
    )
    num_prompts: int | None = flag(None, "Number of prompts to use, from the first", minimum=1)
    out: str | None = flag(None, "File to write", default_text="thresholds.json", named=True)

    def shares_of(self, gears: int) -> tuple[float, ...]:
        """Return a share for each gear, lowest first. Raises GearbxError for a different number of shares."""
        shares = self.shares or (1 / gears,) * gears
        if len(shares) != gears:
            raise GearbxError(f"--shares: must be {gears} parts, got {as_text(shares)}; set one for each gear")
        return shares


@dataclass(frozen=True)
class GateSettings(Settings):
    """Settings of the gate of mode route, saved beside the thresholds."""

    title: ClassVar[str] = "gate"

    window: int = flag(DEFAULT_WINDOW, "Tokens in the rolling mean", minimum=1, maximum=LARGEST_SHOWN, rare=True)
    hysteresis: float = flag(DEFAULT_HYSTERESIS, "Hysteresis in bits", minimum=0, maximum=sys.float_info.max, rare=True)
    min_gear_duration: int = flag(DEFAULT_MIN_GEAR_DURATION, "Minimum number of tokens in a gear", minimum=1, rare=True)


@dataclass(frozen=True)
class CalibrateSettings:
    model: ModelSettings
    prompt: PromptSettings
    layout: LayerSettings
    gears: GearFlags
    gate: GateSettings
    calibration: CalibrationSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        CalibrateSettings,
        "calibrate",
        "Find entropy thresholds between the gears, for generate --thresholds. To continue an interrupted run, repeat "
        "the command.",
    )


def calibrate(**keywords: Any) -> ThresholdFile:
    """Return the result of `python -m gearbx_mlx.calibrate`, and write it to a file if `out` is given.

    Args:
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", mode="kickdown".

    Raises:
        GearbxError: an unknown keyword, or settings, a model or prompts that cannot be calibrated.
    """
    return call("calibrate", "as_object", command_settings(CalibrateSettings, keywords))


main = command("calibrate")
