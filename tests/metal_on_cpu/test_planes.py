"""metal/planes.metal, as MLX generates it, run on the CPU: results, every byte read, every byte written."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.kernels.metal import VARIANTS, choose_variant, fits_threadgroup
from gearbx_mlx.kernels.reference import planes_matmul

from .cases import Case, exact, expected, fault, launch, problem, run

pytestmark = pytest.mark.clang

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
AFFINE = [(bits,) for bits in (2, 3, 4, 5, 6, 8)]
STACKS = [(4, 4), (3, 5), (2, 2, 4), (4, 1, 1, 2), (3, 1, 4), (2, 1), (1, 7)]


def cases():
    """Every width or stack with every variant and type; shapes, groups, vectors and biases go round beneath."""
    shapes = itertools.cycle([(13, 96), (1, 32), (8, 512), (21, 544), (17, 1056), (5, 64), (33, 160)])
    groups = itertools.cycle([32, 64, 128, 32, 64])
    vectors = itertools.cycle([1, 1, 2, 1, 3, 1, 8, 1, 4])
    for widths, variant, dtype in itertools.product(AFFINE + STACKS, VARIANTS, DTYPES):
        (rows, columns), group_size, count = next(shapes), next(groups), next(vectors)
        columns = -(-columns // group_size) * group_size
        yield Case(widths, rows, columns, group_size, count, dtype, variant, bias=(rows + count) % 2 == 0)
    for count, variant in itertools.product(range(1, 9), VARIANTS):
        yield Case((4, 4), 11, 640, 64, count, mx.bfloat16, variant, bias=True)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_one_pass_reads_every_packed_byte_once_and_is_right(case):
    p = problem(case)
    for order, schedule in ((0, 0), (1, 1), (2, 7)):
        report = run(case, p, order, schedule)
        assert fault(case, p, report) == ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", range(1, 36))
def test_any_row_count(rows, variant):
    case = Case((4,), rows, 64, variant=variant, bias=True)
    p = problem(case, seed=rows)
    assert fault(case, p, run(case, p)) == ""


@pytest.mark.parametrize("columns", [32, 64, 480, 512, 544, 1024, 2080, 6144])
def test_any_width(columns):
    for variant in VARIANTS:
        case = Case((4, 4), 3, columns, 32, variant=variant)
        p = problem(case, seed=columns)
        assert fault(case, p, run(case, p)) == ""


def test_float64_expectation_is_the_reference():
    """The tests compare with float64; that is what MLX's own kernels compute. They have no 7 bits."""
    for widths in (w for w in AFFINE + STACKS if 7 not in w):
        case = Case(widths, 9, 256, dtype=mx.float32, vectors=2)
        p = problem(case)
        y = exact(planes_matmul(p.x, p.weights, p.scales, p.biases, widths, case.group_size))
        np.testing.assert_allclose(y, expected(case, p)[0], atol=2e-5)


def activation_reads(variant: str) -> tuple[int, int]:
    """Bytes of x read from device memory, and of threadgroup memory used, for 16 rows of 1024 float16 columns."""
    case = Case((4,), 16, 1024, variant=variant)
    report = run(case, problem(case))
    return int(report.reads["x"].sum()), report.threadgroup_bytes


def test_variants_differ_in_where_activations_are_read():
    vector = 1024 * 2
    assert activation_reads("registers") == (4 * vector, 0)  # each of 4 SIMD groups, once for its 4 rows
    assert activation_reads("threadgroup") == (vector, vector)  # the threadgroup, once
    reads, memory = activation_reads("device")
    assert reads >= 8 * vector  # each of 8 SIMD groups, for each of its rows unless a compiler merges them
    assert memory == 0


def test_staged_activations_fill_what_they_may():
    for dtype, columns, vectors in ((mx.float32, 6144, 1), (mx.float16, 1536, 8)):
        assert fits_threadgroup(columns, vectors, dtype)
        case = Case((4,), 2, columns, vectors=vectors, dtype=dtype, variant="threadgroup")
        p = problem(case)
        report = run(case, p)
        assert fault(case, p, report) == ""
        assert report.threadgroup_bytes == 24 * 1024


def test_strided_activations_are_read_right():
    case = Case((4,), 9, 64, vectors=3)
    p = problem(case)
    p.x = mx.random.normal((64, 3)).astype(case.dtype).T
    assert fault(case, p, run(case, p)) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_reaches_its_row_only(value):
    case = Case((4, 4), 9, 128)
    p = problem(case)
    p.scales = mx.where(mx.arange(9)[:, None] == 4, mx.array(value, case.dtype), p.scales)
    y = run(case, p).out[0]
    assert not np.isfinite(y[0, 4])
    assert np.isfinite(np.delete(y, 4)).all()


def test_launch_of_the_chosen_variant_is_the_default():
    case = Case((4,), 4, 64)
    p = problem(case)
    made = launch(case, p)
    assert made.spec.variant == choose_variant(4, 64, 1, mx.float16)
