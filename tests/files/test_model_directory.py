"""Model directories that are damaged, or made to hang or to run code: a one-line error names the file."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mutations import edit
from refusals import assert_refused

from gearbx_mlx.loading import DEMO_MODEL, checkpoint_gears

UP = "model.layers.0.mlp.up_proj.weight"
MODEL_FLAGS = ["--model", "--draft-model", "--base"]


@pytest.fixture(autouse=True)
def _no_test_hangs():
    def end(number: int, frame: object) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def run_of(name: str, model: Path, place: Path) -> tuple:
    """A command, or `generate` with a flag that names the model."""
    (place / "prompts.txt").write_text("Once\n")
    return {
        "convert": ("convert", "--model", model, "--mlx-path", place / "out"),
        "analyze": ("analyze", "--model", model, "--prompts", place / "prompts.txt", "--out", place / "out"),
        "--small-model": ("generate", "--mode", "pair", "--small-model", model),
    }.get(name, ("generate", name, model))


DEEP = 100000
UNREADABLE = ("[" * DEEP + "]" * DEEP, '{"a": ' * DEEP + "1" + "}" * DEEP, '{"a": %s}' % ("9" * 5000), "[]")
LIBRARIES_READ = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("added_tokens.json", "special_tokens_map.json"),
)
FEW, OTHER = "56 arrays, too few", "config.json does not belong to these weights"

DAMAGES = [  # a file; its content, what its JSON says instead, how many bytes are left out of it or none; words
    ("model.safetensors", -1000, "damaged or truncated"),
    ("model.safetensors", b"\xff" * 5000, "damaged or truncated"),
    ("model.safetensors", None, "no model*.safetensors"),
    ("config.json", None, "config.json: missing"),
    ("config.json", b"\0", "config.json"),
    ("config.json", {"hidden_size": "wide"}, 'config.json: hidden_size is "wide", not a number'),
    ("config.json", {"rope_traditional": "x"}, 'config.json: rope_traditional is "x", neither true nor false'),
    ("config.json", {"rope_theta": "x"}, 'config.json: rope_theta is "x", not a number'),
    ("config.json", {"num_attention_heads": 0}, "cannot load"),
    ("config.json", {"num_hidden_layers": 7}, f"Missing 9 parameters: model.layers.6. … {OTHER}"),
    ("config.json", {"num_hidden_layers": 5}, f"Received 9 parameters not in model: model.layers.5. … {OTHER}"),
    ("config.json", {"hidden_size": 320}, f"Expected shape (4096, 320) but received shape (4096, 256) … {OTHER}"),
    ("config.json", {"num_hidden_layers": 10**9}, FEW),
    ("config.json", {"num_hidden_layers": 1e12}, FEW),
    ("config.json", {"text_config": {"num_hidden_layers": 10**6}}, FEW),
    ("config.json", {"layer_types": ["full_attention"] * 10**5}, FEW),
    *(
        ("config.json", {name: value}, "cannot load this model")
        for name in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
        for value in (10**9, 10**12)
    ),
    *(
        ("config.json", {"model_type": kind}, f"{json.dumps(kind)}, which mlx-lm cannot load … update mlx-lm")
        for kind in ("steam-engine", "base", "../llama", 3, None)
    ),
    ("config.json", {"quantization": {"group_size": 0, "bits": 4}}, "group_size … must be 1 or more, got 0"),
    (
        "config.json",
        {"quantization_config": {"group_size": 64, "bits": 4, UP: {"bits": -1}}},
        "bits … must be 1 or more, got -1",
    ),
    ("tokenizer_config.json", {"model_max_length": ""}, 'model_max_length is "", not a number'),
    ("tokenizer_config.json", {"model_max_length": [512]}, "model_max_length is [512], not a number"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGES, ids=lambda value: str(value)[:30])
def test_damage_is_refused(command, model, tmp_path, name, content, words):
    file = model / name
    if content is None:
        file.unlink()
    elif isinstance(content, int):
        file.write_bytes(file.read_bytes()[:content])
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        edit(file, **content)
    result = command("generate", "--model", model, "--summary", tmp_path / "summary.json")
    assert_refused(result, model, *words.split(" … "))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        *(("--model", name) for name in ("model.safetensors", "config.json", "gears.json", "tokenizer.json")),
        *(("--adapter-path", name) for name in ("adapters.safetensors", "adapter_config.json")),
    ],
)
def test_pipe_in_place_of_file_is_refused_immediately(command, model, flag, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert_refused(command("generate", flag, model), f"{model / name}: is a pipe or a device, not a file")


@pytest.mark.some(8)
@pytest.mark.parametrize("text", UNREADABLE, ids=("lists", "objects", "digits", "list"))
@pytest.mark.parametrize("name", LIBRARIES_READ)
def test_unreadable_json_is_named(command, model, name, text):
    (model / name).write_text(text)
    assert_refused(command("generate", "--model", model), f"{model / name}: cannot be read as")


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.complex64], ids=str)
def test_other_weight_types(command, model, dtype):
    """Without this error, a layer would compute something from them. float8 arrives as uint8."""
    file = str(model / "model.safetensors")
    arrays = mx.load(file)
    mx.save_safetensors(file, arrays | {UP: arrays[UP].astype(dtype)}, {"format": "mlx"})
    kind = str(dtype).removeprefix("mlx.core.")
    assert_refused(command("generate", "--model", model), model, f"{UP} has numbers of type {kind}")


HUGE = "{{ 'a' * (2 * 10**9) }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 1.5 s"),
        ("{{ 9**(9**9) }}", "it takes more than 1.5 s"),
        ("{% set n = 9 %}{{ (n ** (n ** n)) % 7 }}", "it takes more than 1.5 s"),
        (HUGE, "it takes more than 1 GB"),
        ("{{ '%2000000000d' % 1 }}", "it takes more than 1 GB"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_chat_template_without_end(command, model, template, reason):
    edit(model / "tokenizer_config.json", chat_template=template)
    assert_refused(command("generate", "--model", model), "chat template: refuses the messages", reason)


@pytest.mark.processes
def test_endless_template_is_limited_and_ctrl_c_works(model):
    """The processor's seconds are those of the template's own process and of the one that loads the model."""
    edit(model / "tokenizer_config.json", chat_template=HUGE)
    run = [sys.executable, "-m", "gearbx_mlx.generate", "--model", str(model), "-m", "2"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run(run, capture_output=True).returncode == 2
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - before.ru_maxrss < 2**20  # KB
    edit(model / "tokenizer_config.json", chat_template="{{ 9**(9**9) }}")
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while not children.read_text().strip():  # the template's process
            time.sleep(0.01)
        time.sleep(3)
        running.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = running.communicate()
    assert running.returncode in (130, 2)
    assert time.monotonic() - began < 2
    assert "Traceback" not in err


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
            own = {"AutoTokenizer": [None, "own.Tokens"]}
            edit(model / "tokenizer_config.json", tokenizer_class="Tokens", auto_map=own)
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        return mark

    @pytest.mark.some(4)
    @pytest.mark.parametrize("name", ["convert", "analyze", *MODEL_FLAGS, "--small-model"])
    def test_is_not_run(self, command, model, planted, tmp_path, name):
        assert_refused(command(*run_of(name, model, tmp_path)), model, "pass --trust-remote-code")
        assert not planted.exists()

    def test_is_not_run_to_inspect_gears(self, model, planted):
        assert checkpoint_gears(model) is None
        assert not planted.exists()

    def test_is_run_with_the_flag(self, command, model, planted):
        command("generate", "--model", model, "--trust-remote-code")
        assert planted.exists()
