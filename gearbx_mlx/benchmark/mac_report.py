"""Report of the benchmark `mac`: its file, a page of tables, and a link that opens a new issue with the page."""

import platform
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import mlx.core as mx
import msgspec
from rich.console import Console

from .. import __version__
from ..cli.build import Loaded
from ..cli.terminal import note
from ..compat.arrays import dtype_name
from ..errors import GearbxError
from ..files.reading import read_json
from ..files.writing import write_text
from ..gears.activations import stored_dtype
from ..kernels.device import available_memory
from ..loading import model_contents
from ..settings import human_bytes
from . import MacBenchmark
from .measuring import machine_name, markdown_table, spread_of
from .own_kernels import in_short

MLX_LM = "mlx-lm"
BY_DRAFT_MODEL = {length: f"mlx-lm, draft length {length}" for length in (2, 3, 4)}
FIXED = {length: f"gearbx-mlx, draft length {length}" for length in (1, 2, 3, 4)}
DEFAULT = "gearbx-mlx, default"
ONE_GEAR = {bits: f"gearbx-mlx, {bits}-bit gear" for bits in (4, 6, 8)}
LOOKUP_GEAR = "gearbx-mlx, 4-bit gear, lookup"
ORDER = (MLX_LM, *BY_DRAFT_MODEL.values(), *FIXED.values(), DEFAULT, LOOKUP_GEAR, *ONE_GEAR.values())
SHORT = (MLX_LM, DEFAULT, LOOKUP_GEAR, ONE_GEAR[4], ONE_GEAR[8])

NEW_ISSUE = "https://github.com/gearbx/gearbx-mlx/issues/new"
MAX_BODY = 6000  # characters of the link's page: servers refuse longer addresses


class MacOutput(msgspec.Struct):
    """An output and its measurements.

    Attributes:
        series, prompt, method: its place in the benchmark.
        tokens: number of tokens.
        first_seconds: time of the first token, with prefill.
        seconds, rounds, reads, waited, queued: after the first token: time (s), tokens from the model itself (one a
            round), reads from the device by Python, seconds of waiting for them, and seconds of queueing passes, which
            also waits if the device is far behind.
        memory: bytes of weights and of the largest use beside them.
        agreed: number of tokens at the start equal to mlx-lm's.
        same: True if all tokens are equal.
    """

    series: int
    prompt: str
    method: str
    tokens: int
    first_seconds: float
    seconds: float
    rounds: int
    reads: int
    waited: float
    memory: int
    queued: float = 0.0
    agreed: int = 0
    same: bool = False

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return (self.tokens - 1) / self.seconds


class MacFacts(msgspec.Struct, frozen=True):
    """Facts that must be equal if a run resumes."""

    machine: str
    mlx: str
    mlx_lm: str
    gearbx_mlx: str
    model: str
    contents: str
    tokens: int
    full: bool = False


class MacReport(msgspec.Struct):
    """Content of the file (docs/files.md)."""

    facts: MacFacts
    date: str
    dtype: str
    memory_bytes: int
    device: dict[str, Any]
    outputs: list[MacOutput] = []
    methods: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    state: list[str] = []
    checks: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    line: str = ""
    headline: str = ""
    complete: bool = False


def new_report(settings: MacBenchmark, loaded: Loaded) -> MacReport:
    """Return an empty report of this machine and model."""
    facts = MacFacts(
        machine=f"{machine_name()} {platform.mac_ver()[0]}".rstrip(),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        gearbx_mlx=__version__,
        model=loaded.name,
        contents=model_contents(settings.model),
        tokens=settings.tokens,
        full=settings.full,
    )
    memory = mx.device_info().get("memory_size")
    dtype = dtype_name(stored_dtype(loaded.model))
    return MacReport(facts, time.strftime("%Y-%m-%d"), dtype, int(memory or available_memory()), mx.device_info())


def resumed(file: Path, report: MacReport) -> MacReport:
    """Return the report with the outputs of an interrupted run with equal facts; note the reason against others."""
    if not file.is_file():
        return report
    try:
        before = read_json(file, MacReport, "a report of benchmark mac", "it is ignored and replaced")
    except GearbxError as error:
        note(str(error))
        return report
    now, then = (msgspec.structs.asdict(each.facts) for each in (report, before))
    for name in now:
        if then[name] != now[name]:
            change = f"{name.replace('_', '-')} {then[name]}, got {now[name]}"
            note(f"{file}: measured with {change}; it is ignored and replaced")
            return report
    if not before.complete:
        note(f"{file}: resumes after {len(before.outputs)} outputs of an interrupted run")
        report.outputs, report.state, report.failed = before.outputs, before.state, before.failed
    return report


