"""Attention in native CPU kernels."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import float64, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from gearbx_mlx.kernels import dispatch

pytestmark = pytest.mark.usefixtures("native")


@settings(max_examples=60)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    length=st.integers(1, 20),
    before=st.integers(0, 60),
    width=st.sampled_from([1, 8, 16, 20, 64, 72, 128]),
    mask=st.sampled_from([None, "causal"]),
    seed=st.integers(0, 1 << 30),
)
def test_attention_matches_exact_arithmetic(batch, heads, shared, length, before, width, mask, seed):
    queries = 2 * normal(batch, length, heads * shared, width, seed=seed).swapaxes(1, 2)
    held = normal(2, batch, heads, length + before + 5, width, seed=seed + 1)  # a cache has more room
    keys, values = held[:, :, :, : length + before]
    y = dispatch.attention(queries, keys, values, 0.3, mask)
    k, v = (np.repeat(float64(a), shared, axis=1) for a in (keys, values))
    scores = 0.3 * float64(queries) @ k.swapaxes(-1, -2)
    sizes = 0.3 * np.abs(float64(queries)) @ np.abs(k.swapaxes(-1, -2))
    if mask:
        scores[..., np.triu(np.ones((length, length + before), bool), before + 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    # A rounded score is an exponent; sums over keys are rounded at each key.
    rounding = 2.0**-23 * ((width / 16 + 16) * sizes.max() + length + before + 16)
    assert np.all(np.abs(float64(y) - weights @ v) <= rounding * (weights @ np.abs(v)))


def test_query_is_batch_invariant():
    queries, keys, values = normal(1, 4, 9, 64), normal(1, 2, 300, 64, seed=1), normal(1, 2, 300, 64, seed=2)
    together = dispatch.attention(queries, keys, values, 0.1, "causal")
    for i in range(9):
        seen = 300 - 8 + i
        alone = dispatch.attention(queries[:, :, i : i + 1], keys[:, :, :seen], values[:, :, :seen], 0.1, None)
        assert mx.array_equal(alone, together[:, :, i : i + 1]).item()


def test_attention_accepts_strided_vectors():
    queries, keys = normal(1, 2, 16, 3).swapaxes(-1, -2), normal(1, 2, 16, 7, seed=1).swapaxes(-1, -2)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.25)
    assert mx.allclose(dispatch.attention(queries, keys, keys, 0.25, None), expected, atol=1e-6).item()


def test_nonfinite_inputs_stay_nonfinite():
    keys = normal(1, 1, 20, 8)
    broken = mx.where(mx.arange(20)[:, None] == 3, float("nan"), keys)
    assert mx.isnan(dispatch.attention(normal(1, 1, 1, 8), broken, keys, 1.0, None)).all().item()
    # Keys that a query does not see change nothing.
    y = dispatch.attention(normal(1, 1, 18, 8), broken, keys, 1.0, "causal")
    assert not mx.isnan(y[0, 0, 0]).any().item()
    assert mx.isnan(y[0, 0, 1:]).all().item()


@pytest.mark.parametrize("shape", [(5, 9), (1, 1, 5, 9), (2, 1, 5, 9), (2, 4, 5, 9), (2, 1, 1, 9)], ids=str)
def test_masked_attention_equals_mlx(shape):
    mask = normal(*shape) > 0
    mask[..., 3] = True  # each query sees at least one key
    queries, keys, values = normal(2, 4, 5, 8), normal(2, 2, 9, 8, seed=1), normal(2, 2, 9, 8, seed=2)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask)
    assert mx.allclose(dispatch.attention(queries, keys, values, 0.5, mask), expected, atol=1e-5).item()


def test_a_window_over_many_keys():
    """The kernel takes keys in spans of 256; a window hides some spans completely, and these are not read."""
    length, keys, window = 30, 900, 40
    queries, k, v = normal(1, 4, length, 64), normal(1, 2, keys, 64, seed=1), normal(1, 2, keys, 64, seed=2)
    last, key = mx.arange(keys - length, keys)[:, None], mx.arange(keys)
    mask = (key <= last) & (key > last - window)
    hidden = mx.arange(keys)[:, None] < 256
    broken = (mx.where(hidden, float("nan"), array) for array in (k, v))
    y = dispatch.attention(queries, *broken, 0.125, mask)
    assert mx.allclose(y, mx.fast.scaled_dot_product_attention(queries, k, v, scale=0.125, mask=mask), atol=1e-5).item()
    alone = dispatch.attention(queries[:, :, 7:8], k, v, 0.125, mask[7:8])
    assert mx.array_equal(alone, y[:, :, 7:8]).item()


def test_masked_last_keys_equal_shorter_cache_bitwise():
    queries, keys, values = normal(1, 4, 1, 64), normal(1, 2, 300, 64, seed=1), normal(1, 2, 300, 64, seed=2)
    mask = mx.arange(300)[None] < 123
    hidden = dispatch.attention(queries, keys, values, 0.1, mask)
    assert mx.array_equal(hidden, dispatch.attention(queries, keys[:, :, :123], values[:, :, :123], 0.1, None)).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    arrays = [normal(1, 2, 3, 8, seed=seed).astype(dtype) for seed in range(3)]
    y = dispatch.attention(*arrays, 1.0, "causal")
    exact = dispatch.attention(*(array.astype(mx.float32) for array in arrays), 1.0, "causal")
    assert y.dtype == dtype
    assert mx.array_equal(y, exact.astype(dtype)).item()


@settings(max_examples=60)
@given(
    real=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    length=st.integers(1, 16),
    heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    more=st.integers(0, 40),
    masked=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_padded_sequence_equals_unpadded_bitwise(real, length, heads, shared, more, masked, seed):
    real = [max(count, length) for count in real]
    batch, count, width = len(real), max(real) + more, 20
    queries = normal(batch, heads * shared, length, width, seed=seed)
    keys, values = (normal(batch, heads, count, width, seed=seed + i) for i in (1, 2))
    padding = mx.array([count - seen for seen in real])
    hidden = mx.arange(count)[None, None, :, None] < padding[:, None, None, None]
    keys, values = (mx.where(hidden, float("nan"), array) for array in (keys, values))  # never read
    mask = create_causal_mask(length, count - length, left_padding=padding) if masked else "causal"
    together = dispatch.attention(queries, keys, values, 0.2, mask, padding)
    for row, seen in enumerate(real):
        alone = (array[row : row + 1] for array in (queries, keys[:, :, count - seen :], values[:, :, count - seen :]))
        assert mx.array_equal(together[row : row + 1], dispatch.attention(*alone, 0.2, "causal")).item()


def test_padding_only_sequence_has_zeros():
    x = normal(2, 1, 4, 8)
    y = dispatch.attention(x, x, x, 1.0, None, mx.array([4, 1]))
    assert mx.array_equal(y[0], mx.zeros_like(y[0])).item()
    assert mx.abs(y[1]).max().item() > 0


def test_additive_masks_and_other_widths_use_mlx():
    x = normal(1, 2, 3, 8)
    assert dispatch.attention(x, x, x, 1.0, mx.zeros((3, 3))) is None
    assert dispatch.attention(x, x, normal(1, 2, 3, 4), 1.0, None) is None
    assert dispatch.attention(x, x[:, :, :2], x[:, :, :2], 1.0, "causal") is None
