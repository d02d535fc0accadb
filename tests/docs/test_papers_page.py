"""docs/papers.md names functions that exist, for every section that is built."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/]+\.(?:py|cpp|h)):([\w.]+)`")
DOCUMENTS = ("GEARBX", "XFP", "Manifest", "AION", "EAD")


def sections() -> Iterator[tuple[str, str]]:
    """Yield each document's name and the text under its heading."""
    for text in PAGE.split("\n## ")[1:]:
        yield text.partition(":")[0], text


def rows(text: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def file_of(path: str) -> Path:
    return ROOT / path if path.startswith("research/") else ROOT / "gearbx_mlx" / path


def names_in(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return what a module or class defines, each with the body of its own."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return found


def is_defined(path: str, name: str) -> bool:
    """Return whether a file of Python or C++ defines a function, class, method or constant."""
    text = file_of(path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        return re.search(rf"^[^/;=\n]*\b{name}\([^;]*?\)\s*\{{", text, re.MULTILINE) is not None
    body = ast.parse(text).body
    for part in name.split("."):
        defined = names_in(body)
        if part not in defined:
            return False
        body = defined[part]
    return True


@pytest.mark.parametrize(("path", "name"), dict.fromkeys(PLACE.findall(PAGE)))
def test_a_named_function_exists(path, name):
    assert file_of(path).is_file(), path
    assert is_defined(path, name), f"{path} defines no {name}"


def test_all_five_documents_have_a_table():
    assert [name for name, _ in sections()] == [*DOCUMENTS]
    assert all(len(rows(text)) > 10 for _, text in sections())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_section_that_is_built_names_a_function(document):
    for section, what, built, where, *_ in rows(dict(sections())[document]):
        assert built in ("yes", "else", "no"), section
        assert built == "no" or PLACE.search(where), f"{document} {section}, {what}: which function?"
        assert not re.sub(PLACE, "", where).strip(" ,"), f"{document} {section}: {where}"
