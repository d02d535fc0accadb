"""Prompts: files of them, and the few that ship for calibration."""

import json
from pathlib import Path

from ..errors import GearbxError

# GEARBX 4.2: three short prompts of mixed difficulty.
MIXED = (
    "Once upon a time there was a king who had three sons.",
    "Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have?",
    "Explain why the sum of two odd numbers is always even.",
)
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


def read_prompts(path: Path) -> list[str]:
    """One prompt per line, or of JSON Lines the field "question" (GSM8K), "prompt" or "text".

    Raises:
        GearbxError: a file that cannot be read, has no prompt, or has a line that is not such an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GearbxError(f"{path}: cannot be read as text ({error}); give a file with one prompt per line") from error
    # Only "\n" ends a line of JSON Lines; splitlines() would also split at separators inside a string.
    lines = {number: line.strip("\r") for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if path.suffix in (".jsonl", ".json"):
        prompts = [from_json(line, f"{path}, line {number}") for number, line in lines.items()]
    else:
        prompts = list(lines.values())
    if not prompts:
        raise GearbxError(f"{path}: has no prompt; give one per line")
    return prompts


def from_json(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise GearbxError(f"{place}: not JSON ({error})") from error
    for name in ("question", "prompt", "text"):
        if isinstance(row, dict) and isinstance(row.get(name), str) and row[name].strip():
            return row[name]
    raise GearbxError(f"{place}: no field 'question', 'prompt' or 'text' with text in it")
