"""Evaluation of each gear and mode on text, by its distance from the top gear."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from ..bit_selection.sensitivity import CALIBRATION
from ..cli import terminal
from ..cli.build import Loaded, decided
from ..cli.decide import JustGears
from ..compat.arrays import dtype_name
from ..decoding.caches import cache_in_gears, check_heads
from ..decoding.mode import SAME, thresholds_for
from ..decoding.modes import KICKDOWN, ROUTE, make_mode
from ..errors import GearbxError
from ..evaluation.predictions import (
    Read,
    Recording,
    TextPrediction,
    check_windows,
    compared,
    context_for,
    joined_recordings,
    quality,
    read_at_once,
    read_documents,
    read_in_mode,
    read_per_token,
    three_digits,
    windows_of,
)
from ..files.writing import check_directory, make_directory, write_text
from ..gears.gearbox import Gearbox
from ..gears.ladder import KV_BITS, Gear
from ..loading import model_name
from ..telemetry.summary import as_json, finite_json
from ..telemetry.trace import GREEN, ORANGE, SKY_BLUE, get_pyplot, save
from . import NONE, EvaluateSettings

DATA, PICTURE = "evaluation.json", "evaluation.png"
GEAR, KV = "gear", "kv"  # kinds of rows, besides the modes


@dataclass(frozen=True, eq=False)
class TextReader:
    """A reader of windows of the text.

    kind: a gear, a mode, or the top gear with a gear of the KV cache. used: the gears that may compute a token.
    """

    kind: str
    name: str
    used: Sequence[Gear]
    read: Read


def run(settings: EvaluateSettings) -> int:
    out = Path(settings.evaluation.out)
    content = report_of(settings)
    terminal.messages.print(table_of(content["rows"], KLD_COLUMNS if settings.evaluation.kld else DEFAULT_COLUMNS))
    for name in (DATA, PICTURE):
        if (out / name).exists():
            print(out / name)
    gear = enough(content["rows"])
    if gear is not None:
        terminal.note(f"--gear {gear} reads least among gears with a top-1 agreement of {AGREEING:.0%} or more")
    return 0


def report_of(settings: EvaluateSettings) -> dict[str, Any]:
    """Return the content of evaluation.json, and write the files.

    Raises:
        GearbxError: a model, text or thresholds that cannot be used, or a directory that cannot be written.
    """
    out = Path(settings.evaluation.out)
    check_directory(out)
    content = measured_report(settings)
    make_directory(out)
    write_text(out / DATA, as_json(finite_json(content)))
    try:
        get_pyplot()
    except GearbxError as error:
        terminal.note(f"no picture: {error}")
    else:
        draw(content, out / PICTURE)
    return content


def measured_report(settings: EvaluateSettings) -> dict[str, Any]:
    """Compare every reader's predictions with the top gear's, window by window."""
    wanted = settings.evaluation
    text = wanted.data or str(CALIBRATION)
    documents = read_documents(Path(text))
    loaded = Loaded.of(decided(JustGears(settings.model, settings.layout, settings.gears)))
    loaded.check_gears()
    decision = loaded.decision
    if len(decision.ladder) < 2 and not wanted.kv_gears:
        raise GearbxError(f"--gears: must have two gears to compare, got {decision.ladder}; set two or more")
    gearbox = loaded.gearbox()
    readers = readers_of(settings, gearbox, loaded.tokenizer)
    context = context_for(wanted.context, loaded.config, 512 if wanted.kld else 256)
    uncounted = context // 2 if wanted.kld else 0
    windows = windows_of(loaded.tokenizer, documents, context, wanted.tokens, text, uncounted)
    check_windows(windows, loaded.model, text)
    reads = [reader.read for reader in readers]
    with terminal.progress_bar() as progress:
        tracked = progress.track(windows, description="windows")
        parts = [compared(gearbox, window, reads, uncounted) for window in tracked]
    found = {reader: joined_recordings(each) for reader, each in zip(readers, zip(*parts))}
    reference = next(each for reader, each in found.items() if reader.used == [gearbox.ladder.top])
    return {
        "schema": "gearbx-mlx evaluation",
        "version": 2,
        "model": model_name(settings.model.model),
        "data": text,
        "format": decision.format.name,
        "manage": decision.stored.manage,
        "group_size": decision.stored.group_size,
        "kernels": "native" if gearbox.kernels.native else "mlx",
        "compute_dtype": dtype_name(gearbox.compute_dtype),
        "tokens": len(reference.nll),
        "windows": len(windows),
        "context": context,
        "uncounted": uncounted,
        "ladder": gearbox.ladder_report(),
        "rows": [report_row(reader, each, reference.nll, gearbox) for reader, each in found.items()],
    }


def readers_of(settings: EvaluateSettings, gearbox: Gearbox, tokenizer: Any) -> list[TextReader]:
    """Return the readers of every gear, of modes that shift, and of KV cache gears, in the order of the report.

    Raises:
        GearbxError: thresholds that do not fit the ladder or the model, or a KV cache without gears.
    """
    wanted, ladder = settings.evaluation, gearbox.ladder
    found = [
        TextReader(GEAR, f"{gear.bits} bits", [gear], partial(read_at_once, gearbox, gear=gear)) for gear in ladder
    ]
    # A window has no prompt, so it starts in the lowest gear.
    given = {"thresholds": wanted.thresholds, "gear": ladder[0].bits, "prompt_gear": SAME}
    for name in wanted.modes if len(ladder) > 1 else ():
        if name != NONE:
            thresholds_for(wanted.thresholds, gearbox)  # refuses "auto", as it needs a prompt
            mode = make_mode(name, given).resolved(gearbox, tokenizer, None)
            found.append(TextReader(name, name, ladder, partial(read_in_mode, gearbox, tokenizer, mode)))
    if wanted.kv_gears:
        check_heads(gearbox.model, wanted.kv_gears)
        found += [over_cache(gearbox, wanted.kv_gears, bits) for bits in wanted.kv_gears if bits < KV_BITS[-1]]
    return found


def over_cache(gearbox: Gearbox, ladder: Sequence[int], bits: int) -> TextReader:
    """Return the reader of the top gear with a KV cache gear of `bits`."""
    top = gearbox.ladder.top

    def read(window: Sequence[int]) -> Iterable[TextPrediction]:
        return read_at_once(gearbox, window, top, cache_in_gears(gearbox.model, gearbox, ladder, bits))

    return TextReader(KV, f"{top.bits} bits, KV {bits}", [top], read)


def report_row(reader: TextReader, recording: Recording, reference_nll: np.ndarray, gearbox: Gearbox) -> dict[str, Any]:
    """Return a row of the report."""
    weight_bytes, bits = read_per_token(gearbox, reader.used, recording)
    return {
        "kind": reader.kind,
        "name": reader.name,
        "gear_shares": {gear.name: float((recording.gear == gear.index).mean()) for gear in gearbox.ladder},
        "effective_bits": bits,
        "weight_bytes_per_token": weight_bytes,
        **quality(recording.nll, recording.kl, recording.kl_reverse, recording.agree, reference_nll),
    }


AGREEING = 0.98  # top-1 agreement


def enough(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the bits of the gear that reads least with a top-1 agreement of AGREEING; None without one."""
    gears = [row for row in rows if row["kind"] == GEAR and row["top1_agreement"] >= AGREEING]
    best = min(gears, key=lambda row: row["weight_bytes_per_token"], default=None)
    return None if best is None else int(best["name"].split()[0])


Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # header to the cell of a row
DEFAULT_COLUMNS: Columns = {
    "": lambda row: row["name"],
    "MB/token": lambda row: f"{row['weight_bytes_per_token'] / 1e6:.2f}",
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "KL mean": lambda row: three_digits(row["kl_mean"]),
    "median": lambda row: three_digits(row["kl_median"]),
    "99 %": lambda row: three_digits(row["kl_p99"]),
    "top-1 agreement": lambda row: f"{100 * row['top1_agreement']:.1f} %",
}
KLD_COLUMNS: Columns = {
    "": DEFAULT_COLUMNS[""],
    "PPL ratio": lambda row: f"{row['perplexity_ratio']:.4f} ± {row['perplexity_ratio_error']:.4f}",
    "KL mean": lambda row: f"{three_digits(row['kl_mean'])} ± {three_digits(row['kl_mean_error'])}",
    "median": DEFAULT_COLUMNS["median"],
    "90 %": lambda row: three_digits(row["kl_p90"]),
    "99 %": DEFAULT_COLUMNS["99 %"],
    "99.9 %": lambda row: three_digits(row["kl_p999"]),
    "max": lambda row: three_digits(row["kl_max"]),
    "same top": lambda row: f"{100 * row['top1_agreement']:.2f} ± {100 * row['top1_agreement_error']:.2f} %",
}


