"""A reader that plays the machine's state from a file, for tests and for trying things out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from ..errors import GearbxError, about
from ..files.reading import json_lines, parse_json, read_text, typed
from .state import NAMES, THERMAL, MachineState

TIMES = ("seconds", "tokens")
GIVE = 'give lines such as {"seconds": 30, "thermal": "serious"}'

if TYPE_CHECKING:  # where type checkers see str, msgspec sees the values that are allowed
    Thermal = str
else:
    Thermal = Literal[THERMAL]
Moment = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a script: a time since generation began, and what changes then."""

    seconds: Moment | None = None
    tokens: Moment | None = None
    thermal: Thermal | None = None
    battery: Fraction | None = None
    charging: bool | None = None
    memory: Fraction | None = None


@dataclass(frozen=True)
class Point:
    """The state from a moment on: seconds or tokens since generation began."""

    at: float
    state: MachineState


class Scripted:
    """A reader that takes the state of each moment from a script.

    Args:
        points: in the order of their times; a value that a point leaves out stays as it was.
        unit: of the times, "seconds" or "tokens".
    """

    name = "script"

    def __init__(self, points: Sequence[Point], unit: str = "seconds"):
        self.points = tuple(points)
        self.unit = unit
        self.moment = 0.0

    @classmethod
    def from_file(cls, path: str | Path) -> "Scripted":
        """Read a script: JSON Lines, or a JSON array, of objects such as {"seconds": 30, "thermal": "serious"}.

        Each has `seconds` or `tokens` since generation began, and any of `thermal`, `battery`, `charging`, `memory`.

        Raises:
            GearbxError: naming file and line (of an array, entry).
        """
        points: list[Point] = []
        unit = None
        for place, entry in read_entries(Path(path)):
            with about(f"{path}, {place}"):
                unit, point = point_of(entry, unit, points)
            points.append(point)
        if unit is None:
            raise GearbxError(f"{path}: no states in it; {GIVE}")
        return cls(points, unit)

    def read(self) -> MachineState:
        """The state at `moment`; empty before the first point."""
        known: dict[str, Any] = {}
        for point in self.points:
            if point.at <= self.moment:
                known |= point.state.known
        return MachineState(**known)


def read_entries(path: Path) -> Iterator[tuple[str, Entry]]:
    """Each entry of a script, and where it is: "line 3", or of an array "entry 3". Raises GearbxError for a bad one."""
    text = read_text(path, "a script of machine states", GIVE)
    if not text.lstrip().startswith("["):
        for number, entry in json_lines(path, text, Entry, GIVE):
            yield f"line {number}", entry
        return
    with about(path):
        entries = typed(parse_json(text), list[Any])
    for number, entry in enumerate(entries, 1):
        with about(f"{path}, entry {number}"):
            yield f"entry {number}", typed(entry, Entry)


def point_of(entry: Entry, unit: str | None, before: Sequence[Point]) -> tuple[str, Point]:
    """The unit of an entry's time, and its point.

    Raises:
        GearbxError: no time or two, another unit than the points before it, or a time before theirs.
    """
    times = [name for name in TIMES if getattr(entry, name) is not None]
    if len(times) != 1:
        raise GearbxError("give either seconds or tokens")
    if unit not in (None, times[0]):
        raise GearbxError(f"{times[0]}, where the lines before have {unit}; use one of them")
    at = getattr(entry, times[0])
    if before and at < before[-1].at:
        raise GearbxError(f"{times[0]} is {at:g}, before the line above; put them in order")
    return times[0], Point(at, MachineState(**{name: getattr(entry, name) for name in NAMES}))
