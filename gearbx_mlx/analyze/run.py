"""See which gears a file of prompts would use, without changing the model."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cli import terminal
from ..cli.gate import check_routing, initial_gear, route_fields
from ..cli.gears import LayoutSettings
from ..cli.loaded import load_model, room_for
from ..cli.prompt import encode_prompt, read_prompts
from ..cli.resolved import resolve_gears
from ..cli.tables import server_table, summary_table
from ..decoding.route import Route, TelemetryOnly
from ..decoding.stream import RunSpeed, stream_generate, summary_of
from ..gears.discovery import vocabulary
from ..gears.gearbox import Observer, model_fingerprint
from ..gears.in_place import own_codes
from ..gears.ladder import Ladder
from ..loading import model_name
from ..telemetry.summary import Tally
from ..telemetry.trace import TraceWriter, record
from . import AnalyzeSettings, server
from .report import Analysis, check_output, make_output, write_report


@dataclass(frozen=True)
class AnalyzedPrompt:
    """A prompt as tokens, how many may follow it, and the gear that it begins in."""

    tokens: list[int]
    length: int
    gear: str


@dataclass
class AnalyzedRun:
    """What was recorded, of every prompt so far."""

    tally: Tally
    speed: RunSpeed = field(default_factory=RunSpeed)
    records: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False


def run(settings: AnalyzeSettings) -> int:
    analysis = analysis_of(settings)
    terminal.messages.print((server_table if settings.server.server else summary_table)(analysis.summary))
    terminal.messages.print()
    for path in analysis.files:
        print(path)
    analysis.checked()
    return 0


def summary_of_analysis(settings: AnalyzeSettings) -> dict[str, Any]:
    """The content of summary.json, after writing the files."""
    return analysis_of(settings).checked().summary


def analysis_of(settings: AnalyzeSettings) -> Analysis:
    return analyzed(settings) if settings.server.server is None else server.analyzed(settings)


def analyzed(settings: AnalyzeSettings) -> Analysis:
    """Run the prompts, and write trace, summary and pictures; an interrupt writes them as far as they came."""
    asked = resolve_gears(settings.model, LayoutSettings(gears=settings.ladder.gears)).ladder
    texts = read_prompts(Path(settings.analysis.prompts))[: settings.analysis.num_prompts]
    out = Path(settings.analysis.out)
    check_output(out)
    model, tokenizer, config = load_model(settings.model)
    codes = own_codes(model)
    ladder = asked if codes is None or settings.ladder.gears is not None else codes.watched(asked)
    check_routing(settings.routing, ladder)
    fingerprint = partial(model_fingerprint, model)
    routing = route_fields(settings.routing, settings.gate, ladder, vocabulary(model), fingerprint)
    prompts = prompts_of(settings, texts, tokenizer, config, ladder)
    observer = Observer(model, ladder, dtype=settings.model.dtype)
    mode = TelemetryOnly(**routing).settled(observer, tokenizer, prompts[0].tokens)
    thresholds = mode.bits(observer)
    trace = make_output(out)
    mx.reset_peak_memory()
    found = record_prompts(prompts, observer, tokenizer, mode, trace)
    result = summary_of(model_name(settings.model.model), observer, mode, found.tally, found.speed)
    result |= {
        "prompts": len({entry["prompt"] for entry in found.records}),
        "thresholds": list(thresholds),
    }
    files = write_report(out, result, found.records, [gear.name for gear in ladder], thresholds)
    return Analysis(result, files, found.complete)


def prompts_of(
    settings: AnalyzeSettings, texts: Iterable[str], tokenizer: Any, config: dict, ladder: Ladder
) -> list[AnalyzedPrompt]:
    prompts = []
    for text in texts:
        tokens = encode_prompt(settings.prompt, tokenizer, text)
        length = room_for(config, len(tokens), settings.prompt.max_tokens)
        prompts.append(AnalyzedPrompt(tokens, length, initial_gear(settings.routing, ladder, text)))
    return prompts


def record_prompts(
    prompts: Sequence[AnalyzedPrompt], observer: Observer, tokenizer: Any, mode: Route, trace: Path
) -> AnalyzedRun:
    """Generate after each prompt, and write the trace as it comes."""
    found = AnalyzedRun(Tally.of([gear.name for gear in observer.ladder]))
    model = observer.model
    with (
        contextlib.suppress(KeyboardInterrupt),
        TraceWriter(trace) as writer,
        terminal.progress_bar() as progress,
    ):
        for number, prompt in enumerate(progress.track(prompts, description="prompts")):
            last = None
            own = replace(mode, initial_gear=prompt.gear)
            responses = stream_generate(model, tokenizer, prompt.tokens, prompt.length, mode=own, gearbox=observer)
            for index, response in enumerate(responses):
                found.records.append(record(index, response, {"prompt": number}))
                writer.write(found.records[-1])
                found.tally.add(response)
                last = response
            found.speed.add(last)
        found.complete = True
    return found