def table_of(rows: Sequence[Mapping[str, Any]], columns: Columns = DEFAULT_COLUMNS) -> Table:
    """Return the table for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in columns:
        table.add_column(header, no_wrap=not header)
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


LEGEND = {ROUTE: ROUTE, KICKDOWN: KICKDOWN, KV: "gears of the KV cache"}
STYLES = {ROUTE: (SKY_BLUE, "s"), KICKDOWN: (GREEN, "D"), KV: (ORANGE, "*")}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw mean KL over bytes: a line through the gears with their 99th percentile, and a marker for each other row."""
    figure, axes = get_pyplot().subplots(figsize=(8, 5), layout="constrained")
    gears = [row for row in report["rows"] if row["kind"] == GEAR]
    for field, style, label in (("kl_mean", "-", "gears, mean"), ("kl_p99", ":", "gears, 99 %")):
        line = zip(*sorted(point_of(row, field) for row in gears))
        axes.plot(*line, color="0.1", marker="|", markersize=12, linestyle=style, linewidth=1.2, label=label)
    for row in gears:
        axes.annotate(row["name"], point_of(row), (4, 8), textcoords="offset points", fontsize=9)
    for kind, (color, marker) in STYLES.items():
        points = [point_of(row) for row in report["rows"] if row["kind"] == kind]
        if points:
            axes.scatter(
                *zip(*points), color=color, marker=marker, s=70, edgecolors="white", label=LEGEND[kind], zorder=3
            )
    axes.set(
        yscale="log",
        xlabel="weight bytes per token, MB",
        ylabel="KL from the top gear, nats (0 is drawn at 1e-7)",
        title=f"{Path(report['model']).name} on {Path(report['data']).name}: {report['tokens']} tokens",
    )
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, path)


def point_of(row: Mapping[str, Any], field: str = "kl_mean") -> tuple[float, float]:
    """Return x (MB) and y (nats)."""
    return row["weight_bytes_per_token"] / 1e6, max(row[field], 1e-7)  # since a logarithmic axis has no 0
