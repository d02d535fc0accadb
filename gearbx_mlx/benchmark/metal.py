"""Everything that a Mac can say of the Metal kernels, in one run: are they right, how fast are they, what do they give.

Each section prints its table when it ends, or as far as it got when it is interrupted; the file has all rows that
were measured by then.
"""

import contextlib
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..cli.decide import JustGears, decide
from ..cli.flags import GearFlags, LayoutSettings, ModeFlags, ModelSettings, output_path
from ..cli.loaded import Loaded
from ..cli.terminal import progress_bar
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.route import SHORT_PROMPTS, Route, Static
from ..decoding.stream import stream_generate
from ..errors import one_line
from ..files.writing import write_text
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..kernels import metal
from ..loading import DEMO_MODEL, model_name
from ..telemetry.summary import as_json
from . import DecodeBenchmark, KernelBenchmark, MetalBenchmark
from .decode import benchmark_decode
from .kernels import benchmark_kernels
from .measuring import GIBIBYTE, MLX, Rows, check_memory, machine_name, paths_here, print_table, spread_of
from .metal_checks import all_kernels, examine, mixture_checks, operation_checks, product_checks

Report = dict[str, Any]
TOP = "top gear"
MODES: dict[str, type[Mode]] = {TOP: Static, "route": Route, "lossless": Lossless}
COLUMNS = {
    "checks": ("what", "checked", "largest_error", "faults"),
    "kernels": (
        *("format", "bits", "rows", "cols", "vectors", "path", "seconds", "gigabytes_per_second"),
        *("bandwidth_ratio", "spread"),
    ),
    "gears": ("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "shift_seconds", "peak_memory_bytes"),
    "modes": (
        *("mode", "path", "format", "gears", "tokens_per_second", "ratio", "spread"),
        *("identical", "peak_memory_bytes"),
    ),
}


def run(settings: MetalBenchmark) -> int:
    """Check, time, print and write. Returns 1 where a kernel is wrong or something cannot be run, else 0.

    Raises:
        GearbxError: there is no Metal here, the file cannot be written, more than memory allows, or the model.
    """
    metal.check_available()
    out = output_path(settings.json)
    matrix = max(4 * rows * columns for rows, columns in settings.shapes)
    # Ours, MLX's and the summed buffer, and a matrix of float32 that is packed.
    check_memory(3 * max(settings.megabytes * 2**20, matrix) + 4 * matrix + GIBIBYTE, "these shapes")
    # Reports a wrong model first.
    decide(JustGears(ModelSettings(settings.model), LayoutSettings(gears=settings.gears)))
    mx.random.seed(0)
    report = new_report(settings)
    print(f"{report['machine']}, mlx {report['mlx']}, gearbx-mlx {report['gearbx_mlx']}, {report['date']}", flush=True)
    sections = {"checks": add_checks, "kernels": add_times, "gears": add_gears, "modes": add_modes}
    for name, add in sections.items():
        if name == "checks" or not settings.check_only:
            with section(report, name, out):
                add(settings, report)
    report["complete"] = True
    write_text(out, as_json(report))
    return 1 if report["failed"] or any(row["wrong"] for row in report["checks"]) else 0


def new_report(settings: MetalBenchmark) -> Report:
    """What a reader has to know of the machine and the run, and no rows."""
    memory = mx.device_info().get("memory_size")
    return {
        "machine": machine_name(),
        "device": mx.device_info(),
        "os": platform.mac_ver()[0] or platform.platform(),
        "memory_bytes": memory,
        "mlx": version("mlx"),
        "gearbx_mlx": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "model": model_name(settings.model),
        "settings": vars(settings) | {"gears": settings.gears and str(settings.gears)},
        "complete": False,
        **{name: [] for name in COLUMNS},
        "failed": [],
    }


@contextlib.contextmanager
def section(report: Report, name: str, out: Path) -> Iterator[None]:
    """However a section ends, its rows are printed and the file is written; an error of MLX ends no more than it."""
    try:
        with noting_failures(report, name):
            yield
    finally:
        if report[name]:
            print_section(name, report[name])
        if report[name] or report["failed"]:
            write_text(out, as_json(report))


@contextlib.contextmanager
def noting_failures(report: Report, what: str) -> Iterator[None]:
    """An error of MLX becomes a sentence in the report, and a line on stdout."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        report["failed"].append(f"{what}: {one_line(error)}")
        print(f"failed: {report['failed'][-1]}", flush=True)


def print_section(name: str, rows: Rows) -> None:
    """The table, and below that of the checks what is wrong."""
    print(f"\n{name}\n")
    print_table([row | {"faults": len(row.get("wrong", ()))} for row in rows], COLUMNS[name])
    if name == "checks":
        wrong = [text for row in rows for text in row["wrong"]]
        print(f"\n{sum(row['checked'] for row in rows)} comparisons, {len(wrong)} wrong")
        for text in wrong:
            print(f"wrong: {text}")


def add_checks(settings: MetalBenchmark, report: Report) -> None:
    """A row for each kernel; none for one whose checks an error ends, which the report names as failed."""
    kernels = all_kernels(settings.group_size)
    products = {kernel.name: product_checks(kernel, settings.vectors) for kernel in kernels}
    mixtures, operations = mixture_checks(kernels, settings.vectors), operation_checks(settings.vectors)
    checks = [*(products | mixtures | operations).items()]
    with progress_bar() as progress:
        for name, some in progress.track(checks, description="kernels checked"):
            with noting_failures(report, name):
                report["checks"].append(examine(name, some))


def add_times(settings: MetalBenchmark, report: Report) -> None:
    """The rows of `benchmark kernels`, for each shape and number of vectors."""
    for (rows, cols), count in itertools.product(settings.shapes, settings.vectors):
        kernels = KernelBenchmark(
            rows=rows, cols=cols, vectors=count, megabytes=settings.megabytes, trials=settings.trials
        )
        with noting_failures(report, f"{rows}x{cols}, {count} vectors"):
            report["kernels"].extend(benchmark_kernels(kernels))


def add_gears(settings: MetalBenchmark, report: Report) -> None:
    """The rows of `benchmark decode`."""
    model = settings.model or str(DEMO_MODEL)
    decode = DecodeBenchmark(model=model, gears=settings.gears, tokens=settings.tokens, trials=settings.trials)
    report["gears"].extend(benchmark_decode(decode))


def add_modes(settings: MetalBenchmark, report: Report) -> None:
    """A row for each mode on each path; after an interruption, of the trials that were complete."""
    runs = list(runs_of(settings.model, settings.gears, settings.tokens))
    with progress_bar() as progress:
        for _ in progress.track(range(settings.trials), description="texts timed"):
            for run in runs:
                run.seconds += run.write(settings.tokens)[0]
            report["modes"][:] = [mode_row(run, runs) for run in runs]


@dataclass
class ModeRun:
    """The times of a mode on a path: seconds per token, the tokens of each prompt, peak memory."""

    path: str
    name: str
    gearbox: Gearbox
    tokenizer: Any
    mode: Mode
    peak_memory: int = 0
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def write(self, tokens: int) -> tuple[list[float], list[list[int]]]:
        """Seconds per token and tokens of each prompt's text."""
        made = [self.text(prompt, tokens) for prompt in SHORT_PROMPTS]
        return [seconds for seconds, _ in made], [text for _, text in made]

    def text(self, prompt: str, tokens: int) -> tuple[float, list[int]]:
        """Seconds per token after the first one, and the tokens."""
        steps = stream_generate(
            self.gearbox.model, self.tokenizer, prompt, tokens, mode=self.mode, gearbox=self.gearbox
        )
        written = [next(steps).token]
        start = time.perf_counter()
        written += [response.token for response in steps]
        return (time.perf_counter() - start) / max(len(written) - 1, 1), written


def runs_of(model: str | None, gears: Ladder | None, tokens: int) -> Iterator[ModeRun]:
    """Every mode on every path, each after an uncounted round of texts that shows its peak memory.

    Each path has a model of its own. As in `generate --mode lossless`, bfloat16 weights are in format exact if neither
    `gears` nor the checkpoint says which gears.
    """
    for path, kernels, activations in paths_here():
        gc.collect()  # models of earlier sections, or their end would count as ours
        before = mx.get_active_memory()
        flags = GearFlags(kernels=f"{kernels}:{activations}")
        drafting = ModeFlags(mode="lossless")
        loaded = Loaded.of(JustGears(ModelSettings(model), LayoutSettings(gears=gears), flags, drafting))
        gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
        del loaded
        for name, mode in MODES.items():
            run = ModeRun(path, name, gearbox, tokenizer, mode())
            mx.reset_peak_memory()
            run.texts = run.write(tokens)[1]
            run.peak_memory = mx.get_peak_memory() - before
            yield run


def mode_row(run: ModeRun, runs: list[ModeRun]) -> dict[str, Any]:
    """Medians over trials and prompts. `ratio`: to MLX's top gear; `identical`: a share of texts."""
    base, own = (next(each for each in runs if (each.path, each.name) == (path, TOP)) for path in (MLX, run.path))
    ratios = [slow / fast for slow, fast in zip(base.seconds, run.seconds)]
    same = [text == wanted for text, wanted in zip(run.texts, own.texts)]
    return {
        "mode": run.name,
        "path": run.path,
        "format": run.gearbox.format.name,
        "gears": str(run.gearbox.ladder),
        "tokens": sum(map(len, run.texts)),
        "tokens_per_second": 1 / statistics.median(run.seconds),
        "ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "identical": sum(same) / len(same),
        "peak_memory_bytes": run.peak_memory,
    }
