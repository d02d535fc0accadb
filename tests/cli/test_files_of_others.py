"""Files made for another model or ladder, and nearly empty models, get a message or a refusal."""

import json

import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, convert, load, stream_generate
from gearbx_mlx.routing.gates import ThresholdFile, fitting


@pytest.fixture
def thresholds(tmp_path):
    """Writes a thresholds file for the demo model, with changes; its path."""

    def write(**changes):
        content = {"thresholds": [1.0, 2.0], "vocab_size": 4096, "model": "other", "method": "x", "gears": [4, 8, 16]}
        content |= {"tokens": 1, "window": 3, "hysteresis": 0.1, "min_gear_duration": 4}
        content |= {"schema": "gearbx-mlx thresholds", "version": 1}
        path = tmp_path / "t.json"
        path.write_text(json.dumps(content | changes))
        return path

    return write


class TestThresholds:
    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({}, ""),
            ({"fingerprint": "another"}, "made for another model (other)"),
            ({"gears": [3, 8, 16]}, "made for gears 3,8,16, not 4,8,16"),
        ],
    )
    def test_of_another_model_or_ladder_are_taken_with_a_word(self, command, thresholds, changes, word):
        done = command("generate", "-m", 3, "--thresholds", thresholds(**changes))
        assert done.status == 0
        assert ("warning: thresholds" in done.err) == bool(word)
        assert word in done.err

    def test_that_are_negative_are_refused(self, command, thresholds):
        done = command("generate", "-m", 3, "--thresholds", thresholds(thresholds=[-1.0, 2.0]))
        assert (done.status, done.out) == (2, "")
        assert "-1 bits" in done.err

    def test_that_calibrate_writes_are_of_their_model(self, command, tmp_path):
        assert command("calibrate", "-m", 6, "--out", tmp_path / "t.json").status == 0
        written = ThresholdFile(**json.loads((tmp_path / "t.json").read_text()))
        with pytest.warns(GearbxWarning, match="made for another model"):
            fitting(written, written.gears, written.vocab_size, "another")


@pytest.mark.parametrize("kernels", ["mlx", "auto"])
@pytest.mark.parametrize("mode", [Lossless(), Lossless(draft_length=2)], ids=["rounds", "fixed"])
def test_a_vocabulary_of_one_token_has_no_near_ties(demo, kernels, mode):
    model = tiny_model(vocab_size=1)
    gearbox = Gearbox(model, "4,16", kernels=kernels)
    responses = list(stream_generate(model, demo.tokenizer, [0, 0], 6, mode=mode, gearbox=gearbox))
    assert {(response.token, response.near_tie) for response in responses} == {(0, False)}


def test_a_prompt_beyond_the_context_gets_one_line(command, recwarn):
    done = command("generate", "--prompt", "a " * 2100, "--ignore-chat-template")
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert load()[1].deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"]


def test_mlx_lms_keywords_of_convert_are_told_what_to_use(tmp_path):
    for keywords in ({"quantize": True}, {"q_bits": 4}):
        with pytest.raises(GearbxError, match='give gears="4,8,16"'):
            convert(mlx_path=tmp_path / "out", **keywords)


def test_allocate_without_a_manifest_names_what_makes_one(command, tmp_path):
    done = command("allocate", "--manifest", tmp_path / "none.json")
    assert (done.status, "sensitivity" in done.err) == (2, True)
