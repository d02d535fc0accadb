"""Native CPU kernels: compared with float64, and bit for bit over batches."""

import contextlib
import io
import os
import platform
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import (
    PROMPT,
    assert_products_close,
    every_gear,
    float64,
    heavy,
    layer_with,
    stack_weights,
    tiny_model,
    up_to,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import Gearbox, GearbxWarning
from gearbx_mlx.formats import codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.formats.codebook import NativeCodebookLinear
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels import cpu, products
from gearbx_mlx.kernels.bit_planes import Planes
from gearbx_mlx.kernels.compiler import SOURCES, find_compiler
from gearbx_mlx.kernels.metal_products import codebook_inputs
from gearbx_mlx.kernels.products import SymmetricCodes, symmetric_product

TYPES = [mx.float32, mx.bfloat16, mx.float16]
ROWS = [1, 3, 17]

PRODUCTS = """
import zlib

import mlx.core as mx
import numpy as np

from gearbx_mlx.kernels import cpu

mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)
weight, x = (mx.array(random.standard_normal((n, 600)).astype(np.float32)) for n in (1500, 100))
for count in (1, 5, 16, 100):
    for x_bits in (0, 16):
        y = cpu.native().dense_matvec(x[:count], weight.astype(mx.bfloat16), x_bits)
        print(zlib.crc32(np.array(y).tobytes()))
"""


class TestNumbers:
    @pytest.mark.some(21)
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize(
        "widths", [(4, 4), (2, 2, 4), (3, 1, 2, 2), (4, 1, 1, 2), (3, 5), (2, 6), (5, 1, 2)], ids=str
    )
    def test_every_prefix_of_planes(self, native, widths, group_size, dtype):
        for rows in ROWS:
            planes = split(mx.random.normal((rows, 256)).astype(dtype), widths, group_size)
            for count in range(1, len(widths) + 1):
                stack = planes.gear(sum(widths[:count]))
                x = mx.random.normal((3, 256))
                assert_products_close(products.stack_product(x, stack), x, *stack_weights(*stack))

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("columns", [1, 7, 8, 33, 100, 384])
    def test_dense_products_are_close_to_float64(self, native, columns, dtype):
        for rows in ROWS:
            weight = mx.random.normal((rows, columns)).astype(dtype)
            x = mx.random.normal((5, columns))
            assert_products_close(native.dense_matvec(x, weight), x, float64(weight), np.abs(float64(weight)))
            x = x.astype(mx.bfloat16).astype(mx.float32)  # which rounding to bfloat16 leaves as it is
            assert_products_close(native.dense_matvec(x, weight, 16), x, float64(weight), np.abs(float64(weight)))

    @settings(max_examples=40)
    @given(
        dtype=st.sampled_from(TYPES),
        x_bits=st.sampled_from([0, 16]),
        rows=st.integers(1, 80) | st.just(300),
        columns=st.integers(1, 1200),
        vectors=st.integers(2, up_to(17)) | st.sampled_from([up_to(100), up_to(512), up_to(513)]),
        changes=st.lists(st.tuples(st.integers(0, 2**20), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=3),
        seed=st.integers(0, 1 << 30),
    )
    def test_dense_bits_are_batch_invariant(self, dtype, x_bits, rows, columns, vectors, changes, seed):
        random = np.random.default_rng(seed)
        weight, x = (random.standard_normal((n, columns)).astype(np.float32) for n in (rows, vectors))
        for place, value in changes:
            x.flat[place % x.size] = value
        dense = mx.array(weight).astype(dtype)

        def product(x):
            return np.array(products.dense_product(mx.array(x), dense, x_bits=x_bits))

        y, chosen = product(x), [0, vectors // 2, vectors - 1]
        alone = np.concatenate([product(x[v : v + 1]) for v in chosen])
        assert (np.isnan(y[chosen]) == np.isnan(alone)).all()
        assert np.nan_to_num(y[chosen]).tobytes() == np.nan_to_num(alone).tobytes()

    @pytest.mark.parametrize("threads", [1, 3])
    def test_dense_bits_with_any_number_of_threads(self, native, threads):
        environment = os.environ | {"GEARBX_THREADS": str(threads)}
        done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, env=environment)
        with contextlib.redirect_stdout(io.StringIO()) as own:
            exec(PRODUCTS, {})
        assert done.stdout == own.getvalue(), done.stderr

    def test_noncontiguous_activations_and_weights(self, native):
        weight = mx.random.normal((48, 64))
        x = mx.random.normal((64, 6))
        y = native.dense_matvec(x.T[::2], weight[::3])
        assert mx.allclose(y, x.T[::2] @ weight[::3].T, atol=1e-5).item()
        words, scales, biases = mx.quantize(mx.random.normal((48, 64)), 32, 4)
        y = native.stack_matvec(x.T[::2], [words[::3]], scales[::3], [biases[::3]], [4], 32)
        expected = native.stack_matvec(mx.contiguous(x.T[::2]), [words], scales, [biases], [4], 32)
        assert mx.array_equal(y, expected[:, ::3]).item()

    def test_shapes_and_types_of_activations(self, native):
        weight = mx.random.normal((5, 64)).astype(mx.bfloat16)
        for shape in [(64,), (1, 64), (2, 1, 4, 64)]:
            assert native.dense_matvec(mx.ones(shape), weight).shape == (*shape[:-1], 5)
        for shape in [(0, 64), (2, 0, 64)]:  # no vector at all
            assert products.dense_product(mx.ones(shape), weight).shape == (*shape[:-1], 5)
        assert products.dense_product(mx.ones((1, 64), mx.float16), weight).dtype == mx.float16

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_nonfinite_input_affects_only_its_row(self, native, value):
        spot = mx.arange(17)[:, None] == 3
        x = mx.random.normal((2, 64))
        for dtype in TYPES:
            weight = mx.where(spot & (mx.arange(64) == 40), value, mx.random.normal((17, 64))).astype(dtype)
            finite = np.isfinite(float64(native.dense_matvec(x, weight)))
            assert not finite[:, 3].any()
            assert finite.sum() == 2 * 16
            words, scales, biases = mx.quantize(mx.random.normal((17, 64)), 32, 4)
            for damaged in ((mx.where(spot, value, scales), biases), (scales, mx.where(spot, value, biases))):
                s, z = (a.astype(dtype) for a in damaged)
                finite = np.isfinite(float64(native.stack_matvec(x, [words], s, [z], [4], 32)))
                assert not finite[:, 3].any()
                assert finite.sum() == 2 * 16

    def test_wrong_arguments_are_refused(self, native):
        words, scales, biases = mx.quantize(mx.random.normal((8, 64)), 32, 4)
        one = mx.ones((1, 64))
        for x, w, s, z, widths, group in [
            (mx.ones((0, 64)), [words], scales, [biases], [4], 32),
            (mx.ones((1, 32)), [words], scales, [biases], [4], 32),
            (one, [words], scales, [biases], [8], 32),
            (one, [words], scales, [biases], [7], 32),
            (one, [words], scales, [biases], [4], 64),
            (one, [words[:4]], scales, [biases], [4], 32),
            (one, [words], scales, [biases[:4]], [4], 32),
            (one, [words] * 3, scales, [biases] * 3, [4] * 3, 32),
            (one, [], scales, [], [], 32),
        ]:
            with pytest.raises(ValueError, match=r"."):
                native.stack_matvec(x, w, s, z, widths, group)
        with pytest.raises(ValueError, match="differ in width"):
            native.dense_matvec(one, mx.ones((8, 63)))


class TestModel:
    def test_activations_are_not_rounded_by_mlxs_kernels(self):
        with pytest.warns(GearbxWarning, match="activations are not quantized"):
            Gearbox(tiny_model(), kernels="mlx", activations="int8")

    def test_the_top_gear_keeps_its_two_bytes(self):
        model = tiny_model(dtype=mx.bfloat16)
        weight = model.layers[0].mlp.up_proj.weight
        gearbox = Gearbox(model, kernels="native")
        assert model.layers[0].mlp.up_proj.weight is weight
        assert model.layers[0].input_layernorm.weight.dtype == mx.float32
        gearbox.shift("low")
        assert model.layers[0].mlp.up_proj.scales.dtype == mx.bfloat16
        assert isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["-mavx512f", "-mavx512vl", "-mavx512vnni"], ["-mavxvnni"]], ids=str)
