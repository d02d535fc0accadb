"""Counts what a kernel's text takes of a GPU, without one: `python -m research metal-texts` shows it.

**Cycles.** clang compiles the text to LLVM's intermediate code, as Apple's compiler does, with every loop unrolled that
says so. A mark in each block tells how often SIMD groups go through it while the harness runs the text: each as often
as its busiest lane. Instructions have the cycles that philipturner/metal-benchmarks measured on M1 and M2, where a
core's 128 lanes add in one: a comparison that selects or a bitwise operation takes 1, a shift, a conversion or a count
of bits 4, a number from another lane 2. Absolute values, halves of registers and offsets of 32 bits are operands, and
take none.

**Registers.** The same text is compiled for a GPU of AMD with 32 lanes a SIMD group (gfx1100), for which LLVM tells
them. It has no halves of registers and adds 64-bit addresses itself, so that Apple's cores need fewer.

Neither is what Apple's compiler makes of the text. They compare two texts.
"""

import ctypes
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import object_store

from gearbx_mlx.kernels.metal import Launch, build
from gearbx_mlx.kernels.metal_products import dense_launch

from .compiler import PRELUDE, SHIM, _load_runtime, _run, _version, find_clang, translation_unit
from .exact_cases import Product, encode, rounded
from .launch import run_text
from .text import generated_text, instance, parameters

FLAGS = [
    *("-std=c++17", "-O2", "-fsigned-char", "-fno-vectorize", "-fno-slp-vectorize", "-DMETAL_COSTS", "-w"),
    *("-Xclang", "-cl-single-precision-constant", "-I", str(SHIM)),
    *("-mllvm", "-inline-threshold=1000000"),  # a GPU's compiler makes one function of a kernel
]
MARKED = ["-fPIC", "-fsanitize-coverage=bb,no-prune,trace-pc-guard"]
MARK = re.compile(r"call void @__sanitizer_cov_trace_pc_guard\(.*")
INSTRUCTION = re.compile(r"^  (?:(%[\w.]+) = )?(?:tail |notail |musttail )*(\w+)(.*)$")
AMD = ["-target", "amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-nogpulib", "-nostdinc", "-DMETAL_GPU"]

FREE = frozenset(
    [
        *("phi", "ret", "unreachable", "alloca", "getelementptr", "freeze", "fneg"),
        *("bitcast", "addrspacecast", "ptrtoint", "inttoptr", "zext", "sext", "trunc"),
        *("extractelement", "insertelement", "extractvalue", "insertvalue", "shufflevector"),
    ]
)
CYCLES = {"mul": 4, "sitofp": 4, "uitofp": 4, "fptosi": 4, "fptoui": 4, "fptrunc": 4, "fdiv": 6, "udiv": 12, "sdiv": 12}
SHIFTS = ("shl", "lshr", "ashr")
SHIFT = 4
BRANCH = 3  # the mask of lanes is pushed, tested and popped
CALLS = {"fma": 1, "umin": 1, "umax": 1, "smin": 1, "smax": 1, "ctpop": 4}
OVER_LANES = 15  # five times, a number from another lane and an addition
LANES_EXCHANGE = {
    "simd_shuffle": 2,
    "simd_broadcast": 2,
    "simd_sum": OVER_LANES,
    "simd_prefix_exclusive_sum": OVER_LANES,
}
SPACES = {"1": "device", "2": "constant", "3": "threadgroup"}


@dataclass
class Block:
    """What a block has, once: cycles, and instructions by kind."""

    cycles: float = 0
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Costs:
    """What a launch takes.

    cycles, loads, branches: of a core's 128 lanes, for each weight. registers: of a thread,
    on a GPU of AMD. spilled: numbers that have none.
    """

    cycles: float
    loads: float
    branches: float
    registers: int
    spilled: int


@dataclass(frozen=True)
class Uses:
    """Values by what uses them. selecting: comparisons that only choose. offsets: that only lead to an address."""

    selecting: frozenset[str]
    offsets: frozenset[str]


