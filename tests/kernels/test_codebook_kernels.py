import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PROMPT, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import Gearbox, GearbxWarning
from gearbx_mlx.formats import codebook, codebook_library
from gearbx_mlx.formats.codebook import NativeCodebookLinear
from gearbx_mlx.kernels import cpu

CASES = [(codebook, bits) for bits in range(2, 7)] + [(codebook_library, bits) for bits in codebook_library.BITS]


@pytest.fixture(scope="module")
def native():
    assert cpu.why_not() is None, cpu.why_not()
    return cpu.native()


def kernel(native, module):
    return native.codebook_matvec if module is codebook else native.library_matvec


def heavy(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, shape) * 0.02).astype(np.float32)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CASES), st.integers(1, 9), st.integers(1, 700), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_product_is_that_of_the_reconstruction_and_the_same_in_any_company(native, case, rows, width, vectors, seed):
    module, bits = case
    arrays = module.encode(mx.array(heavy(rows, width, seed=seed)), bits)
    x = mx.array(np.random.default_rng(seed).standard_normal((vectors, width)).astype(np.float32))
    weight = np.array(codebook.decode(arrays, bits, width)).astype(np.float64)
    exact, bound = np.array(x) @ weight.T, np.abs(np.array(x)) @ np.abs(weight).T
    found = kernel(native, module)(x, **arrays, bits=bits)
    assert (np.abs(np.array(found) - exact) <= 1e-5 * bound + 1e-6).all()
    alone = kernel(native, module)(x[-1:], **arrays, bits=bits)
    assert mx.array_equal(found[-1:], alone).item()


def experts_kernel(native, module):
    return native.codebook_experts if module is codebook else native.library_experts


@pytest.mark.some(2)
@pytest.mark.parametrize(("module", "bits"), CASES)
def test_experts_are_products_with_each_one_s_own_tables_and_outliers(native, module, bits):
    values = heavy(4, 9, 300)
    values[1] = 0.5 * np.random.default_rng(1).standard_normal((9, 300))  # other tables, and fewer outliers
    values[2, 3, ::20] = 2.0
    arrays = module.encode(mx.array(values), bits)
    weight = np.array(codebook.decode(arrays, bits, 300)).astype(np.float64)
    x = mx.random.normal((40, 1, 300))
    chosen = mx.random.randint(0, 4, (40, 2)).astype(mx.uint32)
    y = experts_kernel(native, module)(x[:, None], **arrays, indices=chosen, bits=bits)
    assert y.shape == (40, 2, 1, 9)
    for token in range(40):
        for k in range(2):
            matrix, vector = weight[chosen[token, k].item()], np.array(x[token, 0])
            bound = np.abs(matrix) @ np.abs(vector)
            assert (np.abs(np.array(y[token, k, 0]) - matrix @ vector) <= 1e-5 * bound + 1e-6).all()
            one = {name: array[chosen[token, k].item()] for name, array in arrays.items()}
            assert mx.array_equal(y[token, k], kernel(native, module)(x[token], **one, bits=bits)).item()


def test_an_expert_that_does_not_exist_gives_nan_and_arrays_that_do_not_fit_are_refused(native):
    arrays = codebook.encode(mx.array(heavy(2, 4, 100)), 3)
    y = native.codebook_experts(mx.ones((1, 1, 100)), **arrays, indices=mx.array([[1, 2]]), bits=3)
    assert mx.isfinite(y[0, 0]).all().item()
    assert mx.isnan(y[0, 1]).all().item()
    short = arrays | {"outlier_offsets": arrays["outlier_offsets"][:1]}
    with pytest.raises(ValueError, match="an outlier offset for each row"):
        native.codebook_experts(mx.ones((1, 1, 100)), **short, indices=mx.array([[1]]), bits=3)
    with pytest.raises(ValueError, match="a matrix for each expert"):
        native.codebook_experts(
            mx.ones((1, 1, 100)), **codebook.encode(mx.array(heavy(4, 100)), 3), indices=mx.array([[0]]), bits=3
        )


