"""Servers: the table of `benchmark server`."""

from pathlib import Path
from typing import Any

from pages import table

from .studies import Found, read_report, study

SERVER_HEAD = ["part", "kernels", "measure", "value", "spread", "aim", "count"]


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def aim(row: dict[str, Any]) -> str:
    """At least, at most, or nothing; and whether it was missed."""
    bounds = [f"{sign} {row[name]:g}" for sign, name in (("≥", "least"), ("≤", "most")) if row[name] is not None]
    return " ".join(bounds) + ("" if row["reached"] else ", missed")


def lines(row: dict[str, Any]) -> list[str]:
    spread = "-".join(figure(value) for value in row["spread"] or [])
    value = f"{row['value']:.0f}" if row["value"] >= 1000 else figure(row["value"])
    return [row["part"], row["kernels"], row["measure"], value, spread, aim(row), str(row["count"])]


@study("docs/performance.md")
def server_figures(files: list[Path]) -> Found:
    """The figures of `gearbx_mlx benchmark server --json`, as a table.

    Args:
        files: Of --json.
    """
    rows = [row for file in files for row in read_report(file)["rows"]]
    places = sorted({f"{row['machine']}, {row['date']}" for row in rows})
    return Found({"server": table(SERVER_HEAD, map(lines, rows)) + f"\n{'; '.join(places)}\n"})
