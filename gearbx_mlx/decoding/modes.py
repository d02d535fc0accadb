"""The modes. One more is a file with a subclass of `Mode`, and a line here; nothing is imported before it is used."""

import pkgutil
from typing import TYPE_CHECKING

from ..errors import GearbxError

if TYPE_CHECKING:
    from .mode import Mode

MODES = {
    "route": "gearbx_mlx.decoding.route:Route",
    "kickdown": "gearbx_mlx.decoding.kickdown:Kickdown",
    "lossless": "gearbx_mlx.decoding.lossless:Lossless",
    "pair": "gearbx_mlx.decoding.pair:Pair",
    "static": "gearbx_mlx.decoding.route:Static",
    "telemetry-only": "gearbx_mlx.decoding.route:TelemetryOnly",
}


def mode_class(name: str) -> "type[Mode]":
    """The class of a mode. Raises GearbxError for a name that is not in `MODES`."""
    if name not in MODES:
        raise GearbxError(f"mode '{name}' does not exist; choose from {', '.join(MODES)}")
    return pkgutil.resolve_name(MODES[name])
