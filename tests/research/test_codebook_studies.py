"""The H-Process on a mixture: a Llama becomes one that computes the same."""

import mlx.core as mx
import numpy as np
from conftest import tiny_model

from research.codebook import as_mixture

TOKENS = mx.array([[(7 * i + i * i) % 50 for i in range(24)]])


def test_llama_as_moe_computes_the_same():
    model = tiny_model()
    mixture = as_mixture(model, 2)
    experts = mixture.layers[0].block_sparse_moe.switch_mlp
    assert experts.up_proj.weight.shape[0] == 2
    assert experts.up_proj.weight.shape[1] * 2 == model.layers[0].mlp.up_proj.weight.shape[0]
    expected = np.array(model(TOKENS))
    np.testing.assert_allclose(np.array(mixture(TOKENS)), expected, atol=1e-5 * np.abs(expected).max())
