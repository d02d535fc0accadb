"""Right kernels differ from a product in float64 by what rounding explains, on every processor; wrong ones by more."""

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import float64, normal

from gearbx_mlx import Gearbox, GearbxWarning
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.gears.kernel_choices import measure_gears
from gearbx_mlx.kernels import rounding, tuner
from gearbx_mlx.kernels.dispatch import NATIVE, always
from gearbx_mlx.kernels.rounding import LEEWAY, trial_activations
from gearbx_mlx.kernels.tuner import EXPECTED, product_errors

pytestmark = pytest.mark.usefixtures("native")

SHAPES = {  # hidden, MLP, keys, vocabulary
    "SmolLM2-135M": (576, 1536, 192, 49152),
    "Qwen2.5-Coder-0.5B": (896, 4864, 128, 151936),
    "Qwen2.5-Coder-1.5B": (1536, 8960, 256, 151936),
}
FORMS = {  # format, bits, bits of its gears, inputs of a group
    "4 bits": ("planes", 4, (4,), 64),
    "8 bits": ("planes", 8, (8,), 64),
    "planes of 4 and 4 bits": ("planes", 8, (4, 8), 64),
    "6 bits": ("affine", 6, (6,), 32),
}
AS_IT_IS = "as it is"


def matrix(rows: int, columns: int) -> mx.array:
    """A weight whose rows differ in size, as those of real models do."""
    sizes = mx.exp(mx.random.normal((rows, 1), key=mx.random.key(columns)))
    return normal(rows, columns, seed=rows, scale=0.03, dtype=mx.bfloat16) * sizes.astype(mx.bfloat16)


def layer_of(weight: mx.array, form: str = AS_IT_IS, x_bits: int = 16, bias: mx.array | None = None) -> nn.Module:
    """A native layer of a weight, its kernel not chosen."""
    dense = nn.Linear(1, 1, bias=False)
    dense.weight = weight
    if bias is not None:
        dense.bias = bias
    dense = with_kernels(dense, native=True)
    dense.x_bits = x_bits
    if form == AS_IT_IS:
        return dense
    format, bits, gears, group_size = FORMS[form]
    layer = get_format(format).modules(dense, bits, gears, group_size, mx.float32)[bits]
    layer.x_bits = x_bits
    mx.eval(layer.parameters())
    return layer


def product_of(layer: nn.Module, x: mx.array, kernel: str = NATIVE) -> mx.array:
    layer.chosen = always(kernel)
    return layer.product(x)


def weights_of(layer: nn.Module) -> mx.array:
    """What the layer's numbers stand for, (O, I)."""
    planes = getattr(layer, "planes", None)
    return layer.dense_weight() if hasattr(layer, "dense_weight") else planes.dequantize() if planes else layer.weight


def spreads_apart(layer: nn.Module, dtype: mx.Dtype = mx.float32, vectors: int = 1) -> float:
    """The largest difference of a native product from one in float64, in spreads and the rounding of the result."""
    weight = weights_of(layer)
    x = trial_activations(vectors, weight.shape[1], dtype)
    y, spread = float64(product_of(layer, x)), float64(layer.expected(x).spread)
    exact = np.concatenate([float64(x) @ float64(weight[i : i + 4096]).T for i in range(0, len(weight), 4096)], -1)
    exact += float64(layer.bias) if "bias" in layer else 0.0
    return float((np.abs(y - exact) / (spread + mx.finfo(dtype).eps * np.abs(exact) / LEEWAY)).max())


@pytest.mark.parametrize("x_bits", [16, 8, 0])
@pytest.mark.parametrize("form", [AS_IT_IS, *FORMS])
def test_right_products_are_within_half_tolerance(form, x_bits):
    for shape in ((192, 576), (576, 1536), (256, 4864)):
        layer = layer_of(matrix(*shape), form, x_bits, bias=normal(shape[0], seed=3, scale=100.0))
        assert 0 < spreads_apart(layer) < LEEWAY / 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("form", [AS_IT_IS, "4 bits"])
def test_right_products_of_activations_of_any_type(form, dtype):
    assert spreads_apart(layer_of(matrix(512, 1536), form), dtype, vectors=3) < LEEWAY


