"""The pictures in the docs show the real output of the commands."""

import re
import shlex
from pathlib import Path

import pytest

from research import pictures, studies

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def words(text: str) -> list[str]:
    """The words of the terminal, without times and memory, which differ in every run; a short time may be left out."""
    text = re.sub(r" \(gears made in [\d.]+ s\)", "", text)
    text = re.sub(r"[\d.]+ (tokens/s|ms|s)\b", r"\1", text)
    text = re.sub(r"^memory .*$", lambda row: re.sub(r"[\d.]+ [kMG]?B", "", row[0]), text, flags=re.MULTILINE)
    return text.split()


def flags_of(shown: str) -> list[str]:
    """The flags of the command in the first line of a terminal."""
    return shlex.split(shown.splitlines()[0].removeprefix("$ gearbx_mlx generate"))


@pytest.mark.slow
def test_readme_terminal_shows_generate_output():
    shown = (IMAGES / "generate.txt").read_text(encoding="utf-8")
    assert words(pictures.terminal_text(flags_of(shown)).plain) == words(shown)


@pytest.mark.real
def test_readme_answer_comes_from_real_model(smollm2_model):
    shown = (IMAGES / "smollm2.txt").read_text(encoding="utf-8")
    answer = shown.split("\n\ntime", 1)[0].splitlines()[-3:]
    assert len(" ".join(answer).split()) > 20
    assert "\n".join(answer) in pictures.terminal_text(flags_of(shown)).plain


@pytest.mark.slow
def test_docs_chat_matches_chat_output():
    shown = (IMAGES / "chat.txt").read_text(encoding="utf-8")
    assert words(pictures.recorded().plain) == words(shown)


def test_every_docs_picture_exists_and_is_shown():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "research").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/(\w+\.png)", page.read_text(encoding="utf-8"))}
    assert shown == {file.name for file in IMAGES.glob("*.png")}


def test_pictures_and_measured_tables_have_script_names():
    listed = "\n".join([*studies.listed(), studies.OTHER_MODELS])
    for picture in IMAGES.glob("*.png"):
        assert picture.name in listed
    for folder in ("docs", "research"):
        for page in (ROOT / folder).glob("*.md"):
            if "<!-- end -->" in page.read_text(encoding="utf-8"):
                assert f"{folder}/{page.name}" in listed
