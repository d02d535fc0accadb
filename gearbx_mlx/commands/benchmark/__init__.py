"""Time kernels, gears and routing on this machine."""

from .command import main, run

__all__ = ["main", "run"]
