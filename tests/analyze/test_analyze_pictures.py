"""Analyses where matplotlib is not installed: all but the pictures."""

import json
import sys

import pytest


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_trace_and_summary_are_written_and_a_line_says_what_pictures_need(command, tmp_path, without_matplotlib):
    (tmp_path / "prompts.txt").write_text("Tom has 3 apples.\n")
    out = tmp_path / "report"
    done = command("analyze", "--prompts", tmp_path / "prompts.txt", "--out", out, "-m", 4)
    assert done.status == 0, done.err
    assert "written without pictures: pictures need matplotlib; install it with: pip install matplotlib\n" in done.err
    assert done.out.split() == [str(out / "trace.jsonl"), str(out / "summary.json")]
    assert {path.name for path in out.iterdir()} == {"trace.jsonl", "summary.json"}
    assert json.loads((out / "summary.json").read_text())["tokens"] == 4
