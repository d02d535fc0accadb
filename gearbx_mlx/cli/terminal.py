"""How a command runs in a terminal: text on stdout, everything else on stderr, errors in one line, an exit status."""

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

SHORT_SECONDS = 2.0  # seconds: shorter work writes no line


class ProgressLines(Progress):
    """Writes how far a task is, two seconds after its start and then every ten seconds."""

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


BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended
USER_ERROR = 2
TRACEBACK = "GEARBX_TRACEBACK"
MLX_COMPILES = re.compile(r"\[Compile::eval_cpu\]|^filesystem error: .*/mlx/")  # messages of its compiler on a CPU
COMPILING = "compiling kernels for this CPU"
READING_PROMPT = "reading the prompt"
WAITING = "another process compiles the CPU kernels: this one waits for it"

messages = Console(stderr=True, highlight=False)
on_error: Callable[[str, int], bool] | None = None
"""Called with an error and its exit status in place of showing it; False: show it."""
_waiting: list[Text] | None = None  # what is said in the middle of a text; None: no text has begun


def say(text: Text) -> None:
    """Print a line on stderr; in the middle of a text, at its end."""
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
    """Shows on stderr how far long work is: `with progress_bar() as progress: for x in progress.track(xs): ...`.

    On a terminal it is a bar that vanishes at the end. Elsewhere it is a line such as `layers: 12 of 43`, at most
    every ten seconds, and none for work of under two seconds.

    Args:
        in_bytes: totals are bytes, shown as kB, MB, GB.
        console: where to draw it in the place of stderr.
    """
    console = console or messages
    if _waiting is not None:  # a bar would stand in the middle of a text
        return Progress(console=console, disable=True)
    return bar_of(columns_of(DownloadColumn() if in_bytes else MofNCompleteColumn()), console, in_bytes)


def columns_of(count: ProgressColumn) -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn()


def bar_of(columns: Sequence[ProgressColumn], console: Console, in_bytes: bool) -> Progress:
    """Return a bar on a terminal, and lines elsewhere."""
    if not (console.is_interactive and console.file.isatty()):
        return ProgressLines(console, in_bytes)
    # What a command prints on stdout must stay there: rich would send it to the bar's console.
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


