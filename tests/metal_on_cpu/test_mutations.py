"""The checks catch a kernel that is wrong: each mutation of the text is a mistake that someone could make."""

import mlx.core as mx
import pytest

from .cases import Case, fault, problem, run
from .compiler import DoesNotCompile

pytestmark = pytest.mark.clang

ONE = Case((4,), 13, 1056, 32, bias=True)
STACK = Case((4, 1, 1, 2), 13, 640, 64, bias=True)
ODD = Case((3, 5), 13, 640, 64)
MANY = Case((4, 4), 13, 640, 64, vectors=3)
STAGED = Case((4,), 13, 1056, 32, variant="threadgroup")
BYTES = Case((8,), 13, 640, 64, dtype=mx.float32)

# name: case, what stands in the text, what is put there, what the checks say
MUTATIONS = {
    "dropped barrier": (STAGED, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race|nobody wrote"),
    "early return before the barrier": (
        STAGED,
        "threadgroup T staged",
        "if (first_row >= rows) return;\nthreadgroup T staged",
        "divergence|nobody wrote",
    ),
    "staged too little": (STAGED, "i < VECTORS * columns;", "i < VECTORS * columns - 32;", "nobody wrote"),
    "staged array too small": (
        STAGED,
        "staged[STAGED]",
        "staged[STAGED - 64]",
        "outside threadgroup memory|out_of_bounds",
    ),
    "skipped tail": (ONE, "k < columns; k += LANES", "k + LANES * CODES <= columns; k += LANES", "bound off"),
    "one step too many": (ONE, "k < columns; k += LANES", "k <= columns; k += LANES", "bound off|out-of-bounds"),
    "wrong offset into the words": (ONE, "chunk * WIDTH", "chunk * WIDTH + 1", "bound off|out-of-bounds"),
    "bytes taken for words": (
        BYTES,
        "(const device ushort*)packed",
        "(const device ushort*)((const device uchar*)packed + 1)",
        "misaligned",
    ),
    "wrong group": (STACK, "scales[at / GROUP_SIZE]", "scales[at / GROUP_SIZE ^ 1]", "bound off|out-of-bounds"),
    "swapped nibbles": (
        ONE,
        "words[word] & mask",
        "((words[word] & 0x0f0f) << 4 | (words[word] >> 4 & 0x0f0f)) & mask",
        "bound off",
    ),
    "swapped codes": (MANY, "const int bit = i * WIDTH;", "const int bit = (i ^ 1) * WIDTH;", "bound off"),
    "codes across words cut": (ODD, "shift + WIDTH > 16", "shift + WIDTH > 32", "bound off"),
    "mask too narrow": (STACK, "((1u << WIDTH) - 1) << (place", "((1u << WIDTH) - 2) << (place", "bound off"),
    "place not scaled down": (ONE, "float(1u << (place * WIDTH))", "1.0f", "bound off"),
    "plane not shifted": (STACK, "words, X_AT(0)) * (1.0f / float(1u << SHIFT))", "words, X_AT(0))", "bound off"),
    "bias of a plane not shifted": (
        STACK,
        "float(b[at / GROUP_SIZE]) * (1.0f / float(1u << SHIFT))",
        "float(b[at / GROUP_SIZE])",
        "bound off",
    ),
    "offset without the activations": (ONE, "offset * x_sums[0]", "offset", "bound off"),
    "last plane not read": (STACK, "DO(w3, b3, 2, 4)", "", "bound off"),
    "plane read twice": (STACK, "DO(w3, b3, 2, 4)", "DO(w3, b3, 2, 4) DO(w2, b2, 1, 2)", "bound off"),
    "wrong vector": (MANY, "dot_16(codes, X_AT(v))", "dot_16(codes, X_AT(0))", "bound off"),
    "lanes not summed": (ONE, "simd_sum(sums[r][v])", "sums[r][v]", "bound off"),
    "sum in half the lanes": (
        ONE,
        "float y = simd_sum(sums[r][v]);",
        "float y = 0.0f; if (lane < 16) y = simd_sum(sums[r][v]);",
        "divergence",
    ),
    "all lanes write": (ONE, "lane == 0 && row < rows", "row < rows", "exactly once"),
    "no guard at the last row": (ONE, "lane == 0 && row < rows", "lane == 0", "out-of-bounds"),
    "weights read past the last row": (ONE, "        if (row < rows) {", "        if (true) {", "out-of-bounds"),
    "weights read twice": (
        ONE,
        "words[i] = from[i];",
        "const volatile device ushort* again = from; words[i] = again[i] & again[i];",
        "exactly once",
    ),
    "a row left out": (ONE, "row < rows) {\n#if HAS_BIAS", "row < rows - 1) {\n#if HAS_BIAS", "bound off"),
    "bias forgotten": (ONE, "#if HAS_BIAS", "#if 0", "bound off"),
    "summed in half precision": (
        Case((8,), 5, 2048),
        "float sums[ROWS][VECTORS];",
        "half sums[ROWS][VECTORS];",
        "bound off",
    ),
    "write to an input": (
        ONE,
        "out[size_t(v) * rows + row] =",
        "((device T*)x)[0] = T(0); out[size_t(v) * rows + row] =",
        "write to input",
    ),
}
DO_NOT_COMPILE = {
    "device pointer without its address space": (
        "const device ushort* from = (const device ushort*)",
        "const ushort* from = (const device ushort*)",
    ),
    "threadgroup memory as a device pointer": (
        "threadgroup_barrier",
        "const device T* from = staged; threadgroup_barrier",
    ),
    "unknown function": ("simd_sum", "simd_add"),
    "array too short for its index": ("ushort words[WIDTH];", "ushort words[WIDTH - 8];"),
}


def changer(old: str, new: str):
    def change(text: str) -> str:
        assert old in text, f"the kernel no longer says {old!r}"
        return text.replace(old, new)

    return change


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name):
    case, old, new, said = MUTATIONS[name]
    p = problem(case)
    found = fault(case, p, run(case, p, change=changer(old, new)))
    assert any(words in found for words in said.split("|")), found or "not caught"


@pytest.mark.parametrize("name", DO_NOT_COMPILE)
def test_mistake_does_not_compile(name):
    with pytest.raises(DoesNotCompile):
        run(STAGED, problem(STAGED), change=changer(*DO_NOT_COMPILE[name]))
