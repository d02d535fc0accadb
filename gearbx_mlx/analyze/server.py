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


@dataclass
class Recorded:
    """What a server answered, of every prompt so far.

    vocab_size, source: V, and where that comes from. prompts: how many were asked. error: that ended the run.
    """

    server: RemoteServer
    ladder: Ladder
    routing: Routing
    vocab_size: int
    source: str
    tally: IntervalTally
    records: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    seconds: float = 0.0
    complete: bool = False
    error: GearbxError | None = None

    def ask(self, questions: Sequence[Question], settings: AnalyzeSettings, trace: Path) -> None:
        """Ask every question, and write the trace as it comes."""
        with (
            contextlib.suppress(KeyboardInterrupt),
            TraceWriter(trace) as writer,
            terminal.progress_bar() as progress,
        ):
            try:
                for question in progress.track(questions, description="prompts"):
                    started, self.prompts = time.monotonic(), self.prompts + 1
                    first = self.ladder.find(initial_gear(settings.routing, self.ladder, question.prompt)).index
                    for entry in self.routed(question, first, settings.prompt.max_tokens):
                        writer.write(entry)
                        self.seconds += time.monotonic() - started
                        started = time.monotonic()
                self.complete = True
            except GearbxError as error:
                self.error = error

    def routed(self, question: Question, first: int, max_tokens: int) -> Iterator[dict[str, Any]]:
        """The records of the tokens after a prompt, which begins in gear `first`. Raises RemoteError as `bounds`."""
        routing, before = self.routing, None
        gate = BoundedRouting(
            lambda: Monitor(self.vocab_size, routing.window),
            lambda: ThresholdGate(routing.thresholds, routing.hysteresis, routing.min_gear_duration),
            first,
        )
        for index, token in enumerate(tokens_of(self.server, question, max_tokens)):
            entropies = self.bounds(token, f"prompt {self.prompts}, token {index + 1}")
            seen = gate.update(entropies)
            low, high = (self.ladder[gear].name for gear in seen.gears)
            gear = UNDECIDED if len(seen.possible) > 1 else low
            pairs = {"entropy": entropies, "mean_entropy": seen.means, "gear": (low, high)}
            last = before and before["gear"]
            entry = interval_record(self.prompts - 1, index, token.number, token.text, gear, pairs, last)
            self.tally.add(entry, before)
            self.records.append(entry)
            yield entry
            before = entry

    def bounds(self, token: RemoteToken, place: str) -> tuple[float, float]:
        """The bounds of a token's entropy in bits. Raises RemoteError for impossible log-probabilities."""
        try:
            return entropy_bounds(token.logprobs, self.vocab_size, rounding_of(token.logprobs), token.unlisted)
        except GearbxError as error:
            remedy = f"the vocabulary is {self.vocab_size} ({self.source}): if that is right, use another server"
            raise self.server.connection.error(f"{place}: {error}", remedy) from error

    def summary(self) -> dict[str, Any]:
        """The object of summary.json."""
        assert self.server.way is not None
        return {
            "model": self.server.model,
            "mode": "telemetry-only",
            "server": self.server.connection.shown,
            "api": self.server.way.api,
            "top_logprobs": self.server.way.asked,
            "vocab_size": self.vocab_size,
            "vocab_size_source": self.source,
            "ladder": [{"name": one.name, "bits": one.bits, "bytes_per_weight": one.bits / 8} for one in self.ladder],
            **self.tally.summary(),
            "tokens_per_second": self.tally.tokens / self.seconds if self.seconds else 0.0,
            "prompts": self.prompts,
            "thresholds": list(self.routing.thresholds),
            "complete": self.complete,
            "error": None if self.error is None else str(self.error),
        }


def analyzed(settings: AnalyzeSettings) -> Analysis:
    """Run the prompts, and write trace, summary and pictures; where the server fails, as far as they came."""
    ladder = settings.ladder.gears or Ladder.parse(DEFAULT_LADDER)
    names = [gear.name for gear in ladder]
    check_routing(settings.routing, ladder)
    texts = read_prompts(Path(settings.analysis.prompts))[: settings.analysis.num_prompts]
    questions = [question_of(settings.prompt, text) for text in texts]
    out = Path(settings.analysis.out)
    check_output(out)
    given = settings.server
    assert given.server is not None
    with Connection(given.server, given.key, given.server_timeout) as connection:
        server = RemoteServer(connection, given.server_model, given.server_api)
        size, source = vocabulary_of(settings, server)
        routing = routing_for(settings.routing, settings.gate, ladder, size, str)
        found = Recorded(server, ladder, routing, size, source, IntervalTally.of(names))
        server.way = server.learn(questions[0])
        found.ask(questions, settings, make_output(out))
    result = found.summary()
    files = write_report(out, result, found.records, names, routing.thresholds)
    return Analysis(result, files, found.complete, found.error)


def question_of(settings: PromptSettings, text: str) -> Question:
    check_prompt(text)
    return Question(text, not settings.ignore_chat_template, settings.system_prompt, settings.template_keywords())


def vocabulary_of(settings: AnalyzeSettings, server: RemoteServer) -> tuple[int, str]:
    """The size that is given, else the server's, else that of the thresholds, else an assumption, with a note."""
    if settings.server.vocab_size is not None:
        return settings.server.vocab_size, "--vocab-size"
    size = server.vocab_size()
    if size is not None:
        return size, "the server"
    if isinstance(settings.routing.source, ThresholdFile):
        return settings.routing.source.vocab_size, "the thresholds"
    terminal.note(
        f"the server does not say how large the vocabulary is: {ASSUMED_VOCABULARY} is assumed, which makes upper "
        "bounds too high rather than too low; --vocab-size makes them tight"
    )
    return ASSUMED_VOCABULARY, "assumed"


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
