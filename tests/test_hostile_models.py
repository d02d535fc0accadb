"""Model directories made to hang or to run code: a one-line error names the file."""

import io
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from gearbx_mlx.cli import prompt
from gearbx_mlx.cli.prompt import limited_time
from gearbx_mlx.loading import DEMO_MODEL, gears_of

LIBRARIES_READ = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("added_tokens.json", "special_tokens_map.json"),
)
DEEP = 100000
UNREADABLE = ("[" * DEEP + "]" * DEEP, '{"a": ' * DEEP + "1" + "}" * DEEP, '{"a": %s}' % ("9" * 5000), "[]")
UP = "model.layers.0.mlp.up_proj.weight"
MODEL_FLAGS = ["--model", "--draft-model", "--base"]


@pytest.fixture(autouse=True)
def _no_test_hangs():
    with limited_time(120):
        yield


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def edit(file: Path, **change: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def run_of(name: str, model: Path, place: Path) -> tuple:
    """A command, or `generate` with a flag that names the model."""
    (place / "prompts.txt").write_text("Once\n")
    return {
        "convert": ("convert", "--model", model, "--mlx-path", place / "out"),
        "analyze": ("analyze", "--model", model, "--prompts", place / "prompts.txt", "--out", place / "out"),
        "--small-model": ("generate", "--mode", "pair", "--small-model", model),
    }.get(name, ("generate", name, model))


def assert_refused(result, *words: object) -> None:
    assert result.status == 2
    (line,) = result.err.splitlines()
    for word in words:
        assert str(word) in line


class TestSizes:
    @pytest.mark.parametrize(
        "change",
        [
            {"num_hidden_layers": 10**9},
            {"num_hidden_layers": 10**6},
            {"num_hidden_layers": 1e12},
            {"text_config": {"num_hidden_layers": 10**6}},
            {"layer_types": ["full_attention"] * 10**5},
        ],
        ids=lambda change: str(change)[:40],
    )
    def test_more_layers_than_there_are_arrays(self, command, model, change):
        edit(model / "config.json", **change)
        assert_refused(command("generate", "--model", model), model / "config.json", "layer", "56 arrays, too few")

    @pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"])
    @pytest.mark.parametrize("value", [10**9, 10**12])
    def test_wider_than_its_arrays(self, command, model, name, value):
        edit(model / "config.json", **{name: value})
        assert_refused(command("generate", "--model", model), model, "cannot load this model")


@pytest.mark.some(8)
@pytest.mark.parametrize("text", UNREADABLE, ids=("lists", "objects", "digits", "list"))
@pytest.mark.parametrize("name", [name for name in LIBRARIES_READ if name != "hf_quant_config.json"])
def test_json_that_no_library_can_read_is_named(command, model, name, text):
    (model / name).write_text(text)
    assert_refused(command("generate", "--model", model), f"{model / name}: cannot be read as")


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.complex64], ids=str)
def test_weights_of_another_kind(command, model, dtype):
    """Without this error, a layer would compute something from them. float8 arrives as uint8."""
    file = str(model / "model.safetensors")
    arrays = mx.load(file)
    mx.save_safetensors(file, arrays | {UP: arrays[UP].astype(dtype)}, {"format": "mlx"})
    kind = str(dtype).removeprefix("mlx.core.")
    assert_refused(command("generate", "--model", model), model, f"{UP} has numbers of type {kind}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 0.5 s"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_chat_template_without_end(command, model, monkeypatch, template, reason):
    monkeypatch.setattr(prompt, "TEMPLATE_SECONDS", 0.5)
    edit(model / "tokenizer_config.json", chat_template=template)
    assert_refused(command("generate", "--model", model), "the chat template refuses this", reason)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [(b"\xff" * 100, "damaged or truncated"), (None, "no adapters.safetensors there"), (b"", "damaged or truncated")],
    ids=["huge header", "none", "empty"],
)
def test_an_adapter_with_damaged_arrays_is_named(command, tmp_path, arrays, words):
    (tmp_path / "adapter_config.json").write_text('{"num_layers": 2, "fine_tune_type": "full"}')
    if arrays is not None:
        (tmp_path / "adapters.safetensors").write_bytes(arrays)
    assert_refused(command("generate", "--adapter-path", tmp_path), tmp_path, words)


def test_the_configuration_of_an_adapter_is_named(command, tmp_path):
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"a": mx.zeros(2)})
    (tmp_path / "adapter_config.json").write_text(UNREADABLE[0])
    assert_refused(
        command("generate", "--adapter-path", tmp_path), tmp_path / "adapter_config.json", "nested more than"
    )


def test_a_name_of_two_lines(command, tmp_path):
    (tmp_path / "two\nlines").mkdir()
    assert_refused(command("generate", "--model", tmp_path / "two\nlines"), "two\\nlines/config.json: missing")


class TestCode:
    """Code beside a model runs only with --trust-remote-code, and the terminal never asks."""

    @pytest.fixture(params=["model_file", "tokenizer"])
    def planted(self, request, model, tmp_path, monkeypatch) -> Path:
        """The file that the model's code writes when it runs."""
        mark = tmp_path / "mark"
        (model / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Tokens: pass\n")
        if request.param == "model_file":
            edit(model / "config.json", model_file="own.py", auto_map={"AutoConfig": "own.Tokens"})
        else:
            edit(
                model / "tokenizer_config.json",
                tokenizer_class="Tokens",
                auto_map={"AutoTokenizer": [None, "own.Tokens"]},
            )
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        return mark

    @pytest.mark.some(4)
    @pytest.mark.parametrize("name", ["convert", "analyze", *MODEL_FLAGS, "--small-model"])
    def test_is_not_run(self, command, model, planted, tmp_path, name):
        assert_refused(command(*run_of(name, model, tmp_path)), model, "give --trust-remote-code")
        assert not planted.exists()

    def test_is_not_run_where_mlx_lm_has_a_class_for_the_model(self, command, model, tmp_path):
        (model / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Model: pass\n")
        edit(model / "config.json", auto_map={"AutoConfig": "own.Model", "AutoModelForCausalLM": "own.Model"})
        assert command("generate", "--model", model, "-m", 1).status == 0
        assert not (tmp_path / "mark").exists()

    def test_is_not_run_for_a_look_at_the_gears(self, model, planted):
        assert gears_of(model) is None
        assert not planted.exists()

    def test_is_run_with_the_flag(self, command, model, planted):
        command("generate", "--model", model, "--trust-remote-code")
        assert planted.exists()
