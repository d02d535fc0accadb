"""The way of one request between two servers: who answers it, why, and what the client receives.

Who answers is decided by the prompt, then by the entropy of the first tokens that the small server writes. The rule is
that of two models that take turns (routing/pair.py), at the first moment at which it lets go of the small model: after
`min_gear_duration` tokens, by the mean of the last `window`. Of a server's tokens the entropy is known within bounds;
the rule is applied to both. Servers differ in how they give log-probabilities, and the proxy learns it.

Until the first part of the answer has been sent, a server that fails is replaced by the other one.
"""

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from prometheus_client import Counter

from ...errors import GearbxError, one_line
from ...files.reading import typed
from ...routing.bounds import BoundedRouting, entropy_bounds, rounding_of
from ...routing.gates import first_gear
from ...routing.pair import LARGE, NAMES, SMALL, pair_gate, pair_monitor
from ..peer import LARGEST_ANSWER
from ..remote import Logprobs, Way, about_logprobs, after_silence, others, tokens_of, ways_to_ask
from .upstream import Declined, Event, Failed, Upstream

CHAT, TEXT = "/chat/completions", "/completions"
FORGET = 60.0  # seconds after which what a server could not do is tried again: it may be another one by then
SEVERAL_TEXTS = ("echo", "suffix", "best_of")  # whose logprobs would be of more than one answer
NOT_JUDGED = ("stream", "stream_options", "n", *SEVERAL_TEXTS)
LENGTHS = ("max_tokens", "max_completion_tokens")
ASKED = {"continue_final_message": True, "add_generation_prompt": False}
# Who a server says that owns its models -> the fields that make it go on with the assistant's message.
CONTINUES: dict[str, dict[str, bool]] = {"vllm": ASKED, "sglang": ASKED, "llamacpp": {}}
TRIMMING = ("basehttp/", "gearbx-mlx")  # mlx_lm.server, which bears the name of Python's own server, and ours
# Whose answer would not be one text: several answers, or what holds for the whole answer and sees only its end.
ONE_WRITER = (
    "logprobs",
    "echo",
    "suffix",
    "best_of",
    "response_format",
    "grammar",
    "json_schema",
    "structured_outputs",
)

Parts = AsyncIterator[Any]
"""Bytes of events, or one whole answer."""


# What the small server's first tokens say.


@dataclass(frozen=True)
class Rule:
    """When the large server answers.

    threshold: bits of mean entropy above which it does, 0 (always) to infinity (never). window: tokens in the mean.
    min_gear_duration: tokens that the small server writes before it is judged. vocab_size: of the small model, which
    bounds the entropy of the tokens that its server does not list.
    """

    threshold: float
    window: int
    min_gear_duration: int
    vocab_size: int


# What a client asks for.


def typed_last(body: dict[str, Any]) -> str:
    """The last message of a user, or the prompt of a text completion; "" where there is no text."""
    messages = body.get("messages")
    if isinstance(messages, list):
        own = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        return " ".join(texts(own[-1].get("content"))) if own else ""
    return " ".join(texts(body.get("prompt")))


def texts(content: Any) -> Iterator[str]:
    """The texts of a message or a prompt: a string, or a list of strings or of parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def judged_by_stream(body: Mapping[str, Any]) -> bool:
    """Whether the stream that a client asks for can be judged, and given to it then."""
    one = body.get("n") in (None, 1) and not any(body.get(name) for name in SEVERAL_TEXTS)
    return body.get("stream") is True and one and not body.get("logprobs")


def lengths_of(body: Mapping[str, Any]) -> dict[str, int]:
    """The most tokens that a client wants, under each name; 50.0 is 50."""
    found = {name: body[name] for name in LENGTHS if name in body}
    return {name: int(value) for name, value in found.items() if type(value) in (int, float) and value % 1 == 0}


# What came.


def choices_of(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices")
    yield from (one for one in choices if isinstance(one, dict)) if isinstance(choices, list) else ()


class ReportedToken(Struct):
    """A token of one of our servers, in a chunk's `gearbx`."""

    entropy: Annotated[float, Meta(ge=0)]


