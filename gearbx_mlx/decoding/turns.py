"""Several texts with one gearbox: they take turns, token by token, also from several threads."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from .response import GearResponse

making = threading.RLock()  # a model gets one gearbox, however many threads ask for it at once
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def turn(gearbox: Any) -> AbstractContextManager:
    """The lock that a text has while it shifts a gearbox and computes a token with it."""
    with making:
        return _locks.setdefault(gearbox, threading.RLock())


def in_turn(responses: Iterator[GearResponse], gearbox: Any) -> Iterator[GearResponse]:
    """Responses, each of them computed while no other text uses the gearbox. Between two of them it is free."""
    lock = turn(gearbox)
    while True:
        with lock:
            response = next(responses, None)
        if response is None:
            return
        yield response
