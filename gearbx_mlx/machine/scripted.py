"""A machine that is played from a file, for tests and for trying a controller out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import GearbxError, about
from .state import NAMES, MachineState

TIMES = ("seconds", "tokens")


@dataclass(frozen=True)
class Point:
    """From this moment on (seconds or tokens since generation began) the state is this."""

    at: float
    state: MachineState


class Scripted:
    """Tells what a script says for the moment.

    Args:
        points: in order; what one does not name stays as it was.
        unit: of their times: "seconds" or "tokens".
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
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise GearbxError(f"{path}: cannot be read ({reason}); give a file of machine states") from error
        points: list[Point] = []
        unit = None
        for place, entry in entries(path, text):
            with about(f"{path}, {place}"):
                unit, point = parsed(entry, unit, points)
            points.append(point)
        if unit is None:
            raise GearbxError(f'{path}: no states in it; give lines such as {{"seconds": 30, "thermal": "serious"}}')
        return cls(points, unit)

    def read(self) -> MachineState:
        """The state at `moment`; nothing is known before the first point."""
        known: dict[str, Any] = {}
        for point in self.points:
            if point.at <= self.moment:
                known |= point.state.known
        return MachineState(**known)


def entries(path: str | Path, text: str) -> list[tuple[str, Any]]:
    """Every entry, and where it stands. Raises GearbxError for what is not JSON."""
    if text.lstrip().startswith("["):
        try:
            return [(f"entry {number}", entry) for number, entry in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as error:
            raise GearbxError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise GearbxError(f"{path}, line {number}: not JSON ({error.msg})") from error
    return found


def parsed(entry: Any, unit: str | None, before: Sequence[Point]) -> tuple[str, Point]:
    """The unit of the time and the point. Raises GearbxError."""
    if not isinstance(entry, dict):
        raise GearbxError("not an object; give one with a time and a state")
    unknown = [name for name in entry if name not in (*TIMES, *NAMES)]
    if unknown:
        raise GearbxError(f"'{unknown[0]}' is not known; choose from {', '.join((*TIMES, *NAMES))}")
    times = [name for name in TIMES if name in entry]
    if len(times) != 1:
        raise GearbxError("give either seconds or tokens")
    if unit not in (None, times[0]):
        raise GearbxError(f"{times[0]}, where the lines before have {unit}; use one of them")
    at = entry[times[0]]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise GearbxError(f"{times[0]} is {at!r}; give a number, 0 or more")
    if before and at < before[-1].at:
        raise GearbxError(f"{times[0]} is {at}, before the line above; put them in order")
    return times[0], Point(float(at), MachineState(**{n: v for n, v in entry.items() if n in NAMES}))