def reported(answer: dict[str, Any], vocab_size: int) -> tuple[tuple[float, float], ...]:
    """The entropies that one of our servers reports, which need no bounds; empty for any other server."""
    own = answer.get("gearbx")
    tokens = own.get("tokens") if isinstance(own, dict) else None
    if not isinstance(tokens, list):
        return ()
    entropies = [token.entropy for token in typed(tokens, list[ReportedToken])]
    if any(bits > math.log2(vocab_size) for bits in entropies):
        raise GearbxError(f"its entropies are impossible for a vocabulary of {vocab_size}")
    return tuple((bits, bits) for bits in entropies)


def bounds_of(logprobs: Any, vocab_size: int, asked: int) -> tuple[tuple[float, float], ...]:
    if not logprobs:
        return ()
    try:
        return tuple(
            entropy_bounds(token.logprobs, vocab_size, rounding_of(token.logprobs), token.unlisted)
            for token in tokens_of(typed(logprobs, Logprobs), asked)
            if token.logprobs
        )
    except GearbxError as error:
        raise GearbxError(f"its logprobs are impossible: {one_line(error)}") from error


class FirstTokens:
    """The first tokens of the small server, and what follows from them.

    Args:
        asked: how many log-probabilities of each token were asked for.

    seen: tokens. means: bounds of the mean over the window, in bits. choice: SMALL, LARGE, or None where the two bounds
    would choose differently. text: of the answer; plain: whether there is nothing beside it, such as calls of tools and
    thoughts. finish: the reason for which the answer has ended.
    """

    def __init__(self, rule: Rule, asked: int):
        self.rule, self.asked, self.seen = rule, asked, 0
        self.means: tuple[float, float] | None = None
        self.choice: int | None = SMALL
        self.text, self.plain = "", True
        self.finish: str | None = None
        self._routing = BoundedRouting(
            lambda: pair_monitor(rule.vocab_size, rule.window),
            lambda: pair_gate(rule.threshold, rule.min_gear_duration),
            first=SMALL,
            delay=0,
        )

    def take(self, answer: dict[str, Any]) -> bool:
        """Take a chunk of a stream, or a whole answer. Returns whether the tokens of what it says can be judged.

        Raises:
            GearbxError: log-probabilities that no distribution has.
        """
        choice = next((one for one in choices_of(answer) if one.get("index", 0) == 0), {})
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        if not isinstance(message, dict) or not isinstance(text := message.get("content") or "", str):
            raise GearbxError("its answer has no text")
        more = any(value for name, value in message.items() if name not in ("content", "role"))
        self.text, self.plain, self.finish = self.text + text, self.plain and not more, choice.get("finish_reason")
        size = self.rule.vocab_size
        found = reported(answer, size) or bounds_of(choice.get("logprobs"), size, self.asked)
        for bounds in found:
            if not self.complete:
                routed = self._routing.update(bounds)
                self.means = routed.means
                self.choice = min(routed.possible) if len(routed.possible) == 1 else None
            self.seen += 1
        return bool(found) or not (text or more)

    @property
    def complete(self) -> bool:
        return self.seen >= self.rule.min_gear_duration


# Who answers.


@dataclass(frozen=True)
class Decision:
    """Who answers, and why.

    server: SMALL or LARGE. why: "threshold", "prompt", "entropy", "undecided", "finished", "no logprobs" or "fallback".
    entropy: bits, bounds of the mean that was compared with the threshold. text: what the small server wrote, if it can
    be handed over; tokens: of it. reason: of a fallback.
    """

    server: int
    why: str
    entropy: tuple[float, float] | None = None
    text: str = ""
    tokens: int = 0
    reason: str | None = None

    def as_json(self, handed_over: int) -> dict[str, Any]:
        """What the client reads."""
        entropy = {} if self.entropy is None else {"entropy": [round(bits, 4) for bits in self.entropy]}
        reason = {} if self.reason is None else {"reason": self.reason}
        return {"server": NAMES[self.server], "why": self.why, **entropy, "handed_over": handed_over, **reason}


