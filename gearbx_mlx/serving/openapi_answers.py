"""What the server answers, as types for its OpenAPI description."""

from typing import Any, Literal

from msgspec import Struct


class PromptTokens(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Gears(Struct):
    """The gears that wrote an answer, and what they read. A mode adds fields of its own."""

    mode: str
    gear_tokens: dict[str, int]
    passes: dict[str, int]
    shifts: int
    mean_entropy_bits: float
    weight_bytes_per_token: float


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class Completion(Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    gearbx: Gears


class ChatCompletion(Completion, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(Completion, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class MessageUsage(Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    gearbx: Gears


class CountedTokens(Struct):
    input_tokens: int


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Struct):
    object: Literal["list"]
    data: list[Model]


class Health(Struct):
    status: Literal["ok", "unavailable"]


class ErrorObject(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """OpenAI's error object."""

    error: ErrorObject


class MessagesErrorObject(Struct):
    type: str
    message: str


class MessagesError(Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessagesErrorObject
