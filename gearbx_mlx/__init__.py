"""An automatic transmission for language models on MLX.

`__init__.pyi` names the exports, once. Each is imported when it is first used: mlx-lm takes seconds to import, and
`--help` should not wait for it. EAGER_IMPORT=1 imports all of them at once.
"""

import os
import signal
import sys


def _end_at_once(number: int, frame: object) -> None:
    """Handles a signal that comes before a command has begun: its imports take time, and there is nothing to finish."""
    os._exit(128 + number)


_programs = [os.path.basename(name) for name in sys.argv[:1]]
if _programs == ["-m"]:  # which module is not in sys.argv yet
    _programs = sys.orig_argv
if any(name.partition(".")[0] == "gearbx_mlx" for name in _programs):  # a command starts
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(_number, _end_at_once)

from importlib.metadata import PackageNotFoundError, version  # noqa: E402 (it takes time)

import lazy_loader  # noqa: E402

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