class Between:
    """Two servers, the rule between them, and what is known of them.

    Args:
        fallback: whether one server answers for the other one that fails.

    proven: paths and ways by which some answer of the small server had log-probabilities, so that one without them says
    nothing of the server.
    """

    def __init__(self, small: Upstream, large: Upstream, rule: Rule, fallback: bool):
        self.servers = small, large
        self.rule, self.fallback = rule, fallback
        self.proven: set[tuple[str, Way]] = set()
        self._ways: dict[str, tuple[float, list[Way]]] = {}
        self._owner: str | None = None

    def ways(self, path: str) -> list[Way]:
        """The ways to ask the small server for log-probabilities that are not known to fail, the best first."""
        since, left = self._ways.get(path, (-FORGET, []))
        return list(left) if time.monotonic() - since < FORGET else ways_to_ask(chat=path == CHAT)

    def keep(self, path: str, left: Sequence[Way]) -> None:
        """Learn that no other ways work."""
        self._ways[path] = time.monotonic(), [way for way in self.ways(path) if way in left]

    async def owner(self) -> str:
        """Who the large server says that owns its models, for which it is asked once; "" where it does not say."""
        if self._owner is None:
            try:
                owners = [str(row.get("owned_by")).lower() for row in await self.servers[LARGE].models()]
            except Failed as error:
                if error.status != 404:  # it has a list, and is loading, or not there; it is asked again
                    return ""
                owners = []
            self._owner = next((owner for owner in owners if owner in CONTINUES), "")
        return self._owner


