"""The way of one request between two servers: who answers it, why, and what the client receives.

Until the first part of the answer has been sent, a server that fails is replaced by the other one.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...errors import GearbxError, one_line
from ...routing.pair import LARGE, SMALL
from ..remote.ways import OpenAIWay, after_silence, others
from .asking import about_logprobs, asked_whole, judged_by_stream
from .between import Between, Decision
from .failed import Declined, Failed
from .first_answer import Part, part_of
from .first_tokens import FirstTokens, by_prompt
from .handed_over import lengths_of
from .tagged import Tags, chunk_of

ANSWER = Generator[Any, None, None]  # bytes of events, or one whole answer


@dataclass
class Route:
    """One request and its answer.

    path: below /v1. body: as the client sent it. uncounted: servers whose failures nobody has counted yet. ways:
    to ask for log-probabilities that may still work for it.
    """

    between: Between
    path: str
    body: dict[str, Any]
    decision: Decision | None = None
    handed_over: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    uncounted: list[int] = field(default_factory=list)
    tags: Tags | None = None
    ways: list[OpenAIWay] = field(default_factory=list)

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def begun(self) -> bool:
        return self.tags is not None and self.tags.begun

    def answer(self) -> ANSWER:
        """The events of a stream, each with its blank line, or one whole answer.

        Raises:
            Failed: no server answers, or the one that had begun cuts its answer short.
            Declined: a server refuses the request itself.
        """
        self.decision = self.without_tokens()
        self.ways = [] if self.decision else self.between.ways.known(self.path)
        while self.decision is None:
            if not self.ways:
                self.decision = Decision(LARGE, "no logprobs")
            elif (way := self.ways[0]).streamed and judged_by_stream(self.body):
                yield from self.judged_stream(way)
                if self.begun:
                    return
            else:
                self.judged_whole(way)
        yield from self.decided(self.decision)

    def without_tokens(self) -> Decision | None:
        """What is decided before any token is written."""
        server = self.between.rule.by_itself()
        if server is not None:
            return Decision(server, "threshold")
        return Decision(LARGE, "prompt") if by_prompt(self.body) == LARGE else None

    # By the first tokens of the small server.

    def judged_stream(self, way: OpenAIWay) -> ANSWER:
        """Read the small server's stream until its tokens have decided, and give it all if it is to answer."""
        small = self.between.servers[SMALL]
        try:
            with small.events(self.path, {**self.body, **way.fields}) as events:
                held = list(self.first_events(events, way))
                if self.decision is not None and self.decision.server == SMALL:
                    yield from self.tagged(chain(held, events), self.decision, without_logprobs=True)
        except Failed as error:
            if self.begun:
                self.note(SMALL, error)
                raise
            self.decision = self.instead_of(SMALL, error)
        except Declined as error:
            self.learn_from(error, way, self.body)

    def first_events(self, events: Iterator[bytes], way: OpenAIWay) -> Iterator[bytes]:
        """The events up to the decision, which is made then; none where the server streams no log-probabilities."""
        first, text, plain = FirstTokens(self.between.rule), "", True
        small = self.between.servers[SMALL]
        for event in small.with_tokens(events, lambda: first.seen):
            yield event
            chunk = chunk_of(event, small)
            if chunk is None:
                continue
            part = self.part(chunk, way)
            if part.spoken and not part.bounds:
                self.silent(way, part, first)
                return
            self.take(first, part, way)
            text, plain = text + part.text, plain and part.plain
            if part.finish is not None or first.complete:
                self.decision = self.by(first, text if plain else "", part.finish)
                return
        raise small.failed("cut its stream short")

    def judged_whole(self, way: OpenAIWay) -> None:
        """Ask the small server for its first tokens alone, and decide by them."""
        small, first = self.between.servers[SMALL], FirstTokens(self.between.rule)
        try:
            part = self.part(small.ask(self.path, self.asked_whole(way.fields)), way)
        except Failed as error:
            self.decision = self.instead_of(SMALL, error)
            return
        except Declined as error:
            self.learn_from(error, way, self.asked_whole({}))
            return
        if part.spoken and not part.bounds:
            self.silent(way, part, first)
            return
        self.take(first, part, way)
        self.decision = self.by(first, part.text if part.plain else "", part.finish)

    def part(self, answer: dict[str, Any], way: OpenAIWay) -> Part:
        """Raises Failed for log-probabilities that no distribution has."""
        try:
            return part_of(answer, self.between.rule.vocab_size, way.asked)
        except GearbxError as error:
            raise self.between.servers[SMALL].failed(f"cannot be judged: {one_line(error)}") from error

    def by(self, first: FirstTokens, text: str, finish: str | None) -> Decision:
        """What the first tokens have decided; an answer that ended before has no need of another server.

        Args:
            finish: the reason for which the answer ends. "length" is no end, unless the client wants no more.
        """
        if not first.complete:
            wanted = min(lengths_of(self.body).values(), default=first.rule.min_gear_duration + 1)
            if finish != "length" or wanted <= first.rule.min_gear_duration:
                return Decision(SMALL, "finished", first.means)
            return Decision(LARGE, "no logprobs", first.means)
        undecided = first.choice is None
        server = LARGE if first.choice is None else first.choice
        return Decision(server, "undecided" if undecided else "entropy", first.means, text, first.seen)

    def asked_whole(self, fields: dict[str, Any]) -> dict[str, Any]:
        return asked_whole(self.body, self.between.rule.min_gear_duration, fields)

    def take(self, first: FirstTokens, part: Part, way: OpenAIWay) -> None:
        """Judge by the tokens of a part too."""
        for bounds in part.bounds:
            first.add(bounds)
        if part.bounds:
            self.between.ways.prove(self.path, way)

    def silent(self, way: OpenAIWay, part: Part, first: FirstTokens) -> None:
        """The answer has words without log-probabilities. Only those of plain text say what the server can do."""
        if part.plain and not first.seen:
            self.ways = after_silence(self.ways)
            self.between.ways.keep(self.path, self.ways)
        else:
            self.ways = [] if self.between.ways.proven(self.path, way) else after_silence(self.ways)

    def learn_from(self, error: Declined, way: OpenAIWay, without: dict[str, Any]) -> None:
        """Raises what the server says, unless it is about the log-probabilities that the client did not ask for.

        Args:
            without: the request without them, which shows that: an error may name the fields of any wrong request.
        """
        if not about_logprobs(error):
            raise error
        try:
            self.try_out(without)
        except Failed as failed:
            self.decision = self.instead_of(SMALL, failed)
            return
        self.ways = others(self.ways, way)
        self.between.ways.keep(self.path, self.ways)

    def try_out(self, body: dict[str, Any]) -> None:
        """Raises Declined, or Failed, where the small server does not answer a request."""
        small = self.between.servers[SMALL]
        if body.get("stream"):
            with small.events(self.path, body):
                return
        small.ask(self.path, body)

    # The answer.

    def decided(self, decision: Decision) -> ANSWER:
        """The answer of the server that was chosen, or of the other one where it fails."""
        try:
            yield from self.answer_of(decision)
        except Failed as error:
            if self.begun:
                self.note(decision.server, error)
                raise
            self.decision = self.instead_of(decision.server, error)
            try:
                yield from self.answer_of(self.decision)
            except Failed as second:
                self.note(self.decision.server, second)
                if self.begun:
                    raise
                raise Failed(f"{error}; {second}") from second

    def answer_of(self, decision: Decision) -> ANSWER:
        """The answer of a server, which goes on with the text of the small one if it can."""
        going_on = decision.server == LARGE and self.between.hand_over.body(
            self.path, self.body, decision.text, decision.tokens
        )
        if going_on:
            self.handed_over = decision.tokens
            try:
                yield from self.request(decision, going_on, decision.text)
                return
            except Declined:  # it does not go on with texts, or refuses the request itself, which it may say again
                self.handed_over = 0
        yield from self.request(decision, self.body)

    def request(self, decision: Decision, body: dict[str, Any], text: str = "") -> ANSWER:
        server = self.between.servers[decision.server]
        if self.streamed:
            with server.events(self.path, body) as events:
                yield from self.tagged(events, decision, text)
            return
        self.tags = Tags(server, decision.as_json(self.handed_over), text)
        yield self.tags.whole(server.ask(self.path, body))

    def tagged(
        self, events: Iterator[bytes], decision: Decision, text: str = "", without_logprobs: bool = False
    ) -> ANSWER:
        """The events as the client receives them. Raises Failed for a stream that ends before the answer does."""
        server = self.between.servers[decision.server]
        self.tags = tags = Tags(server, decision.as_json(self.handed_over), text, without_logprobs)
        early: list[bytes] = []  # comments before the first chunk, which wait for it: the answer has not begun
        for event in events:
            early.append(tags.event(event))
            if tags.begun:
                yield from early
                early.clear()
        if not (tags.begun and tags.finished):
            raise server.failed("cut its stream short")

    def instead_of(self, server: int, error: Failed) -> Decision:
        """The other server answers. Raises Failed where it must not, or failed too."""
        self.note(server, error)
        self.handed_over = 0
        if not self.between.fallback or len(self.failed) > 1:
            raise Failed("; ".join(self.failed.values())) from error
        return Decision(LARGE if server == SMALL else SMALL, "fallback", reason=str(error))

    def note(self, server: int, error: Failed) -> None:
        """A server failed, which is to be counted."""
        self.failed[server] = str(error)
        self.uncounted.append(server)
