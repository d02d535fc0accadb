"""From a request to the tokens of its prompt, by mlx-lm's templates, and to what may follow them."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from mlx_lm.server import CompletionRequest, GenerationContext, ResponseGenerator
from transformers import PreTrainedTokenizerBase

from ..compat.names import text_machine, tokenized
from ..decoding.mode import Mode
from ..errors import one_line
from .guarded import Refused
from .job import Job
from .provider import Served
from .requests import ChatRequest, Request, TextRequest
from .tokens import Asked

RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}


class PromptReader:
    """Makes tokens of prompts.

    Args:
        generator: mlx-lm's, which knows templates and the marks of thoughts and tools.
    """

    def __init__(self, generator: ResponseGenerator):
        self.generator = generator

    def job(self, asked: Asked, served: Served, mode: Mode) -> Job:
        """The request's tokens, and how many may follow. Raises Refused for a prompt that does not fit."""
        read = asked.read[1] if asked.read is not None and asked.read[0] is served else self.tokens_of(asked, served)
        prompt, parts, kinds, state, vision = read
        if not prompt:
            raise Refused(400, "the prompt becomes no token", param="prompt")
        check_tokens(asked, served)
        most = asked.request.most_tokens or self.generator.cli_args.max_tokens
        machine = text_machine(self.generator, served.tokenizer)
        context = GenerationContext(
            has_tool_calling=served.tokenizer.has_tool_calling,
            has_thinking=served.tokenizer.has_thinking,
            tool_parser=served.tokenizer.tool_parser,
            text_sm=machine,
            initial_state=state,
            prompt=prompt,
        )
        return Job(asked, served, mode, context, (parts, kinds), room(served, len(prompt), most), vision)

    def tokens_of(self, asked: Asked, served: Served) -> Any:
        """Tokens of the prompt, its parts and their kinds, the state that the answer begins in, and images.

        Raises:
            Refused: messages that the chat template does not take, or that are far longer than the context.
        """
        request = asked.request
        check_length(asked, served)
        check_template_arguments(request)
        if isinstance(request, TextRequest) and request.tokens:
            return request.tokens, [request.tokens], ["assistant"], "normal", None
        if isinstance(request, TextRequest):
            wanted = CompletionRequest("text", request.text or "", [], None, None)
        else:
            assert isinstance(request, ChatRequest)
            wanted = CompletionRequest("chat", "", asked.messages, request.shown_tools, request.role_mapping)
        arguments = SimpleNamespace(chat_template_kwargs=getattr(request, "chat_template_kwargs", None))
        try:
            return tokenized(self.generator, served.tokenizer, wanted, arguments)
        except Exception as error:  # a template is a program, and raises what it likes
            raise Refused(400, f"the chat template refuses this: {one_line(error)}") from error


def room(served: Served, prompt: int, most: int) -> int:
    """How many tokens may follow a prompt of so many, `most` at most. Raises Refused where the context is full."""
    if served.context is None:
        return most
    if prompt >= served.context:
        raise Refused(
            400,
            f"the prompt is {prompt} tokens, and the model's context {served.context}; shorten it",
            code="context_length_exceeded",
        )
    return min(most, served.context - prompt)


def check_tokens(asked: Asked, served: Served) -> None:
    """Raises Refused for tokens that the vocabulary does not have."""
    request, known = asked.request, served.vocabulary
    given = request.tokens if isinstance(request, TextRequest) else []
    for token in (*given, *map(int, request.logit_bias or {})):
        if token >= known:
            raise Refused(400, f"token {token} is not in the vocabulary, which has {known}")


def check_length(asked: Asked, served: Served) -> None:
    """Raises Refused for a text that cannot fit the context, before seconds go by to make tokens of it."""
    request = asked.request
    parts = [request.text or ""] if isinstance(request, TextRequest) else texts_in(asked.messages)
    length = sum(map(len, parts))
    if served.context is not None and length > served.context * served.longest_token:
        raise Refused(
            400,
            f"the prompt has {length} characters, and the model's context {served.context} tokens; shorten it",
            code="context_length_exceeded",
        )


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, but for the addresses of images."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name != "image_url":
                yield from texts_in(part)


def check_template_arguments(request: Request) -> None:
    """Raises Refused for arguments that are not the template's own, but tell transformers what to do with it."""
    taken = (getattr(request, "chat_template_kwargs", None) or {}).keys() & RESERVED
    if taken:
        raise Refused(
            400, f"chat_template_kwargs has {min(taken)}, which is not the template's", param="chat_template_kwargs"
        )
