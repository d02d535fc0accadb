"""Chat templates (programs that come with a model) in separate processes.

transformers compiles a template with `_compile_jinja_template` and calls `render` of the result. `confine` replaces
that with a `ConfinedTemplate`. So everything that renders a chat, including mlx-lm's server, stays within the limits
of `template_process.py`.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import GearbxError, GearbxWarning
from . import template_process
from .template_process import SECONDS

SCRIPT = Path(template_process.__file__)
COMPILER, TESTED = "_compile_jinja_template", "transformers 5.24"
ENDINGS: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {SECONDS:g} s",
    signal.SIGKILL: "it takes too much memory",
}


class TemplateError(GearbxError):
    """An error of a chat template, or of its limits."""


class Renderer:
    """A process that renders one template.

    It imports in the background; only the first text waits for it.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # numpy's threads take memory
            start_new_session=True,
            text=True,
        )
        weakref.finalize(self, ended, self.process)

    def ask(self, asked: dict[str, Any]) -> dict[str, str]:
        """Return the answer to a request. Raises TemplateError if the process ends instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TemplateError(ENDINGS.get(-self.process.wait(), "its process ended early"))
        answer: dict[str, str] = json.loads(line)
        return answer


def ended(process: subprocess.Popen[str]) -> None:
    """End a process and close its pipes."""
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()


class ConfinedTemplate:
    """A chat template, with the `render` of jinja's. environment: of jinja, for parsing templates."""

    environment: Any = None

    def __init__(self, template: str):
        self.template = template
        self.lock = threading.Lock()
        self.renderer: Renderer | None = None

    def render(self, **values: Any) -> str:
        """Return the text. Raises TemplateError for errors of the template, and exceeded limits."""
        with self.lock:
            asked: dict[str, Any] = {"values": values}
            renderer, self.renderer = self.renderer, None  # after an error (Ctrl-C), no half answer remains
            if renderer is None:
                renderer, asked["template"] = take_spare(), self.template
            answer = renderer.ask(asked)
            self.renderer = renderer
        if "text" in answer:
            return answer["text"]
        raise TemplateError(answer["words"] or answer["error"])


_spare: list[Renderer] = []


def take_spare() -> Renderer:
    """Return a process without a template. Raises TemplateError if the system cannot start one."""
    try:
        return _spare.pop() if _spare else Renderer()
    except OSError as error:
        raise TemplateError(f"its process cannot be started: {error.strerror}") from error


def prepare() -> None:
    """Start a process for the first template. It imports while the model is loaded."""
    with contextlib.suppress(OSError):  # the first text reports it
        if not _spare:
            _spare.append(Renderer())


confined = functools.lru_cache(4)(ConfinedTemplate)  # processes


@functools.cache
def confine() -> None:
    """Render chat templates in separate processes from now on. Warns if that is impossible."""
    from transformers.utils import chat_template_utils

    compiler = getattr(chat_template_utils, COMPILER, None)
    if compiler is None:
        why = f"transformers {metadata.version('transformers')} compiles them differently; use {TESTED}"
        warnings.warn(f"chat templates run without limits of time and memory: {why}", GearbxWarning, stacklevel=2)
        return
    ConfinedTemplate.environment = compiler("").environment
    setattr(chat_template_utils, COMPILER, confined)


def tokenized(tokenizer: Any, messages: list[Any], tools: Any, arguments: dict[str, Any], processor: Any) -> Any:
    """Return the tokens of a chat, by its template and the private function of mlx-lm's server.

    Args:
        arguments: of the template. processor: of images, or None.

    Returns:
        The tokens, the prompt's parts and their kinds, the initial state of the answer, and images.
    """
    from mlx_lm.server import CompletionRequest, ResponseGenerator  # takes longer than other commands need

    provider = SimpleNamespace(processor=processor, cli_args=SimpleNamespace(chat_template_args=arguments))
    own, given = SimpleNamespace(model_provider=provider), SimpleNamespace(chat_template_kwargs=None)
    return ResponseGenerator._tokenize(own, tokenizer, CompletionRequest("chat", "", messages, tools, None), given)
