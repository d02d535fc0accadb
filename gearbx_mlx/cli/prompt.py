"""Flags of prompt and output length, and the conversion of a prompt to tokens."""

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
QUERY = "<query>"  # a message whose place in a rendered template is searched


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Conversion of a prompt to tokens, and the maximum output length (-1: as many as fit the context)."""

    title: ClassVar[str] = "prompt"

    system_prompt: str | None = flag(None, "System prompt for the chat template")
    ignore_chat_template: bool = flag(False, "Use the raw prompt without the chat template", rare=True)
    chat_template_config: str | None = flag(None, "JSON of additional arguments for `apply_chat_template`", rare=True)
    max_tokens: int = flag(
        DEFAULT_MAX_TOKENS, "Maximum number of tokens to generate; -1: as many as fit the context", also=("-m",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise GearbxError(
                f"--max-tokens: out of range, got {self.max_tokens}; use 1 or more, or -1 to fill the context"
            )
        self.template_keywords()

    def templates(self, tokenizer: Any) -> bool:
        """Return whether prompts are rendered with the tokenizer's chat template."""
        return tokenizer.has_chat_template and not self.ignore_chat_template

    def template_keywords(self) -> dict[str, Any]:
        """Return keywords for `apply_chat_template`, from a JSON object in --chat-template-config."""
        with error_context("--chat-template-config"):
            return typed(parse_json(self.chat_template_config or "{}"), dict[str, Any])


@dataclass(frozen=True)
class AnswerLengthSettings(PromptSettings):
    """Conversion of a message to tokens, and the maximum length of its answer."""

    max_tokens: int = flag(256, "Maximum number of tokens in an answer; -1: as many as fit the context", also=("-m",))


def read_prompt(text: str) -> str:
    """Return the prompt with escapes \\n and \\t replaced; - reads standard input.

    Raises:
        GearbxError: an empty prompt, one that is not Unicode, or standard input that is closed or not UTF-8.
    """
    prompt = read_stdin() if text == "-" else text.replace("\\n", "\n").replace("\\t", "\t")
    check_prompt(prompt)
    return prompt


def piped_prompt() -> str | None:
    """Return the text in a pipe or file on standard input, used without --prompt; None if there is none.

    An empty pipe may have been left open by a program, so it is not read, and a note is printed.
    """
    try:
        mode, waiting = os.fstat(0).st_mode, select.select([0], [], [], 0)[0]
    except (OSError, ValueError):  # closed, or a handle without a status
        return None
    if sys.stdin is None or sys.stdin.closed or not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if not waiting:
        note("standard input: an empty pipe is ignored; use --prompt - to wait for it")
        return None
    text = read_stdin()
    return text if text.strip() else None


def read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise GearbxError("--prompt -: standard input is closed; pass the prompt itself")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise GearbxError(f"standard input: not UTF-8 text ({error.reason}); use UTF-8") from error
    except OSError as error:
        raise GearbxError(f"standard input: cannot be read ({error.strerror}); pass the prompt itself") from error


def check_prompt(prompt: str) -> None:
    """Validate that a prompt is not empty, and is Unicode text."""
    if not prompt.strip():
        raise GearbxError("--prompt: empty; pass some text, or - for standard input")
    check_unicode(prompt, "the prompt")


