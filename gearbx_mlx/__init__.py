"""An automatic transmission for language models on MLX."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .errors import GearbxError, GearbxWarning

if TYPE_CHECKING:
    from .decoding.governor import Governor
    from .decoding.kickdown import GearedModel
    from .decoding.lossless import LosslessModel
    from .decoding.paired_model import PairedModel
    from .decoding.response import GearResponse
    from .decoding.stream import generate, stream_generate
    from .gears.gearbox import Gearbox
    from .gears.ladder import Gear, Ladder
    from .gears.observer import Observer
    from .loading import load, load_small
    from .routing.entropy import entropy_bits
    from .routing.gates import ThresholdGate
    from .routing.monitor import Monitor

try:
    __version__ = version("gearbx-mlx")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

# Imported when first used: mlx-lm takes seconds, which whoever wants one small function need not wait for.
_HOME = {
    "Gearbox": ".gears.gearbox",
    "Observer": ".gears.observer",
    "Ladder": ".gears.ladder",
    "Gear": ".gears.ladder",
    "GearResponse": ".decoding.response",
    "PairedModel": ".decoding.paired_model",
    "Governor": ".decoding.governor",
    "GearedModel": ".decoding.kickdown",
    "LosslessModel": ".decoding.lossless",
    "ThresholdGate": ".routing.gates",
    "Monitor": ".routing.monitor",
    "entropy_bits": ".routing.entropy",
    "load": ".loading",
    "load_small": ".loading",
    "stream_generate": ".decoding.stream",
    "generate": ".decoding.stream",
}
__all__ = [
    "Gear",
    "GearResponse",
    "Gearbox",
    "GearedModel",
    "GearbxError",
    "GearbxWarning",
    "Governor",
    "Ladder",
    "LosslessModel",
    "Monitor",
    "Observer",
    "PairedModel",
    "ThresholdGate",
    "entropy_bits",
    "generate",
    "load",
    "load_small",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
