"""Chat with a model in gears, or with a pair: a typed line is a message, or a command with a slash."""

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cli import terminal
from ..cli.prompt import check_unicode
from ..cli.signals import ENDING, Interrupted, caught
from ..compat.templates import prepare
from ..errors import GearbxError, OutputLost, escaped, nearest
from ..files.user_cache import chat_history
from ..files.writing import check_writable, write_text
from ..routing.gates import AUTO
from . import ChatSettings
from .session import ChatModel, GearedChat, PairChat, Session

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT_SIGN = ">> "
NO_EDITOR = "lines cannot be edited without prompt_toolkit or readline; use pip install prompt_toolkit"
Words = Sequence[str]
FILES: Words = ("FILES",)  # placeholder for the names of files


class PlainLines:
    """Lines without editing, such as a pipe's. `interactive`: True if a person types at a terminal."""

    def __init__(self, interactive: bool):
        self.interactive = interactive

    def read(self) -> str | None:
        """Return the next message, without the end of its line; None after the last one.

        Raises:
            GearbxError: a line that is not text; later lines can be read.
            Interrupted: Ctrl-C was typed.
        """
        if self.interactive:
            print(PROMPT_SIGN, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.buffer.readline()  # as bytes, so that an invalid line does not affect later ones
        except OSError as error:
            raise OSError(f"standard input cannot be read ({error.strerror})") from error
        if not line:
            if self.interactive:
                print(file=sys.stderr)
            return None
        with unicode_errors():
            return line.decode().rstrip("\r\n")


@contextlib.contextmanager
def unicode_errors() -> Iterator[None]:
    """Turn an error of decoding into a GearbxError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise GearbxError(f"this line: must be UTF-8 text, got other bytes ({error.reason}); use UTF-8") from error


class ReadlineLines:
    """Lines with editing and history by Python's readline, if prompt_toolkit is not installed.

    Raises ImportError for a Python without readline. The history is prompt_toolkit's file, in its format.
    """

    interactive = True

    def __init__(self, words: Mapping[str, Words], history: Path | None):
        import readline

        self._readline, self._words, self._history = readline, words, history
        for line in remembered(history):
            readline.add_history(line)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        is_libedit = "libedit" in (readline.__doc__ or "")  # of macOS
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read(self) -> str | None:
        try:
            with as_it_was(), unicode_errors():
                line = input(PROMPT_SIGN)
        except EOFError:
            print(file=sys.stderr)
            return None
        if line and self._history is not None:
            with contextlib.suppress(OSError), self._history.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"\n# {datetime.now()}\n+{line}\n")
        return line

    def _complete(self, prefix: str, number: int) -> str | None:
        """Return the first, second, ... completion of a word, by number; None after the last one."""
        first, space, _ = self._readline.get_line_buffer().partition(" ")
        offered: Iterable[str] = self._words.get(first, ()) if space else self._words
        found = [f"{word} " for word in offered if word.startswith(prefix) and offered is not FILES]
        return found[number] if number < len(found) else None


def remembered(history: Path | None) -> list[str]:
    """Return the lines of a history file of prompt_toolkit, oldest first; of an entry with several lines the first."""
    try:
        entries = "" if history is None else history.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [entry.partition("\n+")[2].split("\n")[0] for entry in entries.split("\n# ")[1:]]


class EditedLines:
    """Lines with editing, history and completion. Raises ImportError without prompt_toolkit."""

    interactive = True

    def __init__(self, words: Mapping[str, Words], history: Path | None):
        self._session = session(words, history)

    def read(self) -> str | None:
        try:
            with as_it_was(), ended_by_signals(self._session) as check:
                return self._session.prompt(pre_run=check)
        except EOFError:
            return None


Lines = PlainLines | EditedLines | ReadlineLines


def lines_of(words: Mapping[str, Words], history: bool) -> Lines:
    """Return the lines of an open standard input.

    words: Tab's completions of a line's first word, and of later words. history: whether to keep lines in a file.
    """
    interactive = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    if interactive:
        file = history_file() if history else None
        with contextlib.suppress(ImportError):
            return EditedLines(words, file)
        if sys.stdout.isatty():  # since readline writes there
            with contextlib.suppress(ImportError):
                return ReadlineLines(words, file)
        terminal.note(NO_EDITOR)
    return PlainLines(interactive)


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Restore the terminal after the context, since a signal may end prompt_toolkit while it cleans up."""
    import termios

    attributes = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # if the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)


@contextlib.contextmanager
def ended_by_signals(session: "PromptSession[str]") -> Iterator[Callable[[], None]]:
    """Let a signal that ends the run first end the typed line; the signal's own handler runs after that.

    The handler's exception could remove a task's step from asyncio's loop, so that it waits forever.

    Yields:
        a function to call once the line can be typed, for an earlier signal.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING if number != signal.SIGINT}  # Ctrl-C is a key
    handlers: dict[int, Any] = {number: handler for number, handler in before.items() if callable(handler)}

    def leave() -> None:
        if received and session.app.future is not None and not session.app.future.done():
            session.app.exit(exception=KeyboardInterrupt)

    def note(number: int, frame: object) -> None:
        received.append(number)
        if session.app.loop is not None:
            session.app.loop.call_soon_threadsafe(leave)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield leave
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            handlers[number](number, None)


def session(words: Mapping[str, Words], history: Path | None) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    class UserHistory(FileHistory):
        """History of typed lines with any characters; a line that cannot be written is skipped."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string.encode(errors="replace").decode())

    class CommandCompleter(Completer):
        """Completion of the first word of a line, and of the words after it."""

        def get_completions(self, document: Document, complete_event: Any) -> Any:
            first, space, rest = document.text_before_cursor.partition(" ")
            if not space:
                yield from matching(first, words) if first.startswith("/") else ()
            elif words.get(first) is FILES:
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), complete_event)
            else:
                yield from matching(rest, words.get(first, ()))

    def matching(prefix: str, offered: Iterable[str]) -> Iterator[Completion]:
        return (Completion(f"{word} ", -len(prefix), word) for word in offered if word.startswith(prefix))

    return PromptSession(
        PROMPT_SIGN,
        history=None if history is None else UserHistory(str(history)),
        completer=CommandCompleter(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,  # other styles reserve empty lines below for a menu
        interrupt_exception=Interrupted,
        output=create_output(always_prefer_tty=True),
    )


def history_file() -> Path | None:
    """Return the user's private history file; None if there cannot be one."""
    try:
        path = chat_history()
    except RuntimeError:
        terminal.note("lines are not kept: this user has no home directory; set XDG_STATE_HOME")
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)
    except OSError as error:
        terminal.note(f"lines are not kept: {path} cannot be written ({error.strerror})")
        return None
    return path


