"""Reads the machine beside generation, so that no reader can fail it or hold it up."""

import threading
import time
from collections.abc import Sequence

from .readers import Reader
from .scripted import Scripted
from .state import MachineState, merged

INTERVAL = 1.0  # seconds between readings
TIMEOUT = 5.0  # seconds that a reading may take


class Poll(threading.Thread):
    """One reader, read again and again. What it told last, when it last began, and what went wrong."""

    def __init__(self, reader: Reader, interval: float):
        super().__init__(name=f"gearbx {reader.name}", daemon=True)
        self.reader = reader
        self.interval = interval
        self.told: MachineState | None = None
        self.wrong: str | None = None
        self.began: float | None = time.monotonic()  # None while it is not reading
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.is_set():
            self.began = time.monotonic()
            try:
                self.told, self.wrong = self.reader.read(), None
            except Exception as error:  # whatever a sensor or its library raises
                self.told, self.wrong = None, " ".join(f"{type(error).__name__}: {error}".split())
            self.began = None
            self._stop.wait(self.interval)

    def stop(self) -> None:
        self._stop.set()


class Watch:
    """The latest state of the machine, by readers that run in threads of their own.

    A reader that fails is left out until it tells something again, and so is one that takes longer than the timeout.
    Each is told of once. A `Scripted` reader is read at the moment that is asked for, and in no thread.

    Args:
        readers: of the machine.
        interval: seconds between two readings.
        timeout: seconds that a reading may take.
    """

    def __init__(self, readers: Sequence[Reader], interval: float = INTERVAL, timeout: float = TIMEOUT):
        self.timeout = timeout
        self.scripts = [reader for reader in readers if isinstance(reader, Scripted)]
        self.polls = [Poll(reader, interval) for reader in readers if not isinstance(reader, Scripted)]
        self._told_of: set[str] = set()
        self._problems: list[str] = []
        for poll in self.polls:
            poll.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the threads end. One that is blocked is a daemon, and ends with the program."""
        for poll in self.polls:
            poll.stop()

    def state(self, seconds: float = 0.0, tokens: int = 0) -> MachineState:
        """The state now, without waiting.

        Args:
            seconds, tokens: since generation began, for scripts.
        """
        told = []
        for script in self.scripts:
            script.moment = tokens if script.unit == "tokens" else seconds
            told.append(script.read())
        for poll in self.polls:
            began, wrong, state = poll.began, poll.wrong, poll.told
            if began is not None and time.monotonic() - began > self.timeout:
                self._tell(poll, f"no answer for {self.timeout:g} s")
            elif wrong is not None:
                self._tell(poll, wrong)
            elif state is not None:
                told.append(state)
        return merged(told)

    def problems(self) -> list[str]:
        """What went wrong since this was last asked; each reader's first trouble alone."""
        found, self._problems = self._problems, []
        return found

    def _tell(self, poll: Poll, what: str) -> None:
        if poll.reader.name not in self._told_of:
            self._told_of.add(poll.reader.name)
            self._problems.append(f"{poll.reader.name} cannot be read ({what}); going on without it")
