"""scripts/bench_metal.py: without Metal it says so; with launches run on the CPU it checks, times and reports."""

import importlib.util
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.metal import Launch, available

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_metal.py"
SHORT = ["--shapes", "32x128", "--vectors", "2", "--trials", "1", "--megabytes", "1", "--dtype", "float32"]


@pytest.fixture
def bench(monkeypatch):
    """The script, called with flags: its exit status."""
    monkeypatch.syspath_prepend(SCRIPT.parent)  # where its other part is
    spec = importlib.util.spec_from_file_location("bench_metal", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_metal", module)
    spec.loader.exec_module(module)

    def run(*flags: object) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_metal.py", *map(str, flags)])
        return module.main()

    run.module = module
    return run


@pytest.fixture
def short(bench, launches, monkeypatch):
    """The script where Metal is said to be, with one type to check and no copies."""
    monkeypatch.setattr(bench.module, "available", metal.available)
    monkeypatch.setattr(bench.module, "DTYPES", (mx.float32,))
    monkeypatch.setattr(bench.module, "copies", lambda arrays, total: [arrays])
    return bench


@pytest.mark.skipif(bool(available()), reason="Metal is here")
@pytest.mark.parametrize("flags", [[], ["--check-only"]])
def test_without_metal_is_one_line_and_status_2(bench, capsys, flags):
    assert bench(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "Metal" in captured.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shapes", "64"], "ROWSxCOLUMNS"),
        (["--shapes", "64x100"], "multiple of 128"),
        (["--vectors", "17"], "1 to 16"),
        (["--trials", "0"], "1 or more"),
    ],
)
def test_flags_that_make_no_sense_are_refused(bench, capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        bench(*flags)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def only(bench, monkeypatch, *which: str) -> None:
    """Of all kernels these."""

    def some(group_size: int, every=bench.module.all_kernels) -> list:
        return [pair for pair in every(group_size) if f"{pair[0].format} {pair[0].bits}" in which]

    monkeypatch.setattr(bench.module, "all_kernels", some)


@pytest.mark.clang
def test_checks_every_kernel(short, capsys, launches):
    assert short("--check-only", "--vectors", "1") == 0
    assert " products checked, 0 wrong" in capsys.readouterr().out
    names = {launch.spec.layout.name for launch in launches}
    wanted = {f"planes_{bits}_g64" for bits in ("2", "3", "4", "5", "6", "8", "4_4", "4_1_1_2")}
    wanted |= {f"rowwise_{bits}" for bits in (8, 6, 4, 2)} | {"groupwise"}
    wanted |= {f"exact_{bits}_g64" for bits in ("3", "4", "4_4")}
    wanted |= {f"codebook_{bits}" for bits in range(2, 7)} | {f"library_{bits}" for bits in (2, 3, 4)}
    assert names == wanted
    assert {launch.spec.variant.name for launch in launches if launch.spec.ragged} == set(metal.VARIANTS)


@pytest.mark.clang
def test_table_and_rows(short, capsys, monkeypatch, tmp_path):
    only(short, monkeypatch, "affine 4", "planes 4+4", "rowwise 8", "groupwise 4")
    file = tmp_path / "metal.json"
    assert short(*SHORT, "--json", file) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4 * (1 + len(metal.VARIANTS))
    assert len({line.count("|") for line in table}) == 1
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(table) - 2
    assert {"machine", "format", "bits", "path", "bandwidth_ratio", "times_mlx", "trials"} <= rows[0].keys()
    for row in rows:
        assert row["bandwidth_ratio"] == pytest.approx(
            row["gigabytes_per_second"] / row["read_bandwidth_gigabytes_per_second"]
        )
        assert (row["times_mlx"] == 1) or row["path"] != "MLX"


@pytest.mark.clang
def test_exact_weights_stand_beside_dense_ones(short, capsys, monkeypatch):
    only(short, monkeypatch, "exact 4")
    assert short(*SHORT) == 0
    table = [line.split("|")[1:6] for line in capsys.readouterr().out.splitlines() if line.startswith("| exact")]
    assert [row[-1].strip() for row in table] == ["MLX", "registers", "tiles"]


@pytest.mark.clang
def test_a_wrong_kernel_is_named_and_not_timed(short, capsys, monkeypatch):
    right = Launch.run

    def run(self: Launch) -> mx.array:
        if self.spec.layout.name == "rowwise_6" and self.spec.ragged:
            return right(self) * 1.01
        if self.spec.layout.name == "groupwise":
            raise RuntimeError("Metal's compiler says no")
        return right(self)

    monkeypatch.setattr(Launch, "run", run)
    only(short, monkeypatch, "rowwise 6", "rowwise 4", "groupwise 4")
    assert short(*SHORT) == 1
    captured = capsys.readouterr()
    assert "wrong: rowwise 6, 13x533, 2 vectors, mlx.core.float32, registers: off by 1" in captured.err
    assert "wrong: groupwise 4, 37x640, 2 vectors, mlx.core.float32, device: Metal's compiler says no" in captured.err
    assert "9 wrong" in captured.out
    table = [line.split("|")[1:3] for line in captured.out.splitlines() if line.startswith("| rowwise")]
    assert {bits.strip() for _, bits in table} == {"4"}
    assert "| groupwise" not in captured.out
