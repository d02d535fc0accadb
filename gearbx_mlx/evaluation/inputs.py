"""The inputs that results depend on, for a session that continues only with the same ones."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..loading import DEMO_MODEL, find
from .session import fingerprint


def model_contents(model: str | None) -> str:
    """The fingerprint of a model's files; None: the demo model."""
    directory = find(model or DEMO_MODEL)
    return fingerprint(*(file for pattern in ("*.safetensors", "*.json") for file in directory.glob(pattern)))


def adapter_contents(directory: str | None) -> str | None:
    """The fingerprint of an adapter's files; None: there is no adapter."""
    return None if directory is None else fingerprint(*(file for file in Path(directory).glob("*") if file.is_file()))


def hash_of_tokens(sequences: Sequence[Sequence[int]]) -> str:
    """16 hexadecimal digits of sequences of tokens, such as prompts or the windows of a text."""
    return hashlib.sha256(repr([list(tokens) for tokens in sequences]).encode()).hexdigest()[:16]


def versions() -> dict[str, Any]:
    """The versions of the programs that compute."""
    return {name: version(name.replace("_", "-")) for name in ("gearbx_mlx", "mlx", "mlx_lm")}
