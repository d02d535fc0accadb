"""Versions of MLX and mlx-lm with which the assumptions of this package are tested."""

import functools
import warnings
from importlib import metadata

from ..errors import GearbxWarning

TESTED_VERSIONS = {"mlx": "0.32", "mlx-lm": "0.32"}
OFF = "blocks as one operation, some fused operations and latent attention over several tokens"

_warned: set[str] = set()


@functools.cache
def installed_version() -> dict[str, str]:
    """Return the installed versions, by the names of TESTED."""
    return {name: metadata.version(name) for name in TESTED_VERSIONS}


def untested() -> str:
    """Return a message about the first untested version, with the remedy; "" if all versions are tested."""
    for name, version in installed_version().items():
        tested = TESTED_VERSIONS[name]
        if version.split(".")[:2] != tested.split("."):
            return f"{name} is {version}, and gearbx-mlx is tested with {tested}; pip install '{name}=={tested}.*'"
    return ""


def is_tested() -> bool:
    """Return True if code that relies on tested versions may be used."""
    return not untested()


def program_versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {name: metadata.version(name.replace("_", "-")) for name in ("gearbx_mlx", "mlx", "mlx_lm")}


def warn_if_untested() -> None:
    """Warn once of parts that are off with the installed versions."""
    found = untested()
    if found and found not in _warned:
        _warned.add(found)
        warnings.warn(f"{OFF} are off: {found}", GearbxWarning, stacklevel=2)
