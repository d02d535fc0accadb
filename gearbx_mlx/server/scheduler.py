"""The compute thread: it generates several sequences at once, in any mode.

Sequences in one gear share forward passes, and so do sequences of mode route, with a gear per step by a batch policy.
All others take turns, one token each. A request for a different model waits until all present sequences have ended.
"""

import inspect
import logging
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.models.cache import LRUPromptCache
from transformers import PreTrainedTokenizerBase

from ..compat.templates import tokenized
from ..decoding.mode import Mode
from ..errors import one_line
from .grammar import constraint_for
from .job import Batch, GenerationContext, Job, PendingRequest, Prompt, Single
from .provider import GearedProvider, ServedModel
from .requests import AnyRequest, TextRequest
from .web import MAX_ROUTING_CHARS, Refused, stopping

LIKELY_CHARS = 3  # characters per token in text that is likely to fit the context
CHUNK_CHARS, CHUNK_TOKENS = 2**14, 16  # characters tokenized at once, and tokens that cutting text there may add
RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}


log = logging.getLogger("gearbx_mlx.server")


class Scheduler:
    """The compute thread, and the queue of its requests.

    Args:
        prompt_cache: KV caches of finished sequences.
    """

    def __init__(self, provider: GearedProvider, prompt_cache: LRUPromptCache):
        self.provider, self.prompt_cache = provider, prompt_cache
        self.requests: queue.Queue[PendingRequest] = queue.Queue()
        self.generators: dict[Any, Single | Batch] = {}  # batches by `batch_key`, singles by job
        self.stepping: list[Single | Batch] = []  # on the call stack
        self.waiting: PendingRequest | None = None  # for a different model
        self.stopping = False  # set to end the thread
        self.closed = False
        self.last_used = time.monotonic()  # seconds, when the model last computed
        self.thread = threading.Thread(target=self.compute)
        self.thread.start()

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request, after tokenizing its prompt if its model is loaded.

        Raises:
            Refused: no compute thread, an invalid prompt, an unknown model.
            GearbxError: a response_format that no text can have.
        """
        request = pending.request
        pending.model_key = self.provider.key_of(request.model, request.adapters)
        served = self.provider.current(pending.model_key)
        if served is not None:  # in this thread, while the compute thread generates
            constraint_for(served.tokenizer, request.response_format, calls=request.required_tools)
            pending.prompt = prompt_of(self.provider, request, served)
        self.requests.put(pending)
        if not self.is_healthy:
            raise Refused(503, "the compute thread has ended; see the server's log", "server_error")

    def count(self, request: AnyRequest) -> int:
        """Return a prompt's number of tokens. Raises Refused."""
        served = self.provider.current(self.provider.key_of(request.model, request.adapters))
        if served is None:
            raise Refused(503, "model: not loaded; use it for an answer first", "server_error")
        return len(prompt_of(self.provider, request, served).tokens)

    @property
    def running(self) -> int:
        """Number of sequences in generation."""
        return sum(generator.running for generator in list(self.generators.values()))

    @property
    def is_healthy(self) -> bool:
        return self.thread.is_alive() and not self.closed

    @property
    def queued(self) -> int:
        return self.requests.qsize() + (self.waiting is not None)

    # In the compute thread.

    def compute(self) -> None:
        try:
            while not self.stopping:
                self.admit()
                self.step_all()
                self.unload_idle()
        except Exception as error:
            log.exception("the compute thread has ended: %s", type(error).__name__)
        finally:
            self.close()

    def admit(self) -> None:
        """Start sequences up to the limit; without any work, wait a little."""
        while self.running < self.max_running:
            pending = self.next_request()
            if pending is None:
                return
            if pending.cancelled.is_set():
                continue
            try:
                if not self.start(pending):
                    self.waiting = pending
                    return
            except Exception as error:
                pending.put(error)

    def unload_idle(self) -> None:
        """Unload the model and its KV caches after `keep_alive` idle seconds."""
        if self.running:
            self.last_used = time.monotonic()
        elif self.provider.served is not None and time.monotonic() - self.last_used > self.provider.keep_alive:
            self.close_generators()
            self.prompt_cache.trim_to(n_sequences=0)
            self.provider.unload()

    @property
    def max_running(self) -> int:
        """Maximum number of sequences; a controller caps the gears of only one."""
        served = self.provider.served
        is_governed = served is not None and served.controller is not None
        return 1 if is_governed else self.provider.settings.concurrency.decode_concurrency

    def next_request(self) -> PendingRequest | None:
        pending, self.waiting = self.waiting, None
        if pending is not None:
            return pending
        try:
            # Without sequences, wake up ten times a second to notice a stop.
            return self.requests.get(timeout=None if self.running else 0.1, block=not self.running)
        except queue.Empty:
            return None

    def start(self, pending: PendingRequest) -> bool:
        """Start a sequence; return False if it has to wait for its model. Raises Refused or GearbxError."""
        request, served = pending.request, self.provider.current(pending.model_key)
        if served is None:
            if self.running:
                return False
            self.close_generators()
            served = self.provider.load_key(pending.model_key)
        self.last_used = time.monotonic()
        mode = served.mode(request.options, request.routing_text[:MAX_ROUTING_CHARS])
        job = self.job(pending, served, mode)
        cache = job.fetch()
        key = self.batch_key(job)
        if key is None:
            self.generators[job] = Single(job, cache, self.provider.settings, self.step_others)
        else:
            batch = self.generators.get(key)
            if not isinstance(batch, Batch):
                batch = self.generators[key] = Batch(served, mode, self.provider.settings)
            batch.add(job, cache)
        machine, name = make_text_state_machine(served.tokenizer), self.provider.name_of(pending.model_key)
        pending.put(GenerationContext(job.prompt, mode, job.cached, machine, name))
        return True

    def job(self, pending: PendingRequest, served: ServedModel, mode: Mode) -> Job:
        """Return the sequence of a request.

        Raises:
            Refused: an empty prompt, one longer than the context, or tokens beyond the vocabulary.
        """
        request, prompt = pending.request, pending.prompt
        if prompt is None or prompt.served is not served:
            prompt = prompt_of(self.provider, request, served)
        size, max_tokens = len(prompt.tokens), request.max_answer_tokens or self.provider.settings.answers.max_tokens
        if not size:
            raise Refused(400, "prompt: no token; use a longer one", param="prompt")
        given = request.tokens if isinstance(request, TextRequest) else []
        for token in (*given, *map(int, request.logit_bias or {})):
            if token >= served.vocabulary:
                raise Refused(400, f"token: not in the vocabulary, got {token}; use one below {served.vocabulary}")
        if served.context is not None:
            if size >= served.context:
                raise too_long(f"is {size} tokens, and the model's context {served.context}")
            max_tokens = min(max_tokens, served.context - size)
        return Job(pending, prompt, mode, max_tokens, self.prompt_cache, (pending.model_key, served.fingerprint))

    def batch_key(self, job: Job) -> tuple[str, str] | None:
        """Return mode and gear that the sequences of a batch share; None for a `Single`.

        In mode lossless the first sequence is a `Single`, because drafting is faster for one. Later ones equal plain
        decoding in the top gear. With a seed, mode route is a `Single` too: a batch shares its gears.
        """
        served, mode = job.served, job.mode.name
        flags = self.provider.settings.cache
        cache = flags.kv_bits is None and flags.kv_gears is None and flags.max_kv_size is None
        plain = cache and served.is_batchable and served.controller is None and job.prompt.vision is None
        if served.gearbox is None or not plain or (mode == "lossless" and not self.running):
            return None
        if mode in ("lossless", "static"):
            gear, ladder = getattr(job.mode, "gear", None), served.gearbox.ladder
            return "static", ladder.top.name if gear is None else ladder.find(gear).name
        has_seed = job.pending.request.seed is not None
        return (mode, "") if mode == "telemetry-only" or (mode == "route" and not has_seed) else None

    def step_all(self, while_reading: bool = False) -> None:
        """Generate one token of every sequence, except those that are already on the call stack.

        while_reading: a long prompt is being read, so that others wait; nested, the first one would be read last.
        """
        for key, generator in list(self.generators.items()):
            waits = while_reading and isinstance(generator, Single) and generator.has_chunks
            if waits or generator.is_over or generator in self.stepping:  # it may have ended during another's prefill
                continue
            self.stepping.append(generator)
            try:
                generator.step()
            except Exception as error:
                generator.fail(error)
            finally:
                self.stepping.pop()
            if generator.is_over:
                del self.generators[key]

    def step_others(self, prefilling: Single) -> bool:
        """Let other sequences proceed between two chunks of a prefill; return whether the server stops."""
        gearbox = prefilling.job.served.gearbox
        gear = gearbox.gear if gearbox is not None else None
        self.admit()
        self.step_all(while_reading=True)
        if gearbox is not None and gear is not None:
            gearbox.shift(gear)  # back to the prefill gear
        return self.stopping

    def close_generators(self) -> None:
        for generator in self.generators.values():
            generator.close()
        self.generators = {}

    def close(self) -> None:
        """End all sequences with an error, and free caches in the thread that made them."""
        self.closed = True
        for generator in self.generators.values():
            generator.fail(stopping())
        if self.waiting is not None:
            self.waiting.put(stopping())
        while not self.requests.empty():
            self.requests.get().put(stopping())
        self.close_generators()
        del self.prompt_cache


