"""AION's law (5.3): do products of integers lose by rounding activations what they save in arithmetic?

`terms.cpp` has each term of the cost model by itself (5.2), and the products that consist of them, with one format and
one length of rows. Each is timed on one thread, with weights in the first cache and from memory; terms and products
take turns. A product is then predicted from its terms, as the sum of all (equations 1 and 2), and as the larger of
reading and the rest, since a processor reads ahead while it computes. Where clang and llvm-mca are installed,
instructions are counted, for this processor and for Apple's, and llvm-mca predicts their cycles: what a Mac does is not
measured, but it is not guessed either. Hardware counters are not read: virtual machines have none.
"""

import ctypes
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pages import table
from rich.progress import track

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.kernels.compiler import Unavailable, find_compiler, this_target

from .studies import Found, spread, study, table_here

SOURCE = Path(__file__).with_name("terms.cpp")
STANDARD = ("-std=c++20", "-O3")
GROUP, FLOATS, ALIGNED = 32, 4, 64
MEANINGS = {
    "read_4": "read 4-bit codes and scales",
    "read_8": "read 8-bit codes and scales",
    "read_16": "read bfloat16",
    "read_32": "read float32",
    "dequant_4": "4-bit codes become float32",
    "dequant_8": "8-bit codes become float32",
    "dequant_16": "bfloat16 becomes float32",
    "fma_x": "float32 times activations",
    "scale_floats": "sums of a group times its scale",
    "unpack_4": "4-bit codes become bytes",
    "sdot_x": "bytes times activations of 8 bits",
    "scale_sums": "the same, of integers",
    "quant_act": "round the activations, for each row",
}
READ_BITS = {"read_4": 4, "read_8": 8, "read_16": 16, "read_32": 32}
FLOAT_PARTS, BYTE_PARTS = ("fma_x", "scale_floats"), ("sdot_x", "scale_sums")
PARTS = {  # of each product: what reads, and the other terms
    "int4_floats": ("read_4", ("dequant_4", *FLOAT_PARTS)),
    "w4a8": ("read_4", ("unpack_4", *BYTE_PARTS)),
    "int8_floats": ("read_8", ("dequant_8", *FLOAT_PARTS)),
    "w8a8": ("read_8", BYTE_PARTS),
    "bfloat16": ("read_16", ("dequant_16", "fma_x")),
    "float32": ("read_32", ("fma_x",)),
}
NAMES = {
    "int4_floats": "4 bits, weight-only",
    "w4a8": "W4A8",
    "int8_floats": "8 bits, weight-only",
    "w8a8": "W8A8",
    "bfloat16": "bfloat16",
    "float32": "float32",
}
ROUNDED = ("w4a8", "w8a8")  # whose activations are rounded once for all rows
MARKED = {"quant_act": ("quant_act_most", "quant_act_round")}  # marks in the text, where they are not named as the term
CACHED, MEMORY = "first cache", "memory"
CACHED_ROWS = 2048

Times = dict[str, float]  # picoseconds for the weights of a group


class Matrix(ctypes.Structure):
    """As in terms.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "x", "bytes", "x_sums", "b_sums", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_bytes", "row_scales")),
    ]


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that begins at a line of the cache."""
    room = np.zeros(values.nbytes + ALIGNED, np.uint8)
    begin = -room.ctypes.data % ALIGNED
    made = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


