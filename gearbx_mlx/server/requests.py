"""What a client may ask for: OpenAI's completions, mlx-lm's further fields, and `gearbx`. Typed and bounded."""

import re
from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, ValidationInfo, model_validator
from typing_extensions import Self

from ..errors import GearbxError, choose
from ..files.reading import shown
from .bodies import AnyObject, ListOf, Part, parse
from .grammar import ResponseFormat, function_name
from .web import Refused

DEFAULT_MODEL = "default_model"  # mlx-lm's name for the model that the server was started with
MAX_LOGPROBS, MAX_CHOICES = 20, 8
MAX_TEXTS = 128  # of one request
MAX_TOOLS = 512
ANOTHER = 0x9E3779B97F4A7C15  # between the seeds of two texts of one request
LONGEST_CONTEXT = 2**31

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Tokens = Annotated[Whole, Field(ge=1, le=LONGEST_CONTEXT)]
Count = Annotated[Whole, Field(ge=0, le=LONGEST_CONTEXT)]
Share = Annotated[Number, Field(ge=0, le=1)]
Penalty = Annotated[Number, Field(ge=-100, le=100)]
Bits = Annotated[Number, Field(ge=0, le=64)]
Logprobs = StrictBool | Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
Name = Annotated[str, Field(max_length=4096)]
OnlyOne = Annotated[Whole, Field(ge=1, le=1)]


def refuse_field(value: Any, field: ValidationInfo) -> Any:
    """Raises ValueError for a field that would change the answer, and is not served."""
    if value not in (None, False):
        raise ValueError(f"{field.field_name} is not served; leave it out")
    return value


def check_biases(content: Any) -> Any:
    """Return a logit_bias, which may be as large as the vocabulary. Raises ValueError for its first error alone."""
    for token, bias in content.items() if isinstance(content, dict) else ():
        if not re.fullmatch(DIGITS, token):
            raise ValueError(f"logit_bias has the key {shown(token)}, which is not the number of a token")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias.{token} is {shown(bias)}; send a number from -100 to 100")
    return content


