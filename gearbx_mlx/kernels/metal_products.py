"""Metal launches for matrix-vector products over packed and dense weights.

All packed formats except exact (`metal_exact.py`) share the source `metal/matvec.metal`, which the macros of a
`WeightLayout` specialize. A launch over codebooks (XFP 3.3, 3.4) copies them into threadgroup memory as float32: those
of its rows, or the whole library. Dense weights have a separate source, because the results of MLX's dense matmul
depend on the number of rows (metal/README.md).

Each launch first validates its arrays: with wrong arrays, a kernel would read out of bounds or give wrong results.
"""

import functools
from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..errors import GearbxError
from . import DENSE, GROUP_SIZES
from .bit_planes import Planes, middle_of, plane_shifts
from .metal import (
    MAX_VECTORS,
    METAL_DTYPES,
    Launch,
    Spec,
    Variant,
    WeightLayout,
    check_arrays,
    choose_variant,
    launch,
    takes,
)

DENSE_COLUMNS = 8  # columns of a dense weight that a lane reads at a time
DENSE_SIMD_GROUPS = 2  # per threadgroup

SYMMETRIC_BITS = 8, 6, 4, 2  # 8-bit codes are stored signed
GROUPWISE_SIZE = 32
ROW_ALIGNMENT = 16  # bytes

MAX_ROW_BITS = 6  # of codes with one codebook per row, of which two 16-bit words have 32 // bits
LIBRARY_SIZE, LIBRARY_GROUP = 32, 128
OUTLIERS = ("outliers", "outlier_columns", "outlier_offsets")
OF_GROUPS = {"entries": mx.uint8, "scales": mx.float16, "midpoints": mx.float16}


def prepare_product(
    x: mx.array,
    layout: WeightLayout,
    arrays: Sequence[mx.array],
    rows: int,
    columns: int,
    row_words: int,
    bias: mx.array | None = None,
    variant: str | None = None,
    indices: mx.array | None = None,
    most_outliers: int | None = None,
) -> Launch:
    """Return the launch for x W^T + bias, with float32 sums and one rounding to the type of x.

    Args:
        x: (..., columns) float16, bfloat16 or float32; 1 to 16 vectors; weights are read once for all. For experts
            (..., 1, columns): a vector per index, or one for all indices that differ in the last dimension.
        layout: of the weights. arrays: its buffers, with validated shapes.
        rows, columns: of W. row_words: 16-bit words between rows; for planes, words per bit.
        bias: (rows,), or None; None for experts.
        variant: `registers`, `threadgroup` or `device`; None for the default of `choose_variant`.
        indices: (...) of experts, below their number (not checked). The arrays then have experts as first
            dimension, and the result (..., 1, rows) is bit-identical to that with the expert's matrix.
        most_outliers: length of an expert's lists of outliers; None for layouts without outliers.

    Raises:
        GearbxError: activations, indices or bias do not fit the weights.
    """
    if indices is None:
        check_product(x, rows, columns, bias)
    elif bias is not None:
        raise GearbxError("experts: no output bias is supported; omit it, and add it to the results")
    elif not takes_experts(x, indices) or x.shape[-1] != columns:
        raise GearbxError(
            f"experts: activations must be vectors (1, {columns}) of float16, bfloat16 or float32, one per index or "
            f"row of indices, got {x.shape} {x.dtype} and indices {indices.shape}"
        )
    vectors = x.size // columns if indices is None else 1
    chosen = choose_variant(layout.bits, vectors, variant)
    staged = vectors * columns if chosen.name == "threadgroup" else 0
    spec = Spec(
        layout, vectors, chosen, bias is not None, x.dtype, columns % layout.codes != 0, staged, indices is not None
    )
    inputs, sizes = [x, *arrays], [rows, columns, row_words]
    if indices is None:
        return launch(spec, [*inputs, *([] if bias is None else [bias])], sizes, (*x.shape[:-1], rows))
    sizes += [pairs_of_a_vector(x, indices) or 0, *([] if most_outliers is None else [most_outliers])]
    return launch(spec, [*inputs, indices], sizes, (*indices.shape, 1, rows), indices.size)


def takes_experts(x: mx.array, indices: mx.array) -> bool:
    """Return whether kernels take activations and indices of experts with these shapes and types."""
    return x.dtype in METAL_DTYPES and pairs_of_a_vector(x, indices) is not None


def pairs_of_a_vector(x: mx.array, indices: mx.array) -> int | None:
    """Return the number of adjacent indices that share a vector of x (..., 1, I); None for other shapes."""
    if x.ndim < 3 or x.shape[-2] != 1 or indices.size == 0:
        return None
    if x.shape[:-2] == indices.shape:
        return 1
    return indices.shape[-1] if x.shape[:-2] == (*indices.shape[:-1], 1) else None


