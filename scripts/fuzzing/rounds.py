"""Rounds of commands of one kind, and what all rounds have found."""

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from gearbx_mlx.__main__ import COMMANDS

from . import running
from .cases import Case, commands_that_read, readings
from .flags import commands, parsers_of

LONGEST = 60  # seconds of a round
SHRINKING = 40  # commands that the search for a shorter one may run
FLAGS, FILES = "flags", "files"  # kinds of cases
SETTINGS = settings(
    max_examples=20,  # before another kind has its turn
    database=None,
    deadline=None,
    derandomize=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


class Enough(BaseException):
    """Ends a round: all rounds are over, or the search for a shorter command has lasted long enough."""


class Wrong(AssertionError):
    """Hypothesis searches for the shortest example that raises it."""


@dataclass
class Failure:
    """A problem, how often it happened, and the shortest command that shows it."""

    case: Case
    outcome: running.Outcome
    count: int = 0


@dataclass
class Results:
    """What all rounds have found.

    stop: whether everything is over. statuses: (command, kind of case) to how often each status was. failures:
    (command, problem).
    """

    stop: Callable[["Results"], bool]
    statuses: dict[tuple[str, str], Counter] = field(default_factory=lambda: defaultdict(Counter))
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        return sum(counts.total() for counts in [*self.statuses.values()])

    def add(self, kind: str, case: Case, outcome: running.Outcome) -> bool:
        """Count a command. Returns whether it has a new problem."""
        with self.lock:
            self.statuses[case.name, kind][f"{outcome.status}{', late' if outcome.late else ''}"] += 1
            if outcome.problem is None:
                return False
            failure = self.failures.setdefault((case.name, outcome.problem), Failure(case, outcome))
            failure.count += 1
            if case.length < failure.case.length:
                failure.case, failure.outcome = case, outcome
            return failure.count == 1


@dataclass(frozen=True)
class Place:
    """Where commands run. inputs: whole ones. work: gets a directory for each command. limit: seconds."""

    inputs: Path
    work: Path
    limit: float

    def run(self, case: Case) -> running.Outcome:
        directory = Path(tempfile.mkdtemp(dir=self.work))
        try:
            case.prepare(self.inputs, directory)
            return running.run(case.name, case.arguments, directory, self.limit)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def kinds_of(names: list[str], inputs: Path) -> list[tuple[str, st.SearchStrategy[Case]]]:
    """Kinds of cases with their strategies: flags of each parser of these commands, and the files that they read."""
    found = []
    for name in names:
        found += [(FLAGS, commands(parser)) for parser in parsers_of(name)]
        if commands_that_read(name):
            found.append((FILES, readings(name, inputs)))
    return found


def play(kind: str, cases: st.SearchStrategy[Case], number: str, results: Results, place: Place) -> None:
    """A round: some commands of one kind, and the search for the shortest that has the first new problem."""
    wanted: str | None = None
    left, end = SHRINKING, time.monotonic() + LONGEST

    @seed(number)
    @SETTINGS
    @given(cases)
    def check(case: Case) -> None:
        nonlocal wanted, left
        left -= wanted is not None
        if results.stop(results) or not left or time.monotonic() > end:
            raise Enough
        outcome = place.run(case)
        if results.add(kind, case, outcome) and wanted is None:
            wanted = outcome.problem
        if wanted is not None and outcome.problem == wanted:
            raise Wrong(wanted)

    with contextlib.suppress(Wrong, Enough, Flaky):  # flaky: a problem that is not there every time
        check()


def play_all(pool: Executor, jobs: int, seed: int, only: str | None, results: Results, place: Place) -> list[Future]:
    """Jobs that play rounds, each kind in turn, until the results say that everything is over."""
    harmless = [name for name in COMMANDS if name != "cache"]  # which removes what others use
    kinds = kinds_of([only] if only else harmless, place.inputs)
    numbers = iter(range(10**9))

    def job() -> None:
        while not results.stop(results):
            with results.lock:
                number = next(numbers)
            play(*kinds[number % len(kinds)], f"{seed}, {number}", results, place)

    return [pool.submit(job) for _ in range(jobs)]
