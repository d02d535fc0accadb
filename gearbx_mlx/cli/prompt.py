"""Flags of the prompt and of the text's length, and a prompt as tokens."""

import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct

from ..errors import GearbxError, error_context, one_line
from ..files.model_directory import context_length
from ..files.reading import json_lines, parse_json, read_text, typed
from ..settings import Settings, flag
from .terminal import note

DEFAULT_MAX_TOKENS = 100
QUERY = "<query>"  # a message that shows where the template puts one


@dataclass(frozen=True)
class PromptSettings(Settings):
    """How a prompt becomes tokens, and how many may follow it (-1: as many as fit the context)."""

    title: ClassVar[str] = "prompt"

    system_prompt: str | None = flag(None, "System prompt to be used for the chat template")
    ignore_chat_template: bool = flag(False, "Use the raw prompt without the chat template.", rare=True)
    chat_template_config: str | None = flag(None, "JSON of additional arguments for `apply_chat_template`.", rare=True)
    max_tokens: int = flag(DEFAULT_MAX_TOKENS, "Tokens to generate, -1: as many as fit the context.", also=("-m",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise GearbxError(
                f"--max-tokens is {self.max_tokens}; give 1 or more, or -1 for as many as fit the context"
            )
        self.template_keywords()

    def templates(self, tokenizer: Any) -> bool:
        """Return whether prompts go through the tokenizer's chat template."""
        return tokenizer.has_chat_template and not self.ignore_chat_template

    def template_keywords(self) -> dict[str, Any]:
        """Keywords for `apply_chat_template`. Raises GearbxError unless --chat-template-config is a JSON object."""
        with error_context("--chat-template-config"):
            return typed(parse_json(self.chat_template_config or "{}"), dict[str, Any])


@dataclass(frozen=True)
class AnswerLengthSettings(PromptSettings):
    """How a message or a problem becomes tokens, and how long its answer may be."""

    max_tokens: int = flag(256, "Tokens of an answer, -1: as many as fit the context.", also=("-m",))


def read_prompt(text: str) -> str:
    """The prompt as given, with \\n and \\t understood; - reads standard input.

    Raises:
        GearbxError: a prompt that is empty or not Unicode text; standard input that is closed or not UTF-8.
    """
    prompt = read_stdin() if text == "-" else text.replace("\\n", "\n").replace("\\t", "\t")
    check_prompt(prompt)
    return prompt


def piped_prompt() -> str | None:
    """Return the text that waits in a pipe or a file on standard input, where no prompt is given; None for none.

    A pipe in which nothing waits yet may be one that a program left open: it is not read, and a note says so.
    """
    try:
        mode, waiting = os.fstat(0).st_mode, select.select([0], [], [], 0)[0]
    except (OSError, ValueError):  # closed, or no handle of a kind that can be asked
        return None
    if sys.stdin is None or sys.stdin.closed or not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if not waiting:
        note("standard input is a pipe in which nothing waits yet; --prompt - waits for it")
        return None
    text = read_stdin()
    return text if text.strip() else None


def read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise GearbxError("--prompt - reads standard input, which is closed; give the prompt itself")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise GearbxError(f"standard input is not UTF-8 text ({error.reason}); convert it") from error
    except OSError as error:
        raise GearbxError(f"standard input cannot be read ({error.strerror}); give the prompt itself") from error


def check_prompt(prompt: str) -> None:
    """Raises GearbxError for a prompt that is empty or not Unicode text."""
    if not prompt.strip():
        raise GearbxError("the prompt is empty; give some text with --prompt, or - to read it from standard input")
    check_unicode(prompt, "the prompt")


def check_unicode(text: str, what: str) -> None:
    """Raises GearbxError for text that has halves of characters in it, as a terminal makes of wrong bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GearbxError(f"{what} is not UTF-8 text ({error.reason}); convert it") from error


AS_LINES = "give one prompt per line, or JSON Lines"
TRIVIAL = (
    "Count from one to twenty: one, two, three, four,",
    "The days of the week are Monday, Tuesday, Wednesday,",
    "A cat has 4 legs. How many legs does a cat have?",
)
HARD = (
    "Prove that there are infinitely many prime numbers.",
    "A train leaves at 60 miles an hour and another at 75 from a town 300 miles away. When do they meet?",
    "Describe a colour that nobody has ever seen.",
)


class Row(Struct, frozen=True):
    """A line of JSON Lines: the prompt is the first of these fields that has text in it."""

    question: str | None = None
    prompt: str | None = None
    text: str | None = None


def read_prompts(path: Path) -> list[str]:
    """One prompt per line, or of JSON Lines the field "question" (GSM8K), "prompt" or "text".

    Raises:
        GearbxError: a file that cannot be read, has no prompt, or has a line that is not such an object.
    """
    text = read_text(path, "text", AS_LINES)
    if path.suffix in (".jsonl", ".json"):
        prompts = [row_prompt(row, f"{path}, line {number}") for number, row in json_lines(path, text, Row, AS_LINES)]
    else:
        prompts = [line.strip("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise GearbxError(f"{path}: has no prompt; give one per line")
    return prompts


def row_prompt(row: Row, place: str) -> str:
    """Raises GearbxError for a line without text."""
    for found in (row.question, row.prompt, row.text):
        if found and found.strip():
            return found
    raise GearbxError(f"{place}: no field 'question', 'prompt' or 'text' with text in it")


def encode_prompt(
    settings: PromptSettings, tokenizer: Any, prompt: str, prefill: str | None = None, before: str | None = None
) -> list[int]:
    """Return tokens of a prompt, through the chat template if the tokenizer has one, as in mlx_lm.generate.

    Args:
        prefill: how the answer begins.
        before: takes the place of what the template puts before the message, which a prompt cache may hold already.

    Raises:
        GearbxError: an empty prompt, or one of no tokens; a configuration that does not suit the template.
    """
    check_prompt(prompt)
    if not settings.templates(tokenizer):
        check_untemplated(settings, prefill)
        tokens, remedy = tokenizer.encode((before or "") + prompt), "change --prompt"
    else:
        text = templated(settings, tokenizer, prompt, prefill)
        if before is not None:
            text = before + text[place_of_query(templated(settings, tokenizer, QUERY, prefill)) :]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        remedy = "the chat template may leave it out; use --ignore-chat-template"
    if not tokens:
        raise GearbxError(f"the prompt becomes no token; {remedy}")
    return tokens


def room_for(
    config: Mapping[str, Any],
    prompt_tokens: int,
    max_tokens: int,
    max_kv_size: int | None = None,
    what: str = "the prompt",
    remedy: str = "shorten the prompt",
) -> int:
    """Return how many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    `prompt_tokens` counts those of a prompt cache as well. `what` and `remedy` are the words of the error.

    Raises:
        GearbxError: the prompt leaves no room in the model's context.
    """
    context = context_length(dict(config))
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(f"{what} is {prompt_tokens} tokens, and the model's context {context}; {remedy}")
    if max_kv_size is not None:
        return max_tokens
    room = context - prompt_tokens
    return room if max_tokens == -1 else min(max_tokens, room)


def encoded_prompts(
    texts: Iterable[str], settings: PromptSettings, tokenizer: Any, config: Mapping[str, Any]
) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt, and how many tokens may follow it. Raises GearbxError as `room_for`."""
    tokens = [encode_prompt(settings, tokenizer, text) for text in texts]
    return [(prompt, room_for(config, len(prompt), settings.max_tokens)) for prompt in tokens]


def check_untemplated(settings: PromptSettings, prefill: str | None = None) -> None:
    """Raises GearbxError for flags that do nothing without a chat template."""
    given = {
        "--system-prompt": settings.system_prompt,
        "--prefill-response": prefill,
        "--chat-template-config": settings.chat_template_config,
    }
    why = "which --ignore-chat-template leaves out" if settings.ignore_chat_template else "and the model has none"
    for name, value in given.items():
        if value is not None:
            raise GearbxError(f"{name} goes into the chat template, {why}; leave {name} out")


def place_of_query(text: str) -> int:
    """Return where the message QUERY begins in a rendered conversation. Raises GearbxError where it is not shown."""
    found = text.rfind(QUERY)  # the last one: a user may have said it before
    if found < 0:
        raise GearbxError("the chat template does not show the message; use --ignore-chat-template")
    return found


def templated(settings: PromptSettings, tokenizer: Any, message: str, prefill: str | None) -> str:
    """Return the message in the chat template. Raises GearbxError if the template refuses it."""
    messages = []
    if settings.system_prompt is not None:
        messages.append({"role": "system", "content": settings.system_prompt})
    messages.append({"role": "user", "content": message})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    return formatted(settings, tokenizer, messages, prefill is not None)


def formatted(settings: PromptSettings, tokenizer: Any, messages: list[dict[str, str]], continued: bool = False) -> str:
    """Messages in the chat template, and what it puts before the next answer.

    Args:
        continued: the last message is the beginning of that answer.

    Raises:
        GearbxError: the template refuses them.
    """
    keywords: dict[str, Any] = {
        "tokenize": False,
        "continue_final_message": continued,
        "add_generation_prompt": not continued,
    }
    try:
        text = tokenizer.apply_chat_template(messages, **(keywords | settings.template_keywords()))
        if not isinstance(text, str):
            raise TypeError("it makes no text")
        return text
    except Exception as error:  # a template is a program, and raises what it likes
        raise GearbxError(
            f"the chat template refuses this ({one_line(error)}); use --ignore-chat-template or change the messages"
        ) from error
