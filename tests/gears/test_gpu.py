"""Gears on a GPU, of a Mac or on Linux, if there is one: near the CPU's numbers, and every mode to its end."""

import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.formats import FORMATS
from gearbx_mlx.kernels import KERNELS

TOKENS = mx.array([[1, 5, 9, 2, 7]])
MODES = ("route", "kickdown", "lossless", "static", "telemetry-only")
WITH_GPU = pytest.mark.skipif(not mx.is_available(mx.Device(mx.gpu)), reason="MLX has no GPU here")


def logits_in_gears(format: str, kernels: str) -> list[np.ndarray]:
    """The logits of a bfloat16 model in its low and its top gear."""
    gearbox = Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", format=format, dtype="float32", kernels=kernels)
    made = []
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        made.append(np.array(gearbox.model(TOKENS)))
    return made


@pytest.fixture
def on_cpu_first(request) -> list[np.ndarray]:
    """The logits on the CPU, before the test moves to the GPU."""
    return logits_in_gears(request.param, "mlx")


@pytest.mark.some(10)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("on_cpu_first", FORMATS, indirect=True)
@pytest.mark.filterwarnings("ignore:MLX's own kernels are used")  # on a GPU that is not a Mac's
def test_each_gear_has_nearly_the_logits_of_the_cpu(on_cpu_first, on_gpu, request, kernels):
    format = request.node.callspec.params["on_cpu_first"]
    for ours, expected in zip(logits_in_gears(format, kernels), on_cpu_first):
        np.testing.assert_allclose(ours, expected, atol=2e-2 * np.abs(expected).max())


@WITH_GPU
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_writes_on_the_gpu(mode, tmp_path):
    """It writes with kernels that are measured for the GPU, as in a user's first text."""
    out = tmp_path / "summary.json"
    flags = ["--device", "gpu", "--mode", mode, "--max-tokens", "12", "--summary", str(out)]
    command = [sys.executable, "-m", "gearbx_mlx", "generate", *flags]
    own_cache = {"GEARBX_TUNE": "1", "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own_cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["tokens"] == 12
