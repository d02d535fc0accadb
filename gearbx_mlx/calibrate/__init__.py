"""Flags and settings of gearbx_mlx.calibrate."""

import argparse
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from ..cli.flags import ModelSettings
from ..cli.gears import FloorSettings, GateSettings, GearFlags, LayoutSettings
from ..cli.prompt import PromptSettings
from ..cli.settings import Settings, as_text, command_settings, flag, flag_of, parser_of
from ..cli.start import call, command
from ..errors import LARGEST_SHOWN, GearbxError, numbers
from ..evaluation.target import Wish
from ..routing.acceptance import Dial, DraftFile
from ..routing.calibration import check_shares
from ..routing.gates import ScheduleFile, ThresholdFile
from ..routing.rounds import BYTES, COSTS, TIME

MODES = ROUTE, KICKDOWN, LOSSLESS = "route", "kickdown", "lossless"
SHARE = "share"  # how thresholds are found, as the file says
TOPS = (16, 8)
DEFAULT_PROMPT = 128  # tokens of a window of --data before those that a schedule computes


MOST_SCHEDULED = 5  # gears: every place where each may end is tried


def parse_descending(text: str) -> tuple[int, ...]:
    """--schedule-gears as numbers. Raises GearbxError for anything but two to five descending bits."""
    bits = numbers("--schedule-gears", text, int, "8,6,4")
    if not 2 <= len(bits) <= MOST_SCHEDULED or any(a <= b for a, b in itertools.pairwise(bits)):
        raise GearbxError(
            f"--schedule-gears is '{text}'; give bits of 2 to {MOST_SCHEDULED} gears, the highest first: 8,6,4"
        )
    return bits


def parse_shares(text: str) -> tuple[float, ...]:
    """--shares as numbers. Raises GearbxError for anything but parts of 1."""
    shares = numbers("--shares", text, float, "0.6,0.3,0.1")
    check_shares(shares)
    return shares


