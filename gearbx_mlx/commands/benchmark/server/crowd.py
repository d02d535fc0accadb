"""Many clients of one server at once, and what its process is meanwhile."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import httpx

from ....errors import GearbxError, one_line
from .client import Answer, Asked, Client

LOOK = 1.0  # seconds between two samples of memory


@dataclass
class Outcome:
    """What many clients got: answers with their requests, and a sentence for each that failed."""

    answers: list[tuple[Asked, Answer]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def unlike(self, alone: dict[Asked, Answer]) -> list[tuple[Asked, Answer]]:
        """Those whose text is another than the one given alone, where that was given."""
        return [
            (asked, answer) for asked, answer in self.answers if asked in alone and answer.text != alone[asked].text
        ]


Next = Callable[[], Asked | None]
"""Gives the next request, or None where there is none any more. Called by several threads at once."""


def each_of(requests: Sequence[Asked]) -> Next:
    """All of some requests, once."""
    left, lock = iter(requests), threading.Lock()

    def take() -> Asked | None:
        with lock:
            return next(left, None)

    return take


def any_of(requests: Sequence[Asked], seconds: float, seed: int) -> Next:
    """Some of the requests at random, until so many seconds have passed."""
    until, drawn, lock = time.monotonic() + seconds, random.Random(seed), threading.Lock()

    def take() -> Asked | None:
        with lock:
            return drawn.choice(requests) if time.monotonic() < until else None

    return take


def crowd(url: str, clients: int, take: Next) -> Outcome:
    """Ask with so many clients at once, each one request after the other, until there are none."""
    outcome = Outcome()

    def work() -> None:
        with Client(url) as client:
            while (asked := take()) is not None:
                try:
                    outcome.answers.append((asked, client.ask(asked)))
                except httpx.HTTPError as error:
                    outcome.errors.append(f"{type(error).__name__}: {one_line(error)}")

    with ThreadPoolExecutor(clients) as pool:
        for worker in [pool.submit(work) for _ in range(clients)]:
            worker.result()
    return outcome


def process_of(pid: int) -> Any:
    """psutil's view of a process. Raises GearbxError without psutil."""
    try:
        return import_module("psutil").Process(pid)
    except ImportError as error:
        raise GearbxError("this needs psutil: pip install psutil") from error


class MemoryLog:
    """Samples the memory of a process while the context lasts: seconds, and bytes in `samples`."""

    def __init__(self, pid: int):
        self.process, self.samples = process_of(pid), list[tuple[float, int]]()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "MemoryLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        start = time.monotonic()
        while not self._end.wait(LOOK):
            self.samples.append((time.monotonic() - start, self.process.memory_info().rss))
