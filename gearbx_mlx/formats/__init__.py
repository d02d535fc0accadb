"""How one weight matrix is stored. A new format is one file here and one line in FORMATS.

Importing this module loads neither mlx nor numpy: a format's own module is imported when the format is used.
"""

import copy
import functools
import pkgutil
from typing import TYPE_CHECKING

from ..errors import GearbxError
from .codebook_options import CodebookOptions, split_name

if TYPE_CHECKING:
    from .base import Format

FORMATS = {  # name to module and class
    "planes": "gearbx_mlx.formats.planes:NestedPlanes",
    "affine": "gearbx_mlx.formats.planes:Affine",
    "exact": "gearbx_mlx.formats.exact:Exact",
    "rowwise": "gearbx_mlx.formats.rowwise:Rowwise",
    "groupwise": "gearbx_mlx.formats.groupwise:Groupwise",
    "codebook": "gearbx_mlx.formats.codebook:Codebook",
    "codebook-library": "gearbx_mlx.formats.codebook_library:CodebookLibrary",
}
DEFAULT_FORMAT = "planes"
RECONSTRUCTED = ("rowwise", "groupwise", "codebook", "codebook-library")  # whose weights MLX cannot multiply packed
CODEBOOKS = ("codebook", "codebook-library")  # their names may have choices: codebook_options.py
OF_MLX = ("planes", "exact", "affine")  # whose lowest gear is what mlx-lm quantizes to


def get_format(name: "str | Format") -> "Format":
    """The format with this name; a format itself is returned as it is. Raises GearbxError for an unknown name."""
    return _load_format(name) if isinstance(name, str) else name


@functools.cache
def _load_format(name: str) -> "Format":
    base, text = split_name(name)
    if base not in FORMATS or (text and base not in CODEBOOKS):
        raise GearbxError(f"format '{name}' does not exist; choose from {', '.join(FORMATS)}")
    kind = pkgutil.resolve_name(FORMATS[base])
    return kind(options=CodebookOptions.parse(text)) if text else kind()


def with_cache(name: str) -> "Format":
    """One of RECONSTRUCTED whose layers keep what they unpacked until their gear is left (GEARBX 7.1)."""
    format = copy.copy(get_format(name))
    format.cache = True  # type: ignore[attr-defined]
    return format


def has_codebooks(name: str | None) -> bool:
    """Whether a format with this name, which may have choices, stores codebooks."""
    return name is not None and split_name(name)[0] in CODEBOOKS
