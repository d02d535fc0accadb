"""Servers of others: what they list of each token's probabilities, and which of several models answers a prompt.

`Other` asks a server with OpenAI's API, of which every failure is one line that names the URL and the remedy.
`analyze --server` reads its whole answers. `routed_application` passes the requests of clients on to one of several
models there, which the prompt chooses (GEARBX 11), and adds entropy and gear to each part of the answer (GEARBX 12.3).
"""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, repeat
from typing import Any

import anyio
import httpx
import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from httpx_sse import EventSource
from msgspec import Struct

from ..cli.flags import DEFAULT_TIMEOUT
from ..errors import GearbxError, escaped, one_line
from ..files.reading import parse_json, parse_python_json, typed
from ..routing.bounds import entropy_bounds, rounding_as_written
from ..routing.gates import first_gear
from .bodies import BodyRoute
from .logprobs import SYMBOLS, OtherError
from .web import LONGEST_JUDGED, Guard, Refused, Stop, application, event_stream, front, is_loopback

LARGEST_ANSWER = 2**28  # bytes
CHAT_PATH, TEXT = "/chat/completions", "/completions"
EVENTS, DONE = "text/event-stream", "[DONE]"
SUCH_AS = "give one such as http://127.0.0.1:8080/v1"
VOCABULARY_FIELDS = ("vocab_size", "n_vocab")

log = logging.getLogger("gearbx_mlx.server")


# Tokens, with the log-probabilities that are listed of them.

UNLISTED = 0.0  # nats: any token may be as probable as this


@dataclass(frozen=True)
class ListedToken:
    """A token of a server.

    text: as the server names it. logprobs: of the tokens that it lists, natural, the largest first; empty where it
    lists none. unlisted: the log-probability that no other token exceeds. number: of the token in the vocabulary, where
    the server says it.
    """

    text: str
    logprobs: tuple[float, ...]
    unlisted: float = UNLISTED
    number: int | None = None

    def entropy(self, vocab_size: int) -> tuple[float, float]:
        """Return the bounds of the entropy in bits. Raises GearbxError for what no distribution has."""
        return entropy_bounds(self.logprobs, vocab_size, rounding_as_written(self.logprobs), self.unlisted)


class Listed(Struct, frozen=True):
    """One of the most likely tokens."""

    token: str = ""
    logprob: float | None = None
    id: int | None = None


class Entry(Listed, frozen=True):
    """A token that was chosen, with the most likely ones in its place, as chats have them."""

    top_logprobs: list[Listed] | None = None