def run(settings: ChatSettings) -> int:
    if sys.stdin is None:  # checked early, since loading the model takes long
        raise GearbxError("standard input: must be open, got a closed one; use a terminal, or a pipe")
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    with ExitStack() as stack:
        model = open_model(settings, stack)
        words = {name: command.words(model) for name, command in CHAT_COMMANDS.items()}
        lines = lines_of(words, history=not settings.terminal.no_history)
        ctrl_c = stack.enter_context(caught())
        converse(Session(settings, model, ctrl_c), lines)
    return 0


def open_model(settings: ChatSettings, stack: ExitStack) -> ChatModel:
    """Open the chat's models. Raises GearbxError as `generate` for the same settings."""
    prepare()
    if settings.mode.small_model is not None:
        return PairChat(settings, settings.mode.small_model)
    return GearedChat(settings, stack)


def converse(session: Session, lines: Lines) -> None:
    """Answer line after line until they end or /exit is typed. An error of one line does not end the chat."""
    if lines.interactive:
        keys = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat"
        terminal.note(f"mode {session.model.mode}; {keys}")
    while True:
        try:
            line = lines.read()
            if line is None:
                return
            take(session, line)
        except GearbxError as error:
            terminal.print_error(str(error))
        except Interrupted:
            if not lines.interactive:
                raise
            terminal.note("Ctrl-D or /exit ends the chat")
        except Leave:
            return


def take(session: Session, line: str) -> None:
    """Run a command or answer a message; an empty line is ignored.

    Raises:
        GearbxError: as `obey` and `Session.answer`.
        Leave: the chat is over.
        OutputLost: the output is closed, so answers cannot be read.
    """
    check_unicode(line, "this line")
    try:
        if line.strip() and not obey(session, line):
            session.answer(line)
    except (GearbxError, Leave, OutputLost):
        raise
    except Exception as error:  # ends the answer, and keeps the conversation
        terminal.print_unforeseen(error)


