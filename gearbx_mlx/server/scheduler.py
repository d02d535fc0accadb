"""The thread that computes answers, in the place of mlx-lm's: several at once, in any mode.

Answers in one gear share the passes over the weights, and so do those of mode route, whose gear is a policy's. All
others take turns, token by token. A request for another model waits until the answers of the model before have ended.
"""

import inspect
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import CompletionRequest
from transformers import PreTrainedTokenizerBase

from ..compat.server import Computing
from ..decoding.mode import Mode
from ..errors import one_line
from .grammar import constraint_for
from .job import Asked, Batch, Begun, Job, Prompt, Single
from .provider import GearedProvider, Served
from .requests import AnyRequest, ChatRequest, TextRequest
from .web import LONGEST_JUDGED, Refused, stopping

LIKELY_LENGTH = 3  # characters of a token, in texts that are likely to fit the context
PIECE, PIECE_MORE = 2**14, 16  # characters that are counted at once, and tokens that cutting may add
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}


class Scheduler(Computing):
    """mlx-lm's thread of computation, with gears.

    prompt_cache: keeps the KV caches of finished texts for those that go on from them.
    """

    def __init__(self, provider: GearedProvider, prompt_cache: LRUPromptCache):
        self.provider = provider
        self.writers: dict[Any, Single | Batch] = {}  # batches by what their answers share, others by their jobs
        self.computing: list[Single | Batch] = []  # from the top of the stack down
        self.waiting: Asked | None = None  # for another model
        self.closed = False
        self.busy = time.monotonic()  # when something was last computed
        super().__init__(provider, prompt_cache)

    def submit(self, asked: Asked) -> None:
        """Take a request.

        Raises:
            Refused: nothing is computed any more; what is not a prompt or a model.
            GearbxError: a response_format that no text can have.
        """
        request = asked.request
        asked.key = self.provider.key_of(request.model, request.adapters)
        served = self.provider.current(asked.key)
        if served is not None:  # here, so that the answers in the making need not wait for it
            constraint_for(served.tokenizer, request.response_format, calls=request.must_call)
            asked.prompt = prompt_of(self, request, served)
        self.requests.put(asked)
        if self.closed or not self.generation_available():
            raise Refused(503, "the thread that computes has ended; the server's log says why", "server_error")

    def count(self, request: AnyRequest) -> int:
        """Return how many tokens a prompt has. Raises Refused for one that the model cannot read."""
        served = self.provider.current(self.provider.key_of(request.model, request.adapters))
        if served is None:
            raise Refused(503, "this model is not loaded at the moment; ask it for an answer first", "server_error")
        return len(prompt_of(self, request, served).tokens)

    @property
    def running(self) -> int:
        """How many answers are in the making."""
        return sum(writer.running for writer in list(self.writers.values()))

    @property
    def queued(self) -> int:
        return self.requests.qsize() + (self.waiting is not None)

    # In the thread of computation.

    def compute(self) -> None:
        try:
            while not self.stopping:
                self.admit()
                self.step_all()
                self.unload_idle()
        finally:
            self.close()

    def admit(self) -> None:
        """Begin answers, as many as may be in the making at once; wait a little where there is nothing to do."""
        while self.running < self.most_at_once:
            asked = self.next_request()
            if asked is None:
                return
            if asked.left.is_set():
                continue
            try:
                if not self.begin(asked):
                    self.waiting = asked
                    return
            except Exception as error:
                asked.put(error)

    def unload_idle(self) -> None:
        """Give up the model, and what was kept for it, once nothing was asked of it for `keep_alive` seconds."""
        if self.running:
            self.busy = time.monotonic()
        elif self.provider.served is not None and time.monotonic() - self.busy > self.provider.keep_alive:
            self.close_writers()
            self.prompt_cache.trim_to(n_sequences=0)
            self.provider.forget()

    @property
    def most_at_once(self) -> int:
        """A controller caps the gears of one text."""
        served = self.provider.served
        governed = served is not None and served.controller is not None
        return 1 if governed else self.provider.settings.decode_concurrency

    def next_request(self) -> Asked | None:
        asked, self.waiting = self.waiting, None
        if asked is not None:
            return asked
        try:
            # Without requests, look ten times a second whether the server is to stop.
            return self.requests.get(timeout=None if self.running else 0.1, block=not self.running)
        except queue.Empty:
            return None

    def begin(self, asked: Asked) -> bool:
        """Begin an answer, unless it needs another model while one is in use. Raises Refused, or GearbxError."""
        request, served = asked.request, self.provider.current(asked.key)
        if served is None:
            if self.running:
                return False
            self.close_writers()
            served = self.provider.load_key(asked.key)
        self.busy = time.monotonic()
        mode = served.mode(request.options, request.typed[:LONGEST_JUDGED])
        job = self.job(asked, served, mode)
        cache = job.fetch()
        which = self.shared(job)
        if which is None:
            self.writers[job] = Single(job, cache, self.provider.settings, self.meanwhile)
        else:
            batch = self.writers.get(which)
            if not isinstance(batch, Batch):
                batch = self.writers[which] = Batch(served, mode, self.provider.settings)
            batch.add(job, cache)
        machine = self.text_machine(served.tokenizer)
        asked.put(Begun(job.prompt, mode, job.cached, machine, self.provider.name_of(asked.key)))
        return True

    def job(self, asked: Asked, served: Served, mode: Mode) -> Job:
        """Return a request's answer, with how many tokens it may have.

        Raises Refused for a prompt without tokens or longer than the context, or tokens beyond the vocabulary.
        """
        request, prompt = asked.request, asked.prompt
        if prompt is None or prompt.served is not served:
            prompt = prompt_of(self, request, served)
        size, most = len(prompt.tokens), request.most_tokens or self.provider.settings.max_tokens
        if not size:
            raise Refused(400, "the prompt becomes no token", param="prompt")
        given = request.tokens if isinstance(request, TextRequest) else []
        for token in (*given, *map(int, request.logit_bias or {})):
            if token >= served.vocabulary:
                raise Refused(400, f"token {token} is not in the vocabulary, which has {served.vocabulary}")
        if served.context is not None:
            if size >= served.context:
                raise too_long(f"is {size} tokens, and the model's context {served.context}")
            most = min(most, served.context - size)
        return Job(asked, prompt, mode, most, self.prompt_cache, (asked.key, served.fingerprint))

    def shared(self, job: Job) -> tuple[str, str] | None:
        """Return what answers have in common that share passes, a mode and perhaps a gear; None: this one is alone.

        The first in mode lossless is, since drafts gain for one text; later ones are written as the top gear does. One
        with a seed is in mode route, where its gears would depend on the others.
        """
        served, mode = job.served, job.mode.name
        cache = self.provider.settings.kv_bits is None and self.provider.settings.kv_gears is None
        plain = cache and served.controller is None and job.prompt.vision is None and self.provider.is_batchable
        if served.gearbox is None or not plain or (mode == "lossless" and not self.running):
            return None
        if mode in ("lossless", "static"):
            gear, ladder = getattr(job.mode, "gear", None), served.gearbox.ladder
            return "static", ladder.top.name if gear is None else ladder.find(gear).name
        seeded = job.asked.request.seed is not None
        return (mode, "") if mode == "telemetry-only" or (mode == "route" and not seeded) else None

    def step_all(self) -> None:
        """One token for every answer, but for those that are being computed further down the stack."""
        for which, writer in list(self.writers.items()):
            if writer.is_over or writer in self.computing:  # it may have ended while another one read its prompt
                continue
            self.computing.append(writer)
            try:
                writer.step()
            except Exception as error:
                writer.fail(error)
            finally:
                self.computing.pop()
            if writer.is_over:
                del self.writers[which]

    def meanwhile(self, reading: Single) -> bool:
        """Let others go on between two parts of a long prompt; returns whether the server stops."""
        gearbox = reading.job.served.gearbox
        gear = gearbox.gear if gearbox is not None else None
        self.admit()
        self.step_all()
        if gearbox is not None and gear is not None:
            gearbox.shift(gear)  # in which the prompt is being read
        return self.stopping

    def close_writers(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.writers = {}

    def close(self) -> None:
        """End everything that is in the making, with an error; forget model and caches in the thread that used them."""
        self.closed = True
        for writer in self.writers.values():
            writer.fail(stopping())
        if self.waiting is not None:
            self.waiting.put(stopping())
        while not self.requests.empty():
            self.requests.get().put(stopping())
        self.close_writers()
        del self.prompt_cache


# From a request to the tokens of its prompt.


def prompt_of(computing: Computing, request: AnyRequest, served: Served) -> Prompt:
    """Return the tokens of a prompt, by mlx-lm's templates.

    Raises Refused for messages that the chat template does not take, or far longer than the context; and for arguments
    that are not the template's own, but tell transformers what to do with it.
    """
    arguments: dict[str, Any] | None = None
    if isinstance(request, ChatRequest):
        messages = [turn.model_dump(exclude_unset=True) for turn in request.messages]
        arguments = request.chat_template_kwargs
        check_length(served, [messages, request.shown_tools, arguments])
        if taken := (arguments or {}).keys() & RESERVED:
            why = f"chat_template_kwargs has {min(taken)}, which is not the template's"
            raise Refused(400, why, param="chat_template_kwargs")
        wanted = CompletionRequest("chat", "", messages, request.shown_tools, None)
    elif request.tokens:
        return Prompt(served, request.tokens, [request.tokens], ["assistant"])
    else:
        check_length(served, request.typed)
        wanted = CompletionRequest("text", request.typed, [], None, None)
    template = SimpleNamespace(chat_template_kwargs=arguments)
    try:
        return Prompt(served, *computing.tokenized(Counting(served), wanted, template))
    except Refused:
        raise
    except Exception as error:  # a template is a program, and raises what it likes
        raise Refused(400, f"the chat template refuses this: {one_line(error)}") from error


def too_long(why: str) -> Refused:
    return Refused(400, f"the prompt {why}; shorten it", code="context_length_exceeded")


def check_length(served: Served, texts: Any) -> None:
    """Raises Refused for a text that cannot fit the context, before seconds go by to make tokens of it."""
    length = sum(map(len, texts_in(texts)))
    if served.context is not None and length > served.context * served.longest_token:
        raise too_long(f"has {length} characters, and the model's context {served.context} tokens")


class Counting:
    """A model's tokenizer, which refuses a text beyond the context as soon as so many tokens of it are known.

    All of a long text takes seconds, and one long word gigabytes. So a text that is likely to be too long is counted in
    pieces first, each of which has few tokens more than it would have within the text.
    """

    def __init__(self, served: Served):
        self.tokenizer, self.context = served.tokenizer, served.context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **keywords: Any) -> Any:
        self.count(text)
        return self.tokenizer.encode(text, **keywords)

    def apply_chat_template(self, *messages: Any, tokenize: bool = True, **keywords: Any) -> Any:
        if tokenize:
            self.count(self.tokenizer.apply_chat_template(*messages, tokenize=False, **keywords))
        return self.tokenizer.apply_chat_template(*messages, tokenize=tokenize, **keywords)

    def count(self, text: str) -> None:
        """Raises Refused for a text that has more tokens than the context."""
        if self.context is None or len(text) <= LIKELY_LENGTH * self.context:
            return
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            count += max(0, len(self.tokenizer.encode(piece, add_special_tokens=False)) - PIECE_MORE)
            if count > self.context:
                raise too_long(f"has more than {count} tokens, and the model's context {self.context}")


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, but for the addresses of images."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name != "image_url":
                yield from texts_in(part)


# The end of a thread that computed with MLX.


def join_to_the_end(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread, which is a little later than Python says.

    As it ends, MLX frees what it keeps for each thread, compiled functions say, and takes Python's lock for that. In a
    process that is already exiting this aborts: "terminate called without an active exception".
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    listed = task.parent.exists()
    thread.join()
    if not listed:
        time.sleep(0.1)
    until = time.monotonic() + 5
    while task.exists() and time.monotonic() < until:
        time.sleep(0.001)
