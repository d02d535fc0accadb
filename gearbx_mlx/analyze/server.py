"""See which gears the model of a server would use, from the few log-probabilities that it shows of each token."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.gate import Routing, check_routing, initial_gear, routing_for
from ..cli.prompt import PromptSettings, check_prompt, read_prompts
from ..errors import GearbxError
from ..gears.ladder import DEFAULT_LADDER, Ladder
from ..routing.bounds import BoundedRouting, entropy_bounds, rounding_of
from ..routing.gates import Monitor, ThresholdFile, ThresholdGate
from ..serving import ASSUMED_VOCABULARY
from ..serving.remote import Connection, Question, RemoteServer, RemoteToken
from ..telemetry.report import UNDECIDED, IntervalTally, interval_record
from ..telemetry.trace import TraceWriter
from . import AnalyzeSettings
from .report import Analysis, check_output, make_output, write_report


@dataclass(frozen=True)
class VocabularySize:
    """Its size V, and where that comes from."""

    size: int
    source: str


@dataclass
class Recorded:
    """What was recorded, of every prompt so far. prompts: how many were asked."""

    tally: IntervalTally
    records: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    seconds: float = 0.0
    complete: bool = False
    error: GearbxError | None = None

    def add(self, entry: dict[str, Any]) -> None:
        """Take the record of the next token."""
        same = self.records and self.records[-1]["prompt"] == entry["prompt"]
        self.tally.add(entry, self.records[-1] if same else None)
        self.records.append(entry)


def analyzed(settings: AnalyzeSettings) -> Analysis:
    """Run the prompts, and write trace, summary and pictures; where the server fails, as far as they came."""
    ladder = settings.ladder.gears or Ladder.parse(DEFAULT_LADDER)
    check_routing(settings.routing, ladder)
    texts = read_prompts(Path(settings.analysis.prompts))[: settings.analysis.num_prompts]
    questions = [question_of(settings.prompt, text) for text in texts]
    out = Path(settings.analysis.out)
    check_output(out)
    given = settings.server
    assert given.server is not None
    with Connection(given.server, given.key, given.server_timeout) as connection:
        server = RemoteServer(connection, given.server_model, given.server_api)
        vocabulary = vocabulary_of(settings, server)
        routing = routing_for(settings.routing, settings.gate, ladder, vocabulary.size, str)
        gates = [gate_for(routing, vocabulary, first_of(settings, ladder, text)) for text in texts]
        server.way = server.learn(questions[0])
        trace = make_output(out)
        found = record_answers(server, questions, gates, vocabulary, ladder, settings.prompt.max_tokens, trace)
        result = summary_of(server, found, vocabulary, ladder, routing)
    files = write_report(out, result, found.records, [gear.name for gear in ladder], routing.thresholds)
    return Analysis(result, files, found.complete, found.error)


def question_of(settings: PromptSettings, text: str) -> Question:
    check_prompt(text)
    return Question(text, not settings.ignore_chat_template, settings.system_prompt, settings.template_keywords())


def first_of(settings: AnalyzeSettings, ladder: Ladder, text: str) -> int:
    return ladder.find(initial_gear(settings.routing, ladder, text)).index


def gate_for(routing: Routing, vocabulary: VocabularySize, first: int) -> BoundedRouting:
    """Monitors and gates of a new text."""
    return BoundedRouting(
        lambda: Monitor(vocabulary.size, routing.window),
        lambda: ThresholdGate(routing.thresholds, routing.hysteresis, routing.min_gear_duration),
        first,
    )


def vocabulary_of(settings: AnalyzeSettings, server: RemoteServer) -> VocabularySize:
    """The size that is given, else the server's, else that of the thresholds, else an assumption, with a note."""
    if settings.server.vocab_size is not None:
        return VocabularySize(settings.server.vocab_size, "--vocab-size")
    size = server.vocab_size()
    if size is not None:
        return VocabularySize(size, "the server")
    if isinstance(settings.routing.source, ThresholdFile):
        return VocabularySize(settings.routing.source.vocab_size, "the thresholds")
    terminal.note(
        f"the server does not say how large the vocabulary is: {ASSUMED_VOCABULARY} is assumed, which makes upper "
        "bounds too high rather than too low; --vocab-size makes them tight"
    )
    return VocabularySize(ASSUMED_VOCABULARY, "assumed")


