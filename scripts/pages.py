"""Write tables into pages of docs/, between <!-- NAME ... --> and <!-- end -->."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

BLOCK = re.compile(r"(<!-- ([\w.-]+)([^>]*) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def fill(page: Path, tables: Mapping[str, Callable[..., str]]) -> None:
    """Write each block of a page whose name has a function, which takes the other words of the mark as arguments.

    A block stays as it is where its function raises FileNotFoundError; a line on stdout says so.
    """

    def filled(match: re.Match) -> str:
        begin, name, arguments, end = match.groups()
        if name not in tables:
            return match.group()
        try:
            return begin + tables[name](*arguments.split()) + end
        except FileNotFoundError as error:
            print(f"{name}{arguments} stays as it is: there is no {error.filename}")
            return match.group()

    page.write_text(BLOCK.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")
