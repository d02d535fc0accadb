"""Checkpoints of mlx-lm's own quantizers: they load, run watched, and take turns with the original."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from conftest import save_model, tiny_model
from mlx_lm.quant import awq, dwq, dynamic_quant, gptq
from mlx_lm.utils import quantize_model

import gearbx_mlx
from gearbx_mlx import GearbxError, Observer

DATA = mx.random.randint(0, 128, (4, 24), key=mx.random.key(1))


def original_model():
    return tiny_model(vocab_size=4096)  # that of the tokenizer


def by_gptq(model):
    model, quantization = gptq.gptq_quantize(model, DATA, 4, 64, 6, 64)
    return model, {"quantization": quantization}


def by_awq(model):
    awq.awq_quantize(model, DATA, awq.llama_awq, n_grid=2)
    return model, awq.update_config(model, {})


def by_dynamic_quant(model):
    sensitivities = dict(dynamic_quant.estimate_sensitivities(model, DATA, 4, 64, 6, 64))
    threshold = sorted(sensitivities.values())[len(sensitivities) // 2]

    def choose(path, module):
        return {"bits": 6, "group_size": 64} if sensitivities.get(path, 0) > threshold else True

    return quantize_model(model, {}, 64, 4, quant_predicate=choose)


def by_dwq(model):
    original = original_model()
    model, config = quantize_model(model, {}, 64, 4)
    texts = [(row, 0) for row in DATA.tolist()]
    train = {"batch_size": 2, "max_seq_length": 32, "seed": 0, "dtype": mx.float32}
    dwq.dwq_quantize(model, lambda batch, *_, **__: original(batch), optim.Adam(1e-4), texts, texts, **train)
    return model, config


MAKERS = {"gptq": by_gptq, "awq": by_awq, "dynamic": by_dynamic_quant, "dwq": by_dwq}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directories of the original and of each quantizer's checkpoint."""
    folder = tmp_path_factory.mktemp("quantized")
    save_model(original_model(), folder / "original")
    for name, maker in MAKERS.items():
        model, config = maker(original_model())
        model.args = original_model().args
        save_model(model, folder / name)
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MAKERS)
def test_it_runs_watched(made, name):
    model, tokenizer = gearbx_mlx.load(made / name)
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    responses = list(gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=6, mode="telemetry-only"))
    assert len(responses) == 6
    assert all(0 <= response.entropy <= 12 for response in responses)
    bits = Observer(gearbx_mlx.load(made / name)[0]).bits_per_weight(None)
    assert 4 < bits < 9  # with float32 scales


def test_its_text_is_mlx_lms_token_for_token(command, tmp_path):
    """For a checkpoint of 4 bits with scales of bfloat16, like those on the Hub."""
    save_model(tiny_model(vocab_size=4096, dtype=mx.bfloat16), tmp_path / "original")
    packing = {"quantize": True, "q_bits": 4, "q_group_size": 32, "dtype": "bfloat16"}
    mlx_lm.convert(str(tmp_path / "original"), str(tmp_path / "packed"), **packing)
    model, tokenizer = mlx_lm.load(str(tmp_path / "packed"))
    text = tokenizer.encode("Once upon a time"), 32
    expected = list(mlx_lm.stream_generate(model, tokenizer, *text))
    model, tokenizer = gearbx_mlx.load(tmp_path / "packed")
    responses = list(gearbx_mlx.stream_generate(model, tokenizer, *text, mode="telemetry-only"))
    assert [response.token for response in responses] == [response.token for response in expected]
    assert all(mx.array_equal(a.logprobs, b.logprobs).item() for a, b in zip(responses, expected))
    flags = ("-p", "Once upon a time", "--ignore-chat-template", "-m", 32, "--summary", tmp_path / "s.json")
    flags += ("--mode", "telemetry-only")
    done = command("generate", "--model", tmp_path / "packed", *flags)
    assert "".join(response.text for response in expected) in done.out
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["mode"], summary["compute_dtype"]) == ("telemetry-only", "bfloat16")