def test_integer_products_compile_for_newer_processors(tmp_path, flags):
    """This machine's processor may be older: what is compiled here is not run."""
    if platform.machine() != "x86_64":
        pytest.skip("x86 alone")
    command = [*find_compiler(), "-std=c++20", "-O2", "-mavx2", "-mfma", "-mf16c", *flags, "-S", "-o", "-"]
    done = subprocess.run([*command, str(SOURCES / "integer.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vpdpbusd" in done.stdout


class TestShapes:
    @pytest.mark.parametrize("vectors", [3, 40])
    def test_noncontiguous_activations_and_indices(self, native, vectors):
        weight = mx.random.normal((4, 9, 64)).astype(mx.float16)
        wide = mx.random.normal((64, 1, 2 * vectors))
        x, chosen = wide.T[::2], mx.random.randint(0, 4, (vectors, 3)).T[1]
        expected = native.dense_experts(mx.contiguous(x), weight, mx.contiguous(chosen))
        assert mx.array_equal(native.dense_experts(x, weight, chosen), expected).item()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"group": 48}, "group size"),
            ({"weight": mx.zeros((3, 96))}, "rows of groups"),
            ({"weight": mx.zeros((3, 128), mx.int32)}, "float32, bfloat16 or float16"),
            ({"widths": [4, 5]}, "as many bits in all as a code"),
            ({"widths": [0]}, "1 to 8 bits"),
        ],
        ids=str,
    )
    def test_weights_unsuitable_for_planes(self, native, change, said):
        given = {"weight": mx.zeros((3, 128)), "widths": [4], "group": 64, "least": 1e-30, "in_panels": False} | change
        mx.eval(given["weight"])
        with pytest.raises(ValueError, match=said):
            native.make_planes(**given)


