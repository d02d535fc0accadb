"""The benchmark `mac`: speedup over mlx-lm of its draft models, this package's modes and single gears.

All methods alternate on each prompt, so that heat and other programs slow all of them alike. Each is compared with
mlx-lm's output of the same turn. A series is one output of each method for each prompt; the time limit sets the number
of series. MLX's CPU and other GPUs can run it too.
"""

import contextlib
import copy
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import msgspec
from mlx.utils import tree_flatten

from .. import __version__
from ..cli.build import Geared, Loaded, decided, generation_keywords, make_watch
from ..cli.decide import JustGears, decide
from ..cli.flags import CacheSettings, LayoutSettings, ModeFlags, ModelSettings, SamplingSettings, output_path
from ..cli.prompt import PromptSettings, encode_prompt, room_for
from ..cli.terminal import note, progress_bar
from ..compat.arrays import dtype_name
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.response import DRAFT, LOOKUP, MODEL
from ..decoding.stream import stream_generate
from ..errors import GearbxError, one_line
from ..files.reading import read_json
from ..files.writing import write_text
from ..gears.activations import stored_dtype
from ..gears.ladder import DEFAULT_GROUP_SIZE, Ladder
from ..kernels import metal
from ..kernels.device import available_memory, recommended_memory
from ..kernels.dispatch import on_cpu
from ..loading import model_contents, model_name
from ..machine.sensors import Watch
from ..settings import human_bytes
from . import MacBenchmark
from .measuring import counting_reads, machine_name, print_table, spread_of
from .own_kernels import check_all, in_short, prove_all

PROMPTS = {
    "prose": "Write the first page of a story about a lighthouse keeper who finds a letter in the sand.",
    "code": "Write a Python function that reads a date such as 2024-02-29 from text, with checks and a docstring.",
    "answer": "How many days lie between 3 March and 17 August? Explain each step, and how to check the result.",
}
DRAFT_BITS = 4
MLX_LM = "mlx-lm"
BY_DRAFT_MODEL = {length: f"mlx-lm, draft length {length}" for length in (2, 3, 4)}
FIXED = {length: f"gearbx-mlx, draft length {length}" for length in (1, 2, 3, 4)}
DEFAULT = "gearbx-mlx, default"
ONE_GEAR = {bits: f"gearbx-mlx, {bits}-bit gear" for bits in (4, 6, 8)}
ORDER = (MLX_LM, *BY_DRAFT_MODEL.values(), *FIXED.values(), DEFAULT, *ONE_GEAR.values())

WARM_UP = 24  # uncounted tokens of each method; meanwhile kernels compile and the policy sees some rounds


@dataclass(frozen=True)
class TimedMethod:
    """A method of generation.

    Attributes:
        write: from the typed prompt, its tokens and the maximum number of tokens to mlx-lm's responses.
        weights: bytes of its arrays.
    """

    name: str
    write: Callable[[str, list[int], int], Iterator[Any]]
    weights: int


