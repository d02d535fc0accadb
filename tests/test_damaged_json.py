"""Damaged JSON of every kind that the package reads: it loads, or a one-line error names the file."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import DEEP, damaged

from gearbx_mlx import GearbxError
from gearbx_mlx.bit_selection.precision import read_precision
from gearbx_mlx.bit_selection.sensitivity import MeasuredLayer
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.evaluation.text import read_documents, read_rows
from gearbx_mlx.files.journal import Journal
from gearbx_mlx.files.model_directory import context_length
from gearbx_mlx.loading import DEMO_MODEL, read_config
from gearbx_mlx.machine.readers import Scripted
from gearbx_mlx.routing.gates import read_thresholds

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


READERS = {
    "manifest.json": (MANIFEST, read_precision),
    "thresholds.json": (THRESHOLDS, lambda file: read_thresholds(str(file))),
    "states.json": (STATES, Scripted.from_file),
    "config.json": (
        json.loads((DEMO_MODEL / "config.json").read_text()),
        lambda file: context_length(read_config(file.parent)),
    ),
}
LINES = {
    "states.jsonl": (STATES, Scripted.from_file),
    "prompts.jsonl": ([{"prompt": "Once"}, {"question": "Why?"}], read_prompts),
    "documents.jsonl": ([{"text": "Once"}, ROW], read_documents),
    "problems.jsonl": ([ROW, ROW], lambda file: read_rows(file, ("question", "answer"))),
    "journal": ([INPUTS, {"part": UP, "found": MEASURED}], lambda file: Journal(file, INPUTS, MeasuredLayer)),
}
SEARCH = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


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


@pytest.mark.parametrize("name", READERS)
class TestFiles:
    def test_is_read_as_it_was_written(self, tmp_path, name):
        content, read = READERS[name]
        assert loads_or_is_refused(tmp_path / name, json.dumps(content), read)

    @pytest.mark.some(3)
    @SEARCH
    @given(data=st.data())
    def test_damage_is_refused_or_does_nothing(self, tmp_path, name, data):
        content, read = READERS[name]
        loads_or_is_refused(tmp_path / name, data.draw(damaged(content)), read)

    @pytest.mark.parametrize(
        "text", ["", "[1", DEEP, '{"a": ' * 10000, "9" * 5000, '"\\ud800"', "\ud800", "NaN", "nul"]
    )
    def test_something_else_is_refused(self, tmp_path, name, text):
        assert not loads_or_is_refused(tmp_path / name, text, READERS[name][1])

    def test_a_directory_is_not_damaged_but_a_directory(self, tmp_path, name):
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(GearbxError, match="Is a directory") as raised:
            READERS[name][1](tmp_path / name)
        assert name in str(raised.value)


@pytest.mark.parametrize("name", LINES)
class TestLines:
    def test_is_read_as_it_was_written(self, tmp_path, name):
        content, read = LINES[name]
        assert loads_or_is_refused(tmp_path / name, "\n".join(map(json.dumps, content)) + "\n", read)

    @pytest.mark.some(3)
    @SEARCH
    @given(data=st.data())
    def test_damage_is_refused_or_does_nothing(self, tmp_path, name, data):
        content, read = LINES[name]
        line = data.draw(st.integers(0, len(content) - 1))
        lines = [data.draw(damaged(row)) if i == line else json.dumps(row) for i, row in enumerate(content)]
        loads_or_is_refused(tmp_path / name, "\n".join(lines) + "\n", read)

    @pytest.mark.parametrize(
        "text", ["[1", DEEP, "9" * 5000, '{"prompt": "\\ud800"}', "3", '{"text": 3}', '{"question": 3, "answer": 4}']
    )
    def test_something_else_is_named_with_its_line(self, tmp_path, name, text):
        content, read = LINES[name]
        (tmp_path / name).write_text(json.dumps(content[0]) + "\n" + text + "\n")
        with pytest.raises(GearbxError, match=f"{name}, line 2: ") as raised:
            read(tmp_path / name)
        assert "\n" not in str(raised.value)

    def test_a_name_of_5000_characters_is_one_line(self, tmp_path, name):
        with pytest.raises(GearbxError) as raised:
            LINES[name][1](tmp_path / ("x" * 5000 + ".jsonl"))
        assert "\n" not in str(raised.value)


def test_a_configuration_may_have_infinity(tmp_path):
    """Some models' configurations have it, because Python wrote them."""
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "max_position_embeddings": 9}')
    config = read_config(tmp_path)
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert context_length(config) == 9
