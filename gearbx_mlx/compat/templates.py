"""Chat templates, which come with a model and are programs, in processes of their own.

transformers compiles a template with `_compile_jinja_template` and calls `render` of what it returns. `confine` puts a
`ConfinedTemplate` in the place of that. So whatever renders a chat, mlx-lm's server included, does it within the limits
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
    """Says what a chat template refuses, or that it takes too much."""


class Renderer:
    """A process that renders one template.

    It imports while this one goes on; nobody needs to wait for it until the first text.
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
        """Return the answer to a request. Raises TemplateError where the process ends instead."""
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
    """A chat template, with the `render` of jinja's. environment: of jinja, in which transformers parses templates."""

    environment: Any = None

    def __init__(self, template: str):
        self.template = template
        self.lock = threading.Lock()
        self.renderer: Renderer | None = None

    def render(self, **values: Any) -> str:
        """Return the text. Raises TemplateError for what the template refuses, and for one that takes too much."""
        with self.lock:
            asked: dict[str, Any] = {"values": values}
            renderer, self.renderer = self.renderer, None  # an error, such as Ctrl-C's, leaves no half answer behind
            if renderer is None:
                renderer, asked["template"] = take_spare(), self.template
            answer = renderer.ask(asked)
            self.renderer = renderer
        if "text" in answer:
            return answer["text"]
        raise TemplateError(answer["words"] or answer["error"])


_spare: list[Renderer] = []


def take_spare() -> Renderer:
    """Return a process that has no template yet. Raises TemplateError where the system starts none."""
    try:
        return _spare.pop() if _spare else Renderer()
    except OSError as error:
        raise TemplateError(f"its own process cannot be started: {error.strerror}") from error


def prepare() -> None:
    """Begin a process for the first template. It imports while the model is loaded."""
    with contextlib.suppress(OSError):  # of which the first text tells
        if not _spare:
            _spare.append(Renderer())


confined = functools.lru_cache(4)(ConfinedTemplate)  # processes


@functools.cache
def confine() -> None:
    """From now on render chat templates in processes of their own. Warns where that cannot be done."""
    from transformers.utils import chat_template_utils

    compiler = getattr(chat_template_utils, COMPILER, None)
    if compiler is None:
        why = f"transformers {metadata.version('transformers')} compiles them in another way; install {TESTED}"
        warnings.warn(f"chat templates run without limits of time and memory: {why}", GearbxWarning, stacklevel=2)
        return
    ConfinedTemplate.environment = compiler("").environment
    setattr(chat_template_utils, COMPILER, confined)