@pytest.mark.slow
@pytest.mark.parametrize("form", [AS_IT_IS, *FORMS])
@pytest.mark.parametrize(("model", "x_bits"), [*zip(SHAPES, [16, 8, 0])])
def test_right_products_in_the_shapes_of_models(model, form, x_bits):
    hidden, mlp, keys, vocabulary = SHAPES[model]
    most = 2**25 // hidden  # rows of the vocabulary
    for shape in ((hidden, hidden), (keys, hidden), (mlp, hidden), (hidden, mlp), (min(vocabulary, most), hidden)):
        assert spreads_apart(layer_of(matrix(*shape), form, x_bits)) < LEEWAY


def swapped(weight: mx.array) -> mx.array:
    """The weight with its fourth and fifth row in each other's place."""
    return weight[mx.array([0, 1, 2, 4, 3, *range(5, len(weight))])]


def one_scale_larger(layer: nn.Module, row: int, group: int) -> None:
    panel = layer.scales.shape[-1]
    place = (row // panel, group, row % panel) if layer.scales.ndim == 3 else (row, group)
    layer.scales[place] = 1.01 * layer.scales[place]


def fault(wrong: nn.Module, right: nn.Module) -> float:
    """The difference that is found between a wrong native layer and a right one, in those that are allowed."""
    wrong.chosen = always(NATIVE)
    x = trial_activations(1, weights_of(right).shape[1], mx.float32)
    return product_errors({EXPECTED: [right.expected], NATIVE: [wrong.product]}, x)[NATIVE]


@pytest.mark.parametrize("shape", [(192, 576), (1536, 1536), (512, 8960)])
class TestWrongKernels:
    @pytest.mark.parametrize(("row", "group"), [(0, 0), (77, 5), (191, 8)])
    def test_scale_one_hundredth_too_large(self, shape, row, group):
        weight = matrix(*shape)
        right, wrong = (layer_of(weight, "6 bits") for _ in range(2))
        assert fault(wrong, right) < 1
        one_scale_larger(wrong, row, group)
        assert fault(wrong, right) > 1

    @pytest.mark.parametrize("column", [0, 100, -1])
    @pytest.mark.parametrize("form", [AS_IT_IS, "8 bits"])
    def test_omitted_column_is_found(self, shape, column, form):
        weight = matrix(*shape)
        less = weight + 0
        less[:, column] = 0
        right, as_it_is = layer_of(weight, form), layer_of(less)
        as_it_is.chosen = always(NATIVE)
        assert fault(layer_of(weight, form), right) < 1
        if form != AS_IT_IS:  # the same codes without the column
            whole = weights_of(right)
            whole[:, column] = 0
            as_it_is.weight = whole
        assert fault(as_it_is, right) > 1

    @pytest.mark.parametrize("x_bits", [16, 8, 0])
    @pytest.mark.parametrize("form", [AS_IT_IS, *FORMS])
    def test_swapped_rows_are_found(self, shape, form, x_bits):
        weight = matrix(*shape)
        right = layer_of(weight, form, x_bits)
        assert fault(layer_of(swapped(weight), form, x_bits), right) > 1


WIDTH = 512


def two_layers(first: int, second: int) -> nn.Module:
    mx.random.seed(0)
    return nn.Sequential(nn.Linear(WIDTH, first, bias=False), nn.Linear(first, second, bias=False))


def test_refused_kernel_is_reported_with_its_cost(own_cache, monkeypatch):
    """Once for each kind of product, where that is more than a tenth of the weights."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    monkeypatch.setattr(rounding, "LEEWAY", 1e-6)  # as if every kernel of ours were wrong
    box = Gearbox(two_layers(6 * WIDTH, WIDTH), "4,16", format="affine", kernels="auto")
    with pytest.warns(GearbxWarning) as said:
        measure_gears(box)
    measure_gears(box)  # another warning would be an error
    lines = [str(line.message) for line in said]
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(r"MLX's kernel multiplies 50% of the weights \(.*\), [\d.]+ times slower: .*", line)
    assert box.kernel_choices.tuner.wrong.keys() == {re.search(r"\((.*)\)", line).group(1) for line in lines}


def test_refused_kernel_of_few_weights_is_silent(own_cache, monkeypatch):
    monkeypatch.setenv("GEARBX_TUNE", "1")
    right = tuner.product_errors

    def wrong_for_the_first(products, x):
        return {name: 1e3 if x.shape[-1] == WIDTH else error for name, error in right(products, x).items()}

    monkeypatch.setattr(tuner, "product_errors", wrong_for_the_first)
    box = Gearbox(two_layers(4 * WIDTH, 20 * WIDTH), "4,16", format="affine", kernels="auto")
    measure_gears(box)  # a warning would be an error
    assert len(box.kernel_choices.tuner.wrong) == 2
