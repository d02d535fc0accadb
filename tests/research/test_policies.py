"""The study of policies: every policy beside its controls, and the numbers of their order."""

import pytest
from conftest import HELD_OUT

from gearbx_mlx import GearbxError
from research.policies import policies


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of every policy on the demo model."""
    out = tmp_path_factory.mktemp("report")
    return policies(HELD_OUT, out, gears="3,8,16", tokens=160, share="0.25").data | {"out": out}


@pytest.mark.slow
class TestReport:
    def test_recomputed_token_bytes_are_counted_twice(self, report):
        rows = {row["name"]: row for row in report["policies"]}
        low, top = (rows[name]["weight_bytes_per_token"] for name in ("static-3", "static-16"))
        for name in ("kickdown-0.25", "oracle-0.25", "inverted-0.25"):
            assert rows[name]["weight_bytes_per_token"] == pytest.approx(low + rows[name]["share_top"] * top)
        for name in ("random-0.25", "route-0.25"):
            share = rows[name]["share_top"]
            assert rows[name]["weight_bytes_per_token"] == pytest.approx((1 - share) * low + share * top)

    def test_oracle_kickdown_random_and_inverted_are_ordered(self, report):
        change = {
            row["policy"]: row["against_random_same_share"]["kl_mean_change"]
            for row in report["policies"]
            if row["against_random_same_share"]
        }
        assert change["oracle"] < change["kickdown"] < -0.1
        assert change["inverted"] > 0.05


@pytest.mark.slow
def test_prompts_are_read_and_not_predicted(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had three sons. " * 30)
    shared = {"tokens": 60, "context": 32, "gears": "3,16", "policy": ["static"], "prompt_tokens": 16}
    top = policies(text, tmp_path / "top", **shared).data
    same = policies(text, tmp_path / "same", prompt_gear="same", **shared).data
    assert top["prompt_tokens"] == same["prompt_tokens"] == 16
    assert top["tokens"] == 60
    kl = [{row["name"]: row["kl_mean"] for row in report["policies"]} for report in (top, same)]
    assert kl[0]["static-16"] == pytest.approx(0, abs=1e-6)
    assert kl[0]["static-3"] < kl[1]["static-3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"share": "half"}, "--share: not numbers, got 'half'"),
        ({"between": "16,4"}, "lower one first"),
        ({"between": "5,16"}, "--between"),
        ({"gears": "16"}, "--gears 16: one gear"),
        ({"policy": ["hope"]}, "--policy hope: there is none; choose from static"),
        ({"prompt_gear": "8"}, "give --prompt-tokens too"),
        ({"prompt_tokens": 300}, "--prompt-tokens is 300, and a window has 256"),
    ],
)
def test_incomparable_flags_are_refused(tmp_path, flags, words):
    with pytest.raises(GearbxError, match=words):
        policies(HELD_OUT, tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()
