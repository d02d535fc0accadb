"""Native CPU kernels with activations of 8 and 16 bits."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import assert_products_close, float64, stack_weights, tiny_model, up_to
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels import products
from gearbx_mlx.kernels.bit_planes import Planes

PROMPT = mx.array([[1, 5, 9, 2, 7]])


STEPS = {8: 127, 16: 32384}  # of the largest activation of a group


@pytest.mark.usefixtures("compiled")
class TestRoundedActivations:
    @settings(max_examples=40)
    @given(
        bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
        x_bits=st.sampled_from([8, 16]),
        group_size=st.sampled_from([32, 64, 128]),
        rows=st.integers(1, 40),
        groups=st.integers(1, 9),
        vectors=st.integers(1, up_to(20)),
        seed=st.integers(0, 1 << 30),
    )
    def test_the_product_of_rounded_activations(self, bits, x_bits, group_size, rows, groups, vectors, seed):
        keys = mx.random.split(mx.random.key(seed))
        weight, scales, biases = mx.quantize(
            mx.random.normal((rows, groups * group_size), key=keys[0]), group_size, bits
        )
        x = mx.random.normal((vectors, groups * group_size), key=keys[1])
        y = products.stack_product(x, Planes([weight], scales, [biases], [bits], group_size), x_bits=x_bits)
        stack = stack_weights([weight], scales, [biases], [bits], group_size)
        assert_products_close(y, rounded(x, group_size, x_bits), *stack)

    @pytest.mark.parametrize("x_bits", STEPS)
    def test_same_bits_in_any_company(self, native, x_bits):
        planes = split(mx.random.normal((70, 512)), (4, 1, 1, 2), 64)
        x = mx.random.normal((16, 512))
        for n in range(1, 5):
            stack = planes.gear(sum(planes.widths[:n]))
            together = native.stack_matvec(x, *stack, x_bits)
            for i in range(16):
                assert mx.array_equal(together[i : i + 1], native.stack_matvec(x[i : i + 1], *stack, x_bits)).item()

    @settings(max_examples=20)
    @given(
        widths=st.sampled_from([(2,), (3,), (4,), (6,), (8,), (4, 4), (2, 2, 4), (4, 1, 1, 2)]),
        x_bits=st.sampled_from([8, 16]),
        group_size=st.sampled_from([32, 64, 128]),
        rows=st.integers(1, 50),
        groups=st.integers(1, 20),
        vectors=st.sampled_from([2, 7, 16, up_to(17), up_to(100)]),
        seed=st.integers(0, 1 << 30),
    )
    def test_same_bits_among_any_number_of_vectors(self, widths, x_bits, group_size, rows, groups, vectors, seed):
        keys = mx.random.split(mx.random.key(seed))
        planes = split(mx.random.normal((rows, groups * group_size), key=keys[0]), widths, group_size)
        x = mx.random.normal((vectors, groups * group_size), key=keys[1])
        together = products.stack_product(x, planes, x_bits=x_bits)
        for v in (0, vectors // 2, vectors - 1):
            assert mx.array_equal(
                together[v : v + 1], products.stack_product(x[v : v + 1], planes, x_bits=x_bits)
            ).item()

    @pytest.mark.parametrize("x_bits", STEPS)
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_shows_in_its_vector_alone(self, native, value, x_bits):
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
    def test_a_gearbox_that_rounds(self, activations, error):
        exact, fast = (Gearbox(tiny_model(), "4,8,16", kernels="native", activations=a) for a in ("float", activations))
        assert f"activations of {activations[3:]} bits" in fast.describe()
        for gear in exact.ladder:
            exact.shift(gear)
            fast.shift(gear)
            wanted, logits = exact.model(PROMPT), fast.model(PROMPT)
            assert mx.array_equal(wanted, logits).item() is gear.dense
            assert mx.abs(wanted - logits).max().item() < error * mx.abs(wanted).max().item()

    def test_names(self):
        with pytest.raises(GearbxError, match="activations 'int4' do not exist; choose from int16, int8, float"):
            Gearbox(tiny_model(), activations="int4")
        with pytest.warns(GearbxWarning, match="activations are not rounded"):
            Gearbox(tiny_model(), kernels="mlx", activations="int8")


def rounded(x: mx.array, group_size: int, bits: int) -> mx.array:
    """Activations in steps of their group's largest."""
    groups = np.array(x).reshape(len(x), -1, group_size)
    steps = np.abs(groups).max(-1, keepdims=True) / np.float32(STEPS[bits])
    q = np.rint(groups * (np.float32(1) / steps))
    return mx.array((q.astype(np.float64) * steps.astype(np.float64)).astype(np.float32).reshape(x.shape))
