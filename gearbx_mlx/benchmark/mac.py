"""The benchmark `mac`: speedup over mlx-lm of the default and of single gears; with `--full`, of fixed drafts too.

Everything is generated as typed: each method writes its text to a pseudo terminal, as its command does. All methods
alternate on each prompt, so that heat and other programs slow all of them alike; mlx-lm begins and ends each turn,
because a Mac without a fan slows down. The benchmark also runs on CPUs and other GPUs.
"""

import contextlib
import copy
import itertools
import os
import pty
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten

from ..bit_selection.sensitivity import CALIBRATION
from ..cli.build import Geared, Loaded, decided, generation_keywords, make_watch
from ..cli.decide import JustGears, decide
from ..cli.flags import CacheSettings, LayoutSettings, ModeFlags, ModelSettings, SamplingSettings, output_path
from ..cli.prompt import PromptSettings, encode_prompt, room_for
from ..cli.terminal import TintedText, note, progress_bar
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.response import DRAFT, LOOKUP, MODEL
from ..decoding.stream import stream_generate
from ..errors import GearbxError, one_line
from ..evaluation.predictions import read_documents
from ..files.model_directory import context_length
from ..gears.activations import stored_dtype
from ..gears.ladder import DEFAULT_GROUP_SIZE, Ladder
from ..kernels import metal
from ..kernels.device import available_memory, recommended_memory, wire
from ..kernels.dispatch import on_cpu
from ..loading import model_name
from ..machine.sensors import Watch
from ..settings import human_bytes
from ..telemetry.trace import writer_of
from . import MacBenchmark
from .mac_report import (
    BY_DRAFT_MODEL,
    DEFAULT,
    FIXED,
    LOOKUP_GEAR,
    MLX_LM,
    ONE_GEAR,
    ORDER,
    SHORT,
    MacOutput,
    MacReport,
    new_report,
    resumed,
    save_report,
    show_page,
    summarise,
)
from .measuring import counting_reads
from .own_kernels import check_all, prove_all

COPIED = """The harbor office opens at seven. Each boat is entered with its name, its owner and the length of its keel.
A boat that stays for more than three nights pays for the whole week, and gets a berth at the northern pier. Fishing
boats pay nothing from October to March. The office keeps all entries for ten years."""
PROMPTS = {
    "copy": f"Copy this text word for word, but put each sentence into a line of its own:\n\n{COPIED}",
    "prose": "Write the first page of a story about a lighthouse keeper who finds a letter in the sand.",
    "long": "Continue this text:\n\n",
}
LONG, CONTEXT_SHARE = 2000, 0.5  # tokens of the text of prompt "long", and its maximum share of a small context
DRAFT_BITS = 4
WARM_UP = 24  # uncounted tokens of each method; meanwhile kernels compile and the policy sees some rounds


@dataclass(frozen=True)
class TimedMethod:
    """A method of generation.

    Attributes:
        write: yields mlx-lm's responses for the typed prompt, its tokens and the maximum number of tokens.
        weights: bytes of its arrays.
    """

    name: str
    write: Callable[[str, list[int], int], Iterator[Any]]
    weights: int


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
    names = ORDER if settings.full else SHORT
    try:
        with make_watch([], True, False) as watch:
            if settings.own_kernels:
                try_own_kernels(report, loaded, settings.full)
            methods = make_methods(loaded, report, names)
            wire(mx.get_active_memory())  # all methods, not one model
            with pseudo_terminal():
                write_series(settings, methods, loaded, report, watch, out)
        report.complete = True
    finally:
        if report.outputs or report.checks:
            summarise(report)
            save_report(out, report)
            show_page(report, out)
    return 1 if report.failed or any(row["wrong"] for row in [*report.checks, *report.kernels]) else 0


def try_own_kernels(report: MacReport, loaded: Loaded, every: bool) -> None:
    """Check and time this package's kernels, for this model or all; keep correct ones for this machine."""
    for row in check_all(None if every else stored_dtype(loaded.model)):
        report.checks.append(row)
    for row in prove_all(loaded.model):
        report.kernels.append(row)


# The model and the methods.


def generate_settings(model: str, gears: Ladder | None = None, **mode: Any) -> JustGears:
    """Return the settings of `gearbx_mlx generate --model MODEL`, with these gears and mode flags."""
    return JustGears(ModelSettings(model), LayoutSettings(gears=gears), mode=ModeFlags(**mode))


def load_as_mlx_lm(name: str) -> Loaded:
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


