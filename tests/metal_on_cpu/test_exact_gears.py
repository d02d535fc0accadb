import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox

from .checks import exact

PROMPT = mx.array([list(range(1, 25))])


@pytest.mark.clang
@pytest.mark.parametrize("ladder", ["4,16", "3,16", "4,8,16"])
def test_a_models_top_gear_is_its_dense_one(ladder, launches):
    def model():
        made = tiny_model("qwen2")
        made.set_dtype(mx.bfloat16)
        return made

    dense = model()
    native = Gearbox(model(), ladder, format="exact", kernels="native")
    native.shift(native.ladder[-1])
    for tokens in (PROMPT[:, :1], PROMPT[:, :16], PROMPT):
        launches.clear()
        y = exact(native.model(tokens))
        names = {launch.spec.layout.name for launch in launches if hasattr(launch.spec, "layout")}
        print(
            ladder,
            tokens.size,
            len(launches),
            names,
            [l.spec.vectors for l in launches if hasattr(l.spec, "layout")][:3],
        )
        wanted = exact(dense(tokens))
        print(np.abs(y - wanted).max() / np.abs(wanted).max())
        assert any(n.startswith("exact") for n in names)
        np.testing.assert_allclose(y, wanted, atol=3e-2 * np.abs(wanted).max())