class Logprobs(Struct, frozen=True):
    """`content`: the format of chat. The others: of text completions, one item for each token."""

    content: list[Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


def objects_in(found: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none where it is no list."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def said_text(choice: Mapping[str, Any]) -> str:
    """Return what a choice says, thoughts first."""
    said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    names = ("reasoning_content", "reasoning", "content")
    return "".join(said[name] for name in names if isinstance(said, dict) and isinstance(said.get(name), str))


def listed_tokens(choice: Mapping[str, Any], asked: int) -> list[ListedToken]:
    """Read the tokens of a choice, in the format of chats or of text completions. Raises GearbxError for neither.

    asked: how many log-probabilities of each token were asked for.
    """
    logprobs = typed(choice.get("logprobs") or {}, Logprobs)
    if logprobs.content is not None:
        found = [token_of(entry, asked) for entry in logprobs.content]
    else:
        tops = chain(logprobs.top_logprobs or (), repeat(None))
        listed = ((name, top or {}) for name, top in zip(logprobs.tokens or (), tops))
        found = [
            ListedToken(name, descending(top.values()), unlisted_of_text(name, top, asked)) for name, top in listed
        ]
    texts = spelled([token.text for token in found], said_text(choice))
    return [replace(token, text=text) for token, text in zip(found, texts)]


def token_of(entry: Entry, asked: int) -> ListedToken:
    """Read a token of chat's format. One that was chosen beyond the most likely ones is known as well."""
    top = [one for one in entry.top_logprobs or () if one.logprob is not None]
    ranked = descending([one.logprob for one in top if one.logprob is not None])
    unlisted = limit(ranked, asked)
    own = entry.logprob
    listed = any(one.token == entry.token for one in top)
    if ranked and own is not None and -1000 < own < ranked[-1] and not listed:  # OpenAI's -9999 says only "unlikely"
        ranked = (*ranked, own)
    chosen = chosen_token(entry, top)
    return ListedToken(chosen.token, ranked, unlisted, chosen.id)


def chosen_token(entry: Entry, top: Sequence[Listed]) -> Listed:
    """Return the chosen token: mlx_lm.server names the first of an unordered list, so then it is the most likely."""
    values = [one.logprob or 0.0 for one in top]
    unordered = values != sorted(values, reverse=True)
    return top[values.index(max(values))] if unordered and top[0].token == entry.token else entry


def unlisted_of_text(name: str, top: Mapping[str, float], asked: int) -> float:
    """Return the limit of what a text completion does not list.

    Tokens with the same text are one key of its object, and the chosen token may be there beyond those asked for. So a
    list that the chosen token ends can lack a more likely one.
    """
    ranked = descending(top.values())
    if len(ranked) > 1 and top.get(name) == ranked[-1] and len(ranked) <= asked:
        return UNLISTED
    return limit(ranked, asked)


def limit(ranked: Sequence[float], asked: int) -> float:
    """Return the last of the tokens asked for; what a shorter list leaves out is not known."""
    return ranked[asked - 1] if 0 < asked <= len(ranked) else UNLISTED


def descending(values: Iterable[float]) -> tuple[float, ...]:
    """Sort, the largest first; NaN, which has no place, stays for the check of the numbers."""
    return tuple(sorted(values, reverse=True))


def spelled(names: Sequence[str], text: str) -> list[str]:
    """Return the names as text, if this is what makes the text of the answer of them; else as they are.

    A token that ends within a character becomes U+FFFD.
    """
    if text and text not in "".join(names):
        if all(char in SYMBOLS for name in names for char in name):
            parts = [bytes(SYMBOLS[char] for char in name) for name in names]
            if text.encode("utf-8", "replace") in b"".join(parts):
                return [part.decode("utf-8", "replace") for part in parts]
        spaced = [name.replace("▁", " ") for name in names]  # SentencePiece
        if text in "".join(spaced):
            return spaced
    return list(names)


# How to ask for them.

ASK = (20, 11, 10, 5, 1)  # OpenAI's most, mlx_lm.server's, and what others stop at


@dataclass(frozen=True)
class Way:
    """How many log-probabilities of each token are asked for, and the fields of a request that do so."""

    asked: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


def ways_to_ask(path: str) -> list[Way]:
    """Return every way to ask, the best first: a text completion has a number in one field, or the fields of a chat."""
    as_chat = [Way(asked, {"logprobs": True, "top_logprobs": asked}) for asked in ASK]
    return as_chat if path == CHAT_PATH else [Way(asked, {"logprobs": asked}) for asked in ASK] + as_chat


@dataclass(frozen=True)
class Question:
    """What to ask: `prompt`, as it is (text completions), or as a message with the `system` prompt before it (chat).

    template: arguments for the server's chat template.
    """

    prompt: str
    chat: bool = True
    system: str | None = None
    template: dict[str, Any] = field(default_factory=dict)

    def request(self, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request for a greedy answer."""
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0.0}
        if not self.chat:
            return TEXT, {**body, "prompt": self.prompt}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        template = {"chat_template_kwargs": self.template} if self.template else {}
        return CHAT_PATH, {**body, **template, "messages": [*system, {"role": "user", "content": self.prompt}]}


# Requests.


class Other:
    """Requests to a server with OpenAI's API, each over a connection of its own.

    Args:
        url: of the API, such as http://127.0.0.1:8080/v1. A proxy of the environment is used, except for loopback.
        key: sent as a bearer token, and in no message.
        timeout: seconds for a connection, for a whole answer, and from one event of a stream to the next.

    shown: the URL without what may be a password. ways: by path, those to ask for log-probabilities that may work.
    asked: how many of each token were asked for, in the last answer that had them.

    Raises:
        GearbxError: what is not a URL, or a key that no header can have.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        parts = parsed_url(url)
        if key and not (key.isascii() and key.isprintable()):
            raise GearbxError("the API key has characters that no HTTP header can have; check it")
        if not parts.path.rstrip("/"):
            parts = parts.copy_with(path="/v1")
        self.base, self.shown = (str(each).rstrip("/") for each in (parts, parts.copy_with(userinfo=b"")))
        self.key, self.timeout = key, timeout
        self.trust_env = not is_loopback(parts.host)
        self.ways: dict[str, list[Way]] = {path: ways_to_ask(path) for path in (CHAT_PATH, TEXT)}
        self.asked = 0

    @asynccontextmanager
    async def opened(self, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """Open the answer to a request: POST with a JSON body, or GET without one.

        Raises OtherError for no answer, one that ends early, also while it is read inside, or a status of 300 or more.
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": "gearbx-mlx", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        method = "GET" if body is None else "POST"
        content = None if body is None else encoded(body)
        try:
            async with (
                httpx.AsyncClient(timeout=self.timeout, verify=certificates(), trust_env=self.trust_env) as client,
                client.stream(method, self.base + path, headers=headers, content=content) as response,
            ):
                if response.status_code >= 300:
                    raise self.refused(response.status_code, await self.text(response))
                yield response
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self.failed(f"no token for {self.timeout:g} s", "give it more time with --server-timeout") from error
        except (httpx.ConnectError, UnicodeError) as error:  # the latter for a name that no host can have
            raise self.failed(f"no connection ({one_line(error)})", "start the server, or check --server") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            what = f"cut its answer short ({one_line(error)})"
            raise self.failed(what, "look at the server's log and run this again") from error

    async def text(self, response: httpx.Response) -> str:
        """Read a whole answer within the time for it."""
        with anyio.fail_after(self.timeout):
            return b"".join([part async for part in self.parts(response)]).decode("utf-8", "replace")

    async def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Read the parts of an answer. Raises OtherError for too many bytes."""
        size = 0
        async for part in response.aiter_raw():  # not decompressed: a few bytes could become any number
            size += len(part)
            if size > LARGEST_ANSWER:
                raise self.failed(f"sends more than {LARGEST_ANSWER} bytes")
            yield part

    async def whole(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the object that a request is answered with. Raises OtherError for anything else."""
        async with self.opened(path, body) as response:
            return self.object_in(await self.text(response))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, each as it comes. Raises OtherError also for one that ends too early."""
        async with self.opened(path, body) as response:
            if EVENTS not in response.headers.get("content-type", ""):
                self.object_in(await self.text(response))  # which may be an error
                raise self.failed("answers what is not a stream", "use another server")
            stream = httpx.Response(200, headers={"Content-Type": EVENTS}, content=self.parts(response))
            async with aclosing(EventSource(stream).aiter_sse()) as events:
                while True:
                    with anyio.fail_after(self.timeout):
                        event = await anext(events, None)
                    if event is None:
                        raise self.failed("cut its stream short", "look at the server's log")
                    if event.data.strip() == DONE:
                        return
                    yield self.object_in(event.data)

    def object_in(self, text: str) -> dict[str, Any]:
        """Return the JSON object that a text is. Raises OtherError for anything else, or one that reports an error."""
        try:
            found = typed(parse_python_json(text), dict[str, Any])
        except GearbxError as error:
            raise self.failed(f"answers what is not of this API ({error})") from error
        if found.get("error") and not found.get("choices"):
            raise self.failed(f"reports an error: {said_in(found['error'])}", "look at the server's log")
        return found

    def failed(self, what: str, remedy: str = "check the address, which usually ends in /v1") -> OtherError:
        """Return the error for what the server does."""
        return OtherError(self.hidden(f"{self.shown}: {what}; {remedy}"), reason=self.hidden(what))

    def refused(self, status: int, said: str) -> OtherError:
        """Return the error for a request that is refused with these words."""
        reason, key = self.hidden(reason_of_refusal(said)), "give --server-api-key"
        remedies = {401: key, 403: key, 404: "check --server-model and the URL", 429: "wait, and ask for less"}
        remedy = remedies.get(status, "look at the server's log" if status >= 500 else "change what it refuses")
        return OtherError(f"{self.shown}: answers {status} ({reason}); {remedy}", status, reason)

    def hidden(self, text: str) -> str:
        """Return the text without the key, which a server may repeat."""
        return text.replace(self.key, "***") if self.key else text

    # Models.

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that the server lists, and what else it says of them."""
        rows = objects_in((await self.whole("/models")).get("data"))
        return {row["id"]: row for row in rows if isinstance(row.get("id"), str)}

    async def model(self, name: str | None) -> tuple[str, int | None]:
        """Return the model of this name, or the only one, and the length of its logits, which some servers say.

        Raises OtherError where none is named and the server has no list, or several models.
        """
        try:
            listed = await self.models()
        except OtherError:
            if name is None:
                raise
            listed = {}
        if name is None and len(listed) != 1:
            shown = ", ".join(list(listed)[:10]) or "none"
            raise self.failed(f"its models are {shown}", "name one with --server-model")
        name = next(iter(listed)) if name is None else name
        places = objects_in([listed.get(name), listed.get(name, {}).get("meta")])
        sizes = [place.get(key) for place in places for key in VOCABULARY_FIELDS]
        return name, next((size for size in sizes if type(size) is int and size > 0), None)

    async def answer(self, question: Question, model: str, max_tokens: int) -> list[ListedToken]:
        """Return the tokens of the greedy answer, `max_tokens` at most, asked for in the first way that works.

        Raises OtherError for a server that fails, or gives no log-probabilities.
        """
        path, body = question.request(model, max_tokens)
        words = ""
        while self.ways[path]:
            way = self.ways[path][0]
            try:
                choices = objects_in((await self.whole(path, {**body, **way.fields})).get("choices"))
                if not choices:
                    raise self.failed("answers without choices")
                tokens = listed_tokens(choices[0], way.asked)[:max_tokens]
                if any(token.logprobs for token in tokens) or not said_text(choices[0]):
                    self.asked = way.asked
                    return tokens
                self.ways[path] = [one for one in self.ways[path] if one.fields.keys() != way.fields.keys()]
            except OtherError as error:
                if not about_logprobs(error):
                    raise
                words = f" ({error.reason})"
                self.ways[path].remove(way)
            except GearbxError as error:
                raise self.failed(f"answers what is not of this API ({error})") from error
        raise self.failed(f"gives no log-probabilities for {model}{words}", "start it with them, or use another server")


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON; as ASCII where a text has half of a surrogate pair, which takes ten times as long."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body).encode()


@cache
def certificates() -> Any:
    """Return the certificates of this machine, whose reading takes tens of milliseconds."""
    return httpx.create_ssl_context()


def parsed_url(url: str) -> httpx.URL:
    """Return a server's URL, of a host and a path. Raises GearbxError for none; without what may be a password."""
    url = url.strip()
    shown = "--server" if set("@?#") & set(url) else f"--server {url[:100]!a}"
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}") from error
    if parts.port is not None and not 0 < parts.port < 2**16:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise GearbxError(f"{shown} is not an http or https URL; {SUCH_AS}")
    if set("?#\\ ") & set(url):
        raise GearbxError(f"{shown} has more than an address and a path; {SUCH_AS}")
    return parts


def reason_of_refusal(text: str) -> str:
    """Return why a server refuses a request: OpenAI's error object, mlx-lm's text, or how the body begins."""
    try:
        content = parse_json(text)
    except GearbxError:
        return "no reason given" if "<" in text or not text.strip() else said_in(text)
    return said_in(content.get("error", content) if isinstance(content, dict) else content)


def said_in(error: Any) -> str:
    """Return the words of OpenAI's error object, or of what stands in its place, on one line and shortened."""
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300]


def about_logprobs(error: OtherError) -> bool:
    """Tell whether a server refused a request for the number or the kind of its log-probabilities."""
    return error.status in (400, 422) and "logprobs" in error.reason


# Requests of clients, passed on to one of several models.

BY_PROMPT = "auto"  # the name of the model that a prompt chooses


@dataclass(frozen=True)
class RoutedModels:
    """Models of a server, the first with the fewest bits. vocab_size: of all of them."""

    other: Other
    models: tuple[str, ...]
    vocab_size: int

    def chosen(self, body: Mapping[str, Any]) -> str:
        """Return the model that a request names, else the one that its prompt chooses (GEARBX 11).

        Raises Refused for a name that is not served here.
        """
        name = body.get("model")
        if name in self.models:
            return str(name)
        if name not in (None, "", BY_PROMPT):
            names = ", ".join((BY_PROMPT, *self.models))
            raise Refused(404, f"the model {str(name)[:200]!a} is not served here; {names} are", param="model")
        return self.models[first_gear(typed_last(body)[:LONGEST_JUDGED], len(self.models))]

    async def answer(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, or the one whole answer, each with its `gearbx`. Raises OtherError."""
        model, own, left = self.chosen(body), own_way(body), list(self.other.ways[path])
        while True:
            way, begun = own or next(iter(left), Way()), False
            try:
                async for answer in self.asked(path, {**body, **way.fields, "model": model}):
                    begun, self.other.ways[path] = True, left
                    yield self.marked(answer, model, way.asked, own is None)
                return
            except OtherError as error:
                if begun or own or not left or not about_logprobs(error):
                    raise
                left.remove(way)

    async def asked(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, or the one whole answer, as the request says."""
        if body.get("stream") is not True:
            yield await self.other.whole(path, body)
            return
        async with aclosing(self.other.events(path, body)) as events:
            async for chunk in events:
                yield chunk

    def marked(self, answer: dict[str, Any], model: str, asked: int, unasked: bool) -> dict[str, Any]:
        """Return an answer with the gear and the entropy of its tokens, without log-probabilities that were unasked."""
        choices = objects_in(answer.get("choices"))
        try:
            tokens = [token for choice in choices for token in listed_tokens(choice, asked) if token.logprobs]
            bounds = [token.entropy(self.vocab_size) for token in tokens]
        except GearbxError as error:
            raise self.other.failed(f"gives log-probabilities that are none ({one_line(error)})") from error
        for choice in choices if unasked else ():
            choice |= {"logprobs": None}
        told = [{"gear": model, "entropy_low": round(low, 4), "entropy_high": round(high, 4)} for low, high in bounds]
        return {**answer, "gearbx": {"mode": "prompt", "gear": model, "tokens": told}}


def own_way(body: Mapping[str, Any]) -> Way | None:
    """Return the way in which a client asks for log-probabilities itself; None where it does not."""
    wanted, most = body.get("logprobs"), body.get("top_logprobs")
    if wanted is None or wanted is False:
        return None
    return Way(most if type(most) is int else wanted if type(wanted) is int else 0)


def typed_last(body: Mapping[str, Any]) -> str:
    """Return the last message of a user, or the prompt of a text completion; "" where there is no text."""
    messages, said = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        own = [one.get("content") for one in objects_in(messages) if one.get("role") == "user"]
        said = own[-1] if own else None
    parts = (
        [part.get("text") if isinstance(part, dict) else part for part in said] if isinstance(said, list) else [said]
    )
    return " ".join(part for part in parts if isinstance(part, str))


def in_their_words(error: OtherError) -> Refused:
    """Return what a client gets to know: of a request that is wrong all, else that the server failed."""
    if 400 <= error.status < 500 and error.status not in (401, 403, 407):  # our key, which a client cannot mend
        return Refused(error.status, error.reason)
    log.warning("%s", escaped(one_line(error)))
    return Refused(502, f"the server of this model: {error.reason}", "server_error", code="bad_gateway")


router = APIRouter(route_class=BodyRoute)
router.include_router(front)


@router.get("/v1/models")
async def list_models_to_choose(request: Request) -> Response:
    routed: RoutedModels = request.app.state.routed
    about = {"object": "model", "created": 0, "owned_by": "gearbx-mlx"}
    auto = {"id": BY_PROMPT, **about, "gearbx": {"gears": routed.models}, "vocab_size": routed.vocab_size}
    return JSONResponse({"object": "list", "data": [auto, *({"id": name, **about} for name in routed.models)]})


@router.get("/health")
async def ask_the_server(request: Request) -> Response:
    try:
        await request.app.state.routed.other.models()
    except OtherError as error:
        if error.status != 404:  # which has no list, and is there
            return JSONResponse({"status": "unavailable", "reason": error.reason}, 503)
    return JSONResponse({"status": "ok"})


@router.post(CHAT_PATH)
@router.post(f"/v1{CHAT_PATH}")
@router.post(f"/v1{TEXT}")
async def pass_on(request: Request, body: dict[str, Any]) -> Response:
    routed: RoutedModels = request.app.state.routed
    stop: Stop = request.app.state.stop
    if not isinstance(body.get("stream"), bool | None):
        raise Refused(400, "stream is neither true nor false", param="stream")
    parts = routed.answer(request.url.path.removeprefix("/v1"), body)
    try:
        with stop.heeded():
            first = await anext(parts, None)
    except OtherError as error:
        raise in_their_words(error) from error
    if body.get("stream"):
        return event_stream(as_events(first, parts, stop))
    return Response(json.dumps(first), media_type="application/json")  # with infinities, if a server has them


async def as_events(part: Any, parts: AsyncGenerator[dict[str, Any], None], stop: Stop) -> AsyncIterator[str]:
    """Yield the events of a stream, of which `part` has come; the last one of a broken stream has the reason."""
    async with aclosing(parts):
        try:
            while part is not None:
                yield f"data: {json.dumps(part)}\n\n"
                with stop.heeded():
                    part = await anext(parts, None)
        except (OtherError, Refused) as error:
            refused = in_their_words(error) if isinstance(error, OtherError) else error
            yield f"data: {json.dumps(refused.body())}\n\n"
            return
        yield f"data: {DONE}\n\n"


def routed_application(guard: Guard, routed: RoutedModels) -> FastAPI:
    """Return what answers clients by one of several models of another server."""
    app = application(router, guard, title="gearbx_mlx.server, models of another server")
    app.state.routed = routed
    return app