class MacOutput(msgspec.Struct):
    """An output and its measurements.

    Attributes:
        series, prompt, method: its place in the benchmark.
        tokens: number of tokens.
        first_seconds: time of the first token, with prefill.
        seconds, rounds, reads, waited: after the first token: time (s), tokens from the model itself (one a round),
            reads from the device by Python, and seconds of waiting for them.
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
    verdict: list[str] = []
    line: str = ""
    complete: bool = False


def run(settings: MacBenchmark) -> int:
    """Measure, print one page and write the file. Return 1 if a method fails or a kernel is wrong, else 0.

    Raises:
        GearbxError: no Metal for own kernels; a model that is not original, cannot be loaded or does not fit; a file
            that cannot be written.
    """
    out = output_path(settings.json)
    if settings.own_kernels:
        metal.check_available()
    if on_cpu():
        note("MLX computes on the CPU here, so the figures do not apply to a GPU")
    loaded = load_as_mlx_lm(settings.model)
    report = resumed(out, new_report(settings, loaded))
    try:
        with make_watch([], True, False) as watch:
            if settings.own_kernels:
                try_own_kernels(report, loaded)
            write_series(settings, make_methods(loaded, report), loaded, report, watch, out)
        report.complete = True
    finally:
        if report.outputs or report.checks:
            summarise(report)
            save_report(out, report)
            show_page(report, out)
    return 1 if report.failed or any(row["wrong"] for row in [*report.checks, *report.kernels]) else 0


def try_own_kernels(report: MacReport, loaded: Loaded) -> None:
    """Check and time own kernels; correct ones are kept for this machine."""
    for row in check_all():
        report.checks.append(row)
    for row in prove_all(loaded.model):
        report.kernels.append(row)


# The model and the methods.


def generate_settings(model: str | None, gears: Ladder | None = None, **mode: Any) -> JustGears:
    """Return the settings of `gearbx_mlx generate --model MODEL`, with these gears and mode flags."""
    return JustGears(ModelSettings(model), LayoutSettings(gears=gears), mode=ModeFlags(**mode))


def load_as_mlx_lm(name: str | None) -> Loaded:
    """Return the loaded model.

    Raises:
        GearbxError: a model that is quantized, in gears or too large, or as `Loaded.of`.
    """
    decision = decided(generate_settings(name))
    check_fits(model_name(name), decision.model.size)
    if not decision.model.original:
        raise GearbxError(f"{model_name(name)}: quantized or in gears; use the original 16-bit model")
    return Loaded.of(decision)


def most_memory() -> int:
    """Return the maximum bytes of weights here."""
    # The rest is for KV caches and activations.
    return int(0.9 * (recommended_memory() or available_memory() + mx.get_active_memory()))


def check_fits(name: str, size: int) -> None:
    """Validate that a model of `size` bytes fits."""
    most = most_memory()
    if size > most:
        raise GearbxError(
            f"{name}: too large for the {human_bytes(most)} for weights here, got about {human_bytes(size)}; "
            "use a smaller model"
        )


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model with new modules over the same arrays."""
    return copy.deepcopy(model, {id(array): array for _, array in tree_flatten(model.parameters())})


def make_methods(loaded: Loaded, report: MacReport) -> list[TimedMethod]:
    """Return the methods that fit into memory, and record the others. All share the arrays of one model."""
    base, tokenizer = twin(loaded.model), loaded.tokenizer
    whole, found = held([base]), list[TimedMethod]()

    def add(name: str, write: Callable[[str, list[int], int], Iterator[Any]], weights: int) -> None:
        found.append(TimedMethod(name, write, weights))

    def fits(bits: int, *names: str) -> bool:
        needed = whole * bits // 16
        over = mx.get_active_memory() + needed - most_memory()
        for name in names if over > 0 else ():
            report.left_out[name] = f"it needs {human_bytes(needed)}, {human_bytes(over)} more than available"
        return over <= 0

    add(MLX_LM, partial(by_mlx_lm, base, tokenizer), whole)
    default = in_gears(loaded, generate_settings(loaded.decision.settings.model.model), twin(base))
    weights = held_in_gears(default.gearbox)
    add(DEFAULT, partial(by_gearbx, default, None), weights)
    for tokens, name in FIXED.items():
        if len(default.gearbox.ladder) > 1:
            add(name, partial(by_gearbx, default, Lossless(draft_length=tokens)), weights)
        else:
            report.left_out[name] = f"the default has one gear, of {default.gearbox.ladder} bits"
    if fits(DRAFT_BITS, *BY_DRAFT_MODEL.values()):
        draft = quantized(twin(base))
        for tokens, name in BY_DRAFT_MODEL.items():
            how = {"draft_model": draft, "num_draft_tokens": tokens}
            add(name, partial(by_mlx_lm, base, tokenizer, **how), held([base, draft]))
    for bits, name in reversed(ONE_GEAR.items()):  # the largest first, the most likely choice
        if fits(bits, name):
            settings = generate_settings(loaded.decision.settings.model.model, Ladder((bits,)), mode="static")
            geared = in_gears(loaded, settings, twin(base))
            add(name, partial(by_gearbx, geared, None), held_in_gears(geared.gearbox))
    return sorted(found, key=lambda method: ORDER.index(method.name))