@dataclass
class ProxyRoute:
    """One request and its answer.

    failures: counts those of servers. path: below /v1. body: as the client sent it. ways: to ask for log-probabilities
    that may still work for it. held: the small server's stream.
    """

    between: Between
    failures: Counter
    path: str
    body: dict[str, Any]
    decision: Decision | None = None
    handed_over: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    tags: "Tags | None" = None
    ways: list[Way] = field(default_factory=list)
    held: AsyncIterator[Event] | None = None

    @property
    def begun(self) -> bool:
        return self.tags is not None and self.tags.begun

    async def answer(self) -> Parts:
        """The events of a stream, each with its blank line, or one whole answer.

        Raises:
            Failed: no server answers, or the one that had begun cuts its answer short.
            Declined: a server refuses the request itself.
        """
        async with AsyncExitStack() as self.open:
            self.decision = self.without_tokens()
            self.ways = self.between.ways(self.path)
            while True:
                server = SMALL
                try:
                    while self.decision is None:
                        self.decision = await self.judge()
                    server = self.decision.server
                    async for part in self.answer_of(self.decision):
                        yield part
                    return
                except Failed as error:
                    self.failed[server] = error.message
                    self.failures.labels(NAMES[server]).inc()
                    if self.begun:
                        raise
                    await self.open.aclose()
                    self.decision = self.instead_of(server, error)

    def without_tokens(self) -> Decision | None:
        """What is decided before any token is written: by a threshold at one of its ends, or by a prompt that looks
        hard (GEARBX 11), of which the user's last message counts."""
        threshold = self.between.rule.threshold
        if threshold in (0.0, math.inf):
            return Decision(SMALL if threshold else LARGE, "threshold")
        return Decision(LARGE, "prompt") if first_gear(typed_last(self.body), 2) == 1 else None

    # By the first tokens of the small server.

    async def judge(self) -> Decision | None:
        """Ask the small server in the way that is best now, and decide by its first tokens; None: ask in another way.

        Where the client asks for a stream, this is the stream that it gets if the small server is to answer.
        """
        if not self.ways:
            return Decision(LARGE, "no logprobs")
        way, small = self.ways[0], self.between.servers[SMALL]
        streamed = way.streamed and judged_by_stream(self.body)
        body, held = (self.body if streamed else self.asked_whole()), list[Event]()
        try:
            events = await self.open.enter_async_context(small.events(self.path, {**body, **way.fields}))
            decision = await self.decide(events, held, way)
        except Declined as error:
            await self.learn_from(error, body)
            decision = None
        if streamed and decision is not None and decision.server == SMALL:
            self.held = after(held, events)
        else:
            await self.open.aclose()
        return decision

    async def decide(self, events: AsyncIterator[Event], held: list[Event], way: Way) -> Decision | None:
        """Decide by the first tokens; None where they have no log-probabilities, after which other ways are left.

        Args:
            held: where the events are kept.

        Raises:
            Failed: log-probabilities that no distribution has, too many events, no token for too long, a stream's end.
        """
        small, first = self.between.servers[SMALL], FirstTokens(self.between.rule, way.asked)
        until, size, seen = time.monotonic() + small.timeout, 0, 0
        async for event in events:
            held.append(event)
            size += len(event.raw)
            try:
                if not first.take(event.chunk or {}):
                    self.silent(way, first)
                    return None
            except GearbxError as error:
                raise small.failed(f"cannot be judged: {one_line(error)}") from error
            if first.seen > seen:
                self.between.proven.add((self.path, way))
                seen = first.seen
                until = time.monotonic() + small.timeout
            if event.is_end or first.finish is not None or first.complete:
                return self.by(first)
            if time.monotonic() > until:
                raise small.failed(f"sent no token for {small.timeout:g} s")
            if size > LARGEST_ANSWER:
                raise small.failed(f"sends more than {LARGEST_ANSWER} bytes before its first tokens are there")
        raise small.failed("cut its stream short")

    def by(self, first: FirstTokens) -> Decision:
        """What the first tokens have decided; an answer that ended before has no need of another server.

        "length" is no end, unless the client wants no more.
        """
        if not first.complete:
            wanted = min(lengths_of(self.body).values(), default=first.rule.min_gear_duration + 1)
            if first.finish != "length" or wanted <= first.rule.min_gear_duration:
                return Decision(SMALL, "finished", first.means)
            return Decision(LARGE, "no logprobs", first.means)
        server, why = (LARGE, "undecided") if first.choice is None else (first.choice, "entropy")
        return Decision(server, why, first.means, first.text if first.plain else "", first.seen)

    def asked_whole(self) -> dict[str, Any]:
        """The request for the first tokens of the answer, as a whole."""
        tokens = self.between.rule.min_gear_duration
        lengths = {name: min(tokens, length) for name, length in lengths_of(self.body).items()}
        kept = {name: value for name, value in self.body.items() if name not in NOT_JUDGED}
        return {**kept, **(lengths or {"max_tokens": tokens}), "stream": False}

    def silent(self, way: Way, first: FirstTokens) -> None:
        """The answer has words without log-probabilities. Only those of plain text say what the server can do."""
        if first.plain and not first.seen:
            self.ways = after_silence(self.ways)
            self.between.keep(self.path, self.ways)
        else:
            self.ways = [] if (self.path, way) in self.between.proven else after_silence(self.ways)

    async def learn_from(self, error: Declined, without: Mapping[str, Any]) -> None:
        """Raises what the server says, unless it is about the log-probabilities that the client did not ask for.

        Args:
            without: the request without them, which shows that: an error may name the fields of any wrong request.
        """
        if not about_logprobs(error.status, error.said):
            raise error
        async with self.between.servers[SMALL].events(self.path, without):
            self.ways = others(self.ways)
            self.between.keep(self.path, self.ways)

    # The answer.

    async def answer_of(self, decision: Decision) -> Parts:
        """The answer of a server, which goes on with the text of the small one if it can."""
        going_on = await self.going_on(decision) if decision.server == LARGE else None
        if going_on:
            self.handed_over = decision.tokens
            try:
                async for part in self.request(decision, going_on, decision.text):
                    yield part
                return
            except Declined:  # it does not go on with texts, or refuses the request itself, which it may say again
                self.handed_over = 0
        async for part in self.request(decision, self.body):
            yield part

    async def going_on(self, decision: Decision) -> dict[str, Any] | None:
        """The request by which the large server goes on with the small one's text; None where it starts again.

        A text completion goes on with any text: it is part of the prompt. But mlx-lm takes the space away with which an
        answer begins, so that a server made of it cannot go on between two words. A chat goes on only if the server
        leaves the last message of the assistant open: llama.cpp does, vLLM and SGLang do if asked to; others close it
        and begin a new turn.
        """
        body, text = self.body, decision.text
        if not text or any(body.get(name) for name in ONE_WRITER) or body.get("n") not in (None, 1):
            return None
        shorter = {name: length - decision.tokens for name, length in lengths_of(body).items()}
        if any(length < 1 for length in shorter.values()):
            return None
        owner = await self.between.owner()  # which also says what software it is
        prompt, messages = body.get("prompt"), body.get("messages")
        if self.path == TEXT:
            trims = self.between.servers[LARGE].software.startswith(TRIMMING)
            return {**body, **shorter, "prompt": prompt + text} if isinstance(prompt, str) and not trims else None
        if owner not in CONTINUES or not isinstance(messages, list):
            return None
        going_on = [*messages, {"role": "assistant", "content": text}]
        return {**body, **shorter, **CONTINUES[owner], "messages": going_on}

    async def request(self, decision: Decision, body: dict[str, Any], text: str = "") -> Parts:
        """The answer of a server as the client receives it. Raises Failed for a stream that ends too early."""
        server, events = self.between.servers[decision.server], self.held
        self.held = None
        self.tags = tags = Tags(decision.as_json(self.handed_over), text, without_logprobs=events is not None)
        if events is None:
            if self.body.get("stream") is not True:
                yield tags.whole(await server.ask(self.path, body))
                return
            events = await self.open.enter_async_context(server.events(self.path, body))
        early = b""  # comments before the first chunk, which wait for it: the answer has not begun
        async for event in events:
            early += tags.event(event)
            if tags.begun:
                yield early
                early = b""
        if not (tags.begun and tags.finished):
            raise server.failed("cut its stream short")

    def instead_of(self, server: int, error: Failed) -> Decision:
        """The other server answers. Raises Failed where it must not, or failed too."""
        self.handed_over = 0
        if not self.between.fallback or len(self.failed) > 1:
            raise Failed("; ".join(self.failed.values())) from error
        return Decision(LARGE if server == SMALL else SMALL, "fallback", reason=error.message)


