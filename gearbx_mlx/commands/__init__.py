"""The bodies of the commands, and how one starts.

A command's flags are parsed before its body is imported: the body needs mlx-lm, whose import takes seconds, and
`--help` or a mistyped flag need not wait for it. Signals are handled while the body runs and not before, since an
interrupted import prints a traceback of its own.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..cli import signals, terminal
from ..cli.device import choose_device
from ..cli.together import together


def command(name: str) -> Callable[[], None]:
    """The `main` of a command: `cli.parsers.NAME.parse` makes settings of its flags, `commands.NAME.run` takes them."""

    def run() -> int | None:
        settings = import_module(f"gearbx_mlx.cli.parsers.{name}").parse()
        choose_device(settings)  # before the body imports mlx-lm, which keeps the device that it finds
        body = import_module(f"{__name__}.{name}")
        with import_module("gearbx_mlx.kernels.device").wired_memory():
            return signals.run_to_end(lambda: body.run(settings))

    return lambda: terminal.run(lambda: together(name, run))


def lazily(name: str, home: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: the function `name` of the module `home`, imported when it is first asked for.

    The function of a command has the name of the command's module. As the module's attribute it stays
    `gearbx_mlx.NAME` when that module is imported as well.
    """

    def find(wanted: str) -> Any:
        if wanted != name:
            raise AttributeError(f"module 'gearbx_mlx.{name}' has no attribute '{wanted}'")
        return getattr(import_module(home), name)

    return find