STEPS = {8: 127, 16: 32384}  # of the largest activation of a group


@pytest.mark.usefixtures("compiled")
class TestQuantizedActivations:
    @settings(max_examples=100)
    @given(
        bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
        x_bits=st.sampled_from([0, 8, 16]),
        group_size=st.sampled_from([32, 64, 128]),
        dtype=st.sampled_from(TYPES),
        rows=st.integers(1, 70),
        groups=st.integers(1, 70),
        vectors=st.integers(1, up_to(20)),
        seed=st.integers(0, 1 << 30),
    )
    def test_affine_weights_of_any_shape(self, bits, x_bits, group_size, dtype, rows, groups, vectors, seed):
        keys, columns = mx.random.split(mx.random.key(seed)), groups * group_size
        weight, scales, biases = mx.quantize(mx.random.normal((rows, columns), key=keys[0]), group_size, bits)
        planes = Planes([weight], scales.astype(dtype), [biases.astype(dtype)], [bits], group_size)
        x = mx.random.normal((vectors, columns), key=keys[1])
        y = products.stack_product(x, planes, x_bits=x_bits)
        assert_products_close(y, rounded(x, group_size, x_bits) if x_bits else x, *stack_weights(*planes))

    @settings(max_examples=40)
    @given(
        widths=st.sampled_from([(2,), (3,), (4,), (6,), (8,), (4, 4), (2, 2, 4), (4, 1, 1, 2)]),
        x_bits=st.sampled_from([0, 8, 16]),
        group_size=st.sampled_from([32, 64, 128]),
        rows=st.integers(1, 50) | st.just(300),
        groups=st.integers(1, 20),
        vectors=st.integers(2, up_to(17)) | st.just(up_to(100)),
        seed=st.integers(0, 1 << 30),
    )
    def test_same_bits_among_any_number_of_vectors(self, widths, x_bits, group_size, rows, groups, vectors, seed):
        keys = mx.random.split(mx.random.key(seed))
        planes = split(mx.random.normal((rows, groups * group_size), key=keys[0]), widths, group_size)
        planes = planes.gear(sum(widths[: 1 + seed % len(widths)]))
        x = mx.random.normal((vectors, groups * group_size), key=keys[1])
        together = products.stack_product(x, planes, x_bits=x_bits)
        for v in (0, vectors // 2, vectors - 1):
            alone = products.stack_product(x[v : v + 1], planes, x_bits=x_bits)
            assert mx.array_equal(together[v : v + 1], alone).item()

    @pytest.mark.parametrize("x_bits", [0, *STEPS])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_nonfinite_input_affects_only_its_vector(self, native, value, x_bits):
        weight, scales, biases = mx.quantize(mx.random.normal((9, 128)), 32, 4)
        x = mx.where((mx.arange(3)[:, None] == 1) & (mx.arange(128) == 70), value, mx.random.normal((3, 128)))
        finite = np.isfinite(float64(native.stack_matvec(x, [weight], scales, [biases], [4], 32, x_bits=x_bits)))
        assert not finite[1].any()
        assert finite[[0, 2]].all()

    @pytest.mark.parametrize("x_bits", STEPS)
    def test_tiny_and_no_activations(self, native, x_bits):
        weight, scales, biases = mx.quantize(mx.random.normal((9, 64)), 32, 4)
        for x in (mx.zeros((1, 64)), mx.full((1, 64), 1e-40)):
            y = native.stack_matvec(x, [weight], scales, [biases], [4], 32, x_bits=x_bits)
            assert mx.abs(y).max().item() < 1e-36

    @pytest.mark.parametrize(("activations", "error"), [("int16", 1e-3), ("int8", 0.05)])
    def test_gearbox_quantizes_activations(self, activations, error):
        exact, fast = (Gearbox(tiny_model(), "4,8,16", kernels="native", activations=a) for a in ("float", activations))
        assert f"{activations[3:]}-bit activations" in fast.describe()
        for gear in every_gear(exact, fast):
            wanted, logits = exact.model(PROMPT), fast.model(PROMPT)
            assert mx.array_equal(wanted, logits).item() is gear.dense
            assert mx.abs(wanted - logits).max().item() < error * mx.abs(wanted).max().item()


def rounded(x: mx.array, group_size: int, bits: int) -> mx.array:
    """Activations in steps of their group's largest."""
    groups = np.array(x).reshape(len(x), -1, group_size)
    steps = np.abs(groups).max(-1, keepdims=True) / np.float32(STEPS[bits])
    q = np.rint(groups * (np.float32(1) / steps))
    return mx.array((q.astype(np.float64) * steps.astype(np.float64)).astype(np.float32).reshape(x.shape))


@pytest.mark.usefixtures("compiled")
class TestSymmetricCodes:
    @settings(max_examples=150)
    @given(
        kind=st.sampled_from([(rowwise, 2), (rowwise, 4), (rowwise, 6), (rowwise, 8), (groupwise, 4)]),
        rows=st.integers(1, 40),
        width=st.integers(1, 300),
        vectors=st.integers(1, 20),
        dtype=st.sampled_from(TYPES),
        seed=st.integers(0, 1 << 30),
    )
    def test_with_a_scale_for_each_row_or_group(self, kind, rows, width, vectors, dtype, seed):
        (format, bits), keys = kind, mx.random.split(mx.random.key(seed))
        weight = mx.random.normal((rows, width), key=keys[0]).astype(dtype)
        codes, scales = rowwise.quantize(weight, bits) if format is rowwise else groupwise.quantize(weight)
        x = mx.random.normal((vectors, width), key=keys[1])
        y = symmetric_product(x, SymmetricCodes(rowwise.pack_symmetric_codes(codes, bits), scales, bits, width))
        each = width if format is rowwise else groupwise.GROUP_INPUTS
        sizes = np.repeat(float64(scales).reshape(rows, -1), each, axis=1)[:, :width]
        weights = float64(codes)[:, :width] * sizes
        # Codes are multiplied with their offset; the sum of the activations removes it again.
        assert_products_close(y, x, weights, np.abs(weights) + 2.0 ** (bits - 1) * sizes)

    def test_bits_are_batch_invariant(self, native):
        codes, scales = rowwise.quantize(mx.random.normal((50, 203)), 6)
        packed, x = rowwise.pack_symmetric_codes(codes, 6), mx.random.normal((20, 203))
        for x_bits in (0, 8, 16):
            together = native.symmetric_matvec(x, packed, scales, 6, x_bits)
            for i in range(20):
                alone = native.symmetric_matvec(x[i : i + 1], packed, scales, 6, x_bits)
                assert mx.array_equal(together[i : i + 1], alone).item()

    def test_wrong_arguments_are_refused(self, native):
        codes, scales = rowwise.quantize(mx.random.normal((8, 64)), 4)
        packed, x = rowwise.pack_symmetric_codes(codes, 4), mx.ones((1, 64))
        for arguments in [
            (x, packed, scales, 5),
            (x, packed, scales, 8),
            (x, packed.astype(mx.int32), scales, 4),
            (x, packed, scales[:4], 4),
            (x, packed, scales[:, None], 4),
            (x, packed, scales.astype(mx.int32), 4),
            (mx.ones((1, 65)), packed, scales, 4),
            (mx.ones((0, 64)), packed, scales, 4),
            (x, packed, scales, 4, 12),
        ]:
            with pytest.raises(ValueError, match=r"x|codes|rows|scale|vector|activations"):
                native.symmetric_matvec(*arguments)


CASES = [(codebook, bits) for bits in range(2, 7)] + [(codebook_library, bits) for bits in (2, 3, 4)]


@pytest.mark.some(2)
@pytest.mark.parametrize(("module", "bits"), CASES)
def test_experts_use_their_own_tables_and_outliers(native, module, bits):
    values = np.array(heavy(4, 9, 300))
    values[1] = 0.5 * np.random.default_rng(1).standard_normal((9, 300))  # other tables, and fewer outliers
    values[2, 3, ::20] = 2.0
    arrays = module.encode(mx.array(values), bits)
    weight = np.array(codebook.decode(arrays, bits, 300)).astype(np.float64)
    x = mx.random.normal((40, 1, 300))
    chosen = mx.random.randint(0, 4, (40, 2)).astype(mx.uint32)
    y = native.codebook_experts(x[:, None], codebook_inputs(arrays), bits, chosen)
    assert y.shape == (40, 2, 1, 9)
    for token in range(40):
        for k in range(2):
            matrix, vector = weight[chosen[token, k].item()], np.array(x[token, 0])
            bound = np.abs(matrix) @ np.abs(vector)
            assert (np.abs(np.array(y[token, k, 0]) - matrix @ vector) <= 1e-5 * bound + 1e-6).all()
            one = {name: array[chosen[token, k].item()] for name, array in arrays.items()}
            assert mx.array_equal(y[token, k], native.codebook_matvec(x[token], codebook_inputs(one), bits)).item()


def test_missing_expert_gives_nan_and_mismatched_arrays_fail(native):
    arrays = codebook.encode(heavy(2, 4, 100), 3)
    y = native.codebook_experts(mx.ones((1, 1, 100)), codebook_inputs(arrays), 3, mx.array([[1, 2]]))
    assert mx.isfinite(y[0, 0]).all().item()
    assert mx.isnan(y[0, 1]).all().item()
    short = arrays | {"outlier_offsets": arrays["outlier_offsets"][:1]}
    with pytest.raises(ValueError, match="an outlier offset for each row"):
        native.codebook_experts(mx.ones((1, 1, 100)), codebook_inputs(short), 3, mx.array([[1]]))
    one = codebook.encode(heavy(4, 100), 3)
    with pytest.raises(ValueError, match="a matrix for each expert"):
        native.codebook_experts(mx.ones((1, 1, 100)), codebook_inputs(one), 3, mx.array([[0]]))


@pytest.mark.parametrize(("module", "bits"), CASES)
def test_many_outliers_at_their_places(native, module, bits):
    values = np.array(heavy(8, 1000)) * 0.01
    values[3, ::60], values[5, 999], values[0, 0] = 1.0, -2.0, 3.0
    arrays = module.encode(mx.array(values), bits)
    for column in (0, 60, 999, 500):
        x = mx.zeros((1, 1000))
        x[0, column] = 1.0
        expected = codebook.decode(arrays, bits, 1000)[:, column]
        assert mx.allclose(native.codebook_matvec(x, codebook_inputs(arrays), bits)[0], expected, atol=1e-6).item()


def test_incompatible_arguments_are_refused(native):
    arrays = codebook.encode(heavy(4, 100), 3)
    for width, bits, change, said in (
        (200, 3, {}, "do not fit the width of x"),
        (100, 4, {}, "do not fit the width of x"),
        (100, 3, {"outlier_offsets": arrays["outlier_offsets"][:-1]}, "an outlier offset for each row"),
        (100, 7, {}, "codes of 2 to 6 bits"),
    ):
        with pytest.raises(ValueError, match=said):
            native.codebook_matvec(mx.ones((1, width)), codebook_inputs(arrays | change), bits)


def test_without_native_kernels_the_weight_is_reconstructed(monkeypatch):
    weight = heavy(6, 90)
    dense = layer_with(weight, bias=True)
    module = NativeCodebookLinear(dense, 4, codebook.encode(weight, 4), codebook.Codebook())
    monkeypatch.setattr(cpu, "native", lambda: None)
    x = mx.ones((2, 90))
    assert mx.allclose(module(x), x @ module.dense_weight(mx.float32).T + dense.bias, atol=1e-6).item()
