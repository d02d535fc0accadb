"""What must hold for every launch: its result, and how often each byte is touched."""

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats import codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.kernels import bit_planes
from gearbx_mlx.kernels.bit_planes import plane_shifts
from gearbx_mlx.kernels.metal import choose_variant
from gearbx_mlx.kernels.metal_products import OF_GROUPS

from .cases import CODEBOOKS, Case, Problem, codebook_arrays
from .launch import Report

UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}  # half the relative distance of neighbours
SMALLEST = {mx.float16: 2.0**-25, mx.bfloat16: 2.0**-134, mx.float32: 2.0**-150}
CODES = 16  # columns that a lane takes at a time


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def weights(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return what the packed weights stand for, and the sum of the absolute values that a kernel adds up for it.

    Kernels add scale * (code + offset) and - scale * offset, which may cancel each other.
    """
    if case.format in CODEBOOKS:
        return codebook_weights(case, p)
    scales = exact(p.arrays["scales"])[..., None]
    if case.format == "planes":
        weight, size = np.zeros(1), np.zeros(1)
        for words, bias, width, shift in zip(p.planes("w"), p.planes("b"), case.bits, plane_shifts(case.bits)):
            codes = np.array(bit_planes.unpack_mlx_codes(words, width), float).reshape(*scales.shape[:2], -1)
            offset = exact(bias)[..., None]
            weight = weight + (scales * codes + offset) * 2.0**-shift
            size = size + (np.abs(scales) * codes + np.abs(offset)) * 2.0**-shift
        return weight.reshape(case.rows, -1), size.reshape(case.rows, -1)
    if case.format == "rowwise":
        width, offset = case.columns, 2 ** (case.bits - 1)
    else:
        width, offset = scales.shape[1] * groupwise.GROUP_INPUTS, rowwise.CODE_OFFSET[4]
    codes = rowwise.unpack_symmetric_codes(p.arrays["w0"], case.bits, width)
    grouped = np.array(codes).astype(np.float64).reshape(*scales.shape[:-1], -1)
    weight, size = scales * grouped, np.abs(scales) * (grouped + 2 * offset)
    return weight.reshape(case.rows, -1)[:, : case.columns], size.reshape(case.rows, -1)[:, : case.columns]


def codebook_weights(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The same for outliers: a kernel adds what the code below one stands for, subtracts it, and adds the outlier."""
    arrays = codebook_arrays(case, p)
    weight = exact(codebook.decode(arrays, case.bits, case.columns))
    coded = exact(codebook.look_up(arrays, case.bits, case.columns))
    outlying = outlier_mask(case, p)
    size = np.abs(coded)
    if case.format == "codebook-library":  # scale * entry + mid-point, which may cancel each other
        middle = np.abs(exact(p.arrays["midpoints"])).repeat(codebook_library.KERNEL_GROUP, axis=1)[:, : case.columns]
        size = size + 2 * middle
    return weight, size + outlying * (size + np.abs(weight))


def outlier_mask(case: Case, p: Problem) -> np.ndarray:
    """(rows, columns) bool."""
    offsets = np.array(p.arrays["outlier_offsets"]).astype(int)
    columns = np.array(p.arrays["outlier_columns"])[: offsets[-1]]
    mask = np.zeros((case.rows, case.columns), bool)
    mask[np.arange(case.rows).repeat(np.diff(offsets)), columns] = True
    return mask


def expected(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the largest allowed error of a float32 sum that is rounded to the type of x.

    The bound is the usual one for a sum: as many roundings as a term goes through, each relative to the sum of the
    absolute values of what is added.
    """
    weight, size = weights(case, p)
    y = exact(p.x) @ weight.T
    terms = np.abs(exact(p.x)) @ size.T
    if p.bias is not None:
        y, terms = y + exact(p.bias), terms + np.abs(exact(p.bias))
    codes = 32 // case.bits if case.format == "codebook" else CODES
    # Steps of a lane, values of a step, lanes, scales and planes; outliers of a lane.
    roundings = case.columns / (32 * codes) + 16 + 5 + 8
    if case.format in CODEBOOKS:
        roundings += case.columns / 32
    return y, roundings * 2.0**-24 * terms + UNIT[case.dtype] * np.abs(y) + SMALLEST[case.dtype]


def expected_reads(case: Case, p: Problem) -> dict[str, np.ndarray]:
    """Return how often each byte has to be read: a packed byte once, unless it is padding after the codes."""
    if case.format in CODEBOOKS:
        return codebook_reads(case, p)
    steps = -(-case.columns // CODES)  # of a row, of 16 columns each

    def once(name: str, bits: int) -> np.ndarray:
        counts = np.zeros((case.rows, p.arrays[name].nbytes // case.rows), int)
        counts[:, : steps * CODES * bits // 8] = 1
        return counts

    widths = case.bits if case.format == "planes" else (case.bits,)
    reads = {f"w{i}": once(f"w{i}", width) for i, width in enumerate(widths)}
    if case.format == "rowwise":
        reads["scales"] = each(p.arrays["scales"], case.vectors)  # at the end, by one lane for each vector
    else:  # once by each lane that has columns of the group
        groups = p.arrays["scales"].shape[1]
        size = case.group_size if case.format == "planes" else groupwise.GROUP_INPUTS
        lanes = np.bincount(np.arange(steps) * CODES // size, minlength=groups)
        reads |= {name: each(array, lanes) for name, array in p.arrays.items() if name not in reads}
    if p.bias is not None:
        reads["bias"] = each(p.bias, case.vectors)
    return reads


def each(array: mx.array, times: np.ndarray | int) -> np.ndarray:
    """The counts of elements, repeated for each of their bytes."""
    return np.repeat(np.broadcast_to(times, array.shape), array.dtype.size)


def codebook_reads(case: Case, p: Problem) -> dict[str, np.ndarray]:
    """The same for codebooks: words once, and again for the code below an outlier, of which V2 has one in a row.

    In a row with outliers, each lane that has one reads that code and its position. Tables are read once by each
    threadgroup that needs them; a group's values are read by each lane with columns of it, and for each outlier.
    """
    row_wise, rows = case.format == "codebook", range(case.rows)
    codes, words = (32 // case.bits, 2) if row_wise else (CODES, case.bits)
    offsets = np.array(p.arrays["outlier_offsets"]).astype(int)
    columns = np.array(p.arrays["outlier_columns"]).astype(int)
    steps = -(-case.columns // codes)
    weight = np.zeros((case.rows, p.arrays["w0"].nbytes // case.rows // 2), int)
    weight[:, : steps * words] = 1
    column_reads = np.zeros(len(columns), int)
    column_reads[: offsets[-1]] = 1
    lanes = np.bincount(np.arange(steps) * CODES // codebook_library.KERNEL_GROUP)
    groups = np.tile(lanes, (case.rows, 1))
    for row in rows:
        found = columns[offsets[row] : offsets[row + 1]]
        if row_wise and len(found):  # the first code, by each lane that has an outlier
            found = np.full(min(len(found), 32), found[0])
            column_reads[offsets[row]] += len(found)
        for column in found:
            place = column % codes * case.bits
            if row_wise and case.bits == 5:
                place = column % codes // 3 * 16 + column % 3 * 5
            at = column // codes * words + place // 16
            weight[row, at : at + (2 if place % 16 + case.bits > 16 else 1)] += 1
            if not row_wise:
                groups[row, column // codebook_library.KERNEL_GROUP] += 1
    begins = np.bincount(np.concatenate([rows, np.arange(case.rows) + 1]), minlength=case.rows + 1) * 32
    variant = choose_variant(case.bits, case.vectors, case.variant)
    threadgroups = -(-case.rows // (variant.simd_groups * variant.rows))
    reads = {
        "w0": weight.repeat(2),
        "codebook": each(p.arrays["codebook"], 1 if row_wise else threadgroups),
        "outliers": each(p.arrays["outliers"], np.arange(len(columns)) < offsets[-1]),
        "outlier_columns": each(p.arrays["outlier_columns"], column_reads),
        "outlier_offsets": each(p.arrays["outlier_offsets"], begins),
    }
    reads |= {name: each(p.arrays[name], groups) for name in OF_GROUPS if name in p.arrays}
    if p.bias is not None:
        reads["bias"] = each(p.bias, case.vectors)
    return reads


def fault(case: Case, p: Problem, report: Report) -> str:
    """Return what is wrong with a launch; "" if nothing is."""
    return value_fault(report, *expected(case, p)) or access_fault(report, expected_reads(case, p))


def value_fault(report: Report, y: np.ndarray, bound: np.ndarray) -> str:
    """Return what is wrong with a result that may be so far from y; "" if nothing is."""
    if report.error:
        return report.error
    off = np.nan_to_num(np.abs(report.out[0] - y) / bound, nan=np.inf)
    return "" if (off <= 1).all() else f"result is {off.max():.3g} times the rounding bound off"


def access_fault(report: Report, reads: dict[str, np.ndarray]) -> str:
    """Return what is wrong where bytes are read more or less often than wanted, or outputs not written once; or ""."""
    if not (report.writes["out"] == 1).all():
        return "outputs are not written exactly once"
    for name, wanted in reads.items():
        counts = report.reads[name]  # small buffers are padded, and the padding must not be read
        if not (counts[: wanted.size] == wanted.ravel()).all() or counts[wanted.size :].any():
            return f"bytes of {name} are not read exactly as often as they should be"
    return ""
