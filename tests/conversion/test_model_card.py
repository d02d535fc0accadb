"""Writing a quantized model as mlx-lm's convert does."""

import pytest
from conftest import tiny_model

from gearbx_mlx.conversion import model_card


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(RuntimeError("disk full"), OSError), (Exception("disk full"), OSError), (KeyError("disk full"), KeyError)],
)
def test_failing_write_is_an_os_error(monkeypatch, tmp_path, failure, raised):
    def fail(*_):
        raise failure

    monkeypatch.setattr(model_card, "save", fail)
    with pytest.raises(raised, match="disk full"):
        model_card.write_table(tiny_model(), None, {}, tmp_path, tmp_path, {"model.layers.0.self_attn.q_proj": 4}, 32)
