"""Counts the instructions that a SIMD group executes in a kernel's text, and what Apple's cores take for them.

clang compiles the text to LLVM's intermediate code, as Apple's compiler does, with every loop unrolled that says so. A
mark in each block says how often a SIMD group goes through it while the harness runs the text: as often as the lane
that goes most often. Cycles are those that philipturner/metal-benchmarks measured on M1 and M2, in units in which 128
lanes of a core add: an addition, a comparison that selects or a bitwise operation takes 1; a shift, a conversion or a
count of bits 4; lanes exchange 64 numbers in a cycle, 2. Addresses of 32-bit offsets, absolute values and halves of
registers are free, as operands are. What Apple's compiler makes of the text may be less, or more.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import object_store

from .compiler import SHIM, _load_runtime, _run, _version, find_clang, translation_unit

FLAGS = [
    *("-std=c++17", "-O2", "-fPIC", "-fsigned-char", "-fno-vectorize", "-fno-slp-vectorize", "-DMETAL_COSTS", "-w"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *("-mllvm", "-inline-threshold=1000000"),  # a GPU's compiler makes one function of a kernel
    "-fsanitize-coverage=bb,no-prune,trace-pc-guard",
]
MARK = re.compile(r"call void @__sanitizer_cov_trace_pc_guard\(.*")
DEFINED = re.compile(r"^  (?:(%[\w.]+) = )?(?:tail |notail |musttail )*(\w+)(.*)$")

FREE = frozenset(
    "phi bitcast addrspacecast getelementptr extractelement insertelement extractvalue insertvalue zext trunc ptrtoint "
    "inttoptr ret unreachable freeze sext alloca fneg shufflevector".split()
)
CYCLES = {"mul": 4, "sitofp": 4, "uitofp": 4, "fptosi": 4, "fptoui": 4, "fptrunc": 4, "fdiv": 6, "udiv": 12, "sdiv": 12}
SHIFT = 4
BRANCH = 3  # the mask of lanes is pushed, tested and popped
LANES_EXCHANGE = {  # of 32 lanes, five steps of an exchange and an addition for those over all lanes
    "simd_shuffle": 2,
    "simd_broadcast": 2,
    "simd_sum": 15,
    "simd_max": 15,
    "simd_prefix_exclusive_sum": 15,
    "simd_any": 2,
}
CALLS = {"fabs": 0, "fma": 1, "umin": 1, "umax": 1, "smin": 1, "smax": 1, "ctpop": 4, "bswap": 4, "expf": 8, "exp": 8}


@dataclass
class Block:
    """What a block has once: cycles, and how many instructions of each kind."""

    cycles: float = 0
    kinds: Counter[str] = field(default_factory=Counter)


def cost(name: str, operation: str, rest: str, selected: frozenset[str]) -> tuple[str, float]:
    """Return an instruction's kind and cycles; `selected`: comparisons that only choose between values."""
    wide = 4 if re.match(r"(?: nuw| nsw| exact| disjoint)* i64 ", rest) else 1
    if operation in ("load", "store"):
        space = re.search(r"addrspace\((\d)\)", rest)
        return {"1": "device ", "2": "constant ", "3": "threadgroup "}.get(space[1] if space else "", "stack ") + operation, 1
    if operation == "br":
        return ("branch", BRANCH) if rest.startswith(" i1") else ("", 0)
    if operation == "call":
        return call(rest)
    if operation in ("shl", "lshr", "ashr"):
        half = re.search(r", 16$", rest) is not None
        return ("", 1) if half and wide == 1 else ("shift", SHIFT * (2 if wide > 1 else 1))
    if operation in ("icmp", "fcmp"):
        return "", 0 if name in selected else 1
    if operation == "fpext":
        return "", 1 if " bfloat" in rest else 0
    if operation in FREE:
        return "", 0
    cycles = CYCLES.get(operation, 1)
    return ("conversion" if operation.endswith("fp") else "", cycles * wide)


def call(rest: str) -> tuple[str, float]:
    found = re.search(r"@([\w.]+)\(", rest)
    name = found[1] if found else ""
    simd = re.search(r"metal\d+(simd_[a-z_]+?)I", name)
    if simd:
        return "exchange", LANES_EXCHANGE[simd[1]]
    if "threadgroup_barrier" in name or name == "metal_barrier":
        return "barrier", 1
    for known, cycles in CALLS.items():
        if name == known or name == f"{known}f" or name.startswith(f"llvm.{known}."):
            return "", cycles
    return "", 0


def blocks_of(code: str) -> tuple[str, list[Block]]:
    """Return the code with a number for each mark, and what the marked blocks have."""
    lines, blocks, current = [], [], None
    chosen, others = set(), set()
    for line in code.splitlines():
        if " select i1 " in line:
            chosen.update(re.findall(r"select i1 (%[\w.]+),", line))
            others.update(re.findall(r"%[\w.]+", line.split(",", 1)[1]))
        else:
            others.update(re.findall(r"%[\w.]+", line.split(" = ", 1)[-1]))
    selected = frozenset(chosen - others)
    for line in code.splitlines():
        if MARK.search(line):
            current = Block()
            blocks.append(current)
            line = MARK.sub(f"call void @metal_block(i32 {len(blocks) - 1})", line)
        elif current and (found := DEFINED.match(line)):
            kind, cycles = cost(found[1] or "", found[2], found[3], selected)
            current.cycles += cycles
            current.kinds[kind] += 1
        elif line.startswith("}"):
            current = None
        lines.append(line)
    declared = "declare void @metal_block(i32)\n"
    return "\n".join(lines) + "\n" + declared, blocks


@dataclass
class Counted:
    """What all SIMD groups of a launch execute: cycles, and instructions by kind."""

    cycles: float
    kinds: Mapping[str, float]


class Counting:
    """A text that counts its blocks: a stand-in for `compiler.library`."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def library(self, text: str) -> object:
        """Compile a text, and begin to count. Raises DoesNotCompile."""
        clang = find_clang()
        assert clang
        unit = translation_unit(text)

        def make(folder) -> None:
            source, code = folder / "kernel.cpp", folder / "kernel.ll"
            source.write_text(unit)
            _run([clang, *FLAGS, "-I", str(SHIM), "-S", "-emit-llvm", str(source), "-o", str(code)])
            marked, _ = blocks_of(code.read_text())
            (folder / "marked.ll").write_text(marked)
            link = ["-shared", "-fPIC", "-nostdlib", str(folder / "marked.ll"), "-lgcc", "-o", str(folder / "kernel.so")]
            _run([clang, "-O1", "-w", *link])

        folder = object_store.kept([_version(clang), FLAGS, unit, SHIM / "metal_stdlib", "costs 1"], make)
        _, self.blocks = blocks_of((folder / "kernel.ll").read_text())
        _load_runtime(clang)
        ctypes.CDLL(None).metal_count_blocks(len(self.blocks))
        return folder / "kernel.so"

    def counted(self) -> Counted:
        """Return what the launch executed."""
        times = (ctypes.c_uint64 * len(self.blocks))()
        ctypes.CDLL(None).metal_counted_blocks(times)
        kinds: Counter[str] = Counter()
        for block, often in zip(self.blocks, times):
            for kind, count in block.kinds.items():
                kinds[kind] += count * often
        return Counted(sum(block.cycles * often for block, often in zip(self.blocks, times)), kinds)
