"""OpenAI's objects: whole answers, chunks of a stream, usage and log-probabilities."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .tokens import Alternative, Emitted

IMPOSSIBLE = -9999.0  # as OpenAI writes minus infinity


@dataclass(frozen=True)
class Shape:
    """What all objects of one answer have in common."""

    chat: bool
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def envelope(self, stream: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def whole(
        self,
        text: str,
        reasoning: str,
        calls: list[dict],
        finish_reason: str,
        logprobs: dict | None,
        stop_word: str | None = None,
    ) -> dict[str, Any]:
        """A whole answer, without its usage."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": logprobs}
        choice |= stopped_by(stop_word)
        if not self.chat:
            return self.envelope(False, [{**choice, "text": text}])
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return self.envelope(False, [{**choice, "message": message}])

    def chunk(
        self,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[dict] = (),
        finish_reason: str | None = None,
        logprobs: dict | None = None,
        first: bool = False,
        stop_word: str | None = None,
    ) -> dict[str, Any]:
        """A piece of a stream; the `first` one names the role."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": logprobs}
        choice |= stopped_by(stop_word)
        if not self.chat:
            return self.envelope(True, [{**choice, "text": text}])
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if text:
            delta["content"] = text
        if reasoning:
            delta["reasoning"] = reasoning
        if calls:
            delta["tool_calls"] = list(calls)
        return self.envelope(True, [{**choice, "delta": delta}])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self.envelope(True, []), "usage": usage}

    def logprobs(self, emitted: Sequence[Emitted], offset: int = 0) -> dict[str, Any]:
        """Log-probabilities of tokens, natural; `offset` characters of the answer came before them.

        Tokens that are impossible are no alternatives.
        """
        known = [(one.logprob, possible(one.likeliest)) for one in emitted if one.logprob is not None]
        if self.chat:
            return {"content": [{**entry(own), "top_logprobs": [entry(o) for o in others]} for own, others in known]}
        offsets = []
        for own, _ in known:
            offsets.append(offset)
            offset += len(own.text)
        return {
            "tokens": [own.text for own, _ in known],
            "token_logprobs": [written(own.logprob) for own, _ in known],
            "top_logprobs": [{other.text: other.logprob for other in others} for _, others in known],
            "text_offset": offsets,
        }


def entry(one: Alternative) -> dict[str, Any]:
    return {"id": one.token, "token": one.text, "logprob": written(one.logprob), "bytes": list(one.text.encode())}


def possible(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Those with a finite log-probability: a response_format leaves fewer tokens than may be asked for."""
    return [one for one in alternatives if math.isfinite(one.logprob)]


def written(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def stopped_by(word: str | None) -> dict[str, str]:
    """The stop word that ended a text, as vLLM names it; nothing where none did."""
    return {} if word is None else {"stop_reason": word}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Tokens of the prompt, of the answer, and those of the prompt that were read for an earlier answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(0, cached)},
    }
