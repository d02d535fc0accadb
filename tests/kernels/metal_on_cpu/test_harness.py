"""The harness itself: it sees each kind of fault in small kernels."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from gearbx_mlx.kernels.metal import Launch, build, options
from gearbx_mlx.kernels.metal_attention import join_launch, parts_launch, rope_launch
from gearbx_mlx.kernels.metal_products import dense_launch

from .cases import Case, launch, problem
from .compiler import DoesNotCompile, unroll
from .exact_cases import ExactCase, product
from .launch import Report, run_call
from .test_mutations import changer
from .text import generated_text, parameters

KERNELS, ROOT = Path(__file__).parents[1], Path(__file__).parents[3]

GRID = "const int i = thread_position_in_grid.x;\n"
SHARED = "const int t = thread_index_in_threadgroup;\nthreadgroup float shared[64];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
LONE_SUM = "out[i] = simd_sum(x[i]);"


def run(source: str) -> Report:
    """One input x, and one output of the same type with one element per thread."""
    kernel = mx.fast.metal_kernel(name="small", input_names=["x"], output_names=["out"], source=source)
    return run_call(kernel, ["x"], [mx.arange(64).astype(mx.float32)], options(64, 64, (64,), mx.float32))


FAULTS = {
    "no barrier": (SHARED + "shared[t] = x[t]; out[t] = shared[63 - t];", "race|nobody wrote"),
    "two writers": (SHARED + "shared[t / 2] = x[t]; out[t] = 0;", "race"),
    "write after a read": (
        SHARED + "shared[t] = x[t];\n" + BARRIER + "out[t] = shared[63 - t]; shared[t] = 0;",
        "race",
    ),
    "uninitialized threadgroup memory": (SHARED + BARRIER + "out[t] = shared[t];", "nobody wrote"),
    "outside of threadgroup memory": (SHARED + "int far = 64 + t; (&shared[0])[far] = x[t]; out[t] = 0;", "outside"),
    "too much threadgroup memory": (
        SHARED.replace("[64]", "[9000]") + "shared[t] = x[t]; out[t] = 0;",
        "more than 32768",
    ),
    "barrier for some": (SHARED + "if (t < 32) {\n" + BARRIER + "}\nout[t] = shared[t] = x[t];", "divergence"),
    "barriers in different places": (SHARED + "if (t < 32) {\n" + BARRIER + "} else {\n" + BARRIER + "}", "divergence"),
    "SIMD operation for some lanes": (GRID + "if (i % 2) " + LONE_SUM, "divergence"),
    "SIMD operations in two places": (GRID + "if (i % 2)\n" + LONE_SUM + "\nelse\n" + LONE_SUM, "divergence"),
    "read before the buffer": (GRID + "out[i] = x[i - 1];", "out-of-bounds read of 4 bytes at byte -4"),
    "read after the buffer": (GRID + "out[i] = x[i + 1];", "out-of-bounds read of 4 bytes at byte 256"),
    "write after the buffer": (GRID + "out[i + 1] = x[i];", "out-of-bounds write"),
    "misaligned": (GRID + "out[i] = *(const device float*)((const device char*)x + 2);", "misaligned read"),
    "write to an input": (GRID + "((device float*)x)[i] = 1; out[i] = 0;", "write to input"),
    "signed overflow": (GRID + "out[i] = (int(x[i]) + 2147483600) + i;", "undefined behaviour"),
    "shift too far": (GRID + "out[i] = 1 << int(x[i]);", "undefined behaviour: shift"),
}


@pytest.mark.some(5)
@pytest.mark.clang
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name):
    source, said = FAULTS[name]
    error = run(source).error
    assert any(words in error for words in said.split("|")), error or "not seen"


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


WITHOUT_ARRAYS = {
    "attention joined": lambda: join_launch(mx.zeros((1, 4, 3, 2, 42)), mx.float16),
    "rotary positions": lambda: rope_launch(QUERIES, mx.zeros((8,)), 5, False, 1.0),
}
ATTRIBUTE = re.compile(
    r"\b\w+_(?:in|per)_(?:grid|threadgroup|simdgroup|quadgroup)\b|\bgrid_\w+|\bthread_execution_width\b"
)


def text_of(made: Launch) -> str:
    prepared = made.prepared
    return generated_text(build(prepared.spec), prepared.completed(made.inputs), prepared.options)


@pytest.mark.clang
@pytest.mark.some(4)
@pytest.mark.parametrize("name", LAUNCHES)
def test_loops_can_be_unrolled(name):
    text = text_of(LAUNCHES[name]())
    assert text.count("UNROLL for") > 3
    unroll(text)


@pytest.mark.parametrize("name", LAUNCHES | WITHOUT_ARRAYS)
def test_a_text_declares_each_attribute_that_it_names(name):
    """MLX declares those that it finds in a kernel's body; it does not look into the header."""
    text = text_of((LAUNCHES | WITHOUT_ARRAYS)[name]())
    declared = {each.name for each in parameters(text) if not each.is_buffer}
    assert {*ATTRIBUTE.findall(text)} == declared
    assert declared


@pytest.mark.clang
def test_a_loop_that_cannot_be_unrolled_is_noticed():
    text = changer("place < per_word; place++", "place < int(masked[0]); place++")(text_of(LAUNCHES["one plane"]()))
    with pytest.raises(DoesNotCompile, match="unroll"):
        unroll(text)