async def after(held: list[Event], events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events that were held back, then the others."""
    for event in held:
        yield event
    async for event in events:
        yield event


class Tags:
    """What the proxy changes in the events of a stream, or in a whole answer.

    Args:
        gearbx: what the answer says of its way.
        text: that comes before the answer's own.
        without_logprobs: take them out: the client did not ask for them.
    """

    def __init__(self, gearbx: dict[str, Any], text: str = "", without_logprobs: bool = False):
        self.gearbx, self.text, self.without_logprobs = gearbx, text, without_logprobs
        self.begun = self.finished = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole answer, changed in place."""
        self.begun = True
        self.change(answer)
        return answer | {"gearbx": self.beside(answer)}

    def event(self, event: Event) -> bytes:
        """An event: the bytes as they came, unless something in it is to be changed."""
        if (chunk := event.chunk) is None:
            self.finished = self.finished or event.is_end
            return event.raw
        first, last = not self.begun, is_last(chunk)
        self.begun, self.finished = True, self.finished or last
        changed = self.change(chunk)
        if first or last:
            chunk["gearbx"] = self.beside(chunk)
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n" if first or last or changed else event.raw

    def beside(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What the answer says of its way, with what a server of models in gears has said of itself."""
        own = answer.get("gearbx")
        return (own if isinstance(own, dict) else {}) | self.gearbx

    def change(self, answer: dict[str, Any]) -> bool:
        """Puts the text before, takes the logprobs out. Returns whether there was anything to do."""
        changed = False
        for choice in choices_of(answer):
            if self.text:
                prepend(choice, self.text)
                self.text, changed = "", True
            if self.without_logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
        return changed


def prepend(choice: dict[str, Any], text: str) -> None:
    """Begin what a choice says with a text."""
    message = choice.get("delta") or choice.get("message")
    if "text" in choice:
        choice["text"] = text + (choice["text"] or "")
    elif isinstance(message, dict):
        message["content"] = text + (message.get("content") or "")
    else:
        choice["delta"] = {"content": text}


def is_last(chunk: dict[str, Any]) -> bool:
    """Whether a chunk ends a text, or comes after it with the usage."""
    usage = not chunk.get("choices") and chunk.get("usage") is not None
    return usage or any(choice.get("finish_reason") is not None for choice in choices_of(chunk))
