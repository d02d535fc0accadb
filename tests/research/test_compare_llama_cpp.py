"""The study compare-llama-cpp, as far as it runs without llama.cpp."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, tiny_model, weights_of

from research.llama_cpp import gguf_name, interleaved, write_gguf

HEADS, SIZE = 3, 8


def test_query_key_products_match_llama_cpp_rotation():
    """A product of rotated heads does not depend on the order of rows, if pairs on both sides rotate together."""
    inputs = normal(1, 5, 16, seed=1)

    def scores(arrange, traditional: bool) -> np.ndarray:
        queries, keys = (
            mx.fast.rope(
                (inputs @ mx.array(arrange(np.array(normal(HEADS * SIZE, 16, seed=seed)))).T)
                .reshape(1, 5, HEADS, SIZE)
                .swapaxes(1, 2),
                SIZE,
                traditional=traditional,
                base=10000.0,
                scale=1.0,
                offset=7,
            )
            for seed in (2, 3)
        )
        return np.array(queries @ keys.swapaxes(2, 3))

    ours = scores(lambda weight: weight, traditional=False)
    theirs = scores(lambda weight: interleaved(weight, HEADS), traditional=True)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-3)
    assert np.abs(scores(lambda weight: weight, traditional=True) - ours).max() > 0.1


def test_a_gguf_has_every_weight_of_the_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    model = tiny_model("llama")
    write_gguf(model, tmp_path / "m.gguf", "F32", context=99)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    heads = {"q_proj": model.args.num_attention_heads, "k_proj": model.args.num_key_value_heads}
    weights = weights_of(model)
    assert found.keys() == {gguf_name(path) for path in weights}
    for path, array in weights.items():
        weight = np.array(array)
        for name, count in heads.items():
            weight = interleaved(weight, count) if name in path else weight
        assert np.array_equal(found[gguf_name(path)], weight), path
