"""docs/papers.md names functions that exist, for every section that is built."""

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"`((?:gearbx_mlx|research)(?:\.\w+)+)`")
NATIVE = re.compile(r"`([\w/]+\.(?:cpp|h)):(\w+)`")
DOCUMENTS = ("GEARBX", "XFP", "Manifest", "AION", "EAD")


def sections() -> Iterator[tuple[str, str]]:
    """Yield each document's name and the text under its heading."""
    for text in PAGE.split("\n## ")[1:]:
        if ":" in text.partition("\n")[0]:  # the others are of all documents
            yield text.partition(":")[0], text


def rows(text: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def is_defined(path: str, name: str) -> bool:
    """Return whether a file of C++ defines a function."""
    text = (ROOT / "gearbx_mlx" / path).read_text(encoding="utf-8")
    return re.search(rf"^[^/;=\n]*\b{name}\([^;]*?\)\s*\{{", text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", dict.fromkeys(PYTHON.findall(PAGE)))
def test_a_named_function_imports(name):
    found = resolve_name(name)
    assert not isinstance(found, ModuleType), f"{name} is a module: which function?"


@pytest.mark.parametrize(("path", "name"), dict.fromkeys(NATIVE.findall(PAGE)))
def test_a_named_function_of_cpp_is_defined(path, name):
    assert is_defined(path, name), f"{path} defines no {name}"


def test_all_five_documents_have_a_table():
    assert [name for name, _ in sections()] == [*DOCUMENTS]
    assert all(len(rows(text)) > 10 for _, text in sections())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_implemented_section_names_function(document):
    for section, what, built, where, *_ in rows(dict(sections())[document]):
        assert built in ("yes", "else", "no"), section
        named = PYTHON.search(where) or NATIVE.search(where)
        assert built == "no" or named, f"{document} {section}, {what}: which function?"
        assert not NATIVE.sub("", PYTHON.sub("", where)).strip(" ,"), f"{document} {section}: {where}"


def test_missing_names_are_found():
    with pytest.raises(AttributeError):
        resolve_name("gearbx_mlx.routing.gates.ThresholdGate.updated")
    assert not is_defined("kernels/cpu/pool.cpp", "spin")
