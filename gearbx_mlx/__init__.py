"""An automatic transmission for language models on MLX.

`__init__.pyi` names the exports, once. Each is imported when it is first used: mlx-lm takes seconds to import, and
`--help` should not wait for it. EAGER_IMPORT=1 imports all of them at once.
"""

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
