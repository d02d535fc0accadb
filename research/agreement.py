"""Agreement of quantized gears with 16 bits, by entropy: the estimates of `analyze` without an original."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gearbx_mlx import Gearbox, load
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.sampling import reader_of
from gearbx_mlx.evaluation.predictions import check_windows, choices_along, context_for, read_documents, windows_of
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.loading import model_name
from gearbx_mlx.telemetry.agreement import CURVES, Curves, TokenAgreement, agreement_of, draw_agreement

from .evaluation.report import Columns, markdown_table
from .studies import Found, named, study

ORIGINAL = 16  # bits
COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "bits": lambda row: str(row["bits"][0]),
    "differ from 16 bits": lambda row: share(*row["all"]),
    "above 2 bits": lambda row: share(*row["above"]),
}


def share(different: int, tokens: int) -> str:
    return f"{different} of {tokens}"


@study("docs/routing.md", writes="images/agreement.png and gearbx_mlx/telemetry/agreement.json", minutes=15)
def agreement(
    models: list[str] = ["demo", "smollm2"],  # noqa: B006
    bits: list[int] = [4, 5, 6, 8],  # noqa: B006
    data: Path | None = None,
    tokens: int = 2000,
    out: Path = CURVES,
) -> Found:
    """Measure how often RTN gears choose the token of the 16-bit gear, by entropy, margin and probability.

    Args:
        models: Directories or names; demo: the bundled model.
        bits: Bits of the gears.
        data: Text file; the bundled text if omitted.
        tokens: Predictions of each model.
        out: File with the curves, for `analyze`.
    """
    text = data or CURVES.parents[1] / "demo_model" / "calibration" / "text.jsonl"
    curves = [each for model in models for each in agreements(model, bits, text, tokens)]
    content = Curves("gearbx-mlx agreement", 1, curves)
    write_text(out, msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n")
    rows = [
        {"model": each.model, "bits": each.bits} | {"all": each.different_above(0), "above": each.different_above(2)}
        for each in curves
    ]
    pictures: dict[str, Any] = {"agreement.png": partial(draw_agreement, curves[-len(bits)])}
    return Found({"agreement": markdown_table(COLUMNS, rows)}, rows, pictures)


def agreements(name: str, bits: list[int], text: Path, tokens: int) -> list[TokenAgreement]:
    """Return the agreement of each gear of a model with its 16 bits, on one text."""
    model, tokenizer, config = load(None if name == "demo" else name, return_config=True)
    windows = windows_of(tokenizer, read_documents(text), context_for(None, config), tokens, str(text))
    check_windows(windows, model, str(text))
    gearbox = Gearbox(model, ",".join(map(str, [*bits, ORIGINAL])), format="affine")
    found = {}
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        with progress_bar() as progress:
            tracked = progress.track(windows, description=f"{named(name)}, {gear.bits} bits")
            found[gear.bits] = choices_along(gearbox.model, tracked, reader_of(gearbox))
    targets = np.array([token for window in windows for token in window[1:]])
    about = {"model": model_name(named(name)), "reference": named(name), "data": text.name}
    top = found.pop(ORIGINAL).token
    return [agreement_of(each, top, targets, bits=(width, ORIGINAL), **about) for width, each in found.items()]
