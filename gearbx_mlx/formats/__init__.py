"""How one weight matrix is stored. A new format is one file here and one line in FORMATS."""

from ..errors import GearbxError
from .affine import Affine
from .base import Format
from .planes import NestedPlanes

FORMATS: dict[str, Format] = {f.name: f for f in (NestedPlanes(), Affine())}
DEFAULT_FORMAT = "planes"


def get_format(name: str) -> Format:
    """Raises GearbxError for a format that does not exist."""
    try:
        return FORMATS[name]
    except KeyError:
        raise GearbxError(f"format '{name}' does not exist; choose from {', '.join(FORMATS)}") from None
