"""The compute thread of mlx-lm's server, whose hooks have private names."""

from threading import Thread
from typing import Any

from mlx_lm.server import CompletionRequest, ResponseGenerator


class Computing(ResponseGenerator):
    """mlx-lm's compute thread, with work defined by a subclass and tokenization by mlx-lm's templates."""

    def compute(self) -> None:
        """Do the work of the thread, until `stopping`."""
        raise NotImplementedError

    def _generate(self) -> None:
        self.compute()

    @property
    def stopping(self) -> bool:
        return self._stop

    @property
    def thread(self) -> Thread:
        return self._generation_thread

    def stop(self) -> None:
        self._stop = True

    def tokenized(self, tokenizer: Any, request: CompletionRequest, arguments: Any) -> Any:
        """Return tokens of a request's prompt.

        Returns:
            The tokens, the prompt's parts and their kinds, the initial state of the answer, and images.
        """
        return self._tokenize(tokenizer, request, arguments)

    def text_machine(self, tokenizer: Any) -> Any:
        """Return the state machine that separates reasoning and tool calls from the text of an answer."""
        _, machine = self._make_state_machine(self.model_provider.model_key, tokenizer, [])
        return machine
