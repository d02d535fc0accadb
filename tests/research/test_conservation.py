"""AION's law: the study's products are right, and its predictions and its law are sums of what was timed."""

import ctypes

import numpy as np
import pytest

from gearbx_mlx.errors import GearbxError
from research import conservation
from research.conservation import Arrays

ROWS, COLUMNS = 8, 1024


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return conservation.compiled(tmp_path_factory.mktemp("terms"))
    except GearbxError as why:
        pytest.skip(str(why))


def codes_of(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes (ROWS, COLUMNS), and their stored form."""
    codes = np.random.default_rng(bits).integers(0, {4: 16, 8: 128}[bits], (ROWS, COLUMNS), np.uint8)
    groups = codes.reshape(ROWS, -1, 2, 16)
    return codes, (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(ROWS, -1) if bits == 4 else codes


def product(library, name: str, weights: np.ndarray, bits: int, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    arrays = Arrays(weights, scales, x, bits)
    matrix, out = arrays.matrix(ROWS)
    getattr(library, name)(ctypes.byref(matrix))
    return out * (arrays.step if name in conservation.ROUNDED else 1)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal(COLUMNS).astype(np.float32)


@pytest.mark.parametrize(("name", "bits"), [("int4_floats", 4), ("w4a8", 4), ("int8_floats", 8), ("w8a8", 8)])
def test_products_of_codes_multiply(library, x, name, bits):
    codes, stored = codes_of(bits)
    scales = np.random.default_rng(1).uniform(0.01, 0.02, (ROWS, COLUMNS // 32)).astype(np.float32)
    dense = (codes.astype(np.float64) - {4: 8, 8: 64}[bits]) * np.repeat(scales, 32, axis=1)
    wide = np.rint(x / (np.abs(x).max() / 127)) * (np.abs(x).max() / 127) if name in conservation.ROUNDED else x
    found = product(library, name, stored, bits, scales, x)
    assert np.allclose(found, dense @ wide.astype(np.float64), rtol=1e-4, atol=1e-3 * np.abs(dense).max())


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 16), ("float32", 32)])
def test_products_of_floats_multiply(library, x, name, bits):
    dense = np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    stored = dense.view(np.uint8)
    if bits == 16:
        upper = (dense.view(np.uint32) >> 16).astype(np.uint16)
        dense, stored = (upper.astype(np.uint32) << 16).view(np.float32), upper.view(np.uint8)
    found = product(library, name, stored, bits, np.zeros((ROWS, COLUMNS // 32), np.float32), x)
    assert np.allclose(found, dense.astype(np.float64) @ x, rtol=1e-4, atol=1e-3)


def test_activations_are_rounded_as_numpy_does(library, x):
    arrays = Arrays(np.zeros((1, COLUMNS), np.uint8), np.zeros((1, COLUMNS // 32), np.float32), x, 8)
    expected = arrays.bytes.copy()
    arrays.bytes[:] = 0
    matrix, _ = arrays.matrix(1, again=True)
    library.quant_act(ctypes.byref(matrix))
    assert np.abs(arrays.bytes.astype(int) - expected).max() <= 1  # a half may be rounded up or down
    assert (arrays.bytes == expected).mean() > 0.99
