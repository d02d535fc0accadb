"""A chat while it lasts: what was said, what the KV cache holds of it, and how the next message is answered."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache

from ..cli import terminal
from ..cli.loaded import BegunConversation
from ..cli.prompt import QUERY, PromptSettings, check_untemplated, place_of_query, rendered, room_for
from ..cli.signals import CtrlC, Interrupted
from ..cli.tables import summary_line
from ..decoding.caches import KeptCache
from ..decoding.response import GearResponse
from ..errors import GearbxError
from ..telemetry.summary import Tally
from ..telemetry.trace import writer_of
from . import ChatSettings
from .models import ChatModel

Message = dict[str, str]  # role and content
RESET = "/reset begins a new conversation"


class Conversation:
    """What user and model said, in order; the system prompt, if there is one, stands in front of it."""

    def __init__(self, settings: PromptSettings, tokenizer: Any):
        self._settings, self._tokenizer = settings, tokenizer
        self.templated = settings.templates(tokenizer)
        if not self.templated:
            check_untemplated(settings, None)
        self.system = settings.system_prompt
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def instruct(self, system: str | None) -> None:
        """Change the system prompt. Raises GearbxError where there is no chat template that it could go into."""
        if not self.templated:
            raise GearbxError("a system prompt goes into the chat template, which this chat does not have")
        self.system = system

    def add(self, asked: str, answer: str) -> None:
        # A template puts its own space around an answer. With both, the next turn would be read again from here on.
        self.turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer.strip()}]

    def tokens(self, message: str) -> list[int]:
        """All that was said, and a message that is to be answered. Without a template, every turn is a line.

        Raises:
            GearbxError: messages that the template refuses, no tokens.
        """
        tokens = self._tokenizer.encode(self._text(message), add_special_tokens=not self.templated)
        if not tokens:
            raise GearbxError("the message becomes no token; write something else")
        return tokens

    def before_message(self) -> str:
        """All that stands before the next message, as text. Raises GearbxError as `tokens`, or if none is shown."""
        text = self._text(QUERY)
        return text[: place_of_query(text)]

    def _text(self, message: str) -> str:
        messages = [*self.messages, {"role": "user", "content": message}]
        if self.templated:
            return rendered(self._settings, self._tokenizer, messages)
        return "\n".join(said["content"] for said in messages)


STOPPED = "stopped"


class PromptStopped(Exception):
    """Ctrl-C came between two parts of a prompt."""


@dataclass
class ChatAnswer:
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
        self._out = terminal.WrappedText(model.gears)
        self._bar = terminal.PromptBar()
        self._told_of_cut = self._told_of_making = False

    def reset(self) -> None:
        """Forget what was said. The system prompt stays."""
        self.conversation.turns.clear()
        self.cache.forget()

    def save_cache(self, path: Path) -> None:
        """Write the KV cache, and its text. Raises GearbxError where that is impossible."""
        said = self.conversation
        bits = min(self.cache.bits, default=0)
        begun = BegunConversation(said.before_message(), said.templated, self.cache.tokens, bits)
        self.model.save_cache(self.cache.cut_to_tokens(), begun, path)

    def answer(self, message: str) -> None:
        """Answer a message on stdout, and show what it cost in a line on stderr.

        Raises:
            GearbxError: a conversation beyond the model's context, or as `stream_generate`. The message is dropped.
        """
        answer = ChatAnswer(Tally.of(self.model.gears), [])
        with self._out.whole(), self._ctrl_c.answering():
            try:
                self._read_and_write(message, answer)
            except Interrupted:
                answer.ending = STOPPED
            if answer.last is not None:
                self.conversation.add(message, answer.text)
        self._finish(answer)

    def _read_and_write(self, message: str, answer: ChatAnswer) -> None:
        """Read what the cache does not have of the conversation, and write the answer."""
        tokens = self.conversation.tokens(message)
        most, size = self.settings.prompt.max_tokens, self.settings.cache.max_kv_size
        max_tokens = room_for(self.model.config, len(tokens), most, size, "the conversation", RESET)
        coming = self.model.coming(message)
        unread = self.cache.unread(tokens, coming.reads)
        keywords = {"prompt_cache": self.cache.entries, "prompt_progress_callback": self._read}
        try:
            with self._bar:
                self._write(self.model.answer(coming.mode, unread, max_tokens, **keywords), answer)
            if coming.reads_again and can_trim_prompt_cache(self.cache.entries):
                self.cache.note(unread[:-1], answer.whole, coming.reads)
            else:
                self.cache.note([*unread, *answer.tokens], answer.whole, min(coming.reads, coming.writes))
        except BaseException:  # the second Ctrl-C, for one: what was computed then is not known
            self.cache.forget()
            raise

    def _write(self, responses: Iterator[GearResponse], answer: ChatAnswer) -> None:
        """Write an answer as it comes, until it ends or Ctrl-C asks it to."""
        self._out.begin()
        try:
            with closing(responses):  # type: ignore[type-var]  # it is a generator
                for response in responses:
                    answer.tally.add(response)
                    answer.tokens.append(response.token)
                    answer.text += response.text
                    answer.last = response
                    self._out.write(response.text, writer_of(response))
                    if self._ctrl_c.asked and response.finish_reason is None:
                        answer.ending = STOPPED
                        break
        except PromptStopped:
            answer.ending, answer.whole = STOPPED, False

    def _read(self, read: int, tokens: int) -> None:
        """Show how far a prompt is read, and stop between two parts; mlx-lm calls this after each of them."""
        self._bar.told(read, tokens)
        if self._ctrl_c.asked and read < tokens:
            raise PromptStopped

    def _finish(self, answer: ChatAnswer) -> None:
        last: Any = answer.last
        if last is None:
            terminal.note("stopped before the answer began; the message is dropped")
            return
        if not answer.text:
            print(flush=True)
        ending = answer.ending or ("cut" if last.finish_reason == "length" else "")
        most = self.settings.prompt.max_tokens
        if last.finish_reason == "length" and answer.tally.tokens == most and not self._told_of_cut:
            self._told_of_cut = True
            terminal.note(f"the answer was cut: --max-tokens is {most}; give more, or -1 for whole answers")
        terminal.messages.print(summary_line(answer.tally, last, self.model.mode, ending), style="dim", soft_wrap=True)
        if self.model.of_making and not self._told_of_making:
            self._told_of_making = True
            terminal.note(self.model.of_making)