def run(model):
    return model(DATA[:1, :6])


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_the_low_gear(made, name):
    quantized, _ = gearbx_mlx.load(made / name)
    original, tokenizer = gearbx_mlx.load(made / "original")
    alone, above = run(quantized), run(original)
    gearbox = gearbx_mlx.Gearbox(original, "4,8,16", low_model=gearbx_mlx.load(made / name)[0], kernels="mlx")
    for gear in ("low", "high", "low", "mid", "high"):
        gearbox.shift(gear)
        assert mx.array_equal(run(original), alone).item() == (gear == "low")
        assert mx.array_equal(run(original), above).item() == (gear == "high")
    stored = sum(array.nbytes for layer in gearbox.layers for array in layer_of(quantized, layer.path).values())
    weights = sum(layer.module.weight.size for layer in gearbox.layers)
    assert gearbox.bits_per_weight(gearbox.ladder[0]) == pytest.approx(8 * stored / weights)
    text = original, tokenizer, [1, 2, 3], 12
    responses = list(gearbx_mlx.stream_generate(*text, gearbox=gearbox, mode=gearbx_mlx.Lossless(draft_length=3)))
    assert any(response.drafted for response in responses)
    gearbox.shift("high")
    assert [r.token for r in responses] == [r.token for r in mlx_lm.stream_generate(*text)]


def layer_of(model, path):
    return dict(model.named_modules())[path]


@pytest.mark.parametrize("name", MAKERS)
def test_the_low_gear_runs_natively(made, name, native):
    original, _ = gearbx_mlx.load(made / "original")
    quantized = gearbx_mlx.load(made / name)[0]
    alone = run(quantized)
    gearbox = gearbx_mlx.Gearbox(original, "4,16", low_model=quantized, kernels="native", activations="float")
    gearbox.shift("low")
    assert mx.abs(run(original) - alone).max().item() < 1e-4 * mx.abs(alone).max().item()
    assert {type(layer_of(original, layer.path)).__name__ for layer in gearbox.layers} >= {"NativeQuantizedLinear"}


class TestNoLowGear:
    def test_another_model(self, made):
        original, _ = gearbx_mlx.load(made / "original")
        other, _ = quantize_model(tiny_model(vocab_size=2048), {}, 64, 4)
        with pytest.raises(GearbxError, match=r"another model: \(2048, 64\) in place of \(4096, 64\) at lm_head"):
            gearbx_mlx.Gearbox(original, "4,16", low_model=other)

    def test_one_that_is_not_quantized(self, made):
        original, _ = gearbx_mlx.load(made / "original")
        with pytest.raises(GearbxError, match="not quantized"):
            gearbx_mlx.Gearbox(original, "4,16", low_model=original_model())

    def test_gears_that_are_not_kept(self, made):
        original, _ = gearbx_mlx.load(made / "original")
        low, given_up = gearbx_mlx.load(made / "gptq")[0], {"residency": "disk", "checkpoint": made / "original"}
        with pytest.raises(GearbxError, match="residency disk gives idle gears up"):
            gearbx_mlx.Gearbox(original, "4,16", low_model=low, **given_up)

    def test_none_above_it(self, made):
        original, _ = gearbx_mlx.load(made / "original")
        with pytest.raises(GearbxError, match="gears 4 have none above"):
            gearbx_mlx.Gearbox(original, "4", low_model=gearbx_mlx.load(made / "gptq")[0])

    def test_by_the_command(self, made, command):
        flags = "--max-tokens", 4, "--prompt", "Hello", "--gears", "4,16"
        done = command("generate", "--model", made / "original", "--base", made / "awq", *flags)
        assert done.status == 0, done.err
        refused = command("generate", "--model", made / "original", "--base", made / "original", *flags)
        assert refused.status == 2
        assert "is not quantized" in refused.err


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MAKERS)
def test_it_takes_turns_with_the_original(made, name):
    large, tokenizer = gearbx_mlx.load(made / "original")
    small = gearbx_mlx.load_small(made / name, tokenizer)
    for threshold, gear in ((float("inf"), "small"), (0.0, "large")):
        mode = gearbx_mlx.Pair(small, threshold)
        turns = list(gearbx_mlx.stream_generate(large, tokenizer, [1, 2, 3], 8, mode=mode))
        assert {response.gear for response in turns} == {gear}
    alone = list(gearbx_mlx.stream_generate(large, tokenizer, [1, 2, 3], 8, gearbox=Observer(large)))
    assert [response.token for response in turns] == [response.token for response in alone]
