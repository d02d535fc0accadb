"""A KV cache in gears under models that differ from Llama."""

import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, Static, stream_generate

PROMPT = [1 + i % 50 for i in range(90)]


def logprobs(model, tokenizer, kernels: str, **keywords) -> np.ndarray:
    gearbox = Gearbox(model, "4,16", kernels=kernels, activations="float")
    responses = stream_generate(model, tokenizer, PROMPT, 3, gearbox=gearbox, mode=Static(), **keywords)
    return np.array([np.array(response.logprobs) for response in responses])


@pytest.mark.parametrize("architecture", ["minicpm3", "deepseek_v2"])
@pytest.mark.parametrize("ladder", ["4,16", "4,8"])
def test_values_may_be_narrower_than_keys(demo, compiled, architecture, ladder):
    native, mlx = (
        logprobs(tiny_model(architecture), demo.tokenizer, kernels, kv_gears=ladder, kv_gear=4)
        for kernels in ("native", "mlx")
    )
    np.testing.assert_allclose(native, mlx, atol=1e-3)
    assert np.abs(native - logprobs(tiny_model(architecture), demo.tokenizer, "native")).max() > 1e-3
