"""From texts to windows of tokens; the model reads each with a cache of its own."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from msgspec import Struct

from ..decoding.mode import check_known
from ..errors import GearbxError
from ..files.reading import json_lines, read_text
from ..gears.discovery import vocabulary

GIVE = "give UTF-8 text or JSON Lines"
PROMPT = "Question: {question}\nAnswer:"


class TextRow(Struct, frozen=True):
    """A line of JSON Lines."""

    text: str | None = None
    question: str | None = None
    answer: str | None = None


def read_documents(path: Path) -> list[str]:
    """A text as one document; of JSON Lines, one for each: `text`, or `question` and `answer` (GSM8K).

    Raises:
        GearbxError: a file that cannot be read, is empty, or has a line that is not such an object.
    """
    if path.suffix in (".jsonl", ".json"):
        return [row["text"] if "text" in row else f"{PROMPT.format(**row)} {row['answer']}" for row in read_rows(path)]
    text = read_text(path, "text", GIVE)
    if not text.strip():
        raise GearbxError(f"{path}: is empty; give a text, or JSON Lines as in GSM8K")
    return [text]


def read_rows(path: Path, fields: tuple[str, ...] | None = None) -> list[dict[str, str]]:
    """The objects of a JSON Lines file: `text`, or `question` and `answer`, with text in each of them.

    Raises:
        GearbxError: as read_documents; `fields` are those that each line must have.
    """
    choices = [fields] if fields else [("text",), ("question", "answer")]
    rows = []
    for number, row in json_lines(path, read_text(path, "text", GIVE), TextRow, GIVE):
        filled = {name for name in TextRow.__struct_fields__ if (getattr(row, name) or "").strip()}
        names = next((names for names in choices if filled.issuperset(names)), None)
        if names is None:
            shown = " or ".join(" and ".join(repr(name) for name in names) for names in choices)
            raise GearbxError(f"{path}, line {number}: no field {shown} with text in it")
        rows.append({name: getattr(row, name) for name in names})
    if not rows:
        raise GearbxError(f"{path}: is empty; give one JSON object per line, as in GSM8K")
    return rows


def windows_of(
    tokenizer: Any, documents: list[str], context: int, tokens: int, name: str, prompt: int = 0
) -> list[list[int]]:
    """Windows of tokens, with `tokens` predictions in all, or as many as the text has.

    A single document is cut into windows that follow each other; several documents are one window each, cut to the
    context. Where the tokenizer puts a token before a text, every window begins with it.

    Args:
        context: the most tokens in a window.
        name: of the text, for the error.
        prompt: how many tokens at the beginning of each window are read, and not predicted.

    Raises:
        GearbxError: a single text that is shorter than a window, or nothing to predict.
    """
    if context < 2:
        raise GearbxError(f"a context of {context} tokens predicts nothing; give 2 or more")
    encoded = [encode(tokenizer, document) for document in documents]
    if len(encoded) == 1:
        if len(encoded[0]) < context:
            raise GearbxError(
                f"{name}: {len(encoded[0])} tokens are fewer than a window of {context}; "
                f"give more text, or --context {max(len(encoded[0]), 2)}"
            )
        encoded = stretches(encoded[0], context, beginning(tokenizer))
    windows, left = [], tokens
    for sequence in encoded:
        window = sequence[: min(context, prompt + left + 1)]
        if len(window) > prompt + 1:
            windows.append(window)
            left -= len(window) - prompt - 1
        if left <= 0:
            break
    if not windows:
        raise GearbxError(f"{name}: no document has {prompt + 2} tokens, and fewer predict nothing; give more text")
    return windows


def check_windows(windows: Iterable[Sequence[int]], model: nn.Module, name: str) -> None:
    """Raises GearbxError for a token that the model does not know: its tokenizer is not the model's.

    Args:
        name: of the text.
    """
    check_known(name, [token for window in windows for token in window], vocabulary(model))


def encode(tokenizer: Any, document: str) -> list[int]:
    """Tokens of a text. It may be longer than the model's context, since it will be cut."""
    return list(tokenizer.encode(document, verbose=False))


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text."""
    token = getattr(tokenizer, "bos_token_id", None)
    return [token] if token is not None and encode(tokenizer, "a")[:1] == [token] else []


def stretches(tokens: list[int], context: int, begin: list[int]) -> list[list[int]]:
    """A text cut into windows of at most `context` tokens, each with the tokens of `begin` before it."""
    body = tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens
    size = context - len(begin)
    return [begin + body[start : start + size] for start in range(0, len(body), size)]
