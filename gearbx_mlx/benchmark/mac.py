"""Measure what a model gains on a Mac: mlx-lm alone and with a draft model, ours, and one gear, in one page and file.

Each way writes the same prompts' texts, one way after the other, so that heat and other programs slow all of them
alike, and is compared with the text that mlx-lm wrote in the same turn. A series is a text of each way for each prompt;
there are as many as there is time for. MLX's CPU and other GPUs can run it too.
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
BY_DRAFT_MODEL = {tokens: f"mlx-lm, {DRAFT_BITS}-bit drafts of {tokens}" for tokens in (2, 3, 4)}
FIXED = {tokens: f"ours, drafts of {tokens}" for tokens in (1, 2, 3, 4)}
AS_TYPED = "ours, as typed"
ONE_GEAR_WAYS = {bits: f"one gear of {bits} bits" for bits in (4, 6, 8)}
ORDER = (MLX_LM, *BY_DRAFT_MODEL.values(), *FIXED.values(), AS_TYPED, *ONE_GEAR_WAYS.values())

WARM_UP = 24  # tokens of each way that do not count: its kernels are compiled, and the policy sees some rounds


@dataclass(frozen=True)
class TimedWay:
    """A way to write a text.

    Attributes:
        write: what was typed, its tokens and the most tokens of the text, to mlx-lm's responses.
        weights: bytes of all arrays that it holds.
    """

    name: str
    write: Callable[[str, list[int], int], Iterator[Any]]
    weights: int


class MacText(msgspec.Struct):
    """A text that was written.

    Attributes:
        series, prompt, way: which.
        tokens, first_seconds: how many, and what the first took, with the prompt.
        seconds, rounds, reads, waited: after the first token: time; tokens that the model itself chose, which is one a
            round; how often Python read from the device, and the seconds that it waited there.
        memory: bytes, the way's weights and the most that the text took beside them.
        agreed: how many tokens at the beginning are those of mlx-lm's text. same: all of them are.
    """

    series: int
    prompt: str
    way: str
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
    """Names what has to be the same where a run goes on."""

    machine: str
    mlx: str
    mlx_lm: str
    gearbx_mlx: str
    model: str
    contents: str
    tokens: int


class MacReport(msgspec.Struct):
    """The file (docs/files.md)."""

    facts: MacFacts
    date: str
    dtype: str
    memory_bytes: int
    device: dict[str, Any]
    texts: list[MacText] = []
    ways: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    state: list[str] = []
    checks: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    verdict: list[str] = []
    line: str = ""
    complete: bool = False


def run(settings: MacBenchmark) -> int:
    """Measure, print one page and write the file. Returns 1 where a way fails or a kernel is wrong, else 0.

    Raises:
        GearbxError: no Metal for own kernels; a model that is no original, that cannot be loaded, or does not fit; a
            file that cannot be written.
    """
    out = output_path(settings.json)
    if settings.own_kernels:
        metal.check_available()
    if on_cpu():
        note("MLX computes on the CPU here: these figures say nothing of a GPU")
    loaded = load_as_mlx_lm(settings.model)
    report = resumed(out, new_report(settings, loaded))
    try:
        with make_watch([], True, False) as watch:
            if settings.own_kernels:
                try_own_kernels(report, loaded)
            write_series(settings, make_ways(loaded, report), loaded, report, watch, out)
        report.complete = True
    finally:
        if report.texts or report.checks:
            summarise(report)
            save_report(out, report)
            show_page(report, out)
    return 1 if report.failed or any(row["wrong"] for row in [*report.checks, *report.kernels]) else 0


def try_own_kernels(report: MacReport, loaded: Loaded) -> None:
    """Fill in what own kernels are worth here; what is right is kept for this machine."""
    for row in check_all():
        report.checks.append(row)
    for row in prove_all(loaded.model):
        report.kernels.append(row)


# The model, and the ways that it is used.


def as_typed(model: str | None, gears: Ladder | None = None, **mode: Any) -> JustGears:
    """Return the settings of `gearbx_mlx generate --model MODEL`, with these gears and flags of modes."""
    return JustGears(ModelSettings(model), LayoutSettings(gears=gears), mode=ModeFlags(**mode))


def load_as_mlx_lm(name: str | None) -> Loaded:
    """Return the model as loaded.

    Raises:
        GearbxError: one that is quantized or in gears, that does not fit into memory, or as `Loaded.of`.
    """
    decision = decided(as_typed(name))
    check_fits(model_name(name), decision.model.size)
    if not decision.model.original:
        raise GearbxError(f"{model_name(name)}: is quantized or has gears; give the original, of 16 bits a weight")
    return Loaded.of(decision)


def most_memory() -> int:
    """Return the bytes that weights may take here."""
    # The rest is for KV caches and what is computed.
    return int(0.9 * (recommended_memory() or available_memory() + mx.get_active_memory()))


def check_fits(name: str, size: int) -> None:
    """Raise GearbxError for a model of so many bytes that does not fit."""
    most = most_memory()
    if size > most:
        raise GearbxError(
            f"{name}: needs about {human_bytes(size)}, and its weights should have at most {human_bytes(most)} here; "
            "give a smaller model"
        )


def twin(model: nn.Module) -> nn.Module:
    """Return a model with modules of its own over the same arrays."""
    return copy.deepcopy(model, {id(array): array for _, array in tree_flatten(model.parameters())})


def make_ways(loaded: Loaded, report: MacReport) -> list[TimedWay]:
    """Return all ways that memory has room for, and note the others; one model's arrays serve all of them."""
    base, tokenizer = twin(loaded.model), loaded.tokenizer
    whole, found = held([base]), list[TimedWay]()

    def add(name: str, write: Callable[[str, list[int], int], Iterator[Any]], weights: int) -> None:
        found.append(TimedWay(name, write, weights))

    def fits(bits: int, *names: str) -> bool:
        needed = whole * bits // 16
        over = mx.get_active_memory() + needed - most_memory()
        for name in names if over > 0 else ():
            report.left_out[name] = f"it needs {human_bytes(needed)}, {human_bytes(over)} more than there is"
        return over <= 0

    add(MLX_LM, partial(by_mlx_lm, base, tokenizer), whole)
    typed = in_gears(loaded, as_typed(loaded.decision.settings.model.model), twin(base))
    weights = held_in_gears(typed.gearbox)
    add(AS_TYPED, partial(ours, typed, None), weights)
    for tokens, name in FIXED.items():
        if len(typed.gearbox.ladder) > 1:
            add(name, partial(ours, typed, Lossless(draft_length=tokens)), weights)
        else:
            report.left_out[name] = f"the default has one gear, of {typed.gearbox.ladder} bits"
    if fits(DRAFT_BITS, *BY_DRAFT_MODEL.values()):
        draft = quantized(twin(base))
        for tokens, name in BY_DRAFT_MODEL.items():
            how = {"draft_model": draft, "num_draft_tokens": tokens}
            add(name, partial(by_mlx_lm, base, tokenizer, **how), held([base, draft]))
    for bits, name in reversed(ONE_GEAR_WAYS.items()):  # the largest first, which most people would take
        if fits(bits, name):
            settings = as_typed(loaded.decision.settings.model.model, Ladder((bits,)), mode="static")
            geared = in_gears(loaded, settings, twin(base))
            add(name, partial(ours, geared, None), held_in_gears(geared.gearbox))
    return sorted(found, key=lambda way: ORDER.index(way.name))


