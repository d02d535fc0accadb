"""The exact text that MLX generates for a kernel, and the contents of its signature."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@contextmanager
def captured_stdout() -> Iterator[Any]:
    """What the process writes to file descriptor 1: MLX prints from C++, past Python's sys.stdout."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def generated_text(kernel: Any, inputs: list[Any], options: dict[str, Any]) -> str:
    """What MLX would hand to Metal's compiler for this call.

    Exporting traces the call without running it, so that no Metal device is needed.
    """
    arrays = [i for i in inputs if isinstance(i, mx.array)]

    def call(*traced: mx.array) -> Any:
        each = iter(traced)
        placed = [next(each) if isinstance(given, mx.array) else given for given in inputs]
        return kernel(inputs=placed, verbose=True, **options)

    with captured_stdout() as file:
        mx.export_function(os.devnull, call, *arrays)
        file.seek(0)
        printed = file.read().decode()
    found = re.search(r"Generated source code for `[^`]*`:\n```\n(.*)\n```\n", printed, re.DOTALL)
    assert found, f"MLX printed no kernel text: {printed[:500]!r}"
    return found.group(1)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel: a buffer, or an attribute such as the index of the thread."""

    type: str
    name: str
    is_buffer: bool


def parameters(text: str) -> list[Parameter]:
    """Parameters in the order of the signature, which is also that of the buffers."""
    found = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", text, re.DOTALL)
    assert found, "the text has no kernel"
    each = re.findall(r"^\s*(.*?)\s*(\w+) \[\[(\w+)(?:\(\d+\))?\]\]", found.group(1), re.MULTILINE)
    return [Parameter(kind, name, attribute == "buffer") for kind, name, attribute in each]


def instance(text: str) -> str:
    """The kernel's name in a call, with its template arguments."""
    found = re.search(r"decltype\((\w+<[^\n]*>)\) \1;", text) or re.search(r"\[\[kernel\]\] void (\w+)\(", text)
    assert found, "the text has no kernel"
    return found.group(1)
