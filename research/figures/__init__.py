"""The pictures of GEARBX section 17, each measured, drawn and tabulated.

The module of a picture has three functions for it: `measure_NAME(subject)`, which returns JSON-able data,
`draw_NAME(data, figure)`, and `table_NAME(data)`, which returns the head and the rows of a table.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct
from pages import table

from gearbx_mlx import load
from gearbx_mlx.cli.flags import output_path
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files.model_directory import context_length
from gearbx_mlx.files.reading import read_json
from gearbx_mlx.files.writing import make_directory, replacing, write_text
from gearbx_mlx.gears.discovery import is_quantized
from gearbx_mlx.gears.saved import saved_gears
from gearbx_mlx.loading import DEMO_MODEL, find, model_name
from gearbx_mlx.telemetry.report import get_pyplot

from ..studies import Found, study
from .subject import Subject

KINDS = ("json", "csv", "svg", "png")
AGAIN = "make it again without --redraw"
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


@dataclass(frozen=True)
class PaperPicture:
    """A picture: its number in the paper, the name of its files, its title, its module and its size in inches."""

    number: int
    name: str
    title: str
    module: str
    size: tuple[float, float] = (7.2, 3.2)

    def function(self, verb: str) -> Any:
        """`measure`, `draw` or `table` of this picture."""
        return getattr(import_module(f".{self.module}", __name__), f"{verb}_{self.name}")


PICTURES = (
    PaperPicture(1, "entropy_signal", "Entropy signal", "routing"),
    PaperPicture(2, "memory_by_format", "Memory by format", "memory"),
    PaperPicture(3, "forward_latency", "Forward latency", "times"),
    PaperPicture(4, "reconstruction_error", "Reconstruction error", "memory"),
    PaperPicture(5, "routing_trace", "Routing trace", "routing"),
    PaperPicture(6, "token_time", "Time of a token", "times"),
    PaperPicture(7, "residency", "Residency", "memory"),
    PaperPicture(8, "gear_shares", "Gear shares by workload", "routing"),
    PaperPicture(9, "bandwidth_model", "Bandwidth model", "times"),
)


class Measured(Struct, frozen=True):
    """The file of a picture's data: the picture's number, the model's name, and what was measured."""

    picture: int
    model: str
    data: dict[str, Any]


@study("docs/figures.md", writes="images/figures/*.svg")
def figures(
    out: Path = Path("figures"),
    only: str | None = None,
    model: str | None = None,
    max_tokens: int = 160,
    redraw: bool = False,
) -> Found:
    """The pictures of the paper from runs of a model: SVG and PNG, the table as CSV, and what was measured as JSON.

    Args:
        out: Directory for pictures, tables and data.
        only: Numbers of pictures, such as 1,5; all of them if not given.
        model: A directory or a Hub repository; the model that ships if not given.
        max_tokens: Of each text, how many are read; from 6 on.
        redraw: Measure nothing; draw from the data in the directory.
    """
    pictures = chosen(only)
    if max_tokens < 6:
        raise GearbxError(f"--max-tokens {max_tokens}: is too few; give 6 or more")
    get_pyplot()
    make_directory(out)
    for picture in pictures:
        for kind in KINDS:
            output_path(out / f"{picture.name}.{kind}")
    subject = None if redraw else subject_of(model, max_tokens)
    with progress_bar() as progress:
        for picture in progress.track(pictures, description="figures"):
            print(*make(picture, subject, out), sep="\n")
    drawn = {f"figures/{each.name}.svg": partial(copy, out / f"{each.name}.svg") for each in pictures}
    return Found({"figure": partial(tabulated, out)}, pictures=drawn)


def chosen(only: str | None) -> Sequence[PaperPicture]:
    """The pictures with these numbers, commas between; None: all. Raises GearbxError for another number."""
    if only is None:
        return PICTURES
    known = {str(picture.number): picture for picture in PICTURES}
    numbers = [number.strip() for number in only.split(",")]
    for number in numbers:
        if number not in known:
            raise GearbxError(f"--only {only}: there is no picture {number!r}; choose from {','.join(known)}")
    return [picture for number, picture in known.items() if number in numbers]


def subject_of(name: str | None, max_tokens: int) -> Subject:
    """Raises GearbxError for a model that cannot be loaded, or is quantized."""
    model, tokenizer, config = load(name, return_config=True)
    if is_quantized(model) or saved_gears(model) is not None:
        raise GearbxError(f"{model_name(name)}: is no original model; give the one that it was made from")
    longest = min(max_tokens, context_length(config) or max_tokens)
    return Subject(model_name(name), lambda: load(name)[0], find(name or DEMO_MODEL), tokenizer, longest)


def make(picture: PaperPicture, subject: Subject | None, out: Path) -> list[Path]:
    """Write the files of one picture: from its data in the directory if there is no subject. Returns their paths.

    Raises:
        GearbxError: a file cannot be written, or there is no data of the picture in the directory.
    """
    file = out / f"{picture.name}.json"
    if subject is not None:
        data = picture.function("measure")(subject)
        content = {"picture": picture.number, "model": subject.name, "data": data}
        write_text(file, json.dumps(content, indent=1) + "\n")
    found = read_json(file, Measured, "the data of a picture", AGAIN)
    if found.picture != picture.number:
        raise GearbxError(f"{file}: is of picture {found.picture}, not {picture.number}; {AGAIN}")
    try:
        head, rows = picture.function("table")(found.data)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *rows])
        write_text(file.with_suffix(".csv"), text.getvalue())
        return [file, file.with_suffix(".csv"), *save(picture, found.data, out)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GearbxError(f"{file}: picture {picture.number} cannot be drawn from it ({error}); {AGAIN}") from error


def save(picture: PaperPicture, data: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw a picture as SVG and PNG into a directory. Returns their paths."""
    pyplot = get_pyplot()
    paths = [directory / f"{picture.name}.{kind}" for kind in ("svg", "png")]
    with pyplot.rc_context(SETTINGS):
        figure = pyplot.figure(figsize=picture.size, layout="constrained")
        try:
            picture.function("draw")(data, figure)
            for path in paths:
                dated = {"Date": None} if path.suffix == ".svg" else None
                with replacing(path) as place:
                    figure.savefig(place, dpi=150, format=path.suffix[1:], metadata=dated)
        finally:
            pyplot.close(figure)
    return paths


def tabulated(out: Path, name: str) -> str:
    """The table of a picture, from its data. Raises FileNotFoundError if there are none."""
    content = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    picture = next(each for each in PICTURES if each.name == name)
    return table(*picture.function("table")(content["data"]))


def copy(source: Path, place: Path) -> None:
    place.write_bytes(source.read_bytes())
