"""Typed JSON: the message names the place, the value and the mistake; and files that are too large."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct, field
from mutations import DEEP, damaged
from refusals import refuses

from gearbx_mlx import GearbxError
from gearbx_mlx.bit_selection.precision import read_precision
from gearbx_mlx.bit_selection.sensitivity import MeasuredLayer
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.evaluation.predictions import read_documents, read_rows
from gearbx_mlx.files import reading
from gearbx_mlx.files.journal import Journal
from gearbx_mlx.files.model_directory import context_length
from gearbx_mlx.files.reading import Count, json_lines, parse_json, read_json, read_text, shown, typed
from gearbx_mlx.loading import DEMO_MODEL, read_config
from gearbx_mlx.machine.sensors import Scripted
from gearbx_mlx.routing.gates import read_thresholds

LAYERS = 100


class Layer(Struct, frozen=True):
    shape: tuple[int, ...]
    gears: Mapping[Literal[4, 8], Mapping[str, str]]
    kind: Literal["linear", "switch"] = field(name="class")
    share: Annotated[float, Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.shape == (13,):
            raise GearbxError("shape is unlucky")


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    layers: Mapping[str, Layer]
    name: str = ""


RIGHT = {"shape": [2, 3], "gears": {"4": {"weight": "a"}}, "class": "linear"}


class TestTyped:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"shape": [2, "x"]}, '.shape[1] is "x", not a whole number'),
            ({"shape": [2, 2.0]}, ".shape[1] is 2.0, not a whole number"),
            ({"shape": [True]}, ".shape[0] is true, not a whole number"),
            ({"shape": None}, ".shape is null, not a list"),
            ({"shape": [13]}, ": shape is unlucky"),
            ({"gears": {"4": {}, "8": {"a b": 3}}}, '.gears["8"]["a b"] is 3, not text'),
            ({"gears": {"4": {}, "16": {}}}, '.gears has the key "16", not one of 4, 8'),
            ({"gears": {"four": {}}}, '.gears has the key "four", not a whole number'),
            ({"class": "switches"}, '.class is "switches", not one of linear, switch'),
            ({"share": 2}, ".share is 2, not a number <= 1.0"),
            ({"share": 10**400}, f".share is 1{'0' * 56}..., not a finite number"),
            ({"share": {"a": "x" * 100}}, '.share is {"a": "' + "x" * 50 + "..., not a number or null"),
        ],
    )
    @pytest.mark.parametrize("place", [0, 41, LAYERS - 1])
    def test_names_the_place_and_the_value(self, change, message, place):
        layers = {f"model.layers.{i}": RIGHT for i in range(LAYERS)}
        layers[f"model.layers.{place}"] = RIGHT | change
        told = f'layers["model.layers.{place}"]{message}'
        with pytest.raises(GearbxError, match=f"^{re.escape(told)}"):
            typed({"layers": layers}, Model)

    def test_names_missing_and_unknown_fields(self):
        for content, message in (
            ({}, "it has no field 'layers'"),
            ({"layers": {"a": {}}}, "layers.a has no field 'shape'"),
            ({"layers": {}, "extra": 1}, "extra is not known; choose from layers, name"),
            ([], "it is [], not an object"),
            (
                {"layers": {}, "a - at `$.layers[...]": 1},
                '["a - at `$.layers[...]"] is not known; choose from layers, name',
            ),
        ):
            with pytest.raises(GearbxError, match=f"^{re.escape(message)}$"):
                typed(content, Model)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a":\n [1, NaN]}', "not JSON: NaN is not a finite number at line 2, column 6"),
            ("[1 2]", "not JSON: expected ',' or ']' at line 1, column 4"),
            ("9" * 5000, "not JSON: a number has too many digits"),
            ("[" * 65 + "]" * 65, "nested more than 64 levels deep"),
            ("[" * 10000, "nested more than 64 levels deep"),
            ('"\\ud800"', "half of a surrogate pair"),
            (b'"\xff"', "not JSON: not UTF-8 text"),
        ],
    )
    def test_names_json_error(self, text, message):
        with refuses(message):
            parse_json(text)

    def test_accepts_moderate_depth(self):
        content = parse_json("[" * 64 + "]" * 64)
        for _ in range(63):
            (content,) = content
        assert content == []


class TestRead:
    def test_too_long_file(self, tmp_path, monkeypatch):
        file = tmp_path / "long.json"
        file.write_text(f'["{"x" * 100}"]')
        assert read_json(file, list[str], "a list", "remedy") == ["x" * 100]
        monkeypatch.setattr(reading, "LARGEST_JSON", 100)
        with refuses("long.json: cannot be read as a list (longer than 100 characters); mend it"):
            read_json(file, list[str], "a list", "mend it")

    def test_a_file_without_an_end(self):
        with pytest.raises(GearbxError, match="longer than 1000"):
            read_text("/dev/zero", "text", "mend it", largest=1000)

    @pytest.mark.parametrize("content", [b"\xff", b"\xed\xa0\x80"])
    def test_bytes_that_are_invalid_utf8(self, tmp_path, content):
        (tmp_path / "t.txt").write_bytes(content)
        with pytest.raises(GearbxError, match=r"t\.txt: cannot be read as text \(not UTF-8 text: .*\); mend it"):
            read_text(tmp_path / "t.txt", "text", "mend it")

    def test_lines_end_as_in_json_lines(self, tmp_path):
        text = '["a\u2028b"]\r\n\n["c"]'
        assert list(json_lines(tmp_path, text, list[str], "mend it")) == [(1, ["a\u2028b"]), (3, ["c"])]


def test_a_value_is_shown_in_one_short_line():
    assert shown("a\nb") == '"a\\nb"'
    assert len(shown("x" * 1000)) == 60
    assert shown({"a": [1, None]}) == '{"a": [1, null]}'


def test_count_accepts_only_json_safe_integers():
    assert msgspec.json.decode(str(2**53), type=Count) == 2**53
    for text in (str(2**53 + 1), "-1"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Count)


INPUTS = {"model": "a", "bits": [3, 4]}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
LAYER = {"class": "mlp", "weights": 100, "min_bits": 3, "max_bits": 16, "kl": {"3": 0.01, "4": 0.0}}
MEASURED = {"distances": {"3": [0.1, 2.0]}, "cost": [1.0] * 6}
NUMBERS = {"wish": "4 bits", "bits_per_weight": 4.2, "kl": 0.1, "perplexity_change": 0.3, "sum_of_parts": 0.1}
MANIFEST = {
    **{"schema": "gearbx-mlx precision", "version": 1, "method": "exact", "model": "demo", "fingerprint": "0" * 32},
    **{"calibration": "ab", "tokens": 7, "format": "affine", "group_size": 64, "manage": "all", "bits": [3, 4]},
    **{"perplexity": None, "layers": {UP: LAYER, DOWN: LAYER}, "gears": {"4": {"bits": {UP: 3}, **NUMBERS}}},
}
THRESHOLDS = {
    **{"schema": "gearbx-mlx thresholds", "version": 1, "thresholds": [1.0, 2.0], "vocab_size": 128, "model": "m"},
    **{"method": "share", "gears": [4, 8, 16], "tokens": 9, "window": 3, "hysteresis": 0.1, "min_gear_duration": 4},
}
STATES = [{"seconds": 0, "thermal": "fair"}, {"seconds": 30.5, "battery": 0.5, "charging": True, "memory": 0.1}]
ROW = {"question": "1 + 1?", "answer": "#### 2"}
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())

READERS = {
    "manifest.json": ([MANIFEST], read_precision),
    "thresholds.json": ([THRESHOLDS], lambda file: read_thresholds(str(file))),
    "states.json": ([STATES], Scripted.from_file),
    "config.json": ([CONFIG], lambda file: context_length(read_config(file.parent))),
}
LINES = {
    "states.jsonl": (STATES, Scripted.from_file),
    "prompts.jsonl": ([{"prompt": "Once"}, {"question": "Why?"}], read_prompts),
    "documents.jsonl": ([{"text": "Once"}, ROW], read_documents),
    "problems.jsonl": ([ROW, ROW], lambda file: read_rows(file, ("question", "answer"))),
    "journal": ([INPUTS, {"part": UP, "found": MEASURED}], lambda file: Journal(file, INPUTS, MeasuredLayer)),
}
SEARCH = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfHello\nWorld\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["Hello", "World"]


def loads_or_is_refused(file: Path, text: str, read) -> bool:
    """Whether a file with this text can be read. If not, the error is one line and names the file."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        read(file)
        return True
    except GearbxError as error:
        message = str(error)
    assert "\n" not in message
    assert file.name in message or str(file.parent) in message
    assert len(message) < 1000
    return False


