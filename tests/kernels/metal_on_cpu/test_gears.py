"""Whole models whose gears launch Metal kernels, every launch run on the CPU: everything of a Mac but the Mac."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import every_gear, layer_with, tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.errors import GearbxWarning
from gearbx_mlx.kernels import dispatch, metal, proven
from gearbx_mlx.kernels.dispatch import NATIVE
from gearbx_mlx.kernels.metal import Prepared

from .cases import run_prepared
from .checks import exact
from .test_mutations import changer

GEARS = {"planes": "4,8,16", "affine": "3,6,16", "rowwise": "2,6,16", "groupwise": "4,16"}
GEARS |= {"codebook": "3,5,16", "codebook-library": "2,4,16"}
TOKEN = mx.array([[7]])
PROMPT = mx.array([[1, 5, 9, 2, 7, 3, 3, 8, 11, 4, 1, 6, 2, 10, 5, 9, 7]])  # more vectors than a kernel takes


@pytest.mark.slow
@pytest.mark.clang
@pytest.mark.parametrize("format", GEARS)
def test_a_model_decodes_in_every_gear(format, launches):
    def model() -> nn.Module:
        made = tiny_model("qwen2")  # its attention has biases
        if format not in ("planes", "affine"):  # which have whole groups
            made.model.layers[0].mlp.down_proj = odd(made.model.layers[0].mlp)
        return made

    def odd(mlp: nn.Module) -> nn.Linear:
        """Rows that end in the middle of 16 codes: the MLP's inner width is cut."""
        mlp.gate_proj.weight, mlp.up_proj.weight = (p.weight[:107] for p in (mlp.gate_proj, mlp.up_proj))
        return layer_with(mlp.down_proj.weight[:, :107])

    native = Gearbox(model(), GEARS[format], format=format, kernels="native")
    stock = Gearbox(model(), GEARS[format], format=format, kernels="mlx")
    for gear in every_gear(native, stock):
        native.model(TOKEN)  # compares each kernel with MLX's first
        launches.clear()
        wanted = exact(stock.model(TOKEN))
        np.testing.assert_allclose(exact(native.model(TOKEN)), wanted, atol=1e-4 * np.abs(wanted).max())
        products = [launch for launch in launches if launch.spec.layout.text in ("matvec", "dense")]
        assert {launch.spec.layout.text for launch in products} == {"dense" if gear.dense else "matvec"}
        assert len(products) == len(native.layers)
        assert gear.dense or any(launch.spec.has_bias for launch in products)
        launches.clear()
        native.model(PROMPT)
        assert launches == []
    assert "native (Metal: native kernels, up to 16 vectors; MLX beyond)" in native.describe()


@pytest.mark.some(2)
@pytest.mark.clang
@pytest.mark.parametrize("format", GEARS)
def test_auto_launches_only_kernels_proven_here(format, launches, monkeypatch):
    def texts(gearbox: Gearbox) -> list[str]:
        launches.clear()
        for _ in every_gear(gearbox):
            gearbox.model(TOKEN)
        return [launch.spec.layout.text for launch in launches]

    assert texts(Gearbox(tiny_model(), GEARS[format], format=format, kernels="auto")) == []
    faster = proven.Proof(1.0, 2.0)
    monkeypatch.setattr(proven, "proof", lambda key: faster if key.endswith(("registers", "native")) else None)
    monkeypatch.setattr(proven, "any_won", lambda: True)
    gearbox = Gearbox(tiny_model(), GEARS[format], format=format, kernels="auto")
    packed = len(gearbox.layers) * len(gearbox.ladder.quantized_bits)
    assert texts(gearbox) == ["matvec"] * packed + ["dense"] * len(gearbox.layers)


def test_gpu_neither_compiles_nor_uses_cpu_kernels(monkeypatch):
    def compiled() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(dispatch.cpu, "native", compiled)
    monkeypatch.setattr(dispatch.mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    assert dispatch.cpu_kernels(1) is None
    assert dispatch.fused_kernel("entropy_bits") is None


def test_metal_takes_few_floating_point_vectors(monkeypatch):
    x = mx.zeros((1, 8, 64), mx.bfloat16)
    monkeypatch.setattr(metal, "available", lambda: False)
    assert not dispatch.is_metal(x)
    monkeypatch.setattr(metal, "available", lambda: True)
    assert dispatch.is_metal(x)
    assert dispatch.is_metal(x[0, 0])
    assert not dispatch.is_metal(mx.zeros((17, 64)))
    assert not dispatch.is_metal(mx.zeros((0, 64)))
    assert not dispatch.is_metal(x.astype(mx.int32))


LONG_PROMPT = mx.array([list(range(1, 25))])


def model():
    made = tiny_model("qwen2")
    made.set_dtype(mx.bfloat16)
    return made


@pytest.mark.slow
@pytest.mark.clang
def test_top_gear_equals_dense_model_on_own_kernels(launches):
    native = Gearbox(model(), "4,16", format="exact", kernels="native")
    for tokens in (LONG_PROMPT[:, :1], LONG_PROMPT[:, :16], LONG_PROMPT):
        launches.clear()
        y, wanted = exact(native.model(tokens)), exact(model()(tokens))
        assert any(launch.spec.layout.text == "exact" for launch in launches)
        np.testing.assert_allclose(y, wanted, atol=3e-2 * np.abs(wanted).max())  # both round activations to bfloat16


@pytest.mark.slow
@pytest.mark.clang
def test_wrong_kernel_is_found_and_not_used(launches, monkeypatch):
    broken = changer("WINDOW = 144", "WINDOW = 16")

    def run(self: Prepared, *inputs: mx.array) -> mx.array:
        report = run_prepared(self, inputs, change=broken if self.spec.layout.text == "exact" else None)
        return self.result(mx.array(report.out[0], self.options["output_dtypes"][0]))

    monkeypatch.setattr(Prepared, "__call__", run)
    with pytest.warns(GearbxWarning, match="times the rounding bound"):
        made = Gearbox(model(), "4,16", format="exact", kernels="native")
    y, wanted = exact(made.model(LONG_PROMPT[:, :1])), exact(model()(LONG_PROMPT[:, :1]))
    np.testing.assert_allclose(y, wanted, atol=3e-2 * np.abs(wanted).max())
    wrong = made.kernel_choices.tuner.wrong
    assert len(wrong) > 3  # shapes of layers
    assert all("exact" in product and found[NATIVE] > 0.01 for product, found in wrong.items())


STOCK = {"rope": "RoPE", "attention": "Attention", "norm": "RMSNorm", "mlp": "MLP", "block": "TransformerBlock"}


def classes(model) -> dict[str, str]:
    """What rotates, attends, normalizes and gates in the first block, and the block itself, as class names."""
    block = model.layers[0]
    parts = block.self_attn.rope, block.self_attn, block.input_layernorm, block.mlp, block
    return dict(zip(STOCK, (type(part).__name__ for part in parts)))


def test_operations_are_replaced_only_on_cpu(native, monkeypatch):
    """Another gearbox gives back what it does not replace."""
    model = tiny_model()
    Gearbox(model, "16", kernels="native")
    assert classes(model) == {part: f"Native{name}" for part, name in STOCK.items()}
    monkeypatch.setattr(metal, "available", lambda: True)
    for made in (model, tiny_model()):
        Gearbox(made, "16", kernels="native")
        assert classes(made) == STOCK
    Gearbox(model, "16", kernels="mlx")
    assert classes(model) == STOCK