def save_report(file: Path, report: MacReport) -> None:
    """Write the file."""
    write_text(file, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def summarise(report: MacReport) -> None:
    """Compute a row for each method, the line for an issue, and the headline."""
    timed = [output for output in report.outputs if output.tokens > 1]
    baseline: dict[tuple[int, str], list[float]] = {}  # mlx-lm's speeds at the start and at the end of a turn
    for output in timed:
        if output.method == MLX_LM:
            baseline.setdefault((output.series, output.prompt), []).append(output.speed)
    report.methods = []
    for name in ORDER:
        outputs = [each for each in timed if each.method == name and (each.series, each.prompt) in baseline]
        if outputs:
            speeds = [statistics.mean(baseline[each.series, each.prompt]) for each in outputs]
            report.methods.append(method_row(name, outputs, speeds))
    rows = {row["method"]: row for row in report.methods}
    report.line, report.headline = line(report, rows), headline(report, rows)


def method_row(name: str, outputs: Sequence[MacOutput], baseline: Sequence[float]) -> dict[str, Any]:
    """Return medians over the outputs of a method. baseline: mlx-lm's mean speed in the turn of each."""
    ratios = [output.speed / speed for output, speed in zip(outputs, baseline)]
    rounds, seconds = (sum(getattr(output, what) for output in outputs) for what in ("rounds", "seconds"))
    return {
        "method": name,
        "outputs": len(outputs),
        "tokens_per_second": statistics.median(output.speed for output in outputs),
        "ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "tokens_a_round": sum(output.tokens - 1 for output in outputs) / max(rounds, 1),
        "reads_a_round": sum(output.reads for output in outputs) / max(rounds, 1),
        "host_share": 1 - sum(output.waited + output.queued for output in outputs) / seconds,
        "queue_share": sum(output.queued for output in outputs) / seconds,
        "first_seconds": statistics.median(output.first_seconds for output in outputs),
        "memory_bytes": max(output.memory for output in outputs),
        "same": sum(output.same for output in outputs),
        "agreed": min(output.agreed for output in outputs),
    }


# The page.


def show_page(report: MacReport, file: Path) -> None:
    """Print the page, a link that opens a new issue with it, and the headline in bold."""
    text = page_of(report, file)
    print(text)
    if report.headline:
        print(f"\nReport it: {issue_link(report, text)}\n")
        Console().print(report.headline, style="bold", highlight=False, soft_wrap=True)


def page_of(report: MacReport, file: Path) -> str:
    """Return the tables, missing methods, and the line for an issue."""
    facts, series = report.facts, len({output.series for output in report.outputs})
    prompts = len({output.prompt for output in report.outputs})
    lines = [
        f"{facts.machine}, {human_bytes(report.memory_bytes)}; {versions_of(facts)}; {report.date}",
        f"{facts.model}, {report.dtype}: {prompts} prompts, {facts.tokens} tokens, {series} series\n",
    ]
    tables = [[shown_row(row) for row in report.methods], in_short(report.kernels)]
    lines += [markdown_table(table, [*table[0]]) for table in tables if table]
    for heading, reasons in {"left out": report.left_out, "failed": report.failed}.items():
        lines += [f"{heading}: {name}: {reason}" for name, reason in reasons.items()]
    lines += [f"wrong: {wrong}" for row in report.checks for wrong in row["wrong"]]
    lines.append(f"state of the machine after each series: {'; '.join(dict.fromkeys(report.state)) or 'not read'}")
    return "\n".join([*lines, f"\nFor an issue, with {file}:\n{report.line}"])


def issue_link(report: MacReport, page: str) -> str:
    """Return the address that opens a new issue with title and page. Nothing is sent before its author does."""
    body = re.sub("-{3,}", "---", re.sub(" {2,}", " ", page))
    given = {"title": f"benchmark mac: {report.headline}", "body": body[:MAX_BODY]}
    return f"{NEW_ISSUE}?{urlencode(given, quote_via=quote)}"


def versions_of(facts: MacFacts) -> str:
    return f"mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, gearbx-mlx {facts.gearbx_mlx}"


def shown_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a method by the heads of the table."""
    agreed = "" if row["same"] == row["outputs"] else f", else {row['agreed']}+ tokens"
    return {
        "method": row["method"],
        "tokens/s": f"{row['tokens_per_second']:.3g}",
        "speedup": f"{row['ratio']:.2f}",
        "range": "-".join(f"{each:.2f}" for each in row["spread"]),
        "tokens/round": f"{row['tokens_a_round']:.2f}",
        "reads/round": f"{row['reads_a_round']:.2f}",
        "host": f"{row['host_share']:.0%}",
        "queue": f"{row['queue_share']:.0%}",
        "first": f"{row['first_seconds']:.2f} s",
        "memory": human_bytes(row["memory_bytes"]),
        "identical": f"{row['same']} of {row['outputs']}{agreed}",
    }


Rows = Mapping[str, Mapping[str, Any]]
"""Rows by the name of the method."""


def headline(report: MacReport, rows: Rows) -> str:
    """Return the result in a few words; "" before the default's first output."""
    if DEFAULT not in rows:
        return ""
    row, chip = rows[DEFAULT], report.device.get("device_name", report.facts.machine)
    return f"{row['ratio']:.2f}× mlx-lm's speed on {chip}, same text in {row['same']} of {row['outputs']}"


def line(report: MacReport, rows: Rows) -> str:
    """Return the main results in one line."""
    facts = report.facts

    def ratios_of(label: str, names: Mapping[Any, str]) -> str:
        ratios = (f"{key}{rows[name]['ratio']:.2f}" for key, name in names.items() if name in rows)
        return " ".join([label, *ratios])

    def numbered(names: Mapping[int, str]) -> dict[str, str]:
        return {f"{number}:": name for number, name in names.items()}

    parts = [
        f"{facts.machine}, {human_bytes(report.memory_bytes)}",
        versions_of(facts),
        f"{facts.model} {report.dtype}",
        f"mlx-lm {rows[MLX_LM]['tokens_per_second']:.3g} tokens/s" if MLX_LM in rows else "no outputs",
        ratios_of("default", {"": DEFAULT}),
        ratios_of("draft length", numbered(FIXED)),
        ratios_of("draft model", numbered(BY_DRAFT_MODEL)),
        ratios_of("bits", numbered(ONE_GEAR) | {"4 with lookup:": LOOKUP_GEAR}),
        f"identical {rows.get(DEFAULT, {}).get('same', 0)}/{rows.get(DEFAULT, {}).get('outputs', 0)}",
        f"{report.state[-1] if report.state else 'state not read'}",
        f"{len(report.failed)} failed, {len(report.left_out)} left out" + ("" if report.complete else ", interrupted"),
    ]
    return " | ".join(parts)
