"""What all modes have in common; mode static; drafts of a second model."""

import json
import math

import mlx.core as mx
import pytest
from conftest import assert_same_text, mlx_lm_loop, written

from gearbx_mlx import (
    Gearbox,
    GearbxError,
    Kickdown,
    Lossless,
    Pair,
    Route,
    Static,
    convert,
    entropy_bits,
    stream_generate,
)
from gearbx_mlx.decoding import modes
from gearbx_mlx.decoding.governor import Governor
from gearbx_mlx.gears.gearbox import Observer
from gearbx_mlx.loading import DEMO_MODEL, load
from gearbx_mlx.routing.gates import read_thresholds

TALE = "Once upon a time there was a king"


class TestRegistry:
    def test_every_mode_has_its_registered_name(self):
        assert {name: modes.mode_class(name).name for name in modes.MODES} == {name: name for name in modes.MODES}

    def test_command_and_program_share_defaults(self):
        """What the command takes without a flag is what a program gets."""
        assert modes.make_mode("route", {}) == Route()
        assert modes.make_mode("pair", {"small_model": "S"}) == Pair("S")

    def test_thresholds_file_sets_gate(self, tmp_path):
        file = tmp_path / "t.json"
        gate = {"window": 7, "min_gear_duration": 9}
        file.write_text(json.dumps({"schema": "gearbx-mlx thresholds", "version": 1, "thresholds": [2.0], **gate}))
        source = read_thresholds(str(file))
        route, pair = (modes.make_mode(name, {"thresholds": source}) for name in ("route", "pair"))
        assert (route.window, route.hysteresis, route.min_gear_duration) == (7, Route().hysteresis, 9)
        assert (pair.threshold, pair.window, pair.min_gear_duration) == (2.0, 7, 9)

    @pytest.mark.parametrize("mode", [Route(), Kickdown(), Lossless(), Static()], ids=lambda mode: mode.name)
    def test_shifting_modes_need_gearbox(self, fresh_demo, mode):
        observer = Observer(fresh_demo.model)
        with pytest.raises(GearbxError, match=f"mode '{mode.name}': needs a gearbox.*use 'telemetry-only'"):
            stream_generate(fresh_demo.model, fresh_demo.tokenizer, TALE, mode=mode, gearbox=observer)


@pytest.fixture(scope="module")
def geared(tmp_path_factory):
    """A checkpoint with three gears."""
    path = tmp_path_factory.mktemp("models") / "geared"
    convert(mlx_path=str(path), gears="4,8,16")
    return path


class TestDefaultMode:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("model", ["original", "geared"])
    @pytest.mark.parametrize(
        ("flags", "mode", "by"),
        [
            ((), "lossless", None),
            (("--gears", "16"), "static", None),
            (("--gears", "4"), "lossless", None),
            (("--gear", "low"), "static", "--gear"),
            (("--num-draft-tokens", 2), "lossless", None),
            (("--draft-model", DEMO_MODEL, "--gears", 16), "lossless", None),
            (("--thresholds", "1,2"), "route", "--thresholds"),
            (("--thresholds", "1,2", "--gear", "low"), "route", "--thresholds"),
            (("--residency", "disk:9GB"), "lossless", None),
            (("--target-tps", "1"), "route", "--target-tps"),
            (("--mode", "telemetry-only"), "telemetry-only", None),
            (("--mode", "route"), "route", None),
            (("--mode", "static", "--gear", "low"), "static", None),
        ],
        ids=str,
    )
    def test_command_drafts_or_infers_mode_from_flags(self, generated, geared, model, flags, mode, by):
        summary = generated("-m", 3, "--model", geared if model == "geared" else DEMO_MODEL, *flags).summary
        assert (summary["mode"], summary.get("mode_chosen_by")) == (mode, by)

    def test_program_drafts_if_model_can(self, demo, fresh_demo):
        def mode_of(model, **keywords):
            responses = stream_generate(model, demo.tokenizer, TALE, 6, **keywords)
            assert len(list(responses)) == 6
            return responses.summary()["mode"]

        gearbox = Gearbox(fresh_demo.model)
        assert mode_of(fresh_demo.model) == "lossless"
        assert mode_of(fresh_demo.model, draft_model=load()[0]) == "lossless"
        assert mode_of(fresh_demo.model, controller=Governor(gearbox, 1)) == "route"
        assert mode_of(fresh_demo.model, gearbox=Gearbox(fresh_demo.model, "16")) == "static"
        observed, _ = load()
        assert mode_of(observed, gearbox=Observer(observed)) == "telemetry-only"

    def test_a_geared_checkpoint_drafts_in_a_program(self, geared):
        model, tokenizer = load(geared)
        responses = stream_generate(model, tokenizer, TALE, 12)
        assert any(response.source == "draft" for response in responses)
        assert responses.summary()["mode"] == "lossless"


