"""GSM8K: the number after ####, in a worked answer and in a written one."""

import re
from decimal import Decimal, InvalidOperation

from .text import NEXT_PROMPT

FINAL = re.compile(r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)")


def final_number(text: str) -> Decimal | None:
    """The number after the first ####, as GSM8K writes its answers: "#### 1,200" is 1200."""
    match = FINAL.search(text.split(NEXT_PROMPT)[0])
    try:
        return Decimal(match.group(1).replace(",", "")) if match else None
    except InvalidOperation:
        return None


def finished(text: str) -> bool:
    """Whether nothing that follows can change the final number."""
    return NEXT_PROMPT in text or re.search(r"####[^\n]*\d[^\n]*\n", text) is not None
