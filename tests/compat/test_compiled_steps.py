"""Classes that compile a step of their own: the compiled function must not keep another gear's weights."""

import mlx.core as mx
import pytest
from architectures import tiny
from lossless_texts import written
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, Lossless


@pytest.fixture
def compiling(monkeypatch):
    """Kimi K3, whose delta attention compiles a step if there is Metal; the step itself runs anywhere."""
    model = tiny("kimi_k3")
    model.eval()
    gearbox = Gearbox(model, "4,8,16", group_size=32, kernels="mlx")

    def logits(gear):
        gearbox.shift(gear)
        cache = make_prompt_cache(model)
        model(mx.arange(6)[None], cache=cache)
        computed = model(mx.array([[3]]), cache=cache)
        mx.eval(computed)
        return computed

    def compiled():
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)

    return gearbox, logits, compiled


@pytest.mark.slow
def test_every_gear_has_compiled_steps_of_its_own(compiling):
    gearbox, logits, compiled = compiling
    expected = {gear: logits(gear) for gear in ("high", "low", "mid")}
    compiled()
    for gear in ("high", "low", "high", "mid", "low", "high"):
        assert mx.allclose(logits(gear), expected[gear], atol=1e-5), gear
    steps = [module._step for module in gearbox.model.modules() if "_step" in vars(module)]
    logits("low"), logits("high")
    assert [
        module._step for module in gearbox.model.modules() if "_step" in vars(module)
    ] == steps  # not compiled again


@pytest.mark.slow
def test_a_partly_accepted_draft_leaves_nothing_of_it_in_them(compiling):
    gearbox, _, compiled = compiling
    compiled()
    texts = [written(gearbox, [*range(6)], 20, mode)[0] for mode in (None, Lossless(draft_length=4), None)]
    tokens = [[token for token, _ in text] for text in texts]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_cap_compiles_them_again(compiling):
    gearbox, logits, compiled = compiling
    gearbox.cap({layer.path: 4 for layer in gearbox.layers})
    expected = logits("high")
    gearbox.cap({})
    compiled()
    assert not mx.allclose(logits("high"), expected, atol=1e-3)
    gearbox.cap({layer.path: 4 for layer in gearbox.layers})
    assert mx.allclose(logits("high"), expected, atol=1e-5)
