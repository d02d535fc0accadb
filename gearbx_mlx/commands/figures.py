"""The body of `figures`: measures, draws and tabulates each picture, and writes its files."""

import csv
import io
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..cli.loaded import load_original
from ..cli.model import ModelSettings
from ..cli.output import output_path
from ..cli.parsers.figures import FiguresSettings
from ..cli.terminal import progress_bar
from ..errors import GearbxError
from ..evaluation.figures import Picture, chosen
from ..evaluation.figures.style import as_json, save
from ..evaluation.figures.subject import Subject
from ..files.model_directory import context_length
from ..files.reading import read_json
from ..files.writing import make_directory, write_text
from ..loading import DEMO_MODEL, find, model_name
from ..telemetry.report import get_pyplot

KINDS = ("json", "csv", "svg", "png")
AGAIN = "make it again without --redraw"


class Measured(Struct, frozen=True):
    """The file of a picture's data: the picture's number, the model's name, and what the picture's module measured."""

    picture: int
    model: str
    data: dict[str, Any]


def run(settings: FiguresSettings) -> int:
    wanted = settings.pictures
    pictures, out = chosen(wanted.only), Path(wanted.out)
    get_pyplot()
    make_directory(out)
    for picture in pictures:
        for kind in KINDS:
            output_path(out / f"{picture.name}.{kind}")
    subject = None if wanted.redraw else subject_of(settings.model, wanted.max_tokens)
    paths: list[Path] = []
    with progress_bar() as progress:
        for picture in progress.track(pictures, description="figures"):
            paths += make(picture, subject, out)
    for path in paths:
        print(path)
    return 0


def subject_of(settings: ModelSettings, max_tokens: int) -> Subject:
    """Raises GearbxError for a model that cannot be loaded, or is quantized."""
    _, tokenizer, config = load_original(settings)
    longest = min(max_tokens, context_length(config) or max_tokens)
    directory = find(settings.model or DEMO_MODEL)
    return Subject(model_name(settings.model), lambda: load_original(settings)[0], directory, tokenizer, longest)


def make(picture: Picture, subject: Subject | None, out: Path) -> list[Path]:
    """Write the files of one picture: from its data in the directory if there is no subject. Returns their paths.

    Raises:
        GearbxError: a file cannot be written, or there is no data of the picture in the directory.
    """
    file = out / f"{picture.name}.json"
    if subject is not None:
        data = picture.module.measure(subject)
        write_text(file, as_json({"picture": picture.number, "model": subject.name, "data": data}))
    found = read_json(file, Measured, "the data of a picture", AGAIN)
    if found.picture != picture.number:
        raise GearbxError(f"{file}: is of picture {found.picture}, not {picture.number}; {AGAIN}")
    table = file.with_suffix(".csv")
    try:
        write_text(table, as_csv(*picture.module.table(found.data)))
        return [file, table, *save(picture, found.data, out)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GearbxError(f"{file}: picture {picture.number} cannot be drawn from it ({error}); {AGAIN}") from error


def as_csv(head: list[str], rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