# From a request to the tokens of its prompt.


def prompt_of(provider: GearedProvider, request: AnyRequest, served: ServedModel) -> Prompt:
    """Return a tokenized prompt, by mlx-lm's templates.

    Raises:
        Refused: messages that the chat template refuses, a prompt far beyond the context, or template arguments that
            would control transformers instead.
    """
    if isinstance(request, TextRequest):
        check_length(served, request.routing_text)
        tokens = request.tokens or BoundedTokenizer(served).encode(request.routing_text)
        return Prompt(served, tokens, [tokens], ["assistant"])
    messages = [turn.model_dump(exclude_unset=True) for turn in request.messages]
    own = request.chat_template_kwargs or {}
    check_length(served, [messages, request.prompt_tools, own])
    if reserved := own.keys() & RESERVED:
        why = f"chat_template_kwargs: {min(reserved)} is not an argument of templates; omit it"
        raise Refused(400, why, param="chat_template_kwargs")
    arguments = provider.settings.answers.chat_template_args | own
    try:
        parts = tokenized(BoundedTokenizer(served), messages, request.prompt_tools, arguments, served.processor)
        return Prompt(served, *parts)
    except Refused:
        raise
    except Exception as error:  # a template is a program with errors of any type
        raise Refused(400, f"messages: the chat template refuses them ({one_line(error)}); use others") from error


