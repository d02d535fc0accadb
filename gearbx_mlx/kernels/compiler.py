"""Compilation of the CPU kernels in `cpu/` with this machine's C++ compiler, as a Python extension over MLX.

The kernels are compiled in parallel and for speed. The bindings to MLX and Python run once per operation, and their
headers take most of the time: they are compiled together and for size. A `CompileTarget` is a system, its processor and
the MLX to link with. GEARBX_CPU selects the processor's instructions.
"""

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import GearbxError
from . import wheel

CPU_VARIABLE = "GEARBX_CPU"
NATIVE_CPU, AMX, AVX512, AVX2, NEON, PORTABLE = "native", "amx", "avx512", "avx2", "neon", "portable"
AMX_TWIN = "amx-twin"  # for tests: matrix tiles in plain C++, many times slower
X86_64 = ("x86_64", "amd64", "AMD64")
ARM = ("arm64", "aarch64")
X86_64_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
BEYOND_V4 = ("vnni", "bf16", "vbmi", "vbmi2", "bitalg")  # additions of Zen 4 and Sapphire Rapids to x86-64-v4


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set of several processors. flags: of the compiler. needs: names in Linux's /proc/cpuinfo."""

    machines: tuple[str, ...]
    flags: tuple[str, ...]
    needs: frozenset[str]


