"""Typed JSON: the message names the place, the value and the mistake; and files that are too large."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, Struct, field

from gearbx_mlx import GearbxError
from gearbx_mlx.files import reading
from gearbx_mlx.files.reading import Count, json_lines, parse_json, read_json, read_text, shown, typed

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
            (
                {"share": {"a": "x" * 100}},
                '.share is {"a": "' + "x" * 50 + "..., not a number or null",
            ),
        ],
    )
    @pytest.mark.parametrize("place", [0, 41, LAYERS - 1])
    def test_names_the_place_and_the_value(self, change, message, place):
        layers = {f"model.layers.{i}": RIGHT for i in range(LAYERS)}
        layers[f"model.layers.{place}"] = RIGHT | change
        with pytest.raises(GearbxError) as raised:
            typed({"layers": layers}, Model)
        assert str(raised.value).startswith(f'layers["model.layers.{place}"]{message}')

    def test_names_fields_that_are_missing_or_unknown(self):
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
            with pytest.raises(GearbxError) as raised:
                typed(content, Model)
            assert str(raised.value) == message

    def test_of_many_wrong_entries_the_first_is_named(self):
        wrong = RIGHT | {"class": 1}
        with pytest.raises(GearbxError, match=r"layers\.b\.class is 1, not"):
            typed({"layers": {"a": RIGHT, "b": wrong, "c": wrong, "d": wrong}}, Model)


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
    def test_says_why_a_text_is_not_json(self, text, message):
        with pytest.raises(GearbxError) as raised:
            parse_json(text)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_takes_what_is_deep_enough(self):
        content = parse_json("[" * 64 + "]" * 64)
        for _ in range(63):
            (content,) = content
        assert content == []


class TestRead:
    def test_a_file_that_is_too_long(self, tmp_path, monkeypatch):
        file = tmp_path / "long.json"
        file.write_text(f'["{"x" * 100}"]')
        assert read_json(file, list[str], "a list", "remedy") == ["x" * 100]
        monkeypatch.setattr(reading, "LARGEST_JSON", 100)
        with pytest.raises(
            GearbxError, match=r"long\.json: cannot be read as a list \(longer than 100 characters\); mend"
        ):
            read_json(file, list[str], "a list", "mend it")

    def test_a_file_without_an_end(self):
        with pytest.raises(GearbxError, match="longer than 1000"):
            read_text("/dev/zero", "text", "mend it", largest=1000)

    @pytest.mark.parametrize("content", [b"\xff", b"\xed\xa0\x80"])
    def test_bytes_that_are_not_text(self, tmp_path, content):
        (tmp_path / "t.txt").write_bytes(content)
        with pytest.raises(GearbxError, match=r"t\.txt: cannot be read as text \(not UTF-8 text: .*\); mend it"):
            read_text(tmp_path / "t.txt", "text", "mend it")

    def test_a_name_with_a_null_character(self):
        with pytest.raises(GearbxError, match="null"):
            read_text("a\0b", "text", "mend it")

    def test_lines_end_where_json_lines_end(self, tmp_path):
        text = '["a\u2028b"]\r\n\n["c"]'
        assert list(json_lines(tmp_path, text, list[str], "mend it")) == [(1, ["a\u2028b"]), (3, ["c"])]


def test_a_value_is_shown_in_one_short_line():
    assert shown("a\nb") == '"a\\nb"'
    assert len(shown("x" * 1000)) == 60
    assert shown({"a": [1, None]}) == '{"a": [1, null]}'


def test_a_count_is_a_whole_number_that_every_reader_of_json_has():
    assert msgspec.json.decode(str(2**53), type=Count) == 2**53
    for text in (str(2**53 + 1), "-1"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Count)
