"""Chats with the demo model, in this process and through pipes, and what they are compared with."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

from gearbx_mlx import Static, stream_generate
from gearbx_mlx.chat import ChatSettings
from gearbx_mlx.chat.run import open_model
from gearbx_mlx.chat.session import Session
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.cli.prompt import PromptSettings, formatted
from gearbx_mlx.cli.signals import CtrlC
from gearbx_mlx.loading import DEMO_MODEL

ASKED = "Tom has 3 apples and 4 pears. How many fruits has he?"
MORE = "He buys 2 more apples. How many are there now?"
TOP = "3,16"
MODES = {  # each in one gear, or with the text of one gear
    "route": {"gears": "16", "kernels": "mlx"},
    "static": {"gears": TOP, "mode": "static"},
    "kickdown": {"gears": TOP, "mode": "kickdown", "thresholds": "0"},
    "lossless": {"gears": TOP, "mode": "lossless"},
    "telemetry-only": {"mode": "telemetry-only"},
    "pair": {"small_model": str(DEMO_MODEL), "thresholds": "0.5"},
    "draft model": {"gears": TOP, "draft_model": str(DEMO_MODEL)},
}


@contextmanager
def chat(ctrl_c: CtrlC | None = None, **flags: object):
    """A chat in this process, as the command makes it."""
    settings = command_settings(ChatSettings, {"max_tokens": 24, "no_history": True} | flags)
    with ExitStack() as stack:
        yield Session(settings, open_model(settings, stack), ctrl_c or CtrlC())


def tokens_of(demo, messages: list[dict[str, str]]) -> list[int]:
    """The prompt that asks for the next answer."""
    return demo.tokenizer.encode(formatted(PromptSettings(), demo.tokenizer, messages), add_special_tokens=False)


def as_without_a_cache(demo, messages: list[dict[str, str]], max_tokens: int) -> str:
    """What the demo model answers in its original weights when it reads the whole conversation."""
    responses = stream_generate(
        demo.model, demo.tokenizer, tokens_of(demo, messages), max_tokens, mode=Static("high"), gearbox=demo.gearbox
    )
    return "".join(response.text for response in responses).strip()


def in_gears(demo, geared_demo) -> SimpleNamespace:
    """The demo model with its gearbox, as `as_without_a_cache` takes it."""
    return SimpleNamespace(**vars(demo), gearbox=geared_demo)


def with_roles(path, shown="{{ message.content }}") -> None:
    """The demo model with a template that has a system role; `shown` is the text of an earlier answer."""
    shutil.copytree(DEMO_MODEL, path)
    file = path / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["chat_template"] = (
        "{% for message in messages %}{% if message.role == 'assistant' %}assistant:" + shown + "\n"
        "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}assistant:"
    )
    file.write_text(json.dumps(content))


def piped(text: str | bytes, *flags: object, **environment: str) -> SimpleNamespace:
    """A chat as a process of its own that reads lines from a pipe."""
    line = [sys.executable, "-m", "gearbx_mlx.chat", "--gears", "3,16", "-m", "8", *map(str, flags)]
    data = text.encode() if isinstance(text, str) else text
    done = subprocess.run(line, input=data, capture_output=True, timeout=300, env=os.environ | environment)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return SimpleNamespace(status=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def answers(result: SimpleNamespace) -> int:
    return result.err.count("/token\n")
