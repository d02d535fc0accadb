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


def test_commands_of_a_page_are_those_that_write_a_report():
    train, evaluate = evidence.page_commands(PAGE)
    assert train == "OMP_NUM_THREADS=1 python scripts/train.py --data DIR --out small --steps 10"
    script = str(ROOT / "scripts" / "train.py")
    expected = [
        "env",
        "OMP_NUM_THREADS=1",
        sys.executable,
        script,
        "--data",
        "/texts",
        "--out",
        "small",
        "--steps",
        "10",
    ]
    assert evidence.runnable(train, Path("/texts")) == expected
    assert evidence.runnable(evaluate, Path("/texts"))[:4] == ["env", sys.executable, "-m", "gearbx_mlx"]


def test_every_table_of_the_page_has_its_commands():
    page = (ROOT / evidence.PAGE).read_text(encoding="utf-8")
    outputs = {evidence.output_of(line.split()) for line in evidence.page_commands(page)}
    assert {"demo", "stories260K-report", "babyllama105-report", "pair", "pair-writing", "small", "chi.json"} <= outputs
    assert "lossless_demo_16.json" in outputs


def test_a_command_runs_once_and_again_when_the_code_has_changed(tmp_path, monkeypatch):
    def make(keep=False):
        evidence.make_all([COUNTS], tmp_path, tmp_path, keep)
        return len((tmp_path / "runs").read_text())

    assert (make(), make()) == (1, 1)
    monkeypatch.setattr(evidence, "code_digest", lambda: "other")
    assert make(keep=True) == 1
    assert make() == 2
    assert json.loads((tmp_path / "made.json").read_text())[COUNTS]["code"] == "other"


def test_a_command_that_fails_is_made_again(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        evidence.make_all(["python -c 1/0 --json report.json"], tmp_path, tmp_path, keep=False)
    assert evidence.made_so_far(tmp_path) == {}
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text()


@pytest.mark.processes
def test_missing_models_are_one_line(tmp_path):
    line = [
        sys.executable,
        "-m",
        "research",
        "evidence",
        str(tmp_path / "out"),
        "--models",
        str(tmp_path),
        "--data",
        ".",
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"{tmp_path / 'stories260K'} is missing")
    assert not (tmp_path / "out").exists()


def policy(name, kind, kl, better=None, change=None):
    control = None if change is None else {"kl_mean_change": change[0], "kl_mean_change_error": change[1]}
    return {"name": name, "policy": kind, "kl_mean": kl, "better_static": better, "against_random_same_share": control}


def test_advice_has_the_figures_of_the_reports(tmp_path):
    for number, folder in enumerate(evidence.MODELS.values()):
        rows = [
            policy("static-8", "static", 0.01),
            policy("route-0.5", "route", 0.2 + number / 10, "static-8", (-0.1 * number, 0.04)),
            policy("kickdown-0.5", "kickdown", 0.1, None, (-0.5, 0.1)),
        ]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "evaluation.json").write_text(json.dumps({"policies": rows}))
    assert evidence.static_sentence(tmp_path).startswith("For 3 of 6 mixtures")
    assert evidence.static_sentence(tmp_path).endswith("20 to 40 times smaller")
    route = evidence.gain_sentence(tmp_path, "route", "against_random_same_share", "It")
    assert route == "It gained +0% to +20% in KL over chance, surely in 2 of 3 runs"
