"""Analysis of the gears that prompts would use, for a local model without shifts, or one behind a server.

A server lists a few log-probabilities of each token; they bound its entropy.
"""

import asyncio
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cli import terminal
from ..cli.build import Loaded, decided
from ..cli.decide import JustGears, check_in_ladder
from ..cli.flags import GearFlags, LayoutSettings, ModeFlags, output_path
from ..cli.prompt import check_prompt, encoded_prompts, read_prompts
from ..cli.signals import in_whole
from ..cli.start import needing
from ..cli.tables import server_table, summary_table
from ..decoding.mode import thresholds_for
from ..decoding.modes import TELEMETRY_ONLY, make_mode
from ..decoding.route import SHORT_PROMPTS, Route
from ..decoding.stream import RunSpeed, stream_generate, summary_of
from ..errors import GearbxError, GearbxWarning
from ..files.writing import check_directory, make_directory, write_text
from ..gears.ladder import DEFAULT_LADDER, DENSE, Ladder
from ..routing.bounds import BoundedRouting
from ..routing.gates import Monitor, ReadThresholds, ThresholdGate, thresholds_in_bits
from ..server.logprobs import ASSUMED_VOCABULARY, RemoteError
from ..telemetry.agreement import AGREEMENT_PICTURE, TokenAgreement, borrowed, borrowed_sentence, draw_agreement
from ..telemetry.summary import Tally, as_json
from ..telemetry.trace import BOUNDS, PICTURES, UNDECIDED, IntervalTally, TraceWriter, draw_report, get_pyplot, record
from . import AnalyzeSettings
from .reference import bits_of, measured_agreement

if TYPE_CHECKING:
    from ..server.logprobs import ListedToken
    from ..server.others import Question, RemoteServer

TRACE, SUMMARY = "trace.jsonl", "summary.json"


def run(settings: AnalyzeSettings) -> int:
    analysis = analysis_of(settings)
    terminal.messages.print((server_table if settings.server.server else summary_table)(analysis.summary))
    terminal.messages.print()
    if analysis.summary.get("agreement"):
        terminal.note(f"agreement: {analysis.summary['agreement']['sentence']}")
    for path in analysis.files:
        print(path)
    analysis.checked()
    return 0


def summary_of_analysis(settings: AnalyzeSettings) -> dict[str, Any]:
    """Return the content of summary.json, and write the files."""
    return analysis_of(settings).checked()


def analysis_of(settings: AnalyzeSettings) -> "AnalyzedRun":
    """Run the prompts, and write trace, summary and pictures, also of a run that ended early."""
    named = settings.analysis.prompts
    texts = (list(SHORT_PROMPTS) if named is None else read_prompts(Path(named)))[: settings.analysis.num_prompts]
    out = Path(settings.analysis.out)
    check_directory(out)
    if out.is_dir():
        for name in (TRACE, SUMMARY, *PICTURES, AGREEMENT_PICTURE):
            output_path(out / name)
    draws = can_draw()
    return (local_run if settings.server.server is None else remote_run)(settings, texts, out, draws)


# Files of an analysis.


def can_draw() -> bool:
    """Return whether matplotlib is installed; warn before the run if it is not."""
    try:
        get_pyplot()
    except GearbxError as error:
        warnings.warn(f"no pictures are drawn: {error}", GearbxWarning, stacklevel=2)
        return False
    return True


@dataclass(kw_only=True)
class AnalyzedRun:
    """Records of the prompts so far, and the written files; `error` ended the run early.

    draws: whether it draws pictures.
    """

    ladder: Ladder
    draws: bool
    records: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    error: RemoteError | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()

    def record(
        self, out: Path, prompts: Sequence[Any], entries: Callable[[int, Any], Iterator[dict[str, Any]]]
    ) -> None:
        """Write the trace as it comes, and delete pictures of an earlier run.

        entries: yields the records of the tokens after a prompt, as they come; prompts are numbered from 0.
        """
        make_directory(out)
        for name in (*PICTURES, AGREEMENT_PICTURE):
            (out / name).unlink(missing_ok=True)
        with (
            contextlib.suppress(KeyboardInterrupt),
            TraceWriter(output_path(out / TRACE)) as writer,
            terminal.progress_bar() as progress,
        ):
            try:
                for number, prompt in enumerate(progress.track(prompts, description="prompts")):
                    for entry in entries(number, prompt):
                        self.records.append(entry)
                        writer.write(entry)
                self.complete = True
            except RemoteError as error:
                self.error = error

    def write(
        self, out: Path, summary: dict[str, Any], thresholds: Sequence[float], agreement: TokenAgreement | None = None
    ) -> None:
        """Write summary and pictures beside the trace; no pictures of a trace without records."""
        self.summary = summary
        write_text(out / SUMMARY, as_json(summary))
        gears = [gear.name for gear in self.ladder]
        pictures = draw_report(self.records, gears, thresholds, out) if self.records and self.draws else []
        if agreement is not None and self.draws:
            draw_agreement(agreement, out / AGREEMENT_PICTURE)
            pictures.append(out / AGREEMENT_PICTURE)
        self.files = [out / TRACE, out / SUMMARY, *pictures]

    def checked(self) -> dict[str, Any]:
        """Return the summary, or raise the error that ended the run early; the records are already written."""
        if self.error is not None:
            raise self.error
        if not self.complete:
            raise KeyboardInterrupt
        return self.summary


