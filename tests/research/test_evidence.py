"""One command measures the evidence again and continues after an interrupt; its advice has the reports' figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from research import evidence

ROOT = Path(__file__).parents[2]
PAGE = """Text.

    OMP_NUM_THREADS=1 python scripts/train.py --data DIR --out small \\
        --steps 10
    python -m gearbx_mlx.generate --small-model small
    gearbx_mlx evaluate --data text.txt --out report

More.
"""
COUNTS = "python -c \"open('runs', 'a').write('x')\" --json report.json"


def test_page_commands_are_those_writing_reports():
    train, evaluate = evidence.page_commands(PAGE)
    assert train == "OMP_NUM_THREADS=1 python scripts/train.py --data DIR --out small --steps 10"
    script = str(ROOT / "scripts" / "train.py")
    flags = ["--data", "/texts", "--out", "small", "--steps", "10"]
    assert evidence.runnable(train, Path("/texts")) == ["env", "OMP_NUM_THREADS=1", sys.executable, script, *flags]
    assert evidence.runnable(evaluate, Path("/texts"))[:4] == ["env", sys.executable, "-m", "gearbx_mlx"]


def test_every_table_of_the_page_has_its_commands():
    page = (ROOT / evidence.PAGE).read_text(encoding="utf-8")
    outputs = {evidence.output_of(line.split()) for line in evidence.page_commands(page)}
    assert {"demo", "stories260K-report", "babyllama105-report", "pair", "small", "chi.json"} <= outputs
    assert "lossless_demo_16.json" in outputs


def test_command_runs_once_until_code_changes(tmp_path, monkeypatch):
    def make(keep=False):
        evidence.make_all([COUNTS], tmp_path, tmp_path, keep)
        return len((tmp_path / "runs").read_text())

    assert (make(), make()) == (1, 1)
    monkeypatch.setattr(evidence, "code_digest", lambda: "other")
    assert make(keep=True) == 1
    assert make() == 2
    assert json.loads((tmp_path / "made.json").read_text())[COUNTS]["code"] == "other"


def test_failed_command_runs_again(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        evidence.make_all(["python -c 1/0 --json report.json"], tmp_path, tmp_path, keep=False)
    assert evidence.made_so_far(tmp_path) == {}
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text()
