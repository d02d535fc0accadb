"""One device for a process: --device, `use_device`, a gearbox that stays on its device; and gears on a GPU."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, every_gear, same_weights, tiny_model, weights_of

from gearbx_mlx import Gearbox, GearbxError, stream_generate, use_device
from gearbx_mlx.compat.classes import generation_stream
from gearbx_mlx.formats import FORMATS
from gearbx_mlx.kernels import KERNELS

GPU = mx.Device(mx.gpu)
WITHOUT_GPU = pytest.mark.skipif(mx.is_available(GPU), reason="MLX has a GPU here")
ORDER = """
import sys
import mlx.core as mx
choose = mx.set_default_device
def chosen(device):
    print(device.type.name, "mlx_lm" in sys.modules)
    choose(device)
mx.set_default_device = chosen
sys.argv = ["gearbx_mlx.generate", "--device", "cpu", "--model", "nowhere"]
from gearbx_mlx.generate import main
main()
"""


@pytest.fixture
def generating_elsewhere(monkeypatch):
    """mlx-lm was imported while MLX used another device."""
    other = mx.Device(mx.cpu if mx.default_device() == GPU else mx.gpu)
    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "generation_stream", SimpleNamespace(device=other))


@pytest.mark.processes
def test_a_command_chooses_before_mlx_lm_is_imported():
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True)
    assert done.stdout.split() == ["cpu", "False"]
    assert "nowhere: no such model directory" in done.stderr


@WITHOUT_GPU
@pytest.mark.parametrize(
    "line",
    [
        *("generate", "calibrate", "convert", "sensitivity", "allocate", "benchmark mac"),
        *("analyze --prompts none", "evaluate --data none"),
    ],
)
def test_missing_gpu_is_refused(command, line):
    done = command(*line.split(), "--device", "gpu")
    assert (done.status, done.out) == (2, "")
    assert done.err == "error: device: MLX has no such device here, got gpu; omit it to use MLX's default device\n"


@WITHOUT_GPU
def test_command_ends_after_computation(command, monkeypatch):
    waited = []
    monkeypatch.setattr(mx, "synchronize", lambda *streams: waited.extend(streams))
    assert command("generate", "-m", 2, "--gears", "4,16", "--mode", "static").status == 0
    assert any(stream is generation_stream() for stream in waited)


def test_unknown_device_is_refused():
    with pytest.raises(GearbxError, match="device: unknown, got tpu; did you mean gpu"):
        use_device("tpu")


def test_device_unsupported_by_mlx_lm_generation(generating_elsewhere):
    now = mx.default_device().type.name
    with pytest.raises(GearbxError, match=f"mlx-lm was imported for .pu, got {now};"):
        use_device(now)


def test_gearbox_refuses_shift_on_other_device(tiny, monkeypatch):
    gearbox = Gearbox(tiny, "4,16")
    before = weights_of(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu if gearbox.device == "gpu" else mx.gpu))
        with pytest.raises(GearbxError, match=f"this gearbox was made on {gearbox.device}, got"):
            gearbox.shift("low")
    assert gearbox.gear.name == "high"
    assert same_weights(weights_of(tiny), before)
    gearbox.shift("low")  # on its own device again
    assert gearbox.gear.name == "low"


def test_gearbox_refuses_generation_on_other_device(fresh_demo, generating_elsewhere):
    gearbox = Gearbox(fresh_demo.model, "4,16")
    with pytest.raises(GearbxError, match="use_device before the first import of mlx_lm"):
        next(stream_generate(fresh_demo.model, fresh_demo.tokenizer, "x", 2, gearbox=gearbox))


MODES = ("route", "kickdown", "lossless", "static", "telemetry-only")
WITH_GPU = pytest.mark.skipif(not mx.is_available(mx.Device(mx.gpu)), reason="MLX has no GPU here")


def logits_in_gears(format: str, kernels: str) -> list[np.ndarray]:
    """The logits of a bfloat16 model in its low and its top gear."""
    gearbox = Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", format=format, dtype="float32", kernels=kernels)
    made = []
    for _ in every_gear(gearbox):
        made.append(np.array(gearbox.model(PROMPT)))
    return made


@pytest.fixture
def on_cpu_first(request) -> list[np.ndarray]:
    """The logits on the CPU, before the test moves to the GPU."""
    return logits_in_gears(request.param, "mlx")


@pytest.mark.some(10)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("on_cpu_first", FORMATS, indirect=True)
@pytest.mark.filterwarnings("ignore:MLX's kernels are used")  # on a GPU that is not a Mac's
def test_gear_logits_are_close_to_cpu(on_cpu_first, on_gpu, request, kernels):
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