# Local models.


def local_run(settings: AnalyzeSettings, texts: Sequence[str], out: Path, draws: bool) -> AnalyzedRun:
    """Analyze a local model. Raises GearbxError for a model, flags or prompts that cannot be analyzed."""
    flags = ModeFlags(mode=TELEMETRY_ONLY, **settings.mode.given())
    layout, gears = LayoutSettings(gears=settings.ladder.gears), GearFlags(kernels=settings.analysis.kernels)
    loaded = Loaded.of(decided(JustGears(settings.model, layout, gears, flags)))
    tokenizer, ladder = loaded.tokenizer, loaded.decision.ladder
    prompts = encoded_prompts(texts, settings.prompt, tokenizer, loaded.config)
    observer, routing = loaded.in_gears().gearbox, loaded.decision.mode
    assert isinstance(routing, Route)
    mode = routing.resolved(observer, tokenizer, prompts[0][0])
    thresholds = thresholds_for(mode.thresholds, observer)
    tally, speed = Tally.of([gear.name for gear in ladder]), RunSpeed()

    def entries(number: int, prompt: tuple[list[int], int]) -> Iterator[dict[str, Any]]:
        own = mode.for_prompt(texts[number], ladder)
        responses = stream_generate(loaded.model, tokenizer, *prompt, mode=own, gearbox=observer)
        for index, response in enumerate(in_whole(responses)):
            tally.add(response)
            yield record(index, response, {"prompt": number})
        speed.add(responses)

    wants = settings.reference.reference is not None
    agreement = measured_agreement(settings.model, settings.reference) if wants else None
    found = AnalyzedRun(ladder=ladder, draws=draws)
    mx.reset_peak_memory()
    found.record(out, prompts, entries)
    result = summary_of(loaded.name, observer, mode, tally, speed)
    result |= {"prompts": len({entry["prompt"] for entry in found.records}), "thresholds": list(thresholds)}
    result["agreement"] = agreement_part(agreement, bits_of(loaded.model), found.records)
    found.write(out, result, thresholds, agreement)
    return found


