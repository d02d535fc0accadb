"""Metal launches for learned codebooks (XFP 3.3, 3.4).

A threadgroup copies the codebooks that it needs into its memory as float32: those of its rows, or the whole library.
"""

import functools
from collections.abc import Mapping

import mlx.core as mx

from ..errors import GearbxError
from .metal import DTYPES, Launch, Prepared, choose_variant, options, places_of_few
from .metal_formats import named
from .metal_products import Spec, prepare, threads
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
            GROUP_ARRAYS="",
            ROW_WORDS="row_words",
            SIGN_BITS=0,
            BITS=bits,
            PLACE="((i) / 3 * 16 + (i) % 3 * 5)" if bits == 5 else f"((i) * {bits})",
            ENTRIES=2**bits,
            ALL_TABLES="rows",
            FIRST_TABLE="(threadgroup_number * SIMD_GROUPS * ROWS)",
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
            GROUP_ARRAYS=" ".join(f"DO({name}, rows * groups)" for name in OF_GROUPS),
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
    rows, width, row_words = _sizes_of_codebook(x, arrays, bits)
    return prepare(x, codebook_layout(bits), inputs_of(arrays), rows, width, row_words, bias, variant)


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
    rows, width, row_words = _sizes_of_library(x, arrays, bits)
    return prepare(x, library_layout(bits), inputs_of(arrays), rows, width, row_words, bias, variant)


def experts_launch(
    x: mx.array, arrays: Mapping[str, mx.array], bits: int, indices: mx.array, variant: str | None = None
) -> Launch | None:
    """The launch for the product of each vector with its expert's matrix; (..., 1, O).

    A product has the bits that it has with the expert's matrix alone.

    Args:
        x: (..., 1, I), a vector for each of the indices, or for all those that differ in the last dimension.
        arrays: as of `codebook_launch`, or, with a `library`, of `library_launch`, with a leading dimension E.
        indices: (...), below E, which nothing checks.

    Returns:
        None for vectors and indices that are broadcast in another way.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    together = pairs_of_a_vector(x, indices)
    if together is None or x.dtype not in DTYPES:
        return None
    library = "library" in arrays
    sizes = (_sizes_of_library if library else _sizes_of_codebook)(x, arrays, bits, arrays["weight"].shape[:1])
    rows, width, _ = sizes
    layout = (library_layout if library else codebook_layout)(bits)
    chosen = choose_variant(bits, width, 1, x.dtype, variant)
    staged = width if chosen.name == "threadgroup" else 0
    spec = Spec(layout, 1, chosen, False, x.dtype, width % layout.codes != 0, staged, experts=True)
    all_threads, threadgroup = threads(chosen, rows)
    how = options(all_threads * indices.size, threadgroup, (*indices.shape, 1, rows), x.dtype)
    inputs = (x, *inputs_of(arrays), indices)
    numbers = mx.array([*sizes, together, arrays["outliers"].shape[-1]], mx.int32)
    return Launch(Prepared(spec, how, (numbers,), places_of_few(inputs)), inputs)


def pairs_of_a_vector(x: mx.array, indices: mx.array) -> int | None:
    """How many neighbouring indices have the same of the vectors x (..., 1, I); None if they do not lie like that."""
    if x.ndim < 3 or x.shape[-2] != 1 or indices.size == 0:
        return None
    if x.shape[:-2] == indices.shape:
        return 1
    return indices.shape[-1] if x.shape[:-2] == (*indices.shape[:-1], 1) else None


def _sizes_of_codebook(
    x: mx.array, arrays: Mapping[str, mx.array], bits: int, experts: tuple[int, ...] = ()
) -> tuple[int, int, int]:
    """Rows, columns and words of 16 bits from row to row. Raises GearbxError for arrays that do not fit each other."""
    if bits not in ROW_CODES:
        raise GearbxError(f"codebooks of {bits} bits are none of 2 to 6")
    width, rows = x.shape[-1] if x.ndim else 0, arrays["weight"].shape[-2]
    words = -(-width // ROW_CODES[bits]) * 2
    wanted = {
        "weight": (mx.uint16, (rows, words)) if bits == 5 else (mx.uint32, (rows, words // 2)),
        "codebook": (mx.float16, (rows, 2**bits)),
    }
    _check(arrays, wanted, rows, experts)
    return rows, width, words


def _sizes_of_library(
    x: mx.array, arrays: Mapping[str, mx.array], bits: int, experts: tuple[int, ...] = ()
) -> tuple[int, int, int]:
    """The same for a library."""
    if bits not in LIBRARY_BITS:
        raise GearbxError(f"libraries of {bits} bits are none of 2, 3, 4")
    width, rows = x.shape[-1] if x.ndim else 0, arrays["weight"].shape[-2]
    groups = -(-width // GROUP)
    wanted = {
        "weight": (mx.uint32, (rows, groups * GROUP // 32 * bits)),
        "library": (mx.float16, (LIBRARY, 2**bits)),
    } | {name: (dtype, (rows, groups)) for name, dtype in OF_GROUPS.items()}
    _check(arrays, wanted, rows, experts)
    return rows, width, groups * GROUP // 16 * bits


def _check(
    arrays: Mapping[str, mx.array],
    wanted: Mapping[str, tuple[mx.Dtype, tuple[int, ...]]],
    rows: int,
    experts: tuple[int, ...],
) -> None:
    """Raises GearbxError unless arrays have these types and shapes, and the lists of outliers fit each other."""
    count = arrays["outliers"].shape
    if len(count) != 1 + len(experts):
        raise GearbxError(f"outliers of shape {count} are not a list{' for each expert' if experts else ''}")
    of_outliers = {
        "outliers": (mx.float16, count[-1:]),
        "outlier_columns": (mx.uint16, count[-1:]),
        "outlier_offsets": (mx.uint32, (rows + 1,)),
    }
    for name, (dtype, shape) in {**wanted, **of_outliers}.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape != (*experts, *shape):
            raise GearbxError(f"{name} is {array.shape} {array.dtype}, not {(*experts, *shape)} {dtype}")