@contextmanager
def counting(text: str, total: int | None, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar of one task; yield what advances it by a number, or by one. total: None where it is
    not known."""
    with progress_bar(in_bytes) as progress:
        yield partial(progress.advance, progress.add_task(text, total=total))


class PromptBar:
    """Shows on stderr how far a prompt is read, and how fast, once that has taken two seconds; then it vanishes.

    It is a context, and its `told` what mlx-lm calls `prompt_progress_callback`. A timer shows the bar, since the first
    part of a prompt may be all that is read for a minute.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console or messages, clock
        self._progress: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "PromptBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def told(self, read: int, tokens: int) -> None:
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
        with self._lock, suppress(LiveError):  # another bar is shown
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
        except OutputLost as lost:
            status = output_lost(lost)
    sys.exit(status or int(errors.lost))


def output_lost(lost: OutputLost) -> int:
    """Return the exit status where stdout is gone; one line on stderr, unless its reader has gone."""
    if lost.closed_pipe:
        return BROKEN_PIPE
    print_error(str(lost), 1)
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
    except SystemExit as ended:  # from argparse, after --help or a flag that it does not know
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
    """Return one line for an error of MLX's compiler on a CPU, which quotes the whole output of g++."""
    folder = os.environ.get("TMPDIR", "/tmp")  # as MLX chooses it
    found = re.findall(r"error: (.+)", error)
    reason = found[-1] if found else " ".join(error.split())[-100:]
    remedy = "make room there, set TMPDIR to another directory, or set MLX_DISABLE_COMPILE=1"
    return f"{folder}: MLX cannot compile a function there ({reason}); {remedy}"


def print_unforeseen(error: Exception) -> None:
    """One line for an unforeseen error, and how to see where it comes from; raises it if that is asked."""
    if os.environ.get(TRACEBACK):
        raise error
    print_error(f"{type(error).__name__}: {one_line(error)} ({TRACEBACK}=1 shows where)", 1)


def show_compiling() -> None:
    """Say on stderr, in a pipe too, that CPU kernels are compiled, how far that is, and how long it took."""
    from ..kernels import cpu  # imports mlx, which --help does not wait for

    cpu.while_compiling = compiling
    cpu.before_waiting = partial(note, WAITING)


@contextmanager
def compiling(files: int, kept: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar for as many files; yield what is called after each. kept: for later commands, too."""
    began = time.monotonic()
    note(f"{COMPILING}: this {'happens once, and ' * kept}may take a minute")
    with counting(COMPILING, files) as advance:
        yield advance
    note(f"compiled in {time.monotonic() - began:.0f} s{', and kept' * kept}")


def spinner(text: str) -> AbstractContextManager:
    """Return a spinner turns on a terminal, and nothing elsewhere."""
    return messages.status(text) if messages.is_terminal and _waiting is None else nullcontext()


def show_encoding() -> None:
    """Let a bar show how far a model's weights are put into format exact: a second for 16 million of them."""
    from ..gears import sources  # imports mlx

    sources.while_encoding = partial(counting, "encoding", in_bytes=True)


def show_keeping() -> None:
    """Say which gears a start keeps for later ones."""
    from ..gears import kept  # imports mlx

    kept.when_keeping = lambda size, folder: note(
        f"gears: {human_bytes(size)} are kept in {folder}, and the next start maps them; --no-cache keeps none"
    )


def color_system() -> str | None:
    """Return how stdout shows colours; None where it shows none."""
    console = Console()
    return None if console.no_color else console.color_system


class TintedText:
    """Writes text on stdout as it is made, each piece in the colour of who wrote it (`writer_of`): a gear or LOOKUP.

    Args:
        gears: names of the ladder's gears, lowest first.
        tinted: on a terminal, or with FORCE_COLOR, unless NO_COLOR is set; False: never.
    """

    def __init__(self, gears: Sequence[str], tinted: bool = True):
        self.styles = {name: Style(color=gear_color(i, len(gears))) for i, name in enumerate(gears)}
        self.styles[LOOKUP] = Style(color=LOOKUP_COLOR)
        system = color_system() if tinted else None
        self.system = COLOR_SYSTEMS[system] if system else None
        self._is_whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep what is said for the end of the text that is written inside, and end its last line."""
        self._is_whole = True
        try:
            yield
        except BaseException:
            with suppress(OutputLost):  # the error that ended the text says more
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        global _waiting
        self._is_whole = False
        if _waiting is None:
            return
        said, _waiting = _waiting, None
        try:
            print(flush=True)
        finally:
            for text in said:
                say(text)

    def write(self, text: str, writer: str) -> None:
        self._begin(text)
        # Not through a console, which would expand the text's tabs and drop its control characters.
        sys.stdout.write(self.tinted(text, writer))
        sys.stdout.flush()

    def _begin(self, text: str) -> None:
        """Let what is said wait from the first letter on."""
        global _waiting
        if text and self._is_whole and _waiting is None:
            _waiting = []

    def tinted(self, text: str, writer: str) -> str:
        return self.styles[writer].render(text, color_system=self.system) if self.system else text


class WrappedText(TintedText):
    """The same, with lines that a terminal shows broken between words. Elsewhere nothing is broken.

    A word comes in pieces, so that it may turn out to be too long only when its beginning stands there already. The
    beginning is then taken back and written again on the next line.
    """

    def __init__(self, gears: Sequence[str]):
        super().__init__(gears)
        self.begin()

    def begin(self) -> None:
        """Begin at the left edge."""
        self._column = 0  # of the line
        self._word = list[tuple[str, str]]()  # letters of its last word, each with who wrote it

    def write(self, text: str, writer: str) -> None:
        if not sys.stdout.isatty():
            super().write(text, writer)
            return
        self._begin(text)
        width = shutil.get_terminal_size().columns - 1  # behind the last column terminals differ in where they are
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
        """Return what begins a new line for a letter, with the beginning of its word; None where it has room."""
        if letter == "\n" or self._column + self._cells(letter) <= width:
            return None
        back = sum(self._cells(part) for part, _ in self._word)
        if letter.isspace() or back >= self._column:  # it stands for the break, or no line has room for this word
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