class Arrays:
    """What a call of terms.cpp works on: rows of weights with scales, activations, and room for the result.

    Args:
        weights: (rows, bytes of a row) uint8; scales: (rows, groups) float32; x: (columns,) float32.
        bits: of a weight; the offset of its codes depends on it.
    """

    def __init__(self, weights: np.ndarray, scales: np.ndarray, x: np.ndarray, bits: int):
        self.weights, self.scales, self.x = aligned(weights), aligned(scales), aligned(x)
        self.step = np.float32(np.abs(x).max() / 127)
        self.bytes = aligned(np.rint(x / self.step).astype(np.int8))
        off = {4: 8, 8: 64}.get(bits, 0)
        groups = (-1, GROUP)
        self.x_sums = aligned(off * x.reshape(groups).sum(1, dtype=np.float32))
        self.b_sums = aligned(off * self.bytes.reshape(groups).sum(1, dtype=np.float32))

    def matrix(self, rows: int, again: bool = False) -> tuple[Matrix, np.ndarray]:
        """All rows, or the first one `rows` times; and the result."""
        out = aligned(np.zeros(rows, np.float32))
        arrays = self.weights, self.scales, self.x, self.bytes, self.x_sums, self.b_sums, out
        distances = (0, 0) if again else (self.weights.shape[1], self.scales.shape[1])
        return Matrix(*(each.ctypes.data for each in arrays), rows, len(self.x), *distances), out


def compiled(folder: Path, source: Path = SOURCE) -> Any:
    """A source as a library. Raises GearbxError where there is no compiler, or a processor without its instructions."""
    library = folder / f"{source.stem}.so"
    try:
        compiler = [llvm[0]] if (llvm := tools()) else find_compiler()  # clang, whose instructions are counted
    except Unavailable as why:
        raise GearbxError(str(why)) from None
    how = (*STANDARD, *this_target().processor_flags, "-fPIC", "-shared", "-o", str(library), str(source))
    done = subprocess.run([*compiler, *how], capture_output=True, text=True)
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), "the compiler failed")
        raise GearbxError(f"{source.name}: {words.partition('error: ')[2] or words}")
    return ctypes.CDLL(str(library))


def seconds_of(call: Callable[[Any], None], matrix: Matrix) -> float:
    """Processor time of a call."""
    begun = time.process_time()
    call(ctypes.byref(matrix))
    return time.process_time() - begun