def quantized(model: nn.Module) -> nn.Module:
    """Quantize the layers of a model to a draft's bits, in place, as mlx_lm.convert does."""

    def can_be(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % DEFAULT_GROUP_SIZE == 0

    nn.quantize(model, DEFAULT_GROUP_SIZE, DRAFT_BITS, class_predicate=can_be)
    mx.eval(model.parameters())
    return model


def in_gears(loaded: Loaded, settings: JustGears, model: nn.Module) -> Geared:
    """Return a model, with modules of its own, in the gears that these settings decide."""
    decision = decide(settings, loaded.decision.model)
    return Loaded(decision, model, loaded.tokenizer, loaded.config).in_gears()


def held(models: Sequence[nn.Module]) -> int:
    """Return the bytes of the arrays of models, those that they share once."""
    arrays = {id(array): array for model in models for _, array in tree_flatten(model.parameters())}
    return sum(array.nbytes for array in arrays.values())


def held_in_gears(gearbox: Any) -> int:
    """Return the bytes of the arrays of all gears, those that they share once."""
    arrays: dict[int, mx.array] = {}
    before = gearbox.gear
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        arrays |= {id(array): array for _, array in tree_flatten(gearbox.model.parameters())}
    gearbox.shift(before)
    return sum(array.nbytes for array in arrays.values())


def by_mlx_lm(model: nn.Module, tokenizer: Any, typed: str, prompt: list[int], most: int, **how: Any) -> Iterator[Any]:
    """Write a text as mlx_lm.generate does."""
    yield from mlx_lm.stream_generate(model, tokenizer, prompt, most, **how)


def ours(geared: Geared, mode: Mode | None, typed: str, prompt: list[int], most: int) -> Iterator[Any]:
    """Write a text as `gearbx_mlx generate` does; `mode` replaces that of the flags."""
    gearbox, tokenizer = geared.gearbox, geared.loaded.tokenizer
    keywords = generation_keywords(SamplingSettings(), CacheSettings(), tokenizer)
    mode = geared.mode(typed, mode).settled(gearbox, tokenizer, prompt)
    yield from stream_generate(gearbox.model, tokenizer, prompt, most, mode=mode, gearbox=gearbox, **keywords)


# The texts.


def write_series(
    settings: MacBenchmark, ways: Sequence[TimedWay], loaded: Loaded, report: MacReport, watch: Watch, out: Path
) -> None:
    """Write series of texts until the next one would end too late; the file has every turn that is complete.

    Raises:
        GearbxError: mlx-lm alone cannot write.
    """
    prompts = {name: encode_prompt(PromptSettings(), loaded.tokenizer, text) for name, text in PROMPTS.items()}
    begun = time.perf_counter()
    keep_whole_turns(report, ways)
    written = {(text.series, text.prompt) for text in report.texts}
    warm_up(ways, prompts, settings.tokens, report)
    for series in itertools.count():
        began = time.perf_counter()
        with progress_bar() as progress:
            task = progress.add_task(f"texts of series {series + 1}", total=len(prompts) * len(ways))
            for name, prompt in prompts.items():
                most = room_for(loaded.config, len(prompt), settings.tokens)
                for _ in () if (series, name) in written else write_turn(ways, series, name, prompt, most, report):
                    progress.advance(task)
                save_report(out, report)
        report.state.append(str(watch.state()))
        now = time.perf_counter()
        if now - begun + now - began > 60 * settings.minutes:
            return


def keep_whole_turns(report: MacReport, ways: Sequence[TimedWay]) -> None:
    """Leave out texts of a turn that was interrupted: only what was written close together is compared."""
    names = {way.name for way in ways}
    turns: dict[tuple[int, str], set[str]] = {}
    for text in report.texts:
        turns.setdefault((text.series, text.prompt), set()).add(text.way)
    whole = {turn for turn, there in turns.items() if there | report.failed.keys() >= names}
    report.texts = [text for text in report.texts if (text.series, text.prompt) in whole]


def warm_up(ways: Sequence[TimedWay], prompts: Mapping[str, list[int]], most: int, report: MacReport) -> None:
    """Write some tokens in each way that do not count, and say how long a series takes."""
    name, prompt = next(iter(prompts.items()))
    texts, first = len(ways) * len(prompts), min(most, WARM_UP)
    note(
        f"a series has {texts} texts ({len(ways)} ways, {len(prompts)} prompts) of at most {most} tokens: up to "
        f"{texts * most:,} forward passes, and up to {len(ways) * first:,} to warm up"
    )
    with progress_bar() as progress:
        for way in progress.track(ways, description="ways warmed up"):
            with noting_failure(report, way.name):
                text, _ = timed_text(way, 0, name, prompt, first)
                if way.name == MLX_LM and text.tokens > 1:
                    minutes = expected_seconds(text, texts, most) / 60
                    note(f"a series takes about {minutes:.2g} minutes at mlx-lm's speed; Ctrl-C keeps what is measured")


def expected_seconds(text: MacText, texts: int, tokens: int) -> float:
    """Return the seconds for so many texts of so many tokens at the speed of one text."""
    return texts * (text.first_seconds + (tokens - 1) / text.speed)


def write_turn(
    ways: Sequence[TimedWay], series: int, name: str, prompt: list[int], most: int, report: MacReport
) -> Iterator[None]:
    """Write a text in each way, mlx-lm alone first, the others forwards and backwards by turns."""
    alone, *others = ways
    wanted: list[int] = []
    for way in [alone, *(others if series % 2 == 0 else reversed(others))]:
        if way.name not in report.failed:
            with noting_failure(report, way.name):
                text, tokens = timed_text(way, series, name, prompt, most)
                wanted = wanted or tokens
                same = [one == other for one, other in zip(tokens, wanted)]
                text.agreed, text.same = [*same, False].index(False), tokens == wanted
                report.texts.append(text)
        yield


@contextlib.contextmanager
def noting_failure(report: MacReport, name: str) -> Iterator[None]:
    """Note that a way cannot write, and go on with the others. Raises GearbxError where that is mlx-lm alone."""
    try:
        yield
    except (GearbxError, RuntimeError, ValueError, NotImplementedError) as error:
        if name == MLX_LM:
            raise GearbxError(f"{report.facts.model}: mlx-lm cannot write with it here ({one_line(error)})") from error
        report.failed[name] = one_line(error)


def timed_text(way: TimedWay, series: int, name: str, prompt: list[int], most: int) -> tuple[MacText, list[int]]:
    """Write a text, and return what it took, and its tokens."""
    mx.reset_peak_memory()
    before, rounds = mx.get_active_memory(), 0
    with counting_reads() as reads:
        start = time.perf_counter()
        steps = way.write(PROMPTS[name], prompt, most)
        tokens = [next(steps).token]
        first, reads_before, waited_before = time.perf_counter(), reads.count, reads.seconds
        for step in steps:
            tokens.append(step.token)
            rounds += getattr(step, "source", DRAFT if step.from_draft else MODEL) not in (DRAFT, LOOKUP)
        end = time.perf_counter()
    text = MacText(
        series=series,
        prompt=name,
        way=way.name,
        tokens=len(tokens),
        first_seconds=first - start,
        seconds=end - first,
        rounds=rounds,
        reads=reads.count - reads_before,
        waited=reads.seconds - waited_before,
        memory=way.weights + max(0, mx.get_peak_memory() - before),
    )
    return text, tokens


# The file.


def new_report(settings: MacBenchmark, loaded: Loaded) -> MacReport:
    """Return a report of this machine and model, without texts."""
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
    """Return the report with the texts of a file that a run of the same kind left unfinished; say why not of others."""
    if not file.is_file():
        return report
    try:
        before = read_json(file, MacReport, "a report of benchmark mac", "it is not used, and is written anew")
    except GearbxError as error:
        note(str(error))
        return report
    now, then = (msgspec.structs.asdict(each.facts) for each in (report, before))
    for name in now:
        if then[name] != now[name]:
            what = f"{name.replace('_', '-')} {then[name]}, and here it is {now[name]}"
            note(f"{file}: measured with {what}: it is not used, and is written anew")
            return report
    if not before.complete:
        note(f"{file}: goes on after {len(before.texts)} texts of an interrupted run")
        report.texts, report.state, report.failed = before.texts, before.state, before.failed
    return report


def save_report(file: Path, report: MacReport) -> None:
    """Write the file. Raises GearbxError where it cannot be written."""
    write_text(file, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def summarise(report: MacReport) -> None:
    """Fill in what follows from the texts: a row for each way, the verdict, and the line for an issue."""
    timed = [text for text in report.texts if text.tokens > 1]
    alone = {(text.series, text.prompt): text for text in timed if text.way == MLX_LM}
    report.ways = []
    for name in ORDER:
        texts = [text for text in timed if text.way == name and (text.series, text.prompt) in alone]
        if texts:
            report.ways.append(way_row(name, texts, [alone[text.series, text.prompt] for text in texts]))
    rows = {row["way"]: row for row in report.ways}
    report.verdict, report.line = verdict(report, rows), line(report, rows)


def way_row(name: str, texts: Sequence[MacText], alone: Sequence[MacText]) -> dict[str, Any]:
    """Return medians over the texts of a way. alone: what mlx-lm wrote in the turn of each."""
    ratios = [text.speed / other.speed for text, other in zip(texts, alone)]
    rounds, seconds = (sum(getattr(text, what) for text in texts) for what in ("rounds", "seconds"))
    return {
        "way": name,
        "texts": len(texts),
        "tokens_per_second": statistics.median(text.speed for text in texts),
        "ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "tokens_a_round": sum(text.tokens - 1 for text in texts) / max(rounds, 1),
        "reads_a_round": sum(text.reads for text in texts) / max(rounds, 1),
        "host_share": 1 - sum(text.waited for text in texts) / seconds,
        "first_seconds": statistics.median(text.first_seconds for text in texts),
        "memory_bytes": max(text.memory for text in texts),
        "same": sum(text.same for text in texts),
        "agreed": min(text.agreed for text in texts),
    }


# The page.


def show_page(report: MacReport, file: Path) -> None:
    """Print the tables, what is missing, the verdict and the line for an issue."""
    facts, series = report.facts, len({text.series for text in report.texts})
    print(f"{facts.machine}, {human_bytes(report.memory_bytes)}; {versions_of(facts)}; {report.date}")
    print(f"{facts.model}, {report.dtype}: {len(PROMPTS)} prompts, {facts.tokens} tokens, {series} series\n")
    tables = [[shown_row(row) for row in report.ways]]
    if report.kernels:
        tables.append(in_short(report.kernels))
    for table in filter(None, tables):
        print_table(table, [*table[0]])
        print()
    for what, reasons in {"left out": report.left_out, "failed": report.failed}.items():
        for name, reason in reasons.items():
            print(f"{what}: {name}: {reason}")
    for wrong in [each for row in report.checks for each in row["wrong"]]:
        print(f"wrong: {wrong}")
    print(f"state of the machine after each series: {'; '.join(dict.fromkeys(report.state)) or 'not read'}")
    if report.verdict:
        print("\n" + " ".join(report.verdict))
    print(f"\nFor an issue, with {file}:\n{report.line}", flush=True)


def versions_of(facts: MacFacts) -> str:
    return f"mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, gearbx-mlx {facts.gearbx_mlx}"


def shown_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a way, by the heads of the table."""
    agreed = "" if row["same"] == row["texts"] else f", else {row['agreed']}+ alike"
    return {
        "way": row["way"],
        "tokens/s": f"{row['tokens_per_second']:.3g}",
        "of mlx-lm": f"{row['ratio']:.2f}",
        "from, to": "-".join(f"{each:.2f}" for each in row["spread"]),
        "tokens/round": f"{row['tokens_a_round']:.2f}",
        "reads/round": f"{row['reads_a_round']:.2f}",
        "host": f"{row['host_share']:.0%}",
        "first": f"{row['first_seconds']:.2f} s",
        "memory": human_bytes(row["memory_bytes"]),
        "same text": f"{row['same']} of {row['texts']}{agreed}",
    }


Rows = Mapping[str, Mapping[str, Any]]
"""Name of a way to its row."""


def verdict(report: MacReport, rows: Rows) -> list[str]:
    """Return what the figures say, in three sentences; less where ways were not written."""
    found = []
    if AS_TYPED in rows:
        row, alone = rows[AS_TYPED], rows[MLX_LM]
        ratio, (least, greatest) = row["ratio"], row["spread"]
        word = "gains" if ratio > 1.05 else "loses" if ratio < 0.97 else "neither gains nor loses"
        found.append(
            f"As typed, {report.facts.model} {word}: {ratio:.2f} ({least:.2f} to {greatest:.2f}) times mlx-lm's "
            f"{alone['tokens_per_second']:.3g} tokens/s, with mlx-lm's text in {row['same']} of {row['texts']}."
        )
    drafts = {what: best(rows, names) for what, names in (("ours", FIXED), ("mlx-lm's", BY_DRAFT_MODEL))}
    told = [f"{what} {row['ratio']:.2f} with {tokens}" for what, (tokens, row) in drafts.items() if row]
    if told:
        found.append(f"Of drafts of a fixed number of tokens, the best are {' and '.join(told)}.")
    gears = [f"{bits} bits {rows[name]['ratio']:.2f}" for bits, name in ONE_GEAR_WAYS.items() if name in rows]
    if gears:
        found.append(f"One gear, with a text of its own, has {', '.join(gears)} times mlx-lm's speed.")
    return found


def best(rows: Rows, names: Mapping[int, str]) -> tuple[int, Mapping[str, Any]]:
    """Return the number of tokens whose way is the fastest, and its row; 0 and nothing without rows."""
    there = {tokens: rows[name] for tokens, name in names.items() if name in rows}
    return max(there.items(), key=lambda item: item[1]["ratio"], default=(0, {}))


def line(report: MacReport, rows: Rows) -> str:
    """Return everything that matters in one line."""
    facts = report.facts

    def told(what: str, names: Mapping[Any, str]) -> str:
        ratios = (f"{key}{rows[name]['ratio']:.2f}" for key, name in names.items() if name in rows)
        return " ".join([what, *ratios])

    def numbered(names: Mapping[int, str]) -> dict[str, str]:
        return {f"{number}:": name for number, name in names.items()}

    parts = [
        f"{facts.machine}, {human_bytes(report.memory_bytes)}",
        versions_of(facts),
        f"{facts.model} {report.dtype}",
        f"mlx-lm {rows[MLX_LM]['tokens_per_second']:.3g} tokens/s" if MLX_LM in rows else "no texts",
        told("as typed", {"": AS_TYPED}),
        told("drafts", numbered(FIXED)),
        told("draft model", numbered(BY_DRAFT_MODEL)),
        told("bits", numbered(ONE_GEAR_WAYS)),
        f"same text {rows.get(AS_TYPED, {}).get('same', 0)}/{rows.get(AS_TYPED, {}).get('texts', 0)}",
        f"{report.state[-1] if report.state else 'state not read'}",
        f"{len(report.failed)} failed, {len(report.left_out)} left out" + ("" if report.complete else ", interrupted"),
    ]
    return " | ".join(parts)
