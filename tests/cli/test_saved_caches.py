"""Files of KV caches that a chat saved: whose weights they belong to."""

import shutil

import pytest
from adapters import save_adapter
from chats import chat
from conftest import save_model, tiny_model
from mlx_lm.models.cache import load_prompt_cache

ASKED = "one two"


@pytest.fixture
def saved(tmp_path):
    """A model's directory, and the cache of a chat with it."""
    model, file = tmp_path / "model", tmp_path / "cache.safetensors"
    save_model(tiny_model(vocab_size=4096), model)
    with chat(model=str(model), gears="16", max_tokens=6) as session:
        session.answer(ASKED)
        session.save_cache(file)
    return model, file


def go_on(command, file, *flags):
    return command("generate", "--prompt-cache-file", file, "-p", ASKED, "-m", 4, *flags)


@pytest.mark.parametrize("flags", [("--gears", 16), ("--gears", "4,16"), ("--mode", "telemetry-only")])
def test_the_same_weights_go_on_in_any_gears(command, saved, flags):
    done = go_on(command, saved[1], *flags)
    assert done.status == 0, done.err


def test_other_weights_of_the_same_name_are_refused(command, saved):
    model, file = saved
    shutil.rmtree(model)
    save_model(tiny_model(seed=1, vocab_size=4096), model)
    done = go_on(command, file, "--gears", 16)
    made_with = load_prompt_cache(str(file), return_metadata=True)[1]["fingerprint"]
    assert (done.status, done.out) == (2, "")
    *_, line = done.err.splitlines()  # after what --gears 16 says
    assert line.startswith(f"error: {file}: ")
    assert made_with[:8] in line
    assert str(model) in line


def test_an_adapter_makes_other_weights(command, saved, tmp_path):
    file = saved[1]
    adapter = save_adapter(tiny_model(vocab_size=4096), tmp_path / "adapter", "lora")
    done = go_on(command, file, "--gears", 16, "--adapter-path", adapter)
    assert (done.status, done.out) == (2, "")
    assert f"error: {file}: " in done.err
