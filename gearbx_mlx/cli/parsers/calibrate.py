"""Flags and settings of gearbx_mlx.calibrate."""

import argparse
from dataclasses import dataclass

from ...errors import GearbxError
from ...evaluation.wish import Wish
from ...routing.calibration import check_shares
from ..floors import FloorSettings, add_floor_flags
from ..gate import GateSettings, add_gate_flags
from ..gears import GearFlags, LayoutSettings, add_gear_flags
from ..model import ModelSettings, add_model_flags
from ..prompt import PromptSettings, add_prompt_flags
from ..settings import LARGEST_SHOWN, Settings, command_settings, name, new_parser, number, one_of

MODES = ROUTE, KICKDOWN, LOSSLESS = "route", "kickdown", "lossless"
METHODS = SHARE, PERCENTILE, MEDIAN, MANUAL = "share", "percentile", "median", "manual"
TOPS = (16, 8)


@dataclass(frozen=True)
class TargetSettings(Settings):
    """A budget instead of thresholds, and the text to find the policy on."""

    target_agreement: float | None = None
    target_kl: float | None = None
    target_bytes: float | None = None
    data: str | None = name()
    tokens: int = number(2000, 1, LARGEST_SHOWN)
    context: int = number(256, 2, LARGEST_SHOWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wish()

    def wish(self) -> Wish | None:
        """The wish; None where no target is given. Raises GearbxError for a target that cannot be."""
        targets = {"agreement": self.target_agreement, "kl": self.target_kl, "weight_bytes": self.target_bytes}
        given = {key: value for key, value in targets.items() if value is not None}
        return Wish(**given) if given else None


@dataclass(frozen=True)
class CalibrationSettings(Settings):
    """What to find, how, on which prompts; and the file to write."""

    mode: str = one_of(ROUTE, *MODES)
    top: int = one_of(16, *TOPS)
    method: str = one_of(SHARE, *METHODS)
    shares: str | None = None
    prompts: str | None = name()
    num_prompts: int | None = number(None, 1)
    trivial: str | None = name()
    hard: str | None = name()
    out: str | None = name()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is not None:
            check_shares(self.parts())

    def parts(self) -> list[float]:
        """--shares as numbers. Raises GearbxError for anything else."""
        try:
            return [float(part) for part in (self.shares or "").split(",")]
        except ValueError as error:
            raise GearbxError(
                f"--shares '{self.shares}' are not numbers with commas between, such as 0.6,0.3,0.1"
            ) from error

    def shares_of(self, gears: int) -> list[float]:
        """A share for each gear, lowest first. Raises GearbxError for another number of shares."""
        if self.shares is None:
            return [1 / gears] * gears
        shares = self.parts()
        if len(shares) != gears:
            raise GearbxError(f"--shares '{self.shares}': give {gears} parts, one for each gear")
        return shares


@dataclass(frozen=True)
class CalibrateSettings:
    model: ModelSettings
    prompt: PromptSettings
    layout: LayoutSettings
    gears: GearFlags
    floors: FloorSettings
    gate: GateSettings
    target: TargetSettings
    calibration: CalibrationSettings

    def __post_init__(self) -> None:
        mode, method = self.calibration.mode, self.calibration.method
        if self.target.wish() is None and mode != ROUTE and method != SHARE:
            raise GearbxError(f"--method {method} is for --mode route; leave it out")


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "calibrate",
        "Find entropy thresholds between the gears, for generate --thresholds; or when to stop drafting, for generate "
        "--mode lossless --curve.",
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_gear_flags(parser)
    add_floor_flags(parser)
    add_gate_flags(parser)
    add_target_flags(parser)
    add_calibration_flags(parser)
    return parser


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a budget instead of thresholds")
    wish = group.add_mutually_exclusive_group()
    wish.add_argument("--target-agreement", type=float, help="Least share of tokens on which the top gear agrees.")
    wish.add_argument("--target-kl", type=float, help="Most mean KL from the top gear, nats.")
    wish.add_argument("--target-bytes", type=float, help="Most weight bytes read per token.")
    group.add_argument("--data", help="Text to calibrate on. Default: what the top gear writes after the prompts.")
    group.add_argument("--tokens", type=int, help="Predictions on this text. Default: 2000")
    group.add_argument("--context", type=int, help="Tokens in a window of this text. Default: 256")


def add_calibration_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--mode",
        choices=MODES,
        help="route, kickdown: thresholds. lossless: the gear that drafts, its curve, and the bound, those that read "
        "the fewest bytes of weights per token; of --gears, or of several ladders. Default: route",
    )
    group.add_argument(
        "--top", type=int, choices=TOPS, help="Bits of the top gear, for lossless without --gears. Default: 16"
    )
    group.add_argument(
        "--method",
        choices=METHODS,
        help="share: a given share of tokens per gear. percentile: 30th and 60th of the prompts' own tokens. median: "
        "of generated tokens, and 2.5 times it. manual: trivial against hard prompts. Default: share",
    )
    group.add_argument("--shares", help="Parts of 1, lowest gear first, such as 0.6,0.3,0.1. Default: equal parts")
    group.add_argument("--prompts", help="One prompt per line, or JSON Lines as of GSM8K. Default: three that ship.")
    group.add_argument("--num-prompts", type=int, help="Use only this many prompts, the first ones.")
    group.add_argument("--trivial", help="Prompts that are easy, for --method manual. Default: three that ship.")
    group.add_argument("--hard", help="Prompts that are hard, for --method manual. Default: three that ship.")
    group.add_argument(
        "--out",
        help="File to write. Default: thresholds.json; drafting.json for lossless; policy.json for a budget",
    )


def parse() -> CalibrateSettings:
    """Raises GearbxError for flags that no model can be calibrated with."""
    return command_settings(CalibrateSettings, vars(setup_arg_parser().parse_args()))
