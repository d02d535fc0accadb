"""The pictures of the paper: their data, their tables, and that they are drawn."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from research.figures import PICTURES, subject_of

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


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn(data, name, tmp_path):
    PICTURES[name].write(data[name], tmp_path / "x.svg")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    before = (tmp_path / "x.svg").read_bytes()
    PICTURES[name].write(data[name], tmp_path / "x.svg")
    assert len(before) > 5000
    assert (tmp_path / "x.svg").read_bytes() == before


def test_bytes_match_formula(data):
    found = data["memory_by_format"]
    size = linear_size()
    assert found["fp16"] == 2 * size
    by_name = {(row["format"], row["bits"]): row["measured"] for row in found["rows"]}
    assert by_name["rowwise", 4] == size // 2 + 2 * BLOCKS * sum(rows for rows, _ in SHAPES)
    assert by_name["affine", 8] == size + 4 * size // 64
