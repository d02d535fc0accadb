"""Terminal output of a command: text on stdout, everything else on stderr, one-line errors, an exit status."""

import atexit
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.errors import LiveError
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.style import Style
from rich.text import Text

from ..errors import GearbxError, GearbxWarning, OutputLost, escaped, one_line
from ..settings import human_bytes
from ..telemetry.trace import LOOKUP, LOOKUP_COLOR, gear_color
from .signals import INTERRUPTED, guarded_streams

PROGRAMS = "gearbx_mlx", "gearbx-mlx"  # prefixes of the names of modules and scripts
SHORT_SECONDS = 2.0  # seconds of work before a line of progress


class ProgressLines(Progress):
    """Progress of a task as lines, two seconds after its start and then every ten seconds."""

    def __init__(self, console: Console, in_bytes: bool, clock: Callable[[], float] = time.monotonic):
        super().__init__(console=console, auto_refresh=False, disable=True)
        self.clock, self.count = clock, human_bytes if in_bytes else "{:.0f}".format
        self.next_line = clock() + SHORT_SECONDS

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self.write_line(self._tasks[task_id])

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.write_line(self._tasks[task_id])

    def write_line(self, task: Task) -> None:
        if self.clock() < self.next_line:
            return
        self.next_line = self.clock() + 10
        total = "" if task.total is None else f" of {self.count(task.total)}"
        self.console.print(Text(f"{task.description}: {self.count(task.completed)}{total}"), soft_wrap=True)


BROKEN_PIPE = 141  # a shell's status for SIGPIPE
USER_ERROR = 2
TRACEBACK = "GEARBX_TRACEBACK"
MLX_COMPILES = re.compile(r"\[Compile::eval_cpu\]|^filesystem error: .*/mlx/")  # messages of its compiler on a CPU
COMPILING = "compiling kernels for this CPU"
READING_PROMPT = "prefill"
WAITING = "waiting for another process that compiles the CPU kernels"

messages = Console(stderr=True, highlight=False)
on_error: Callable[[str, int], bool] | None = None
"""A handler of an error and its exit status; if it returns False, the error is shown."""
_waiting: list[Text] | None = None  # lines that wait for the end of the output; None: no output has started


def say(text: Text) -> None:
    """Print a line on stderr; during output, at its end."""
    if _waiting is None:
        messages.print(text, soft_wrap=True)
    else:
        _waiting.append(text)


def note(text: str) -> None:
    say(Text(text, style="dim"))


def warn(message: object) -> None:
    say(Text(f"warning: {message}", style="yellow"))


def print_error(text: str, status: int = USER_ERROR) -> None:
    if on_error is None or not on_error(text, status):
        show_error(messages, text)


def show_error(console: Console, text: str) -> None:
    console.print(Text(f"error: {escaped(text)}", style="red"), soft_wrap=True)


def progress_bar(in_bytes: bool = False, console: Console | None = None) -> Progress:
    """Return a progress display on stderr: `with progress_bar() as progress: for x in progress.track(xs): ...`.

    On a terminal it is a bar that vanishes at the end. Elsewhere it is a line such as `layers: 12 of 43`, at most
    every ten seconds, and none for work of under two seconds.

    Args:
        in_bytes: totals are bytes, shown as kB, MB, GB.
        console: replaces stderr.
    """
    console = console or messages
    if _waiting is not None:  # a bar would interrupt the output
        return Progress(console=console, disable=True)
    return bar_of(columns_of(DownloadColumn() if in_bytes else MofNCompleteColumn()), console, in_bytes)


def columns_of(count: ProgressColumn) -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn()


def bar_of(columns: Sequence[ProgressColumn], console: Console, in_bytes: bool) -> Progress:
    """Return a bar on a terminal, and lines elsewhere."""
    if not (console.is_interactive and console.file.isatty()):
        return ProgressLines(console, in_bytes)
    # A command's stdout must stay there, but rich would redirect it to the bar's console.
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