@pytest.mark.parametrize(("module", "bits"), CASES)
def test_many_outliers_at_their_places(native, module, bits):
    values = heavy(8, 1000) * 0.01
    values[3, ::60], values[5, 999], values[0, 0] = 1.0, -2.0, 3.0
    arrays = module.encode(mx.array(values), bits)
    for column in (0, 60, 999, 500):
        x = mx.zeros((1, 1000))
        x[0, column] = 1.0
        expected = codebook.decode(arrays, bits, 1000)[:, column]
        assert mx.allclose(kernel(native, module)(x, **arrays, bits=bits)[0], expected, atol=1e-6).item()


def test_arguments_that_do_not_go_together(native):
    arrays = codebook.encode(mx.array(heavy(4, 100)), 3)
    with pytest.raises(ValueError, match="do not fit the width of x"):
        native.codebook_matvec(mx.ones((1, 200)), **arrays, bits=3)
    with pytest.raises(ValueError, match="do not fit the width of x"):
        native.codebook_matvec(mx.ones((1, 100)), **arrays, bits=4)
    short = arrays | {"outlier_offsets": arrays["outlier_offsets"][:-1]}
    with pytest.raises(ValueError, match="an outlier offset for each row"):
        native.codebook_matvec(mx.ones((1, 100)), **short, bits=3)
    with pytest.raises(ValueError, match="codes of 2 to 6 bits"):
        native.codebook_matvec(mx.ones((1, 100)), **arrays, bits=7)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["codebook", "codebook-library"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_model_differs_from_mlx_in_last_bits_only(native, format, dtype):
    common = {"format": format, "activations": "float"}
    stock, fast = (Gearbox(tiny_model(dtype=dtype), "2,4,16", kernels=k, **common) for k in ("mlx", "native"))
    for gear in ("low", "mid", "high"):
        stock.shift(gear)
        fast.shift(gear)
        for tokens in (PROMPT, mx.arange(40)[None]):
            assert mx.allclose(fast.model(tokens), stock.model(tokens), rtol=1e-4, atol=1e-5).item()
    fast.shift("low")
    assert isinstance(fast.model.layers[0].mlp.up_proj, nn.Module)
    if format == "codebook":
        assert type(fast.model.layers[0].mlp.up_proj) is NativeCodebookLinear
    assert "q_proj: 2, 4, 16; native" in fast.describe()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["codebook", "codebook-library"])
def test_a_mixture_of_experts_differs_from_mlx_in_last_bits_only(native, format):
    stock, fast = (
        Gearbox(tiny_model("qwen3_moe"), "2,4,16", format=format, kernels=kernels) for kernels in ("mlx", "native")
    )
    assert "switch_mlp.up_proj: 2, 4, 16; native" in fast.describe()
    for gear in ("low", "mid"):
        stock.shift(gear)
        fast.shift(gear)
        for tokens in (PROMPT, mx.arange(40)[None]):
            assert mx.allclose(fast.model(tokens), stock.model(tokens), rtol=1e-4, atol=1e-5).item()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["codebook", "codebook-library"])
def test_activations_stay_as_they_are_and_whoever_asks_for_less_is_warned(native, format):
    with pytest.warns(GearbxWarning, match="codebooks take activations as they are"):
        rounded = Gearbox(tiny_model(), "4,16", format=format, kernels="native", activations="int8")
    as_they_are = Gearbox(tiny_model(), "4,16", format=format, kernels="native", activations="float")
    assert "activations of" not in rounded.describe()
    for gearbox in (rounded, as_they_are):
        gearbox.shift("low")
    assert mx.array_equal(rounded.model(PROMPT), as_they_are.model(PROMPT)).item()


def test_without_native_kernels_the_weight_is_reconstructed(monkeypatch):
    weight = mx.array(heavy(6, 90))
    dense = nn.Linear(90, 6)
    dense.weight = weight
    module = NativeCodebookLinear(dense, 4, codebook.encode(weight, 4), codebook.Codebook())
    monkeypatch.setattr(cpu, "native", lambda: None)
    x = mx.ones((2, 90))
    assert mx.allclose(module(x), x @ module.dense_weight(mx.float32).T + dense.bias, atol=1e-6).item()
