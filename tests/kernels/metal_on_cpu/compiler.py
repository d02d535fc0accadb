"""Finds clang, and compiles a kernel's text into a library."""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import object_store

from .text import instance, parameters

SHIM = Path(__file__).parent / "shim"
OLDEST, NEWEST = 17, 30  # 16 cannot compute with __bf16

# Metal rounds half-precision operations one by one, takes 0.1 for a float, and its char is always signed.
# Vectors and recognized builtins (a loop that copies becomes memcpy) would merge loads that are counted one by one.
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fsigned-char", "-fno-vectorize", "-fno-slp-vectorize", "-fno-builtin"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-cl-single-precision-constant"),
    *("-Wall", "-Werror", "-Wno-unused", "-Wno-unknown-attributes"),
    *("-fsanitize-coverage=bb,trace-loads,trace-stores", "-fsanitize-minimal-runtime"),
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,array-bounds",
]
# Unrolling changes no result and no byte that is read, and takes a compiler two to three times as long.
ROLLED = ["-mllvm", "-pragma-unroll-threshold=0", "-Wno-pass-failed"]
BFLOAT_FLAGS = ["-Xclang", "-fbfloat16-excess-precision=none"]  # clang 19 and later

PRELUDE = """#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""

# How a kernel gets its attributes from a Position of runtime.cpp. Grids have one dimension.
ATTRIBUTES = {
    "thread_position_in_grid": "uint3{p->group * p->group_size + p->index, 0, 0}",
    "thread_position_in_threadgroup": "uint3{p->index, 0, 0}",
    "threadgroup_position_in_grid": "uint3{p->group, 0, 0}",
    "thread_index_in_threadgroup": "p->index",
    "thread_index_in_simdgroup": "p->lane",
    "simdgroup_index_in_threadgroup": "p->simd_group",
}

ENTRY = """
#line 1 "entry"
extern "C" {{
struct Position {{ uint32_t group, index, lane, simd_group, group_size; }};
struct Job;
void metal_run(Job*, void (*)(void**, const Position*), void**);
void run(Job* job, void** arguments) {{
    metal_run(job, [](void** a, const Position* p) {{ {instance}({arguments}); }}, arguments);
}}
}}
"""


class DoesNotCompile(Exception):
    """clang's messages about a kernel."""


@functools.cache
def find_clang() -> str | None:
    """A clang++ of 17 or later, or None. Linux only: the runtime is not written for other systems."""
    if sys.platform != "linux":
        return None
    names = ["clang++", *(f"clang++-{version}" for version in range(NEWEST, OLDEST - 1, -1))]
    for path in filter(None, map(shutil.which, names)):
        told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"clang version (\d+)", told)
        if version and int(version.group(1)) >= OLDEST:
            return path
    return None


@functools.cache
def _flags(clang: str) -> list[str]:
    probe = [clang, *BFLOAT_FLAGS, "-x", "c++", "-fsyntax-only", "/dev/null"]
    known = subprocess.run(probe, capture_output=True).returncode == 0
    return FLAGS + (BFLOAT_FLAGS if known else [])


def translation_unit(text: str) -> str:
    """The kernel's text with only two changes, and a function that calls it for one thread.

    Threadgroup variables become references into memory that runtime.cpp watches, since a CPU has none; the explicit
    instantiation with its Metal name is removed.
    """

    def in_watched_memory(declared: re.Match[str]) -> str:
        kind, name, extent = declared.groups()
        memory = f"metal_threadgroup_memory({declared.start()}, sizeof({kind}{extent}))"
        return f"threadgroup {kind} (&{name}){extent} = *(threadgroup {kind} (*){extent}){memory};"

    body = re.sub(r"\btemplate \[\[host_name[^\n]*\n", "\n", text + "\n")
    body = re.sub(r"\bthreadgroup (\w+) (\w+)(\[[^\];]*\]);", in_watched_memory, body)
    arguments = []
    for index, parameter in enumerate(parameters(text)):
        kind = parameter.type
        if not parameter.is_buffer:
            arguments.append(ATTRIBUTES[parameter.name])
        elif kind.endswith("&"):
            arguments.append(f"*({kind[:-1]}*)a[{index}]")
        else:
            arguments.append(f"({kind})a[{index}]")
    entry = ENTRY.format(instance=instance(text), arguments=", ".join(arguments))
    return PRELUDE + '#line 1 "kernel.metal"\n' + body + entry


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DoesNotCompile(done.stderr[:4000])


@functools.cache
def _version(clang: str) -> str:
    return subprocess.run([clang, "--version"], capture_output=True, text=True).stdout


@functools.cache
def _load_runtime(clang: str) -> None:
    """Loads one runtime for all kernels, which find its functions in the process."""
    source, flags = SHIM / "runtime.cpp", ["-std=c++17", "-O2", "-fPIC", "-Wall", "-shared"]

    def make(folder: Path) -> None:
        _run([clang, *flags, str(source), "-o", str(folder / "runtime.so")])

    made = object_store.kept([_version(clang), flags, source], make)
    ctypes.CDLL(str(made / "runtime.so"), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def library(text: str) -> Path:
    """Compiles a kernel's text, once for each text, and loads the runtime.

    Raises:
        DoesNotCompile: with clang's messages, by line of the kernel's text.
    """
    clang = find_clang()
    assert clang
    made = _compiled(clang, text, [*_flags(clang), *ROLLED])
    _load_runtime(clang)
    return made


def unroll(text: str) -> None:
    """Compiles a kernel's text with its loops unrolled. Raises DoesNotCompile where clang cannot unroll one."""
    clang = find_clang()
    assert clang
    _compiled(clang, text, _flags(clang))


def _compiled(clang: str, text: str, flags: list[str]) -> Path:
    unit = translation_unit(text)

    def make(folder: Path) -> None:
        source = folder / "kernel.cpp"
        source.write_text(unit)
        # Without the C++ library, which takes longer to link than a kernel to compile; libgcc converts half precision.
        link = ["-shared", "-nostdlib", str(source), "-lgcc", "-o", str(folder / "kernel.so")]
        _run([clang, *flags, "-I", str(SHIM), *link])

    return object_store.kept([_version(clang), flags, unit, SHIM / "metal_stdlib"], make) / "kernel.so"
