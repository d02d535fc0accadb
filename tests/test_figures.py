"""The pictures of the paper, made by the study."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from gearbx_mlx import load
from research.figures import PICTURES
from research.figures.memory import errors
from research.figures.routing import HARD
from research.figures.times import speedup

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

WIDTH, MLP, KEYS, BLOCKS = 256, 704, 128, 6  # of the model that ships
SHAPES = [(WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH), (MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP)]


def linear_size():
    """Weights of all linear layers but the head."""
    return BLOCKS * sum(rows * columns for rows, columns in SHAPES)


def figures(*arguments):
    line = [sys.executable, "-m", "research", "figures", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("figures")
    done = figures("--out", out, "--only", "1,2,4,5,8", "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    assert [*map(str, sorted(out.iterdir()))] == sorted(done.stdout.split())
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The pictures that are timed or weighed."""
    out = tmp_path_factory.mktemp("timed")
    done = figures("--out", out, "--only", "3,6,7", "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    return out


def data(made, name):
    return json.loads((made / f"{name}.json").read_text())["data"]


def rows(made, name):
    with open(made / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_picture_has_its_files_whole(made):
    for picture in (picture for picture in PICTURES if picture.number in (1, 2, 4, 5, 8)):
        assert ElementTree.parse(made / f"{picture.name}.svg").getroot().tag.endswith("svg")
        with Image.open(made / f"{picture.name}.png") as image:
            assert image.size == tuple(round(150 * inches) for inches in picture.size)
            assert len(np.unique(np.array(image.convert("L")))) > 10


def test_entropies_are_those_of_the_model(made):
    bits = data(made, "entropy_signal")["model"]["bits"]["hard text"]
    model, tokenizer = load(None)[:2]
    logits = np.array(model(mx.array(tokenizer.encode(HARD)[:24])[None])[0].astype(mx.float32), np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert bits == pytest.approx(-(p * np.log2(np.maximum(p, 1e-300))).sum(-1), abs=1e-3)


def test_synthetic_logits_are_in_three_bands(made):
    shares = {row["logits"]: row for row in rows(made, "entropy_signal")}
    assert shares["peaked"]["low"] == shares["flat"]["high"] == "100%"
    # Noise of variance 1 costs about 1 / (2 ln 2) bits of log2 V.
    assert float(shares["flat"]["median, bits"]) == pytest.approx(15 - 1 / (2 * math.log(2)), abs=0.05)


def test_bytes_are_those_of_the_formula(made):
    found = data(made, "memory_by_format")
    size = linear_size()
    assert found["fp16"] == 2 * size
    by_name = {(row["format"], row["bits"]): row["measured"] for row in found["rows"]}
    assert by_name["rowwise", 4] == size // 2 + 2 * BLOCKS * sum(rows for rows, _ in SHAPES)
    assert by_name["affine", 8] == size + 4 * size // 64


def test_errors_are_those_of_rounding(made):
    weight = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    scale = np.abs(weight).max(-1, keepdims=True) / 7
    off = np.abs(np.round(weight / scale) * scale - weight)
    found = errors(mx.array(weight), 4)
    assert found["relative"] == pytest.approx(np.linalg.norm(off) / np.linalg.norm(weight), rel=1e-4)
    assert found["largest"] == pytest.approx(off.max(), rel=1e-4)
    assert found["bound"] == pytest.approx(scale.max() / 2, rel=1e-5)
    for matrices in data(made, "reconstruction_error").values():
        assert all(error["largest"] <= error["bound"] * 1.0001 for error in matrices.values())


def test_the_trace_follows_the_gate(made):
    found = data(made, "routing_trace")
    entropies, gears = found["entropies"], found["gears"]
    assert found["lengths"] == [8, 8, 8]
    assert len(gears) == len(entropies) == 24
    assert found["means"] == pytest.approx([np.mean(entropies[max(0, i - 2) : i + 1]) for i in range(24)])
    assert found["thresholds"] == pytest.approx([1.8 * 12 / 15, 3.5 * 12 / 15])
    shifts = [i for i in range(1, 24) if gears[i] != gears[i - 1]]
    assert sum(int(row["shifts"]) for row in rows(made, "routing_trace")) == len(shifts) > 0


def test_shares_are_counts_of_the_gears(made):
    for row in rows(made, "gear_shares"):
        gears = data(made, "gear_shares")["workloads"][row["workload"]]["gears"]
        assert row["high"] == f"{gears.count('high') / len(gears):.0%}"


@pytest.mark.slow
def test_every_residency_keeps_the_bytes_of_its_gears(small):
    found = data(small, "residency")["residencies"]
    resident, host, disk = (found[name] for name in ("resident", "host", "disk"))
    whole = resident["high"]["mlx"]
    assert all(gear == {"mlx": whole, "host": 0} for gear in resident.values())
    assert all(gear["mlx"] + gear["host"] == pytest.approx(whole, rel=0.02) for gear in host.values())
    assert host["low"]["mlx"] < host["mid"]["mlx"] < host["high"]["mlx"]
    # The originals of all linear layers in float32, but for the head, whose rows stay to be looked up.
    assert whole - disk["low"]["mlx"] == pytest.approx(4 * linear_size(), rel=0.01)


def test_parts_of_a_token_and_ways_of_a_pass_have_their_times(small):
    for row in rows(small, "token_time"):
        forward, entropy, gate, shifts = (
            float(row[f"{part}, µs"]) for part in ("forward", "entropy", "monitor and gate", "shifts")
        )
        assert forward > entropy + gate + shifts > 0
    ways = {(row["gear"], row["way"]): row["of dense"] for row in rows(small, "forward_latency")}
    assert ways["high", "dequant cache"] == "1.00 (1.00 to 1.00)"
    assert float(ways["low", "first pass, unpacking"].split()[0]) > 1


def test_the_bandwidth_model_has_the_papers_figures():
    mixture = 0.55, 0.25, 0.20
    assert round(speedup(mixture, 1), 2) == 2.16
    assert round(speedup(mixture, 0.35), 2) == 1.23
    assert speedup((1, 0, 0), 1) == 4


@pytest.mark.slow
def test_the_bandwidth_picture_is_drawn_from_what_was_measured(tmp_path):
    points = [{"share": share, "bytes": 1 + share, "time": 1.5, "spread": [1.25, 1.75]} for share in (0.0, 1.0)]
    content = {"picture": 9, "model": "x", "data": {"bytes": [1, 2], "dtype": "float32", "points": points}}
    (tmp_path / "bandwidth_model.json").write_text(json.dumps(content))
    assert figures("--out", tmp_path, "--only", "9", "--redraw").returncode == 0
    assert [row["f = 0.35"] for row in rows(tmp_path, "bandwidth_model")] == ["1.23", "1.00", "1.36"]
    assert rows(tmp_path, "bandwidth_model")[2]["CPU time, measured"] == "1.50 (1.25-1.75)"
    assert (tmp_path / "bandwidth_model.svg").stat().st_size > 5000


@pytest.mark.slow
def test_redraw_takes_the_data_that_are_there(made):
    before = {file.name: file.read_bytes() for file in made.iterdir()}
    (made / "gear_shares.svg").unlink()
    assert figures("--out", made, "--only", "8", "--redraw").returncode == 0
    assert {file.name: file.read_bytes() for file in made.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "file"], "file: is a file"),
        (["--out", "new", "--only", "1,77"], "there is no picture '77'; choose from 1,2"),
        (["--out", "new", "--only", "1", "--redraw"], "entropy_signal.json"),
        (["--out", "other", "--only", "1", "--redraw"], "is of picture 5, not 1"),
        (["--out", "file/new"], "file/new: cannot be made"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "entropy_signal.json").write_text('{"picture": 5, "model": "x", "data": {}}')
    monkeypatch.chdir(tmp_path)
    done = figures(*arguments)
    assert done.returncode != 0
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
