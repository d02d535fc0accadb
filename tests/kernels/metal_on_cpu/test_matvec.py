"""metal/matvec.metal for every format, as MLX generates it, run on the CPU: results, every byte read and written."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.kernels.metal import VARIANTS

from .cases import Case, problem, run
from .checks import fault

pytestmark = pytest.mark.clang

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
AFFINE = [(bits,) for bits in (2, 3, 4, 5, 6, 8)]
STACKS = [(4, 4), (3, 5), (2, 2, 4), (4, 1, 1, 2), (3, 1, 4), (2, 1), (1, 7)]
TABLES = [*(("codebook", bits) for bits in range(2, 7)), *(("codebook-library", bits) for bits in (2, 3, 4))]
WITHOUT_GROUPS = [("rowwise", 8), ("rowwise", 6), ("rowwise", 4), ("rowwise", 2), ("groupwise", 4)]  # any width


def cases():
    """Every format and width with every variant and type, while shapes, groups, vectors and biases take turns."""
    shapes = itertools.cycle([(13, 96), (1, 32), (8, 512), (21, 544), (17, 1056), (5, 64), (33, 160)])
    groups = itertools.cycle([32, 64, 128, 32, 64])
    vectors = itertools.cycle([1, 1, 2, 1, 3, 1, 8, 1, 4])
    for widths, variant, dtype in itertools.product(AFFINE + STACKS, VARIANTS, DTYPES):
        (rows, columns), group_size, count = next(shapes), next(groups), next(vectors)
        columns = -(-columns // group_size) * group_size
        yield Case(widths, rows, columns, group_size, count, dtype, variant, bias=(rows + count) % 2 == 0)
    ragged = itertools.cycle([(13, 96), (1, 21), (8, 512), (21, 530), (17, 1), (5, 49), (33, 175)])
    for (format, bits), variant, dtype in itertools.product(WITHOUT_GROUPS, VARIANTS, DTYPES):
        (rows, columns), count = next(ragged), next(vectors)
        bias = (rows + count) % 2 == 0
        yield Case(bits, rows, columns, vectors=count, dtype=dtype, variant=variant, bias=bias, format=format)
    dtypes = itertools.cycle(DTYPES)
    for i, ((format, bits), variant) in enumerate(itertools.product(TABLES, VARIANTS)):
        (rows, columns), count, dtype = next(ragged), next(vectors), next(dtypes)
        if i % len(VARIANTS) == len(VARIANTS) - 1:
            next(dtypes)  # so that a variant does not always meet the same type
        yield Case(bits, rows, columns, vectors=count, dtype=dtype, variant=variant, bias=i % 2 == 0, format=format)
    for count, variant in itertools.product((*range(1, 9), 16), VARIANTS):
        yield Case((4, 4), 11, 640, 64, count, mx.bfloat16, variant, bias=True)
        yield Case(6, 11, 533, vectors=count, dtype=mx.float16, variant=variant, bias=True, format="rowwise")


@pytest.mark.some(4)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_pass_reads_packed_bytes_once_and_is_right(case):
    """In codebooks, the code below an outlier is read again: one in a row, or each of them with a library."""
    p = problem(case)
    for order, schedule in ((0, 0), (1, 1), (2, 7)):
        report = run(case, p, order, schedule)
        assert fault(case, p, report) == ""


@pytest.mark.some(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["planes", "rowwise", "groupwise"])
def test_any_row_count(format, variant):
    for rows in range(1, 36):
        bits = (4,) if format == "planes" else 4
        case = Case(bits, rows, 64, variant=variant, bias=True, format=format)
        p = problem(case, seed=rows)
        assert fault(case, p, run(case, p)) == "", rows


@pytest.mark.some(3)
@pytest.mark.parametrize(("format", "bits"), WITHOUT_GROUPS)
@pytest.mark.parametrize("variant", ["registers", "device", "threadgroup"])
def test_any_width_at_all(format, bits, variant):
    """Every remainder of a row's 16 bytes, and of the 512 columns of a step; one vector and more."""
    many = [(columns, 1 + columns % 2) for columns in (*range(1, 70), 509, 511, 512, 513, 517, 533, 1000, 1025)]
    staged = (1, 1), (17, 2), (21, 1), (37, 3), (531, 1), (6143, 1)
    for columns, vectors in staged if variant == "threadgroup" else many:
        case = Case(bits, 3, columns, vectors=vectors, variant=variant, format=format)
        p = problem(case, seed=columns)
        assert fault(case, p, run(case, p)) == "", columns


def activation_reads(variant: str) -> tuple[int, int]:
    """Bytes of x read from device memory, and of threadgroup memory used, for 16 rows of 1024 float16 columns."""
    case = Case((4,), 16, 1024, variant=variant)
    report = run(case, problem(case))
    return int(report.reads["x"].sum()), report.threadgroup_bytes


def test_variants_differ_in_activation_reads():
    vector = 1024 * 2
    assert activation_reads("registers") == (4 * vector, 0)  # each of 4 SIMD groups, once for its 4 rows
    assert activation_reads("threadgroup") == (vector, vector)  # the threadgroup, once
    reads, memory = activation_reads("device")
    assert reads >= 8 * vector  # each of 8 SIMD groups, for each of its rows unless a compiler merges them
    assert memory == 0


@pytest.mark.parametrize("case", [Case((4,), 9, 64, vectors=3), Case(6, 9, 61, vectors=3, format="rowwise")], ids=str)
def test_strided_activations_are_read_right(case):
    p = problem(case)
    p.x = mx.random.normal((case.columns, 3)).astype(case.dtype).T
    assert fault(case, p, run(case, p)) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_reaches_its_row_only(value):
    for case in (Case((4, 4), 9, 128), Case(8, 9, 128, format="rowwise"), Case(4, 9, 128, format="groupwise")):
        p = problem(case)
        scales = p.arrays["scales"]
        fifth = (mx.arange(9) == 4).reshape(9, *[1] * (scales.ndim - 1))
        p.arrays["scales"] = mx.where(fifth, mx.array(value, scales.dtype), scales)
        y = run(case, p).out[0]
        assert not np.isfinite(y[0, 4])
        assert np.isfinite(np.delete(y, 4)).all()


def test_vector_after_ragged_one_does_not_affect_it():
    """The memory after a vector holds the next one."""
    for format, bits in WITHOUT_GROUPS:
        case = Case(bits, 4, 21, vectors=2, format=format)
        p = problem(case)
        p.x = mx.where(mx.arange(2)[:, None] == 1, mx.array(float("nan"), case.dtype), p.x)
        y = run(case, p).out[0]
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()
