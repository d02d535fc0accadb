"""The pictures of the paper: their data, their tables, and that they are drawn."""

from dataclasses import replace
from statistics import median
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx import load
from research.figures import HARD, PICTURES, subject_of

pytestmark = pytest.mark.slow

WIDTH, MLP, KEYS, BLOCKS = 256, 704, 128, 6  # of the model that ships
SHAPES = [(WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH), (MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP)]


def linear_size():
    """Weights of all linear layers except the head."""
    return BLOCKS * sum(rows * columns for rows, columns in SHAPES)


@pytest.fixture(scope="module")
def data():
    """The data, by picture."""
    subject = replace(subject_of(None, 24), shape="256x2")
    return {name: picture.measure(subject) for name, picture in PICTURES.items()}


def rows(data, name):
    head, lines = PICTURES[name].table(data[name])
    return [dict(zip(head, line, strict=True)) for line in lines]


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn(data, name, tmp_path):
    PICTURES[name].write(data[name], tmp_path / "x.svg")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    before = (tmp_path / "x.svg").read_bytes()
    PICTURES[name].write(data[name], tmp_path / "x.svg")
    assert len(before) > 5000
    assert (tmp_path / "x.svg").read_bytes() == before


def test_entropies_are_those_of_the_model(data):
    bits = data["entropy_signal"]["model"]["bits"]["hard text"]
    model, tokenizer = load(None)[:2]
    logits = np.array(model(mx.array(tokenizer.encode(HARD)[:24])[None])[0].astype(mx.float32), np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert bits == pytest.approx(-(p * np.log2(np.maximum(p, 1e-300))).sum(-1), abs=1e-3)


def test_bytes_are_those_of_the_formula(data):
    found = data["memory_by_format"]
    size = linear_size()
    assert found["fp16"] == 2 * size
    by_name = {(row["format"], row["bits"]): row["measured"] for row in found["rows"]}
    assert by_name["rowwise", 4] == size // 2 + 2 * BLOCKS * sum(rows for rows, _ in SHAPES)
    assert by_name["affine", 8] == size + 4 * size // 64


def test_the_trace_follows_the_gate(data):
    found = data["routing_trace"]
    entropies, gears = found["entropies"], found["gears"]
    assert found["lengths"] == [8, 8, 8]
    assert len(gears) == len(entropies) == 24
    assert found["means"] == pytest.approx([np.mean(entropies[max(0, i - 2) : i + 1]) for i in range(24)])
    assert found["thresholds"] == pytest.approx([1.8 * 12 / 15, 3.5 * 12 / 15])
    shifts = [i for i in range(1, 24) if gears[i] != gears[i - 1]]
    assert sum(int(row["shifts"]) for row in rows(data, "routing_trace")) == len(shifts) > 0


def test_every_residency_keeps_the_bytes_of_its_gears(data):
    found = data["residency"]["residencies"]
    resident, disk = (found[name] for name in ("resident", "disk"))
    whole = resident["high"]
    assert {*resident.values()} == {whole}
    # The originals of all linear layers in float32, except the head, whose rows can still be looked up.
    assert whole - disk["low"] == pytest.approx(4 * linear_size(), rel=0.01)


def test_a_mixture_is_compared_with_high_gear_of_the_same_trial(data):
    found = data["bandwidth"]
    assert len(found["trials"]) == 5
    assert found["bytes"]["low"] < found["bytes"]["mid"] < found["bytes"]["high"]
    table = rows(data, "bandwidth")
    assert [row["low, mid, high, %"] for row in table][2] == "55, 25, 20"
    high = table[0]
    assert (high["by bytes"], high["measured"]) == ("1.00", "1.00 (1.00 to 1.00)")
    plan, read = found["plans"][2], found["bytes"]
    assert [plan.count(name) for name in ("low", "mid", "high")] == [33, 15, 12]
    by_bytes = 60 * read["high"] / (33 * read["low"] + 15 * read["mid"] + 12 * read["high"])
    assert table[2]["by bytes"] == f"{by_bytes:.2f}"
    low, mid, top = 5, 4, 0  # the places of the gears alone
    by_times = [60 * t[top][0] / (t[2][1] + 33 * t[low][0] + 15 * t[mid][0] + 12 * t[top][0]) for t in found["trials"]]
    assert table[2]["by the times of the gears"].startswith(f"{median(by_times):.2f} (")
    assert table[2]["measured"].startswith(f"{median(t[top][0] / t[2][0] for t in found['trials']):.2f} (")
