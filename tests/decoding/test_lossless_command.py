"""Mode lossless as a command: what its summary and trace say, and what it refuses."""

from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from mlx_lm import convert

from gearbx_mlx import Gearbox
from gearbx_mlx.loading import DEMO_MODEL

run = import_module("gearbx_mlx.generate.run")


@pytest.mark.slow
def test_the_summary_adds_up_the_trace(generated):
    done = generated("--gears", "3,5,16", "-m", 30)
    told, rows = done.summary, done.trace
    assert told["mode"] == "lossless"
    assert [gear["bits"] for gear in told["ladder"]] == [3, 5, 16]
    assert told["drafted"] == sum(row["drafted"] for row in rows)
    assert told["accepted"] == sum(row["from_draft"] for row in rows)
    assert told["acceptance_rate"] == pytest.approx(told["accepted"] / told["drafted"])
    assert told["verifications"] + told["accepted"] + told["lookup_accepted"] == told["tokens"] == 30
    assert told["weight_bytes_per_token"] == pytest.approx(np.mean([row["weight_bytes"] for row in rows]))
    assert f"{told['drafted']} drafted, {told['accepted']} accepted" in done.err


@pytest.mark.parametrize("length", [1, 3])
def test_draft_model_drafts_requested_tokens(generated, length):
    done = generated("--gears", 16, "--draft-model", DEMO_MODEL, "--num-draft-tokens", length, "-m", 12)
    assert {row["drafted"] for row in done.trace[:8]} == {0, length}
    assert done.summary["lookup_accepted"] == 0


def test_4_bit_checkpoint_has_no_gears_to_compare(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert(str(DEMO_MODEL), str(tmp_path / "q"), quantize=True)
    done = command("calibrate", "--model", tmp_path / "q", "--mode", "kickdown", "-m", 3, "--ignore-chat-template")
    assert done.status == 2
    assert "quantized already, without gears to compare (4-bit weights: drafts by prompt lookup; for gears," in done.err


@pytest.mark.parametrize(
    ("rejected", "gain", "told"), [(0.3, 1.2, True), (0.05, 1.2, False), (0.3, 1.01, False), (0.3, None, False)]
)
def test_rejected_drafts_suggest_calibration_speedup(capsys, monkeypatch, rejected, gain, told):
    monkeypatch.setattr(run, "speedup_of_calibration", lambda gearbox: gain)
    box = Mock(spec=Gearbox, base={})
    geared = SimpleNamespace(gearbox=box, loaded=SimpleNamespace(decision=SimpleNamespace(takes_base=True)))
    run.note_calibration_speedup(geared, {"acceptance_rate": 1 - rejected})
    said = " ".join(capsys.readouterr().err.split())
    rejections, speedup = "30% of the drafts were rejected; use --base once", "a speedup of about 1.20×"
    assert (said.startswith(rejections) and speedup in said) is told
    box.base = {"a layer": None}
    run.note_calibration_speedup(geared, {"acceptance_rate": 1 - rejected})
    assert not capsys.readouterr().err