def record_answers(
    server: RemoteServer,
    questions: Sequence[Question],
    gates: Sequence[BoundedRouting],
    vocabulary: VocabularySize,
    ladder: Ladder,
    max_tokens: int,
    trace: Path,
) -> Recorded:
    """Ask every question, and write the trace as it comes."""
    found = Recorded(IntervalTally.of([gear.name for gear in ladder]))
    with (
        contextlib.suppress(KeyboardInterrupt),
        TraceWriter(trace) as writer,
        terminal.progress_bar() as progress,
    ):
        try:
            for number, question in enumerate(progress.track(questions, description="prompts")):
                started, found.prompts = time.monotonic(), number + 1
                answer = tokens_of(server, question, max_tokens)
                for entry in routed(answer, gates[number], number, vocabulary, ladder, server):
                    found.add(entry)
                    writer.write(entry)
                    found.seconds += time.monotonic() - started
                    started = time.monotonic()
            found.complete = True
        except GearbxError as error:
            found.error = error
    return found


def routed(
    tokens: Iterator[RemoteToken],
    gate: BoundedRouting,
    number: int,
    vocabulary: VocabularySize,
    ladder: Ladder,
    server: RemoteServer,
) -> Iterator[dict[str, Any]]:
    """The records of the tokens after a prompt. Raises RemoteError as `tokens_of` and `bounds_of`."""
    before = None
    for index, token in enumerate(tokens):
        entropies = bounds_of(token, vocabulary, f"prompt {number + 1}, token {index + 1}", server)
        seen = gate.update(entropies)
        low, high = (ladder[gear].name for gear in seen.gears)
        gear = UNDECIDED if len(seen.possible) > 1 else low
        bounds = {"entropy": entropies, "mean_entropy": seen.means, "gear": (low, high)}
        entry = interval_record(number, index, token.number, token.text, gear, bounds, before)
        yield entry
        before = entry["gear"]


def tokens_of(server: RemoteServer, question: Question, max_tokens: int) -> Iterator[RemoteToken]:
    """The tokens of an answer, `max_tokens` at most, whatever the server does.

    Raises:
        RemoteError: the server fails, or gives text without log-probabilities.
    """
    count = 0
    with contextlib.closing(server.answer(question, max_tokens)) as chunks:
        for chunk in chunks:
            if chunk.text and not chunk.tokens and not chunk.finished:
                raise server.connection.error(f"gives no log-probabilities for {chunk.text!r}", "use another server")
            for token in chunk.tokens:
                yield token
                count += 1
                if count == max_tokens:
                    return


def bounds_of(token: RemoteToken, vocabulary: VocabularySize, place: str, server: RemoteServer) -> tuple[float, float]:
    """The bounds of a token's entropy in bits. Raises RemoteError for impossible log-probabilities."""
    try:
        return entropy_bounds(token.logprobs, vocabulary.size, rounding_of(token.logprobs), token.unlisted)
    except GearbxError as error:
        remedy = f"the vocabulary is {vocabulary.size} ({vocabulary.source}): if that is right, use another server"
        raise server.connection.error(f"{place}: {error}", remedy) from error


def summary_of(
    server: RemoteServer, found: Recorded, vocabulary: VocabularySize, ladder: Ladder, routing: Routing
) -> dict[str, Any]:
    """The object of summary.json."""
    assert server.way is not None
    return {
        "model": server.model,
        "mode": "telemetry-only",
        "server": server.connection.shown,
        "api": server.way.api,
        "top_logprobs": server.way.asked,
        "vocab_size": vocabulary.size,
        "vocab_size_source": vocabulary.source,
        "ladder": [{"name": gear.name, "bits": gear.bits, "bytes_per_weight": gear.bits / 8} for gear in ladder],
        **found.tally.summary(),
        "tokens_per_second": found.tally.tokens / found.seconds if found.seconds else 0.0,
        "prompts": found.prompts,
        "thresholds": list(routing.thresholds),
        "complete": found.complete,
        "error": None if found.error is None else str(found.error),
    }
