"""Stop words: a text ends where the first of them begins, however it is cut into tokens."""

from collections.abc import Sequence


class StopWords:
    """Holds back the end of a text as long as it may be the beginning of a stop word.

    found: the word that ended the text.
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._pending = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop word ended it."""
        if not self.words:
            return text, False
        pending = self._pending + text
        places = [(place, word) for word in self.words if (place := pending.find(word)) >= 0]
        if places:
            self._pending = ""
            place, self.found = min(places)
            return pending[:place], True
        kept = max(self._begun(pending, word) for word in self.words)
        self._pending = pending[len(pending) - kept :]
        return pending[: len(pending) - kept], False

    def rest(self) -> str:
        """What is still held back, once the text has ended by itself."""
        rest, self._pending = self._pending, ""
        return rest

    @staticmethod
    def _begun(text: str, word: str) -> int:
        """How many characters at the end of the text begin the word."""
        longest = min(len(text), len(word) - 1)
        return next((n for n in range(longest, 0, -1) if word.startswith(text[len(text) - n :])), 0)