def make_methods(loaded: Loaded, report: MacReport, names: Sequence[str]) -> list[TimedMethod]:
    """Return the named methods that fit into memory, and record the others. All share the arrays of one model."""
    base, tokenizer = twin(loaded.model), loaded.tokenizer
    whole, found, typed = held([base]), list[TimedMethod](), partial(generate_settings, loaded.name)

    def add(name: str, write: Callable[[str, list[int], int], Iterator[Any]], weights: int) -> None:
        if name in names:
            found.append(TimedMethod(name, write, weights))

    def fits(bits: int, *some: str) -> bool:
        needed = whole * bits // 16
        over = mx.get_active_memory() + needed - most_memory()
        for name in {*some} & {*names} if over > 0 else ():
            report.left_out[name] = f"it needs {human_bytes(needed)}, {human_bytes(over)} more than available"
        return over <= 0 and not {*some}.isdisjoint(names)

    add(MLX_LM, partial(by_mlx_lm, base, tokenizer), whole)
    default = in_gears(loaded, typed(), twin(base))
    weights = held_in_gears(default.gearbox)
    add(DEFAULT, partial(by_gearbx, default, None), weights)
    for tokens, name in FIXED.items():
        if len(default.gearbox.ladder) > 1:
            add(name, partial(by_gearbx, default, Lossless(draft_length=tokens)), weights)
        elif name in names:
            report.left_out[name] = f"the default has one gear, of {default.gearbox.ladder} bits"
    if fits(DRAFT_BITS, *BY_DRAFT_MODEL.values()):
        draft = quantized(twin(base))
        for tokens, name in BY_DRAFT_MODEL.items():
            how = {"draft_model": draft, "num_draft_tokens": tokens}
            add(name, partial(by_mlx_lm, base, tokenizer, **how), held([base, draft]))
    for bits, name in reversed(ONE_GEAR.items()):  # the largest first, the most likely choice
        more = {LOOKUP_GEAR: Lossless()} if bits == DRAFT_BITS else {}
        if fits(bits, name, *more):
            geared = in_gears(loaded, typed(Ladder((bits,)), mode="static"), twin(base))
            for each, mode in {name: None, **more}.items():
                add(each, partial(by_gearbx, geared, mode), held_in_gears(geared.gearbox))
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
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, most, **how):
        print(response.text, end="", flush=True)
        yield response


def by_gearbx(geared: Geared, mode: Mode | None, typed: str, prompt: list[int], most: int) -> Iterator[Any]:
    """Generate as `gearbx_mlx generate` does. mode: replaces the flags' mode."""
    gearbox, tokenizer = geared.gearbox, geared.loaded.tokenizer
    keywords = generation_keywords(SamplingSettings(), CacheSettings(), tokenizer)
    mode = geared.mode(typed, mode).resolved(gearbox, tokenizer, prompt)
    out = TintedText([gear.name for gear in gearbox.ladder])
    for response in stream_generate(gearbox.model, tokenizer, prompt, most, mode=mode, gearbox=gearbox, **keywords):
        out.write(response.text, writer_of(response))
        yield response


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[None]:
    """Replace stdout by a terminal of which a thread reads all that is written."""
    reader, writer = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the end, on Linux
            while os.read(reader, 4096):
                pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        with open(writer, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            yield
    finally:
        thread.join(1)
        os.close(reader)


# The prompts.


def prompts_for(loaded: Loaded) -> dict[str, str]:
    """Return the typed prompts; the long one has LONG tokens of text, or less in a small context."""
    limit = int(min(LONG, CONTEXT_SHARE * (context_length(dict(loaded.config)) or LONG / CONTEXT_SHARE)))
    words, tokenizer = "\n\n".join(read_documents(CALIBRATION)), loaded.tokenizer
    long = tokenizer.decode(tokenizer.encode(words[: 8 * limit], add_special_tokens=False)[:limit])
    return PROMPTS | {"long": PROMPTS["long"] + long}


# The outputs.


def write_series(
    settings: MacBenchmark, methods: Sequence[TimedMethod], loaded: Loaded, report: MacReport, watch: Watch, out: Path
) -> None:
    """Generate series of outputs until the next one would exceed the time limit. The file has every complete turn.

    Raises:
        GearbxError: mlx-lm itself fails.
    """
    typed = prompts_for(loaded)
    prompts = {name: encode_prompt(PromptSettings(), loaded.tokenizer, text) for name, text in typed.items()}
    start = time.perf_counter()
    keep_whole_turns(report, methods)
    written = {(output.series, output.prompt) for output in report.outputs}
    warm_up(methods, prompts, settings.tokens, report)
    for series in itertools.count():
        series_start = time.perf_counter()
        with progress_bar() as progress:
            task = progress.add_task(f"outputs of series {series + 1}", total=len(prompts) * (len(methods) + 1))
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
    names = Counter([MLX_LM, *(method.name for method in methods)])
    failed = Counter({*report.failed})
    turns: dict[tuple[int, str], Counter[str]] = {}
    for output in report.outputs:
        turns.setdefault((output.series, output.prompt), Counter())[output.method] += 1
    whole = {turn for turn, there in turns.items() if there + failed >= names}
    report.outputs = [output for output in report.outputs if (output.series, output.prompt) in whole]


def warm_up(methods: Sequence[TimedMethod], prompts: Mapping[str, list[int]], most: int, report: MacReport) -> None:
    """Generate uncounted tokens with each method, and print the expected time of a series."""
    name, prompt = next(iter(prompts.items()))
    outputs, first = (len(methods) + 1) * len(prompts), min(most, WARM_UP)
    note(
        f"series: {outputs} outputs ({len(methods)} methods, mlx-lm twice, {len(prompts)} prompts) of at most {most} "
        f"tokens, up to {outputs * most:,} forward passes, and up to {len(methods) * first:,} for warm-up"
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
    """Generate one output with each method: mlx-lm first and last, the others in alternating order."""
    baseline, *others = methods
    expected: list[int] = []
    for method in [baseline, *(others if series % 2 == 0 else reversed(others)), baseline]:
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
        first, before_it = time.perf_counter(), copy.copy(reads)
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
        reads=reads.count - before_it.count,
        waited=reads.seconds - before_it.seconds,
        queued=reads.queued - before_it.queued,
        memory=method.weights + max(0, mx.get_peak_memory() - before),
    )
    return output, tokens