def check_unicode(text: str, what: str) -> None:
    """Validate that text has no lone surrogates: Python decodes a terminal's invalid bytes to them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GearbxError(f"{what}: not UTF-8 text ({error.reason}); use UTF-8") from error


AS_LINES = "use one prompt per line, or JSON Lines"
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
    """A line of JSON Lines. The prompt is the first field that has text."""

    question: str | None = None
    prompt: str | None = None
    text: str | None = None


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one per line, or in JSON Lines in "question" (GSM8K), "prompt" or "text".

    Raises:
        GearbxError: a file that cannot be read, without prompts, or with an invalid line.
    """
    text = read_text(path, "text", AS_LINES)
    if path.suffix in (".jsonl", ".json"):
        prompts = [row_prompt(row, f"{path}, line {number}") for number, row in json_lines(path, text, Row, AS_LINES)]
    else:
        prompts = [line.strip("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise GearbxError(f"{path}: no prompt; use one per line")
    return prompts


def row_prompt(row: Row, place: str) -> str:
    """Return the text of a line."""
    for found in (row.question, row.prompt, row.text):
        if found and found.strip():
            return found
    raise GearbxError(f"{place}: no text; use a field 'question', 'prompt' or 'text'")


def encode_prompt(
    settings: PromptSettings, tokenizer: Any, prompt: str, prefill: str | None = None, before: str | None = None
) -> list[int]:
    """Return the tokens of a prompt, in the tokenizer's chat template if any, as in mlx_lm.generate.

    Args:
        prefill: the start of the answer.
        before: replaces the template's text before the message; a prompt cache may already contain that text.

    Raises:
        GearbxError: a prompt without text or tokens, or a configuration that the template refuses.
    """
    check_prompt(prompt)
    if not settings.templates(tokenizer):
        check_untemplated(settings, prefill)
        tokens, remedy = tokenizer.encode((before or "") + prompt), "use another --prompt"
    else:
        text = templated(settings, tokenizer, prompt, prefill)
        if before is not None:
            text = before + text[place_of_query(templated(settings, tokenizer, QUERY, prefill)) :]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        remedy = "use --ignore-chat-template if the chat template omits it"
    if not tokens:
        raise GearbxError(f"--prompt: becomes no token; {remedy}")
    return tokens


def room_for(
    config: Mapping[str, Any],
    prompt_tokens: int,
    max_tokens: int,
    max_kv_size: int | None = None,
    what: str = "the prompt",
    remedy: str = "use a shorter prompt",
) -> int:
    """Return the number of tokens to generate after a prompt. A rotating cache (max_kv_size) has no limit.

    Args:
        prompt_tokens: including a prompt cache's tokens.
        what, remedy: words of the error.

    Raises:
        GearbxError: the prompt fills the model's context.
    """
    context = context_length(dict(config))
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(f"{what}: exceeds the model's context of {context}, got {prompt_tokens} tokens; {remedy}")
    if max_kv_size is not None:
        return max_tokens
    room = context - prompt_tokens
    return room if max_tokens == -1 else min(max_tokens, room)


def encoded_prompts(
    texts: Iterable[str], settings: PromptSettings, tokenizer: Any, config: Mapping[str, Any]
) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt, and the maximum length of its output."""
    tokens = [encode_prompt(settings, tokenizer, text) for text in texts]
    return [(prompt, room_for(config, len(prompt), settings.max_tokens)) for prompt in tokens]


def check_untemplated(settings: PromptSettings, prefill: str | None = None) -> None:
    """Validate that flags of the chat template are not set without one."""
    given = {
        "--system-prompt": settings.system_prompt,
        "--prefill-response": prefill,
        "--chat-template-config": settings.chat_template_config,
    }
    why = "which --ignore-chat-template disables" if settings.ignore_chat_template else "and the model has none"
    for name, value in given.items():
        if value is not None:
            raise GearbxError(f"{name}: goes into the chat template, {why}; omit {name}")


def place_of_query(text: str) -> int:
    """Return the index of the message QUERY in a rendered conversation."""
    found = text.rfind(QUERY)  # the last one, because earlier messages may contain it
    if found < 0:
        raise GearbxError("chat template: does not contain the message; use --ignore-chat-template")
    return found


def templated(settings: PromptSettings, tokenizer: Any, message: str, prefill: str | None) -> str:
    """Return the message, rendered with the chat template."""
    messages = []
    if settings.system_prompt is not None:
        messages.append({"role": "system", "content": settings.system_prompt})
    messages.append({"role": "user", "content": message})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    return formatted(settings, tokenizer, messages, prefill is not None)


def formatted(settings: PromptSettings, tokenizer: Any, messages: list[dict[str, str]], continued: bool = False) -> str:
    """Return messages, rendered with the chat template, up to the next answer.

    Args:
        continued: True if the last message is the start of that answer.

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
            raise TypeError("its result is not text")
        return text
    except Exception as error:  # a template is a program with any exceptions
        raise GearbxError(
            f"chat template: refuses the messages ({one_line(error)}); use --ignore-chat-template, or other messages"
        ) from error
