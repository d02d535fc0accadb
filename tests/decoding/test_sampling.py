"""Samplers: mlx-lm's distributions, drawn so that a draft and its verification make the same choices."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from gearbx_mlx import GearbxError, batch_generate, make_sampler, stream_generate
from gearbx_mlx.decoding import sampling

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


def test_rows_are_drawn_apart():
    mx.random.seed(1)
    drawn = np.array(make_sampler(1.0)(mx.zeros((2000, 2))))
    assert abs(drawn.mean() - 0.5) < 0.05


def test_tokens_left_out_by_xtc_are_the_likeliest():
    mx.random.seed(1)
    sampler = make_sampler(1.0, xtc_probability=1.0)
    likely = np.flatnonzero(np.exp(np.array(LOGPROBS[0])) > 0.1)
    drawn = np.array(mx.concatenate([sampler(LOGPROBS) for _ in range(200)]))
    assert len(likely) > 1
    assert len(set(likely) & set(drawn.tolist())) == 1


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [1, 2, 7, 16, 31, 32, 33, 4099])
def test_native_kernels_choose_what_mlxs_operations_do(size):
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
        ({"temp": -1.0}, "temp is -1.0; give 0 or more"),
        ({"temp": float("nan")}, "temp is nan"),
        ({"temp": 1.0, "min_p": 1.5}, "min_p is 1.5; give 0 to 1"),
        ({"temp": 1.0, "top_k": -1}, "top_k is -1; give 0 or more"),
        ({"temp": 0.0, "top_p": 2.0}, "top_p is 2.0; give 0 to 1"),
        ({"temp": 1.0, "xtc_threshold": 0.9}, "xtc_threshold is 0.9; give 0 to 0.5"),
    ],
)
def test_numbers_that_no_sampler_has(numbers, told):
    with pytest.raises(GearbxError, match=told):
        make_sampler(**numbers)


def test_cold_is_greedy():
    assert make_sampler() is greedy_sampler
    assert make_sampler(0.0, top_p=0.5) is greedy_sampler


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kept", [{}, {"top_p": 0.9}])
def test_distributions_that_are_alike_choose_the_same_token_more_often_than_with_mlx_lms(kept):
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


def test_a_text_without_gears_is_mlx_lms(demo):
    texts = []
    for written in (
        mlx_lm.stream_generate(demo.model, demo.tokenizer, "The king", 20, sampler=mlx_lm_sampler(0.9, top_k=20)),
        stream_generate(
            demo.model, demo.tokenizer, "The king", 20, mode="telemetry-only", sampler=make_sampler(0.9, top_k=20)
        ),
    ):
        mx.random.seed(4)
        texts.append([response.token for response in written])
    assert texts[0] == texts[1]


def test_a_batch_without_gears_is_mlx_lms(demo):
    prompts, texts = [demo.tokenizer.encode(each) for each in ("The king", "Once upon a time")], []
    for written in (
        lambda: mlx_lm.batch_generate(demo.model, demo.tokenizer, prompts, max_tokens=12, sampler=mlx_lm_sampler(0.9)),
        lambda: batch_generate(
            demo.model, demo.tokenizer, prompts, max_tokens=12, mode="telemetry-only", sampler=make_sampler(0.9)
        ),
    ):
        mx.random.seed(4)
        texts.append([text.strip() for text in written().texts])
    assert texts[0] == texts[1]
