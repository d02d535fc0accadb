"""Find when a model should change gear, and write it to a file for generate."""

from pathlib import Path

from ..cli import terminal
from ..cli.flags import output_path
from ..files.journal import JOURNAL, beside
from ..files.writing import write_text
from ..routing.gates import ThresholdFile
from . import CalibrateSettings
from .thresholds import Calibration, calibrate_thresholds


def run(settings: CalibrateSettings) -> int:
    out = output_path(settings.calibration.out or "thresholds.json")
    found = written(settings, out)
    terminal.note(found.note)
    print(f"{out}: {found.line}")
    return 0


def as_object(settings: CalibrateSettings) -> ThresholdFile:
    """What is found; written to a file where --out is given."""
    out = settings.calibration.out
    found = calibrate_thresholds(settings, None) if out is None else written(settings, output_path(out))
    return found.file


def written(settings: CalibrateSettings, out: Path) -> Calibration:
    """What is found, after writing it. An interrupted run leaves its records beside the file for the next one."""
    place = beside(out, JOURNAL)
    found = calibrate_thresholds(settings, place)
    write_text(out, found.file.text())
    if place is not None:
        place.unlink(missing_ok=True)
    return found
