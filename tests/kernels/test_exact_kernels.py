"""Native kernels over exact weights: every bit of the weight, and every bit of the dense kernel's products."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal
from exact_reference import as_bf16, bits_of, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx.formats import exact


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    weights = np.random.default_rng(seed).standard_normal(shape) * 0.02
    return bits_of(mx.array(weights.astype(np.float32)).astype(mx.bfloat16))


def same(a: mx.array, b: mx.array) -> bool:
    """Equal bits; NaN equals NaN, since which of two a product keeps depends on the order of its operands."""
    x, y = np.array(a).view(np.uint32), np.array(b).view(np.uint32)
    return bool(((x == y) | (np.isnan(np.array(a)) & np.isnan(np.array(b)))).all())


special = st.sampled_from([0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])


@pytest.mark.parametrize("group", [32, 64])
def test_mlx_encoder_equals_native_encoder(native, group):
    """Also for groups that are stored whole: numbers far apart, and values that are not finite."""
    bits = gaussian(12, 4 * group)
    bits[1, ::7], bits[2, 5], bits[3, group + 1], bits[4, :3] = 0x7F00, 0x7F80, 0x7FC1, (0, 0x8000, 1)
    bits[5] = np.random.default_rng(1).integers(0, 2**16, 4 * group)
    values = mx.array(bits)
    plane = exact.quantize(values.view(mx.bfloat16), group)
    mx.eval(values, plane.arrays)
    ours = native.exact_encode(values, plane.weights[0], plane.scales, plane.biases[0], group)
    theirs = exact.bytes_beside(values, plane)
    assert not np.array(ours[0]).all()  # some groups are stored whole
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(np.array(mine), np.array(other))


@settings(max_examples=80)
@given(
    st.sampled_from([32, 64, 128]),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 2**20), special | st.integers(0, 65535)), max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_weights_and_products_to_the_last_bit(native, group, rows, groups, count, changes, seed):
    bits = gaussian(rows, groups * group, seed=seed)
    for place, value in changes:
        bits.flat[place % bits.size] = value
    arrays = encode(bits, group)
    assert (bits_of(native.exact_decode(**arrays)) == bits).all()
    x = normal(count, groups * group, seed=seed)
    for x_bits in (0, 16):
        y = native.exact_matvec(x, **arrays, x_bits=x_bits)
        assert same(y, native.dense_matvec(x, as_bf16(bits), x_bits))
        assert same(y[-1:], native.exact_matvec(x[-1:], **arrays, x_bits=x_bits))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shuffled", [False, True])
def test_all_bit_patterns_are_decoded(native, group, shuffled):
    bits = np.arange(65536, dtype=np.uint16)
    if shuffled:
        bits = np.random.default_rng(0).permutation(bits)
    bits = bits.reshape(64, 1024)
    assert (bits_of(native.exact_decode(**encode(bits, group))) == bits).all()


@pytest.mark.parametrize("count", [*range(1, 18), 40, 300])
def test_any_number_of_vectors_gives_the_dense_results(native, count):
    bits = gaussian(70, 320, seed=count)
    arrays, x = encode(bits, 64), normal(count, 320)
    for x_bits in (0, 16):
        y = native.exact_matvec(x, **arrays, x_bits=x_bits)
        assert same(y, native.dense_matvec(x, as_bf16(bits), x_bits))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_equal_dense_ones(native, tokens):
    bits = gaussian(4, 6, 128)
    arrays = encode(bits, 32)
    assert (bits_of(native.exact_decode(**arrays)) == bits).all()
    x, chosen = normal(tokens, 128)[:, None, None], mx.random.randint(0, 3, (tokens, 2))
    for x_bits in (0, 16):
        y = native.exact_experts(x, **arrays, indices=chosen, x_bits=x_bits)
        assert y.shape == (tokens, 2, 1, 6)
        assert same(y, native.dense_experts(x, as_bf16(bits), chosen, x_bits))
    absent = native.exact_experts(x, **arrays, indices=mx.full((tokens, 1), 4))
    assert np.isnan(np.array(absent)).all()


HOSTILE = {  # the place of an offset, what it becomes, the rows that are wrong then
    "descending": (6, lambda offsets: offsets[5] - 1, [5]),
    "beyond": (12, lambda offsets: offsets[12] + 1, [11]),
    "too few": (7, lambda offsets: offsets[7] - 1, [6]),
    "huge": (3, lambda offsets: 2**32 - 1, [2, 3]),
}


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize(("place", "lie", "wrong"), HOSTILE.values(), ids=HOSTILE)
def test_only_rows_with_hostile_offsets_become_nan(native, place, lie, wrong, count):
    bits, x = gaussian(12, 192), normal(count, 192)
    arrays = encode(bits, 64)
    offsets = np.array(arrays["offsets"]).astype(np.int64)
    offsets[place] = lie(offsets)
    arrays["offsets"] = mx.array((offsets % 2**32).astype(np.uint32))
    y = np.array(native.exact_matvec(x, **arrays))
    assert np.isnan(y[:, wrong]).all()
    found = bits_of(native.exact_decode(**arrays))
    assert np.isnan(np.array(native.exact_decode(**arrays).astype(mx.float32))[wrong]).all()
    others = [row for row in range(12) if row not in wrong and row - 1 not in wrong]
    assert (found[others] == bits[others]).all()
    assert same(mx.array(y[:, others]), native.dense_matvec(x, as_bf16(bits))[:, mx.array(others)])


def test_incompatible_arguments_are_refused(native):
    arrays, x = encode(gaussian(4, 128), 64), normal(1, 128)
    for wrong, message in (
        ({"codes": arrays["codes"][:, :8]}, "shapes that do not fit"),
        ({"group": 48}, "32, 64 or 128"),
        ({"group": 32}, "shapes that do not fit"),
        ({"scales": arrays["scales"].view(mx.bfloat16)}, "uint16, the bits of bfloat16"),
        ({"scales": arrays["scales"][0]}, "scales must be a matrix"),
        ({"biases": arrays["biases"][:2]}, "biases must have the type and shape"),
        ({"low": arrays["low"][:, :64]}, "low bytes do not fit"),
        ({"high": arrays["high"].astype(mx.uint16)}, "a vector of uint8"),
        ({"offsets": arrays["offsets"][:-1]}, "offset for each row, and one more"),
    ):
        with pytest.raises(ValueError, match=message):
            native.exact_matvec(x, **(arrays | wrong))
    with pytest.raises(ValueError, match="differ in width"):
        native.exact_matvec(normal(1, 64), **arrays)


def test_shapes_types_and_strides_of_activations(native):
    bits = gaussian(6, 128)
    arrays, weight = encode(bits, 64), as_bf16(bits)
    x = normal(12, 256)[::2, ::2].reshape(2, 3, 128)
    y = native.exact_matvec(x, **arrays)
    assert y.shape == (2, 3, 6)
    assert same(y, native.dense_matvec(x, weight))
    half = x.astype(mx.bfloat16)
    assert same(native.exact_matvec(half, **arrays), native.dense_matvec(half, weight))
