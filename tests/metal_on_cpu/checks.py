"""What must hold of every launch: its result, and how often each byte is touched."""

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats import groupwise, packing, rowwise
from gearbx_mlx.kernels.metal_formats import ROWWISE_OFFSET
from gearbx_mlx.kernels.reference import plane_shifts

from .cases import Case, Problem
from .launch import Report

UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}  # half the distance of neighbours, relative
SMALLEST = {mx.float16: 2.0**-25, mx.bfloat16: 2.0**-134, mx.float32: 2.0**-150}
CODES = 16  # that a lane takes at a time


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def weights(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """What the packed weights stand for, and the sum of the absolute values that a kernel adds up to get there.

    Kernels add scale * (code + offset) and - scale * offset, which may cancel each other.
    """
    scales = exact(p.arrays["scales"])[..., None]
    if case.format == "planes":
        weight, size = np.zeros(1), np.zeros(1)
        for words, bias, width, shift in zip(p.planes("w"), p.planes("b"), case.bits, plane_shifts(case.bits)):
            codes = np.array(packing.unpack(words, width)).reshape(*scales.shape[:2], -1).astype(np.float64)
            offset = exact(bias)[..., None]
            weight = weight + (scales * codes + offset) * 2.0**-shift
            size = size + (np.abs(scales) * codes + np.abs(offset)) * 2.0**-shift
        return weight.reshape(case.rows, -1), size.reshape(case.rows, -1)
    if case.format == "rowwise":
        codes, offset = rowwise.unpack(p.arrays["w0"], case.bits, case.columns), ROWWISE_OFFSET[case.bits]
    else:
        padded = p.arrays["scales"].shape[1] * groupwise.GROUP
        codes, offset = rowwise.unpack(p.arrays["w0"], case.bits, padded), rowwise.OFFSET[4]
    grouped = np.array(codes).astype(np.float64).reshape(*scales.shape[:-1], -1)
    weight, size = scales * grouped, np.abs(scales) * (grouped + 2 * offset)
    return weight.reshape(case.rows, -1)[:, : case.columns], size.reshape(case.rows, -1)[:, : case.columns]


def expected(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a float32 sum, rounded to the type of x, may be from it.

    The bound is the usual one for a sum: as many roundings as a term goes through, each relative to the sum of the
    absolute values of what is added.
    """
    weight, size = weights(case, p)
    y = exact(p.x) @ weight.T
    terms = np.abs(exact(p.x)) @ size.T
    if p.bias is not None:
        y, terms = y + exact(p.bias), terms + np.abs(exact(p.bias))
    roundings = case.columns / 512 + 16 + 5 + 8  # steps of a lane, values of a step, lanes, scales and planes
    return y, roundings * 2.0**-24 * terms + UNIT[case.dtype] * np.abs(y) + SMALLEST[case.dtype]


def expected_reads(case: Case, p: Problem) -> dict[str, np.ndarray]:
    """How often each byte of a buffer has to be read: a packed one once, where it is not padding beyond the codes."""
    steps = -(-case.columns // CODES)  # of a row, of 16 columns each

    def once(name: str, bits: int) -> np.ndarray:
        counts = np.zeros((case.rows, p.arrays[name].nbytes // case.rows), int)
        counts[:, : steps * CODES * bits // 8] = 1
        return counts

    def each(array: mx.array, times: np.ndarray | int) -> np.ndarray:
        return np.repeat(np.broadcast_to(times, array.shape), array.dtype.size)

    widths = case.bits if case.format == "planes" else (case.bits,)
    reads = {f"w{i}": once(f"w{i}", width) for i, width in enumerate(widths)}
    if case.format == "rowwise":
        reads["scales"] = each(p.arrays["scales"], case.vectors)  # at the end, by one lane for each vector
    else:  # once by each lane that has columns of the group
        groups = p.arrays["scales"].shape[1]
        size = case.group_size if case.format == "planes" else groupwise.GROUP
        lanes = np.bincount(np.arange(steps) * CODES // size, minlength=groups)
        reads |= {name: each(array, lanes) for name, array in p.arrays.items() if name not in reads}
    if p.bias is not None:
        reads["bias"] = each(p.bias, case.vectors)
    return reads


def fault(case: Case, p: Problem, report: Report) -> str:
    """What is wrong with a launch; "" if nothing is."""
    if report.error:
        return report.error
    y, bound = expected(case, p)
    off = np.abs(report.out[0] - y) / bound
    if not (off <= 1).all():
        return f"result is {np.nanmax(off):.3g} times the rounding bound off"
    if not (report.writes["out"] == 1).all():
        return "outputs are not written exactly once"
    for name, wanted in expected_reads(case, p).items():
        counts = report.reads[name]  # small buffers are padded, with what must not be read
        if not (counts[: wanted.size] == wanted.ravel()).all() or counts[wanted.size :].any():
            return f"bytes of {name} are not read exactly as often as they should be"
    return ""
