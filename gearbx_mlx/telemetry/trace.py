"""Trace with one JSON object per token, its pictures, and the colors of gears and sources.

Colors: blue for the low gear, over mauve, to orange for the high one, and green for prompt lookup. They ascend in
lightness, so they differ in gray and for every color blindness. Their contrast is at least 3 against white, black and
the gray of dark terminals.

Pictures of a trace need matplotlib, the extra `plots`. If a record has bounds, as with a server that lists a few
log-probabilities, it has `entropy_low` and `entropy_high` instead of `entropy`.
"""

import contextlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..errors import GearbxError, OutputLost
from ..files.writing import replacing

ANCHORS = ((90, 100, 211), (168, 105, 164), (229, 118, 3))
MARKERS = "o^sDvPX"

# Okabe and Ito's colors for anything but gears. https://jfly.uni-koeln.de/color
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

LOOKUP = "lookup"  # source of an accepted token of prompt lookup
LOOKUP_COLOR = GREEN


def gear_color(index: int, gears: int) -> str:
    """Return the color #rrggbb of gear `index` (0: lowest) in a ladder of `gears`; a single gear is a top gear."""
    place = (index / (gears - 1) if gears > 1 else 1.0) * (len(ANCHORS) - 1)
    left = min(int(place), len(ANCHORS) - 2)
    mix = place - left
    channels = (round(a + (b - a) * mix) for a, b in zip(ANCHORS[left], ANCHORS[left + 1]))
    return "#" + "".join(f"{c:02x}" for c in channels)


def gear_marker(index: int) -> str:
    """Return matplotlib's marker of gear `index`, so that pictures do not depend on color only."""
    return MARKERS[index % len(MARKERS)]


FIELDS = ("token", "text", "entropy", "mean_entropy", "gear", "shifted")


class Token(Protocol):
    """A token with the fields that a trace uses, as in GearResponse."""

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
    lookup_drafted: int
    source: str
    near_tie: bool
    caught_up: int
    kv_bytes: dict[int, int]
    kv_caches: dict[int, int]
    decision: Any


def writer_of(token: Token) -> str:
    """Return the source of a token: LOOKUP for an accepted token of prompt lookup, else the name of its gear."""
    return LOOKUP if token.source == LOOKUP else token.gear


def record(
    index: int, response: Token, extra: Mapping[str, Any] | None = None, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the trace's object for one token.

    The controller's decision after the token, if any, is its `decision`.

    Args:
        index: counts from 0.
        extra: first fields, such as the prompt's number.
        fields: additional fields of the response, set by the mode.
    """
    entry = {**(extra or {}), "index": index, **{name: getattr(response, name) for name in (*FIELDS, *fields)}}
    return entry if response.decision is None else entry | {"decision": asdict(response.decision)}


class TraceWriter:
    """A context that writes records as they come.

    The file gets its name at the end of the context. After an interrupt, or if standard output is lost, it contains the
    trace up to there. Any other exception leaves no file.
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
            self._stack.close()  # completes the file, as without an exception
        else:
            self._stack.__exit__(kind, error, trace)


UNDECIDED = "undecided"  # gear of tokens whose bounds of the entropy allow several gears
BOUNDS = ("low", "high")


def interval(record: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return the bounds of a field; if its value is known, it is both bounds."""
    if name in record:
        return record[name], record[name]
    low, high = (record[f"{name}_{bound}"] for bound in BOUNDS)
    return low, high


def middle(record: Mapping[str, Any], name: str) -> float:
    """Return the middle between the bounds of a field, or its value."""
    return sum(interval(record, name)) / 2


@dataclass
class IntervalTally:
    """Sums over the tokens of a run with bounds; `gear_tokens` has every gear and UNDECIDED, also with 0."""

    gear_tokens: dict[str, int]
    tokens: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    shifts: list[int] = field(default_factory=lambda: [0, 0])

    @classmethod
    def of(cls, gears: Sequence[str]) -> "IntervalTally":
        return cls(dict.fromkeys([*gears, UNDECIDED], 0))

    def add(self, record: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        """Take a record, and the same prompt's previous record; None for the first."""
        self.tokens += 1
        self.gear_tokens[record["gear"]] += 1
        for i, value in enumerate(interval(record, "entropy")):
            self.sums[i] += value
        for i, bound in enumerate(BOUNDS):
            self.shifts[i] += before is not None and record[f"gear_{bound}"] != before[f"gear_{bound}"]

    def summary(self) -> dict[str, Any]:
        """Return the fields of a summary."""
        tokens = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "gear_tokens": self.gear_tokens,
            "undecided_share": self.gear_tokens[UNDECIDED] / tokens,
            **{f"shifts_{bound}": self.shifts[i] for i, bound in enumerate(BOUNDS)},
            **{f"mean_entropy_{bound}_bits": self.sums[i] / tokens for i, bound in enumerate(BOUNDS)},
        }


LONGEST_TRACE = 400  # tokens: single tokens of longer traces are not visible
MAX_BARS = 40
NARROWEST = 0.05  # bits: 50 bins need a wider range than rounding errors
GREY = "0.6"  # color of tokens without a gear
PICTURES = ("entropy_trace.png", "entropy_histogram.png", "gear_shares.png")
LEGEND_OUTSIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}


