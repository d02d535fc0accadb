"""Find when a model should change gear, and write it to a file for generate."""

from dataclasses import replace
from pathlib import Path

from ..cli import terminal
from ..cli.flags import output_path
from ..cli.gears import GateSettings
from ..cli.settings import next_command
from ..evaluation.session import JOURNAL, beside, remove_session
from ..files.writing import write_text
from ..gears.ladder import Ladder
from ..routing.acceptance import DraftFile
from ..routing.gates import ScheduleFile, ThresholdFile
from . import LOSSLESS, ROUTE, CalibrateSettings
from .drafting import calibrate_drafting
from .schedule import calibrate_schedule
from .shared import Calibration
from .target import calibrate_target
from .thresholds import calibrate_thresholds

INCOMPLETE = ".incomplete"  # behind the name of a policy: the directory of what was recorded for it


def run(settings: CalibrateSettings) -> int:
    out = output_path(settings.calibration.out or default_name(settings))
    found = written(settings, out)
    if found.table is not None:
        terminal.messages.print(found.table)
    for note in found.notes:
        terminal.note(note)
    print(f"{out}: {found.line}")
    groups = vars(replace(settings, gate=GateSettings())).values()  # which the file has
    changes: dict[str, object]
    if isinstance(found.file, ScheduleFile):
        way = "gear" if found.file.schedule.isdecimal() else "schedule"
        changes = {"gears": Ladder(found.file.gears), way: found.file.schedule}
    elif isinstance(found.file, ThresholdFile) and found.file.mode == ROUTE:
        changes = {"thresholds": out}
    else:
        changes = {"thresholds": out, "gears": None}  # likewise
    terminal.note(next_command("generate", groups, max_tokens=None, **changes))
    return 0


def as_object(settings: CalibrateSettings) -> ThresholdFile | DraftFile | ScheduleFile:
    """What is found; written to a file where --out is given."""
    out = settings.calibration.out
    found = calibrated(settings, None) if out is None else written(settings, output_path(out))
    return found.file


def default_name(settings: CalibrateSettings) -> str:
    """The file that is written without --out."""
    if settings.target.schedule_gears is not None:
        return "schedule.json"
    if settings.wish is not None:
        return "policy.json"
    return "drafting.json" if settings.calibration.mode == LOSSLESS else "thresholds.json"


def written(settings: CalibrateSettings, out: Path) -> Calibration:
    """What is found, after writing it. An interrupted run leaves its records beside the file for the next one."""
    place = beside(out, JOURNAL if settings.wish is None else INCOMPLETE)
    found = calibrated(settings, place)
    write_text(out, found.json)
    if place is not None and place.is_dir():
        remove_session(place)
    elif place is not None:
        place.unlink(missing_ok=True)
    return found


def calibrated(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """What is found. place: of the records, which an earlier run may have begun; None: they are not kept."""
    wish = settings.wish
    if wish is not None and settings.target.schedule_gears is not None:
        return calibrate_schedule(settings, settings.target.schedule_gears, wish, place)
    if wish is not None:
        return calibrate_target(settings, wish, place)
    calibrate = calibrate_drafting if settings.calibration.mode == LOSSLESS else calibrate_thresholds
    return calibrate(settings, place)
