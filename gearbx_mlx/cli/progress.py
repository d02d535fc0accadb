"""The progress of long work on stderr: a bar on a terminal, a line now and then in a file or a log."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from .sizes import human_bytes

SHORT = 2.0  # seconds: shorter work writes no line
BETWEEN_LINES = 10.0  # seconds


def bar(console: Console, in_bytes: bool = False) -> Progress:
    """A bar on a terminal, which vanishes at the end; elsewhere lines such as `layers: 12 of 43`.

    Args:
        console: where to draw.
        in_bytes: totals are bytes; show them as kB, MB, GB.
    """
    if not (console.is_interactive and console.file.isatty()):
        return ProgressLines(console, in_bytes)
    count: ProgressColumn = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    # What a command prints on stdout must stay there: rich would send it to the bar's console.
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


class ProgressLines(Progress):
    """Writes how far a task is, two seconds after its start and then every ten seconds."""

    def __init__(self, console: Console, in_bytes: bool, clock: Callable[[], float] = time.monotonic):
        super().__init__(console=console, auto_refresh=False, disable=True)
        self.clock, self.count = clock, human_bytes if in_bytes else "{:.0f}".format
        self.next_line = clock() + SHORT

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self.write_line(self._tasks[task_id])

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.write_line(self._tasks[task_id])

    def write_line(self, task: Task) -> None:
        if self.clock() < self.next_line:
            return
        self.next_line = self.clock() + BETWEEN_LINES
        total = "" if task.total is None else f" of {self.count(task.total)}"
        self.console.print(Text(f"{task.description}: {self.count(task.completed)}{total}"), soft_wrap=True)
