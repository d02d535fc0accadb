"""The trace: one JSON object per token, and the colours of who wrote it: blue for the low gear, over mauve, to orange
for the high one, and green for what was looked up in the text itself.

The colours ascend in lightness, so that they differ in grey and for every colour blindness, and have a contrast of at
least 3 against white, black and the grey of dark terminals.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..errors import OutputLost
from ..files.writing import replacing

ANCHORS = ((90, 100, 211), (168, 105, 164), (229, 118, 3))
MARKERS = "o^sDvPX"

# Okabe and Ito's colours for what is not a gear. https://jfly.uni-koeln.de/color
BLACK, ORANGE, SKY_BLUE, GREEN, YELLOW, BLUE, VERMILION, PURPLE = SERIES = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)

LOOKUP = "lookup"  # wrote a token that the text itself proposed (prompt lookup)
LOOKUP_COLOR = GREEN


def gear_color(index: int, gears: int) -> str:
    """#rrggbb of gear `index` (0 is the lowest) in a ladder of `gears`; a single gear has the top gear's colour."""
    place = (index / (gears - 1) if gears > 1 else 1.0) * (len(ANCHORS) - 1)
    left = min(int(place), len(ANCHORS) - 2)
    mix = place - left
    channels = (round(a + (b - a) * mix) for a, b in zip(ANCHORS[left], ANCHORS[left + 1]))
    return "#" + "".join(f"{c:02x}" for c in channels)


def gear_marker(index: int) -> str:
    """matplotlib's marker of gear `index`, so that a picture does not depend on colour alone."""
    return MARKERS[index % len(MARKERS)]


FIELDS = ("token", "text", "entropy", "mean_entropy", "gear", "shifted")


class Token(Protocol):
    """What a trace needs to know of a token; mlx-lm's response with the gearbox's fields has it."""

    token: int
    text: str
    entropy: float
    mean_entropy: float
    gear: str
    shifted: bool
    passes: tuple[int, ...]
    weight_bytes: int
    drafted: int
    from_draft: bool
    looked_up: int
    source: str
    near_tie: bool
    caught_up: int
    kv_bytes: dict[int, int]
    kv_caches: dict[int, int]
    decision: Any


def writer_of(token: Token) -> str:
    """Return who wrote a token: the name of a gear; LOOKUP, where it was looked up and not computed by a draft."""
    return LOOKUP if token.source == LOOKUP else token.gear


def record(
    index: int, response: Token, extra: Mapping[str, Any] | None = None, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """The trace's object for one token.

    A token after which a controller decided something has that as `decision`.

    Args:
        index: counts from 0.
        extra: comes first (the prompt's number, say).
        fields: further fields of the response, which the mode adds.
    """
    entry = {**(extra or {}), "index": index, **{name: getattr(response, name) for name in (*FIELDS, *fields)}}
    return entry if response.decision is None else entry | {"decision": response.decision.record()}


class TraceWriter:
    """A context that writes records as they come.

    The file takes its name when the context ends, also by an interrupt or where standard output is lost: the trace is
    then complete up to there. Any other exception leaves no file.
    """

    def __init__(self, path: Path | None):
        self.path = path

    def __enter__(self) -> "TraceWriter":
        self._stack = contextlib.ExitStack()
        self._file = None
        if self.path:
            place = self._stack.enter_context(replacing(self.path))
            self._file = self._stack.enter_context(place.open("w", encoding="utf-8"))
        return self

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt | OutputLost):
            self._stack.close()  # as if all had ended well
        else:
            self._stack.__exit__(kind, error, trace)
