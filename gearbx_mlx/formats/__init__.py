"""How one weight matrix is stored. A new format is one file here and one line in FORMATS."""

from ..errors import GearbxError
from .affine import Affine
from .base import Format
from .codebook import Codebook
from .codebook_library import CodebookLibrary
from .groupwise import Groupwise
from .planes import NestedPlanes
from .rowwise import Rowwise

FORMATS: dict[str, Format] = {
    f.name: f for f in (NestedPlanes(), Affine(), Rowwise(), Groupwise(), Codebook(), CodebookLibrary())
}
DEFAULT_FORMAT = "planes"


def get_format(name: str | Format) -> Format:
    """A format by its name, or as it is. Raises GearbxError for a format that does not exist."""
    if not isinstance(name, str):
        return name
    try:
        return FORMATS[name]
    except KeyError:
        raise GearbxError(f"format '{name}' does not exist; choose from {', '.join(FORMATS)}") from None
