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


def run_row(name: str, kl: float, change: float | None = None, better: str | None = None) -> dict:
    control = None if change is None else {"kl_mean_change": change, "kl_mean_change_error": 0.04}
    policy = name.split("-")[0]
    return {
        "policy": policy,
        "name": name,
        "kl_mean": kl,
        "against_random_same_share": control,
        "better_static": better,
    }


def test_advice_has_figures_of_reports(tmp_path):
    rows = [
        run_row("static-6", 0.01),
        run_row("random-0.5", 0.5, better="static-6"),
        run_row("route-0.5", 0.4, -0.02, "static-6"),
        run_row("kickdown-0.5", 0.2, -0.5, "static-6"),
    ]
    for folder in evidence.MODELS.values():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "evaluation.json").write_text(json.dumps({"policies": rows}))
    fixed = {"3": {"identical": 4, "texts": 4, "times_fewer_bytes": 1.75}}
    (tmp_path / "lossless_demo.json").write_text(json.dumps({"best_fixed": 3, "fixed": fixed}))
    shifts, exact, _, entropy = evidence.advice(tmp_path).splitlines()
    assert "does not help. In 9 of 9 runs" in shifts
    assert "20 to 50 times lower KL" in shifts
    assert "with 1.75 times fewer bytes" in exact
    assert "Against the random baseline, kickdown reduced KL by 50%, significantly in 3 of 3 runs" in entropy
    assert entropy.endswith("Route reduced it by 2%, significantly in 0 of 3 runs.")
