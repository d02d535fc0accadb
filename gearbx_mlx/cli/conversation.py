"""The messages of a chat, and the tokens that they are."""

from typing import Any

from ..errors import GearbxError
from .prompt import QUERY, PromptSettings, check_untemplated, place_of_query, rendered

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
            raise GearbxError("a system prompt goes into the chat template, which this chat does without")
        self.system = system

    def add(self, asked: str, answer: str) -> None:
        # A template puts its own space around an answer. With both, the next turn would be read anew from here on.
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
