"""Pictures of benchmarks. matplotlib is the extra `plots`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...cli.output import check_distinct, output_path
from ...telemetry.report import OUTSIDE, get_pyplot, save
from ...telemetry.trace import BLACK, SERIES, gear_color, gear_marker

W4A8_LINES = {"float32": "o", "4 bits, weight-only": "s", "W4A16": "^", "W4A8": "D"}
AS_BLOCKS, GRAPH_AS_BLOCKS = WITH_BLOCKS = "as blocks", "graph as blocks"  # rows of `benchmark token`
Rows = Sequence[Mapping[str, Any]]


def picture_path(json: str | None, picture: str | None) -> Path | None:
    """Where to draw. Raises GearbxError for a place that cannot be written to, and where there is no matplotlib."""
    if picture is None:
        return None
    check_distinct({"--json": json, "--picture": picture})
    get_pyplot()
    return output_path(picture)


def draw_threads(rows: Rows, path: Path) -> None:
    """Products per second, relative to one thread, and the share of the read bandwidth, both over threads.

    Args:
        rows: of `benchmark threads`.
        path: a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    widths = list(dict.fromkeys(row["bits"] for row in rows))
    for index, bits in enumerate(widths):
        some = [row for row in rows if row["bits"] == bits]
        style = {"color": gear_color(index, len(widths)), "marker": gear_marker(index), "label": f"{bits} bits"}
        threads, speedups = [row["threads"] for row in some], [row["speedup"] for row in some]
        spread = [[abs(row["spread"][end] - speedup) for row, speedup in zip(some, speedups)] for end in (0, 1)]
        left.errorbar(threads, speedups, spread, capsize=3, **style)
        right.plot(threads, [row["bandwidth_ratio"] for row in some], **style)
    most = max(row["threads"] for row in rows)
    left.plot([1, most], [1, most], color="0.6", linestyle="--", linewidth=1, label="ideal")
    left.set(xlabel="threads", ylabel="products per second, one thread = 1")
    right.set(xlabel="threads", ylabel="share of the read bandwidth of as many threads")
    for axes in (left, right):
        axes.set_xticks(sorted({row["threads"] for row in rows}))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    save(figure, path)


def draw_w4a8(rows: Rows, path: Path) -> None:
    """AION's Figure 2: products per second over threads, and how many the read bandwidth allows, dashed.

    Args:
        rows: of `benchmark w4a8`, each with the `bytes` of its matrix.
        path: a png or svg file, which is replaced.
    """
    figure, axes = get_pyplot().subplots(figsize=(6.5, 4.4), layout="constrained")
    for index, (name, marker) in enumerate(W4A8_LINES.items()):
        some = [row for row in rows if row["implementation"] == name]
        threads, color = [row["threads"] for row in some], gear_color(index, len(W4A8_LINES))
        axes.plot(threads, [row["products_per_second"] for row in some], color=color, marker=marker, label=name)
        if name in ("float32", "W4A8"):
            most = [1e9 * row["read_bandwidth_gigabytes_per_second"] / row["bytes"] for row in some]
            axes.plot(threads, most, color=color, linestyle="--", linewidth=1, label=f"{name} at the read bandwidth")
    axes.set(xlabel="threads", ylabel="products per second")
    axes.set_xticks(sorted({row["threads"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(**OUTSIDE)
    save(figure, path)


def draw_token(rows: Rows, path: Path) -> None:
    """A bar for each gear, of the milliseconds of each part of a token, with a line where it ends with blocks.

    A part that is negative is shown as 0.

    Args:
        rows: of `benchmark token`.
        path: a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    gears = list(dict.fromkeys(row["gear"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.7 * len(gears)), layout="constrained")
    ends = dict.fromkeys(gears, 0.0)
    parts = list(dict.fromkeys(row["part"] for row in rows if row["part"] not in WITH_BLOCKS))
    for part, color in zip(parts, SERIES[1:]):
        some = [row for row in rows if row["part"] == part]
        sizes = [max(0.0, 1e3 * row["seconds"]) for row in some]
        starts = [ends[row["gear"]] for row in some]
        axes.barh([bar_of(row) for row in some], sizes, left=starts, color=color, label=part)
        ends = {gear: start + size for gear, start, size in zip(gears, starts, sizes)}
    some = [row for row in rows if row["part"] == AS_BLOCKS]
    line = {"linestyle": "", "marker": "|", "markersize": 30, "markeredgewidth": 2, "color": BLACK}
    axes.plot([1e3 * row["seconds"] for row in some], [bar_of(row) for row in some], label=AS_BLOCKS, **line)
    axes.invert_yaxis()  # the first gear on top
    axes.set(xlabel="milliseconds of a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=0.4, frameon=False)
    save(figure, path)


def bar_of(row: Mapping[str, Any]) -> str:
    """The name of a gear's bar."""
    return f"{row['gear']}, {row['bits']} bits"
