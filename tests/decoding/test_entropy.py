import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gearbx_mlx
from gearbx_mlx.kernels import cpu
from gearbx_mlx.kernels.dispatch import fused_kernel


def natively(logits: mx.array) -> mx.array:
    """The entropy by the native kernel, which is compiled when it is first asked for."""
    kernel = fused_kernel("entropy_bits")
    if kernel is None:
        pytest.skip(f"no native kernels: {cpu.why_not()}")
    return kernel(logits)


# Both must keep every promise: MLX's operations, and the native kernel.
pytestmark = pytest.mark.parametrize(
    "entropy_bits",
    [
        pytest.param(gearbx_mlx.entropy_bits, id="mlx"),
        pytest.param(natively, id="native"),
    ],
)

logits = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 300)), elements=st.floats(-60, 60, width=32))


@given(logits)
def test_lies_between_zero_and_log2_of_the_vocabulary(entropy_bits, values):
    bits = np.array(entropy_bits(mx.array(values)))
    assert bits.shape == values.shape[:1]
    assert (bits >= 0).all()
    assert (bits <= np.float32(math.log2(values.shape[1]))).all()


@given(logits)
def test_agrees_with_float64(entropy_bits, values):
    p = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = -np.sum(np.where(p > 0, p * np.log2(np.maximum(p, 1e-300)), 0), axis=1)
    assert np.allclose(np.array(entropy_bits(mx.array(values))), expected, atol=2e-5)


@given(logits, st.floats(-30, 30))
def test_logprobs_and_logits_have_the_same_entropy(entropy_bits, values, offset):
    shifted = entropy_bits(mx.array(values) + offset)
    assert np.allclose(np.array(entropy_bits(mx.array(values))), np.array(shifted), atol=1e-4)


@pytest.mark.parametrize("vocab_size", [2, 105, 4096, 32768, 151936])
def test_uniform_is_log2_of_the_vocabulary(entropy_bits, vocab_size):
    uniform = mx.full((vocab_size,), -math.log(vocab_size))
    assert entropy_bits(uniform).item() == np.float32(math.log2(vocab_size))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_one_hot_is_exactly_zero_and_minus_infinity_adds_nothing(entropy_bits, dtype):
    one_hot = mx.array([0.0] + [-math.inf] * 99).astype(dtype)
    assert entropy_bits(one_hot).item() == 0.0


def test_two_of_many_are_one_bit(entropy_bits):
    assert entropy_bits(mx.array([0.0, 0.0] + [-math.inf] * 98)).item() == 1.0


def test_not_a_number_is_uniform_and_infinity_is_certain(entropy_bits):
    assert entropy_bits(mx.full((4096,), math.nan)).item() == 12.0
    assert entropy_bits(mx.array([math.inf, 3.0, 2.0])).item() == 0.0


def test_half_precision_is_summed_in_single(entropy_bits):
    values = mx.random.normal((32000,), key=mx.random.key(0)).astype(mx.bfloat16)
    exact = entropy_bits(values.astype(mx.float32))
    assert entropy_bits(values).dtype == mx.float32
    assert entropy_bits(values).item() == exact.item()
