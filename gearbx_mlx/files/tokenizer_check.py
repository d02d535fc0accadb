"""tokenizer.json, looked at before the library reads it: one of a few bytes can fill the memory.

Twelve replacements, each of which makes ten characters of one, make 10^12 of a single character. Neither a signal nor a
limit of memory stops the library in an orderly way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, json

from ..errors import GearbxError
from .reading import MALFORMED

FILE = "tokenizer.json"
MOST_TOKENS = 2**20  # the largest vocabularies have 900 000
MOST_GROWTH = 64  # characters that replacements make of one
AGAIN = "download it again"


class Vocabulary(Struct):
    vocab: dict[str, Any] | list[Any] = {}


class Tokenizer(Struct):
    """The parts of the file that decide how large everything becomes; the rest is skipped."""

    model: Vocabulary
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def check_tokenizer(directory: Path) -> None:
    """Raises GearbxError for a tokenizer that would take too much time or memory. A damaged file is the library's."""
    file = directory / FILE
    try:
        found = json.decode(file.read_bytes(), type=Tokenizer)
    except (OSError, *MALFORMED):
        return
    if len(found.model.vocab) > MOST_TOKENS:
        raise GearbxError(f"{file}: has {len(found.model.vocab)} tokens, more than {MOST_TOKENS}; {AGAIN}")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if growth(getattr(found, name)) > MOST_GROWTH:
            raise GearbxError(f"{file}: its {name} makes more than {MOST_GROWTH} characters of one; {AGAIN}")


def growth(part: Any) -> float:
    """How many characters the replacements in a part of a tokenizer make of one, at most.

    Only a replacement that finds something in what another one wrote multiplies its length.
    """
    replacements = list(replacements_in(part))
    single, chained = 1.0, 1.0
    for number, (pattern, content) in enumerate(replacements):
        others = (text for other, (_, text) in enumerate(replacements) if other != number)
        grown = len(content) / max(len(pattern), 1)
        if not pattern or any(pattern in text for text in others):
            chained *= max(grown, 1.0)
        else:
            single = max(single, grown)
    return single * chained


def replacements_in(part: Any) -> Iterator[tuple[str, str]]:
    """Each pattern and what replaces it; "" for a regular expression, which may match a single character."""
    if isinstance(part, list):
        for each in part:
            yield from replacements_in(each)
    elif isinstance(part, dict):
        pattern, content = part.get("pattern"), part.get("content")
        if part.get("type") == "Replace" and isinstance(content, str):
            text = pattern.get("String", "") if isinstance(pattern, dict) else ""
            yield text if isinstance(text, str) else "", content
        yield from replacements_in(list(part.values()))
