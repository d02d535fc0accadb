"""Storage formats of a weight matrix. A new format is one file here and one line in FORMATS.

Importing this module loads neither mlx nor numpy: a format's own module is imported when the format is used.

The options of a codebook format (XFP 3.4, 4.1, 4.2) are part of its name, as in "codebook-library:group=64,sigma=2.5".
So checkpoints, manifests and model cards store them with the name. A name without options has XFP's.
"""

import copy
import functools
import math
import pkgutil
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..errors import GearbxError, check_choice, check_range, choose

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
RECONSTRUCTED = ("rowwise", "groupwise", "codebook", "codebook-library")  # MLX cannot multiply their packed weights
CODEBOOKS = ("codebook", "codebook-library")  # their names may have options
GROUPS = (32, 64, 128, 256)  # group sizes of a library of codebooks: whole words of packed codes
SPLIT_CODES = "codes"  # format of quantized models that `convert` splits; users cannot request it
LIKE_MLX = ("planes", "exact", "affine", SPLIT_CODES)  # their lowest gear is what mlx-lm quantizes to


def get_format(name: "str | Format") -> "Format":
    """Return the format with this name, or the format itself. Raises GearbxError for an unknown name."""
    return _load_format(name) if isinstance(name, str) else name


@functools.cache
def _load_format(name: str) -> "Format":
    base, text = split_name(name)
    known = FORMATS | {SPLIT_CODES: "gearbx_mlx.formats.planes:SplitCodes"}
    if base not in known or (text and base not in CODEBOOKS):
        raise GearbxError(f"format '{name}' does not exist; {choose(name, FORMATS)}")
    kind = pkgutil.resolve_name(known[base])
    return kind(options=CodebookOptions.parse(text)) if text else kind()


def with_cache(name: str) -> "Format":
    """Return a format of RECONSTRUCTED whose layers keep unpacked weights until their gear is left (GEARBX 7.1)."""
    format = copy.copy(get_format(name))
    format.cache = True  # type: ignore[attr-defined]
    return format


def has_codebooks(name: str | None) -> bool:
    """Return True if the format of this name, with or without options, stores codebooks."""
    return name is not None and split_name(name)[0] in CODEBOOKS


def option(default: float, least: float, most: float, *choices: int) -> Any:
    return field(default=default, metadata={"range": (least, most), "choices": choices})


@dataclass(frozen=True)
class CodebookOptions:
    """Options of a codebook format. The defaults are XFP's.

    sigma: minimum distance of outliers from the mean, in standard deviations of the matrix.
    cap: the largest share of a matrix's weights that can be outliers; 0: no outliers.
    rounds: of Lloyd's iteration.
    library: codebooks of a matrix; group: weights that share one, with a scale and a mid-point. Both are only for
        format codebook-library.

    Raises:
        GearbxError: a value outside of its range.
    """

    sigma: float = option(3.0, 1, 100)
    cap: float = option(0.02, 0, 0.5)
    rounds: int = option(20, 1, 1000)
    library: int = option(32, 1, 256)  # a group stores its codebook's index in a byte
    group: int = option(128, min(GROUPS), max(GROUPS), *GROUPS)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices, shown = getattr(self, item.name), item.metadata["choices"], f"{item.name} of codebooks"
            if choices:
                check_choice(shown, value, choices)
            check_range(shown, value, *item.metadata["range"])

    def __str__(self) -> str:
        """Return the differences from the defaults: "group=64,sigma=2.5"."""
        chosen = sorted(name for name, value in vars(self).items() if value != getattr(CodebookOptions, name))
        return ",".join(f"{name}={getattr(self, name):g}" for name in chosen)

    @property
    def gaussian_share(self) -> float:
        """The share of outliers among weights of a normal distribution, to four places."""
        return min(self.cap, round(math.erfc(self.sigma / math.sqrt(2)), 4))

    @classmethod
    def parse(cls, text: str) -> "CodebookOptions":
        """Return the inverse of `str`. Raises GearbxError for other text."""
        kinds = {item.name: item.type for item in fields(cls)}
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds or name in found:
                raise GearbxError(f"codebooks have no option '{part}' in '{text}'; {choose(name, kinds)}")
            try:
                found[name] = int(value) if kinds[name] is int else float(value)
            except ValueError:
                raise GearbxError(f"{name} of codebooks: must be a number, got '{value}'; use a number") from None
        return cls(**found)  # type: ignore[arg-type]


def split_name(name: str) -> tuple[str, str]:
    """Return the name of a format without its options, and the options' text, possibly empty."""
    base, _, text = name.partition(":")
    return base, text


def name_with(base: str, options: CodebookOptions) -> str:
    """Return the name of a format with its options."""
    return f"{base}:{options}" if str(options) else base
