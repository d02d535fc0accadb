"""Every mistake gets one clear line and a non-zero exit, without a traceback; nothing is left behind."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest
from conftest import save_model, tiny_model
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from refusals import assert_refused

from gearbx_mlx.loading import DEMO_MODEL, load


@pytest.fixture
def copied(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "copied"))


def test_a_model_without_a_tokenizer(command, copied):
    (copied / "tokenizer.json").unlink()
    said = f"{copied}: no tokenizer there, such as tokenizer.json; use"
    assert_refused(command("generate", "--model", copied), said)


def test_a_folder_of_a_gguf_file(command, tmp_path):
    (tmp_path / "model.gguf").touch()
    assert_refused(command("generate", "--model", tmp_path), f"use the GGUF file {tmp_path / 'model.gguf'}")


def test_number_for_boolean_is_accepted(command, copied):
    edit(copied / "config.json", rope_traditional=0)
    result = command("generate", "--model", copied, "-m", 3)
    assert result.status == 0
    assert result.out == command("generate", "-m", 3).out


def test_pipe_as_model_is_refused(command, tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    assert_refused(command("generate", "--model", tmp_path / "model.gguf"), "model.gguf: is a pipe or a device; use")


def test_a_hub_name_without_a_network(command, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = "nobody/nothing-4bit"
    assert_refused(command("generate", "--model", name), name, "connect to the network")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("generate", "--trace"), "model.safetensors"),
        (("generate", "--summary"), "config.json"),
        (("generate", "--summary"), "tokenizer_config.json"),
        (("calibrate", "--out"), "config.json"),
        (("calibrate", "--mode", "kickdown", "--out"), "tokenizer.json"),
        (("sensitivity", "--out"), "generation_config.json"),
        (("generate", "--trace"), "model-00002.safetensors"),  # which mlx-lm would load from then on
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_output_never_replaces_model_file(flags, name, linked, command, copied, tmp_path):
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    out = copied / name
    if linked:
        out = tmp_path / "link"
        out.symlink_to(copied / name)
    assert_refused(command(*flags, out, "--model", copied), out, f"is a file of the model in {copied}; choose another")
    assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


def test_output_beside_model_is_allowed(command, copied):
    assert command("generate", "-m", 2, "--model", copied, "--summary", copied / "summary.json").status == 0
    assert json.loads((copied / "summary.json").read_text())["tokens"] == 2


def edit(file: Path, **change: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    "flags",
    [
        ("sensitivity", "--bits", "4", "--num-samples", 1, "--sequence-length", 8),
        ("evaluate", "--tokens", 8, "--context", 8),
    ],
    ids=str,
)
def test_token_beyond_model_vocabulary_is_refused(command, copied, tmp_path, flags):
    """A tokenizer with one token more than the model: NumPy or MLX would read beyond the array."""
    edit(copied / "tokenizer_config.json", eos_token=" ")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small house on a hill, and a dog lived in it.")
    result = command(*flags, "--data", text, "--model", copied, "--out", tmp_path / "out")
    assert result.status == 2
    assert (
        result.err.splitlines()[-1] == f"error: {text}: tokens must be 0 to 4095, got 4096; use this model's tokenizer"
    )


def test_exiting_mlx_lm_class_is_refused(command, copied, tmp_path, monkeypatch):
    """mlx_lm.models.olmo ends the process like this where a package is missing."""
    (tmp_path / "needy.py").write_text("print('needs a package:\\n pip install it')\nraise SystemExit(1)\n")
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path)])
    edit(copied / "config.json", model_type="needy")
    result = command("generate", "--model", copied)
    reason = '"needy", which mlx-lm cannot load (needs a package: pip install it)'
    assert_refused(result, copied / "config.json", reason)
    assert result.out == ""


def test_a_model_without_a_linear_layer(command, tmp_path):
    save_model(tiny_model("talkie", num_hidden_layers=0, vocab_size=4096), tmp_path / "none")
    result = command("generate", "--model", tmp_path / "none")
    assert (result.status, result.out) == (2, "")
    said = "error: no layer can change gear: a matrix that class Model multiplies by itself"
    assert result.err.splitlines()[-1] == said


def test_missing_checkpoint_weights_are_refused(command, copied):
    """mlx-lm lists them on separate lines; here they are on one line."""
    arrays = mx.load(str(copied / "model.safetensors"))
    missing = ["model.layers.3.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: array for name, array in arrays.items() if name not in missing}
    mx.save_safetensors(str(copied / "model.safetensors"), kept, {"format": "mlx"})
    assert_refused(command("generate", "--model", copied), str(copied), *missing)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"vocab_size": 32000}, "vocabulary of 32000, got a model with 4096"),
        ({"schema": "something else"}, "schema"),
        ({"version": 99}, "has version 99, and this gearbx-mlx reads 1"),
        ({"thresholds": [2.0, 1.0]}, "ascend"),
        ({"thresholds": [1.0]}, "need 2 thresholds"),
        ({"thresholds": [-1.0, 2.0]}, "0 bits or more, got -1"),
        ({"thresholds": [1.0, float("nan")]}, "finite"),
        ({"thresholds": [10**400, 2.0]}, "finite"),
        ({"thresholds": "1,2"}, 'thresholds is "1,2", not a list'),
        ({"window": "wide"}, 'window is "wide", not a whole number'),
        ({"window": 0}, "window is 0"),
    ],
)
def test_mismatched_thresholds_file(command, tmp_path, change, word):
    file = tmp_path / "thresholds.json"
    content = {"schema": "gearbx-mlx thresholds", "version": 1, "vocab_size": 4096, "thresholds": [1.0, 2.0]}
    content |= {"model": "demo", "method": "share", "gears": [4, 8, 16], "tokens": 100}
    content |= {"window": 3, "hysteresis": 0.1, "min_gear_duration": 4}
    file.write_text(json.dumps(content | change))
    assert_refused(command("generate", "--thresholds", file, "-m", 5), file, word)


@pytest.mark.parametrize("flag", ["--summary", "--trace"])
def test_unwritable_output_is_refused(command, tmp_path, flag):
    assert_refused(command("generate", flag, tmp_path / "no" / "s.json"), "there is no directory", folder=tmp_path)
    assert_refused(command("generate", flag, tmp_path), "is a directory", folder=tmp_path)
    if Path("/proc").is_dir():
        assert_refused(command("generate", flag, "/proc/s.json"), "/proc/s.json", "cannot be written")
    if os.geteuid():
        tmp_path.chmod(0o500)
        assert_refused(command("generate", flag, tmp_path / "s.json"), "cannot be written")


def test_a_prompt_longer_than_the_context(command, tmp_path):
    result = command("generate", "-p", "king " * 600, "--summary", tmp_path / "s.json", "--trace", tmp_path / "t.jsonl")
    assert_refused(result, "the prompt: exceeds the model's context of 512, got 6", folder=tmp_path)


def test_bad_prompts_files_are_refused(command, tmp_path):
    empty, broken, strange = tmp_path / "e.txt", tmp_path / "b.jsonl", tmp_path / "s.jsonl"
    empty.write_text("\n \n")
    broken.write_text('{"question": "one"}\n\n{"question"')
    strange.write_text('{"riddle": "one"}')
    for file, words in [
        (empty, "no prompt; use one per line"),
        (broken, "line 3: not JSON"),
        (strange, "line 1: no text; use a field"),
        (tmp_path / "none.txt", "cannot be read"),
    ]:
        assert_refused(command("analyze", "--prompts", file, "--out", tmp_path / "out"), file, words)
        assert not (tmp_path / "out").exists()


def test_existing_summary_survives_failed_run(command, tmp_path):
    (tmp_path / "s.json").write_text("before")
    assert_refused(command("generate", "--gears", "9", "--summary", tmp_path / "s.json"), "9")
    assert (tmp_path / "s.json").read_text() == "before"


def test_unexpected_error_is_single_line(command, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(import_module("gearbx_mlx.generate.run"), "read_prompt", broken)
    result = command("generate")
    assert result.err == "error: ZeroDivisionError: a bug (GEARBX_TRACEBACK=1 shows where)\n"
    assert result.status == 1


@pytest.fixture
def with_template(tmp_path):
    """The demo model with another chat template (None: without one) or other settings of its tokenizer."""

    def make(template: str | None, **tokenizer: object) -> Path:
        directory = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
        edit(directory / "tokenizer_config.json", chat_template=template)
        edit(directory / "tokenizer.json", **tokenizer)
        return directory

    return make


NO_TOKEN = "--prompt: becomes no token; "
WITHOUT_A = {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}, "post_processor": None}


@pytest.mark.parametrize(
    ("template", "tokenizer", "flags", "complaint"),
    [
        (
            "{% if false %}{% endif %}",
            {},
            (),
            f"{NO_TOKEN}use --ignore-chat-template if the chat template omits it",
        ),
        (None, WITHOUT_A, ("-p", "aaa"), f"{NO_TOKEN}use another --prompt"),
        *(
            (None, {}, (flag, value), f"{flag}: goes into the chat template, and the model has none; omit {flag}")
            for flag, value in (
                ("--system-prompt", "Be brief."),
                ("--prefill-response", "It"),
                ("--chat-template-config", '{"thinking": true}'),
            )
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            {},
            ("--prefill-response", "It is"),
            "error: chat template: refuses the messages (",
        ),
    ],
)
def test_message_unsupported_by_template(command, with_template, template, tokenizer, flags, complaint):
    assert_refused(command("generate", "--model", with_template(template, **tokenizer), *flags), complaint)


def test_template_hiding_message_after_cache_is_refused(command, with_template, tmp_path):
    model = with_template("Question: {{ messages[0].content | upper }}")
    loaded, _ = load(model)
    cache = make_prompt_cache(loaded)
    loaded(mx.array([[1, 2, 3]]), cache=cache)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": str(model), "tokenizer_config": "{}"})
    result = command("generate", "--model", model, "--prompt-cache-file", file)
    assert_refused(result, "chat template: does not contain the message; use --ignore-chat-template")
