"""An automatic transmission for language models on MLX.

`__init__.pyi` names the exports, once. Each is imported when it is first used: mlx-lm takes seconds to import, and
`--help` should not wait for it. EAGER_IMPORT=1 imports all of them at once.
"""

import os.path
import signal
import sys

program = os.path.basename("".join(sys.argv[:1])).split(".")[0]
if program in ("-m", "gearbx_mlx") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # A command starts. Until it runs there is nothing to finish, and Ctrl-C ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from importlib.metadata import PackageNotFoundError, version  # noqa: E402 (its import takes time as well)

import lazy_loader  # noqa: E402

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
