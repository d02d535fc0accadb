"""A model with a gearbox can be copied and cast to another type like any model of mlx-lm's."""

import copy

import mlx.core as mx
import pytest
from conftest import PROMPT, on_disk, save_model, tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, GearedModel, convert, load
from gearbx_mlx.gears.gearbox import attached


@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_copy_has_a_gearbox_of_its_own_with_the_same_gears(tmp_path, kernels, is_dropped):
    model = tiny_model(dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,8,16", kernels=kernels, **(on_disk(model, tmp_path) if is_dropped else {}))
    gearbox.shift("low")
    low = model(PROMPT)
    copied = copy.deepcopy(model)
    gearbox.shift("high")
    other = attached(copied)
    assert other.model is copied
    assert other.gear.name == "low"
    assert mx.array_equal(copied(PROMPT), low)
    other.shift("high")
    assert mx.array_equal(copied(PROMPT), model(PROMPT))
    other.shift("low")
    assert mx.array_equal(copied(PROMPT), low)


def test_a_copy_of_a_wrapped_model_computes_the_same_and_changes_nothing_in_the_model():
    wrapped = GearedModel(Gearbox(tiny_model()))
    logits = wrapped(PROMPT)
    copied = copy.deepcopy(wrapped)
    copied.update({"model": {"norm": {"weight": mx.zeros(64)}}})
    assert mx.array_equal(copied(PROMPT), mx.zeros_like(logits))
    assert mx.array_equal(wrapped(PROMPT), logits)


@pytest.mark.some(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_logits_and_cache_have_the_type_that_the_model_is_given_later(kernels, tied):
    model = tiny_model("gemma3_text", tie_word_embeddings=tied)
    wrapped = GearedModel(Gearbox(model, "4,8,16", kernels=kernels))
    for gear in ("low", "mid", "high"):  # made in float32
        wrapped.gearbox.shift(gear)
    for dtype in (mx.float16, mx.float32):
        wrapped.set_dtype(dtype)
        cache = make_prompt_cache(wrapped)
        assert wrapped(PROMPT, cache=cache).dtype == dtype
        assert wrapped(mx.array([[3]]), cache=cache).dtype == dtype
        assert {part.keys.dtype for part in cache} == {dtype}
        for gear in ("low", "mid", "high"):
            wrapped.gearbox.shift(gear)
            assert model(PROMPT).dtype == dtype


@pytest.mark.some(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_gears_from_files_follow_too(tmp_path, kernels, tied):
    save_model(tiny_model(tie_word_embeddings=tied), tmp_path / "source")
    convert(model=str(tmp_path / "source"), mlx_path=str(tmp_path / "geared"), gears="4,8,16")
    model, _ = load(tmp_path / "geared")
    gearbox = Gearbox(model, kernels=kernels)
    gearbox.shift("mid"), gearbox.shift("low")
    model.set_dtype(mx.float16)
    for gear in ("low", "mid", "high", "low"):
        gearbox.shift(gear)
        assert model(PROMPT).dtype == mx.float16, gear


def test_a_gearbox_that_was_replaced_says_so_in_any_gear():
    model = tiny_model()
    first = Gearbox(model, "4,16")
    second = Gearbox(model, "3,16")
    second.shift("low")
    for gear in ("low", "high"):
        with pytest.raises(GearbxError, match="another gearbox was put on this model"):
            first.shift(gear)
