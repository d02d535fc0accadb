"""What a model writes, sorted into text, thoughts and calls of tools, by mlx-lm's own state machine."""

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import GenerationContext

from .tools import Calls


@dataclass
class Written:
    """What is new: text, thoughts, and calls that are complete, as OpenAI's objects."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Channels:
    """Sorts the text of one answer as it comes. What should be a call and is none is text."""

    def __init__(self, context: GenerationContext, calls: Calls):
        self._calls = calls
        self._state = context.text_sm.make_state(context.initial_state)
        self._channel = context.initial_state
        self._call = ""

    def feed(self, text: str, last: bool = False) -> Written:
        """What the text adds; after the `last` one nothing is kept back as the possible beginning of a mark."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if last:
            self._state, rest, channel = TextStateMachine.flush(self._state)
            segments.append((channel, rest))
        written = Written()
        for channel, part in segments:
            if channel == "reasoning":
                written.reasoning += part
            elif channel == "tool":
                self._call += part
            else:
                self._close_call(written)
                written.text += part
            self._channel = channel
        if last:
            self._close_call(written)
        return written

    def _close_call(self, written: Written) -> None:
        if self._channel == "tool" and self._call:
            calls = self._calls.read(self._call)
            written.calls += calls
            written.text += "" if calls else self._call
        self._call = "" if self._channel == "tool" else self._call
