"""The benchmark command and the studies' timing, at sizes that say nothing of speed: what they write and refuse."""

import json
import re
from pathlib import Path

import pytest

from gearbx_mlx import Gearbox, Ladder, load
from gearbx_mlx.benchmark import KernelBenchmark, measuring
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.gone import SINCE
from gearbx_mlx.kernels import cpu
from gearbx_mlx.loading import DEMO_MODEL
from research import token
from research.decoding_costs import batch_speed, dynamic_speedup, mixture, plan_of, routing
from research.kernels import kernels
from research.threads import threads

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(autouse=True)
def small_sums(monkeypatch):
    """The read bandwidth of a cache: quick, and still a number."""
    monkeypatch.setattr(measuring, "READ", 2**20)


@pytest.mark.slow
def test_kernels():
    found = kernels(rows=64, cols=128, megabytes=1, trials=2)
    rows = found.data
    assert {(row["format"], row["bits"]) for row in rows} == {
        ("dense bfloat16", 16),
        ("dense float16", 16),
        ("dense float32", 32),
        *(("affine", bits) for bits in (2, 3, 4, 5, 6, 8)),
        ("planes 4+4", 8),
        ("planes 4+1+1+2", 8),
        *(("rowwise", bits) for bits in (2, 4, 6, 8)),
        ("groupwise", 4),
        *(("codebook", bits) for bits in (2, 3, 4, 5, 6)),
        *(("codebook-library", bits) for bits in (2, 3, 4)),
        ("exact", 16),
    }
    for row in rows:
        assert (row["rows"], row["cols"], row["threads"]) == (64, 128, cpu.native().threads())
        assert row["read_by"] == "native"
        assert row["path"] in ("native", "native int16", "native int8", "mlx")
        assert row["trials"] == 2
        assert row["seconds"] > 0
        assert row["gigabytes_per_second"] > 0
        assert row["spread"][0] <= row["bandwidth_ratio"] <= row["spread"][1]
        assert row["read_bandwidth_gigabytes_per_second"] > 0.1
    assert "| affine" in found.tables["kernels"]


@pytest.mark.slow
def test_threads():
    found = threads(rows=64, cols=128, megabytes=1, most=2, trials=2)
    rows = found.data
    assert [(row["bits"], row["threads"]) for row in rows] == [(4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2)]
    for row in rows:
        assert row["spread"][0] <= row["speedup"] <= row["spread"][1]
        assert row["products_per_second"] > 0
        assert row["bandwidth_ratio"] > 0
        assert row["speedup"] == 1 or row["threads"] > 1


def test_token(tmp_path):
    found = token.token(str(DEMO_MODEL), gears="4,16", tokens=2, trials=2, context=40)
    rows, picture = found.data, tmp_path / "t.svg"
    found.pictures["token.svg"](picture)
    parts = list(dict.fromkeys(row["part"] for row in rows))
    assert [(row["gear"], row["part"]) for row in rows] == [(gear, part) for gear in ("low", "high") for part in parts]
    assert "products" in parts
    assert "attention" in parts
    for row in rows:
        assert row["spread"][0] <= row["share"] <= row["spread"][1]
        assert row["seconds"] > 0 or row["part"] == "rest (MLX)"
        assert row["context"] == 40
    low = {row["part"]: row for row in rows if row["gear"] == "low"}
    assert low["as blocks"]["seconds"] > low["graph as blocks"]["seconds"]
    assert low["as blocks"]["operations_per_layer"] < low["products"]["operations_per_layer"] / 3
    assert "low, 4 bits" in texts_of(picture)
    assert "as blocks" in texts_of(picture)


def test_each_bar_of_a_token_is_its_parts_milliseconds_one_after_the_other(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(token, "save", lambda figure, path: drawn.append(figure))
    seconds = {"products": (0.004, 0.006), "attention": (0.001, 0.002), "rest (MLX)": (-0.001, 0.003)}
    seconds |= {"as blocks": (0.003, 0.009)}
    rows = [
        {"gear": gear, "bits": bits, "part": part, "seconds": each[index]}
        for index, (gear, bits) in enumerate((("low", 4), ("high", 16)))
        for part, each in seconds.items()
    ]
    token.draw_token(rows, tmp_path / "token.svg")
    (axes,) = drawn[0].axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in part] for part in axes.containers]
    assert bars == [[(0, 4), (0, 6)], [(4, 1), (6, 2)], [(5, 0), (8, 3)]]
    assert [list(line.get_xdata()) for line in axes.lines] == [[3, 9]]
    pyplot.close(drawn[0])


def texts_of(picture: Path) -> str:
    """The comments of an svg file: matplotlib repeats in them each text that it draws as curves."""
    return " ".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_routing():
    rows = routing(model=DEMO_MODEL, gears="4,8,16", tokens=3, trials=2).data
    assert [(row["gear"], row["bits"]) for row in rows] == [("low", 4), ("mid", 8), ("high", 16)]
    for row in rows:
        assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
        assert row["seconds_of_mlx_lm"] > 0


