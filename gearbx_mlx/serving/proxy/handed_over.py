"""What the small server wrote, as the beginning of the large one's answer: where the API can go on with a text.

A text completion goes on with any text: it is part of the prompt. But mlx-lm takes the space away with which an answer
begins, so that a server made of it cannot go on between two words. A chat goes on only if the server leaves the last
message of the assistant open: llama.cpp does, vLLM and SGLang do if asked to; others close it and begin a new turn.
"""

from collections.abc import Mapping
from typing import Any

from .failed import Failed
from .upstream import LISTING, Upstream

CHAT, TEXT = "/chat/completions", "/completions"

ASKED = {"continue_final_message": True, "add_generation_prompt": False}
# Who a server says that owns its models -> the fields that make it go on with the assistant's message.
CONTINUES: dict[str, dict[str, bool]] = {"vllm": ASKED, "sglang": ASKED, "llamacpp": {}}
TRIMMING = ("basehttp/", "gearbx-mlx")  # mlx_lm.server, which bears the name of Python's own server, and ours
# Whose answer would not be one text: several answers, or what holds for the whole answer and sees only its end.
ONE_WRITER = (
    "logprobs",
    "echo",
    "suffix",
    "best_of",
    "response_format",
    "grammar",
    "json_schema",
    "structured_outputs",
)
LENGTHS = ("max_tokens", "max_completion_tokens")


class HandOver:
    """Whether and how a server goes on with a text; looks once at what the server says that it is."""

    def __init__(self, server: Upstream):
        self.server = server
        self._owner: str | None = None

    def body(self, path: str, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        """The request that goes on with `text`, of so many tokens; None where the server has to begin anew."""
        if not text or not goes_on(body):
            return None
        shorter = {name: length - tokens for name, length in lengths_of(body).items()}
        if any(length < 1 for length in shorter.values()):
            return None
        added = self.fields(path)
        prompt, messages = body.get("prompt"), body.get("messages")
        if added is None:
            return None
        if path == TEXT:
            return {**body, **shorter, "prompt": prompt + text} if isinstance(prompt, str) else None
        if not isinstance(messages, list):
            return None
        return {**body, **shorter, **added, "messages": [*messages, {"role": "assistant", "content": text}]}

    def fields(self, path: str) -> dict[str, bool] | None:
        """What the request needs besides the text; None for a server that does not go on with it."""
        owner = self.owner()
        if path == TEXT:
            return None if self.server.software.startswith(TRIMMING) else {}
        return CONTINUES.get(owner)

    def owner(self) -> str:
        """Who the server says that owns its models; "" where it does not."""
        if self._owner is None:
            try:
                owners = [str(row.get("owned_by")).lower() for row in self.server.models()]
            except Failed as error:
                if error.status not in LISTING:  # it is loading, or not there; it is asked again
                    return ""
                owners = []
            self._owner = next((owner for owner in owners if owner in CONTINUES), "")
        return self._owner


def lengths_of(body: Mapping[str, Any]) -> dict[str, int]:
    """The most tokens that a client wants, under each name; 50.0 is 50."""
    found = {name: body.get(name) for name in LENGTHS}
    return {
        name: int(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    }


def goes_on(body: Mapping[str, Any]) -> bool:
    """Whether two writers can make the answer that a request asks for."""
    return not any(body.get(name) for name in ONE_WRITER) and body.get("n") in (None, 1)
