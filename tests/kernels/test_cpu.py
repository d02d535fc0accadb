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
from conftest import assert_products_close, float64, stack_weights, tiny_model, up_to, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.formats.native import NativeDense
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels import products
from gearbx_mlx.kernels.bit_planes import Planes
from gearbx_mlx.kernels.compiler import SOURCES, find_compiler

TYPES = [mx.float32, mx.bfloat16, mx.float16]
ROWS = [1, 3, 17]
PROMPT = mx.array([[1, 5, 9, 2, 7]])

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
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
    def test_affine_weights(self, native, bits, group_size, dtype):
        for rows in ROWS:
            weight, scales, biases = mx.quantize(mx.random.normal((rows, 384)), group_size, bits)
            scales, biases = scales.astype(dtype), biases.astype(dtype)
            exact = stack_weights([weight], scales, [biases], [bits], group_size)
            for vectors in (1, 2, 16):
                x = mx.random.normal((vectors, 384))
                assert_products_close(native.stack_matvec(x, [weight], scales, [biases], [bits], group_size), x, *exact)

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
    def test_dense_weights(self, native, columns, dtype):
        for rows in ROWS:
            weight = mx.random.normal((rows, columns)).astype(dtype)
            x = mx.random.normal((5, columns))
            assert_products_close(native.dense_matvec(x, weight), x, float64(weight), np.abs(float64(weight)))
            x = x.astype(mx.bfloat16).astype(mx.float32)  # which rounding to bfloat16 leaves as it is
            assert_products_close(native.dense_matvec(x, weight, 16), x, float64(weight), np.abs(float64(weight)))

    @settings(max_examples=30)
    @given(
        bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
        rows=st.integers(1, 70),
        groups=st.integers(1, 70),
        vectors=st.integers(1, 16),
        seed=st.integers(0, 1 << 30),
    )
    def test_any_shape(self, bits, rows, groups, vectors, seed):
        key = mx.random.key(seed)
        weight, scales, biases = mx.quantize(mx.random.normal((rows, groups * 32), key=key), 32, bits)
        x = mx.random.normal((vectors, groups * 32), key=key)
        y = products.stack_product(x, Planes([weight], scales, [biases], [bits], 32))
        assert_products_close(y, x, *stack_weights([weight], scales, [biases], [bits], 32))

    def test_a_vector_has_the_same_bits_whatever_else_is_in_the_call(self, native):
        x = mx.random.normal((16, 512))
        planes = split(mx.random.normal((300, 512)), (4, 1, 1, 2), 64)
        dense = mx.random.normal((300, 512)).astype(mx.bfloat16)
        products = [lambda x: native.dense_matvec(x, dense), lambda x: native.dense_matvec(x, dense, 16)]
        for n in range(1, 5):
            stack = planes.gear(sum(planes.widths[:n]))
            products.append(lambda x, stack=stack: native.stack_matvec(x, *stack))
        for product in products:
            alone = [product(x[i : i + 1]) for i in range(16)]
            for vectors in range(1, 17):
                together = product(x[16 - vectors :])
                assert mx.array_equal(together, mx.concatenate(alone[16 - vectors :])).item()

    @settings(max_examples=40)
    @given(
        dtype=st.sampled_from(TYPES),
        x_bits=st.sampled_from([0, 16]),
        rows=st.integers(1, 80),
        columns=st.integers(1, 1200),
        vectors=st.integers(2, up_to(17)) | st.sampled_from([up_to(100), up_to(512), up_to(513)]),
        changes=st.lists(st.tuples(st.integers(0, 2**20), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=3),
        seed=st.integers(0, 1 << 30),
    )
    def test_dense_bits_in_any_company(self, dtype, x_bits, rows, columns, vectors, changes, seed):
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

    def test_activations_and_weights_that_are_not_in_rows(self, native):
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
        assert products.dense_product(mx.ones((1, 64), mx.float16), weight).dtype == mx.float16

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_shows_in_its_row_alone(self, native, value):
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

    def test_products_are_operations_of_the_graph(self, native):
        """Nothing is computed before it is asked for."""
        x = mx.ones((1, 64)) * 2  # unevaluated, like everything after it
        y = native.dense_matvec(native.dense_matvec(x, mx.ones((64, 64))), mx.ones((3, 64)))
        assert y.shape == (1, 3)
        assert mx.array_equal(y + 0, mx.full((1, 3), 2.0 * 64 * 64)).item()


class TestModel:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("format", ["planes", "affine"])
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_every_gear_differs_from_mlx_in_last_bits_only(self, format, dtype):
        stock, fast = (
            Gearbox(tiny_model(dtype=dtype), format=format, group_size=32, kernels=k, activations="float")
            for k in ("mlx", "native")
        )
        for gear in ("low", "mid", "high"):
            stock.shift(gear)
            fast.shift(gear)
            expected, found = stock.model(PROMPT), fast.model(PROMPT)
            assert found.dtype == expected.dtype
            assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()
            long = mx.arange(40)[None]  # more vectors than share one read of the weights
            assert mx.allclose(fast.model(long), stock.model(long), rtol=1e-4, atol=1e-5).item()

    def test_the_top_gear_keeps_its_two_bytes(self):
        model = tiny_model(dtype=mx.bfloat16)
        weight = model.layers[0].mlp.up_proj.weight
        gearbox = Gearbox(model, kernels="native")
        assert model.layers[0].mlp.up_proj.weight is weight
        assert model.layers[0].input_layernorm.weight.dtype == mx.float32
        gearbox.shift("low")
        assert model.layers[0].mlp.up_proj.scales.dtype == mx.bfloat16
        assert isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)

    def test_a_gearbox_with_mlx_kernels_after_one_with_native_ones(self):
        model, untouched = tiny_model(dtype=mx.bfloat16), tiny_model(dtype=mx.bfloat16)
        Gearbox(model, kernels="native")
        Gearbox(model, kernels="mlx")
        Gearbox(untouched, kernels="mlx")
        assert not any(isinstance(m, NativeDense) for m in model.modules())
        assert mx.array_equal(model(PROMPT), untouched(PROMPT)).item()
        assert {p: a.dtype for p, a in weights_of(model).items()} == {
            p: a.dtype for p, a in weights_of(untouched).items()
        }

    def test_residency(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, residency="disk", checkpoint=fresh_demo.path, kernels="native")
        before = gearbox.model(PROMPT)
        types = {path: a.dtype for path, a in weights_of(gearbox.model).items()}
        for gear in ("low", "mid", "high"):
            gearbox.shift(gear)
            after = gearbox.model(PROMPT)
            mx.eval(after)
        assert mx.array_equal(after, before).item()
        assert {path: a.dtype for path, a in weights_of(gearbox.model).items()} == types

    def test_biases(self):
        stock, fast = (Gearbox(tiny_model("gpt_neox"), kernels=k, activations="float") for k in ("mlx", "native"))
        for gear in ("low", "mid", "high"):
            stock.shift(gear)
            fast.shift(gear)
            assert mx.allclose(fast.model(PROMPT), stock.model(PROMPT), rtol=1e-4, atol=1e-5).item()

    def test_the_flag(self, command):
        done = command("generate", "--kernels", "native", "--max-tokens", 8)
        assert done.status == 0, done.err

    def test_names_that_do_not_exist(self):
        with pytest.raises(GearbxError, match="kernels 'fast' do not exist; choose from auto, native, mlx"):
            Gearbox(tiny_model(), kernels="fast")


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
