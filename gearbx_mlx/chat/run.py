"""Talk with a model in gears, or with two that take turns: what is typed is a message, or a command with a slash."""

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..cli import terminal
from ..cli.parser import nearest
from ..cli.prompt import check_unicode
from ..cli.signals import Interrupted, caught
from ..compat.templates import prepare
from ..errors import GearbxError, OutputLost
from ..files.writing import check_writable, write_text
from . import ChatSettings
from .lines import FILES, Lines, Words, check_open, lines_of
from .models import ChatModel, GearedChat, PairChat
from .session import Session

KEYS = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat"


def run(settings: ChatSettings) -> int:
    check_open()  # before a model is loaded, which takes long
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    with ExitStack() as stack:
        model = open_model(settings, stack)
        words = {name: command.words(model) for name, command in COMMANDS.items()}
        lines = lines_of(words, history=not settings.terminal.no_history)
        ctrl_c = stack.enter_context(caught())
        converse(Session(settings, model, ctrl_c), lines)
    return 0


def open_model(settings: ChatSettings, stack: ExitStack) -> ChatModel:
    """Raises GearbxError as `generate` for the same settings."""
    prepare()
    if settings.mode.small_model is not None:
        return PairChat(settings, settings.mode.small_model)
    return GearedChat(settings, stack)


def converse(session: Session, lines: Lines) -> None:
    """Answer line after line until they end or /exit is typed. A line that cannot be answered does not end the chat."""
    if lines.interactive:
        terminal.note(f"mode {session.model.mode}; {KEYS}")
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
    """Run a command or answer a message; an empty line does nothing.

    Raises:
        GearbxError: as `obey` and `Session.answer`.
        Leave: the chat is over.
        OutputLost: the output is closed, so a further answer could not be read.
    """
    check_unicode(line, "this line")
    try:
        if line.strip() and not obey(session, line):
            session.answer(line)
    except (GearbxError, Leave, OutputLost):
        raise
    except Exception as error:  # it ends what was asked for, and the conversation stays
        terminal.print_unforeseen(error)


# What begins with a slash.

AUTO = "auto"
SHORT = {"q": "/exit", "r": "/reset", "h": "/help"}  # mlx_lm.chat's


class Leave(Exception):
    """The chat is over."""


@dataclass(frozen=True)
class Command:
    """takes: shows what stands after the name. words: what Tab offers there, for a model."""

    takes: str
    purpose: str
    run: Callable[[Session, str], None]
    words: Callable[[ChatModel], Words] = lambda model: ()


def obey(session: Session, line: str) -> bool:
    """Whether a line is a command, which was then run.

    Raises:
        GearbxError: no such command, or one that cannot be run as it is typed.
    """
    line = SHORT.get(line, line)
    if not line.startswith("/"):
        return False
    name, argument = (*line.split(maxsplit=1), "")[:2]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"{near} is near" if near else "/help lists them"
        raise GearbxError(f"{terminal.escaped(name)}: no such command; {hint}, and a space in front makes it a message")
    COMMANDS[name].run(session, argument.strip())
    return True


def gear(session: Session, argument: str) -> None:
    model = session.model
    if not argument:
        raise GearbxError(f"/gear needs a gear; choose from {AUTO}, {', '.join(model.gears)}")
    model.hold(None if argument == AUTO else argument)
    terminal.note(f"mode {model.mode}" if argument == AUTO else f"every token in gear {terminal.escaped(argument)}")


def mode(session: Session, argument: str) -> None:
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise GearbxError(f"/mode: {error}; close the quotation") from error
    if words:
        session.model.change(words[0], words[1:])
    terminal.note(f"mode {session.model.mode}{session.model.missing}")


def reset(session: Session, argument: str) -> None:
    session.reset()
    terminal.note("a new conversation begins")


def system(session: Session, argument: str) -> None:
    session.conversation.instruct(argument or None)
    terminal.note("the system prompt has changed" if argument else "there is no system prompt now")


def save(session: Session, argument: str) -> None:
    if not argument:
        raise GearbxError("/save needs a file name that ends in .md, .jsonl or .safetensors")
    path = place_of(argument)
    messages = session.conversation.messages
    texts = {
        ".md": "\n".join(f"## {said['role']}\n\n{said['content']}\n" for said in messages),
        ".jsonl": "".join(json.dumps(said, ensure_ascii=False) + "\n" for said in messages),
    }
    if path.suffix not in (*texts, ".safetensors"):
        raise GearbxError(f"{path}: what is it to be? end the name in .md, .jsonl or .safetensors (the KV cache)")
    check_writable(path)
    if path.suffix in texts:
        write_text(path, texts[path.suffix])
    elif not session.cache.tokens:
        raise GearbxError(f"{path}: the KV cache is empty; say something first")
    else:
        session.save_cache(path)
    terminal.note(f"saved in {terminal.escaped(str(path))}")


def place_of(name: str) -> Path:
    """The path that a user typed, `~` understood. Raises GearbxError for the home of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise GearbxError(f"{name}: there is no such home directory; write the path in full") from error


def show_help(session: Session, argument: str) -> None:
    rows = [(f"{name} {command.takes}", command.purpose) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    for usage, purpose in rows:
        terminal.note(f"{usage:{width}}  {purpose}")


def leave(session: Session, argument: str) -> None:
    raise Leave


COMMANDS = {
    "/gear": Command("NAME|auto", "stay in one gear; auto: back to the mode", gear, lambda m: (AUTO, *m.gears)),
    "/mode": Command("NAME [FLAGS]", "change the mode, with its flags as for generate", mode, lambda m: m.modes),
    "/system": Command("[TEXT]", "change the system prompt; without text, remove it", system),
    "/reset": Command("", "begin a new conversation (r)", reset),
    "/save": Command("FILE", "write it as .md or .jsonl, or the KV cache as .safetensors", save, lambda m: FILES),
    "/help": Command("", "show this (h)", show_help),
    "/exit": Command("", "end the chat, as Ctrl-D does (q)", leave),
}