def too_long(why: str) -> Refused:
    return Refused(400, f"the prompt {why}; use a shorter one", code="context_length_exceeded")


def check_length(served: ServedModel, content: Any) -> None:
    """Validate that text may fit the context, before tokenizing it takes seconds. Raises Refused."""
    length = sum(map(len, strings_in(content)))
    if served.context is not None and length > served.context * served.longest_token:
        raise too_long(f"has {length} characters, and the model's context {served.context} tokens")


class BoundedTokenizer:
    """A tokenizer that refuses text beyond the context early.

    Long text would take seconds, and a long word gigabytes. So text that is probably too long is first counted in
    chunks, each with few more tokens than within the text.
    """

    def __init__(self, served: ServedModel):
        self.tokenizer, self.context = served.tokenizer, served.context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **keywords: Any) -> Any:
        self.check(text)
        return self.tokenizer.encode(text, **keywords)

    def apply_chat_template(self, *messages: Any, tokenize: bool = True, **keywords: Any) -> Any:
        if tokenize:
            self.check(self.tokenizer.apply_chat_template(*messages, tokenize=False, **keywords))
        return self.tokenizer.apply_chat_template(*messages, tokenize=tokenize, **keywords)

    def check(self, text: str) -> None:
        """Validate that text has no more tokens than the context. Raises Refused."""
        if self.context is None or len(text) <= LIKELY_CHARS * self.context:
            return
        count = 0
        for start in range(0, len(text), CHUNK_CHARS):
            chunk = text[start : start + CHUNK_CHARS]
            count += max(0, len(self.tokenizer.encode(chunk, add_special_tokens=False)) - CHUNK_TOKENS)
            if count > self.context:
                raise too_long(f"has more than {count} tokens, and the model's context {self.context}")


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, except the URLs of images."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name != "image_url":
                yield from strings_in(part)


def join_to_the_end(thread: threading.Thread) -> None:
    """Wait until the operating system has ended a thread, a little after Python's join.

    At a thread's end, MLX frees its data, such as compiled functions, with Python's lock. In an exiting process this
    aborts: "terminate called without an active exception".
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    has_tasks = task.parent.exists()
    thread.join()
    if not has_tasks:
        time.sleep(0.1)
    deadline = time.monotonic() + 5
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
