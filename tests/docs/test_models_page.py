"""docs/models.md agrees with an instance of each class of mlx-lm."""

import sys
from pathlib import Path

import pytest
from architectures import installed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
FEW = "llama", "phi3small", "nemotron_h", "olmo"  # an instance of each takes too long here; the script checks the rest


@pytest.fixture
def describe(monkeypatch, tmp_path):
    """Run the script on a copy of the page: its last message, and the page's text afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import describe_models

    def run(text: str, *arguments: str) -> tuple[object, str]:
        page = tmp_path / "models.md"
        page.write_text(text, encoding="utf-8")
        monkeypatch.setattr(describe_models, "PAGE", page)
        monkeypatch.setattr(sys, "argv", ["describe_models.py", *arguments])
        try:
            describe_models.main()
        except SystemExit as stopped:
            return stopped.code, page.read_text(encoding="utf-8")
        return None, page.read_text(encoding="utf-8")

    return run


@pytest.mark.slow
def test_a_few_rows_are_what_the_script_finds(describe):
    text = PAGE.read_text(encoding="utf-8")
    assert describe(text, "--check", *FEW) == (0, text)


def test_every_class_has_a_row():
    rows = [line.split("`")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == sorted(rows, key=str.lower)
    assert set(installed()) <= set(rows)
