"""Find when a model should change gear, and write it to a file for generate."""

from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.output import output_path
from ..cli.parsers.calibrate import KICKDOWN, LOSSLESS, CalibrateSettings
from ..cli.settings import command_settings
from ..files.writing import write_text
from ..routing.draft_file import DraftFile
from ..routing.thresholds import ThresholdFile
from .calibrate_drafting import calibrate_drafting
from .calibrate_target import calibrate_target
from .calibrate_thresholds import calibrate_kickdown, calibrate_route
from .calibration import Calibration


def run(settings: CalibrateSettings) -> int:
    out = output_path(settings.calibration.out or default_name(settings))
    found = calibrated(settings)
    write_text(out, found.json)
    if found.table is not None:
        terminal.messages.print(found.table)
    for note in found.notes:
        terminal.note(note)
    print(f"{out}: {found.line}")
    return 0


def calibrate(**keywords: Any) -> ThresholdFile | DraftFile:
    """What `python -m gearbx_mlx.calibrate` writes, as an object; written to a file where `out` is given.

    Args:
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", mode="lossless".

    Returns:
        thresholds, or for mode lossless how to draft; for a target either of them.

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or prompts that cannot be calibrated.
    """
    settings = command_settings(CalibrateSettings, keywords)
    out = settings.calibration.out
    if out is not None:
        output_path(out)
    found = calibrated(settings)
    if out is not None:
        write_text(Path(out), found.json)
    return found.file


def default_name(settings: CalibrateSettings) -> str:
    """The file that is written without --out."""
    if settings.target.wish() is not None:
        return "policy.json"
    return "drafting.json" if settings.calibration.mode == LOSSLESS else "thresholds.json"


def calibrated(settings: CalibrateSettings) -> Calibration:
    wish = settings.target.wish()
    if wish is not None:
        return calibrate_target(settings, wish)
    if settings.calibration.mode == LOSSLESS:
        return calibrate_drafting(settings)
    return calibrate_kickdown(settings) if settings.calibration.mode == KICKDOWN else calibrate_route(settings)