@contextmanager
def counting(text: str, total: int | None, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar of one task; yield a function that advances it. total: None if unknown."""
    with progress_bar(in_bytes) as progress:
        yield partial(progress.advance, progress.add_task(text, total=total))


class PromptBar:
    """Progress and speed of prefill on stderr, shown after two seconds, gone at the end.

    It is a context; `update` is mlx-lm's `prompt_progress_callback`. A timer shows the bar, because the first chunk of
    a prompt may take a minute.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console or messages, clock
        self._progress: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "PromptBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def update(self, read: int, tokens: int) -> None:
        if read >= tokens:
            self._end()
        elif self._progress is None:
            self._begin(read, tokens)
        else:
            rate = (read - self._before) / max(self._clock() - self._began, 1e-9)
            remark = f", {rate:.0f} tokens/s" if read > self._before else ""
            self._progress.update(self._task, completed=read, description=READING_PROMPT + remark)

    def _begin(self, read: int, tokens: int) -> None:
        columns = SpinnerColumn(), *columns_of(MofNCompleteColumn())
        self._progress = bar_of(columns, self._console, in_bytes=False)
        self._task = self._progress.add_task(READING_PROMPT, total=tokens, completed=read)
        self._began, self._before = self._clock(), read
        self._timer = threading.Timer(SHORT_SECONDS, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock, suppress(LiveError):  # another bar is active
            if self._progress is not None:
                self._progress.start()
                self._progress.update(self._task)

    def _end(self) -> None:
        if self._progress is None:
            return
        self._timer.cancel()
        with self._lock:
            self._progress.stop()
            self._progress = None


def run(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit, with status 2 and one line for a user's mistake."""
    warnings.showwarning = lambda message, *_: warn(message)
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", GearbxWarning)
    with guarded_streams() as errors:
        try:
            status = status_of(command)
            sys.stdout.flush()
        except OutputLost as error:
            status = output_lost(error)
    leave(status or int(errors.lost))


def leave(status: int) -> NoReturn:
    """Exit with a status. A process of this package skips Python's teardown of modules, to save 0.2 s."""
    main: Any = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "")).name
    if not name.startswith(PROGRAMS):  # a program that called a command continues
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends a process: threads first
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the process was started without one
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status)


def output_lost(error: OutputLost) -> int:
    """Return the exit status without stdout; print one line on stderr, unless a pipe was closed."""
    if error.closed_pipe:
        return BROKEN_PIPE
    print_error(str(error), 1)
    return 1


def status_of(command: Callable[[], int | None]) -> int:
    """Return the exit status of a command; an error is one line on stderr."""
    try:
        return command() or 0
    except GearbxError as error:
        print_error(str(error))
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputLost:
        raise
    except SystemExit as ended:  # by argparse, after --help or an unknown flag
        if isinstance(ended.code, str):
            print_error(ended.code, 1)
            return 1
        return ended.code or 0
    except RuntimeError as error:
        if not MLX_COMPILES.search(str(error)) or os.environ.get(TRACEBACK):
            print_unforeseen(error)
            return 1
        print_error(not_compiled(str(error)))
        return USER_ERROR
    except Exception as error:
        print_unforeseen(error)
        return 1


def not_compiled(error: str) -> str:
    """Return one line for an error of MLX's CPU compiler; the error contains all output of g++."""
    folder = os.environ.get("TMPDIR", "/tmp")  # MLX's choice
    found = re.findall(r"error: (.+)", error)
    reason = found[-1] if found else " ".join(error.split())[-100:]
    remedy = "set TMPDIR to another directory, or MLX_DISABLE_COMPILE=1"
    return f"{folder}: MLX cannot compile a function there ({reason}); {remedy}"


def print_unforeseen(error: Exception) -> None:
    """Print an unexpected error in one line, or raise it with GEARBX_TRACEBACK=1."""
    if os.environ.get(TRACEBACK):
        raise error
    print_error(f"{type(error).__name__}: {one_line(error)} ({TRACEBACK}=1 shows where)", 1)


def show_compiling() -> None:
    """Show compilation of CPU kernels on stderr: start, progress and time."""
    from ..kernels import cpu  # slow: imports mlx

    cpu.while_compiling = compiling
    cpu.before_waiting = partial(note, WAITING)


