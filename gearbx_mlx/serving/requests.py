"""What a client may ask for: OpenAI's completions, mlx-lm's further fields, and `gearbx`. Typed and bounded."""

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from ..errors import GearbxError
from ..files.reading import typed
from .grammar.response_format import ResponseFormat
from .guarded import Refused

DEFAULT_MODEL = "default_model"  # mlx-lm's name for the model that the server was started with
MOST_LOGPROBS = 20
LONGEST_CONTEXT = 2**31

Tokens = Annotated[int, Meta(ge=1, le=LONGEST_CONTEXT)]
Count = Annotated[int, Meta(ge=0, le=LONGEST_CONTEXT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Bits = Annotated[float, Meta(ge=0, le=64)]
StopWord = Annotated[str, Meta(min_length=1, max_length=1000)]


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """The request's own `gearbx`: a mode, the gear of mode static, thresholds in bits, and the gear that drafts."""

    mode: str | None = None
    gear: str | int | None = None
    thresholds: list[Bits] | None = None
    draft: str | int | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class Request(Struct, frozen=True, kw_only=True):
    """Fields that chat and text completions share. Those of other servers are ignored."""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_context_size: Count = 20
    presence_penalty: Penalty | None = None
    presence_context_size: Count = 20
    frequency_penalty: Penalty | None = None
    frequency_context_size: Count = 20
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] = 0.1
    logit_bias: dict[Annotated[str, Meta(max_length=20)], Penalty] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopWord | Annotated[list[StopWord], Meta(max_length=64)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    adapters: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: ResponseFormat | None = None
    gearbx: Options | None = None

    @property
    def stop_words(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def options(self) -> Options:
        return self.gearbx or Options()

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of the answer; None: the server's default."""
        return self.max_tokens

    @property
    def typed(self) -> str:
        """What the user typed last, which chooses the first gear of mode route."""
        return ""

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens are wanted beside each."""
        return 0

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the prompt names; None: none."""
        return None

    @property
    def takes_calls(self) -> bool:
        """Whether an answer may have calls of tools; else they are text."""
        return False


class Message(Struct, frozen=True):
    """What is checked of a message; the chat template gets all of it."""

    role: Annotated[str, Meta(min_length=1, max_length=100)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionName(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=1000)]


class NamedTool(Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Request, frozen=True, kw_only=True):
    """The body of /v1/chat/completions.

    tool_choice: "none" hides the tools. "required" and a tool's name are as "auto": nothing makes a model call.
    """

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1, le=MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    role_mapping: dict[str, str] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def typed(self) -> str:
        last = next((message.content for message in reversed(self.messages) if message.role == "user"), None)
        if isinstance(last, list):
            return " ".join(str(part.get("text", "")) for part in last)
        return last or ""

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs) or self.alternatives > 0

    @property
    def alternatives(self) -> int:
        return max(0, self.top_logprobs or 0)

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        return (self.tools or None) if self.takes_calls else None

    @property
    def takes_calls(self) -> bool:
        return self.tool_choice != "none"


class TextRequest(Request, frozen=True, kw_only=True):
    """The body of /v1/completions: a prompt as text, or as tokens."""

    prompt: str | Annotated[list[str | Count], Meta(min_length=1)]
    logprobs: bool | Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def text(self) -> str | None:
        """The prompt, where it is text."""
        first = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        return first if isinstance(first, str) else None

    @property
    def typed(self) -> str:
        return self.text or ""

    @property
    def tokens(self) -> list[int]:
        """The prompt, where it is tokens."""
        return [token for token in self.prompt if isinstance(token, int)]

    @property
    def prompts(self) -> int:
        """How many prompts there are; tokens are one."""
        return 1 if isinstance(self.prompt, str) or len(self.tokens) == len(self.prompt) else len(self.prompt)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def alternatives(self) -> int:
        return 0 if self.logprobs is None else int(self.logprobs)


R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: dict[str, Any]) -> R:
    """A request's body as a typed request.

    Raises:
        Refused: a field that is missing, has another type or is out of bounds; what no model here can do.
    """
    try:
        request = typed(body, kind)
    except GearbxError as error:
        raise Refused(400, str(error)) from error
    if isinstance(request, TextRequest) and request.echo:
        raise Refused(400, "echo is not served; leave it out", param="echo")
    if isinstance(request, TextRequest) and request.prompts != 1:
        raise Refused(400, "prompt is a list of several; send one prompt a request", param="prompt")
    for token in request.logit_bias or {}:
        if not (token.isascii() and token.isdigit()):
            raise Refused(400, f"logit_bias has {token[:20]!a}, which is no number of a token", param="logit_bias")
    return request
