"""Tables in pages of docs/: between <!-- NAME ... --> and <!-- end -->, written there by what measured them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

BLOCK = re.compile(r"(<!-- (\w+)([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def fill(page: Path, tables: Mapping[str, Callable[..., str]]) -> None:
    """Write the blocks of a page that have a function, called with the words behind their name.

    A block whose function finds a file missing stays as it is, and this is said.
    """

    def filled(match: re.Match) -> str:
        begin, name, arguments, end = match.groups()
        if name not in tables:
            return match.group()
        try:
            return begin + tables[name](*arguments.split()) + end
        except FileNotFoundError as error:
            print(f"{name}{arguments} stays as it is: {error.filename} is not there")
            return match.group()

    page.write_text(BLOCK.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")
