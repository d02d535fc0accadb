"""What the commands write on stderr: progress, tables, errors."""

import io

import pytest
from rich.console import Console

from gearbx_mlx.cli import progress as progress_module
from gearbx_mlx.cli.progress import ProgressLines


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log(width: int = 80) -> Console:
    """A console on a file, as where stderr is redirected."""
    return Console(file=io.StringIO(), width=width)


class TestProgress:
    def lines(self, clock: Clock, seconds: float, items: int, in_bytes: bool = False) -> list[str]:
        console = log()
        with ProgressLines(console, in_bytes, clock) as progress:
            for _ in progress.track(range(items), description="layers"):
                clock.now += seconds
        return console.file.getvalue().splitlines()

    def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten(self, clock):
        assert self.lines(clock, 1.0, 25) == ["layers: 2 of 25", "layers: 12 of 25", "layers: 22 of 25"]

    def test_a_log_gets_nothing_from_short_work(self, clock):
        assert self.lines(clock, 0.1, 19) == []

    def test_bytes_are_written_as_bytes(self, clock):
        console = log()
        with ProgressLines(console, True, clock) as progress:
            task = progress.add_task("converting", total=4e9)
            clock.now = 3
            progress.advance(task, 1.5e6)
        assert console.file.getvalue() == "converting: 1.5 MB of 4 GB\n"

    def test_updates_count_and_a_task_may_have_no_total(self, clock):
        console = log()
        with ProgressLines(console, False, clock) as progress:
            task = progress.add_task("tokens", total=None)
            clock.now = 5
            progress.update(task, completed=7)
        assert console.file.getvalue() == "tokens: 7\n"

    def test_a_terminal_gets_a_bar_that_vanishes(self):
        class Tty(io.StringIO):
            def isatty(self) -> bool:
                return True

        console = Console(file=Tty(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
        with progress_module.bar(console) as progress:
            for _ in progress.track(range(3), description="layers"):
                pass
        written = console.file.getvalue()
        assert "layers" in written
        assert "3/3" in written
        assert written.endswith("\x1b[2K")  # the line is erased

    @pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
    def test_a_file_gets_no_bar(self, environment):
        console = Console(file=io.StringIO(), _environ=environment)
        with progress_module.bar(console) as progress:
            for _ in progress.track(range(3)):
                pass
        assert console.file.getvalue() == ""
