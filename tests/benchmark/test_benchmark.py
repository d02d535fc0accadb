"""The benchmark command and the studies' timing, at sizes that say nothing of speed: what they write and refuse."""

import functools
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from gearbx_mlx import Ladder
from gearbx_mlx.benchmark import measuring
from gearbx_mlx.kernels import cpu, device
from gearbx_mlx.loading import DEMO_MODEL
from research.decoding_costs import dynamic_speedup, plan_of, routing
from research.kernels import kernels


@pytest.fixture(autouse=True)
def small_sums(monkeypatch):
    """The read bandwidth of a cache: quick, and still a number."""
    monkeypatch.setattr(measuring, "READ_BYTES", 2**20)


@pytest.mark.usefixtures("compiled")
def test_routing_study_compares_every_gear():
    rows = routing(model=DEMO_MODEL, gears="4,8,16", tokens=3, trials=2).data
    assert [(row["gear"], row["bits"]) for row in rows] == [("low", 4), ("mid", 8), ("high", 16)]
    for row in rows:
        assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
        assert row["seconds_of_mlx_lm"] > 0


def test_mixed_gears_of_paper_shares_have_bound():
    """GEARBX 9: 55, 25 and 20 percent of the tokens, and bytes in the paper's ratios."""
    plan = plan_of(Ladder.parse("4,8,16"), (0.55, 0.25, 0.20), 100, 10)
    assert [sum(gear.bits == bits for gear in plan) for bits in (4, 8, 16)] == [55, 25, 20]
    seconds = {"low": 0.25, "mid": 0.5, "high": 1.0}
    counts = {name: sum(gear.name == name for gear in plan) for name in seconds}
    assert dynamic_speedup(counts, seconds, "high", 0.0) == pytest.approx(2.162, abs=0.001)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_decode_rows_cover_paths_and_gears(succeeds, tmp_path):
    sizes = "--tokens", 3, "--trials", 1, "--context", 40
    succeeds("benchmark", "decode", "--model", DEMO_MODEL, "--gears", "4,16", *sizes, "--json", tmp_path / "d")
    rows = json.loads((tmp_path / "d").read_text())["rows"]
    native = [("native", "low", 4), ("native", "high", 16), ("native int16", "low", 4), ("native int16", "high", 16)]
    others = [("native int8", "low", 4), ("mlx", "low", 4), ("mlx", "high", 16)]
    assert [(row["path"], row["gear"], row["bits"]) for row in rows] == native + others
    for row in rows:
        assert row["context"] == 40
        assert row["tokens_per_second"] > 0
        assert row["peak_memory_bytes"] > 0
    assert rows[0]["weight_bytes_per_token"] < rows[1]["weight_bytes_per_token"]
    assert rows[6]["ratio"] == pytest.approx(1)
    low, top = rows[:2]
    assert low["speedup"] == pytest.approx(low["tokens_per_second"] / top["tokens_per_second"])
    assert low["predicted_speedup"] == pytest.approx(top["weight_bytes_per_token"] / low["weight_bytes_per_token"])
    assert low["break_even_tokens"] is None or low["break_even_tokens"] > 0
    assert top["roofline_share"] > 0


def test_mlx_half_precision_is_timed_on_gpu(monkeypatch):
    """MLX's default device claims to be a GPU without Metal, and nothing is compiled."""

    def compiled() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(cpu, "native", compiled)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    monkeypatch.setattr(device, "check_generation", lambda name: None)  # mlx-lm was imported on the CPU
    rows = kernels(rows=64, cols=128, megabytes=1, trials=1).data
    assert {row.get("path", "mlx") for row in rows} == {"mlx"}
    assert {(row["read_by"], row["threads"]) for row in rows} == {("mlx gpu", None)}
    assert all(row["read_bandwidth_gigabytes_per_second"] > 0 for row in rows)
    dense = [row["format"] for row in rows if row["format"].startswith("dense")]
    assert dense == ["dense bfloat16", "dense float16", "dense float32"]


def test_without_a_compiler_mlx_sums_on_the_cpu(succeeds, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "_kernels_or_reason", functools.cache(lambda: (None, "no C++ compiler was found")))
    flags = "--model", DEMO_MODEL, "--gears", "4,16", "--tokens", 2, "--trials", 1
    result = succeeds("benchmark", "decode", *flags, "--json", tmp_path / "b.json")
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert {(row["path"], row["read_by"]) for row in rows} == {("mlx", "mlx cpu")}
    assert [row["gear"] for row in rows] == ["low", "high"]
    assert "GB/s, MLX's sum on the CPU, " in result.out