def agreement_part(
    measured: TokenAgreement | None, bits: int | None, records: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the summary's part about the original: measured, else of other models with as many bits, if any."""
    entropies = [entry["entropy"] for entry in records]
    if measured is not None:
        expected = {"expected_different": measured.differing(entropies)} if entropies else {}
        return {"source": "measured", "sentence": measured.sentence(), **expected, **measured.as_dict()}
    other = None if bits in (None, DENSE) else borrowed(bits, entropies)
    return None if other is None else {"source": "other models", "sentence": borrowed_sentence(other), **other}


# Models behind a server.


@dataclass(kw_only=True)
class RemoteRun(AnalyzedRun):
    """Records of a model behind a server.

    vocab_size, source: V, and its source in words. prompts: number of prompts sent so far.
    """

    settings: AnalyzeSettings
    server: "RemoteServer"
    model: str
    routing: Route
    thresholds: tuple[float, ...]
    vocab_size: int
    source: str
    tally: IntervalTally
    prompts: int = 0
    seconds: float = 0.0

    def entries(self, number: int, prompt: "Question") -> Iterator[dict[str, Any]]:
        """Yield records. Raises RemoteError for a server that fails, or without valid log-probabilities."""
        self.prompts, routing, before, started = number + 1, self.routing, None, time.monotonic()
        gate = BoundedRouting(
            lambda: Monitor(self.vocab_size, routing.window),
            lambda: ThresholdGate(self.thresholds, routing.hysteresis, routing.min_gear_duration),
            self.ladder.find(routing.for_prompt(prompt.prompt, self.ladder).initial_gear).index,
        )
        tokens = asyncio.run(self.server.answer(prompt, self.model, self.settings.prompt.max_tokens))
        self.seconds += time.monotonic() - started
        for index, token in enumerate(tokens):
            entropies = self.bounds(token, f"prompt {number + 1}, token {index + 1}")
            routed = gate.update(entropies)
            low, high = (self.ladder[gear].name for gear in routed.gears)
            gear = UNDECIDED if len(routed.possible) > 1 else low
            pairs = {"entropy": entropies, "mean_entropy": routed.means, "gear": (low, high)}
            entry: dict[str, Any] = {"prompt": number, "index": index, "token": token.number, "text": token.text}
            entry |= {f"{name}_{bound}": pair[i] for name, pair in pairs.items() for i, bound in enumerate(BOUNDS)}
            entry |= {"gear": gear, "shifted": before is not None and before["gear"] != gear}
            self.tally.add(entry, before)
            yield entry
            before = entry

    def bounds(self, token: "ListedToken", place: str) -> tuple[float, float]:
        """Return the bounds of a token's entropy in bits. Raises RemoteError for impossible log-probabilities."""
        try:
            return token.entropy(self.vocab_size)
        except GearbxError as error:
            remedy = f"the vocabulary is {self.vocab_size} ({self.source}): if it is right, use a different server"
            raise self.server.failed(f"{place}: {error}", remedy) from error

    def summed_up(self) -> dict[str, Any]:
        """Return the object of summary.json."""
        return {
            "model": self.model,
            "mode": "telemetry-only",
            "server": self.server.shown,
            "top_logprobs": self.server.num_logprobs,
            "vocab_size": self.vocab_size,
            "vocab_size_source": self.source,
            "ladder": [{"name": one.name, "bits": one.bits, "bytes_per_weight": one.bits / 8} for one in self.ladder],
            **self.tally.summary(),
            "tokens_per_second": self.tally.tokens / self.seconds if self.seconds else 0.0,
            "prompts": self.prompts,
            "thresholds": list(self.thresholds),
            "complete": self.complete,
            "error": None if self.error is None else str(self.error),
        }


def remote_run(settings: AnalyzeSettings, texts: Sequence[str], out: Path, draws: bool) -> RemoteRun:
    """Analyze a model behind a server. Raises GearbxError for invalid flags, or a server that does not answer."""
    with needing("server", "analyze --server"):
        others = import_module("gearbx_mlx.server.others")
    ladder = settings.ladder.gears or Ladder.parse(DEFAULT_LADDER)
    routing = make_mode(TELEMETRY_ONLY, settings.mode.given())
    assert isinstance(routing, Route)
    check_in_ladder(ModeFlags(**settings.mode.given()), ladder)
    given, chat, keywords = settings.server, settings.prompt, settings.prompt.template_keywords()
    for text in texts:
        check_prompt(text)
    questions = [others.Question(text, not chat.ignore_chat_template, chat.system_prompt, keywords) for text in texts]
    server = others.RemoteServer(given.server, given.key, given.server_timeout)
    model, reported = asyncio.run(server.model(given.server_model))
    size, source = size_of_vocabulary(settings, reported)
    found = RemoteRun(
        ladder=ladder,
        draws=draws,
        settings=settings,
        server=server,
        model=model,
        routing=routing,
        thresholds=thresholds_in_bits(routing.thresholds, [gear.bits for gear in ladder], size, str),
        vocab_size=size,
        source=source,
        tally=IntervalTally.of([gear.name for gear in ladder]),
    )
    found.record(out, questions, found.entries)
    found.write(out, found.summed_up(), found.thresholds)
    return found


def size_of_vocabulary(settings: AnalyzeSettings, reported: int | None) -> tuple[int, str]:
    """Return the given size of the vocabulary, else the server's, else the thresholds', else an assumption."""
    if settings.server.vocab_size is not None:
        return settings.server.vocab_size, "--vocab-size"
    if reported is not None:
        return reported, "the server"
    thresholds = settings.mode.thresholds
    if isinstance(thresholds, ReadThresholds) and thresholds.content.vocab_size is not None:
        return thresholds.content.vocab_size, "the thresholds"
    terminal.note(
        f"upper bounds may be too high: the server's vocabulary is unknown, and {ASSUMED_VOCABULARY} is assumed; "
        "set --vocab-size"
    )
    return ASSUMED_VOCABULARY, "assumed"