def get_pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw to files. Raises GearbxError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise GearbxError("matplotlib: is not installed; use pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a figure as png or svg, by the path's suffix, and close it. Equal figures yield equal bytes.

    Raises:
        GearbxError: the file cannot be written.
    """
    pyplot, kind = get_pyplot(), path.suffix[1:]
    with replacing(path) as file, pyplot.rc_context({"svg.hashsalt": "gearbx-mlx"}):
        figure.savefig(file, dpi=dpi, format=kind, metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(figure)


def draw_report(
    records: Sequence[dict[str, Any]],
    gears: Sequence[str],
    thresholds: Sequence[float],
    directory: Path,
) -> list[Path]:
    """Draw the entropy trace, the histogram and the shares per prompt.

    Args:
        records: trace records, each with the number of its `prompt`; entropies may be intervals, drawn as bands.
        gears: names, lowest first.
        thresholds: bits, between the gears.
        directory: exists; PICTURES are the names of the files in it.
    """
    pyplot = get_pyplot()
    colors = {name: gear_color(i, len(gears)) for i, name in enumerate(gears)}
    if any(entry["gear"] == UNDECIDED for entry in records):
        colors[UNDECIDED] = GREY
    paths = []
    for name, draw, height in zip(PICTURES, (draw_trace, draw_histogram, draw_shares), (4.0, 4.5, 4.5)):
        figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
        draw(axes, records, colors, thresholds)
        axes.spines[["top", "right"]].set_visible(False)
        paths.append(directory / name)
        save(figure, paths[-1], dpi=120)
    return paths


def draw_trace(axes: Any, records: Sequence[dict], colors: dict[str, str], thresholds: Sequence[float]) -> None:
    """Draw a marker per token in its gear's color and shape, and the rolling mean; lines separate prompts."""
    shown = records[:LONGEST_TRACE]
    axes.plot(*zip(*mean_line(shown)), color="0.35", linewidth=1, label="rolling mean", zorder=1)
    if not all("entropy" in entry for entry in shown):
        draw_bounds(axes, shown, colors)
    for place, (entry, before) in enumerate(zip(shown[1:], shown), 1):
        if entry["prompt"] != before["prompt"]:
            axes.axvline(place - 0.5, color="0.85", linewidth=0.8, zorder=0)
    for i, (name, color) in enumerate(colors.items()):
        places = [place for place, entry in enumerate(shown) if entry["gear"] == name]
        heights = [middle(shown[place], "entropy") for place in places]
        # A white edge separates markers that overlap.
        axes.scatter(
            places, heights, s=30, marker=gear_marker(i), color=color, label=name, edgecolors="white", linewidths=0.5
        )
    mark_thresholds(axes.axhline, thresholds)
    more = f" (first {len(shown)} of {len(records)} tokens)" if len(records) > len(shown) else ""
    axes.set(xlabel="token; gray lines separate prompts", ylabel="entropy, bits", title=f"Entropy and gear{more}")
    axes.legend(**LEGEND_OUTSIDE)


def draw_bounds(axes: Any, records: Sequence[dict], colors: dict[str, str]) -> None:
    """Draw the bounds of each entropy as a line through its marker, and the rolling mean's bounds as a band."""
    sides = [mean_line(records, side) for side in (min, max)]
    places, lows = zip(*sides[0])
    axes.fill_between(places, lows, [high for _, high in sides[1]], color="0.88", linewidth=0, zorder=0)
    lows, highs = zip(*(interval(entry, "entropy") for entry in records))
    axes.vlines(range(len(records)), lows, highs, colors=[colors[entry["gear"]] for entry in records], linewidth=1)


def mean_line(
    records: Sequence[dict], side: Callable[[tuple[float, float]], float] = statistics.mean
) -> list[tuple[float, float]]:
    """Return the rolling mean over the tokens, with gaps between prompts; side: which of its bounds, or their
    mean."""
    line: list[tuple[float, float]] = []
    for place, entry in enumerate(records):
        if place and entry["prompt"] != records[place - 1]["prompt"]:
            line.append((place - 0.5, float("nan")))
        line.append((place, side(interval(entry, "mean_entropy"))))
    return line


def draw_histogram(axes: Any, records: Sequence[dict], colors: dict[str, str], thresholds: Sequence[float]) -> None:
    """Draw a histogram of the rolling means that the gate compares with its thresholds, stacked by gear."""
    values = [[middle(entry, "mean_entropy") for entry in records if entry["gear"] == name] for name in colors]
    least, most = min(map(min, filter(None, values))), max(map(max, filter(None, values)))
    axes.hist(
        values,
        bins=50,
        range=(least, max(most, least + NARROWEST)),
        stacked=True,
        color=list(colors.values()),
        label=list(colors),
        edgecolor="white",
        linewidth=0.5,
    )
    mark_thresholds(axes.axvline, thresholds)
    exact = all("mean_entropy" in entry for entry in records)
    axes.set(
        xlabel="rolling mean of the entropy, bits" if exact else "rolling mean, middle between its bounds, bits",
        ylabel="tokens",
        title="Rolling means and thresholds (shifts follow two tokens later)",
    )
    axes.legend(**LEGEND_OUTSIDE)


def draw_shares(axes: Any, records: Sequence[dict], colors: dict[str, str], thresholds: Sequence[float]) -> None:
    """Draw a bar per prompt, divided by gear."""
    prompts = sorted({entry["prompt"] for entry in records})[:MAX_BARS]
    gears = {prompt: [entry["gear"] for entry in records if entry["prompt"] == prompt] for prompt in prompts}
    bottom = [0.0] * len(prompts)
    for name, color in colors.items():
        shares = [100 * found.count(name) / len(found) for found in gears.values()]
        axes.bar(
            [str(p + 1) for p in prompts],
            shares,
            bottom=bottom,
            color=color,
            label=name,
            edgecolor="white",
            linewidth=1,
        )
        bottom = [b + s for b, s in zip(bottom, shares)]
    axes.set(xlabel="prompt", ylabel="share of tokens, %", title="Gears by prompt", ylim=(0, 100))
    axes.legend(**LEGEND_OUTSIDE)


def mark_thresholds(line: Any, thresholds: Sequence[float]) -> None:
    for threshold in thresholds:
        line(threshold, color="0.2", linestyle="--", linewidth=1)