def quantized(model: nn.Module) -> nn.Module:
    """Quantize the layers of a model for drafting, in place, as mlx_lm.convert does."""

    def can_be(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % DEFAULT_GROUP_SIZE == 0

    nn.quantize(model, DEFAULT_GROUP_SIZE, DRAFT_BITS, class_predicate=can_be)
    mx.eval(model.parameters())
    return model


def in_gears(loaded: Loaded, settings: JustGears, model: nn.Module) -> Geared:
    """Return a model in the gears of these settings."""
    decision = decide(settings, loaded.decision.model)
    return Loaded(decision, model, loaded.tokenizer, loaded.config).in_gears()


def held(models: Sequence[nn.Module]) -> int:
    """Return the bytes of the arrays of models, without duplicates."""
    arrays = {id(array): array for model in models for _, array in tree_flatten(model.parameters())}
    return sum(array.nbytes for array in arrays.values())


def held_in_gears(gearbox: Any) -> int:
    """Return the bytes of the arrays of all gears, without duplicates."""
    arrays: dict[int, mx.array] = {}
    before = gearbox.gear
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        arrays |= {id(array): array for _, array in tree_flatten(gearbox.model.parameters())}
    gearbox.shift(before)
    return sum(array.nbytes for array in arrays.values())


def by_mlx_lm(model: nn.Module, tokenizer: Any, typed: str, prompt: list[int], most: int, **how: Any) -> Iterator[Any]:
    """Generate as mlx_lm.generate does."""
    yield from mlx_lm.stream_generate(model, tokenizer, prompt, most, **how)


def by_gearbx(geared: Geared, mode: Mode | None, typed: str, prompt: list[int], most: int) -> Iterator[Any]:
    """Generate as `gearbx_mlx generate` does. mode: replaces the flags' mode."""
    gearbox, tokenizer = geared.gearbox, geared.loaded.tokenizer
    keywords = generation_keywords(SamplingSettings(), CacheSettings(), tokenizer)
    mode = geared.mode(typed, mode).settled(gearbox, tokenizer, prompt)
    yield from stream_generate(gearbox.model, tokenizer, prompt, most, mode=mode, gearbox=gearbox, **keywords)


# The outputs.


def write_series(
    settings: MacBenchmark, methods: Sequence[TimedMethod], loaded: Loaded, report: MacReport, watch: Watch, out: Path
) -> None:
    """Generate series of outputs until the next one would exceed the time limit. The file has every complete turn.

    Raises:
        GearbxError: mlx-lm itself fails.
    """
    prompts = {name: encode_prompt(PromptSettings(), loaded.tokenizer, text) for name, text in PROMPTS.items()}
    start = time.perf_counter()
    keep_whole_turns(report, methods)
    written = {(output.series, output.prompt) for output in report.outputs}
    warm_up(methods, prompts, settings.tokens, report)
    for series in itertools.count():
        series_start = time.perf_counter()
        with progress_bar() as progress:
            task = progress.add_task(f"outputs of series {series + 1}", total=len(prompts) * len(methods))
            for name, prompt in prompts.items():
                most = room_for(loaded.config, len(prompt), settings.tokens)
                for _ in () if (series, name) in written else write_turn(methods, series, name, prompt, most, report):
                    progress.advance(task)
                save_report(out, report)
        report.state.append(str(watch.state()))
        now = time.perf_counter()
        if now - start + now - series_start > 60 * settings.minutes:
            return


def keep_whole_turns(report: MacReport, methods: Sequence[TimedMethod]) -> None:
    """Drop outputs of interrupted turns, because only outputs of one turn are compared."""
    names = {method.name for method in methods}
    turns: dict[tuple[int, str], set[str]] = {}
    for output in report.outputs:
        turns.setdefault((output.series, output.prompt), set()).add(output.method)
    whole = {turn for turn, there in turns.items() if there | report.failed.keys() >= names}
    report.outputs = [output for output in report.outputs if (output.series, output.prompt) in whole]


def warm_up(methods: Sequence[TimedMethod], prompts: Mapping[str, list[int]], most: int, report: MacReport) -> None:
    """Generate uncounted tokens with each method, and print the expected time of a series."""
    name, prompt = next(iter(prompts.items()))
    outputs, first = len(methods) * len(prompts), min(most, WARM_UP)
    note(
        f"series: {outputs} outputs ({len(methods)} methods, {len(prompts)} prompts) of at most {most} tokens, up to "
        f"{outputs * most:,} forward passes, and up to {len(methods) * first:,} for warm-up"
    )
    with progress_bar() as progress:
        for method in progress.track(methods, description="methods warmed up"):
            with noting_failure(report, method.name):
                output, _ = timed_output(method, 0, name, prompt, first)
                if method.name == MLX_LM and output.tokens > 1:
                    minutes = expected_seconds(output, outputs, most) / 60
                    note(f"series: about {minutes:.2g} minutes at mlx-lm's speed; Ctrl-C keeps the results")


def expected_seconds(output: MacOutput, outputs: int, tokens: int) -> float:
    """Return the seconds for outputs of a number of tokens, at the speed of one output."""
    return outputs * (output.first_seconds + (tokens - 1) / output.speed)


def write_turn(
    methods: Sequence[TimedMethod], series: int, name: str, prompt: list[int], most: int, report: MacReport
) -> Iterator[None]:
    """Generate one output with each method: mlx-lm first, the others in alternating order."""
    baseline, *others = methods
    expected: list[int] = []
    for method in [baseline, *(others if series % 2 == 0 else reversed(others))]:
        if method.name not in report.failed:
            with noting_failure(report, method.name):
                output, tokens = timed_output(method, series, name, prompt, most)
                expected = expected or tokens
                same = [one == other for one, other in zip(tokens, expected)]
                output.agreed, output.same = [*same, False].index(False), tokens == expected
                report.outputs.append(output)
        yield


@contextlib.contextmanager
def noting_failure(report: MacReport, name: str) -> Iterator[None]:
    """Record the failure of a method, so that the others continue. A failure of mlx-lm itself is an error."""
    try:
        yield
    except (GearbxError, RuntimeError, ValueError, NotImplementedError) as error:
        if name == MLX_LM:
            raise GearbxError(
                f"{report.facts.model}: mlx-lm cannot generate with it here ({one_line(error)})"
            ) from error
        report.failed[name] = one_line(error)


def timed_output(
    method: TimedMethod, series: int, name: str, prompt: list[int], most: int
) -> tuple[MacOutput, list[int]]:
    """Generate an output; return it with its measurements, and its tokens."""
    mx.reset_peak_memory()
    before, rounds = mx.get_active_memory(), 0
    with counting_reads() as reads:
        start = time.perf_counter()
        steps = method.write(PROMPTS[name], prompt, most)
        tokens = [next(steps).token]
        first, reads_before, waited_before = time.perf_counter(), reads.count, reads.seconds
        for step in steps:
            tokens.append(step.token)
            rounds += getattr(step, "source", DRAFT if step.from_draft else MODEL) not in (DRAFT, LOOKUP)
        end = time.perf_counter()
    output = MacOutput(
        series=series,
        prompt=name,
        method=method.name,
        tokens=len(tokens),
        first_seconds=first - start,
        seconds=end - first,
        rounds=rounds,
        reads=reads.count - reads_before,
        waited=reads.seconds - waited_before,
        memory=method.weights + max(0, mx.get_peak_memory() - before),
    )
    return output, tokens


# The file.


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
    """Compute a row for each method, the verdict and the line for an issue."""
    timed = [output for output in report.outputs if output.tokens > 1]
    baseline = {(output.series, output.prompt): output for output in timed if output.method == MLX_LM}
    report.methods = []
    for name in ORDER:
        outputs = [each for each in timed if each.method == name and (each.series, each.prompt) in baseline]
        if outputs:
            report.methods.append(method_row(name, outputs, [baseline[each.series, each.prompt] for each in outputs]))
    rows = {row["method"]: row for row in report.methods}
    report.verdict, report.line = verdict(report, rows), line(report, rows)


def method_row(name: str, outputs: Sequence[MacOutput], baseline: Sequence[MacOutput]) -> dict[str, Any]:
    """Return medians over the outputs of a method. baseline: mlx-lm's output of the same turn, for each."""
    ratios = [output.speed / other.speed for output, other in zip(outputs, baseline)]
    rounds, seconds = (sum(getattr(output, what) for output in outputs) for what in ("rounds", "seconds"))
    return {
        "method": name,
        "outputs": len(outputs),
        "tokens_per_second": statistics.median(output.speed for output in outputs),
        "ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "tokens_a_round": sum(output.tokens - 1 for output in outputs) / max(rounds, 1),
        "reads_a_round": sum(output.reads for output in outputs) / max(rounds, 1),
        "host_share": 1 - sum(output.waited for output in outputs) / seconds,
        "first_seconds": statistics.median(output.first_seconds for output in outputs),
        "memory_bytes": max(output.memory for output in outputs),
        "same": sum(output.same for output in outputs),
        "agreed": min(output.agreed for output in outputs),
    }


# The page.


def show_page(report: MacReport, file: Path) -> None:
    """Print the tables, missing methods, the verdict and the line for an issue."""
    facts, series = report.facts, len({output.series for output in report.outputs})
    print(f"{facts.machine}, {human_bytes(report.memory_bytes)}; {versions_of(facts)}; {report.date}")
    print(f"{facts.model}, {report.dtype}: {len(PROMPTS)} prompts, {facts.tokens} tokens, {series} series\n")
    tables = [[shown_row(row) for row in report.methods]]
    if report.kernels:
        tables.append(in_short(report.kernels))
    for table in filter(None, tables):
        print_table(table, [*table[0]])
        print()
    for heading, reasons in {"left out": report.left_out, "failed": report.failed}.items():
        for name, reason in reasons.items():
            print(f"{heading}: {name}: {reason}")
    for wrong in [each for row in report.checks for each in row["wrong"]]:
        print(f"wrong: {wrong}")
    print(f"state of the machine after each series: {'; '.join(dict.fromkeys(report.state)) or 'not read'}")
    if report.verdict:
        print("\n" + " ".join(report.verdict))
    print(f"\nFor an issue, with {file}:\n{report.line}", flush=True)


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
        "first": f"{row['first_seconds']:.2f} s",
        "memory": human_bytes(row["memory_bytes"]),
        "identical": f"{row['same']} of {row['outputs']}{agreed}",
    }


