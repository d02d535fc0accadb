"""Talk with a model in gears, or with two that take turns."""

from contextlib import ExitStack

import mlx.core as mx

from ..cli import terminal
from ..cli.prompt import check_unicode
from ..cli.signals import Interrupted, caught
from ..errors import GearbxError, OutputLost
from . import ChatSettings
from .commands import COMMANDS, Leave, obey
from .lines import Lines, lines_of
from .models import ChatModel, GearedChat, PairChat
from .session import Session

KEYS = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat"


def run(settings: ChatSettings) -> int:
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
