"""Read the machine in threads of their own, so that no reader can stop or delay generation."""

import threading
import time
from collections.abc import Sequence

from .readers import Reader
from .scripted import Scripted
from .state import MachineState, merged

INTERVAL = 1.0  # seconds between readings
TIMEOUT = 5.0  # seconds that a reading may take


class Poll(threading.Thread):
    """A thread that reads one reader again and again.

    latest: its last state. failure: why it could not be read. began: when the present reading began; None between two.
    """

    def __init__(self, reader: Reader, interval: float):
        super().__init__(name=f"gearbx {reader.name}", daemon=True)
        self.reader = reader
        self.interval = interval
        self.latest: MachineState | None = None
        self.failure: str | None = None
        self.began: float | None = time.monotonic()
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.is_set():
            self.began = time.monotonic()
            try:
                self.latest, self.failure = self.reader.read(), None
            except Exception as error:  # sensors and their libraries raise anything
                self.latest, self.failure = None, " ".join(f"{type(error).__name__}: {error}".split())
            self.began = None
            self._stop.wait(self.interval)

    def stop(self) -> None:
        self._stop.set()


class Watch:
    """The latest state of the machine, from readers that run in threads of their own.

    A reader that fails, or takes longer than the timeout, is left out until it answers again; `problems` names it once.
    A `Scripted` reader needs no thread: it is read when the state is asked for.

    Args:
        readers: of the machine.
        interval: seconds between two readings.
        timeout: seconds that a reading may take.
    """

    def __init__(self, readers: Sequence[Reader], interval: float = INTERVAL, timeout: float = TIMEOUT):
        self.timeout = timeout
        self.scripts = [reader for reader in readers if isinstance(reader, Scripted)]
        self.polls = [Poll(reader, interval) for reader in readers if not isinstance(reader, Scripted)]
        self._reported: set[str] = set()
        self._problems: list[str] = []
        for poll in self.polls:
            poll.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the threads end. They are daemons, so a blocked one ends with the program."""
        for poll in self.polls:
            poll.stop()

    def state(self, seconds: float = 0.0, tokens: int = 0) -> MachineState:
        """The state now, without waiting.

        Args:
            seconds, tokens: since generation began, for scripts.
        """
        states = []
        for script in self.scripts:
            script.moment = tokens if script.unit == "tokens" else seconds
            states.append(script.read())
        for poll in self.polls:
            began, failure, state = poll.began, poll.failure, poll.latest
            if began is not None and time.monotonic() - began > self.timeout:
                self._report(poll, f"no answer for {self.timeout:g} s")
            elif failure is not None:
                self._report(poll, failure)
            elif state is not None:
                states.append(state)
        return merged(states)

    def problems(self) -> list[str]:
        """What went wrong since the last call; only the first problem of each reader."""
        found, self._problems = self._problems, []
        return found

    def _report(self, poll: Poll, problem: str) -> None:
        if poll.reader.name not in self._reported:
            self._reported.add(poll.reader.name)
            self._problems.append(f"{poll.reader.name} cannot be read ({problem}); going on without it")
