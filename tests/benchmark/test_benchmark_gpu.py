"""The benchmark command where MLX computes on a GPU, and without a C++ compiler: nothing is compiled, and paths
have the names of what runs. MLX claims to compute on a GPU; in truth the CPU does."""

import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from gearbx_mlx.benchmark import measuring
from gearbx_mlx.kernels import cpu, device
from gearbx_mlx.loading import DEMO_MODEL
from research.kernels import kernels

KERNELS = {"rows": 64, "cols": 128, "megabytes": 1, "trials": 1}
MODEL = "--model", DEMO_MODEL, "--gears", "4,16", "--tokens", 2, "--trials", 1


@pytest.fixture(autouse=True)
def small_sums(monkeypatch):
    monkeypatch.setattr(measuring, "READ_BYTES", 2**20)


@pytest.fixture
def gpu(monkeypatch):
    """MLX's default device claims to be a GPU without Metal; asking for kernels of the CPU fails."""

    def compiled() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(cpu, "native", compiled)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    monkeypatch.setattr(device, "check_generation", lambda name: None)  # mlx-lm was imported on the CPU


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(cpu, "_kernels_or_reason", lambda: (None, "no C++ compiler was found"))


def check_rows(rows):
    assert {row.get("path", "mlx") for row in rows} == {"mlx"}
    assert {(row["read_by"], row["threads"]) for row in rows} == {("mlx gpu", None)}
    assert all(row["read_bandwidth_gigabytes_per_second"] > 0 for row in rows)


@pytest.mark.usefixtures("gpu")
def test_half_precision_of_mlx_is_timed_on_a_gpu():
    rows = kernels(**KERNELS).data
    check_rows(rows)
    dense = [row["format"] for row in rows if row["format"].startswith("dense")]
    assert dense == ["dense bfloat16", "dense float16", "dense float32"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_mlx_sums_on_the_cpu(command, tmp_path):
    result = command("benchmark", "decode", *MODEL, "--json", tmp_path / "b.json")
    assert result.status == 0, result.err
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["path"], row["gear"], row["read_by"]) for row in rows] == [
        ("mlx", "low", "mlx cpu"),
        ("mlx", "high", "mlx cpu"),
    ]
    assert "GB/s, MLX's sum on the CPU, " in result.out
