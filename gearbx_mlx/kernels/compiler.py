"""Compile the CPU kernels in `cpu/` with the C++ compiler of this machine, as a Python extension over MLX.

The sources are compiled side by side, against the headers and the library of the installed MLX.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

SOURCES = Path(__file__).with_name("cpu")
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a vector must get the same bits from each of the loops that the compiler makes of one template.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
# MLX's own bindings use this domain of nanobind; within one domain, extensions can pass arrays to each other.
DEFINES = ("-DNB_DOMAIN=mlx", "-DNB_COMPACT_ASSERTIONS")
SECONDS = 300  # for the compiler


class Unavailable(Exception):
    """Native CPU kernels cannot be used; the message is the reason, in one line."""


@dataclass(frozen=True)
class Recipe:
    """How to compile: every source with `command`, then all objects into one library with `link` added.

    compiler: its command, empty where there is none. flags: its further arguments.
    """

    compiler: list[str]
    flags: list[str]
    sources: list[Path]
    link: list[str]

    @property
    def command(self) -> list[str]:
        return [*self.compiler, *self.flags]


def find_compiler() -> list[str]:
    """The compiler's command: CXX, or the first of COMPILERS that is installed.

    Raises:
        Unavailable: there is no compiler, or CXX does not name one.
    """
    named = os.environ.get("CXX")
    if named:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise Unavailable(
                f"CXX is {named!r}, which is not a command ({error}); set it to one such as g++"
            ) from None
        if not words or not shutil.which(words[0]):
            raise Unavailable(f"CXX is {named!r}, and there is no such compiler")
        return words
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        raise Unavailable("no C++ compiler was found; install g++ or clang, or set CXX")
    return [found]


def make_recipe(compiler: list[str]) -> Recipe:
    """The recipe for this machine and the installed MLX. Raises Unavailable where there can be none.

    Args:
        compiler: its command; empty for the recipe of kernels that another process compiled.
    """
    if os.name == "nt":
        raise Unavailable("native CPU kernels are for Linux and macOS")
    import nanobind  # a dependency on Linux and macOS alone

    wheel, nanobind_source = Path(mx.__file__).parent, Path(nanobind.source_dir())
    if not (wheel / "include" / "mlx").is_dir():
        raise Unavailable(f"this MLX has no headers at {wheel / 'include'}")
    include = [
        wheel / "include",
        nanobind.include_dir(),
        nanobind_source.parent / "ext" / "robin_map" / "include",
        sysconfig.get_path("include"),
    ]
    mac = sys.platform == "darwin"
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = [*FLAGS, processor, *([] if mac else ["-pthread"]), *DEFINES, *(f"-I{p}" for p in include)]
    link = [f"-L{wheel / 'lib'}", "-lmlx", f"-Wl,-rpath,{wheel / 'lib'}"]
    if mac:
        link += ["-undefined", "dynamic_lookup"]
    return Recipe(compiler, flags, [*sorted(SOURCES.glob("*.cpp")), nanobind_source / "nb_combined.cpp"], link)


def hash_recipe(recipe: Recipe) -> str:
    """24 hexadecimal digits that change with everything the compiled library depends on, except the compiler."""
    digest = hashlib.sha256()
    texts = (*recipe.flags, *map(str, recipe.sources), *recipe.link)
    for text in (*texts, processor_features(), version("mlx"), version("nanobind"), sys.version):
        digest.update(os.fsencode(text) + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def hash_compiler(recipe: Recipe) -> str:
    """8 hexadecimal digits that change with the compiler's command."""
    return hashlib.sha256(os.fsencode("\0".join(recipe.compiler))).hexdigest()[:8]


def processor_features() -> str:
    """The processor's model and instruction sets, on which -march=native depends.

    Machines with different processors may share a home directory, and with it the cache of compiled libraries.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def compile_library(recipe: Recipe, library: Path) -> None:
    """Compile the sources into `library`; the object files stay beside it.

    Raises:
        Unavailable: the compiler cannot be run, fails, takes too long, or writes no library.
    """
    objects = [library.with_name(f"{source.stem}.o") for source in recipe.sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*recipe.command, "-c", str(s), "-o", str(o)] for s, o in zip(recipe.sources, objects))
        for _ in pool.map(run_compiler, commands):
            pass
    run_compiler([*recipe.command, "-shared", *map(str, objects), *recipe.link, "-o", str(library)])
    if not library.is_file():
        raise Unavailable(f"{Path(recipe.command[0]).name} reported success and wrote no CPU kernels")


def run_compiler(command: list[str]) -> None:
    """Run one command of the compiler. Raises Unavailable with the first error that it prints."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} did not compile the CPU kernels within {SECONDS} s") from None
    except OSError as error:
        raise Unavailable(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        first = lines[0].strip()[:200] if lines else f"status {done.returncode}"
        raise Unavailable(f"{name} could not compile the CPU kernels: {first}")