def measure(library: Any, columns: int, megabytes: int, rounds: int) -> dict[str, list[Times]]:
    """For each round the picoseconds of terms and products, by where the weights are. All take turns in a round."""
    filled = np.full(megabytes * 2**20, 0x3C, np.uint8)  # as codes, as bfloat16 and as float32: harmless numbers
    x = np.random.default_rng(0).standard_normal(columns).astype(np.float32)
    of_bits: dict[int, tuple[Arrays, int]] = {}
    for bits in READ_BITS.values():
        weights = filled.reshape(-1, columns * bits // 8)
        of_bits[bits] = Arrays(weights[:1], np.full((1, columns // GROUP), 0.01, np.float32), x, bits), len(weights)
    large = aligned(filled)
    scales = aligned(np.full((of_bits[4][1], columns // GROUP), 0.01, np.float32))
    found: dict[str, list[Times]] = {CACHED: [], MEMORY: []}
    for trial in track(range(rounds + 1), "rounds"):
        times: dict[str, Times] = {CACHED: {}, MEMORY: {}}
        for name in (*MEANINGS, *PARTS):
            bits = READ_BITS[PARTS[name][0] if name in PARTS else name] if name in PARTS or name in READ_BITS else 4
            arrays, rows = of_bits[bits]
            matrix, _out = arrays.matrix(CACHED_ROWS, again=True)
            call = getattr(library, name)
            call(ctypes.byref(matrix))  # what it reads is in the cache from here on
            per_group = 1e12 * GROUP / columns
            times[CACHED][name] = per_group * seconds_of(call, matrix) / CACHED_ROWS
            if name in PARTS or name in READ_BITS:
                whole, _out = arrays.matrix(rows)
                whole.weights, whole.scales = large.ctypes.data, scales.ctypes.data
                whole.row_bytes, whole.row_scales = columns * bits // 8, columns // GROUP
                times[MEMORY][name] = per_group * seconds_of(call, whole) / rows
        if trial:
            for place, each in times.items():
                found[place].append(each)
    return found


def predictions(terms: Times, times: Times, product: str) -> dict[str, float]:
    """A product, measured and predicted: by the sum of its terms, and by the larger of reading and the rest.

    Args:
        terms: with the weights in the first cache. times: from where the weights are.
    """
    read, others = PARTS[product]
    rest = sum(terms[name] for name in others)
    rest += terms["quant_act"] / CACHED_ROWS if product in ROUNDED else 0
    found = {"measured": times[product], "sum": times[read] + rest, "larger": max(times[read], rest)}
    return found | {f"{way}_error": found[way] / found["measured"] - 1 for way in ("sum", "larger")}


def law(terms: Mapping[str, float]) -> dict[str, float]:
    """What integers save (equation 3), and what they cost: as equation 4 has it, with unpacking, and shared by rows.

    And how many rows must share a rounding for both to be equal.
    """
    costs = {
        "equation 4": terms["quant_act"] - terms["dequant_4"],
        "with unpacking": terms["quant_act"] + terms["unpack_4"] - terms["dequant_4"],
        "shared by the rows": terms["quant_act"] / CACHED_ROWS + terms["unpack_4"] - terms["dequant_4"],
    }
    saved = terms["fma_x"] - terms["sdot_x"]
    alike = terms["quant_act"] / (saved + terms["dequant_4"] - terms["unpack_4"])
    return {"arithmetic": saved} | costs | {"rows for which it would hold": alike}


# By instructions

APPLE = ("-target", "aarch64-linux-gnu", "-mcpu=apple-m1", "-ffreestanding"), ("-mtriple=aarch64", "-mcpu=apple-m1")
HERE = ("-march=native",), ("-mcpu=native",)
ITERATIONS = 100  # of a step: so many that the first read counts little


def tools() -> tuple[str, str] | None:
    """Return clang++ and llvm-mca of one version: an older llvm-mca does not know all that clang++ writes."""
    for suffix in (*(f"-{version}" for version in range(29, 16, -1)), ""):
        compiler, predictor = shutil.which(f"clang++{suffix}"), shutil.which(f"llvm-mca{suffix}")
        if compiler and predictor:
            return compiler, predictor
    return None


def steps(assembly: str) -> dict[str, list[str]]:
    """The instructions between the marks of each step."""
    found = {}
    for name, text in re.findall(r"LLVM-MCA-BEGIN (\w+)\n(.*?)LLVM-MCA-END \1\n", assembly, re.DOTALL):
        lines = (line.split("# ")[0].split("//")[0].strip() for line in text.splitlines())
        found[name] = [line for line in lines if line and line[0] not in ".#"]
    return found


def cycles(predictor: str, instructions: Sequence[str], flags: Sequence[str]) -> float:
    """Return the cycles of a repeated step, as llvm-mca predicts."""
    command = [predictor, *flags, "-json", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(instructions) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise GearbxError(f"llvm-mca failed: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    return json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]["TotalCycles"] / ITERATIONS


def by_instructions(how: tuple[Sequence[str], Sequence[str]]) -> dict[str, tuple[float, float]]:
    """The instructions and the cycles of a group by term and product; empty where clang or llvm-mca is missing."""
    found_tools = tools()
    if found_tools is None:
        return {}
    compiler, predictor = found_tools
    command = [compiler, *STANDARD, *how[0], "-DMARKS", "-S", "-o", "-", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {}
    found = steps(done.stdout)
    counted = {}
    for name in (*MEANINGS, *PARTS):
        marks = MARKED.get(name, (name,))
        groups = 1 if name in MARKED else 4  # of a step
        counted[name] = (
            sum(len(found[mark]) for mark in marks) / groups,
            sum(cycles(predictor, found[mark], how[1]) for mark in marks) / groups,
        )
    return counted


# What the page shows


def middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def middle_half(values: Iterable[float], digits: int = 0) -> str:
    """The median, and the quartiles."""
    return spread(values, digits, quartiles=True)


def counted_cells(counted: Mapping[str, tuple[float, float]], name: str) -> list[str]:
    return [f"{value:.1f}" for value in counted[name]] if counted else ["", ""]


def terms_table(found: Mapping[str, list[Times]], counts: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    rows = []
    for name, meaning in MEANINGS.items():
        times = [middle_half(each[name] for each in found[CACHED])]
        times.append(middle_half(each[name] for each in found[MEMORY]) if name in READ_BITS else "")
        rows.append([f"`{name}`", meaning, *times, *(cell for each in counts for cell in counted_cells(each, name))])
    head = ["term", "what it does", "ps", "from memory, ps", "instructions", "cycles", "Apple: instructions", "cycles"]
    return table_here(head, rows)


def products_rows(found: Mapping[str, list[Times]]) -> list[dict[str, Any]]:
    """A row for each product and place of the weights: medians over rounds, and the spread of the errors."""
    rows = []
    for place, rounds in found.items():
        for product in PARTS:
            each = [predictions(*pair, product) for pair in zip(found[CACHED], rounds)]
            errors = {way: [100 * one[f"{way}_error"] for one in each] for way in ("sum", "larger")}
            rows.append({"product": product, "place": place} | middle(each) | {"errors": errors})
    return rows


def products_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            *(NAMES[row["product"]], row["place"], *(f"{row[way]:.0f}" for way in ("measured", "sum"))),
            *(middle_half(row["errors"]["sum"]), f"{row['larger']:.0f}", middle_half(row["errors"]["larger"])),
        ]
        for row in rows
    ]
    return table(["product", "weights in", "ps", "sum of terms", "error, %", "larger of two", "error, %"], lines)


def law_table(found: Mapping[str, list[Times]], counts: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    """The two sides of the law, measured here and predicted for Apple's cores, and both products of 4 bits."""
    here = [law(each) for each in found[CACHED]]
    apple = law({name: each[1] for name, each in counts[1].items()}) if counts[1] else {}
    rows = []
    for name in here[0]:
        digits = 1 if name.startswith("rows") else 0
        rows.append([name, middle_half((each[name] for each in here), digits), f"{apple[name]:.1f}" if apple else ""])
    rows.append(["weight-only over W4A8, first cache", twice_as(found[CACHED]), predicted_ratio(counts[1])])
    rows.append(["the same from memory", twice_as(found[MEMORY]), ""])
    return table(["", "here, ps", "Apple, cycles"], rows)


def twice_as(rounds: Sequence[Times]) -> str:
    """How many times as long the product by floats takes as that by integers."""
    return middle_half((each["int4_floats"] / each["w4a8"] for each in rounds), 2)


def predicted_ratio(counted: Mapping[str, tuple[float, float]]) -> str:
    return f"{counted['int4_floats'][1] / counted['w4a8'][1]:.2f}" if counted else ""


@study("research/tables.md", minutes=1)
def conservation(columns: int = 2048, megabytes: int = 256, rounds: int = 61) -> Found:
    """AION's law: the terms of its cost model, each alone, and how well they predict products of 4, 8 and 16 bits.

    Args:
        columns: Of a row; a multiple of 512. The activations and a row of float32 have to fit into the first cache.
        megabytes: Of weights that are read from memory.
    """
    if columns <= 0 or columns % 512:
        raise GearbxError(f"--columns {columns}: is not a multiple of 512")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(compiled(Path(folder)), columns, megabytes, rounds)
    counts = [by_instructions(how) for how in (HERE, APPLE)]
    products = products_rows(found)
    tables = {
        "law_terms": terms_table(found, counts),
        "law_products": products_table(products),
        "law": law_table(found, counts),
    }
    data = {"terms": {place: middle(rounds) for place, rounds in found.items()}, "products": products}
    return Found(tables, data | {"instructions": {"here": counts[0], "apple": counts[1]}})
