"""What mlx-lm's own quantizers make: it loads, runs watched, and takes turns with the original."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
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
    """Directories of the original and of what each quantizer makes of it."""
    folder = tmp_path_factory.mktemp("quantized")
    save_model(original_model(), folder / "original")
    for name, maker in MAKERS.items():
        model, config = maker(original_model())
        model.args = original_model().args
        save_model(model, folder / name)
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_it_runs_watched(made, name):
    model, tokenizer = gearbx_mlx.load(made / name)
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    responses = list(gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=6))
    assert len(responses) == 6
    assert all(0 <= response.entropy <= 12 for response in responses)
    bits = Observer(gearbx_mlx.load(made / name)[0]).bits_per_weight(None)
    assert 4 < bits < 9  # with float32 scales
    with pytest.raises(GearbxError, match="quantized already"):
        gearbx_mlx.Gearbox(model)


@pytest.mark.parametrize("name", MAKERS)
def test_it_takes_turns_with_the_original(made, name):
    large, tokenizer = gearbx_mlx.load(made / "original")
    small = gearbx_mlx.load_small(made / name, tokenizer)
    kept = {"max_tokens": 8, "small_model": small}
    for threshold, gear in ((float("inf"), "small"), (0.0, "large")):
        turns = list(gearbx_mlx.stream_generate(large, tokenizer, [1, 2, 3], thresholds=(threshold,), **kept))
        assert {response.gear for response in turns} == {gear}
    alone = list(gearbx_mlx.stream_generate(large, tokenizer, [1, 2, 3], 8, gearbox=Observer(large)))
    assert [response.token for response in turns] == [response.token for response in alone]
