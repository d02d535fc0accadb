"""Kernels are batch-invariant: a row's result is bit-identical by itself and among others."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal

from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.metal import Launch
from gearbx_mlx.kernels.metal_products import dense_launch, planes_launch

from .cases import Case, launch, problem, read_once, run_launch
from .checks import SMALLEST, UNIT, exact
from .launch import Report
from .test_mutations import changer

DENSE_SUM = "fma(weights[i], held[v][i], sums[r][v])"
PACKED_SUM = "fma(scale, dots[v], fma(offset, x_sums[v], sums[r][v]))"
ORDER_BY_ROWS = {  # text: a launch for x, its sum, another sum that depends on the number of vectors
    "dense": (
        lambda x: dense_launch(x, normal(13, 512, seed=1)),
        DENSE_SUM,
        f"(VECTORS > 1 ? weights[i] * held[v][i] + sums[r][v] : {DENSE_SUM})",
    ),
    "matvec": (
        lambda x: planes_launch(x, split(normal(13, 512, seed=1), widths=(4, 4), group_size=64)),
        PACKED_SUM,
        f"(VECTORS > 1 ? fma(offset, x_sums[v], fma(scale, dots[v], sums[r][v])) : {PACKED_SUM})",
    ),
}

pytestmark = pytest.mark.clang

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
ORDERS = ((0, 0), (1, 1), (2, 7))  # of reductions, and of threads


def ran(made: Launch, order: int = 0, schedule: int = 0) -> tuple[mx.array, Report]:
    """The result of a launch without a fault, and its effects."""
    report = run_launch(made, order, schedule)
    assert report.error == ""
    assert all((report.reads[name] <= 1).all() for name in read_once(made.prepared.spec))
    assert (report.writes["out"] == 1).all()
    return made.prepared.result(mx.array(report.out[0], made.prepared.options["output_dtypes"][0])), report


def same_bits(a: mx.array, b: mx.array) -> bool:
    assert a.dtype == b.dtype
    return mx.array_equal(a.view(mx.uint16), b.view(mx.uint16)).item()


class TestDenseProducts:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("vectors", "rows", "columns"), [(3, 13, 70), (4, 21, 512), (9, 8, 512), (1, 1, 3)])
    def test_products_are_exact_and_read_weight_once(self, vectors, rows, columns, dtype):
        x, weight = normal(vectors, columns, dtype=dtype), normal(rows, columns, dtype=mx.bfloat16, seed=1)
        wanted, sizes = exact(x) @ exact(weight).T, np.abs(exact(x)) @ np.abs(exact(weight)).T
        bound = (columns / 32 + 8 + 5) * 2.0**-24 * sizes + UNIT[dtype] * np.abs(wanted) + SMALLEST[dtype]
        for order, schedule in ORDERS:
            y, report = ran(dense_launch(x, weight), order, schedule)
            assert (np.abs(exact(y) - wanted) <= bound).all()
            assert (report.reads["weight"][: weight.nbytes] == 1).all()

    @pytest.mark.some(3)
    @pytest.mark.parametrize("vectors", [2, 9, 16])
    @pytest.mark.parametrize("columns", [70, 512])
    def test_vector_is_batch_invariant(self, columns, vectors):
        x, weight = normal(1, vectors, columns), normal(13, columns, dtype=mx.float16, seed=1)
        y, _ = ran(dense_launch(x, weight))
        assert all(same_bits(ran(dense_launch(x[0, v], weight))[0], y[0, v]) for v in range(vectors))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "case",
    [
        Case((4,), 13, 96, 32),
        Case((3,), 13, 96, 32),
        Case((4, 4), 13, 192, bias=True),
        Case((2, 2, 4), 13, 192),
        *(Case(bits, 13, 85, bias=True, format="rowwise") for bits in (2, 6, 8)),
        Case(4, 13, 85, format="groupwise"),
        Case(5, 13, 85, format="codebook"),
        Case(3, 13, 85, bias=True, format="codebook-library"),
    ],
    ids=str,
)
@pytest.mark.parametrize("vectors", [3, 16])
def test_vector_is_batch_invariant(case, vectors):
    packed, x = problem(case), normal(vectors, case.columns, dtype=case.dtype, seed=2)
    best = dataclasses.replace(case, variant=None)

    def product(x: mx.array) -> mx.array:
        return ran(launch(best, dataclasses.replace(packed, x=x)))[0]

    y = product(x)
    assert all(same_bits(product(x[v : v + 1])[0], y[v]) for v in (0, vectors - 1))


@pytest.mark.metal_mutations
@pytest.mark.parametrize("text", ORDER_BY_ROWS)
def test_batch_dependent_kernel_is_noticed(text):
    made, sound, dependent = ORDER_BY_ROWS[text]
    x = normal(3, 512)
    together = run_launch(made(x), change=changer(sound, dependent)).out[0][:1]
    alone = run_launch(made(x[:1]), change=changer(sound, dependent)).out[0]
    assert (run_launch(made(x)).out[0][:1] == run_launch(made(x[:1])).out[0]).all()
    assert (together != alone).any()
