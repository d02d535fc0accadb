"""From a prompt to tokens through a chat template, which is a program in the model's directory."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from gearbx_mlx.loading import DEMO_MODEL, load


@pytest.fixture
def with_template(tmp_path):
    """The demo model with another chat template (None: without one) or other settings of its tokenizer."""

    def make(template: str | None, **tokenizer: object) -> Path:
        directory = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
        config = json.loads((directory / "tokenizer_config.json").read_text()) | {"chat_template": template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        content = json.loads((directory / "tokenizer.json").read_text()) | tokenizer
        (directory / "tokenizer.json").write_text(json.dumps(content))
        return directory

    return make


def assert_refused(result, complaint):
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines() == [f"error: {complaint}"]


def test_a_template_that_renders_nothing_is_refused(command, with_template):
    complaint = "the prompt becomes no token; the chat template may leave it out; use --ignore-chat-template"
    assert_refused(command("generate", "--model", with_template("{% if false %}{% endif %}")), complaint)


def test_a_prompt_that_becomes_no_token_is_refused(command, with_template):
    removed = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    model = with_template(None, normalizer=removed, post_processor=None)
    assert_refused(command("generate", "--model", model, "-p", "aaa"), "the prompt becomes no token; change --prompt")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--system-prompt", "Be brief."), ("--prefill-response", "It"), ("--chat-template-config", '{"thinking": true}')],
)
def test_a_flag_of_the_template_is_refused_without_one(command, with_template, flag, value):
    complaint = f"{flag} goes into the chat template, and the model has none; leave {flag} out"
    assert_refused(command("generate", "--model", with_template(None), flag, value), complaint)


def test_a_template_that_does_not_go_on_with_an_answer_is_refused(command, with_template):
    model = with_template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    result = command("generate", "--model", model, "--prefill-response", "It is")
    assert result.status == 2
    assert result.err.startswith("error: the chat template refuses this (")


def test_a_template_that_hides_the_message_is_refused_after_a_prompt_cache(command, with_template, tmp_path):
    model = with_template("Question: {{ messages[0].content | upper }}")
    loaded, _ = load(model)
    cache = make_prompt_cache(loaded)
    loaded(mx.array([[1, 2, 3]]), cache=cache)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": str(model), "tokenizer_config": "{}"})
    result = command("generate", "--model", model, "--prompt-cache-file", file)
    assert_refused(result, "the chat template does not show the message; use --ignore-chat-template")
