"""A budget instead of thresholds: what is found, reported, verified and written."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_bad_input import assert_refused

from gearbx_mlx.evaluation.replay import Recording
from gearbx_mlx.evaluation.target import Wish, candidates, in_order
from gearbx_mlx.gears.ladder import Ladder

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"


def recording(kl: list[float], agree: list[bool], entropy: list[float]) -> Recording:
    n = len(kl)
    zeros = np.zeros(n)
    return Recording(
        zeros, zeros, np.array(kl), zeros, np.array(agree), np.array(entropy), zeros, np.zeros((n, 2), int)
    )


def costing(ladder: Ladder, gear) -> float:
    return float(gear.bits)


class TestPrediction:
    """Ten tokens: the low gear is wrong on its two least certain tokens."""

    low = recording([0.0] * 8 + [1.0, 1.0], [True] * 8 + [False] * 2, [i / 10 for i in range(10)])
    top = recording([0.0] * 10, [True] * 10, [0.0] * 10)

    def found(self, wish: Wish):
        return in_order(candidates(dict(zip(Ladder([4, 16]), (self.low, self.top))), costing), wish)

    def test_kickdown_of_just_those_tokens(self):
        kickdowns = [c for c in self.found(Wish(agreement=1.0)) if c.mode == "kickdown"]
        assert kickdowns[0].predicted.weight_bytes == pytest.approx(4 + 0.2 * 16)
        assert kickdowns[0].predicted.kl_mean == 0
        assert 0.7 <= kickdowns[0].thresholds[0] < 0.8

    def test_a_static_gear_where_it_is_enough(self):
        best = self.found(Wish(agreement=0.8))[0]
        assert (best.mode, best.gears) == ("static", (4,))
        assert best.predicted.kl_mean == pytest.approx(0.2)

    def test_the_most_quality_for_given_bytes(self):
        best = self.found(Wish(weight_bytes=6.0))[0]
        assert best.predicted.weight_bytes <= 6
        assert best.predicted.kl_mean == pytest.approx(0.1)  # one of the two: 4 + 0.1 * 16

    def test_lossless_is_exact(self):
        lossless = [c for c in self.found(Wish(kl=0.0)) if c.mode == "lossless"]
        assert lossless[0].predicted.agreement == 1

    def test_none(self):
        with pytest.raises(ValueError, match=r"no gear.*3 weight bytes.*the least is 4"):
            self.found(Wish(weight_bytes=3))


def calibrate(command, out: Path, *more: object):
    flags = ("--data", HELD_OUT, "--tokens", 150, "--kernels", "auto", "--out", out)
    return command("calibrate", *flags, *more)


@pytest.mark.slow
def test_lossless_for_perfect_agreement_and_generate_reads_it(command, tmp_path):
    out, summary = tmp_path / "policy.json", tmp_path / "s.json"
    result = calibrate(command, out, "--target-agreement", 1, "--gears", "4,16")
    assert result.status == 0
    made = json.loads(out.read_text())
    assert (made["gears"], made["draft"]) == ([4, 16], 4)
    assert made["verified"]["agreement"] == 1
    assert made["verified"]["weight_bytes"] == pytest.approx(made["predicted"]["weight_bytes"], rel=0.15)
    written = command("generate", "--thresholds", out, "--max-tokens", 20, "--summary", summary)
    assert written.status == 0
    told = json.loads(summary.read_text())
    assert told["mode"] == "lossless"
    assert [gear["bits"] for gear in told["ladder"]] == [4, 16]


@pytest.mark.slow
def test_a_static_gear_is_recommended_where_it_is_better(command, tmp_path):
    out, summary = tmp_path / "policy.json", tmp_path / "s.json"
    result = calibrate(command, out, "--target-kl", 0.002, "--gears", "4,6,16")
    assert "a static gear is better" in result.err
    made = json.loads(out.read_text())
    assert (made["mode"], made["gears"]) == ("static", [6])
    assert made["verified"]["kl_mean"] <= 0.002
    assert command("generate", "--thresholds", out, "--max-tokens", 5, "--summary", summary).status == 0
    assert [gear["bits"] for gear in json.loads(summary.read_text())["ladder"]] == [6]


@pytest.mark.slow
def test_kickdown_within_given_bytes_and_generate_reads_it(command, tmp_path):
    out, summary = tmp_path / "policy.json", tmp_path / "s.json"
    bytes_of = {}
    for gears in ("3", "4"):
        command("generate", "--gears", gears, "--max-tokens", 2, "--summary", summary)
        bytes_of[gears] = json.loads(summary.read_text())["weight_bytes_per_token"]
    allowed = bytes_of["4"] - 1  # too little for the static gear of 4 bits, but more than the gear of 3 needs
    assert calibrate(command, out, "--target-bytes", allowed, "--gears", "3,4,16").status == 0
    made = json.loads(out.read_text())
    assert made["mode"] == "kickdown"
    assert bytes_of["3"] < made["verified"]["weight_bytes"] <= allowed
    written = command("generate", "--thresholds", out, "--max-tokens", 10, "--summary", summary)
    assert written.status == 0
    assert json.loads(summary.read_text())["mode"] == "kickdown"

    assert_refused(command("generate", "--thresholds", out, "--gears", "3,4,16"), out, "made for gears")
    out.write_text(json.dumps(made | {"fingerprint": "0" * 32}))
    assert_refused(command("generate", "--thresholds", out), out, "made for another model")


def test_mistakes(command, tmp_path):
    out = tmp_path / "policy.json"
    assert_refused(calibrate(command, out, "--target-agreement", 1.5), "target agreement is 1.5")
    assert_refused(calibrate(command, out, "--target-kl", -1), "target KL is -1")
    assert_refused(calibrate(command, out, "--target-bytes", 10, "--gears", "4,16"), "10 weight bytes", "the least is")
    assert not out.exists()
