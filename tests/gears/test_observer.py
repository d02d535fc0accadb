"""A model in its own precision: observed with mlx-lm's layers, or on native kernels of a CPU as asked for."""

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from conftest import PROMPT, tiny_model

from gearbx_mlx import Gearbox, Observer, load, stream_generate
from gearbx_mlx.decoding.pair import bytes_read
from gearbx_mlx.gears import gearbox as module
from gearbx_mlx.gears.gearbox import attached, in_one_gear

pytestmark = pytest.mark.usefixtures("native")


def quantized() -> nn.Module:
    model = tiny_model(dtype=mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    return model


def bfloat16() -> nn.Module:
    return tiny_model(dtype=mx.bfloat16)


@pytest.mark.parametrize("make", [quantized, bfloat16])
class TestOneGear:
    def test_native_layers_match_mlx_lm_within_rounding(self, make):
        model, exact = make(), make()
        exact.set_dtype(mx.float32)
        observer = Observer(model, "4,8,16", kernels="native")
        assert observer.kernels.native
        assert observer.compute_dtype == mx.float32
        assert {path.kernels for path in observer.layer_paths()} == {"native"}
        assert mx.allclose(model(PROMPT), exact(PROMPT), atol=0.02).item()

    @pytest.mark.parametrize("kernels", ["auto", "mlx"])
    def test_default_replaces_no_layer_and_equals_mlx_lm(self, make, kernels):
        model = make()
        layers = dict(model.named_modules())
        observer = Observer(model, "4,8,16", kernels=kernels)
        assert all(layers[path] is layer for path, layer in model.named_modules())
        assert {type(layer).__module__.partition(".")[0] for layer in layers.values()} == {"mlx", "mlx_lm"}
        assert observer.compute_dtype == mx.bfloat16
        assert mx.array_equal(model(PROMPT), make()(PROMPT)).item()

    def test_it_counts_the_same_bits_and_bytes(self, make):
        own, mlx = (Observer(make(), kernels=kernels) for kernels in ("native", "mlx"))
        assert own.bits_per_weight(own.gear) == mlx.bits_per_weight(mlx.gear)
        read = own.weight_bytes_per_token(own.gear)
        assert read == mlx.weight_bytes_per_token(mlx.gear) == bytes_read(own.model)

    def test_a_gpu_keeps_the_kernels_of_mlx(self, make, monkeypatch):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
        model = make()
        assert in_one_gear(model) is None
        assert attached(model) is None

    def test_model_with_gears_keeps_them(self, make):
        model = make()
        gearbox = Gearbox(model, "4" if make is quantized else "4,16")
        assert in_one_gear(model) is gearbox
        assert Observer(model).kernels is gearbox.kernels


def test_observer_after_one_gear_counts_quantized_tied_head():
    models = [tiny_model(dtype=mx.bfloat16, tie_word_embeddings=True) for _ in range(2)]
    for model in models:
        nn.quantize(model, group_size=64, bits=4)
    in_one_gear(models[1])
    found = [Observer(model) for model in models]
    assert [each.bits_per_weight(each.gear) for each in found] == [4.5, 4.5]
    assert found[0].weight_bytes_per_token(found[0].gear) == found[1].weight_bytes_per_token(found[1].gear)
    assert {layer.bits for each in found for layer in each.layer_paths()} == {(4, 4, 4)}


def test_telemetry_output_equals_mlx_lm(demo):
    def quantized_demo():
        model, _ = load()
        nn.quantize(model, group_size=64, bits=8)
        return model

    run = stream_generate(quantized_demo(), demo.tokenizer, "Once upon a time", 12, mode="telemetry-only")
    plain = mlx_lm.stream_generate(quantized_demo(), demo.tokenizer, "Once upon a time", 12)
    assert [response.token for response in run] == [response.token for response in plain]
