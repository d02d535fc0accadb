"""The checks catch a wrong kernel for exact weights: each mutation of its text is a mistake that could happen."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from .cases import run_launch
from .exact_cases import ExactCase, product
from .exact_cases import fault as fault_of
from .test_exact import lying
from .test_mutations import changer

pytestmark = [pytest.mark.clang, pytest.mark.metal_mutations]

ONE = ExactCase(13, 1056, 32, bias=True)
MANY = ExactCase(13, 640, vectors=5, dtype=mx.float32)

LONE_COUNT = "uint before = 0; if (inside) before = simd_prefix_exclusive_sum(bytes);"

# name: case, the text, its replacement, what the checks report
MUTATIONS = {
    "last step left out": (ONE, "step < columns;", "step + LANES * CODES <= columns;", "bound off"),
    "one step too many": (
        ONE,
        "const bool inside = k < columns",
        "const bool inside = k <= columns",
        "out-of-bounds|off",
    ),
    "lanes do not count together": (ONE, "next[r] + before;", "next[r];", "bound off"),
    "steps do not count together": (ONE, "next[r] += simd_broadcast(before + bytes, LANES - 1);", "", "bound off"),
    "bytes of the last lane forgotten": (ONE, "before + bytes, LANES - 1", "before, LANES - 1", "bound off"),
    "counted up to another lane": (ONE, "before + bytes, LANES - 1", "before + bytes, LANES - 2", "bound off"),
    "counted by lanes with columns only": (
        ONE,
        "const uint before = simd_prefix_exclusive_sum(bytes);",
        LONE_COUNT,
        "divergence",
    ),
    "window elsewhere": (ONE, "WINDOW = 144", "WINDOW = 16", "bound off"),
    "zero cell wider": (MANY, "fabs(scale) * 0.5f", "fabs(scale) * 1.5f", "bound off"),
    "low bits of another weight": (ONE, "i * LOW_BITS)", "(i ^ 1) * LOW_BITS)", "bound off"),
    "low bits of other columns": (
        MANY,
        "device ushort*)low + unit *",
        "device ushort*)low + 1 + unit *",
        "off|out-of",
    ),
    "bytes swapped": (MANY, "uint(high[at]) << 8 | low", "low << 8 | uint(high[at])", "bound off"),
    "another group": (MANY, "unit * CODES / GROUP_SIZE;", "(unit * CODES / GROUP_SIZE) ^ 1;", "bound off|out-of"),
    "byte read twice": (
        MANY,
        "uint(high[at]) << 8",
        "uint(high[at] & ((const volatile device uchar*)high)[at]) << 8",
        "exactly as often",
    ),
    "rows past the last": (ONE, "        if (first_row + r < rows) {", "        if (true) {", "out-of-bounds"),
    "offsets past the last": (
        ONE,
        "const bool there = first_row + r < rows;",
        "const bool there = true;",
        "out-of-bounds",
    ),
    "wrong vector": (MANY, "x[v * columns", "x[columns", "bound off"),
    "step added to another row": (MANY, "weights[r][i], held", "weights[0][i], held", "bound off"),
    "lanes not summed": (ONE, "simd_sum(sums[r][v])", "sums[r][v]", "bound off"),
    "all lanes write": (ONE, "lane == 0 && row < rows", "row < rows", "exactly once"),
    "bias forgotten": (ONE, "#if HAS_BIAS", "#if 0", "bound off"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name):
    case, old, new, said = MUTATIONS[name]
    p = product(case)
    found = fault_of(case, p, run_launch(p.launch(), change=changer(old, new)))
    assert any(words in found for words in said.split("|")), found or "not caught"


# name: the offsets, the text, its replacement, what is seen
OF_LIES = {
    "end of high forgotten": (
        "past the end",
        "min(offsets[row_of[r] + 1], uint(high_bytes))",
        "offsets[row_of[r] + 1]",
        "out-of-bounds",
    ),
    "places not checked": ("past the end", "at <= end[r] && bytes <= end[r] - at", "true", "out-of-bounds"),
    "row runs into the next": ("one byte short", "bytes <= end[r] - at", "bytes <= high_bytes - at", "a number"),
    "no number is a zero": ("empty", "NOT_A_NUMBER = 0x7fc0", "NOT_A_NUMBER = 0", "a number"),
}


@pytest.mark.parametrize("name", OF_LIES)
def test_mutation_is_caught_by_offsets_that_lie(name):
    lie, old, new, said = OF_LIES[name]
    p = lying(product(ExactCase(6, 576)), lie)
    report = run_launch(p.launch(), change=changer(old, new))
    right = np.isnan(run_launch(p.launch()).out[0])
    found = report.error or ("" if (np.isnan(report.out[0]) == right).all() else "a number where there is none")
    assert said in found, found or "not caught"


def test_company_is_seen_in_the_bits():
    """The test of equal bits can fail: a vector alone, summed in another order, has other bits."""
    p = product(ExactCase(9, 1088, vectors=2, dtype=mx.float32))
    alone = dataclasses.replace(p, x=p.x[:1])
    another = changer("float dot = 0.0f;", "float dot = sums[r][v]; sums[r][v] = 0.0f;")
    together = run_launch(p.launch()).out[0][:1]
    assert (run_launch(alone.launch()).out[0] == together).all()
    assert (run_launch(alone.launch(), change=another).out[0] != together).any()