@contextmanager
def compiling(files: int, kept: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar of files; yield the function to call after each. kept: True if later commands use them."""
    start = time.monotonic()
    note(f"{COMPILING}: {'once, ' * kept}up to a minute")
    with counting(COMPILING, files) as advance:
        yield advance
    note(f"compiled in {time.monotonic() - start:.0f} s{', and kept' * kept}")


def spinner(text: str) -> AbstractContextManager:
    """Return a spinner on a terminal, and an empty context elsewhere."""
    return messages.status(text) if messages.is_terminal and _waiting is None else nullcontext()


def show_encoding() -> None:
    """Show a bar while weights are encoded in format exact, about 16 million per second."""
    from ..gears import sources  # imports mlx

    sources.while_encoding = partial(counting, "encoding", in_bytes=True)


def show_keeping() -> None:
    """Print the size and place of gears that are kept for later starts."""
    from ..gears import kept  # imports mlx

    kept.when_keeping = lambda size, folder: note(
        f"gears: {human_bytes(size)} kept in {folder} for the next start; use --no-cache to keep none"
    )


def color_system() -> str | None:
    """Return the color system of stdout; None without colors."""
    console = Console()
    return None if console.no_color else console.color_system


class TintedText:
    """Generated text on stdout, each piece in the color of its origin (`writer_of`): a gear or LOOKUP.

    Args:
        gears: names of the ladder's gears, lowest first.
        tinted: use colors on a terminal or with FORCE_COLOR, unless NO_COLOR is set.
    """

    def __init__(self, gears: Sequence[str], tinted: bool = True):
        self.styles = {name: Style(color=gear_color(i, len(gears))) for i, name in enumerate(gears)}
        self.styles[LOOKUP] = Style(color=LOOKUP_COLOR)
        system = color_system() if tinted else None
        self.system = COLOR_SYSTEMS[system] if system else None
        self._is_whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold back other lines until the end of the text inside, and end its last line."""
        self._is_whole = True
        try:
            yield
        except BaseException:
            with suppress(OutputLost):  # the first error is more specific
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        global _waiting
        self._is_whole = False
        if _waiting is None:
            return
        lines, _waiting = _waiting, None
        try:
            print(flush=True)
        finally:
            for line in lines:
                say(line)

    def write(self, text: str, writer: str) -> None:
        self._begin(text)
        # A console would expand tabs and drop control characters.
        sys.stdout.write(self.tinted(text, writer))
        sys.stdout.flush()

    def _begin(self, text: str) -> None:
        """Hold back other lines from the first letter on."""
        global _waiting
        if text and self._is_whole and _waiting is None:
            _waiting = []

    def tinted(self, text: str, writer: str) -> str:
        return self.styles[writer].render(text, color_system=self.system) if self.system else text


class WrappedText(TintedText):
    """Colored text with lines wrapped between words on a terminal.

    A word comes in pieces, so its start may be on the screen before it turns out to be too long. The start is then
    erased and written again on the next line.
    """

    def __init__(self, gears: Sequence[str]):
        super().__init__(gears)
        self.begin()

    def begin(self) -> None:
        """Start at the left edge."""
        self._column = 0  # column in the line
        self._word = list[tuple[str, str]]()  # letters of its last word, each with its origin

    def write(self, text: str, writer: str) -> None:
        if not sys.stdout.isatty():
            super().write(text, writer)
            return
        self._begin(text)
        width = shutil.get_terminal_size().columns - 1  # after the last column, terminals differ in the cursor's place
        written = line = ""
        for letter in text:
            moved = self._moved(letter, width)
            if moved is not None:
                written += self.tinted(line, writer) + moved
                line = ""
            if moved is None or not letter.isspace():
                line += letter
                self._count(letter, writer)
        sys.stdout.write(written + self.tinted(line, writer))
        sys.stdout.flush()

    def _moved(self, letter: str, width: int) -> str | None:
        """Return the text that moves a letter and the start of its word to a new line; None if it has room."""
        if letter == "\n" or self._column + self._cells(letter) <= width:
            return None
        back = sum(self._cells(part) for part, _ in self._word)
        if letter.isspace() or back >= self._column:  # the break replaces a space, or the word is longer than a line
            self.begin()
            return "\n"
        self._column = back
        taken_back = f"\x1b[{back}D\x1b[K" if back else ""
        return taken_back + "\n" + "".join(self.tinted(*part) for part in self._word)

    def _cells(self, letter: str) -> int:
        return 8 - self._column % 8 if letter == "\t" else cell_len(letter)

    def _count(self, letter: str, writer: str) -> None:
        if letter == "\n":
            self.begin()
            return
        self._column += self._cells(letter)
        if letter.isspace():
            self._word = []
        else:
            self._word.append((letter, writer))
