"""Norms, rotary positions and SwiGLU in native CPU kernels, and models that use them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PROMPT, float64, normal, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE

from gearbx_mlx.formats.fused import NativeLlama3RoPE
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.kernels import dispatch

TYPES = [mx.float32, mx.bfloat16, mx.float16]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.usefixtures("native")
class TestNorms:
    @settings(max_examples=40)
    @given(st.integers(1, 20), st.integers(1, 300), st.sampled_from(TYPES), st.integers(0, 1 << 30))
    def test_norms_are_exact_and_batch_invariant(self, rows, width, dtype, seed):
        x, weight = normal(rows, width, seed=seed), normal(width, seed=seed + 1).astype(dtype)
        y = dispatch.rms_norm(x, weight, 1e-5)
        exact = float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + 1e-5) * float64(weight)
        np.testing.assert_allclose(np.array(y), exact, rtol=1e-5, atol=1e-7)
        assert mx.array_equal(dispatch.rms_norm(x[-1:], weight, 1e-5), y[-1:]).item()

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("weights", TYPES, ids=str)
    def test_dtype_matches_mlx(self, dtype, weights):
        x, weight = normal(2, 3, 40).astype(dtype), normal(40, seed=1).astype(weights)
        y, expected = dispatch.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5)
        assert y.dtype == expected.dtype
        assert y.shape == x.shape
        assert mx.allclose(y, expected, rtol=2e-2).item()

    def test_empty_zero_and_nonfinite_inputs(self):
        weight = mx.ones(8)
        assert dispatch.rms_norm(mx.zeros((0, 8)), weight, 1e-5).shape == (0, 8)
        y = dispatch.rms_norm(mx.array([[0.0] * 8, [1.0] * 7 + [float("nan")], [1.0] * 8]), weight, 1e-5)
        assert (y[0] == 0).all().item()
        assert mx.isnan(y[1]).all().item()
        assert mx.allclose(y[2], weight).item()

    def test_weight_of_wrong_width_is_refused(self):
        with pytest.raises(ValueError, match="x and the weights differ in width"):
            dispatch.rms_norm(mx.ones((1, 8)), mx.ones(7), 1e-5)


@pytest.mark.usefixtures("native")
class TestRotaryPositions:
    @settings(max_examples=40)
    @given(
        heads=st.integers(1, 4),
        length=st.integers(1, 9),
        half=st.integers(1, 20),
        behind=st.integers(0, 5),
        traditional=st.booleans(),
        scale=st.sampled_from([1.0, 0.25]),
        offset=st.integers(0, 5000),
        dtype=st.sampled_from(TYPES),
    )
    def test_rotary_positions_equal_mlx(self, heads, length, half, behind, traditional, scale, offset, dtype):
        stock = nn.RoPE(2 * half, traditional, base=10000.0, scale=scale)
        x = normal(2, length, heads, 2 * half + behind).astype(dtype).swapaxes(1, 2)
        y = with_kernels(stock, native=True)(x, offset)
        assert y.dtype == dtype
        # In half precision only the result is rounded, where MLX also rounds products.
        rounding = {mx.float32: 1e-5, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
        assert mx.allclose(y, stock(x.astype(mx.float32), offset), rtol=rounding, atol=1e-5).item()

    def test_position_is_batch_invariant(self):
        turn, x = with_kernels(nn.RoPE(16), native=True), normal(1, 2, 7, 16)
        together = turn(x, 40)
        for t in range(7):
            assert mx.array_equal(turn(x[:, :, t : t + 1], 40 + t), together[:, :, t : t + 1]).item()

    @pytest.mark.parametrize("stock", [nn.RoPE(16), Llama3RoPE(16, 512, scaling_config=LLAMA3)], ids=["plain", "3"])
    def test_sequence_offsets_equal_single_sequence_results(self, stock):
        turn, x, offsets = with_kernels(stock, native=True), normal(3, 2, 4, 16), [40, 0, 300]
        assert mx.allclose(turn(x, 100), stock(x, 100), atol=1e-5).item()
        together = turn(x, mx.array(offsets))
        for row, offset in enumerate(offsets):
            assert mx.array_equal(together[row], turn(x[row : row + 1], offset)[0]).item()

    def test_other_offset_and_vector_shapes_use_mlx(self):
        stock = nn.RoPE(8)
        turn, x = with_kernels(stock, native=True), normal(2, 3, 4, 8)
        assert mx.array_equal(turn(x, mx.array(2)), stock(x, mx.array(2))).item()
        assert mx.array_equal(turn(x[0], 2), stock(x[0], 2)).item()


@pytest.mark.usefixtures("native")
class TestGatedUnits:
    @settings(max_examples=40)
    @given(
        st.sampled_from(["swiglu", "geglu"]),
        st.integers(1, 5),
        st.integers(1, 40),
        st.sampled_from(TYPES),
        st.integers(0, 1 << 30),
    )
    def test_gated_units_match_exact_arithmetic(self, unit, rows, width, dtype, seed):
        gate, up = ((10 * normal(rows, width, seed=seed + i)).astype(dtype) for i in range(2))
        y, x = dispatch.gated(unit, gate, up), float64(gate)
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        exact = (x / (1 + np.exp(-x)) if unit == "swiglu" else x * (1 + tanh) / 2) * float64(up)
        rounding = {mx.float32: 1e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
        assert y.dtype == dtype
        np.testing.assert_allclose(float64(y), exact, rtol=rounding, atol=1e-6)

    @pytest.mark.parametrize("unit", ["swiglu", "geglu"])
    def test_bits_are_same_at_any_position(self, unit):
        gate, up = normal(3, 21), normal(3, 21, seed=1)
        together = dispatch.gated(unit, gate, up)
        assert mx.array_equal(dispatch.gated(unit, gate.T, up.T), together.T).item()
        assert mx.array_equal(dispatch.gated(unit, gate[:, 20:], up[:, 20:]), together[:, 20:]).item()

    @pytest.mark.parametrize("unit", ["swiglu", "geglu"])
    def test_large_or_nonfinite_inputs(self, unit):
        gate = mx.array([[200.0, -1e30, 0.0, float("nan"), float("inf"), -float("inf")]])
        y = dispatch.gated(unit, gate, mx.full((1, 6), 2.0))[0]
        np.testing.assert_array_equal(y, [400, 0, 0, np.nan, np.inf, np.nan])  # the last: -inf times 0, as in MLX


@pytest.mark.usefixtures("native")
class TestModels:
    def test_with_mlxs_kernels_they_are_mlxs_again(self):
        model = tiny_model(rope_scaling=LLAMA3)
        expected = model(PROMPT)
        mlp = with_kernels(model.layers[0].mlp, native=True)
        assert type(mlp) is not type(model.layers[0].mlp)
        assert isinstance(mlp, type(model.layers[0].mlp))
        assert type(with_kernels(mlp, native=False)) is type(model.layers[0].mlp)
        norm = with_kernels(with_kernels(model.model.norm, native=True), native=False)
        assert type(norm) is nn.RMSNorm
        assert norm.eps == model.model.norm.eps
        turn = model.layers[0].self_attn.rope
        again = with_kernels(with_kernels(turn, native=True), native=False)
        assert type(again) is Llama3RoPE
        assert mx.array_equal(again._freqs, turn._freqs).item()
        assert mx.array_equal(model(PROMPT), expected).item()

    def test_unknown_classes_are_unchanged(self):
        class Norm(nn.RMSNorm):
            """May compute something of its own."""

        def swiglu(gate: mx.array) -> mx.array:
            return gate

        class MLP(type(tiny_model().layers[0].mlp)):
            """Calls its own function under the name of mlx-lm's."""

            def __call__(self, x: mx.array) -> mx.array:
                return swiglu(self.gate_proj(x))

        for module in (Norm(8), SuScaledRoPE(8), MLP(tiny_model().args)):
            assert with_kernels(module, native=True) is module
        assert type(with_kernels(Llama3RoPE(16, scaling_config=LLAMA3), native=True)) is NativeLlama3RoPE
