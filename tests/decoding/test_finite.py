"""Weights and logits that are not finite: an error that names the layer, in every mode."""

import mlx.core as mx
import pytest
from conftest import save_model, stream_pair, tiny_model

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Route, Static, batch_generate, stream_generate

PROMPT = [1, 5, 9, 2, 7]
NORM = "model.layers.1.input_layernorm"
MODES = [Route(), Kickdown(), Lossless(draft_length=2), Static()]


def with_value(value, **change):
    """A model with one such value in a norm, which gears do not manage."""
    model = tiny_model(**change)
    weight = model.model.layers[1].input_layernorm.weight
    weight[3] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_nonfinite_weight_is_named_in_every_mode(demo, mode, value):
    model = with_value(value)
    gearbox = Gearbox(model, "4,16")
    with pytest.raises(GearbxError, match=f"{NORM}: weight is not finite .*check the checkpoint"):
        list(stream_generate(model, demo.tokenizer, PROMPT, 5, mode=mode, gearbox=gearbox))


@pytest.mark.parametrize(("threshold", "broken"), [(0.0, "large"), (float("inf"), "small")])
def test_pair_names_weight_of_running_model(demo, threshold, broken):
    models = {"small": tiny_model(vocab_size=4096), "large": tiny_model(vocab_size=4096)}
    models[broken] = with_value(float("nan"), vocab_size=4096)
    with pytest.raises(GearbxError, match=NORM):
        list(stream_pair(models["small"], models["large"], demo.tokenizer, PROMPT, 5, threshold=threshold))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_overflowing_logits_name_gear_and_dtype(demo, mode):
    model = tiny_model()
    model.model.norm.weight = model.model.norm.weight * 60000.0
    gearbox = Gearbox(model, "4,16", dtype="float16")
    complaint = "logits: not finite .* in gear '(low|high)' and float16, .*use --dtype float32"
    with pytest.raises(GearbxError, match=complaint):
        list(stream_generate(model, demo.tokenizer, PROMPT, 5, mode=mode, gearbox=gearbox))


def test_convert_refuses_nonfinite_norm(command, tmp_path):
    save_model(with_value(float("nan")), tmp_path / "model")
    result = command("convert", "--model", tmp_path / "model", "--mlx-path", tmp_path / "geared", "--gears", "4,16")
    assert result.status == 2
    assert f"{NORM}.weight: has values that are not finite; check the checkpoint" in result.err


QUERY = "model.layers.1.self_attn.q_proj"


def with_query(*values, **change):
    """A model with such values in a layer that gears manage."""
    model = tiny_model(**change)
    model.model.layers[1].self_attn.q_proj.weight[3, : len(values)] = mx.array(values)
    return model


@pytest.mark.parametrize("format", ["affine", "codebook"])
def test_weights_beyond_format_range_are_called_large(command, tmp_path, format):
    model = with_query(3e38, -3e38, dtype=mx.bfloat16, vocab_size=4096)
    save_model(model, tmp_path / "model")
    convert = ("convert", "--mlx-path", tmp_path / "geared", "--format", format)
    for name in (convert, ("generate", "--mode", "static", "--gear", "low", "--format", format)):
        done = command(*name, "--model", tmp_path / "model", "--gears", "4,16")
        assert done.status == 2
        assert f"{QUERY}: has weights up to 3e+38, too large to be quantized; check the checkpoint" in done.err


def test_float16_overflow_is_not_blamed_on_checkpoint(demo):
    model = with_query(1e6, dtype=mx.bfloat16)
    with pytest.raises(GearbxError, match=f"{QUERY}: weight is infinite in float16, .*use --dtype float32"):
        list(stream_generate(model, demo.tokenizer, PROMPT, 5, gearbox=Gearbox(model, "16", dtype="float16")))


def test_a_batch_names_the_weight(demo):
    for mode in (Route(), Lossless(draft_length=2)):
        model = with_value(float("nan"))
        how = {"gearbox": Gearbox(model, "4,16"), "mode": mode, "max_tokens": 5}
        with pytest.raises(GearbxError, match=NORM):
            batch_generate(model, demo.tokenizer, [PROMPT, PROMPT], **how)
