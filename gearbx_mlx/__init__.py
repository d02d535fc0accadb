"""An automatic transmission for language models on MLX.

`__init__.pyi` lists the exports. Each is imported at first use, because mlx-lm takes seconds to import and `--help`
should respond at once. EAGER_IMPORT=1 imports all of them at once.
"""

import os
import signal
import sys


def _is_command() -> bool:
    """Return whether Python was started for a command of this package, by its script or by -m."""
    name, *rest = sys.argv or [""]
    started = sys.orig_argv[-1 - len(rest)] if name == "-m" else os.path.basename(name).replace("-", "_")
    return started.partition(".")[0] == __name__


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of imports

from importlib.metadata import PackageNotFoundError, version  # noqa: E402

import lazy_loader  # noqa: E402

from .compat import import_within_limit  # noqa: E402

import_within_limit()

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
