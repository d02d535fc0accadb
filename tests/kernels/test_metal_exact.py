"""Launches over exact weights, tested without running them: bad input, shapes, names."""

import mlx.core as mx
import numpy as np
import pytest
from metal_on_cpu.exact_cases import encode, rounded

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.kernels.metal import Launch
from gearbx_mlx.kernels.metal_exact import decode_launch, exact_launch, exact_matmul_tiles


def arguments(rows=8, columns=128, group=64, vectors=1) -> dict:
    weight = rounded(np.random.default_rng(0).standard_normal((rows, columns)) * 0.1)
    return {"x": mx.zeros((vectors, columns), mx.bfloat16)} | encode(weight, group).arguments()


def decoding(given: dict) -> ExactMatrix:
    return ExactMatrix(*(given[name] for name in ExactMatrix._fields))


def multiplying(given: dict) -> Launch:
    return exact_launch(given["x"], decoding(given), given.get("bias"))


def test_without_metal_one_line_says_why():
    given = arguments()
    for run in (
        multiplying(given).run,
        decode_launch(decoding(given)).run,
        lambda: exact_matmul_tiles(given["x"], decoding(given)),
    ):
        with pytest.raises(GearbxError, match="Metal"):
            run()


@pytest.mark.usefixtures("on_metal")
def test_on_metal_itself():
    given = arguments(rows=37, columns=1152, vectors=16)
    given["x"] = mx.random.normal((16, 1152))
    weight = decode_launch(decoding(given)).run()
    original = rounded(np.random.default_rng(0).standard_normal((37, 1152)) * 0.1)
    assert (np.array(weight.view(mx.uint16)) == original).all()
    y = multiplying(given).run()
    assert mx.allclose(y, given["x"] @ weight.T.astype(mx.float32), atol=1e-3)
    for first, count in ((0, 1), (15, 1), (3, 2), (5, 8)):
        some = multiplying(given | {"x": given["x"][first : first + count]}).run()
        assert mx.array_equal(some, y[first : first + count])


WRONG_PACKED = [
    ({"group_size": 48}, "group size 48 is none of 32, 64, 128"),
    ({"codes": mx.zeros((8, 12), mx.uint32)}, "codes of exact weights"),
    ({"codes": mx.zeros((8, 16), mx.int32)}, "codes of exact weights"),
    ({"scales": mx.zeros((8,), mx.uint16)}, "no rows"),
    ({"scales": mx.zeros((8, 2), mx.bfloat16)}, "scales of exact weights is .*bfloat16, not .*uint16"),
    ({"biases": mx.zeros((8, 3), mx.uint16)}, "biases of exact weights"),
    ({"low": mx.zeros((8, 20), mx.uint32)}, "low of exact weights"),
    ({"high": mx.zeros((0,), mx.uint8)}, "high of exact weights is 0 bytes"),
    ({"high": mx.zeros((3, 3), mx.uint8)}, "high of exact weights"),
    ({"offsets": mx.zeros((8,), mx.uint32)}, "offsets of exact weights"),
    ({"offsets": mx.zeros((9,), mx.int64)}, "offsets of exact weights"),
]


@pytest.mark.parametrize(("changed", "said"), WRONG_PACKED, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_packed_arrays_that_do_not_fit_are_refused(changed, said):
    given = arguments() | changed
    with pytest.raises(GearbxError, match=said):
        multiplying(given)
    with pytest.raises(GearbxError, match=said):
        decode_launch(decoding(given))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": mx.zeros((1, 128), mx.int32)}, "activations of mlx.core.int32"),
        ({"x": mx.zeros((1, 64))}, "do not fit weights of 128 columns"),
        ({"x": mx.zeros((17, 128))}, "not 1 to 16 vectors"),
        ({"x": mx.zeros((0, 128))}, "not 1 to 16 vectors"),
        ({"bias": mx.zeros((7,))}, "output bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_vectors_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(GearbxError, match=said):
        multiplying(arguments() | changed)


def test_stacked_experts_are_decoded_and_not_multiplied():
    given = arguments()
    for name in ("codes", "scales", "biases", "low"):
        given[name] = given[name].reshape(2, 4, -1)
    assert decode_launch(decoding(given)).shape == (2, 4, 128)
    assert decode_launch(decoding(given), mx.array([4, 1])).shape == (2, 128)
    for product in (exact_launch, exact_matmul_tiles):
        with pytest.raises(GearbxError, match="one matrix"):
            product(given["x"], decoding(given))


def test_tiles_take_vectors_of_the_weights_width():
    with pytest.raises(GearbxError, match="do not fit weights of 128 columns"):
        exact_matmul_tiles(mx.zeros((20, 64)), decoding(arguments()))
    with pytest.raises(GearbxError, match="one matrix"):
        exact_matmul_tiles(mx.zeros((1, 128)), decoding(arguments() | {"scales": mx.zeros((8, 0), mx.uint16)}))


def test_no_rows_are_no_launch(monkeypatch):
    monkeypatch.setattr(metal, "available", lambda: True)
    none = decode_launch(decoding(arguments()), mx.zeros(0, mx.uint32)).run()
    assert (none.shape, none.dtype) == ((0, 128), mx.bfloat16)


def test_shape_of_the_result_is_that_of_the_activations():
    assert multiplying(arguments() | {"x": mx.zeros((2, 3, 128))}).shape == (2, 3, 8)
    assert multiplying(arguments() | {"x": mx.zeros((128,))}).shape == (8,)


def test_names_are_unique():
    """MLX keeps compiled kernels by name: it would confuse two texts of one name."""
    launches = [decode_launch(decoding(arguments(group=group))) for group in (32, 64, 128)]
    launches += [
        multiplying(arguments(group=group, vectors=vectors) | bias)
        for group in (32, 64, 128)
        for vectors in (1, 2, 16)
        for bias in ({}, {"bias": mx.zeros((8,))})
    ]
    specs = {(launch.spec.name, launch.spec.header, *launch.spec.input_names) for launch in launches}
    assert len(specs) == len({name for name, *_ in specs}) == 3 + 18
