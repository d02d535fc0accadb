"""Typed and bounded request bodies: OpenAI's completions with the fields of mlx-lm and `gearbx`."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationInfo, model_validator
from typing_extensions import Self

from ..errors import GearbxError, choose
from ..files.reading import shown
from .bodies import AnyObject, ListOf, Part
from .grammar import ResponseFormat, function_name
from .web import Refused

DEFAULT_MODEL = "default_model"  # mlx-lm's name for the command line's model
MAX_LOGPROBS, MAX_CHOICES = 20, 8
MAX_TEXTS = 128  # sequences per request
MAX_TOOLS = 512
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of a request's sequences
MAX_CONTEXT = 2**31

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Tokens = Annotated[Whole, Field(ge=1, le=MAX_CONTEXT)]
Count = Annotated[Whole, Field(ge=0, le=MAX_CONTEXT)]
Share = Annotated[Number, Field(ge=0, le=1)]
Penalty = Annotated[Number, Field(ge=-100, le=100)]
Bits = Annotated[Number, Field(ge=0, le=64)]
Logprobs = StrictBool | Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
Name = Annotated[str, Field(max_length=4096)]
OnlyOne = Annotated[Whole, Field(ge=1, le=1)]


def refuse_field(value: Any, field: ValidationInfo) -> Any:
    """Refuse a field that would change the answer but is not supported. Raises ValueError."""
    if value not in (None, False):
        raise ValueError(f"{field.field_name} is not served; omit it")
    return value


def check_biases(content: Any) -> Any:
    """Return a valid logit_bias. Raises ValueError for its first error only: it may have an entry per token."""
    for token, bias in content.items() if isinstance(content, dict) else ():
        if not re.fullmatch(DIGITS, token):
            raise ValueError(f"logit_bias: key is not a token's number, got {shown(token)}; use numbers")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias.{token}: out of range, got {shown(bias)}; use a number from -100 to 100")
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
    """The `gearbx` of a request: mode, gear of mode static, thresholds in bits, and draft gear."""

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
    """Fields for gears in any request. The top-level `mode` and `gear` are for `extra_body` of OpenAI's client.

    The answer names unknown fields.
    """

    mode: str | None = None
    gear: str | Whole | None = None
    gearbx: Options | None = None


class StreamOptions(Part, frozen=True):
    include_usage: StrictBool = False


class BaseRequest(GearRequest, frozen=True):
    """Common fields of chat and text completions. Fields that would change the answer are refused, others ignored."""

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
        """Number of choices per prompt."""
        return self.n or 1

    def split(self) -> list[Self]:
        """Return one request per sequence, in order; with a seed, each sequence has its own."""
        parts = [one for one in self.per_prompt() for _ in range(self.choices)]
        if len(parts) > MAX_TEXTS:
            raise Refused(400, f"prompt: too many outputs, got {len(parts)}; use {MAX_TEXTS} at most", param="prompt")
        if self.seed is None:
            return parts
        return [one.model_copy(update={"seed": self.seed + place * SEED_STEP}) for place, one in enumerate(parts)]

    def per_prompt(self) -> list[Self]:
        """Return one request per prompt."""
        return [self]

    @property
    def required_tools(self) -> list[dict[str, Any]] | None:
        """Tools of which one must be called; None if none must. Raises GearbxError for a missing tool."""
        return None

    @property
    def stop_words(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def options(self) -> Options:
        """The gear options. Raises Refused for contradictory values of a mode or gear."""
        own = self.gearbx or Options()
        top_level = {"mode": self.mode, "gear": self.gear}
        for name, value in top_level.items():
            nested = getattr(own, name)
            if None not in (value, nested) and value != nested:
                why = f"{name} is {shown(value)}, and gearbx.{name} is {shown(nested)}; omit one of them"
                raise Refused(400, why, param=name)
        return own.model_copy(update={name: value for name, value in top_level.items() if value is not None})

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum tokens of the answer; None: the server's default."""
        return self.max_tokens


class ChatTurn(Part, frozen=True, extra="allow"):
    """Validated fields of a message; the chat template gets all fields."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | ListOf[AnyObject] | None = None
    tool_calls: ListOf[AnyObject] | None = None


class FunctionName(Part, frozen=True):
    name: Annotated[str, Field(min_length=1, max_length=1000)]


class NamedTool(Part, frozen=True):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(BaseRequest, frozen=True):
    """Body of /v1/chat/completions.

    `tool_choice` "none" hides the tools; "required" and a tool's name force a call with a grammar.
    """

    messages: Annotated[ListOf[ChatTurn], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: Logprobs | None = None
    top_logprobs: Annotated[Whole, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: AnyObject | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def routing_text(self) -> str:
        """The user's last message; it selects the initial gear of mode route."""
        last = next((message.content for message in reversed(self.messages) if message.role == "user"), None)
        if isinstance(last, list):
            return " ".join(str(part.get("text", "")) for part in last)
        return last or ""

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None: no log-probabilities."""
        count = max(0, self.top_logprobs or 0, 0 if self.logprobs is True else int(self.logprobs or 0))
        return count if self.logprobs or count else None

    @property
    def prompt_tools(self) -> list[dict[str, Any]] | None:
        """Tools in the prompt, or None."""
        return (self.tools or None) if self.allows_calls else None

    @property
    def allows_calls(self) -> bool:
        """Permission for tool calls; without it, they are text."""
        return self.tool_choice != "none"

    @property
    def required_tools(self) -> list[dict[str, Any]] | None:
        if self.tool_choice in (None, "none", "auto"):
            return None
        tools = self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if function_name(tool) == name]
        if not tools:
            raise GearbxError("tool_choice: not among the tools; use one of them")
        return tools


class TextRequest(BaseRequest, frozen=True):
    """Body of /v1/completions: a prompt as text or tokens, or a list of prompts."""

    prompt_tools: ClassVar[None] = None  # text completions call no tools
    allows_calls: ClassVar[bool] = False

    prompt: str | TokenList | Prompts
    logprobs: Logprobs | None = None
    echo: NotServed = None

    def per_prompt(self) -> list[Self]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self]
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]

    @property
    def routing_text(self) -> str:
        """The prompt, if it is text, to select the initial gear of mode route; "" for tokens."""
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def tokens(self) -> list[int]:
        """A prompt of tokens; empty for text."""
        return [] if isinstance(self.prompt, str) else [token for token in self.prompt if isinstance(token, int)]

    @property
    def num_logprobs(self) -> int | None:
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)


AnyRequest = ChatRequest | TextRequest
