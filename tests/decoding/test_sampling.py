"""Samplers: mlx-lm's distributions, drawn so that a draft and its verification make the same choices."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import gearbx_mlx
from gearbx_mlx import GearbxError, make_sampler
from gearbx_mlx.decoding import sampling
from gearbx_mlx.kernels import cpu
from gearbx_mlx.kernels.dispatch import fused_kernel

LOGITS = (mx.arange(12) * 5 % 12 / 3)[None]  # the likeliest token has a share of 0.29
LOGPROBS = LOGITS - mx.logsumexp(LOGITS)
FILTERS = {"top_p": apply_top_p, "min_p": apply_min_p, "top_k": apply_top_k}
DRAWS = 3000


@pytest.fixture(params=["mlx", "native"])
def kernels(request, monkeypatch):
    if request.param == "native":
        request.getfixturevalue("compiled")
    else:
        monkeypatch.setattr(sampling, "fused_kernel", lambda name: None)


@pytest.mark.some(8)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kept", [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4}, {"top_p": 0.95, "top_k": 3}])
@pytest.mark.parametrize("temp", [0.5, 1.3])
def test_the_distribution_is_mlx_lms(temp, kept):
    left = LOGPROBS
    for name, value in kept.items():
        left = FILTERS[name](left, value)
    expected = np.array(mx.softmax(left / temp, axis=-1)[0])
    mx.random.seed(1)
    sampler = make_sampler(temp, **kept)
    drawn = mx.concatenate([sampler(LOGPROBS) for _ in range(DRAWS)])
    shares = np.bincount(np.array(drawn), minlength=expected.size) / DRAWS
    assert np.abs(shares - expected).max() < 4 * np.sqrt(0.25 / DRAWS)
    assert not shares[expected == 0].any()


def test_tokens_left_out_by_xtc_are_the_likeliest():
    mx.random.seed(1)
    sampler = make_sampler(1.0, xtc_probability=1.0)
    likely = np.flatnonzero(np.exp(np.array(LOGPROBS[0])) > 0.1)
    drawn = np.array(mx.concatenate([sampler(LOGPROBS) for _ in range(200)]))
    assert len(likely) > 1
    assert len(set(likely) & set(drawn.tolist())) == 1


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [1, 2, 7, 16, 31, 32, 33, 4099])
def test_native_kernels_choose_same_tokens_as_mlx(size):
    sampler = make_sampler(0.8, min_p=0.01)
    for seed in range(60):
        logits = 3 * mx.random.normal((1, size), key=mx.random.key(seed))
        logits = mx.where(mx.arange(size) % 5 == 1, -mx.inf, logits)
        logprobs = logits - mx.logsumexp(logits)
        mx.random.seed(seed)
        expected = sampler.by_mlx(logprobs).item()
        after = mx.random.uniform().item()
        mx.random.seed(seed)
        assert sampler(logprobs).item() == expected
        assert mx.random.uniform().item() == after


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"temp": -1.0}, "temp: out of range, got -1.0; use 0 or more"),
        ({"temp": float("nan")}, "temp: out of range, got nan"),
        ({"temp": 1.0, "min_p": 1.5}, "min_p: out of range, got 1.5; use 0 to 1"),
        ({"temp": 1.0, "top_k": -1}, "top_k: out of range, got -1; use 0 or more"),
        ({"temp": 0.0, "top_p": 2.0}, "top_p: out of range, got 2.0; use 0 to 1"),
        ({"temp": 1.0, "xtc_threshold": 0.9}, "xtc_threshold: out of range, got 0.9; use 0 to 0.5"),
    ],
)
def test_invalid_numbers_are_refused(numbers, told):
    with pytest.raises(GearbxError, match=told):
        make_sampler(**numbers)


def test_cold_is_greedy():
    assert make_sampler() is greedy_sampler
    assert make_sampler(0.0, top_p=0.5) is greedy_sampler


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kept", [{}, {"top_p": 0.9}])
def test_similar_distributions_agree_more_than_mlx_lms(kept):
    logits = 3 * mx.random.normal((1, 200), key=mx.random.key(0))
    others = [logits + 0.5 * mx.random.normal(logits.shape, key=mx.random.key(1 + i)) for i in range(200)]
    same = dict.fromkeys((mlx_lm_sampler, make_sampler), 0)
    for make in same:
        sampler = make(1.0, **kept)
        for seed, other in enumerate(others):
            tokens = []
            for each in (logits, other):
                mx.random.seed(seed)
                tokens.append(sampler(each - mx.logsumexp(each)).item())
            same[make] += tokens[0] == tokens[1]
    assert same[make_sampler] > same[mlx_lm_sampler]


def natively(logits: mx.array) -> mx.array:
    """The entropy by the native kernel, which is compiled when it is first asked for."""
    kernel = fused_kernel("entropy_bits")
    if kernel is None:
        pytest.skip(f"no native kernels: {cpu.why_not()}")
    return kernel(logits)


# Both must keep every promise: MLX's operations, and the native kernel.
EITHER = pytest.mark.parametrize(
    "entropy_bits", [pytest.param(gearbx_mlx.entropy_bits, id="mlx"), pytest.param(natively, id="native")]
)
logits = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 300)), elements=st.floats(-60, 60, width=32))


@EITHER
@given(logits)
def test_entropy_is_between_zero_and_log2_vocabulary(entropy_bits, values):
    bits = np.array(entropy_bits(mx.array(values)))
    assert bits.shape == values.shape[:1]
    assert (bits >= 0).all()
    assert (bits <= np.float32(math.log2(values.shape[1]))).all()


@EITHER
@given(logits)
def test_agrees_with_float64(entropy_bits, values):
    p = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = -np.sum(np.where(p > 0, p * np.log2(np.maximum(p, 1e-300)), 0), axis=1)
    assert np.allclose(np.array(entropy_bits(mx.array(values))), expected, atol=2e-5)


EXACT = [
    *((mx.full((size,), -math.log(size)), np.float32(math.log2(size))) for size in (2, 105, 4096, 32768, 151936)),
    *((mx.array([0.0] + [-math.inf] * 99).astype(dtype), 0.0) for dtype in (mx.float32, mx.float16, mx.bfloat16)),
    (mx.full((4096,), math.nan), 12.0),
    (mx.array([math.inf, 3.0, 2.0]), 0.0),
]


@EITHER
@pytest.mark.parametrize(("values", "bits"), EXACT, ids=range(len(EXACT)))
def test_uniform_is_log2_vocabulary_and_one_hot_zero(entropy_bits, values, bits):
    """Minus infinity adds nothing, infinity is certain, and what is not a number is uniform."""
    assert entropy_bits(values).item() == bits


@EITHER
def test_half_precision_is_summed_in_single(entropy_bits):
    values = mx.random.normal((32000,), key=mx.random.key(0)).astype(mx.bfloat16)
    exact = entropy_bits(values.astype(mx.float32))
    assert entropy_bits(values).dtype == mx.float32
    assert entropy_bits(values).item() == exact.item()