@dataclass(frozen=True)
class TargetSettings(Settings):
    """A budget instead of thresholds, and the text to find the policy on."""

    title: ClassVar[str] = "a budget instead of thresholds"

    target_agreement: float | None = flag(
        None, "Least share of tokens on which the top gear agrees.", exclusive="target"
    )
    target_kl: float | None = flag(None, "Most mean KL from the top gear, nats.", exclusive="target")
    target_regret: float | None = flag(
        None,
        "With --mode lossless: the log-probability (nats) that a token may give up on average; the file then has the "
        "tolerance for it, as it has with --target-agreement.",
        exclusive="target",
    )
    target_bytes: float | None = flag(None, "Most weight bytes read per token.", exclusive="target")
    data: str | None = flag(
        None, "Text to calibrate on. Default: what the top gear writes after the prompts.", named=True
    )
    tokens: int = flag(2000, "Predictions on this text.", least=1, most=LARGEST_SHOWN)
    context: int = flag(256, "Tokens in a window of this text.", least=2, most=LARGEST_SHOWN)
    schedule_gears: tuple[int, ...] | None = flag(
        None,
        "For --mode route: find the numbers of tokens of a schedule of these gears, for generate --schedule.",
        metavar="8,6,4",
        parse=parse_descending,
    )
    prompt_tokens: int | None = flag(
        None,
        "With --schedule-gears and --data: the first tokens of a window that are its prompt, read in the top gear. "
        f"Default: {DEFAULT_PROMPT}",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wish = self.wish()
        if self.schedule_gears is not None and wish is None:
            raise GearbxError("--schedule-gears needs a budget; give --target-bytes, --target-kl or --target-agreement")
        if self.prompt_tokens is not None and (self.schedule_gears is None or self.data is None):
            raise GearbxError("--prompt-tokens goes with --schedule-gears and --data; give them, or leave it out")
        if self.schedule_gears is not None and self.data is not None and self.prompt > self.context - 2:
            raise GearbxError(
                f"--prompt-tokens is {self.prompt}, and a window has {self.context}; give {self.context - 2} or fewer, "
                "or more --context"
            )

    @property
    def prompt(self) -> int:
        """Tokens of a window that are its prompt."""
        return DEFAULT_PROMPT if self.prompt_tokens is None else self.prompt_tokens

    def wish(self) -> Wish | None:
        """What a policy is to reach; None where no target is given. Raises GearbxError for a target that cannot be."""
        targets = {"agreement": self.target_agreement, "kl": self.target_kl, "weight_bytes": self.target_bytes}
        given = {key: value for key, value in targets.items() if value is not None}
        return Wish(**given) if given else None


@dataclass(frozen=True)
class CalibrationSettings(Settings):
    """What to find, how, on which prompts; and the file to write."""

    title: ClassVar[str] = "calibration"

    mode: str = flag(
        ROUTE,
        "route, kickdown: thresholds. lossless: the gear that drafts, its curve, and the bound, those that read the "
        "fewest bytes of weights per token; of --gears, or of several ladders.",
        choices=MODES,
    )
    cost: str = flag(
        BYTES,
        "For --mode lossless: choose the gears that read the fewest bytes, or those that take the least time. time "
        "also measures passes on this machine, after --context tokens, and writes what they take into the file.",
        choices=COSTS,
    )
    tolerance: float | None = flag(
        None, "For --mode lossless: as for generate; the curve then says which drafts stay.", least=0, metavar="NATS"
    )
    top: int = flag(16, "Bits of the top gear, for lossless without --gears.", choices=TOPS)
    shares: tuple[float, ...] | None = flag(
        None, "Parts of 1, lowest gear first, such as 0.6,0.3,0.1. Default: equal parts", parse=parse_shares
    )
    prompts: str | None = flag(
        None, "One prompt per line, or JSON Lines as in GSM8K. Default: three that ship.", named=True
    )
    num_prompts: int | None = flag(None, "Use only this many prompts, the first ones.", least=1)
    out: str | None = flag(
        None,
        "File to write. Default: thresholds.json; drafting.json for lossless; policy.json for a budget; "
        "schedule.json for a schedule",
        named=True,
    )

    def shares_of(self, gears: int) -> tuple[float, ...]:
        """A share for each gear, lowest first. Raises GearbxError for another number of shares."""
        shares = self.shares or (1 / gears,) * gears
        if len(shares) != gears:
            raise GearbxError(f"--shares '{as_text(shares)}': give {gears} parts, one for each gear")
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
        lossless, target = self.calibration.mode == LOSSLESS, self.target
        if self.calibration.cost == TIME and not lossless:
            raise GearbxError("--cost time is for --mode lossless; leave it out, or give that mode")
        if not lossless and (target.target_regret is not None or self.calibration.tolerance is not None):
            name = "--target-regret" if self.calibration.tolerance is None else "--tolerance"
            raise GearbxError(f"{name} is for --mode lossless; leave it out, or give that mode")
        if lossless and (target.target_kl is not None or target.target_bytes is not None):
            raise GearbxError("--target-kl and --target-bytes choose a policy; leave --mode out, or give other targets")
        if target.schedule_gears is not None:
            self.check_schedule()
        self.dial()

    def check_schedule(self) -> None:
        """Raises GearbxError for what is for thresholds or another mode, beside the gears of a schedule."""
        mode, thresholds = self.calibration.mode, {"shares": self.calibration.shares, **vars(self.gate)}
        if mode != ROUTE:
            raise GearbxError(f"--schedule-gears is for --mode {ROUTE}; leave it out, or --mode {mode}")
        for name, value in thresholds.items():
            if value is not None:
                raise GearbxError(f"{flag_of(name)} is for thresholds; leave it out with --schedule-gears")

    @property
    def wish(self) -> Wish | None:
        """What a policy is to reach; None where thresholds or drafts are calibrated."""
        return None if self.calibration.mode == LOSSLESS else self.target.wish()

    def dial(self) -> Dial | None:
        """Which drafted tokens are to stay; None: those that the top gear chooses. Raises GearbxError as Dial."""
        given = self.calibration.tolerance, self.target.target_agreement, self.target.target_regret
        lossless = self.calibration.mode == LOSSLESS and any(value is not None for value in given)
        return Dial(*given) if lossless else None


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        CalibrateSettings,
        "calibrate",
        "Find entropy thresholds between the gears, for generate --thresholds; or when to stop drafting, for generate "
        "--mode lossless --curve. To continue an interrupted run, give the same command again.",
    )


def calibrate(**keywords: Any) -> ThresholdFile | DraftFile | ScheduleFile:
    """What `python -m gearbx_mlx.calibrate` writes, as an object; written to a file where `out` is given.

    Args:
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", mode="lossless".

    Returns:
        thresholds, or for mode lossless how to draft; for a target either of them; with schedule_gears a schedule.

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or prompts that cannot be calibrated.
    """
    return call("calibrate", "as_object", command_settings(CalibrateSettings, keywords))


main = command("calibrate")
