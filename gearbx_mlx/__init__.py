"""An automatic transmission for language models on MLX.

`__init__.pyi` lists the exports. Each is imported at first use, because mlx-lm takes seconds to import and `--help`
should respond at once. EAGER_IMPORT=1 imports all of them at once.
"""

import os
import platform
import signal
import sys
from importlib.util import find_spec


def _is_command() -> bool:
    """Return whether Python was started for a command of this package, by its script or by -m."""
    name, *rest = sys.argv or [""]
    started = os.path.basename(name).replace("-", "_")
    if name == "-m":
        started = sys.orig_argv[-1 - len(rest)] if hasattr(sys, "orig_argv") else __name__  # Python 3.10 added it
    return started.partition(".")[0] == __name__


def _unfit() -> str:
    """Return the reason for which MLX cannot run in this Python, with a remedy; "" if it can.

    This file and this function run on Python 3.9, which comes with macOS.
    """
    remedy = "use uvx --python 3.12 (docs/mac.md), or Python from python.org"
    if sys.version_info < (3, 10):  # noqa: UP036
        return f"Python: must be 3.10 or later, got {platform.python_version()}; {remedy}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return f"Python: must be for Apple silicon, got {platform.machine()} (Rosetta, or an Intel Mac); {remedy}"
    version = platform.mac_ver()[0]
    if sys.platform == "darwin" and int(version.partition(".")[0]) < 14:
        return f"macOS: must be 14 or later, as MLX requires, got {version}; update macOS"
    if find_spec("mlx") is None:
        return f"mlx: not installed for {sys.executable}; use pip install mlx mlx-lm"
    return ""


if _unfit():
    if _is_command():
        sys.stderr.write(f"error: {_unfit()}\n")
        sys.exit(2)
    raise ImportError(_unfit())

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
