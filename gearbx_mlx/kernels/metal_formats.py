"""Metal launches for planes, per-channel and groupwise codes.

Each one checks its arrays first: with wrong ones a kernel would read beyond an array, or give wrong numbers.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx

from ..errors import GearbxError
from .metal import Launch
from .metal_products import prepare
from .metal_text import Layout
from .reference import plane_shifts

GROUP_SIZES = (32, 64, 128)  # of planes
ROWWISE_OFFSET = {8: 128, 6: 32, 4: 8, 2: 2}  # codes of 8 bits are stored signed, and read as unsigned plus an offset
GROUPWISE_BITS, GROUPWISE_SIZE, GROUPWISE_OFFSET = 4, 32, 8
ALIGNMENT = 16  # bytes; of a row


def named(**macros: object) -> tuple[tuple[str, object], ...]:
    """Macros of metal/matvec.metal, as names and values; a name includes the parameter, if the macro has one."""
    parameters = {
        "PLANES": "(DO)",
        "ROW_WORDS": "(WIDTH)",
        "ROW_SCALE": "(row)",
        "PLACE": "(i)",
        "TABLE": "(row, group)",
        "GROUP_ARRAYS": "(DO)",
    }
    return tuple((name + parameters.get(name, ""), value) for name, value in macros.items())


@functools.cache
def planes_layout(widths: tuple[int, ...], group_size: int) -> Layout:
    """The layout of bit planes."""
    shifts = plane_shifts(widths)
    planes = range(len(widths))
    return Layout(
        name=f"planes_{'_'.join(map(str, widths))}_g{group_size}",
        bits=sum(widths),
        arrays=(*(f"w{i}" for i in planes), "scales", *(f"b{i}" for i in planes)),
        macros=named(
            PLANES=" ".join(f"DO(w{i}, {widths[i]}, {shifts[i]})" for i in planes),
            ROW_WORDS="(row_words * WIDTH)",
            SIGN_BITS=0,
            GROUP_SIZE=group_size,
            GROUP_SCALE="float(scales[group])",
            GROUP_OFFSET="(" + " + ".join(f"float(b{i}[group]) * {2.0 ** -shifts[i]}f" for i in planes) + ")",
            ROW_SCALE="1.0f",
        ),
    )


@functools.cache
def rowwise_layout(bits: int) -> Layout:
    """The layout of per-channel codes."""
    return Layout(
        name=f"rowwise_{bits}",
        bits=bits,
        arrays=("w0", "scales"),
        macros=named(
            PLANES=f"DO(w0, {bits}, 0)",
            ROW_WORDS="row_words",
            SIGN_BITS="0x8080" if bits == 8 else 0,
            GROUP_SIZE="columns",
            GROUP_SCALE="1.0f",
            GROUP_OFFSET=f"-{ROWWISE_OFFSET[bits]}.0f",
            ROW_SCALE="float(scales[row])",
        ),
    )


@functools.cache
def groupwise_layout() -> Layout:
    """The layout of groupwise codes."""
    return Layout(
        name="groupwise",
        bits=GROUPWISE_BITS,
        arrays=("w0", "scales"),
        macros=named(
            PLANES=f"DO(w0, {GROUPWISE_BITS}, 0)",
            ROW_WORDS="row_words",
            SIGN_BITS=0,
            GROUP_SIZE=GROUPWISE_SIZE,
            GROUP_SCALE="float(scales[group])",
            GROUP_OFFSET=f"(-{GROUPWISE_OFFSET}.0f * scale)",
            ROW_SCALE="1.0f",
        ),
    )


def planes_launch(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> Launch:
    """The launch for x @ W^T + bias over a prefix of bit planes, all in one pass; the product is (..., O).

    A single plane is an affine weight of MLX.

    Args:
        x, bias, variant: as for `prepare`.
        weights: per plane, (O, I * width / 32) uint32 as `mx.quantize` packs them, most significant plane first.
        scales: (O, I / group_size), of the first plane; the others are powers of two below it.
        biases: per plane, (O, I / group_size).
        widths: bits of each plane, 8 at most together.
        group_size: 32, 64 or 128.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: GEARBX 8.1, 8.2; MLX's qmv_fast for the shape of `registers`.
    """
    if group_size not in GROUP_SIZES:
        raise GearbxError(f"group size {group_size} is none of 32, 64, 128")
    if not widths or min(widths) < 1 or sum(widths) > 8:
        raise GearbxError(f"planes of {'+'.join(map(str, widths))} bits are not 1 to 8 bits together")
    if scales.ndim != 2 or len(weights) != len(widths) or len(biases) != len(widths):
        raise GearbxError(f"{len(widths)} planes need as many weights and biases, and scales of two dimensions")
    rows, columns = scales.shape[0], scales.shape[1] * group_size
    for i, width in enumerate(widths):
        if weights[i].shape != (rows, columns * width // 32) or weights[i].dtype != mx.uint32:
            raise GearbxError(
                f"plane {i} is {weights[i].shape} {weights[i].dtype}, not {rows} rows of {width}-bit codes"
            )
        if biases[i].shape != scales.shape:
            raise GearbxError(f"biases of plane {i} are {biases[i].shape}, scales {scales.shape}")
    layout = planes_layout(tuple(widths), group_size)
    return prepare(x, layout, [*weights, scales, *biases], rows, columns, columns // 16, bias, variant)


def rowwise_launch(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bits: int,
    width: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> Launch:
    """The launch for x @ W^T + bias over per-channel codes; the product is (..., O).

    Args:
        x, bias, variant: as for `prepare`.
        weight: (O, bytes) from `formats.rowwise.pack_symmetric_codes`: int8 for 8 bits, else uint8.
        scales: (O,).
        bits: 8, 6, 4 or 2.
        width: codes of a row without padding.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: GEARBX 5.2, 8.1, 8.2.
    """
    if bits not in ROWWISE_OFFSET:
        raise GearbxError(f"per-channel codes of {bits} bits are none of 8, 6, 4, 2")
    _check_rows(weight, mx.int8 if bits == 8 else mx.uint8, bits, width)
    rows = weight.shape[0]
    if scales.shape != (rows,):
        raise GearbxError(f"scales of shape {scales.shape} do not fit {rows} rows")
    return prepare(x, rowwise_layout(bits), [weight, scales], rows, width, weight.shape[1] // 2, bias, variant)


def groupwise_launch(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    width: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> Launch:
    """The launch for x @ W^T + bias over groupwise codes; the product is (..., O).

    Args:
        x, bias, variant: as for `prepare`.
        weight: (O, G * 16) uint8 as `formats.groupwise` packs it, G = width / 32 rounded up.
        scales: (O, G).
        width: codes of a row without padding.

    Raises:
        GearbxError: the arguments do not fit each other.

    Source: AION 3.2; GEARBX 8.1 for the variants.
    """
    _check_rows(weight, mx.uint8, GROUPWISE_BITS, width)
    rows, groups = weight.shape[0], -(-width // GROUPWISE_SIZE)
    if scales.shape != (rows, groups):
        raise GearbxError(f"scales of shape {scales.shape} do not fit {rows} rows of {groups} groups")
    return prepare(x, groupwise_layout(), [weight, scales], rows, width, weight.shape[1] // 2, bias, variant)


def _check_rows(weight: mx.array, dtype: mx.Dtype, bits: int, width: int) -> None:
    """Raise GearbxError unless rows are aligned, and have room for `width` codes and little padding."""
    fits = weight.ndim == 2 and weight.dtype == dtype and weight.shape[1] % ALIGNMENT == 0
    if not (fits and width > 0 and 0 <= weight.shape[1] * 8 - width * bits < 8 * 2 * ALIGNMENT):
        raise GearbxError(f"weights {weight.shape} {weight.dtype} are not rows of {width} {bits}-bit codes")
