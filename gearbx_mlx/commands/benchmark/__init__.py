"""The body of `benchmark`: times kernels, gears and routing on this machine."""

from .command import run

__all__ = ["run"]
