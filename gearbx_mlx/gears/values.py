"""Types of the values in files of gears, for msgspec; type checkers see plain numbers and text."""

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from .ladder import WIDTHS
from .names import DTYPES, GROUP_SIZES

Length = Annotated[int, Meta(ge=1, le=2**53)]
Shape = Annotated[tuple[Length, ...], Meta(min_length=2, max_length=3)]  # (O, I) of a matrix, (E, O, I) of experts
FileName = Annotated[str, Meta(pattern=r"^[\w-][\w.-]*\.safetensors\Z")]  # inside the directory, and not hidden
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

if TYPE_CHECKING:
    Width = int
    GroupSize = int
    DtypeName = str
else:
    Width, GroupSize, DtypeName = Literal[WIDTHS], Literal[GROUP_SIZES], Literal[DTYPES]