DIGITS = "[0-9]{1,20}"
Biases = Annotated[dict[Annotated[str, Field(pattern=f"^{DIGITS}$")], Penalty] | None, BeforeValidator(check_biases)]
NotServed = Annotated[Any, AfterValidator(refuse_field)]
TokenList = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str | TokenList], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
StopWord = Annotated[str, Field(min_length=1, max_length=1000)]
StopWords = Annotated[list[StopWord], Field(max_length=64, fail_fast=True)]
ToolName = Annotated[str, Field(min_length=1, max_length=128)]
Tools = Annotated[list[AnyObject], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Options(Part, frozen=True):
    """The request's own `gearbx`: a mode, the gear of mode static, thresholds in bits, and the gear that drafts."""

    mode: str | None = None
    gear: str | Whole | None = None
    thresholds: Annotated[list[Bits], Field(max_length=64, fail_fast=True)] | None = None
    draft: str | Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def has_known_fields(cls, content: Any) -> Any:
        for name in content if isinstance(content, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"{shown(name)} is not known; {choose(name, cls.model_fields)}")
        return content


class GearRequest(Part, frozen=True, extra="allow"):
    """What any request may say of gears. `mode` and `gear` may stand beside `gearbx`, as `extra_body` sends them.

    Fields that are not known are named in the answer.
    """

    mode: str | None = None
    gear: str | Whole | None = None
    gearbx: Options | None = None


class StreamOptions(Part, frozen=True):
    include_usage: StrictBool = False


class BaseRequest(GearRequest, frozen=True):
    """Fields that chat and text completions share. Others are ignored, unless the answer would be another with them."""

    model: Name | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=1000)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[Number, Field(ge=0, le=100)] | None = None
    repetition_context_size: Count = 20
    presence_penalty: Penalty | None = None
    presence_context_size: Count = 20
    frequency_penalty: Penalty | None = None
    frequency_context_size: Count = 20
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[Number, Field(ge=0, le=0.5)] = 0.1
    logit_bias: Biases = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopWord | StopWords | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: OnlyOne | None = None
    suffix: NotServed = None
    draft_model: NotServed = None
    role_mapping: NotServed = None
    adapters: Annotated[Name, Field(min_length=1)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def choices(self) -> int:
        """How many texts of each prompt are wanted."""
        return self.n or 1

    def apart(self) -> list[Self]:
        """Return a request for each text, in their order: with a seed, each text has one of its own."""
        prompts = self.prompts()
        texts = [one for one in prompts for _ in range(self.choices)]
        if len(texts) > MAX_TEXTS:
            raise Refused(400, f"{len(texts)} texts are asked for; ask for {MAX_TEXTS} at most", param="prompt")
        if self.seed is None:
            return texts
        return [one.model_copy(update={"seed": self.seed + place * ANOTHER}) for place, one in enumerate(texts)]

    def prompts(self) -> list[Self]:
        """Return a request for each prompt."""
        return [self]

    @property
    def must_call(self) -> list[dict[str, Any]] | None:
        """The tools, one of which has to be called; None: none has to. Raises GearbxError where it is missing."""
        return None

    @property
    def stop_words(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def options(self) -> Options:
        """What is said of gears. Raises Refused for a mode or a gear that is said twice, in two ways."""
        own = self.gearbx or Options()
        beside = {"mode": self.mode, "gear": self.gear}
        for name, value in beside.items():
            within = getattr(own, name)
            if None not in (value, within) and value != within:
                why = f"{name} is {shown(value)}, and gearbx.{name} is {shown(within)}; give one of them"
                raise Refused(400, why, param=name)
        return own.model_copy(update={name: value for name, value in beside.items() if value is not None})

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of the answer; None: the server's default."""
        return self.max_tokens


class ChatTurn(Part, frozen=True, extra="allow"):
    """What is checked of a message; the chat template gets all of it."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | ListOf[AnyObject] | None = None
    tool_calls: ListOf[AnyObject] | None = None


class FunctionName(Part, frozen=True):
    name: Annotated[str, Field(min_length=1, max_length=1000)]


class NamedTool(Part, frozen=True):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(BaseRequest, frozen=True):
    """The body of /v1/chat/completions.

    tool_choice: "none" hides the tools; "required" and a tool's name have a grammar make the model call.
    """

    messages: Annotated[ListOf[ChatTurn], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: Logprobs | None = None
    top_logprobs: Annotated[Whole, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: AnyObject | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def typed(self) -> str:
        """What the user typed last, which chooses the first gear of mode route."""
        last = next((message.content for message in reversed(self.messages) if message.role == "user"), None)
        if isinstance(last, list):
            return " ".join(str(part.get("text", "")) for part in last)
        return last or ""

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each; None: no log-probabilities are."""
        wanted = max(0, self.top_logprobs or 0, 0 if self.logprobs is True else int(self.logprobs or 0))
        return wanted if self.logprobs or wanted else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the prompt names; None: none."""
        return (self.tools or None) if self.takes_calls else None

    @property
    def takes_calls(self) -> bool:
        """True if an answer may have calls of tools; else they are text."""
        return self.tool_choice != "none"

    @property
    def must_call(self) -> list[dict[str, Any]] | None:
        if self.tool_choice in (None, "none", "auto"):
            return None
        tools = self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if function_name(tool) == name]
        if not tools:
            raise GearbxError("tool_choice: the tool that has to be called is not among the tools; give it there")
        return tools


class TextRequest(BaseRequest, frozen=True):
    """The body of /v1/completions: a prompt as text or as tokens, or a list of prompts."""

    shown_tools: ClassVar[None] = None  # such a text calls no tools
    takes_calls: ClassVar[bool] = False

    prompt: str | TokenList | Prompts
    logprobs: Logprobs | None = None
    echo: NotServed = None

    def prompts(self) -> list[Self]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self]
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]

    @property
    def typed(self) -> str:
        """The prompt, where it is text; else nothing. It chooses the first gear of mode route."""
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def tokens(self) -> list[int]:
        """The prompt, where it is tokens."""
        return [] if isinstance(self.prompt, str) else [token for token in self.prompt if isinstance(token, int)]

    @property
    def alternatives(self) -> int | None:
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)


AnyRequest = ChatRequest | TextRequest

# Requests of other APIs, as chat completions.

AS_IN_CHAT = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k", "mode", "gear", "gearbx"}


def as_chat(
    request: BaseModel,
    messages: list[dict[str, Any]],
    functions: list[dict[str, Any]],
    thinks: bool | None,
    **further: Any,
) -> ChatRequest:
    """Return the chat completion that answers a request of another API.

    Args:
        functions: that may be called.
        thinks: whether a model that can think before it answers does so; None: as its template has it.
        further: other fields; what is None is left out.

    Raises:
        Refused: what a chat completion cannot be.
    """
    body = request.model_dump(include=AS_IN_CHAT, exclude_none=True, exclude_unset=True) | {"messages": messages}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    if thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinks}
    return parse(ChatRequest, body | {name: value for name, value in further.items() if value is not None})


def named_tool(name: str | None) -> dict[str, Any]:
    """Return the `tool_choice` of a chat completion that has to call this function."""
    return {"type": "function", "function": {"name": name}}


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in a chat message; its arguments are JSON as text."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


Kinds = Mapping[str, Mapping[str, Any]]
"""By the type of a block the fields that it needs: with a type of Python, or the kinds of blocks in it."""


def check_block(block: Any, kinds: Kinds) -> dict[str, Any]:
    """Return a block that has what its `type` needs; text may stand for blocks in it. Raises ValueError for another."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a block has the type {shown(kind)}; {choose(kind, kinds)}")
    for name, wanted in kinds[kind].items():
        value, nested = block.get(name), isinstance(wanted, Mapping)
        if nested and isinstance(value, list):
            for part in value:
                check_block(part, wanted)
        elif not isinstance(value, str | NoneType if nested else wanted):
            raise ValueError(f"{name} of what has the type {kind} is {shown(value)}; mend it")
    return dict(block)


def of_kind(kinds: Kinds) -> AfterValidator:
    """Check a field's value as `check_block` does."""
    return AfterValidator(partial(check_block, kinds=kinds))


def chat_content(content: str | list[Any] | None) -> str | list[dict[str, Any]]:
    """Return the content of a chat message; text alone as text, since not every chat template takes parts."""
    if not isinstance(content, list):
        return content or ""
    if all("text" in part["type"] for part in content):
        return "\n".join(part["text"] for part in content)
    return [
        {"type": "text", "text": part["text"]}
        if "text" in part["type"]
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in content
    ]


def url_of(image: dict[str, Any]) -> str:
    """Return the URL of an image, which Anthropic's clients may send as a source of data."""
    source = image.get("source", {})
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(image.get("image_url") or source.get("url") or data)