@pytest.mark.slow
def test_mixture():
    (row,) = mixture(model=DEMO_MODEL, tokens=40, run=5, trials=3).data
    assert (row["tokens"], row["shifts"]) == (40, 8)  # three rounds of three gears
    assert row["spread"][0] <= row["speedup"] <= row["spread"][1]
    model = load(DEMO_MODEL)[0]
    read = [Gearbox(model, "4,8,16").weight_bytes_per_token(gear) for gear in Ladder.parse("4,8,16")]
    assert row["of_bytes"] == pytest.approx(40 * read[2] / (22 * read[0] + 10 * read[1] + 8 * read[2]))
    assert row["predicted_speedup"] > 0


def test_a_mixture_of_the_papers_shares_has_its_bound():
    """GEARBX 9: 55, 25 and 20 percent of the tokens, and bytes in the paper's ratios."""
    plan = plan_of(Ladder.parse("4,8,16"), (0.55, 0.25, 0.20), 100, 10)
    assert [sum(gear.bits == bits for gear in plan) for bits in (4, 8, 16)] == [55, 25, 20]
    seconds = {"low": 0.25, "mid": 0.5, "high": 1.0}
    counts = {name: sum(gear.name == name for gear in plan) for name in seconds}
    assert dynamic_speedup(counts, seconds, "high", 0, 0.0) == pytest.approx(2.162, abs=0.001)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"shares": "0.5,0.5"}, "--shares has 2 numbers, and there are 3 gears; give one for each"),
        ({"shares": "a,b,c"}, "--shares 'a,b,c' are not numbers with commas between, such as 0.6,0.3,0.1"),
        ({"shares": "0.5,0.5,0.5"}, "shares must be parts of 1, one per gear, got 0.5, 0.5, 0.5"),
    ],
)
def test_a_mixture_that_cannot_be(flags, message):
    with pytest.raises(GearbxError, match=re.escape(message)):
        mixture(shape="256x1", **flags)


@pytest.mark.slow
def test_decode(command, tmp_path):
    result = command(
        "benchmark",
        "decode",
        "--model",
        DEMO_MODEL,
        "--gears",
        "4,16",
        "--tokens",
        3,
        "--trials",
        1,
        "--context",
        40,
        "--json",
        tmp_path / "d",
    )
    assert result.status == 0
    rows = json.loads((tmp_path / "d").read_text())["rows"]
    assert [(row["path"], row["gear"], row["bits"]) for row in rows] == [
        ("native", "low", 4),
        ("native", "high", 16),
        ("native int16", "low", 4),
        ("native int16", "high", 16),
        ("native int8", "low", 4),
        ("mlx", "low", 4),
        ("mlx", "high", 16),
    ]
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode", "--shape", "wide"), "not WIDTHxLAYERS"),
        (("decode", "--shape", "100x2"), "multiple of 256"),
        (("decode", "--gears", "8,4"), "ascend"),
        (("decode", "--context", -1), "--context is -1; give 0 or more"),
        (("decode", "--model", ""), "--model is empty"),
        (("decode", "--json", ""), "--json is empty"),
        (("decode", "--json", "d" * 300), "cannot be written (File name too long)"),
        (("decode", "--model", "d" * 300), "no such model directory"),
        (("decode", "--trials", 10**30), "give 1 to 100000"),
        (("decode", "--shape", "65536x100000"), "--shape 65536x100000 needs at least"),
        (("decode", "--model", DEMO_MODEL, "--gears", "4,16", "--context", 10**15), "needs at least"),
        (("decode", "--json", "/nowhere/d.json"), "there is no directory"),
        (("decode", "--shape", "256x1", "--context", 10**13), "--shape 256x1 --context 10000000000000 needs at least"),
    ],
)
def test_bad_input_is_one_line(command, arguments, words):
    check_refused(command("benchmark", *arguments), words)


@pytest.mark.parametrize("name", ["kernels", "token", "server"])
def test_a_benchmark_that_is_a_study_now_is_one_line(command, name):
    check_refused(
        command("benchmark", name), f"benchmark {name} is gone since gearbx-mlx {SINCE}; run python -m research"
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"rows": 2**20, "cols": 2**20}, "a matrix of this size needs at least"),
        ({"cols": 64 * 10**30}, "a matrix of this size needs at least"),
        ({"megabytes": 2**20}, "a matrix of this size needs at least 1.1"),
    ],
)
def test_a_matrix_for_which_there_is_no_memory(sizes, words):
    with pytest.raises(GearbxError, match=words):
        kernels(**sizes)


def test_the_most_vectors_are_a_thousand():
    assert KernelBenchmark(vectors=1024).vectors == 1024
    with pytest.raises(GearbxError, match="vectors"):
        KernelBenchmark(vectors=1025)


def test_a_matrix_that_groups_do_not_divide_is_no_study():
    with pytest.raises(GearbxError, match="--cols is 100; give a multiple of 64"):
        threads(cols=100)


def check_refused(result, words: str) -> None:
    assert result.status == 2
    assert len(result.err.strip().splitlines()) == 1
    assert words in result.err


@pytest.mark.slow
def test_batches_beside_mlx_lms():
    found = batch_speed(shape="256x2", gears="4,16", tokens=3, trials=1, batch_size=[1, 2])
    rows = found.data
    assert [(row["gear"], row["batch_size"]) for row in rows] == [("low", 1), ("low", 2), ("high", 1), ("high", 2)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / row["tokens_per_second_of_mlx_lm"])
    assert found.tables["beside"].startswith("| texts | bits |")
