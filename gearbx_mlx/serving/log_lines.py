"""Lines of the server's log."""

import logging
from typing import Any

from .guarded import escaped


class Escaping(logging.Formatter):
    """Writes records so that no text in them makes a line of its own or steers a terminal. Tracebacks are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return indented(super().formatStack(stack_info))


def indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))