def cost(name: str, operation: str, rest: str, uses: Uses) -> tuple[str, float]:
    """Return an instruction's kind and cycles. Offsets have 32 bits on a GPU."""
    wide = re.match(r"(?: \w+)* i64 ", rest) is not None and name not in uses.offsets
    if operation in ("load", "store"):
        space = re.search(r"addrspace\((\d)\)", rest)
        return f"{SPACES[space[1]] if space else 'stack'} {operation}", 1
    if operation == "br":
        return ("branch", BRANCH) if rest.startswith(" i1") else ("", 0)
    if operation == "call":
        return "", call(re.search(r"@([\w.]+)\(", rest))
    if operation in SHIFTS:
        return "", SHIFT * (1 + wide) if wide or not rest.endswith(", 16") else 1
    if operation in ("icmp", "fcmp"):
        return "", name not in uses.selecting
    if operation == "fpext":
        return "", " bfloat" in rest
    return "", 0 if operation in FREE else CYCLES.get(operation, 1) * (4 if wide else 1)


def call(found: re.Match[str] | None) -> float:
    """Return the cycles of a function."""
    name = found[1] if found else ""
    if simd := re.search(r"metal\d+(simd_[a-z_]+?)I", name):
        return LANES_EXCHANGE[simd[1]]
    known = re.match(r"(?:llvm\.)?([a-z]+?)f?(?:\.|$)", name)
    return CALLS.get(known[1], 0) if known else 0


def uses_in(function: str) -> Uses:
    """Return what uses the values of a function."""
    chosen, others, users = set(), set(), defaultdict(set)
    for line in function.splitlines():
        defined, _, rest = line.strip().rpartition(" = ")
        select = re.match(r"select i1 (%[\w.]+),(.*)", rest)
        chosen.update([select[1]] if select else [])
        others.update(re.findall(r"%[\w.]+", select[2] if select else rest))
        for name in re.findall(r"%[\w.]+", rest):
            users[name].add("address" if rest.startswith("getelementptr") else defined or "other")
    offsets = {"address"}
    while found := {name for name, by in users.items() if by <= offsets} - offsets:
        offsets |= found
    return Uses(frozenset(chosen - others), frozenset(offsets))


def blocks_of(code: str) -> tuple[str, list[Block]]:
    """Return the code with numbered marks, and what is in the blocks that have them."""
    lines, blocks = [], [Block()]
    for function in re.split(r"^(?=define )", code, flags=re.MULTILINE):
        uses = uses_in(function)
        for line in function.splitlines():
            if MARK.search(line):
                blocks.append(Block())
                line = MARK.sub(f"call void @metal_block(i32 {len(blocks) - 1})", line)
            elif found := INSTRUCTION.match(line):
                kind, cycles = cost(found[1] or "", found[2], found[3], uses)
                blocks[-1].cycles += cycles
                blocks[-1].kinds[kind] += 1
            lines.append(line)
    return "\n".join([*lines, "declare void @metal_block(i32)", ""]), blocks


def marked_library(text: str) -> tuple[Path, list[Block]]:
    """Compile a text with a mark in each block. Raises DoesNotCompile."""
    clang, unit = found_clang(), translation_unit(text)

    def make(folder: Path) -> None:
        source, code, marked = (folder / name for name in ("kernel.cpp", "kernel.ll", "marked.ll"))
        source.write_text(unit)
        _run([clang, *FLAGS, *MARKED, "-S", "-emit-llvm", str(source), "-o", str(code)])
        marked.write_text(blocks_of(code.read_text())[0])
        link = ["-shared", "-nostdlib", str(marked), "-lgcc", "-o", str(folder / "kernel.so")]
        _run([clang, "-O1", "-fPIC", "-w", *link])

    folder = object_store.kept([_version(clang), FLAGS, MARKED, unit, SHIM / "metal_stdlib", Path(__file__)], make)
    return folder / "kernel.so", blocks_of((folder / "kernel.ll").read_text())[1]


def executed(text: str, made: Launch) -> Block:
    """Return what all SIMD groups of a launch execute. Raises AssertionError where the text is at fault."""
    library, blocks = marked_library(text)
    prepared = made.prepared
    inputs, options = prepared.completed(made.inputs), prepared.options
    _load_runtime(found_clang())
    runtime = ctypes.CDLL(None)
    runtime.metal_count_blocks(len(blocks))
    named = dict(zip(prepared.spec.input_names, inputs))
    out = options["output_shapes"][0], options["output_dtypes"][0]
    report = run_text(text, named, {"out": out}, options["grid"][0], options["threadgroup"][0], compiled=library)
    assert report.error == "", report.error
    times = (ctypes.c_uint64 * len(blocks))()
    runtime.metal_counted_blocks(times)
    total = Block()
    for block, often in zip(blocks, times):
        total.cycles += block.cycles * often
        total.kinds.update({kind: count * often for kind, count in block.kinds.items()})
    return total


