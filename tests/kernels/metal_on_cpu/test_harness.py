"""The harness itself: it computes correctly, and sees each kind of fault in small kernels."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.kernels.metal import Launch, build
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


def run(
    source: str, x: mx.array, threads: int = 64, group: int = 64, order: int = 0, schedule: int = 0, header: str = ""
) -> Report:
    """One input x, and one output of the same type with one element per thread."""
    kernel = mx.fast.metal_kernel(name="small", input_names=["x"], output_names=["out"], source=source, header=header)
    options = {
        "grid": (threads, 1, 1),
        "threadgroup": (group, 1, 1),
        "output_shapes": [(threads,)],
        "output_dtypes": [x.dtype],
    }
    return run_call(kernel, ["x"], [x], options, order, schedule)


def ramp(dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.arange(64).astype(dtype)


@pytest.mark.clang
class TestComputation:
    def test_copies_count_each_byte(self):
        report = run(GRID + "out[i] = x[i];", ramp())
        assert report.error == ""
        assert (report.out[0] == np.arange(64)).all()
        assert (report.reads["x"] == 1).all()
        assert (report.writes["out"] == 1).all()

    def test_lanes_exchange_within_their_simd_group(self):
        values = np.arange(64).reshape(2, 32)
        for operation, per_group in (
            ("simd_sum(x[i])", values.sum(1)),
            ("simd_broadcast(x[i], ushort(5))", values[:, 5]),
        ):
            report = run(GRID + f"out[i] = {operation};", ramp())
            assert (report.out[0] == np.repeat(per_group, 32)).all()
            assert report.simd_operations == 2

    def test_a_prefix_sum_has_the_lanes_before(self):
        report = run(GRID + "out[i] = simd_prefix_exclusive_sum(uint(x[i]));", ramp())
        ends = np.arange(64).reshape(2, 32).cumsum(1)
        assert (report.out[0] == (ends - np.arange(64).reshape(2, 32)).ravel()).all()
        assert report.simd_operations == 2

    def test_bits_and_numbers(self):
        """A fused multiplication rounds once: (1 + 2^-12)^2 leaves 2^-24, which a separate product loses."""
        for value, wanted in (
            ("as_type<uint>(x[i]) >> 23", np.arange(64, dtype=np.float32).view(np.uint32) >> 23),
            ("as_type<float>(uint(x[i]) << 16)", (np.arange(64, dtype=np.uint32) << 16).view(np.float32)),
            ("popcount(uint(x[i]))", [i.bit_count() for i in range(64)]),
            ("min(uint(x[i]), uint(9))", np.minimum(np.arange(64), 9)),
            ("fma(1.000244140625f, 1.000244140625f, -1.00048828125f) * 16777216.0f", np.ones(64)),
            ("fabs(x[i] - 40.0f)", np.abs(np.arange(64) - 40)),
        ):
            assert (run(GRID + f"out[i] = {value};", ramp()).out[0] == wanted).all(), value

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_each_operation_in_half_precision_is_rounded(self, dtype):
        x = mx.random.normal((64,)).astype(dtype)
        report = run(GRID + "auto a = x[i]; out[i] = a * a + a / decltype(a)(7.0f);", x)
        wanted = x * x + x / mx.array(7.0, dtype)
        assert (report.out[0] == np.array(wanted.astype(mx.float32))).all()

    @pytest.mark.parametrize("schedule", range(4))
    def test_barrier_orders_threadgroup_memory(self, schedule):
        report = run(SHARED + "shared[t] = x[t];\n" + BARRIER + "out[t] = shared[63 - t];", ramp(), schedule=schedule)
        assert report.error == ""
        assert (report.out[0] == np.arange(64)[::-1]).all()
        assert (report.barriers, report.threadgroup_bytes) == (1, 256)


FAULTS = {
    "no barrier": (SHARED + "shared[t] = x[t]; out[t] = shared[63 - t];", "race|nobody wrote"),
    "two writers": (SHARED + "shared[t / 2] = x[t]; out[t] = 0;", "race"),
    "write after another's read": (
        SHARED + "shared[t] = x[t];\n" + BARRIER + "out[t] = shared[63 - t]; shared[t] = 0;",
        "race",
    ),
    "uninitialized threadgroup memory": (SHARED + BARRIER + "out[t] = shared[t];", "nobody wrote"),
    "outside of threadgroup memory": (SHARED + "int far = 64 + t; (&shared[0])[far] = x[t]; out[t] = 0;", "outside"),
    "too much threadgroup memory": (
        "const int t = thread_index_in_threadgroup;\nthreadgroup float shared[9000];\nshared[t] = x[t]; out[t] = 0;",
        "more than 32768",
    ),
    "barrier for some": (SHARED + "if (t < 32) {\n" + BARRIER + "}\nout[t] = shared[t] = x[t];", "divergence"),
    "barriers in different places": (SHARED + "if (t < 32) {\n" + BARRIER + "} else {\n" + BARRIER + "}", "divergence"),
    "SIMD operation for some lanes": (GRID + "if (i % 2) out[i] = simd_sum(x[i]);", "divergence"),
    "SIMD operations in different places": (
        GRID + "if (i % 2)\nout[i] = simd_sum(x[i]);\nelse\nout[i] = simd_sum(x[i]);",
        "divergence",
    ),
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
    error = run(source, ramp()).error
    assert any(words in error for words in said.split("|")), error or "not seen"


def packed(case: Case) -> Launch:
    return launch(case, problem(case))


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


@pytest.mark.parametrize("name", LAUNCHES)
def test_source_declares_each_named_attribute(name):
    """MLX declares those that it finds in a kernel's body; it does not look into the header."""
    text = text_of(LAUNCHES[name]())
    declared = {each.name for each in parameters(text) if not each.is_buffer}
    assert {*ATTRIBUTE.findall(text)} == declared
    assert declared


@pytest.mark.clang
def test_unrollable_loop_is_noticed():
    text = changer("place < per_word; place++", "place < int(masked[0]); place++")(text_of(LAUNCHES["one plane"]()))
    with pytest.raises(DoesNotCompile, match="unroll"):
        unroll(text)
