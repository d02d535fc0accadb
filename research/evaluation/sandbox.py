"""Python code that a model generated, run with its tests in a separate process, without files, network or children.

This prevents accidents, not attacks: the process has limits of time, memory and files, an empty directory and
environment, and an audit hook that refuses to write, connect, or start programs.
"""

import functools
import json
import re
import secrets
import subprocess
import sys
import tempfile

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.evaluation.predictions import PROMPT

SECONDS = 5  # of a processor, for code and tests
MEMORY = 2**30  # bytes
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
NEXT_QUESTION = "\n" + PROMPT.split("{")[0].strip()

CHILD = """
import contextlib, json, os, resource, sys
asked = json.loads(sys.stdin.read())
for limit, most in ((resource.RLIMIT_CPU, asked["seconds"]), (resource.RLIMIT_AS, asked["memory"]),
                    (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(limit, (most, most))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "signal.", "tempfile.", "webbrowser.", "pty.")
READING = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # imports list directories

def guard(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if writes or (event.startswith(REFUSED) and event not in READING):
        raise PermissionError(event)

import collections, datetime, functools, itertools, math, re, string  # what functions use, before the guard stands
sys.addaudithook(guard)
names = {"__name__": "answer"}
exec(compile(asked["code"], "answer", "exec"), names)
exec(compile(asked["tests"], "tests", "exec"), names)
sys.__stdout__.write("\\n" + asked["passed"] + "\\n")
"""


def code_in(text: str) -> str | None:
    """Return the first fenced block of a text, or a text that is code itself; None without a function."""
    text = text.split(NEXT_QUESTION)[0]
    fenced = FENCED.search(text)
    code = fenced[1] if fenced else text
    return code if "def " in code else None


def code_finished(text: str) -> bool:
    """Return whether a fenced block has ended."""
    return NEXT_QUESTION in text or re.search(r"```(?:python|py)?[ \t]*\n.*?\n```", text, re.DOTALL) is not None


@functools.cache
def passes(code: str, tests: str) -> bool:
    """Return whether code passes tests (lines of assert). Raises GearbxError if Python cannot be started."""
    passed = secrets.token_hex(16)  # code that ends the process early does not print it
    asked = {"code": code, "tests": tests, "passed": passed, "seconds": SECONDS, "memory": MEMORY}
    line = [sys.executable, "-I", "-S", "-B", "-c", CHILD]
    with tempfile.TemporaryDirectory() as empty:
        try:
            keywords = {"cwd": empty, "env": {}, "capture_output": True, "timeout": 4 * SECONDS}
            done = subprocess.run(line, input=json.dumps(asked).encode(), **keywords)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            return False
        except OSError as error:
            raise GearbxError(f"{sys.executable}: cannot be started ({error.strerror}); make room for it") from error
    return done.returncode == 0 and done.stdout.decode(errors="replace").rstrip().endswith(passed)