def check_product(x: mx.array, rows: int, columns: int, bias: mx.array | None) -> None:
    """Validate activations and output bias for weights (rows, columns). Raises GearbxError."""
    if x.dtype not in METAL_DTYPES:
        raise GearbxError(f"activations: must be float16, bfloat16 or float32, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != columns:
        raise GearbxError(f"activations: weights have {columns} columns, got shape {x.shape}")
    if not takes(x, columns):
        raise GearbxError(f"activations: must be 1 to {MAX_VECTORS} vectors, got shape {x.shape}")
    if bias is not None and bias.shape != (rows,):
        raise GearbxError(f"output bias: must have {rows} rows, got shape {bias.shape}")


@functools.cache
def planes_layout(widths: tuple[int, ...], group_size: int, biases: int, rest: int) -> WeightLayout:
    """Return the layout of bit planes. biases: number of planes that have biases. rest: as in `Planes`."""
    shifts = plane_shifts(widths)
    planes = range(len(widths))
    offsets = [f"float(b{i}[group]) * {2.0 ** -shifts[i]}f" for i in range(biases)]
    if rest:
        offsets.append(f"float(scales[group]) * {middle_of(rest)}f")
    scale_arrays = "scales", *(f"b{i}" for i in range(biases))
    return WeightLayout(
        name=f"planes_{'_'.join(map(str, widths))}_g{group_size}_b{biases}_r{rest}",
        bits=sum(widths),
        arrays=(*(f"w{i}" for i in planes), *scale_arrays),
        macros=(
            ("PLANES(DO)", " ".join(f"DO(w{i}, {widths[i]}, {shifts[i]})" for i in planes)),
            ("ROW_WORDS(WIDTH)", "(row_words * WIDTH)"),
            ("SIGN_BITS", 0),
            ("GROUP_SIZE", group_size),
            ("GROUP_SCALE", "float(scales[group])"),
            ("GROUP_OFFSET", f"({' + '.join(offsets)})"),
            ("ROW_SCALE(row)", "1.0f"),
            ("SCALE_ARRAYS(DO)", " ".join(f"DO({name}, rows * groups)" for name in scale_arrays)),
        ),
        planes=len(widths),
    )


def planes_launch(
    x: mx.array,
    planes: Planes,
    bias: mx.array | None = None,
    variant: str | None = None,
    indices: mx.array | None = None,
) -> Launch:
    """Return the launch for x @ W^T + bias, (..., O), over a prefix of bit planes in one pass.

    Args:
        x, bias, variant, indices: as for `prepare_product`.
        planes: (O, I), or of experts (E, O, I); at most 8 bits in all, in groups of 32, 64 or 128.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: GEARBX 8.1, 8.2; MLX's qmv_fast for the shape of `registers`.
    """
    weights, scales, biases, widths, group_size, rest = planes
    if group_size not in GROUP_SIZES:
        raise GearbxError(f"group size: must be 32, 64 or 128, got {group_size}")
    if not widths or min(widths) < 1 or sum(widths) > 8:
        raise GearbxError(f"planes: must have 1 to 8 bits in all, got {'+'.join(map(str, widths))} bits")
    count, ndim = len(widths), 2 if indices is None else 3
    if scales.ndim != ndim or len(weights) != count or not 1 <= len(biases) <= count:
        raise GearbxError(
            f"planes: must be {count} weights, 1 to {count} biases, and scales of {ndim} dimensions, got "
            f"{len(weights)}, {len(biases)} and {scales.ndim}"
        )
    *experts, rows, columns = planes.shape
    packed = [(*experts, rows, columns * width // 32) for width in widths]
    check_arrays(
        *((f"plane {i}", weight, mx.uint32, shape) for i, (weight, shape) in enumerate(zip(weights, packed))),
        *((f"biases of plane {i}", each, each.dtype, scales.shape) for i, each in enumerate(biases)),
    )
    layout = planes_layout(tuple(widths), group_size, len(biases), rest)
    return prepare_product(x, layout, planes.arrays, rows, columns, columns // 16, bias, variant, indices)


@functools.cache
def symmetric_layout(bits: int, grouped: bool) -> WeightLayout:
    """Return the layout of symmetric codes with a scale per row, or per group if `grouped`."""
    offset = f"-{2 ** (bits - 1)}.0f"
    return WeightLayout(
        name="groupwise" if grouped else f"rowwise_{bits}",
        bits=bits,
        arrays=("w0", "scales"),
        macros=(
            ("PLANES(DO)", f"DO(w0, {bits}, 0)"),
            ("ROW_WORDS(WIDTH)", "row_words"),
            ("SIGN_BITS", "0x8080" if bits == 8 else 0),
            ("GROUP_SIZE", GROUPWISE_SIZE if grouped else "columns"),
            ("GROUP_SCALE", "float(scales[group])" if grouped else "1.0f"),
            ("GROUP_OFFSET", f"({offset} * scale)" if grouped else offset),
            ("ROW_SCALE(row)", "1.0f" if grouped else "float(scales[row])"),
            ("SCALE_ARRAYS(DO)", "DO(scales, rows * groups)" if grouped else "DO(scales, rows)"),
        ),
    )


def symmetric_launch(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bits: int,
    width: int,
    bias: mx.array | None = None,
    variant: str | None = None,
    indices: mx.array | None = None,
) -> Launch:
    """Return the launch for x @ W^T + bias, (..., O), over symmetric codes.

    Args:
        x, bias, variant, indices: as for `prepare_product`.
        weight: (O, bytes) from `formats.rowwise.pack_symmetric_codes`: int8 for 8 bits, otherwise uint8. For experts,
            it and `scales` have a leading dimension E.
        scales: (O,), per row; or (O, G), per group of 4-bit codes, G = width / 32 rounded up.
        bits: 8, 6, 4 or 2.
        width: number of codes of a row, without padding.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: GEARBX 5.2, 8.1, 8.2; AION 3.2 for groups.
    """
    if bits not in SYMMETRIC_BITS:
        raise GearbxError(f"per-channel codes: must have 8, 6, 4 or 2 bits, got {bits}")
    stored, ndim = mx.int8 if bits == 8 else mx.uint8, 2 if indices is None else 3
    fits = weight.ndim == ndim and weight.dtype == stored and weight.shape[-1] % ROW_ALIGNMENT == 0
    if not (fits and width > 0 and 0 <= weight.shape[-1] * 8 - width * bits < 8 * 2 * ROW_ALIGNMENT):
        raise GearbxError(f"weights: must be rows of {width} {bits}-bit codes, got {weight.shape} {weight.dtype}")
    (rows, row_bytes), groups = weight.shape[-2:], -(-width // GROUPWISE_SIZE)
    grouped = scales.ndim == weight.ndim
    if scales.shape != (*weight.shape[:-1], *([groups] if grouped else [])):
        of_groups = f" of {groups} groups" if grouped else ""
        raise GearbxError(f"scales: must have {rows} rows{of_groups}, got shape {scales.shape}")
    layout = symmetric_layout(bits, grouped)
    return prepare_product(x, layout, [weight, scales], rows, width, row_bytes // 2, bias, variant, indices)


def takes_dense(x: mx.array, weight: mx.array) -> bool:
    """Return whether `dense_launch` takes the number and types of activations (..., I) and a weight (O, I)."""
    return takes(x, x.shape[-1]) and weight.dtype in METAL_DTYPES


def dense_launch(x: mx.array, weight: mx.array) -> Launch:
    """Return the launch for x W^T, (..., O), with float32 sums and one rounding to the type of x.

    Args:
        x: (..., I) float16, bfloat16 or float32; 1 to 16 vectors; the weight is read once for all.
        weight: (O, I), of any of these types.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    if weight.ndim != 2 or weight.dtype not in METAL_DTYPES:
        raise GearbxError(
            f"weights: must be a matrix of float16, bfloat16 or float32, got {weight.shape} {weight.dtype}"
        )
    rows, columns = weight.shape
    check_product(x, rows, columns, None)
    vectors = x.size // columns
    holds_x = vectors <= 4  # registers have room for x; then eight rows share one read of x
    rows_each = 8 if holds_x else 4 if vectors <= 8 else 2  # rows per SIMD group, limited by its registers
    variant = Variant("registers" if holds_x else "device", DENSE_SIMD_GROUPS, rows_each)
    spec = Spec(dense_layout(holds_x), vectors, variant, False, x.dtype, ragged=columns % DENSE_COLUMNS != 0)
    return launch(spec, [x, weight], [rows, columns], (*x.shape[:-1], rows))


@functools.cache
def dense_layout(holds_x: bool) -> WeightLayout:
    """Return the layout of dense weights. holds_x: whether registers hold the activations of all vectors."""
    macros = ("CHUNK", DENSE_COLUMNS), ("HOLDS_X", int(holds_x))
    return WeightLayout("dense", DENSE, ("weight",), macros, text="dense", libraries=("loads",))


@functools.cache
def codebook_layout(bits: int, library: bool) -> WeightLayout:
    """Return the layout of codes with one codebook per row, or with a library of 32 codebooks."""
    place = f"((i) * {bits})"
    if library:
        own = {
            "PLANES(DO)": f"DO(w0, {bits}, 0)",
            "STEP_WORDS": bits,
            "SCALE_ARRAYS(DO)": " ".join(f"DO({name}, rows * groups)" for name in OF_GROUPS),
            "PLACE(i)": place,
            "ALL_TABLES": LIBRARY_SIZE,
            "FIRST_TABLE": 0,
            "TABLE(row, group)": f"(table + entries[group] % {LIBRARY_SIZE} * ENTRIES)",
            "GROUP_SIZE": LIBRARY_GROUP,
            "GROUP_SCALE": "float(scales[group])",
            "GROUP_OFFSET": "float(midpoints[group])",
        }
    else:
        own = {
            "PLANES(DO)": "DO(w0, 2, 0)",
            "STEP_WORDS": 2,
            "SCALE_ARRAYS(DO)": "",
            "PLACE(i)": "((i) / 3 * 16 + (i) % 3 * 5)" if bits == 5 else place,
            "ALL_TABLES": "rows",
            "FIRST_TABLE": "(threadgroup_number * SIMD_GROUPS * ROWS)",
            "TABLE(row, group)": "(table + ((row) - FIRST_TABLE) * ENTRIES)",
            "GROUP_SIZE": "columns",
            "GROUP_SCALE": "1.0f",
            "GROUP_OFFSET": "0.0f",
        }
    own |= {"ROW_WORDS(WIDTH)": "row_words", "SIGN_BITS": 0, "BITS": bits, "ENTRIES": 2**bits, "ROW_SCALE(row)": "1.0f"}
    return WeightLayout(
        name=f"{'library' if library else 'codebook'}_{bits}",
        bits=bits,
        arrays=("w0", "codebook", *OUTLIERS, *(OF_GROUPS if library else ())),
        codes=16 if library else 32 // bits,
        tables=LIBRARY_SIZE if library else "(SIMD_GROUPS * ROWS)",
        macros=(("OWN_CODE", int(library)), *own.items()),
    )


def codebook_inputs(arrays: Mapping[str, mx.array]) -> list[mx.array]:
    """Return the arrays in the order of a kernel's inputs, after the activations."""
    names = ("library", *OUTLIERS, *OF_GROUPS) if "library" in arrays else ("codebook", *OUTLIERS)
    return [arrays[name] for name in ("weight", *names)]


def codebook_launch(
    x: mx.array,
    arrays: Mapping[str, mx.array],
    bits: int,
    bias: mx.array | None = None,
    variant: str | None = None,
    indices: mx.array | None = None,
) -> Launch:
    """Return the launch for x @ W^T + bias, (..., O), over one codebook per row, or a library of 32 codebooks.

    Args:
        x, bias, variant, indices: as for `prepare_product`.
        arrays: from `formats.codebook.encode`: `weight` (O, words), `codebook` (O, 2^bits) float16, and the outliers.
            From `formats.codebook_library.encode`: `weight`, `library` (32, 2^bits) float16; `entries`, `scales` and
            `midpoints` (O, I / 128 rounded up); and the outliers. For experts, all have a leading dimension E.
        bits: 2 to 6; for a library 2, 3 or 4.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: XFP 3.3, 3.4, 5.
    """
    library = "library" in arrays
    most = 4 if library else MAX_ROW_BITS
    if not 2 <= bits <= most:
        raise GearbxError(f"codebook{' library' if library else 's'}: must have 2 to {most} bits, got {bits}")
    columns, rows = x.shape[-1] if x.ndim else 0, arrays["weight"].shape[-2]
    groups = -(-columns // LIBRARY_GROUP)
    row_words = groups * LIBRARY_GROUP // 16 * bits if library else -(-columns // (32 // bits)) * 2
    experts, count = () if indices is None else arrays["weight"].shape[:1], arrays["outliers"].shape
    if len(count) != 1 + len(experts):
        raise GearbxError(f"outliers: must be one list{' per expert' if experts else ''}, got shape {count}")
    halves = bits == 5 and not library
    own = {name: (dtype, (rows, groups)) for name, dtype in OF_GROUPS.items()} if library else {}
    wanted = {
        "weight": (mx.uint16, (rows, row_words)) if halves else (mx.uint32, (rows, row_words // 2)),
        "library" if library else "codebook": (mx.float16, (LIBRARY_SIZE if library else rows, 2**bits)),
        **own,
        "outliers": (mx.float16, count[-1:]),
        "outlier_columns": (mx.uint16, count[-1:]),
        "outlier_offsets": (mx.uint32, (rows + 1,)),
    }
    check_arrays(*((name, arrays[name], dtype, (*experts, *shape)) for name, (dtype, shape) in wanted.items()))
    layout, inputs = codebook_layout(bits, library), codebook_inputs(arrays)
    return prepare_product(x, layout, inputs, rows, columns, row_words, bias, variant, indices, count[-1])
