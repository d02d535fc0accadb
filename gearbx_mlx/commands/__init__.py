"""The bodies of the commands, and how one starts.

A command's flags are parsed before its body is imported: the body needs mlx-lm, whose import takes seconds, and
`--help` or a mistyped flag need not wait for it. Signals are handled while the body runs and not before, since an
interrupted import prints a traceback of its own.
"""

from collections.abc import Callable
from importlib import import_module

from ..cli import signals, terminal


def command(name: str) -> Callable[[], None]:
    """The `main` of a command: `cli.parsers.NAME.parse` makes settings of its flags, `commands.NAME.run` takes them."""

    def run() -> int | None:
        settings = import_module(f"gearbx_mlx.cli.parsers.{name}").parse()
        body = import_module(f"{__name__}.{name}")
        return signals.run_to_end(lambda: body.run(settings))

    return lambda: terminal.run(run)
