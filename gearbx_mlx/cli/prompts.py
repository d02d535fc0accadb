"""Prompts: from files, and the few that ship for calibration."""

from pathlib import Path

from msgspec import Struct

from ..decoding.route import SHORT_PROMPTS
from ..errors import GearbxError
from ..files.reading import json_lines, read_text

GIVE = "give one prompt per line, or JSON Lines"
MIXED = SHORT_PROMPTS
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
    text = read_text(path, "text", GIVE)
    if path.suffix in (".jsonl", ".json"):
        prompts = [prompt_of(row, f"{path}, line {number}") for number, row in json_lines(path, text, Row, GIVE)]
    else:
        prompts = [line.strip("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise GearbxError(f"{path}: has no prompt; give one per line")
    return prompts


def prompt_of(row: Row, place: str) -> str:
    """Raises GearbxError for a line without text."""
    for found in (row.question, row.prompt, row.text):
        if found and found.strip():
            return found
    raise GearbxError(f"{place}: no field 'question', 'prompt' or 'text' with text in it")
