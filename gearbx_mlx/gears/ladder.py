"""Gears and ladders: a gear is one precision of the model, a ladder the gears in ascending precision.

The module also has the names and defaults of a gearbox's settings, and the ladder of a KV cache. Its import does not
load MLX, so flags are checked before a model is loaded.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import GearbxError, numbers
from ..formats import has_codebooks
from ..kernels import DENSE

QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)  # the widths that MLX's affine kernels support
WIDTHS = (*QUANTIZED_BITS, DENSE)
SUPPORTED = ", ".join(map(str, WIDTHS))


@dataclass(frozen=True)
class Gear:
    """One precision of all managed layers. bits: of a code; 16 means the original weights."""

    index: int
    name: str
    bits: int

    @property
    def dense(self) -> bool:
        return self.bits == DENSE


class Ladder(Sequence[Gear]):
    """Gears in ascending precision.

    Args:
        bits: ascending, each of 2, 3, 4, 5, 6, 8 or 16.

    Raises:
        GearbxError: no gears, not ascending, or a width that no kernel supports.
    """

    def __init__(self, bits: Sequence[int]):
        shown = ",".join(map(str, bits))
        if not bits:
            raise GearbxError(f"a ladder needs at least one gear; use bits in ascending order, each of {SUPPORTED}")
        for b in bits:
            if b not in WIDTHS:
                raise GearbxError(f"gear of {b} bits in '{shown}' is not supported; choose from {SUPPORTED}")
        if any(a >= b for a, b in itertools.pairwise(bits)):
            raise GearbxError(
                f"gears must ascend, got '{shown}'; did you mean '{','.join(map(str, sorted(set(bits))))}'?"
            )
        inner = ["mid"] if len(bits) == 3 else [f"mid{i}" for i in range(1, len(bits) - 1)]
        names = ["low", *inner, "high"] if len(bits) > 1 else ["high"]
        self.gears = tuple(Gear(i, name, b) for i, (name, b) in enumerate(zip(names, bits)))

    @classmethod
    def parse(cls, text: str) -> "Ladder":
        """Return a ladder from text such as "4,8,16"."""
        return cls(numbers("gears", text, int, "4,8,16"))

    def __getitem__(self, index):
        return self.gears[index]

    def __len__(self) -> int:
        return len(self.gears)

    def __iter__(self) -> Iterator[Gear]:
        return iter(self.gears)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ladder) and self.gears == other.gears

    def __hash__(self) -> int:
        return hash(self.gears)

    def __str__(self) -> str:
        return ",".join(str(g.bits) for g in self.gears)

    @property
    def top(self) -> Gear:
        return self.gears[-1]

    @property
    def quantized_bits(self) -> tuple[int, ...]:
        return tuple(g.bits for g in self.gears if not g.dense)

    def find(self, gear: Gear | str | int) -> Gear:
        """Return the gear with this name or these bits; a gear of the ladder is returned unchanged.

        Raises:
            GearbxError: the ladder does not have it.
        """
        for own in self.gears:
            if gear in (own, own.name, own.bits, str(own.bits)):
                return own
        shown = gear.name if isinstance(gear, Gear) else gear
        raise GearbxError(f"no gear '{shown}' in the ladder {self}; choose from {self.choices}")

    @property
    def choices(self) -> str:
        """Text for messages, with bits and names: 4 (low), 16 (high)."""
        return ", ".join(f"{gear.bits} ({gear.name})" for gear in self.gears)


DEFAULT_LADDER = "4,8,16"
EXACT_FORMAT, EXACT_LADDER = "exact", "4,16"  # format and gears of bfloat16 weights in mode lossless
DRAFT_FORMAT = "affine"  # for GPUs: fast in MLX, and drafts as well as fitted codes (docs/tried.md)
DEFAULT_KERNELS = "auto"
DEFAULT_ACTIVATIONS = "int16"
DEFAULT_GROUP_SIZE = 64
EMBEDDINGS = ("quantize", "keep")  # options for embeddings in a geared checkpoint
DTYPE_NAMES = ("float32", "bfloat16", "float16")
MANAGE = ("all", "attention", "mlp", "everything")
RESIDENCIES = ("resident", "disk", "stream")


def default_ladder(format: str, by_quality: bool = False) -> Ladder:
    """Return the default ladder of a format: codebooks have no 8-bit gear, and quality floors start at 2 bits."""
    if format == EXACT_FORMAT:
        return Ladder.parse(EXACT_LADDER)
    if not has_codebooks(format):
        return Ladder.parse(DEFAULT_LADDER)
    return Ladder((2, 16) if by_quality else (4, 16))


KV_BITS = (4, 8, 16)  # 16: unquantized keys and values


def kv_ladder(bits: str | Sequence[int]) -> tuple[int, ...]:
    """Return a KV cache's ladder, from text such as "4,16" or numbers. Raises GearbxError unless 4, 8, 16 ascend."""
    try:
        ladder = tuple(int(each) for each in (bits.split(",") if isinstance(bits, str) else bits))
    except (TypeError, ValueError):
        ladder = ()
    if not ladder or any(each not in KV_BITS for each in ladder) or list(ladder) != sorted(set(ladder)):
        raise GearbxError(f"--kv-gears: must ascend, of 4, 8 and 16, got {bits_text(bits)}; use for example 4,16")
    return ladder


def bits_text(bits: str | Sequence[int]) -> str:
    """Return the ladder as text for its flag."""
    return bits if isinstance(bits, str) else ",".join(map(str, bits))


def check_kv_gears(
    bits: str | Sequence[int] | None, fixed: int | None, kv_bits: object = None, draft_model: object = None
) -> None:
    """Validate gears of the KV cache, also with mlx-lm's kv_bits and draft_model. Raises GearbxError."""
    if bits is None and fixed is not None:
        raise GearbxError(f"--kv-gear: needs --kv-gears, got only --kv-gear {fixed}; set --kv-gears too")
    if bits is None:
        return
    ladder = kv_ladder(bits)
    if fixed is not None and fixed not in ladder:
        raise GearbxError(f"--kv-gear: must be one of --kv-gears, got {fixed}; choose from {bits_text(ladder)}")
    for flag, given in (("--kv-bits", kv_bits), ("--draft-model", draft_model)):
        if given is not None:
            raise GearbxError(f"--kv-gears: cannot be combined with {flag}; omit one of them")
