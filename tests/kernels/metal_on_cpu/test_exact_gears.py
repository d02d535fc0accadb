"""A whole model in format `exact`, with kernels from their Metal text."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox
from gearbx_mlx.kernels.dispatch import NATIVE
from gearbx_mlx.kernels.metal import Prepared

from .cases import run_prepared
from .checks import exact
from .test_mutations import changer

PROMPT = mx.array([list(range(1, 25))])


def model():
    made = tiny_model("qwen2")
    made.set_dtype(mx.bfloat16)
    return made


@pytest.mark.slow
@pytest.mark.clang
def test_the_top_gear_is_the_dense_model_on_kernels_of_its_own(launches):
    native = Gearbox(model(), "4,16", format="exact", kernels="native")
    for tokens in (PROMPT[:, :1], PROMPT[:, :16], PROMPT):
        launches.clear()
        y, wanted = exact(native.model(tokens)), exact(model()(tokens))
        assert any(launch.spec.text == "exact" for launch in launches)
        np.testing.assert_allclose(y, wanted, atol=3e-2 * np.abs(wanted).max())  # both round activations to bfloat16


@pytest.mark.slow
@pytest.mark.clang
def test_a_pass_over_several_tokens_gives_each_what_it_gets_alone(launches):
    native = Gearbox(model(), "4,16", format="exact", kernels="native").model
    together = exact(native(PROMPT[:, :8], cache=make_prompt_cache(native)))
    cache = make_prompt_cache(native)
    alone = [exact(native(PROMPT[:, i : i + 1], cache=cache)) for i in range(8)]
    np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))


@pytest.mark.slow
@pytest.mark.clang
def test_a_wrong_kernel_is_found_on_the_models_own_weights_and_not_used(launches, monkeypatch):
    broken = changer("WINDOW = 144", "WINDOW = 16")

    def run(self: Prepared, *inputs: mx.array) -> mx.array:
        multiplies = self.spec.text == "exact" and self.spec.vectors  # the encoder needs the kernel that decodes
        report = run_prepared(self, inputs, change=broken if multiplies else None)
        return self.result(mx.array(report.out[0], self.options["output_dtypes"][0]))

    monkeypatch.setattr(Prepared, "__call__", run)
    made = Gearbox(model(), "4,16", format="exact", kernels="auto")
    y, wanted = exact(made.model(PROMPT[:, :1])), exact(model()(PROMPT[:, :1]))
    np.testing.assert_allclose(y, wanted, atol=3e-2 * np.abs(wanted).max())
    wrong = made.kernel_choices.tuner.wrong
    assert len(wrong) > 3  # shapes of layers
    assert all("exact" in product and found[NATIVE] > 0.01 for product, found in wrong.items())
