"""The inputs that results depend on, for a session that continues only with the same ones."""

from importlib.metadata import version
from typing import Any

from ..loading import DEMO_MODEL, find
from .session import fingerprint


def model_contents(model: str | None) -> str:
    """The fingerprint of a model's files; None: the demo model."""
    directory = find(model or DEMO_MODEL)
    return fingerprint(*(file for pattern in ("*.safetensors", "*.json") for file in directory.glob(pattern)))


def versions() -> dict[str, Any]:
    """The versions of the programs that compute."""
    return {name: version(name.replace("_", "-")) for name in ("gearbx_mlx", "mlx")}
