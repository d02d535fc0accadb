r"""MATH: the answer in \boxed{...}, in a form in which equal answers are equal strings.

Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset" (arXiv:2103.03874). Their evaluation
takes the last box and compares strings after the replacements below. So 0.5 and \frac{1}{2} are the same answer, and
0.25 and \frac{1}{4} are not: scores compare with published ones only under the same rule.
"""

import re

from .text import NEXT_PROMPT

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
BRACES = re.compile(r"\\[{}]|[{}]")  # an escaped brace is a sign of a set, and closes nothing

# What is replaced, in this order; first in the answer with its spaces, then in the one without.
SPACED = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\n|\\!", ""),  # line breaks and negative spaces
        (r"\\\\", r"\\"),
        (r"\\[td]frac", r"\\frac"),
        (r"\\(?:left|right)(?![A-Za-z])", ""),
        (r"\^(?:\{\\circ\}|\\circ)", ""),  # degrees
        (r"\\?\$", ""),  # dollars, and the signs of formulas
        (r"\\(?:text|mbox)\{ .*", ""),  # a unit to the right: in MATH only units have a space there
        (r"\\?%", ""),
        (r"(^|[ {])\.(?=\d)", r"\g<1>0."),
        (r"^[^=]{0,2}=([^=]*)$", r"\1"),  # the name of a variable
    )
)
TIGHT = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\sqrt([A-Za-z0-9])", r"\\sqrt{\1}"),
        (r"\\frac([A-Za-z0-9])([A-Za-z0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac([A-Za-z0-9])\{", r"\\frac{\1}{"),
        (r"^0\.5$", r"\\frac{1}{2}"),
        (r"^(0|-?[1-9]\d*)/([1-9]\d*)$", r"\\frac{\1}{\2}"),
    )
)


def final_answer(text: str) -> str | None:
    r"""The content of the last box before the next problem, normalised; None without a box, or if it does not end."""
    text = text.split(NEXT_PROMPT)[0]
    boxes = list(BOX.finditer(text))
    content = box_content(text, boxes[-1].end()) if boxes else None
    return None if content is None else normalised(content)


def finished(text: str) -> bool:
    """Whether the line of an answer has ended: a solution ends with its box."""
    if NEXT_PROMPT in text:
        return True
    boxes = list(BOX.finditer(text))
    return bool(boxes) and "\n" in text[boxes[-1].end() :] and box_content(text, boxes[-1].end()) is not None


def box_content(text: str, start: int) -> str | None:
    """What the braces at `start` contain, braces inside them included; without braces, up to $ or the line's end.

    None: the braces do not close, or the box is empty.
    """
    if not text.startswith("{", start):
        return re.split(r"[$\n]", text[start:])[0].strip() or None
    depth = 0
    for brace in BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip() or None
    return None


def normalised(answer: str) -> str:
    """An answer as the public evaluation compares it: without units, spaces and the many ways to write a fraction."""
    for pattern, to in SPACED:
        answer = pattern.sub(to, answer)
    answer = re.sub(r"\s", "", answer)
    for pattern, to in TIGHT:
        answer = pattern.sub(to, answer)
    return answer