V4_FLAGS = "-march=x86-64-v4", *(f"-mavx512{name}" for name in BEYOND_V4)
V4_NEEDS = (
    frozenset(X86_64_V3)
    | {f"avx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "vbmi")}
    | {f"avx512_{name}" for name in BEYOND_V4 if name != "vbmi"}
)
TILES = "tile", "bf16", "int8"
INSTRUCTION_SETS = {  # the best first
    AMX: InstructionSet(
        X86_64, (*V4_FLAGS, *(f"-mamx-{name}" for name in TILES)), V4_NEEDS | {f"amx_{name}" for name in TILES}
    ),
    AVX512: InstructionSet(X86_64, V4_FLAGS, V4_NEEDS),
    AVX2: InstructionSet(X86_64, ("-march=x86-64-v3",), frozenset(X86_64_V3)),
    NEON: InstructionSet(ARM, ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
}
DEFINED = {  # macros of cpu/simd.h and cpu/matrix_tiles.h; portable kernels use the vectors of GCC and Clang
    PORTABLE: ("-DGEARBX_PORTABLE",),
    AMX_TWIN: ("-DGEARBX_TILE_TWIN",),
}
OLDEST_MAC = "apple-m1"  # compilers' name of its processor; known to GCC 15 and later
CPUINFO = Path("/proc/cpuinfo")  # Linux

SOURCES = Path(__file__).with_name("cpu")
COMPILERS = ("c++", "g++", "clang++")
# No contraction: all loops that the compiler makes of one template must give bit-identical results.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
COLD = ("-Os",)  # for the bindings
PLACEHOLDERS = Path("/usr/bin")  # macOS's folder of placeholder compilers
MAX_SECONDS_TO_COMPILE = 300
ZIG = ("zig", "ziglang")  # `zig c++`, `python -m ziglang c++`
REMEDY = "install g++ or clang, set CXX, or install a wheel with kernels"


class Unavailable(Exception):
    """Error if native CPU kernels cannot be used; its message is a one-line reason."""


@dataclass(frozen=True)
class CompileTarget:
    """A machine to compile for, usually this one.

    system, machine: values of `sys.platform` and `platform.machine()`. mlx: the directory of its MLX. instructions:
    native (all of its processor), a name in INSTRUCTION_SETS, or portable (no explicit vector instructions).
    """

    system: str
    machine: str
    mlx: Path
    instructions: str = NATIVE_CPU

    @property
    def is_mac(self) -> bool:
        return self.system == "darwin"

    @property
    def is_arm(self) -> bool:
        return self.machine in ARM

    @property
    def processor_flags(self) -> tuple[str, ...]:
        """The compiler's flags for the processor; on a Mac for the oldest one, since its cache may move to others."""
        if self.instructions in INSTRUCTION_SETS:
            return INSTRUCTION_SETS[self.instructions].flags
        own = DEFINED.get(self.instructions, ())
        if self.is_arm and self.is_mac:
            return (f"-mcpu={OLDEST_MAC}", *own)
        if self.instructions != PORTABLE:
            return ("-mcpu=native" if self.is_arm else "-march=native", *own)
        oldest = "-march=armv8-a" if self.is_arm else "-march=x86-64"
        return (oldest, *own) if self.is_arm or self.machine in X86_64 else own

    @property
    def is_for_one_processor(self) -> bool:
        """Use of instructions that other processors may lack."""
        return self.processor_flags[0].endswith("=native")


def this_target() -> CompileTarget:
    """Return this machine, its MLX, and the instructions of GEARBX_CPU. Raises GearbxError as `instructions`."""
    return CompileTarget(sys.platform, platform.machine(), Path(mx.__file__).parent, instructions())


def instructions() -> str:
    """Return the value of GEARBX_CPU; by default, the best instruction set in the wheel, or `native` without one.

    Raises:
        GearbxError: unknown name, or instructions that this processor lacks.
    """
    here = [*(name for name in INSTRUCTION_SETS if not lacking(name)), PORTABLE]  # the best first
    brought = (name for name in here if wheel.library_for(name))
    requested = os.environ.get(CPU_VARIABLE) or next(brought, NATIVE_CPU)
    if requested in (NATIVE_CPU, *here, AMX_TWIN):
        return requested
    known = requested in INSTRUCTION_SETS
    why = f"this processor has no {', '.join(lacking(requested))}" if known else "unknown name"
    raise GearbxError(f"{CPU_VARIABLE}: {why}, got {requested!r}; choose from {', '.join((NATIVE_CPU, *here))}")


def lacking(name: str) -> list[str]:
    """Return the instructions of a set that this processor lacks, or may lack; empty if it has all."""
    wanted = INSTRUCTION_SETS[name]
    return sorted(wanted.needs - features()) if platform.machine() in wanted.machines else [name]


def cpuinfo(*fields: str) -> list[str]:
    """Return Linux's lines about the processor that begin with these fields; none on other systems."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(fields)]


def features() -> set[str]:
    """Return Linux's names of the processor's instructions; none on other systems."""
    return {word for line in cpuinfo("flags", "Features") for word in line.split()}


def processor_model() -> str:
    """Return the name of this processor, such as `Apple M2 Pro`; empty if the system has none."""
    if named := cpuinfo("model name"):
        return named[0].partition(":")[2].strip()
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]  # of macOS
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.strip()
    except OSError:
        return ""


def vector_instructions() -> str:
    """Return the common name of the kernels' vector instructions: AVX-512, AVX2, NEON, or none."""
    selected, found = instructions(), features()
    if selected == PORTABLE or platform.machine() in ARM:
        return "no vector instructions" if selected == PORTABLE else "NEON"
    if selected in (NATIVE_CPU, AMX, AVX512, AMX_TWIN) and "avx512f" in found:
        return "AVX-512"
    return "AVX2" if "avx2" in found else "SSE"


def vectors_at_once(instructions: str) -> int:
    """Return the number of vectors that kernels multiply in one pass over the weights (VECTORS in cpu/tile.h).

    Args:
        instructions: name from `native_instructions` (dispatch.py).
    """
    return {"AMX": 16, "AVX-512": 8, "AVX2": 5}.get(instructions, 4)


def processor_features() -> str:
    """Return this processor's model and, on Linux, its instruction sets: -march=native depends on them."""
    lines = cpuinfo("flags", "Features", "model name", "CPU implementer", "CPU part")
    return "\n".join(sorted({*lines})) or f"{platform.machine()} {processor_model() or platform.processor()}"


def processor_key() -> str:
    """Return 8 hexadecimal digits that change with this processor and GEARBX_CPU, to label measured times."""
    return hashlib.sha256(f"{instructions()}\n{processor_features()}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Recipe:
    """The commands of a compilation: one per kernel, one for all bindings, and one to link the objects into a library.

    compiler: its command, empty without one. flags: its arguments. link: more arguments to link. processor: the
    processor of `-march=native`, empty for other flags; different machines may share a home directory and its cache.
    """

    compiler: list[str]
    flags: list[str]
    kernels: list[Path]
    bindings: list[Path]
    link: list[str]
    processor: str


def find_compiler() -> list[str]:
    """Return the compiler's command: CXX, or the first of COMPILERS that is installed.

    Raises:
        Unavailable: no compiler, CXX does not name one, or macOS has only a placeholder for it.
    """
    named = os.environ.get("CXX")
    command = split_command(named) if named else [path for path in map(shutil.which, COMPILERS) if path][:1]
    if not command:
        raise Unavailable(f"no C++ compiler was found; {REMEDY}")
    if this_target().is_mac:
        ask_for_developer_tools(command)
    elif any(Path(word).stem in ZIG for word in command):
        raise Unavailable(f"{shlex.join(command)} uses the C++ library libc++, and MLX does not; {REMEDY}")
    return command


def split_command(named: str) -> list[str]:
    """Return the words of CXX. Raises Unavailable if it is no command, or its first word is no program."""
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise Unavailable(f"CXX: not a command ({error}), got {named!r}; set it to a compiler such as g++") from None
    if not words or not shutil.which(words[0]):
        raise Unavailable(f"CXX: no such compiler, got {named!r}; set it to a compiler such as g++")
    return words


def ask_for_developer_tools(command: list[str]) -> None:
    """Validate that macOS compiles and does not open a dialog.

    Without the developer tools, compilers in /usr/bin are placeholders that offer to install the tools.

    Raises:
        Unavailable: the developer tools are missing.
    """
    programs = (shutil.which(word) for word in command)  # CXX may be `ccache c++`
    if not any(program and Path(program).parent == PLACEHOLDERS for program in programs):
        return
    with suppress(OSError):
        if subprocess.run(["xcode-select", "-p"], stdin=subprocess.DEVNULL, capture_output=True).returncode:
            raise Unavailable("macOS's developer tools are not installed; run xcode-select --install")


def make_recipe(compiler: list[str], target: CompileTarget | None = None, runtime: str | None = None) -> Recipe:
    """Return the recipe for a machine and its MLX. Raises Unavailable on Windows or without MLX's headers.

    Args:
        compiler: its command; empty for the recipe of kernels that a different process compiled.
        target: the machine; None for this one. Headers of nanobind and Python are this machine's.
        runtime: folder of MLX when kernels are loaded; None for its present folder.
    """
    target = target or this_target()
    if target.system == "win32":
        raise Unavailable("native CPU kernels are for Linux and macOS")
    import nanobind  # a dependency only on Linux and macOS

    nanobind_source = Path(nanobind.source_dir())
    if not (target.mlx / "include" / "mlx").is_dir():
        raise Unavailable(f"this MLX has no headers at {target.mlx / 'include'}")
    include = [
        target.mlx / "include",
        nanobind.include_dir(),
        nanobind_source.parent / "ext" / "robin_map" / "include",
        sysconfig.get_path("include"),
    ]
    threads = [] if target.is_mac else ["-pthread"]
    # MLX's bindings use this domain of nanobind: extensions can pass arrays to each other within one domain.
    defines = ("-DNB_DOMAIN=mlx", "-DNB_COMPACT_ASSERTIONS")
    flags = [*FLAGS, *target.processor_flags, *threads, *defines, *(f"-I{p}" for p in include)]
    link = [f"-L{target.mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{runtime or target.mlx / 'lib'}"]
    if target.is_mac:  # Python's functions are in the process; Linux needs no flag for this
        link += ["-undefined", "dynamic_lookup"]
    processor = processor_features() if target.is_for_one_processor else ""
    sources = sorted(SOURCES.glob("*.cpp"))
    bindings = [source for source in sources if source.stem.endswith("primitive")]
    kernels = [source for source in sources if source not in bindings]
    return Recipe(compiler, flags, kernels, [*bindings, nanobind_source / "nb_combined.cpp"], link, processor)


def hash_recipe(recipe: Recipe) -> str:
    """Return 24 hexadecimal digits that change with everything a compiled library depends on, except the compiler."""
    digest = hashlib.sha256()
    names = (each.name for each in (*recipe.kernels, *recipe.bindings))  # clone and installed package share a library
    texts = (*recipe.flags, *COLD, *names, *recipe.link)
    for text in (*texts, recipe.processor, version("mlx"), version("nanobind"), sys.version):
        digest.update(os.fsencode(text) + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def compile_library(recipe: Recipe, library: Path, compiled: Callable[[], None] = lambda: None) -> None:
    """Compile the sources into `library`. The object files stay beside it.

    Args:
        compiled: called after each run of the compiler: for each kernel, for the bindings, and to link.

    Raises:
        Unavailable: the compiler cannot be run, fails, takes too long, or writes no library.
    """
    command, bindings = [*recipe.compiler, *recipe.flags], library.with_name("bindings.cpp")
    bindings.write_bytes(os.fsencode("".join(f'#include "{source}"\n' for source in recipe.bindings)))
    units = {bindings: [*COLD, f"-I{SOURCES}"]} | {kernel: [] for kernel in recipe.kernels}  # longest time first
    objects = {source: str(library.with_name(f"{source.stem}.o")) for source in units}
    compilers = Compilers()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*command, *own, "-c", str(s), "-o", objects[s]] for s, own in units.items())
        try:
            for _ in pool.map(compilers.run, commands):
                compiled()
        except KeyboardInterrupt:  # a compiler may run for one more minute
            compilers.end()
            raise
    # The linker keeps the first copy of an inline function; the bindings' slower copy comes last.
    linked = [*(objects[kernel] for kernel in recipe.kernels), objects[bindings]]
    compilers.run([*command, "-shared", *linked, *recipe.link, "-o", str(library)])
    compiled()
    if not library.is_file():
        raise Unavailable(f"{Path(command[0]).name} reported success and wrote no CPU kernels")


def build_for_wheel(folder: Path) -> None:
    """Compile the kernels of a wheel for this system, Python and MLX into a folder, for each instruction set.

    Raises:
        Unavailable: as `find_compiler` and `compile_library`.
    """
    compiler, this = find_compiler(), this_target()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sets_of_wheel(this):
        runtime = f"{'@loader_path' if this.is_mac else '$ORIGIN'}/{wheel.TO_MLX}"
        recipe = make_recipe(compiler, replace(this, instructions=name), runtime)
        with tempfile.TemporaryDirectory() as work:
            library = Path(work) / f"{name}.so"
            compile_library(recipe, library)
            shutil.copyfile(library, folder / library.name)
    wheel.keep(folder)


def sets_of_wheel(target: CompileTarget) -> tuple[str, ...]:
    """Return the instruction sets of a wheel's kernels; a Mac's kernels suit every Mac."""
    if target.is_mac:
        return (NATIVE_CPU,)
    return (NEON,) if target.is_arm else (AVX512, AVX2, PORTABLE)


class Compilers:
    """Runner of several compiler commands at a time; an interrupt ends them."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: list[str]) -> None:
        """Run one command, in a process group of its own.

        Raises:
            Unavailable: it cannot be run, or fails; with the first error that it prints, and with a remedy if it does
                not know a Mac's processor.
        """
        name = Path(command[0]).name
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with self._lock:
            if self._ended:
                raise Unavailable("compilation was interrupted")
            try:
                process = subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **streams)
            except OSError as error:
                raise Unavailable(f"{name} cannot be run: {error.strerror}") from None
            self._running.add(process)
        with process:
            try:
                _, output = process.communicate(timeout=MAX_SECONDS_TO_COMPILE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise Unavailable(f"{name} did not compile the CPU kernels within {MAX_SECONDS_TO_COMPILE} s") from None
            except KeyboardInterrupt:
                self.end()
                raise
            finally:
                self._running.discard(process)
        if process.returncode:
            lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
            first = lines[0].strip()[:200] if lines else f"status {process.returncode}"
            remedy = "; use Apple's c++ (CXX=/usr/bin/c++), or GCC 15" if OLDEST_MAC in first else ""
            raise Unavailable(f"{name} could not compile the CPU kernels: {first}{remedy}")

    def end(self) -> None:
        """End running commands with their child processes, wait for them, and start no more.

        The executor does not join a thread that is interrupted at its start, so that this function waits.
        """
        with self._lock:
            self._ended, running = True, list(self._running)
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait()
