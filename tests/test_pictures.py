"""The pictures in the docs show what the commands write."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS, IMAGES = ROOT / "scripts", ROOT / "docs" / "images"


@pytest.fixture
def draw_terminal(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import draw_terminal

    return draw_terminal


@pytest.fixture
def draw_chat(draw_terminal):
    import draw_chat

    return draw_chat


def words(text: str) -> list[str]:
    """The words of the terminal, without figures of time and memory, which no two runs share."""
    text = re.sub(r"[\d.]+ (tokens/s|ms)|\d[\d.]*/s", r"\1", text)
    text = re.sub(r"^memory .*$", lambda row: re.sub(r"[\d.]+ [kMG]?B", "", row[0]), text, flags=re.MULTILINE)
    return text.split()


@pytest.mark.slow
def test_the_terminal_in_the_readme_shows_what_generate_writes(draw_terminal):
    shown = (IMAGES / "generate.txt").read_text(encoding="utf-8")
    flags = shown.splitlines()[0].removeprefix("$ python -m gearbx_mlx.generate").split()
    assert words(draw_terminal.terminal_text(flags).plain) == words(shown)


@pytest.mark.slow
def test_the_chat_in_the_docs_is_what_chat_writes(draw_chat):
    shown = (IMAGES / "chat.txt").read_text(encoding="utf-8")
    assert words(draw_chat.recorded().plain) == words(shown)


def test_words_leave_out_time_and_memory_alone():
    assert words("shifts   22, 145.7 ms in all\nmemory   peak 30 MB\nread   6.33 MB") == (
        ["shifts", "22,", "ms", "in", "all", "memory", "peak", "read", "6.33", "MB"]
    )


def test_every_picture_of_the_docs_is_there_and_every_picture_is_shown():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/(\w+\.png)", page.read_text(encoding="utf-8"))}
    assert shown == {file.name for file in IMAGES.glob("*.png")}


def test_every_picture_and_every_measured_table_has_a_name_in_the_script():
    line = [sys.executable, SCRIPTS / "pictures.py", "--list"]
    listed = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    for picture in IMAGES.glob("*.png"):
        assert picture.name in listed or (picture.name.startswith("kl_") and "kl_*.png" in listed)
    for page in (ROOT / "docs").glob("*.md"):
        if "<!-- end -->" in page.read_text(encoding="utf-8"):
            assert f"docs/{page.name}" in listed


@pytest.mark.parametrize(
    ("arguments", "words"), [(["rainbow"], "rainbow: no such picture"), (["evidence"], "--results")]
)
def test_a_mistake_in_the_names_is_one_line(arguments, words):
    line = [sys.executable, SCRIPTS / "pictures.py", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
