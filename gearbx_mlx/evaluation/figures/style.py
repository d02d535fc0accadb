"""The style of the pictures of the paper: fit for print, and readable in grey."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files.writing import replacing
from ...telemetry.report import get_pyplot
from . import Picture

LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "\\\\", "xx")
GUIDE: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 0.8}
SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gearbx-mlx",  # the same data make the same file
}


def save(picture: Picture, data: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw a picture as SVG and PNG.

    Args:
        data: of the picture's `measure`.
        directory: exists; files of the picture's name in it are replaced, each as a whole.

    Returns:
        the paths of both.
    """
    pyplot = get_pyplot()
    paths = [directory / f"{picture.name}.{kind}" for kind in ("svg", "png")]
    with pyplot.rc_context(SETTINGS):
        figure = pyplot.figure(figsize=picture.size, layout="constrained")
        try:
            picture.module.draw(data, figure)
            for path in paths:
                dated = {"Date": None} if path.suffix == ".svg" else None
                with replacing(path) as place:
                    figure.savefig(place, dpi=150, format=path.suffix[1:], metadata=dated)
        finally:
            pyplot.close(figure)
    return paths


def as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"
