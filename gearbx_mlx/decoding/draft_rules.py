"""When to stop drafting: the rule of a file, of a number of tokens, or the one that ships."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..errors import GearbxError
from ..files.reading import read_as
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..routing.acceptance import DraftRule, FixedLength, default_rule
from ..routing.draft_file import DraftFile, parse_draft_file
from .draft_costs import at_measured_speeds

SHIPPED = Path(__file__).parent.parent / "demo_model" / "drafting"
MAKE_DRAFTING = "write a new one with python -m gearbx_mlx.calibrate --mode lossless"

How = DraftFile | DraftRule | str | Path | int | None


def read_draft_file(path: str | Path) -> DraftFile:
    """Raises GearbxError for a file that cannot be read, or is something else."""
    return read_as(Path(path), parse_draft_file, "a drafting file", MAKE_DRAFTING)


@cache
def shipped() -> tuple[DraftFile, ...]:
    """The drafting files that ship with the package, for the demo model."""
    return tuple(read_draft_file(path) for path in sorted(SHIPPED.glob("*.json")))


def fitting(gearbox: Gearbox) -> Iterator[DraftFile]:
    """The files that ship for this model and ladder; those of its format first."""
    for made in sorted(shipped(), key=lambda made: made.format != gearbox.format.name):
        try:
            check_file(made, gearbox)
        except GearbxError:
            continue
        yield made


def check_file(made: DraftFile, gearbox: Gearbox) -> None:
    """Raises GearbxError unless a file was made for this model and ladder."""
    made.check([gear.bits for gear in gearbox.ladder], vocabulary(gearbox.model), gearbox.fingerprint)


def find_file(gearbox: Gearbox, how: How = None) -> DraftFile | None:
    """The drafting file that `how` means, as in `find_rule`; None where it means something else.

    Raises:
        GearbxError: a file for another model, vocabulary or ladder.
    """
    if how is None:
        return next(fitting(gearbox), None)
    if isinstance(how, str | Path):
        made = read_draft_file(how)
        try:
            check_file(made, gearbox)
        except GearbxError as error:
            raise GearbxError(f"{how}: {error}; {MAKE_DRAFTING}") from error
        return made
    if isinstance(how, DraftFile):
        check_file(how, gearbox)
        return how
    return None


def find_rule(gearbox: Gearbox, how: How = None) -> tuple[DraftRule, int | None]:
    """When to stop drafting, and the bits of the gear that drafts (None: the lowest).

    Args:
        how: a file or its path, a fixed number of tokens, a rule; without, what ships for this model and ladder, or
            the rule that is used where nothing was calibrated. Where the top gear is read from the disk, curves
            count and bounds do not: those follow from the speed of the disk.

    Raises:
        GearbxError: a file for another model, vocabulary or ladder.
    """
    how = find_file(gearbox, how) or how
    if isinstance(how, DraftFile):
        return at_measured_speeds(how.rule(), gearbox, how.draft), how.draft
    if isinstance(how, int):
        return FixedLength(how), None
    rule = default_rule() if how is None else how
    assert not isinstance(rule, str | Path)  # a path was read
    return at_measured_speeds(rule, gearbox, None) if how is None else rule, None
