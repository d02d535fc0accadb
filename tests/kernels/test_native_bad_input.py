"""Native kernels and wrong input: a correct result or one clear error, never a wrong number."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, assert_products_close, float64, tiny_model

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.kernels import products


class TestShapes:
    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 300), (300, 1), (3, 97), (0, 64)])
    @pytest.mark.parametrize("vectors", [1, 3, 20])
    def test_dense_matrices_of_any_size(self, native, rows, columns, vectors):
        weight = mx.random.normal((rows, columns)).astype(mx.bfloat16)
        x = mx.random.normal((vectors, columns))
        y = native.dense_matvec(x, weight)
        assert y.shape == (vectors, rows)
        assert_products_close(y, x, float64(weight), np.abs(float64(weight)))

    @pytest.mark.parametrize("rows", [0, 1])
    def test_stacks_of_few_rows(self, native, rows):
        words, scales, biases = mx.quantize(mx.random.normal((2, 64)), 32, 4)
        x = mx.random.normal((2, 64))
        y = native.stack_matvec(x, [words[:rows]], scales[:rows], [biases[:rows]], [4], 32)
        assert mx.array_equal(y, native.stack_matvec(x, [words], scales, [biases], [4], 32)[:, :rows]).item()

    def test_experts_of_no_rows(self, native):
        x, chosen = mx.ones((3, 1, 64)), mx.array([0, 1, 0])
        assert native.dense_experts(x, mx.ones((2, 0, 64)), chosen).shape == (3, 1, 0)

    def test_no_vector_at_all(self, native):
        assert products.dense_product(mx.ones((0, 64)), mx.ones((5, 64))).shape == (0, 5)
        assert products.dense_product(mx.ones((2, 0, 64)), mx.ones((5, 64))).shape == (2, 0, 5)

    def test_a_batch_where_a_vector_was_expected(self, native):
        weight, x = mx.random.normal((5, 64)), mx.random.normal((3, 2, 7, 64))
        y = native.dense_matvec(x, weight)
        assert y.shape == (3, 2, 7, 5)
        assert mx.array_equal(y[1, 1, 4:5], native.dense_matvec(x[1, 1, 4:5], weight)).item()

    @pytest.mark.parametrize("vectors", [3, 40])
    def test_activations_and_indices_that_are_not_in_rows(self, native, vectors):
        weight = mx.random.normal((4, 9, 64)).astype(mx.float16)
        wide = mx.random.normal((64, 1, 2 * vectors))
        x, chosen = wide.T[::2], mx.random.randint(0, 4, (vectors, 3)).T[1]
        expected = native.dense_experts(mx.contiguous(x), weight, mx.contiguous(chosen))
        assert mx.array_equal(native.dense_experts(x, weight, chosen), expected).item()
        assert mx.array_equal(
            native.dense_matvec(x, weight[:, ::2][2]),
            native.dense_matvec(mx.contiguous(x), mx.contiguous(weight[2, ::2])),
        ).item()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"group": 48}, "group size"),
            ({"weight": mx.zeros((3, 96))}, "rows of groups"),
            ({"weight": mx.zeros((3, 128), mx.int32)}, "float32, bfloat16 or float16"),
            ({"steps": mx.ones((3, 1))}, "a step for each group"),
            ({"offsets": mx.ones((3, 2), mx.bfloat16)}, "an offset for each group"),
            ({"widths": [4, 5]}, "bits of a code"),
            ({"widths": [0]}, "1 to 8 bits"),
        ],
        ids=str,
    )
    def test_weights_that_cannot_become_planes(self, native, change, said):
        given = {"weight": mx.zeros((3, 128)), "steps": mx.ones((3, 2)), "offsets": mx.zeros((3, 2)), "widths": [4]}
        given |= {"group": 64, "fit": True, "least": 1e-30} | change
        mx.eval([each for each in given.values() if isinstance(each, mx.array)])
        with pytest.raises(ValueError, match=said):
            native.quantize(**given)


class TestNumbers:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, value):
        model = tiny_model()
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = mx.where(mx.arange(64) == 3, value, layer.weight)
        gearbox = Gearbox(model, kernels="native")
        before = model.model.layers[0].mlp.up_proj
        with pytest.raises(GearbxError, match=r"layers\.0\.mlp\.up_proj: weights are not finite"):
            gearbox.shift("low")
        assert model.model.layers[0].mlp.up_proj is before
        assert not mx.isfinite(model(PROMPT)).all().item()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_activations_that_are_not_finite_show_in_their_vector_alone(self, native, value):
        x = mx.where(mx.arange(20)[:, None] == 7, value, mx.random.normal((20, 64)))
        words, scales, biases = mx.quantize(mx.random.normal((5, 64)), 32, 4)
        for y in (
            native.dense_matvec(x, mx.random.normal((5, 64))),
            native.stack_matvec(x, [words], scales, [biases], [4], 32),
        ):
            finite = np.isfinite(float64(y))
            assert not finite[7].any()
            assert finite.sum() == 19 * 5
