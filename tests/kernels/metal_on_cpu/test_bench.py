"""benchmark metal: without Metal it says so; with launches on the CPU it checks, times and writes everything."""

import json

import mlx.core as mx
import pytest

from gearbx_mlx.benchmark import kernels, measuring, metal_checks
from gearbx_mlx.benchmark import metal as subject
from gearbx_mlx.kernels import metal, tuner
from gearbx_mlx.kernels.metal import Prepared, available

pytestmark = pytest.mark.slow

SHORT = ["--shapes", "32x128", "--vectors", "2", "--trials", "1", "--megabytes", "1"]
SHORT += ["--tokens", "3"]
VARIANTS = [f"metal {name}" for name in metal.VARIANTS]


@pytest.fixture
def bench(command, monkeypatch, tmp_path):
    """The command in a directory of its own: called with flags, it gives status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: command("benchmark", "metal", *flags)


@pytest.fixture
def short(bench, launches, monkeypatch):
    """The command where Metal seems to be, with one type to check, few keys, no copies and no model."""
    monkeypatch.setattr(metal_checks, "DTYPES", (mx.float32,))
    monkeypatch.setattr(measuring, "READ", 2**14)
    monkeypatch.setattr(tuner, "MOST_CALLS", 1)  # the harness computes while a graph is built, and its clock is 0
    monkeypatch.setattr(metal_checks, "WIDTHS", (32, 64))
    monkeypatch.setattr(metal_checks, "KEYS", (37,))
    monkeypatch.setattr(kernels, "copied", lambda part: part)
    monkeypatch.setattr(subject, "add_gears", lambda settings, rows: None)
    monkeypatch.setattr(subject, "add_modes", lambda settings, rows: None)
    return bench


def only(monkeypatch, *which: str) -> None:
    """Keep only these kernels."""

    def some(group_size: int, every=subject.all_kernels) -> list:
        return [kernel for kernel in every(group_size) if kernel.name in which]

    monkeypatch.setattr(subject, "all_kernels", some)
    for every_check in (subject.operation_checks, subject.mixture_checks):

        def named(*arguments, every=every_check) -> dict:
            return {name: one for name, one in every(*arguments).items() if name in which}

        monkeypatch.setattr(subject, every_check.__name__, named)


def only_timed(monkeypatch) -> None:
    """Of all timed products, keep only dense ones and rows of 8 bits."""
    monkeypatch.setattr(kernels, "stack_cases", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "codebook_cases", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "exact_cases", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "groupwise_cases", lambda *_: iter(()))
    monkeypatch.setattr(kernels.rowwise, "Q_MAX", {8: kernels.rowwise.Q_MAX[8]})


def written() -> dict:
    with open("metal.json", encoding="utf-8") as file:
        return json.load(file)


@pytest.mark.skipif(available(), reason="Metal is here")
@pytest.mark.parametrize("flags", [[], ["--check-only"]])
def test_without_metal_is_one_line_and_status_2(bench, tmp_path, flags):
    result = bench(*flags)
    assert result.status == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert "Metal" in result.err
    assert not (tmp_path / "metal.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shapes", "64"], "ROWSxCOLUMNS"),
        (["--shapes", "64x100"], "multiple of 128"),
        (["--shapes", "0x128"], "give 1 to"),
        (["--vectors", "17"], "give 1 to 16"),
        (["--vectors", "1,x"], "are not whole numbers"),
        (["--trials", "0"], "--trials is 0"),
        (["--group-size", "16"], "choose from 32, 64, 128"),
    ],
)
def test_flags_that_make_no_sense_are_refused(bench, flags, said):
    result = bench(*flags)
    assert result.status == 2
    assert said in result.err


@pytest.mark.slow
@pytest.mark.clang
def test_checks_every_kernel(short, launches):
    result = short("--check-only", "--vectors", "1")
    assert result.status == 0, result.out
    assert " comparisons, 0 wrong" in result.out
    layouts = {launch.spec.layout.name for launch in launches if hasattr(launch.spec, "layout")}
    wanted = {f"planes_{bits}_g64_b1_r0" for bits in (2, 3, 4, 5, 6, 8)}
    wanted |= {"planes_4_4_g64_b2_r0", "planes_4_1_1_2_g64_b4_r0"}
    wanted |= {f"planes_{bits}_g64_b1_r{of - bits}" for bits, of in ((4, 8), (5, 8), (4, 6))}
    wanted |= {f"rowwise_{bits}" for bits in (8, 6, 4, 2)} | {"groupwise"}
    wanted |= {"exact_g64"}
    wanted |= {f"codebook_{bits}" for bits in range(2, 7)} | {f"library_{bits}" for bits in (2, 3, 4)}
    assert layouts == wanted
    assert {launch.spec.variant.name for launch in launches if getattr(launch.spec, "ragged", False)} == set(
        metal.VARIANTS
    )
    assert {launch.spec.text for launch in launches} == {
        "matvec",
        "exact",
        "dense",
        "attention",
        "attention_join",
        "rope",
    }
    report = written()
    assert report["complete"]
    assert report["kernels"] == []
    assert all(row["checked"] and 0 < row["largest_error"] <= 1 and not row["wrong"] for row in report["checks"])
    packed = {launch.spec.layout.name for launch in launches if getattr(launch.spec, "experts", False)}
    assert packed == {name for name in wanted if not name.startswith("exact")}


@pytest.mark.slow
@pytest.mark.clang
def test_table_and_rows(short, monkeypatch):
    only(monkeypatch, "rowwise 8", "rope")
    only_timed(monkeypatch)
    result = short(*SHORT)
    assert result.status == 0, result.out + result.err
    report = written()
    assert report["machine"] in result.out
    assert (report["settings"]["shapes"], report["complete"]) == ([[32, 128]], True)
    rows = report["kernels"]
    paths = {name: [row["path"] for row in rows if row["format"] == name] for name in ("rowwise", "dense float32")}
    assert paths == {"rowwise": VARIANTS, "dense float32": ["metal", "mlx"]}
    for row in rows:
        assert (row["rows"], row["cols"], row["vectors"]) == (32, 128, 2)
        assert row["spread"][0] <= row["bandwidth_ratio"] <= row["spread"][1]
    assert len([line for line in result.out.splitlines() if line.startswith("| rowwise  ")]) == len(VARIANTS)


@pytest.mark.slow
@pytest.mark.clang
def test_a_wrong_kernel_is_named(short, monkeypatch):
    right = Prepared.__call__

    def run(self: Prepared, *inputs: mx.array) -> mx.array:
        name = self.spec.layout.name
        if name == "rowwise_6" and self.spec.ragged:
            return right(self, *inputs) * 1.01
        if name == "groupwise":
            raise RuntimeError("Metal's compiler says no")
        if name == "rowwise_2" and self.spec.vectors == 2:
            return right(self, *inputs) * (1 + 2.0**-20)
        return right(self, *inputs)

    monkeypatch.setattr(Prepared, "__call__", run)
    only(monkeypatch, "rowwise 6", "rowwise 4", "rowwise 2", "groupwise 4", "experts of rowwise 6")
    result = short("--check-only", *SHORT)
    assert result.status == 1
    assert "wrong: rowwise 6, 13x533, 2 vectors, float32, metal registers: off by 1" in result.out
    assert "wrong: rowwise 2, 37x640, 2 vectors, float32, metal device, the first alone: off by" in result.out
    assert "wrong: groupwise 4, 37x640, 2 vectors, float32, metal device: Metal's compiler says no" in result.out
    report = written()
    wrong = {row["what"]: len(row["wrong"]) for row in report["checks"]}
    assert wrong == {"rowwise 6": 3, "rowwise 4": 0, "rowwise 2": 6, "groupwise 4": 12, "experts of rowwise 6": 3}


@pytest.mark.clang
def test_an_interrupted_run_keeps_what_is_done(short, monkeypatch):
    only(monkeypatch, "rowwise 8")
    only_timed(monkeypatch)
    timed = subject.benchmark_kernels

    def interrupted(settings):
        if settings.rows == 64:
            raise KeyboardInterrupt
        return timed(settings)

    monkeypatch.setattr(subject, "benchmark_kernels", interrupted)
    result = short(*SHORT, "--shapes", "32x128,64x128")
    assert result.status == 130
    report = written()
    assert not report["complete"]
    assert [row["what"] for row in report["checks"]] == ["rowwise 8"]
    assert {row["rows"] for row in report["kernels"]} == {32}
    assert "| rowwise" in result.out
