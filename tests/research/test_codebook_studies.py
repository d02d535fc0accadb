"""Studies of XFP: a Llama as a mixture, codebooks of groups, and the table of the H-Process."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import heavy, tiny_model

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import codebook
from research import codebook as codebook_study
from research.codebook import as_mixture, grouped_error, row_curve, squared_error
from research.conservation import compiled

TOKENS = mx.array([[(7 * i + i * i) % 50 for i in range(24)]])


def test_a_llama_as_a_mixture_computes_the_same():
    model = tiny_model()
    mixture = as_mixture(model, 2)
    experts = mixture.layers[0].block_sparse_moe.switch_mlp
    assert experts.up_proj.weight.shape[0] == 2
    assert experts.up_proj.weight.shape[1] * 2 == model.layers[0].mlp.up_proj.weight.shape[0]
    expected = np.array(model(TOKENS))
    np.testing.assert_allclose(np.array(mixture(TOKENS)), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [2, 3])
def test_a_group_has_a_codebook_of_its_own(bits):
    weight = heavy(16, 256)
    size, error = grouped_error(weight, bits)
    arrays = codebook.encode(weight.reshape(32, 128), bits)
    made = codebook.decode(arrays, bits, 128).reshape(16, 256)
    assert error == pytest.approx(squared_error(made, weight))
    # 128 codes (ten to a word at 3 bits), 2^bits numbers of 16 bits, and outliers of 32.
    codes = {2: 256, 3: 32 * 13}[bits]
    outliers = 32 * arrays["outliers"].size / 32
    assert size == pytest.approx((codes + 16 * 2**bits + outliers) / 128)
    curve = row_curve(weight)
    assert sorted(curve) == list(curve)
    assert list(curve.values()) == sorted(curve.values(), reverse=True)


def test_a_product_of_bytes_is_nearly_that_of_the_weights(tmp_path):
    try:
        library = compiled(tmp_path, Path(codebook_study.__file__).with_name("codebook_bytes.cpp"))
    except GearbxError as why:
        pytest.skip(str(why))
    arrays = codebook.encode(heavy(24, 256), 4)
    assert arrays["outliers"].size > 0
    x, y = np.array(mx.random.normal((3, 256), key=mx.random.key(2))), np.zeros((3, 24), np.float32)
    codebook_study.bytes_call(library, arrays, x, y)()
    wanted = x @ np.array(codebook.decode(arrays, 4, 256)).T
    assert 0 < np.abs(y - wanted).max() < 0.05 * np.abs(wanted).max()
