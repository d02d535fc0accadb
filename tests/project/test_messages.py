"""The messages of all errors in the source, which end with a remedy.

`python tests/project/test_messages.py` prints every message, and a count for each directory.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "gearbx_mlx"
REMEDY = re.compile(r"\b(use|set|pass|omit|choose)\b|\{(choose\(|remedy\})")
CHECKED = ("__main__", "benchmark", "cache", "cli", "errors", "generate", "list", "lm_eval", "settings")
EXCEPTIONS = {  # messages without a remedy, and why
    "{thing}: {error}": "the error inside has one",
    "user's cache: {error}": "the error inside has one",
    "{str(error) if place.rank == 0 else f'rank {place.rank}: {error}'}": "the error inside has one",
    "there is no kernel for it": "a finding of benchmark mac, for maintainers",
    "{report.facts.model}: mlx-lm cannot generate with it here ({one_line(error)})": "mlx-lm's own failure",
    "lm-eval: {one_line(error)}": "lm-eval's own message",
}


class Message(NamedTuple):
    """A message of an error, with the source of values in braces."""

    directory: str
    place: str
    text: str


def text_of(node: ast.expr) -> str:
    """Return a string expression as text."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def messages() -> Iterator[Message]:
    """Yield the messages of all `GearbxError` in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GearbxError" and node.args:
                directory = module.parts[0].removesuffix(".py")
                yield Message(directory, f"{module}:{node.lineno}", text_of(node.args[0]))


def lacks_remedy(message: Message) -> bool:
    return message.text not in EXCEPTIONS and not REMEDY.search(message.text.rpartition(";")[2])


MESSAGES = list(messages())


@pytest.mark.parametrize("directory", CHECKED)
def test_every_error_has_a_remedy(directory):
    found = [message for message in MESSAGES if message.directory == directory]
    assert {message.place: message.text for message in found if lacks_remedy(message)} == {}
    assert [message.place for message in found if re.search(r"\bgive\b|leave \w* ?out", message.text)] == []
    assert [message.place for message in found if message.text.endswith(".") or "\n" in message.text] == []


def test_exceptions_are_messages():
    assert EXCEPTIONS.keys() <= {message.text for message in MESSAGES}


if __name__ == "__main__":
    for message in MESSAGES:
        print(f"{'without a remedy: ' * lacks_remedy(message)}{message.place}: {message.text}")
    for name in sorted({message.directory for message in MESSAGES}):
        inside = [message for message in MESSAGES if message.directory == name]
        print(f"{name:14} {len(inside):4} messages, {sum(map(lacks_remedy, inside)):4} without a remedy")
