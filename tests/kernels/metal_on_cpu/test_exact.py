"""metal/exact.metal as MLX generates it, run on the CPU: weights bit for bit, products, company, wrong offsets."""

import dataclasses
import itertools

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from exact_reference import as_float

from gearbx_mlx import Gearbox
from gearbx_mlx.kernels import proven
from gearbx_mlx.kernels.exact import product_by_tiles
from gearbx_mlx.kernels.metal_exact import decode_launch
from gearbx_mlx.kernels.products import decoded_tile

from .cases import run_launch
from .checks import access_fault
from .exact_cases import ExactCase, Product, encode, expected_reads, fault, product, rounded
from .launch import Report

pytestmark = pytest.mark.clang

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def decoded(p: Product, chosen: mx.array | None = None) -> np.ndarray:
    report = run_launch(p.decoder(chosen))
    assert report.error == ""
    return report.out[0]


def of_bits(bits: np.ndarray, group: int) -> Product:
    return Product(bits, encode(bits, group), mx.zeros((1, bits.shape[1])), None)


@pytest.mark.some(3)
@pytest.mark.parametrize("order", ["shuffled", "ascending"])
def test_all_patterns_of_bf16_come_back(order):
    """Also infinities, NaN, subnormals and both zeros, in groups of one kind or mixed."""
    patterns = np.arange(65536, dtype=np.uint16)
    if order == "shuffled":
        patterns = np.random.default_rng(1).permutation(patterns)
    p = of_bits(patterns.reshape(64, 1024), 64)
    report = run_launch(p.decoder())
    assert report.error == ""
    assert (report.out[0] == p.bits).all()
    assert access_fault(report, expected_reads(p)) == ""