@pytest.mark.parametrize("mode", ["route", "lossless"])
def test_the_summary_of_a_program_is_the_commands(generated, demo, mode):
    """The summary for the same gears, without what depends on the clock."""
    prompt = ("--prompt", TALE, "--ignore-chat-template", "-m", 30, "--gears", "4,8,16", "--format", "planes")
    done = generated("--mode", mode, *prompt)
    theirs = {name: value for name, value in done.summary.items() if not name.startswith("command_")}
    model, tokenizer = load()
    responses = stream_generate(model, tokenizer, TALE, 30, mode=mode)
    assert responses.summary()["tokens"] == 0
    text = "".join(response.text for response in responses)
    ours = responses.summary("demo")
    assert text in done.out
    assert ours.keys() == theirs.keys()
    for name in ("model", "ladder", "tokens", "weight_bytes_per_token_top", "managed_layers", "compute_dtype"):
        assert ours[name] == theirs[name], name
    assert ours["tokens_per_second"] > 0
    if mode == "route":
        assert all(ours[name] == theirs[name] for name in ("gear_tokens", "shifts", "weight_bytes_per_token"))


class TestStatic:
    def test_it_stays_in_its_gear(self, generated):
        summary = generated("--mode", "static", "--gear", 8, "-m", 20).summary
        assert (summary["mode"], summary["gear_tokens"]) == ("static", {"low": 0, "mid": 20, "high": 0})
        assert summary["passes"] == {"mid": 20}
        assert summary["effective_bits_per_weight"] == pytest.approx(9.0)

    def test_output_of_each_gear_matches_mlx_lm(self, geared_demo, demo):
        for gear in geared_demo.ladder:
            how = {"mode": Static(gear.bits, prompt_gear="same"), "gearbox": geared_demo}
            ours = list(stream_generate(demo.model, demo.tokenizer, TALE, 15, **how))
            geared_demo.shift(gear)
            theirs = written(mlx_lm_loop(geared_demo)(demo.model, demo.tokenizer, TALE, 15))
            assert {r.gear for r in ours} == {gear.name}
            assert_same_text(written(ours), theirs)


class TestEntropy:
    """Every mode reports the entropy of the distribution from which a token is taken."""

    @pytest.mark.parametrize("mode", [Route(), Static(), Kickdown(), Lossless(draft_length=3)], ids=lambda m: m.name)
    def test_of_each_token(self, geared_demo, demo, mode):
        responses = list(stream_generate(demo.model, demo.tokenizer, TALE, 25, mode=mode, gearbox=geared_demo))
        expected = [float(entropy_bits(response.logprobs)) for response in responses]
        assert [response.entropy for response in responses] == pytest.approx(expected, abs=2e-4)

    def test_a_logits_processor_changes_it(self, geared_demo, demo):
        """The processor makes the distribution uniform over two tokens, whatever the model computes."""

        def two_tokens(tokens: mx.array, logits: mx.array) -> mx.array:
            return mx.where(mx.arange(logits.shape[-1]) < 2, 0.0, -math.inf)[None]

        keywords = {"gearbox": geared_demo, "logits_processors": [two_tokens]}
        for mode in (Kickdown(), Static(), Lossless(draft_length=2)):
            responses = list(stream_generate(demo.model, demo.tokenizer, TALE, 6, mode=mode, **keywords))
            assert [response.entropy for response in responses] == pytest.approx([1.0] * len(responses))
