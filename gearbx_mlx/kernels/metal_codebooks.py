"""Metal launches for learned codebooks (XFP 3.3, 3.4).

A threadgroup copies the codebooks that it needs into its memory as float32: those of its rows, or the whole library.
"""

import functools
from collections.abc import Mapping

import mlx.core as mx

from ..errors import GearbxError
from .metal import Launch
from .metal_formats import named
from .metal_products import prepare
from .metal_text import Layout

ROW_CODES = {2: 16, 3: 10, 4: 8, 5: 6, 6: 5}  # bits to codes in two words of 16 bits, with one codebook per row
LIBRARY, GROUP = 32, 128
LIBRARY_BITS = (2, 3, 4)
OUTLIERS = ("outliers", "outlier_columns", "outlier_offsets")
OF_GROUPS = {"entries": mx.uint8, "scales": mx.float16, "midpoints": mx.float16}
INPUTS_OF_CODEBOOK = ("weight", "codebook", *OUTLIERS)
INPUTS_OF_LIBRARY = ("weight", "library", *OUTLIERS, *OF_GROUPS)


@functools.cache
def codebook_layout(bits: int) -> Layout:
    """The layout of codes with one codebook per row."""
    return Layout(
        name=f"codebook_{bits}",
        bits=bits,
        arrays=("w0", "codebook", *OUTLIERS),
        codes=ROW_CODES[bits],
        tables="(SIMD_GROUPS * ROWS)",
        macros=named(
            PLANES="DO(w0, 2, 0)",
            STEP_WORDS=2,
            ROW_WORDS="row_words",
            SIGN_BITS=0,
            BITS=bits,
            PLACE="((i) / 3 * 16 + (i) % 3 * 5)" if bits == 5 else f"((i) * {bits})",
            ENTRIES=2**bits,
            ALL_TABLES="rows",
            FIRST_TABLE="(int(threadgroup_position_in_grid.x) * SIMD_GROUPS * ROWS)",
            TABLE="(table + ((row) - FIRST_TABLE) * ENTRIES)",
            OWN_CODE=0,
            GROUP_SIZE="columns",
            GROUP_SCALE="1.0f",
            GROUP_OFFSET="0.0f",
            ROW_SCALE="1.0f",
        ),
    )


@functools.cache
def library_layout(bits: int) -> Layout:
    """The layout of codes with a library of 32 codebooks."""
    return Layout(
        name=f"library_{bits}",
        bits=bits,
        arrays=("w0", "codebook", *OUTLIERS, *OF_GROUPS),
        tables=LIBRARY,
        macros=named(
            PLANES=f"DO(w0, {bits}, 0)",
            STEP_WORDS=bits,
            ROW_WORDS="row_words",
            SIGN_BITS=0,
            BITS=bits,
            PLACE=f"((i) * {bits})",
            ENTRIES=2**bits,
            ALL_TABLES=LIBRARY,
            FIRST_TABLE=0,
            TABLE=f"(table + entries[group] % {LIBRARY} * ENTRIES)",
            OWN_CODE=1,
            GROUP_SIZE=GROUP,
            GROUP_SCALE="float(scales[group])",
            GROUP_OFFSET="float(midpoints[group])",
            ROW_SCALE="1.0f",
        ),
    )


def inputs_of(arrays: Mapping[str, mx.array]) -> list[mx.array]:
    """The arrays in the order in which a kernel takes them, after the activations."""
    return [arrays[name] for name in (INPUTS_OF_LIBRARY if "library" in arrays else INPUTS_OF_CODEBOOK)]


def codebook_launch(
    x: mx.array, arrays: Mapping[str, mx.array], bits: int, bias: mx.array | None = None, variant: str | None = None
) -> Launch:
    """The launch for x @ W^T + bias over one codebook per row; the product is (..., O).

    Args:
        x, bias, variant: as for `prepare`.
        arrays: from `formats.codebook.encode`: `weight` (O, words), `codebook` (O, 2^bits) float16, and the outliers.
        bits: 2 to 6.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: XFP 3.3, 5.
    """
    if bits not in ROW_CODES:
        raise GearbxError(f"codebooks of {bits} bits are none of 2 to 6")
    weight, width = arrays["weight"], x.shape[-1] if x.ndim else 0
    rows, words = weight.shape[0], -(-width // ROW_CODES[bits]) * 2
    _check(arrays, "weight", mx.uint16 if bits == 5 else mx.uint32, (rows, words if bits == 5 else words // 2))
    _check(arrays, "codebook", mx.float16, (rows, 2**bits))
    _check_outliers(arrays, rows)
    return prepare(x, codebook_layout(bits), inputs_of(arrays), rows, width, words, bias, variant)


def library_launch(
    x: mx.array, arrays: Mapping[str, mx.array], bits: int, bias: mx.array | None = None, variant: str | None = None
) -> Launch:
    """The launch for x @ W^T + bias over a library of 32 codebooks; the product is (..., O).

    Args:
        x, bias, variant: as for `prepare`.
        arrays: from `formats.codebook_library.encode`: `weight` (O, words), `library` (32, 2^bits) float16; `entries`,
            `scales` and `midpoints` (O, I / 128 rounded up); and the outliers.
        bits: 2, 3 or 4.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: XFP 3.4, 5.
    """
    if bits not in LIBRARY_BITS:
        raise GearbxError(f"libraries of {bits} bits are none of 2, 3, 4")
    weight, width = arrays["weight"], x.shape[-1] if x.ndim else 0
    rows, groups = weight.shape[0], -(-width // GROUP)
    _check(arrays, "weight", mx.uint32, (rows, groups * GROUP // 32 * bits))
    _check(arrays, "library", mx.float16, (LIBRARY, 2**bits))
    for name, dtype in OF_GROUPS.items():
        _check(arrays, name, dtype, (rows, groups))
    _check_outliers(arrays, rows)
    return prepare(x, library_layout(bits), inputs_of(arrays), rows, width, groups * GROUP // 16 * bits, bias, variant)


def _check(arrays: Mapping[str, mx.array], name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise GearbxError(f"{name} is {array.shape} {array.dtype}, not {shape} {dtype}")


def _check_outliers(arrays: Mapping[str, mx.array], rows: int) -> None:
    count = arrays["outliers"].shape
    if len(count) != 1:
        raise GearbxError(f"outliers of shape {count} are not a list")
    _check(arrays, "outliers", mx.float16, count)
    _check(arrays, "outlier_columns", mx.uint16, count)
    _check(arrays, "outlier_offsets", mx.uint32, (rows + 1,))