Rows = Mapping[str, Mapping[str, Any]]
"""Rows by the name of the method."""


def verdict(report: MacReport, rows: Rows) -> list[str]:
    """Return the conclusions in three sentences, or fewer if methods are missing."""
    found = []
    if DEFAULT in rows:
        row, baseline = rows[DEFAULT], rows[MLX_LM]
        ratio, (least, greatest) = row["ratio"], row["spread"]
        word = "faster than" if ratio > 1.05 else "slower than" if ratio < 0.97 else "as fast as"
        found.append(
            f"By default, gearbx-mlx is {word} mlx-lm on {report.facts.model}: {ratio:.2f}× ({least:.2f} to "
            f"{greatest:.2f}) mlx-lm's {baseline['tokens_per_second']:.3g} tokens/s, and {row['same']} of "
            f"{row['outputs']} outputs are identical."
        )
    drafts = {who: best(rows, names) for who, names in (("gearbx-mlx", FIXED), ("mlx-lm", BY_DRAFT_MODEL))}
    fastest = [f"{length} for {who} ({row['ratio']:.2f}×)" for who, (length, row) in drafts.items() if row]
    if fastest:
        found.append(f"The fastest fixed draft length is {' and '.join(fastest)}.")
    gears = [f"{bits}-bit {rows[name]['ratio']:.2f}×" for bits, name in ONE_GEAR.items() if name in rows]
    if gears:
        found.append(f"Speedups of single gears, whose output differs: {', '.join(gears)}.")
    return found


def best(rows: Rows, names: Mapping[int, str]) -> tuple[int, Mapping[str, Any]]:
    """Return draft length and row of the fastest method; 0 and an empty row without rows."""
    there = {tokens: rows[name] for tokens, name in names.items() if name in rows}
    return max(there.items(), key=lambda item: item[1]["ratio"], default=(0, {}))


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
        ratios_of("bits", numbered(ONE_GEAR)),
        f"identical {rows.get(DEFAULT, {}).get('same', 0)}/{rows.get(DEFAULT, {}).get('outputs', 0)}",
        f"{report.state[-1] if report.state else 'state not read'}",
        f"{len(report.failed)} failed, {len(report.left_out)} left out" + ("" if report.complete else ", interrupted"),
    ]
    return " | ".join(parts)
