"""Calls of tools that a model wrote, as OpenAI's objects."""

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger("gearbx_mlx.server")


class NoCall(ValueError):
    """A text that calls nothing."""


class Calls:
    """Reads the calls of one answer, each as soon as it is complete.

    Args:
        parse: mlx-lm's parser of the model's own way to call, (text, tools) -> a call or a list of them; None: nothing
            is a call.
        tools: that the model was shown.
        numbered: whether calls have an index, as those of a stream do.
    """

    def __init__(self, parse: Callable[[str, Any], Any] | None, tools: Sequence[Any] | None, numbered: bool):
        self._parse, self._tools, self._numbered = parse, tools, numbered
        self.made = 0
        """How many calls were read."""

    def read(self, text: str) -> list[dict[str, Any]]:
        """The calls that a text is; empty where a part of it is none."""
        if self._parse is None:
            return []
        try:
            parsed = self._parse(text, self._tools)
            functions = [function_of(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # a parser reads what a model wrote, and raises what it likes
            log.debug("what should be a call of a tool is none: %s", type(error).__name__)
            return []
        return [self._numbered_call(identity, function) for identity, function in functions]

    def _numbered_call(self, identity: str, function: dict[str, str]) -> dict[str, Any]:
        call: dict[str, Any] = {"function": function, "type": "function", "id": identity}
        if self._numbered:
            call["index"] = self.made
        self.made += 1
        return call


def function_of(call: Any) -> tuple[str, dict[str, str]]:
    """A call's id, and the function with its arguments as JSON. Raises ValueError or TypeError for what is no call."""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise NoCall("it names no function")
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):  # some models write the JSON as text
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise NoCall("its arguments are no object")
    identity = call.get("id")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return identity if isinstance(identity, str) and identity else str(uuid.uuid4()), {
        "name": name,
        "arguments": written,
    }
