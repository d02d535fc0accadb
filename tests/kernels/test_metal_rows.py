"""Launches of dense products, rotary positions and attention: accepted and refused inputs. metal_on_cpu runs them."""

import mlx.core as mx
import pytest

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.metal_attention import heads_together, parts_launch, rope_launch, takes_attention, takes_rope
from gearbx_mlx.kernels.metal_products import dense_launch, takes_dense
from gearbx_mlx.kernels.products import uses_order


def attention(heads=4, kv_heads=2, length=2, keys=9, width=16, dtype=mx.float16, mask="causal", **change) -> dict:
    k = mx.zeros((1, kv_heads, keys, width), dtype)
    given = {"queries": mx.zeros((1, heads, length, width), dtype), "keys": k, "values": k, "mask": mask}
    return given | change


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (mx.zeros((1, 8)), mx.zeros((3, 9)), "do not fit a weight"),
        (mx.zeros((1, 8)), mx.zeros((8,)), "do not fit a weight"),
        (mx.zeros((17, 8)), mx.zeros((3, 8)), "not 1 to 16 vectors"),
        (mx.zeros((0, 8)), mx.zeros((3, 8)), "not 1 to 16 vectors"),
        (mx.zeros((1, 8), mx.int32), mx.zeros((3, 8)), "not 1 to 16 vectors"),
        (mx.zeros((1, 8)), mx.zeros((3, 8), mx.int8), "not 1 to 16 vectors"),
    ],
)
def test_dense_products_refuse_what_does_not_fit(x, weight, said):
    with pytest.raises(GearbxError, match=said):
        dense_launch(x, weight)


def test_dense_products_take_each_type_and_up_to_16_vectors():
    weight = mx.zeros((3, 8), mx.bfloat16)
    assert all(takes_dense(mx.zeros((4, 4, 8), dtype), weight) for dtype in (mx.float16, mx.bfloat16, mx.float32))
    assert dense_launch(mx.zeros((4, 4, 8)), weight).shape == (4, 4, 3)
    assert not takes_dense(mx.zeros((4, 5, 8)), weight)


@pytest.mark.parametrize("dims", [0, 20])
def test_rotary_positions_refuse_frequencies_that_do_not_fit(dims):
    with pytest.raises(GearbxError, match=f"rotary positions of {dims} values do not fit"):
        rope_launch(mx.zeros((1, 2, 1, 16)), mx.zeros((dims // 2,)), 0, False, 1.0)


def test_rotary_positions_take_up_to_16_tokens():
    assert takes_rope(mx.zeros((3, 2, 16, 8)))
    assert not takes_rope(mx.zeros((3, 2, 17, 8)))
    assert not takes_rope(mx.zeros((2, 16, 8)))


@pytest.mark.parametrize(
    "given",
    [
        attention(length=17, keys=20),
        attention(length=3, keys=2),
        attention(kv_heads=3),
        attention(width=256, dtype=mx.float32),  # whose tiles are larger than threadgroup memory
        attention(keys=0),
        attention(dtype=mx.int32),
        attention(values=mx.zeros((1, 2, 9, 8), mx.float16)),
        attention(values=mx.zeros((1, 2, 9, 16))),
        attention(queries=mx.zeros((2, 4, 2, 16), mx.float16)),
        attention(mask="sliding"),
        attention(mask=mx.zeros((2, 9))),  # which is added
    ],
)
def test_attention_refuses_what_it_cannot_compute(given):
    assert not takes_attention(**given)
    assert parts_launch(**given, scale=1.0) is None


def test_attention_takes_masks_and_wide_heads():
    assert takes_attention(**attention(mask=None))
    assert takes_attention(**attention(mask=mx.ones((2, 9), mx.bool_)))
    assert takes_attention(**attention(width=256, length=16, keys=16))


@pytest.mark.parametrize(
    ("heads", "length", "together"), [(4, 16, 4), (8, 16, 8), (12, 16, 6), (71, 16, 1), (71, 1, 71)]
)
def test_a_threadgroup_has_no_more_queries_than_it_has_room_for(heads, length, together):
    assert heads_together(heads, length) == together


def test_experts_of_a_verification_are_multiplied_one_by_one_on_metal(monkeypatch):
    few, many = mx.zeros((16 * 10,), mx.uint32), mx.zeros((512 * 8,), mx.uint32)
    monkeypatch.setattr(metal, "available", lambda: False)
    assert uses_order(few, True)
    assert not uses_order(few, False)
    monkeypatch.setattr(metal, "available", lambda: True)
    assert not uses_order(few, True)
    assert uses_order(many, True)
    assert not uses_order(many, False)