def registers(text: str, threads: int) -> tuple[int, int]:
    """Return a thread's registers on a GPU of AMD, and how many numbers have none. Raises DoesNotCompile."""
    clang, unit = found_clang(), amd_unit(text)

    def make(folder: Path) -> None:
        source, code = folder / "kernel.cpp", folder / "kernel.ll"
        source.write_text(unit)
        early = ["-mllvm", "-amdgpu-early-inline-all=1"]
        _run([clang, *AMD, *FLAGS, *early, "-S", "-emit-llvm", str(source), "-o", str(code)])
        size = f'"amdgpu-flat-work-group-size"="{threads},{threads}" "target-cpu"'
        code.write_text(code.read_text().replace('"target-cpu"', size))
        _run([clang, *AMD, "-O2", "-w", "-S", str(code), "-o", str(folder / "kernel.s")])

    shims = [SHIM / name for name in ("metal_stdlib", "gpu_types", "gpu_lanes")]
    folder = object_store.kept([_version(clang), FLAGS, AMD, threads, unit, *shims, Path(__file__)], make)
    assembly = (folder / "kernel.s").read_text()
    used = re.search(r"\.vgpr_count: +(\d+)\n +\.vgpr_spill_count: +(\d+)", assembly)
    assert used, "LLVM does not say how many registers a kernel needs"
    return int(used[1]), int(used[2])


THREAD = "__builtin_amdgcn_workitem_id_x()"
ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3{__builtin_amdgcn_workgroup_id_x(), 0, 0}",
    "thread_index_in_threadgroup": THREAD,
    "thread_index_in_simdgroup": f"{THREAD} % 32",
    "simdgroup_index_in_threadgroup": f"{THREAD} / 32",
}


def amd_unit(text: str) -> str:
    """Return the text as a kernel of a GPU of AMD: threadgroup memory is static, attributes are asked for."""
    uninitialized = r"[[clang::loader_uninitialized]] static threadgroup \1;"
    body = re.sub(r"\bthreadgroup (\w+ \w+\[[^\];]*\]);", uninitialized, text)
    taken, given = [], []
    for index, each in enumerate(parameters(text)):
        if each.is_buffer:
            taken.append(f"{each.type.replace('&', '*')} a{index}")
            given.append(f"*a{index}" if each.type.endswith("&") else f"a{index}")
        else:
            given.append(ATTRIBUTES[each.name])
    head = f'extern "C" __attribute__((amdgpu_kernel)) void entry({", ".join(taken)})'
    return f"{PRELUDE}{body}\n{head} {{ {instance(text)}({', '.join(given)}); }}\n"


def found_clang() -> str:
    clang = find_clang()
    assert clang, "clang++ 17 or later is not installed"
    return clang


def costs(made: Launch, numbers: int) -> Costs:
    """Return what a launch takes for each of so many weights."""
    prepared = made.prepared
    text = generated_text(build(prepared.spec), prepared.completed(made.inputs), prepared.options)
    total, (used, spilled) = executed(text, made), registers(text, prepared.options["threadgroup"][0])
    each = 32 / numbers  # a SIMD group's instruction takes a quarter of a core, and has 32 of its 128 lanes
    return Costs(total.cycles * each, total.kinds["device load"] * each, total.kinds["branch"] * each, used, spilled)


def launches() -> Iterator[tuple[str, Launch, int]]:
    """Yield launches by name, with the number of their bf16 weights, of 16 rows: a threadgroup or more."""
    rows, columns = 16, 2048
    weight = np.random.default_rng(0).standard_normal((rows, columns)) * 0.05
    exact, dense = encode(rounded(weight)), mx.array(weight.astype(np.float32)).astype(mx.bfloat16)
    for vectors in (1, 4, 8, 16):
        x = mx.ones((vectors, columns), mx.bfloat16)
        yield f"exact, {vectors}", Product(rounded(weight), exact, x, None).launch(), rows * columns
        yield f"dense, {vectors}", dense_launch(x, dense), rows * columns
    yield "exact, decoded", Product(rounded(weight), exact, x, None).decoder(), rows * columns
    yield "dense of odd rows, 4", dense_launch(x[:4, :-3], dense[:, :-3]), rows * (columns - 3)


if __name__ == "__main__":
    json.dump({name: asdict(costs(made, numbers)) for name, made, numbers in launches()}, sys.stdout)
