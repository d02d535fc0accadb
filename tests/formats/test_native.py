"""Compare with MLX what else runs natively: experts, tied heads, unmanaged layers; gears differ in last bits only."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PROMPT, assert_products_close, every_gear, float64, tiny_model
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.formats.native import Native, NativeEmbedding, with_kernels
from gearbx_mlx.formats.planes import split
from gearbx_mlx.gears.cost import LayerPath, alike_paths
from gearbx_mlx.kernels import dispatch
from gearbx_mlx.kernels import products as kernel_products

TYPES = [mx.float32, mx.bfloat16, mx.float16]
EXPERTS, ROWS, COLUMNS = 5, 33, 128


def random_pairs(*shape: int) -> tuple[mx.array, mx.array]:
    """Vectors (..., 1, I), and an expert for each."""
    return mx.random.normal((*shape, 1, COLUMNS)), mx.random.randint(0, EXPERTS, shape).astype(mx.uint32)


def products(native) -> list:
    """Products with the same experts: dense ones, affine ones, planes."""
    weight = mx.random.normal((EXPERTS, ROWS, COLUMNS))
    dense = weight.astype(mx.bfloat16)
    words, scales, biases = mx.quantize(weight, 32, 4)
    planes = split(dense, (4, 1, 1, 2), 64)
    return [
        lambda x, i: native.dense_experts(x, dense, i),
        lambda x, i: native.stack_experts(x, [words], scales, [biases], [4], 32, 0, i),
        lambda x, i: native.stack_experts(x, *planes, i),
    ]


class TestExperts:
    def test_verification_experts_equal_single_token_experts(self, native, monkeypatch):
        x, chosen = random_pairs(16, 2)  # a verification of 16 tokens, with 2 experts each
        weight = mx.random.normal((EXPERTS, ROWS, COLUMNS)).astype(mx.bfloat16)
        monkeypatch.setattr(dispatch, "MAX_NATIVE_VECTORS", 16)  # as on a Mac
        together = kernel_products.dense_experts(x, weight, chosen)
        alone = [kernel_products.dense_experts(x[i : i + 1], weight, chosen[i : i + 1]) for i in range(16)]
        assert mx.array_equal(together, mx.concatenate(alone)).item()

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_expert_matmuls_are_close_to_float64(self, native, dtype):
        """Dense, and of stacks of planes, in which scale * code and bias cancel each other."""
        x, chosen = random_pairs(40)
        weight = mx.random.normal((EXPERTS, ROWS, COLUMNS)).astype(dtype)
        stacks = [split(weight, (3, 1, 4), 32).gear(bits) for bits in (3, 4, 8)]
        found = [(stack.dequantize(), native.stack_experts(x, *stack, chosen), 8) for stack in stacks]
        for matrices, y, cancelling in [(weight, native.dense_experts(x, weight, chosen), 0), *found]:
            for p in range(40):
                matrix = float64(matrices[chosen[p].item()])
                assert_products_close(y[p], x[p], matrix, np.abs(matrix) + cancelling)

    def test_pair_is_batch_invariant(self, native):
        x, chosen = random_pairs(70)
        for product in products(native):
            together = product(x, chosen)
            for p in range(70):
                assert mx.array_equal(product(x[p : p + 1], chosen[p : p + 1]), together[p : p + 1]).item()
            order = mx.argsort(chosen)
            assert mx.array_equal(product(x[order], chosen[order]), together[order]).item()

    @pytest.mark.parametrize(
        ("x_shape", "indices_shape"),
        [((3, 1), (3, 2)), ((2, 3, 1), (2, 3, 2)), ((3, 2), (3, 2)), ((1,), (4,)), ((4,), (1,)), ((2, 1), (3,))],
    )
    def test_vectors_and_indices_are_broadcast_as_mlx_does(self, native, x_shape, indices_shape):
        x, _ = random_pairs(*x_shape)
        _, chosen = random_pairs(*indices_shape)
        weight = mx.random.normal((EXPERTS, ROWS, COLUMNS))
        expected = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen)
        found = native.dense_experts(x, weight, chosen)
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, atol=1e-4).item()

    def test_missing_expert_gives_nan(self, native):
        x, _ = random_pairs(3)
        for product in products(native):
            y = product(x, mx.array([1, EXPERTS, -1]))
            assert mx.isfinite(y[0]).all().item()
            assert mx.isnan(y[1:]).all().item()

    def test_wrong_arguments_are_refused(self, native):
        x, chosen = random_pairs(3)
        weight = mx.zeros((EXPERTS, ROWS, COLUMNS))
        for arguments in [
            (mx.zeros((3, 2, COLUMNS)), weight, chosen),  # two vectors for one index
            (x[..., :64], weight, chosen),
            (x, weight[0], chosen),
            (x, weight, chosen.astype(mx.float32)),
            (x, weight, chosen[:2]),
            (x, weight, chosen[:0]),
            (x, weight.astype(mx.int32), chosen),
        ]:
            with pytest.raises(ValueError, match=r"."):
                native.dense_experts(*arguments)

    def test_half_precision_experts_run_without_quantized_gears(self):
        """On a CPU, MLX multiplies experts in float32 only."""
        exact = tiny_model("mixtral")(PROMPT)
        model = Gearbox(tiny_model("mixtral", dtype=mx.bfloat16), "16", kernels="mlx").model
        assert mx.allclose(model(PROMPT), exact, atol=0.05).item()
        with pytest.raises(GearbxError, match="--dtype bfloat16: on a CPU, MLX multiplies experts in float32 only"):
            Gearbox(tiny_model("mixtral"), "16", dtype="bfloat16")

    @pytest.mark.parametrize("quantized", [False, True])
    def test_expert_biases_are_added(self, quantized):
        layer = SwitchLinear(COLUMNS, ROWS, EXPERTS, bias=True)
        layer.bias = mx.random.normal((EXPERTS, ROWS))
        x, chosen = random_pairs(6)
        native = with_kernels(layer, True)
        if quantized:
            mixture = nn.Sequential(layer)
            mixture.top_k = 2
            gears = Gearbox(mixture, "4,16", kernels="native", format="affine", group_size=32)
            gears.shift(4)
            native, layer = gears.model.layers[0], layer.to_quantized(32, 4)
            assert isinstance(native, QuantizedSwitchLinear)
        assert isinstance(native, Native)
        assert mx.allclose(native(x, chosen), layer(x, chosen), atol=1e-4).item()


@pytest.mark.some(7)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("format", ["planes", "affine"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gears_differ_from_mlx_in_last_bits(architecture, format, dtype):
    how = {"format": format, "group_size": 32, "activations": "float"}
    stock, fast = (Gearbox(tiny_model(architecture, dtype=dtype), kernels=k, **how) for k in ("mlx", "native"))
    is_large = architecture == "gemma3_text"  # its numbers, and so their differences
    for _ in every_gear(stock, fast):
        caches = [make_prompt_cache(box.model) for box in (stock, fast)]
        passes = [(tokens, caches) for tokens in (PROMPT, PROMPT[:, :1], PROMPT[:, 1:2])]
        passes += [] if is_large else [(mx.arange(50)[None], (None, None))]  # which is sorted by expert
        for tokens, some in passes:
            expected, found = (box.model(tokens, cache=cache) for box, cache in zip((stock, fast), some))
            assert found.dtype == expected.dtype
            assert mx.allclose(found, expected, rtol=1e-4, atol=2e-5 if is_large else 1e-5).item()
        experts = [m for m in fast.model.modules() if "Switch" in type(m).__name__ and "Linear" in type(m).__name__]
        assert bool(experts) == (architecture in ("mixtral", "qwen3_moe"))
        assert all(isinstance(m, Native) for m in experts)
    assert stock.weight_bytes_per_token(stock.gear) == fast.weight_bytes_per_token(fast.gear)


def test_tied_head_is_native_and_keeps_two_bytes():
    model = tiny_model(dtype=mx.bfloat16, tie_word_embeddings=True)
    weight = model.model.embed_tokens.weight
    stock = Gearbox(tiny_model(dtype=mx.bfloat16, tie_word_embeddings=True), activations="float")
    gearbox = Gearbox(model, kernels="native", activations="float")
    embedding = model.model.embed_tokens
    assert isinstance(embedding, NativeEmbedding)
    assert embedding.weight is weight
    assert embedding(PROMPT).dtype == mx.float32
    assert mx.array_equal(embedding(PROMPT), weight[PROMPT].astype(mx.float32)).item()
    x = mx.random.normal((1, 3, 64))
    matrix = float64(weight)
    assert_products_close(embedding.as_linear(x), x, matrix, np.abs(matrix))
    for gear in gearbox.ladder:
        assert gearbox.weight_bytes_per_token(gear) == stock.weight_bytes_per_token(gear)
    assert mx.allclose(gearbox.model(PROMPT), stock.model(PROMPT), rtol=1e-4, atol=1e-5).item()


def test_layers_without_gears_run_natively():
    stock, fast = (Gearbox(tiny_model(), manage="attention", kernels=k, activations="float") for k in ("mlx", "native"))
    assert isinstance(fast.model.layers[0].mlp.up_proj, Native)
    for _ in every_gear(stock, fast):
        assert mx.allclose(fast.model(PROMPT), stock.model(PROMPT), rtol=1e-4, atol=1e-5).item()


class TestDescription:
    def test_original_weights_use_mlx_lm_by_default(self):
        alone = Gearbox(tiny_model(dtype=mx.bfloat16), "16", kernels="auto")
        assert "mlx (with only original weights, the model stays bit-identical to mlx-lm)" in alone.describe()
        assert mx.array_equal(alone.model(PROMPT), tiny_model(dtype=mx.bfloat16)(PROMPT)).item()
        assert "native (" in Gearbox(tiny_model(), "16", kernels="native").describe()

    def test_equal_layers_share_a_line(self):
        layers = [LayerPath(f"layers.{i}.mlp.{name}", (4, 16), "native", "") for i in (0, 1, 2, 10) for name in "ab"]
        layers.append(LayerPath("layers.5.mlp.a", (8, 16), "native", ""))
        layers.append(LayerPath("lm_head", (4, 16), "native", ""))
        lines = [(path, count) for path, _, count in alike_paths(layers)]
        assert lines[:2] == [("layers.0-2,10.mlp.a", 4), ("layers.0-2,10.mlp.b", 4)]
        assert lines[2:] == [("layers.5.mlp.a", 1), ("lm_head", 1)]
