"""Loops that index a lane's registers can be unrolled, as the texts ask the compiler to do."""

import mlx.core as mx
import pytest

from gearbx_mlx.kernels.metal import Launch, build
from gearbx_mlx.kernels.metal_attention import parts_launch
from gearbx_mlx.kernels.metal_products import dense_launch

from .cases import Case, launch, problem
from .compiler import DoesNotCompile, unroll
from .exact_cases import ExactCase, product
from .test_mutations import changer
from .text import generated_text

pytestmark = pytest.mark.clang


def packed(case: Case) -> Launch:
    return launch(case, problem(case))


QUERIES, KEYS = mx.zeros((1, 4, 3, 40), mx.float16), mx.zeros((1, 2, 9, 40), mx.float16)
LAUNCHES = {
    "one plane": lambda: packed(Case((4,), 8, 64, vectors=2, bias=True)),
    "codes across words": lambda: packed(Case((3,), 8, 64, vectors=2, variant="threadgroup")),
    "planes": lambda: packed(Case((4, 1, 1, 2), 8, 64, vectors=16, variant="device")),
    "ragged rows": lambda: packed(Case(6, 8, 21, vectors=2, format="rowwise")),
    "codebooks": lambda: packed(Case(5, 8, 21, vectors=2, format="codebook")),
    "a library": lambda: packed(Case(3, 8, 64, vectors=2, format="codebook-library")),
    "exact": lambda: product(ExactCase(8, 64, vectors=3)).launch(),
    "exact, decoded": lambda: product(ExactCase(8, 64)).decoder(),
    "dense": lambda: dense_launch(mx.zeros((3, 21), mx.float16), mx.zeros((8, 21), mx.float16)),
    "attention": lambda: parts_launch(QUERIES, KEYS, KEYS, 1.0, "causal"),
}


def text_of(made: Launch) -> str:
    prepared = made.prepared
    return generated_text(build(prepared.spec), prepared.completed(made.inputs), prepared.options)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", LAUNCHES)
def test_loops_can_be_unrolled(name):
    text = text_of(LAUNCHES[name]())
    assert text.count("UNROLL for") > 3
    unroll(text)


def test_a_loop_that_cannot_be_unrolled_is_noticed():
    text = changer("place < per_word; place++", "place < int(masked[0]); place++")(text_of(LAUNCHES["one plane"]()))
    with pytest.raises(DoesNotCompile, match="unroll"):
        unroll(text)
