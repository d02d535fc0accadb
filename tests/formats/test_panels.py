"""Weights with rows side by side for the CPU: the same bits as rows one after the other."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import layer_with, normal, same_arrays

from gearbx_mlx import Gearbox
from gearbx_mlx.formats.exact import encode
from gearbx_mlx.formats.native import for_kernels, with_kernels
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.bit_planes import PanelPlanes
from gearbx_mlx.kernels.exact import PanelExactMatrix, decoded_by_tiles

SHAPES = [(48, 64), (96, 576), (16, 2048), (64, 128)]
WIDTHS = [(4,), (8,), (4, 4), (4, 2), (4, 1)]
VECTORS = [1, 2, 3, 8, 9, 40]


def weight(shape, dtype=mx.bfloat16):
    return (normal(*shape, seed=sum(shape)) * 0.05).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("x_bits", [8, 16])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.some(24)
def test_a_stack_of_planes(native, shape, widths, x_bits, dtype):
    planes = split(weight(shape, dtype), widths, 64)
    panels = planes.in_panels(native.panel_rows())
    assert isinstance(panels, PanelPlanes)
    assert panels.shape == planes.shape
    for vectors in VECTORS:
        x = normal(vectors, shape[1], seed=vectors)
        assert mx.array_equal(native.stack_matvec(x, *panels, x_bits), native.stack_matvec(x, *planes, x_bits))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [32, 64])
def test_exact_weights_survive_panels(native, shape, group_size):
    matrix = encode(weight(shape), group_size)
    panels = matrix.in_panels(native.panel_rows())
    assert isinstance(panels, PanelExactMatrix)
    assert mx.array_equal(native.exact_decode(*panels), weight(shape))
    assert mx.array_equal(decoded_by_tiles(panels), weight(shape))
    for vectors in VECTORS:
        x = normal(vectors, shape[1], seed=vectors)
        for bits in (0, 16):
            assert mx.array_equal(native.exact_matvec(x, *panels, bits), native.exact_matvec(x, *matrix, bits))


def test_embedding_rows_are_looked_up(native):
    matrix = encode(weight((96, 576)), 64)
    panels, chosen = matrix.in_panels(native.panel_rows()), mx.array([0, 95, 17, 17])
    assert mx.array_equal(native.exact_decode(*panels)[chosen], weight((96, 576))[chosen])
    assert mx.array_equal(decoded_by_tiles(panels.taken(chosen)), weight((96, 576))[chosen])


@pytest.mark.parametrize("widths", WIDTHS)
def test_panels_convert_back_to_rows(native, widths):
    planes = split(weight((96, 576)), widths, 64)
    panels = planes.in_panels(native.panel_rows())
    assert same_arrays(panels.by_row().arrays, planes.arrays)
    assert mx.array_equal(panels.dequantize(), planes.dequantize())
    assert panels.in_panels(native.panel_rows()) is panels
    assert panels.gear(widths[0]).shape == planes.shape


@pytest.mark.parametrize(
    ("shape", "widths"), [((50, 64), (4,)), ((48, 64), (3,)), ((48, 64), (4, 3)), ((2, 48, 64), (4,))]
)
def test_unsuitable_weights_get_no_panels(native, shape, widths):
    dense, planes = with_kernels(nn.Linear(shape[-1], shape[-2]), native=True), split(weight(shape), widths, 64)
    dense.weight, dense.x_bits = weight(shape), 8
    assert for_kernels(dense, planes) is planes


def test_kernels_refuse_mismatched_panels(native):
    rows = native.panel_rows()
    panels, x = split(weight((96, 576)), (4,), 64).in_panels(rows), mx.zeros((1, 576))
    with pytest.raises(ValueError, match="8 or 16 bits"):
        native.stack_matvec(x, *panels, 0)
    with pytest.raises(ValueError, match="as many rows"):
        native.stack_matvec(x, *split(weight((96, 576)), (4,), 64).in_panels(2 * rows), 8)
    with pytest.raises(ValueError, match="do not fit"):
        native.stack_matvec(x, *panels._replace(weights=[panels.weights[0][:, :8]]), 8)


@pytest.mark.parametrize("format", ["planes", "affine", "exact"])
def test_gearbox_with_quantized_activations_has_panels(native, format):
    def linear(activations):
        model = nn.Sequential(layer_with(weight((96, 128))))
        box = Gearbox(model, "4,16", format=format, kernels="native", activations=activations)
        box.shift("low")
        return model.layers[0]

    x = normal(3, 128, seed=1).astype(mx.bfloat16)
    rounded, as_they_are = linear("int16"), linear("float")
    assert rounded.weight.ndim == 3
    assert str(rounded) == str(as_they_are)
    assert as_they_are.weight.ndim == 2
    assert mx.allclose(rounded(x), as_they_are(x), rtol=0.02, atol=0.02)
