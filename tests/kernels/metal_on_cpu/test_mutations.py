"""The checks catch a wrong kernel: each mutation of the text is a mistake that could happen."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from .cases import Case, problem, run, run_launch
from .checks import fault
from .compiler import DoesNotCompile
from .exact_cases import ExactCase, product
from .exact_cases import fault as fault_of
from .test_exact import lying

pytestmark = [pytest.mark.clang, pytest.mark.metal_mutations]

ONE = Case((4,), 13, 1056, 32, bias=True)
STACK = Case((4, 1, 1, 2), 13, 640, 64, bias=True)
MANY = Case((4, 4), 13, 640, 64, vectors=3)
STAGED = Case((4,), 13, 1056, 32, variant="threadgroup")
BYTES = Case((8,), 13, 640, 64, dtype=mx.float32)

# What the checks report of a mistake: a pattern for each kind.
OUT = "bound off|out-of-bounds"
LOST, OUTSIDE = "divergence|nobody wrote", "outside threadgroup memory|out_of_bounds"
SWAPPED_NIBBLES = "((words[i / per_word] & 0x0f0f) << 4 | (words[i / per_word] >> 4 & 0x0f0f)) & mask"

# name: case, the text, its replacement, what the checks report
MUTATIONS = {
    "dropped barrier": (STAGED, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race|nobody wrote"),
    "early return": (STAGED, "threadgroup T staged", "if (first_row >= rows) return;\nthreadgroup T staged", LOST),
    "staged array too small": (STAGED, "staged[STAGED]", "staged[STAGED - 64]", OUTSIDE),
    "one step too many": (ONE, "k < columns; k += LANES", "k <= columns; k += LANES", OUT),
    "bytes for words": (BYTES, "ushort*)w", "ushort*)((const device uchar*)w + 1)", "misaligned"),
    "wrong group": (STACK, "scales[group]", "scales[group ^ 1]", OUT),
    "swapped codes": (MANY, "const int bit = i * WIDTH;", "const int bit = (i ^ 1) * WIDTH;", "bound off"),
    "plane not shifted": (STACK, "1.0f / float(1u << SHIFT)", "1.0f", "bound off"),
    "bias of a plane not shifted": (STACK, "float(b1[group]) * 0.5f", "float(b1[group])", "bound off"),
    "offset without the activations": (ONE, "fma(offset, x_sums[v]", "fma(offset, 1.0f", "bound off"),
    "last plane not read": (STACK, "DO(w3, 2, 4)", "", "bound off"),
    "plane read twice": (STACK, "DO(w3, 2, 4)", "DO(w3, 2, 4) DO(w2, 1, 2)", "bound off"),
    "lanes not summed": (ONE, "simd_sum(sums[r][v])", "sums[r][v]", "bound off"),
    "sum in half the lanes": (ONE, "const float sum =", "float sum = 0.0f; if (lane < 16) sum =", "divergence"),
    "summed in half precision": (Case((8,), 5, 2048), "float sums[ROWS]", "half sums[ROWS]", "bound off"),
    "write to an input": (ONE, "out[size_t(v) *", "((device T*)x)[0] = T(0); out[size_t(v) *", "write to input"),
}

# Mutations only for formats with rows of any width, in rows that end in the middle of 16 codes.
RAGGED = {
    "rowwise-8": Case(8, 13, 533, bias=True, format="rowwise"),
    "rowwise-6": Case(6, 13, 530, bias=True, format="rowwise"),  # words of its last 16 codes lie beyond the row
    "rowwise-4": Case(4, 13, 533, bias=True, format="rowwise"),
    "rowwise-2": Case(2, 13, 533, bias=True, format="rowwise"),
    "groupwise": Case(4, 13, 533, bias=True, format="groupwise"),
}
OF_EACH = {
    "skipped tail": ("k < columns; k += LANES", "k + CODES <= columns; k += LANES", "bound off"),
    "last code cut": ("i < left ?", "i + 1 < left ?", "bound off"),
    "rows not cut": ("i < left ?", "true ?", OUT),
    "wrong offset into the words": ("k / CODES * WIDTH", "k / CODES * WIDTH + 1", OUT),
    "rows further apart": ("w + size_t(row) *", "w + row + size_t(row) *", OUT),
    "rows packed without padding": ("(row) * ROW_WORDS(WIDTH)", "(row) * columns * WIDTH / 16", "bound off"),
    "words swapped": ("words[i] = packed[i]", "words[i] = packed[WIDTH - 1 - i]", "bound off|exactly as often"),
    "bytes swapped": ("words[i] = packed[i]", "words[i] = (packed[i] << 8 | packed[i] >> 8)", "bound off"),
    "offset forgotten": ("const float offset = GROUP_OFFSET", "const float offset = 0.0f", "bound off"),
    "activations of other columns": ("x + v * columns + k", "x + v * columns + (k ^ 16)", OUT),
    "row written twice": ("lane == 0 && row < rows", "row < rows", "exactly once"),
    "no guard at the last row": ("lane == 0 && row < rows", "lane == 0", "out-of-bounds"),
    "weights read past the last row": ("        if (row < rows) {", "        if (true) {", "out-of-bounds"),
    "weights read twice": (
        "words[i] = packed[i] ^",
        "const volatile device ushort* p = packed.from; words[i] = (packed[i] & (i < packed.left ? p[i] : 0)) ^",
        "exactly as often",
    ),
    "bias forgotten": ("#if HAS_BIAS", "#if 0", "bound off"),
}
OF_EACH_STAGED = {
    "dropped barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race|nobody wrote"),
    "staged too little": ("i < VECTORS * columns;", "i < VECTORS * columns - 1;", "nobody wrote"),
    "wrong vector": ("(codes, X_AT(v))", "(codes, X_AT(0))", "bound off"),
    "mask too narrow": ("(1u << WIDTH) - 1)", "(1u << WIDTH) - 2)", "bound off"),
}
OF_ONE = {
    "sign bits kept": ("rowwise-8", "SIGN_BITS 0x8080", "SIGN_BITS 0", "bound off"),
    "sign of every other code": ("rowwise-8", "SIGN_BITS 0x8080", "SIGN_BITS 0x8000", "bound off"),
    "codes across words cut": ("rowwise-6", "shift + WIDTH > 16", "shift + WIDTH > 32", "bound off"),
    "swapped nibbles": ("rowwise-4", "words[i / per_word] & mask", SWAPPED_NIBBLES, "bound off"),
    "place not scaled down": ("rowwise-2", "float(1u << (place * WIDTH % 16))", "1.0f", "bound off"),
    "scale of another row": ("rowwise-4", "scales[row]", "scales[row ^ 1]", OUT),
    "scale not applied": ("rowwise-2", "fma(sum, ROW_SCALE(row)", "fma(sum, 1.0f", "bound off"),
    "scale at every step": ("rowwise-6", "GROUP_SCALE 1.0f", "GROUP_SCALE float(scales[row])", "bound off"),
    "scale of another group": ("groupwise", "scales[group]", "scales[group ^ 1]", OUT),
    "last group forgotten": ("groupwise", "(columns + GROUP_SIZE - 1)", "columns", "bound off"),
    "offset not scaled": ("groupwise", "(-8.0f * scale)", "-8.0f", "bound off"),
    "offset of another width": ("rowwise-6", "GROUP_OFFSET -32.0f", "GROUP_OFFSET -31.0f", "bound off"),
}
# Codebooks, with and without outliers in a row.
TABLES = {
    "codebook-4": Case(4, 13, 533, bias=True, format="codebook"),
    "codebook-5": Case(5, 13, 533, bias=True, format="codebook"),
    "library-4": Case(4, 45, 533, bias=True, format="codebook-library"),
}
OF_EACH_TABLE = {
    "dropped barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race|nobody wrote"),
    "table one short": ("i < TABLES * ENTRIES;", "i < TABLES * ENTRIES - 1;", "nobody wrote"),
    "another table": ("(table + ", "(table + ENTRIES + ", "bound off|nobody wrote|outside threadgroup"),
    "another code": ("entries[code_from<BITS>", "entries[1 ^ code_from<BITS>", "bound off"),
    "another place": ("PLACE(i) ((i)", "PLACE(i) ((i ^ 1)", OUT),
    "outliers forgotten": ("const int end = outlier_offsets[row + 1];", "const int end = begin;", "bound off"),
    "first outlier forgotten": ("i = begin + lane; i < end", "i = begin + 1 + lane; i < end", "bound off"),
    "last outlier forgotten": ("i < end; i += LANES", "i + 1 < end; i += LANES", "bound off"),
    "outliers of the next row": ("i < end; i += LANES", "i <= end; i += LANES", OUT),
    "outliers added twice": ("i < end; i += LANES", "i < end; i += LANES / 2", "bound off"),
    "code of an outlier not taken back": ("float(outliers[i]) - below", "float(outliers[i])", "bound off"),
    "outlier of another column": ("x[v * columns + column]", "x[v * columns + (column ^ 1)]", "bound off|out-of"),
    "outliers past the last row": (
        "    if (row < rows) {\n        const int begin",
        "    {\n const int begin",
        "out-of",
    ),
}
OF_ONE_TABLE = {
    "table of the first rows": ("codebook-4", "((row) - FIRST_TABLE)", "((row) % (SIMD_GROUPS * ROWS) / 2)", OUT),
    "tables past the last row": ("codebook-4", "entry < ALL_TABLES * ENTRIES", "true", "out-of-bounds"),
    "code of another outlier": ("codebook-5", "outlier_columns[begin];", "outlier_columns[begin] ^ 1;", OUT),
    "halves not apart": ("codebook-5", "/ 3 * 16", "/ 3 * 15", "bound off"),
    "another entry of the library": ("library-4", "entries[group] %", "(entries[group] + 1) %", "bound off"),
    "an outlier's group": ("library-4", "groups + coded / GROUP_SIZE", "groups", "bound off"),
    "an outlier's scale": ("library-4", "below = fma(scale", "below = fma(1.0f", "bound off"),
    "an outlier's mid-point": ("library-4", "(coded % CODES))], GROUP_OFFSET", "(coded % CODES))], 0.0f", "bound off"),
    "one code for all outliers": ("library-4", "OWN_CODE 1", "OWN_CODE 0", "bound off"),
}
DO_NOT_COMPILE = {
    "device pointer without its address space": ("const device ushort* row_of_words", "const ushort* row_of_words"),
    "threadgroup memory as device memory": (
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


def of_each(cases: dict[str, Case], mutations: dict[str, tuple], **change) -> dict[str, tuple]:
    """Each mutation of each case, whose fields may be changed."""
    changed = {kernel: dataclasses.replace(case, **change) for kernel, case in cases.items()}
    return {
        f"{kernel}: {name}": (changed[kernel], *mutation) for kernel in changed for name, mutation in mutations.items()
    }


ALL = {
    **MUTATIONS,
    **of_each(RAGGED, OF_EACH),
    **of_each(RAGGED, OF_EACH_STAGED, vectors=3, variant="threadgroup"),
    **{name: (RAGGED[kernel], *mutation) for name, (kernel, *mutation) in OF_ONE.items()},
    **of_each(TABLES, OF_EACH_TABLE),
    **{name: (TABLES[kernel], *mutation) for name, (kernel, *mutation) in OF_ONE_TABLE.items()},
}


@pytest.mark.parametrize("name", ALL)
def test_mutation_is_caught(name):
    case, old, new, said = ALL[name]
    p = problem(case)
    found = fault(case, p, run(case, p, change=changer(old, new)))
    assert any(words in found for words in said.split("|")), found or "not caught"


@pytest.mark.parametrize("name", DO_NOT_COMPILE)
def test_mistake_does_not_compile(name):
    with pytest.raises(DoesNotCompile):
        run(STAGED, problem(STAGED), change=changer(*DO_NOT_COMPILE[name]))


ONE_EXACT = ExactCase(13, 1056, 32, bias=True)
MANY_EXACT = ExactCase(13, 640, vectors=5, dtype=mx.float32)

READ_TWICE = "bytes.x = high[lane] & ((const volatile device uchar*)high)[lane];"
UNIT = "{\n            const uint unit"
COUNT = "const uint before = simd_prefix_exclusive_sum(near);"
LONE_COUNT = "uint before = 0; if (inside) before = simd_prefix_exclusive_sum(near);"

# name: case, the text, its replacement, what the checks report
OF_EXACT = {
    "last step left out": (ONE_EXACT, "step < units;", "step + LANES <= units;", "bound off"),
    "one step too many": (ONE_EXACT, "inside = at < units", "inside = at <= units", OUT),
    "lanes do not count together": (ONE_EXACT, "first = as_type<ushort2>(before)[r];", "first = 0;", "bound off"),
    "rows count together": (ONE_EXACT, "ushort2>(before)[r]", "ushort2>(before)[1 - r]", "bound off"),
    "steps do not count together": (ONE_EXACT, "next[r] += total;", "", "bound off"),
    "bytes of the last lane forgotten": (ONE_EXACT, "(before + near, LANES - 1)", "(before, LANES - 1)", "bound off"),
    "counted up to another lane": (ONE_EXACT, "(before + near, LANES - 1)", "(before + near, LANES - 2)", "bound off"),
    "counted by lanes with columns only": (ONE_EXACT, COUNT, LONE_COUNT, "divergence"),
    "window elsewhere": (ONE_EXACT, "WINDOW = 144", "WINDOW = 16", "bound off"),
    "zero cell wider": (MANY_EXACT, "fabs(scale) * 0.5f", "fabs(scale) * 1.5f", "bound off"),
    "another code": (ONE_EXACT, "code_value(word, i)", "code_value(word, i ^ 1)", "bound off"),
    "low byte of another weight": (ONE_EXACT, "two.y, lows[i])", "two.y, lows[i ^ 1])", "bound off"),
    "low bytes of other columns": (MANY_EXACT, "packed_uchar4*)low + unit", "packed_uchar4*)low + 1 + unit", OUT),
    "bytes swapped": (MANY_EXACT, "(near ? high : far) | low", "near ? low << 8 | high >> 8 : far | low", "bound off"),
    "first byte of each lane alone": (MANY_EXACT, "place < LANES ? two.x : two.y", "two.x", "bound off"),
    "too many bytes for two of each lane": (MANY_EXACT, "total <= 2 * LANES", "true", "bound off"),
    "another group": (MANY_EXACT, "at / (GROUP_SIZE / CODES);", "(at / (GROUP_SIZE / CODES) ^ 1);", "bound off|out-of"),
    "byte read twice": (MANY_EXACT, "bytes.x = high[lane];", READ_TWICE, "exactly as often"),
    "rows past the last": (
        ONE_EXACT,
        f"if (inside && first_row + r < rows) {UNIT}",
        f"if (inside) {UNIT}",
        "out-of-bounds",
    ),
    "offsets past the last": (ONE_EXACT, "there = first_row + r < rows;", "there = true;", "out-of-bounds"),
    "wrong vector": (MANY_EXACT, "x + v * columns", "x + columns", "bound off"),
    "step added to another row": (MANY_EXACT, "weights[r][i], held", "weights[0][i], held", "bound off"),
}


@pytest.mark.parametrize("name", OF_EXACT)
def test_mutation_of_exact_weights_is_caught(name):
    case, old, new, said = OF_EXACT[name]
    p = product(case)
    found = fault_of(case, p, run_launch(p.launch(), change=changer(old, new)))
    assert any(words in found for words in said.split("|")), found or "not caught"


# name: the offsets, the text, its replacement, what is seen
OF_LIES = {
    "end forgotten": ("past the end", "min(offsets[row + 1], uint(high_bytes))", "offsets[row + 1]", "out-of-bounds"),
    "places not checked": ("past the end", "near && place < there", "near", "out-of-bounds"),
    "row runs into the next": ("one byte short", "left[r] -= min(left[r], total);", "", "a number"),
    "no number is a zero": ("empty", "NOT_A_NUMBER = 0x7fc0", "NOT_A_NUMBER = 0", "a number"),
}


@pytest.mark.parametrize("name", OF_LIES)
def test_mutation_is_caught_by_false_offsets(name):
    lie, old, new, said = OF_LIES[name]
    p = lying(product(ExactCase(6, 576)), lie)
    report = run_launch(p.launch(), change=changer(old, new))
    right = np.isnan(run_launch(p.launch()).out[0])
    found = report.error or ("" if (np.isnan(report.out[0]) == right).all() else "a number where there is none")
    assert said in found, found or "not caught"


def test_batch_variance_shows_in_bits():
    """The test of equal bits can fail: a vector alone, summed in another order, has other bits."""
    p = product(ExactCase(9, 1088, vectors=2, dtype=mx.float32))
    alone = dataclasses.replace(p, x=p.x[:1])
    another = changer("float dot = 0.0f;", "float dot = sums[r][v]; sums[r][v] = 0.0f;")
    together = run_launch(p.launch()).out[0][:1]
    assert (run_launch(alone.launch()).out[0] == together).all()
    assert (run_launch(alone.launch(), change=another).out[0] != together).any()