def cases():
    """Every type, while shapes, groups, numbers of vectors and biases take turns."""
    shapes = itertools.cycle([(13, 128), (1, 32), (8, 512), (21, 544), (5, 1056), (9, 64)])
    groups = itertools.cycle([32, 64, 128, 64])
    vectors = itertools.cycle([1, 2, 3, 8, 16])
    for dtype, _ in itertools.product(DTYPES, range(4)):
        (rows, columns), group, count = next(shapes), next(groups), next(vectors)
        yield ExactCase(rows, -(-columns // group) * group, group, count, dtype, (rows + count) % 2 == 0)
    for count in range(1, 17):
        yield ExactCase(11, 640, 64, count, mx.bfloat16, bias=True)


@pytest.mark.some(2)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_pass_reads_packed_bytes_once_and_is_right(case):
    p = product(case)
    for order, schedule in ((0, 0), (1, 1), (2, 7)):
        assert fault(case, p, run_launch(p.launch(), order, schedule)) == ""


@pytest.mark.some(1)
def test_any_number_of_rows():
    for rows in range(1, 20):
        case = ExactCase(rows, 64, vectors=1 + rows % 2 * 3, bias=True)
        p = product(case, seed=rows)
        assert fault(case, p, run_launch(p.launch())) == "", rows


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vector_is_batch_invariant(dtype):
    """Alone, or among up to 16 vectors, in any place, and with any order of reductions."""
    p = product(ExactCase(9, 1088, vectors=16, dtype=dtype, bias=True))
    for order in range(3):
        together = run_launch(p.launch(), order).out[0]
        for first, count in ((0, 1), (15, 1), (4, 2), (7, 3), (1, 8)):
            some = dataclasses.replace(p, x=p.x[first : first + count])
            assert (run_launch(some.launch(), order).out[0] == together[first : first + count]).all()


def test_some_rows_are_decoded():
    p = product(ExactCase(13, 576))
    for chosen in ([0], [12], [5, 6, 7, 8, 9, 10], [7, 7, 0, 12, 3, 3, 1, 2, 0]):
        assert (decoded(p, mx.array(chosen)) == p.bits[chosen]).all()


def test_rows_of_a_table_are_a_launch(launches):
    model, chosen = tiny_model(tie_word_embeddings=True, dtype=mx.bfloat16), mx.array([[3, 1, 5]])
    expected = model.model.embed_tokens(chosen)
    gearbox = Gearbox(model, "4,16", format="exact", kernels="native")
    gearbox.shift("high")
    launches.clear()
    assert mx.array_equal(model.model.embed_tokens(chosen), expected).item()  # by MLX's operations, unproven
    assert launches == []
    proven.keep(proven.decoder_key(64), proven.Proof(1.0, 2.0))
    rows = model.model.embed_tokens(chosen)
    assert [launch.shape for launch in launches] == [(3, 64)]
    assert mx.array_equal(rows, expected)


def test_tiles_are_the_product(launches):
    case = ExactCase(13, 576, vectors=40)
    p = product(case)
    weight = mx.array(as_float(p.bits)).astype(mx.bfloat16)
    for dtype in DTYPES:
        x = p.x.astype(dtype).reshape(2, 20, 576)
        launches.clear()
        y = product_by_tiles(x, p.packed.matrix, decoded_tile, 5 * 576)
        assert (y.dtype, y.shape) == (dtype, (2, 20, 13))
        assert [launch.shape for launch in launches] == [(5, 576), (5, 576), (3, 576)]
        wanted = np.array(x.astype(mx.float32)) @ np.array(weight.astype(mx.float32)).T
        terms = np.abs(np.array(x.astype(mx.float32))) @ np.abs(np.array(weight.astype(mx.float32))).T
        unit = {mx.float32: 0.0, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}[dtype]
        off = np.abs(np.array(y.astype(mx.float32)) - wanted)
        assert (off <= 576 * 2.0**-24 * terms + unit * np.abs(wanted)).all()


def test_experts_are_rows_after_rows(launches):
    p = product(ExactCase(12, 128))
    stacked = p.packed.matrix.each(lambda array: array.reshape(3, 4, -1))
    whole = decode_launch(stacked).run()
    assert (whole.dtype, whole.shape) == (mx.bfloat16, (3, 4, 128))
    assert (np.array(whole.view(mx.uint16)).reshape(12, 128) == p.bits).all()
    second = decode_launch(stacked, mx.arange(4, 8)).run()
    assert (np.array(second.view(mx.uint16)) == p.bits[4:8]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_number_reaches_its_row_only(value):
    p = product(ExactCase(9, 128))
    weight = as_float(p.bits).copy()
    weight[4, 70] = value
    y = run_launch(dataclasses.replace(p, packed=encode(rounded(weight))).launch()).out[0]
    assert not np.isfinite(y[0, 4])
    assert np.isfinite(np.delete(y, 4)).all()


LIES = {
    "descending": lambda offsets, end: [*offsets[:3], offsets[2] - 1, *offsets[4:]],
    "past the end": lambda offsets, end: [*offsets[:-1] + (end + 1), end + 2],
    "far past the end": lambda offsets, end: [*offsets[:-1], 2**32 - 1],
    "all past the end": lambda offsets, end: [2**32 - 1 - i for i in range(len(offsets))],
    "about to wrap": lambda offsets, end: [2**32 - 5, 2**32 - 4, *offsets[2:]],
    "one byte short": lambda offsets, end: [*offsets[:2], *(offsets[2:] - 1)],
    "empty": lambda offsets, end: [0 for _ in offsets],
}


def lying(p: Product, lie: str) -> Product:
    made = LIES[lie](p.packed.offsets.astype(np.int64), int(p.packed.offsets[-1]))
    offsets = np.array(made, np.int64).astype(np.uint32)
    return dataclasses.replace(p, packed=dataclasses.replace(p.packed, offsets=offsets))


@pytest.mark.some(7)
@pytest.mark.parametrize("lie", LIES)
def test_false_offsets_stay_inside_and_give_nan(lie):
    p = product(ExactCase(6, 576, vectors=3))
    false = lying(p, lie)
    report: Report = run_launch(false.launch())
    assert report.error == ""
    begin, end = (
        np.minimum(o.astype(np.int64), p.packed.high.size)
        for o in (false.packed.offsets[:-1], false.packed.offsets[1:])
    )
    short = end - begin < np.diff(p.packed.offsets.astype(np.int64))
    assert short.any() or lie == "far past the end"  # all bytes of the last row are there
    assert (np.isnan(report.out[0]) == short).all()
    assert np.isnan(as_float(decoded(false))).any(axis=1).tolist() == short.tolist()


def test_truncated_byte_list_stays_inside():
    p = product(ExactCase(6, 576))
    for size in (1, 5, 100):
        cut = dataclasses.replace(p, packed=dataclasses.replace(p.packed, high=p.packed.high[:size]))
        report = run_launch(cut.launch())
        assert report.error == ""
        assert np.isnan(report.out[0]).all() == (size <= p.packed.offsets[1])
        assert np.isnan(report.out[0][0, 1:]).all()