# Commands with a slash.

SHORT_COMMANDS = {"q": "/exit", "r": "/reset", "h": "/help"}  # as in mlx_lm.chat


class Leave(Exception):
    """The end of the chat."""


@dataclass(frozen=True)
class Command:
    """A command of the chat. takes: usage of its argument. words: Tab's completions of it, for a model."""

    takes: str
    purpose: str
    run: Callable[[Session, str], None]
    words: Callable[[ChatModel], Words] = lambda model: ()


def obey(session: Session, line: str) -> bool:
    """Run a line if it is a command, and return whether it is. Raises GearbxError for one that cannot run."""
    line = SHORT_COMMANDS.get(line, line)
    if not line.startswith("/"):
        return False
    name, argument = (*line.split(maxsplit=1), "")[:2]
    if name not in CHAT_COMMANDS:
        near = nearest(name, CHAT_COMMANDS)
        hint = f"use {near}" if near else "use /help for a list"
        raise GearbxError(f"{escaped(name)}: is not a command; {hint}, or a space in front for a message")
    CHAT_COMMANDS[name].run(session, argument.strip())
    return True


def gear(session: Session, argument: str) -> None:
    model = session.model
    if not argument:
        raise GearbxError(f"/gear: needs a gear; choose from {AUTO}, {', '.join(model.gears)}")
    model.hold(None if argument == AUTO else argument)
    terminal.note(f"mode {model.mode}" if argument == AUTO else f"every token in gear {escaped(argument)}")


def mode(session: Session, argument: str) -> None:
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise GearbxError(f"/mode: {error}; use closed quotation marks") from error
    if words:
        session.model.change(words[0], words[1:])
    terminal.note(f"mode {session.model.mode}{session.model.missing}")


def reset(session: Session, argument: str) -> None:
    session.reset()
    terminal.note("new conversation")


def system(session: Session, argument: str) -> None:
    session.conversation.instruct(argument or None)
    terminal.note("system prompt changed" if argument else "system prompt removed")


def save_chat(session: Session, argument: str) -> None:
    if not argument:
        raise GearbxError("/save: needs a file name; use one with .md, .jsonl or .safetensors")
    try:
        path = Path(argument).expanduser()
    except RuntimeError as error:
        raise GearbxError(f"{argument}: has an unknown home directory; use the full path") from error
    messages = session.conversation.messages
    texts = {
        ".md": "\n".join(f"## {each['role']}\n\n{each['content']}\n" for each in messages),
        ".jsonl": "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in messages),
    }
    if path.suffix not in (*texts, ".safetensors"):
        raise GearbxError(f"{path}: must end in .md, .jsonl or .safetensors (the KV cache); use one of them")
    check_writable(path)
    if path.suffix in texts:
        write_text(path, texts[path.suffix])
    elif not session.cache.tokens:
        raise GearbxError(f"{path}: needs a KV cache with tokens, got an empty one; use it after a message")
    else:
        session.save_cache(path)
    terminal.note(f"saved in {escaped(str(path))}")


def show_help(session: Session, argument: str) -> None:
    rows = [(f"{name} {command.takes}", command.purpose) for name, command in CHAT_COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    for usage, purpose in rows:
        terminal.note(f"{usage:{width}}  {purpose}")


def leave_chat(session: Session, argument: str) -> None:
    raise Leave


CHAT_COMMANDS = {
    "/gear": Command("NAME|auto", "stay in one gear; auto: back to the mode", gear, lambda m: (AUTO, *m.gears)),
    "/mode": Command("NAME [FLAGS]", "change the mode, with its flags as for generate", mode, lambda m: m.modes),
    "/system": Command("[TEXT]", "change the system prompt; without text, remove it", system),
    "/reset": Command("", "start a new conversation (r)", reset),
    "/save": Command("FILE", "write it as .md or .jsonl, or the KV cache as .safetensors", save_chat, lambda m: FILES),
    "/help": Command("", "show this (h)", show_help),
    "/exit": Command("", "end the chat, as Ctrl-D does (q)", leave_chat),
}
