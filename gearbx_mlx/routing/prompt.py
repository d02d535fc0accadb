"""The first gear, chosen from the prompt alone (GEARBX 11); entropy takes over after a few tokens."""

import re

MATH = re.compile(r"[+*/=^<>%√∑∏∫∂∞≈≠≤≥±×÷π]|(?<=\d)\s*[-−]\s*(?=\d)")
REASONING = re.compile(
    r"\b(?:def|class|function|return|import|algorithm|code|python|javascript|java|rust|sql|regex|compile|debug|"
    r"recursion|complexity|prove|proof|derive|theorem|equation|integral|derivative|calculate|compute|solve|"
    r"explain why|step by step|analy[sz]e|implement|optimi[sz]e|reason)\b",
    re.IGNORECASE,
)
HIGH_SCORE, MID_SCORE = 4.0, 1.5


def difficulty(prompt: str) -> float:
    """A score: 2 n_math + 1.5 n_code + 0.3 min(words / 50, 3) + 1.5 [mean word length > 6.5]."""
    words = prompt.split()
    mean_length = sum(map(len, words)) / len(words) if words else 0.0
    return (
        2 * len(MATH.findall(prompt))
        + 1.5 * len(REASONING.findall(prompt))
        + 0.3 * min(len(words) / 50, 3)
        + 1.5 * (mean_length > 6.5)
    )


def first_gear(prompt: str, gears: int) -> int:
    """The number of the lowest, the middle or the top gear of a ladder with `gears` gears."""
    score = difficulty(prompt)
    if score >= HIGH_SCORE:
        return gears - 1
    return (gears - 1) // 2 if score >= MID_SCORE else 0
