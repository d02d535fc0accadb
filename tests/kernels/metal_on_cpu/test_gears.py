"""Whole models whose gears launch Metal kernels, every launch run on the CPU: everything of a Mac but the Mac."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.kernels import dispatch, metal

from .checks import exact

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
        down = nn.Linear(107, 64, bias=False)
        down.weight = mlp.down_proj.weight[:, :107]
        return down

    native = Gearbox(model(), GEARS[format], format=format, kernels="native")
    stock = Gearbox(model(), GEARS[format], format=format, kernels="mlx")
    for gear in native.ladder:
        native.shift(gear)
        stock.shift(gear)
        native.model(TOKEN)  # compares each kernel with MLX's first
        launches.clear()
        wanted = exact(stock.model(TOKEN))
        np.testing.assert_allclose(exact(native.model(TOKEN)), wanted, atol=1e-4 * np.abs(wanted).max())
        products = [launch for launch in launches if launch.spec.text in ("matvec", "dense")]
        assert {launch.spec.text for launch in products} == {"dense" if gear.dense else "matvec"}
        assert len(products) == len(native.layers)
        assert gear.dense or any(launch.spec.has_bias for launch in products)
        launches.clear()
        native.model(PROMPT)
        assert launches == []
    assert "native (Metal: ours, up to 16 vectors; MLX beyond)" in native.describe()


@pytest.mark.slow
@pytest.mark.clang
def test_a_launch_of_several_vectors_is_one(launches):
    gearbox = Gearbox(tiny_model(), "4,16", format="groupwise", manage="mlp", kernels="native")
    gearbox.shift("low")
    gearbox.model(PROMPT[:, :5])  # compares the kernels with MLX's first
    launches.clear()
    gearbox.model(PROMPT[:, :5])
    packed = [launch.spec for launch in launches if launch.spec.text == "matvec"]
    assert [spec.vectors for spec in packed] == [5] * len(gearbox.layers)


def test_metal_is_used_unless_it_is_refused(monkeypatch):
    monkeypatch.setattr(metal, "available", lambda: True)
    assert dispatch.choose("native").ours_alone
    assert dispatch.choose("auto").native
    assert not dispatch.choose("auto").ours_alone
    assert not dispatch.choose("mlx").native


@pytest.mark.some(2)
@pytest.mark.clang
@pytest.mark.parametrize("format", GEARS)
def test_auto_without_measuring_is_mlx_where_it_has_a_kernel_and_ours_elsewhere(format, launches):
    gearbox = Gearbox(tiny_model(), GEARS[format], format=format, kernels="auto")
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        gearbox.model(TOKEN)  # which compares each kernel once
        launches.clear()
        gearbox.model(TOKEN)
        ours = not gear.dense and format not in ("planes", "affine")
        assert sum(launch.spec.text == "matvec" for launch in launches) == (len(gearbox.layers) if ours else 0)
        assert not any(launch.spec.text == "dense" for launch in launches)


def test_on_a_gpu_the_kernels_of_the_cpu_are_neither_compiled_nor_used(monkeypatch):
    def compiled() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(dispatch.cpu, "native", compiled)
    monkeypatch.setattr(dispatch.mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    assert dispatch.cpu_kernels(1) is None
    assert dispatch.fused_kernel("entropy_bits") is None


def test_what_goes_to_metal(monkeypatch):
    x = mx.zeros((1, 8, 64), mx.bfloat16)
    monkeypatch.setattr(metal, "available", lambda: False)
    assert not dispatch.is_metal(x)
    monkeypatch.setattr(metal, "available", lambda: True)
    assert dispatch.is_metal(x)
    assert dispatch.is_metal(x[0, 0])
    assert not dispatch.is_metal(mx.zeros((17, 64)))
    assert not dispatch.is_metal(mx.zeros((0, 64)))
    assert not dispatch.is_metal(x.astype(mx.int32))
