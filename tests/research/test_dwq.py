"""Tests of the faster products with which mlx-lm's DWQ trains on a CPU."""

import mlx.core as mx
import pytest

from research.calibrated_base import causal_attention, quantized_product


def normal(*shape):
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def same(found, wanted):
    """Assert that a loss and its gradients agree to 1e-5 of the largest value."""
    for made, right in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        assert mx.abs(made - right).max() <= 1e-5 * mx.abs(right).max()


def test_quantized_product_has_the_gradients_of_mlx():
    weight, *parameters = mx.quantize(normal(64, 128), 64, 4)

    def loss(multiply):
        def squares(x, scales, biases):
            made = multiply(x, weight, scales=scales, biases=biases, transpose=True, group_size=64, bits=4)
            return mx.square(made).sum()

        return mx.value_and_grad(squares, (0, 1, 2))(normal(2, 5, 128), *parameters)

    same(loss(quantized_product), loss(mx.quantized_matmul))


@pytest.mark.parametrize("heads", [2, 6])
def test_causal_attention_has_the_gradients_of_mlx(heads):
    queries, keys, values = normal(2, 6, 7, 16), normal(2, heads, 7, 16), normal(3, heads, 7, 16)[:2]

    def loss(attention):
        def squares(*inputs):
            return mx.square(attention(*inputs, scale=0.25, mask="causal")).sum()

        return mx.value_and_grad(squares, (0, 1, 2))(queries, keys, values)

    same(loss(causal_attention), loss(mx.fast.scaled_dot_product_attention))