@pytest.mark.parametrize("name", READERS | LINES)
class TestFiles:
    def test_round_trip_is_equal(self, tmp_path, name):
        content, read = (READERS | LINES)[name]
        assert loads_or_is_refused(tmp_path / name, "\n".join(map(json.dumps, content)) + "\n", read)

    @pytest.mark.some(6)
    @SEARCH
    @given(data=st.data())
    def test_damage_is_refused_or_harmless(self, tmp_path, name, data):
        content, read = (READERS | LINES)[name]
        line = data.draw(st.integers(0, len(content) - 1))
        lines = [data.draw(damaged(row)) if i == line else json.dumps(row) for i, row in enumerate(content)]
        loads_or_is_refused(tmp_path / name, "\n".join(lines) + "\n", read)


@pytest.mark.parametrize("text", ["", "[1", DEEP, '{"a": ' * 10000, "9" * 5000, '"\\ud800"', "\ud800", "NaN", "nul"])
@pytest.mark.parametrize("name", READERS)
def test_other_content_is_refused(tmp_path, name, text):
    assert not loads_or_is_refused(tmp_path / name, text, READERS[name][1])


@pytest.mark.parametrize(
    "text", ["[1", DEEP, "9" * 5000, '{"prompt": "\\ud800"}', "3", '{"text": 3}', '{"question": 3, "answer": 4}']
)
@pytest.mark.parametrize("name", LINES)
def test_other_line_is_named(tmp_path, name, text):
    content, read = LINES[name]
    (tmp_path / name).write_text(json.dumps(content[0]) + "\n" + text + "\n")
    with refuses(f"{name}, line 2: "):
        read(tmp_path / name)


def test_a_configuration_may_have_infinity(tmp_path):
    """Some models' configurations have it, because Python wrote them."""
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "max_position_embeddings": 9}')
    config = read_config(tmp_path)
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert context_length(config) == 9
