"""The classes that replace mlx-lm's in a model with native kernels, on a CPU and where Metal seems to be."""

import mlx.core as mx
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.kernels import metal

STOCK = {"rope": "RoPE", "attention": "Attention", "norm": "RMSNorm", "mlp": "MLP", "block": "TransformerBlock"}


@pytest.fixture
def on_metal(monkeypatch):
    monkeypatch.setattr(metal, "available", lambda: True)


def classes(model) -> dict[str, str]:
    """What rotates, attends, normalizes and gates in the first block, and the block itself, as class names."""
    block = model.layers[0]
    parts = block.self_attn.rope, block.self_attn, block.input_layernorm, block.mlp, block
    return dict(zip(STOCK, (type(part).__name__ for part in parts)))


def bfloat16_model():
    made = tiny_model()
    made.set_dtype(mx.bfloat16)
    return made


@pytest.mark.clang
@pytest.mark.slow
def test_auto_replaces_products_alone_on_metal(launches):  # which makes the gears in format exact
    gearbox = Gearbox(bfloat16_model(), "4,16", format="exact", kernels="auto")
    assert gearbox.kernels.native
    assert classes(gearbox.model) == STOCK


def test_native_replaces_what_would_depend_on_other_rows_on_metal(on_metal):
    gearbox = Gearbox(tiny_model(), "4,16", kernels="native")
    assert classes(gearbox.model) == STOCK | {"rope": "NativeRoPE", "attention": "NativeAttention"}


def test_everything_is_replaced_on_a_cpu(native):
    gearbox = Gearbox(tiny_model(), "4,16", kernels="native")
    assert classes(gearbox.model) == {part: f"Native{name}" for part, name in STOCK.items()}


def test_a_second_gearbox_gives_back_what_it_does_not_replace(on_metal):
    model = tiny_model()
    Gearbox(model, "16", kernels="native")
    assert classes(model)["rope"] == "NativeRoPE"
    Gearbox(model, "16", kernels="mlx")
    assert classes(model) == STOCK


def test_a_model_from_the_cpu_gives_its_norms_back_on_metal(native, monkeypatch):
    model = tiny_model()
    Gearbox(model, "16", kernels="native")
    monkeypatch.setattr(metal, "available", lambda: True)
    Gearbox(model, "16", kernels="native")
    assert classes(model) == STOCK | {"rope": "NativeRoPE", "attention": "NativeAttention"}
