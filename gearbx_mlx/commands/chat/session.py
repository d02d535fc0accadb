"""A chat while it lasts: what was said, what the KV cache holds of it, and how the next message is answered."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cli import terminal
from ...cli.conversation import RESET, Conversation
from ...cli.loaded import room_for
from ...cli.parsers.chat import ChatSettings
from ...cli.prompt_cache import Begun
from ...cli.signals import CtrlC, Interrupted
from ...cli.summary_line import summary_line
from ...decoding.caches import KeptCache
from ...decoding.response import GearResponse
from ...telemetry.summary import Tally
from .models import ChatModel

STOPPED = "stopped"


class PromptStopped(Exception):
    """Ctrl-C came between two parts of a prompt."""


@dataclass
class Answer:
    """An answer while it is written. `whole`: it ended by itself or between two tokens."""

    tally: Tally
    tokens: list[int]
    text: str = ""
    last: GearResponse | None = None
    ending: str = ""
    whole: bool = True


class Session:
    """A conversation with one or two models; `ctrl_c` stops its answers."""

    def __init__(self, settings: ChatSettings, model: ChatModel, ctrl_c: CtrlC):
        self.settings, self.model, self._ctrl_c = settings, model, ctrl_c
        self.conversation = Conversation(settings.prompt, model.tokenizer)
        self.cache = KeptCache(model.new_cache)
        self._out = terminal.TintedText(model.gears, settings.terminal.color)

    def reset(self) -> None:
        """Forget what was said. The system prompt stays."""
        self.conversation.turns.clear()
        self.cache.forget()

    def save_cache(self, path: Path) -> None:
        """Write the KV cache, and the text that it is of. Raises GearbxError where that is impossible."""
        said = self.conversation
        begun = Begun(said.before_message(), said.templated, self.cache.tokens)
        self.model.save_cache(self.cache.cut_to_tokens(), begun, path)

    def answer(self, message: str) -> None:
        """Answer a message on stdout, and show what it cost in a line on stderr.

        Raises:
            GearbxError: a conversation beyond the model's context, or as `stream_generate`. The message is dropped.
        """
        answer = Answer(Tally.of(self.model.gears), [])
        try:
            with self._ctrl_c.answering():
                try:
                    self._read_and_write(message, answer)
                except Interrupted:
                    answer.ending = STOPPED
                if answer.last is not None:
                    self.conversation.add(message, answer.text)
        except BaseException:
            if answer.text:
                print(flush=True)
            raise
        self._finish(answer)

    def _read_and_write(self, message: str, answer: Answer) -> None:
        """Read what the cache does not have of the conversation, and write the answer."""
        tokens = self.conversation.tokens(message)
        max_tokens = self._room(len(tokens))
        unread = self.cache.unread(tokens)
        keywords = {"prompt_cache": self.cache.entries, "prompt_progress_callback": self._read}
        try:
            self._write(self.model.answer(message, unread, max_tokens, **keywords), answer)
            self.cache.note([*unread, *answer.tokens], answer.whole)
        except BaseException:  # the second Ctrl-C, for one: what was computed then is not known
            self.cache.forget()
            raise

    def _room(self, tokens: int) -> int:
        """How many tokens may follow. Raises GearbxError where the conversation fills the context."""
        most, size = self.settings.prompt.max_tokens, self.settings.cache.max_kv_size
        return room_for(self.model.config, tokens, most, size, "the conversation", RESET)

    def _write(self, responses: Iterator[GearResponse], answer: Answer) -> None:
        """Write an answer as it comes, until it ends or Ctrl-C asks it to."""
        try:
            with closing(responses):  # type: ignore[type-var]  # it is a generator
                for response in responses:
                    answer.tally.add(response)
                    answer.tokens.append(response.token)
                    answer.text += response.text
                    answer.last = response
                    self._out.write(response.text, response.gear)
                    if self._ctrl_c.asked and response.finish_reason is None:
                        answer.ending = STOPPED
                        break
        except PromptStopped:
            answer.ending, answer.whole = STOPPED, False

    def _read(self, read: int, tokens: int) -> None:
        """Stop between two parts of a prompt; mlx-lm calls this after each of them."""
        if self._ctrl_c.asked and read < tokens:
            raise PromptStopped

    def _finish(self, answer: Answer) -> None:
        last: Any = answer.last
        if last is None:
            terminal.note("stopped before the answer began; the message is dropped")
            return
        print(flush=True)
        ending = answer.ending or ("cut" if last.finish_reason == "length" else "")
        terminal.messages.print(summary_line(answer.tally, last, self.model.mode, ending), style="dim", soft_wrap=True)
