"""An automatic transmission for language models on MLX."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .errors import GearbxError, GearbxWarning

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

# Imported when first used: MLX and mlx-lm take seconds, which `--help` need not wait for.
_HOME = {
    "Gearbox": ".gears.gearbox",
    "Observer": ".gears.observer",
    "Ladder": ".gears.ladder",
    "Gear": ".gears.ladder",
    "GearResponse": ".decoding.response",
    "ThresholdGate": ".routing.gates",
    "Monitor": ".routing.monitor",
    "entropy_bits": ".routing.entropy",
    "load": ".loading",
    "stream_generate": ".decoding.stream",
    "generate": ".decoding.stream",
}
__all__ = ["GearbxError", "GearbxWarning", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
