"""The CPU kernels as a Mac would compile them: by its recipe, with its MLX, linked; nothing of it runs here."""

import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import object_store
import pytest
import zig

from gearbx_mlx.kernels import compiler
from gearbx_mlx.kernels.compiler import CompileTarget, Recipe, compile_library, make_recipe

pytestmark = pytest.mark.native

NOT_CHECKED = "macOS WAS NOT CHECKED"
MACOS = 1  # as Mach-O numbers systems
QUICK = ["-O0", "-g0", "-fno-sanitize=undefined"]  # what nothing runs, need not be fast, or check itself as zig has it
# zig would compile its own C++ library, which takes it a minute. A Mac has one.
WITHOUT_STANDARD = ["-nostdlib++"]
STANDARD = re.compile(r"__Z(NK?|TI|TV)?(N?St|N10__cxxabiv1|n[aw]|d[al])|___(cxa|gxx)_")  # names in that library
NANOBIND = re.compile(rb"nanobind_\w+_v\d+")  # two extensions share types if this is equal in both

# What a library for macOS (Mach-O, 64 bits) says of itself: its processor, and the symbols that it has and needs.
MAGIC, ARM64 = 0xFEEDFACF, 0x0100000C
SYMBOLS, BUILD = 0x2, 0x32  # LC_SYMTAB, LC_BUILD_VERSION
LIBRARIES = (0xC, 0x80000018, 0x8000001F, 0x80000023)  # LC_LOAD_DYLIB and its kinds: weak, reexported, upward
EXTERNAL, KIND, DEBUGGING = 0x01, 0x0E, 0xE0  # of a symbol's n_type
ANYWHERE = (0, 0xFE)  # in the place of a library's number: dyld searches what the process has loaded; zig writes 0


@dataclass(frozen=True)
class Library:
    """processor, system: ARM64 is 0x0100000c, macOS 1. exports: names. needs: name to the library that has it.

    A needed name that any library of the process may have, such as Python's, has None.
    """

    processor: int
    system: int
    exports: frozenset[str]
    needs: dict[str, str | None]


def read_library(file: Path) -> Library:
    data = file.read_bytes()
    magic, processor, _, _, commands = struct.unpack_from("<5I", data)
    assert magic == MAGIC, f"{file} is not a 64-bit Mach-O file"
    libraries, symbols, system, offset = [""], [], 0, 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, offset)
        if command in LIBRARIES:
            libraries.append(text_at(data, offset + struct.unpack_from("<I", data, offset + 8)[0]))
        elif command == BUILD:
            system = struct.unpack_from("<I", data, offset + 8)[0]
        elif command == SYMBOLS:
            first, count, strings = struct.unpack_from("<3I", data, offset + 8)
            table = struct.iter_unpack("<IBBHQ", data[first : first + 16 * count])
            symbols = [(text_at(data, strings + name), kind, number >> 8) for name, kind, _, number, _ in table]
        offset += size
    external = [s for s in symbols if s[1] & EXTERNAL and not s[1] & DEBUGGING]
    exports = frozenset(name for name, kind, _ in external if kind & KIND)
    needs = {name: None if n in ANYWHERE else libraries[n] for name, kind, n in external if not kind & KIND}
    return Library(processor, system, exports, needs)


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


WHEELS = "macosx_14_0_arm64"
PARTS = "mlx/include/", "mlx/lib/libmlx.dylib", "mlx/core."  # what a build needs; the Metal library is 7 times that


def get_mlx(cache: Path) -> Path:
    """The directory of MLX for macOS, in `cache`: downloaded by pip, from where pip installs, unless it is there.

    Skips the test where pip cannot find or fetch a wheel.
    """
    number = version("mlx")
    directory = cache / f"mlx-{number}-{sys.implementation.cache_tag}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            for name in ("mlx", "mlx-metal"):
                unpack(download(f"{name}=={number}", Path(made)), Path(made) / "unpacked")
            keep(Path(made) / "unpacked", directory)
    return directory / "mlx"


def keep(unpacked: Path, directory: Path) -> None:
    """Give the directory its name, unless another run has done that meanwhile: theirs has the same files."""
    try:
        unpacked.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def download(requirement: str, directory: Path) -> Path:
    before = set(directory.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", WHEELS, "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{NOT_CHECKED}: pip cannot get {requirement} for {WHEELS}")
    return (set(directory.glob("*.whl")) - before).pop()


def unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory, [name for name in file.namelist() if name.startswith(PARTS)])


@dataclass(frozen=True)
class Build:
    recipe: Recipe
    mlx: Path
    file: Path
    library: Library


@pytest.fixture(scope="module")
def mac(request) -> Build:
    """The kernels, compiled and linked for the oldest macOS that MLX has a wheel for."""
    if zig.find_zig() is None:
        pytest.skip(f"{NOT_CHECKED}: that needs zig (pip install ziglang)")
    mlx = get_mlx(request.config.cache.mkdir("macos"))
    recipe = make_recipe(zig.compiler_for("aarch64-macos.14.0"), CompileTarget("darwin", "arm64", mlx))
    recipe = replace(recipe, flags=recipe.flags + QUICK, link=recipe.link + WITHOUT_STANDARD)

    def make(folder: Path) -> None:
        compile_library(recipe, folder / "kernels.so")

    # Folders differ from clone to clone.
    flags = [flag for flag in [*recipe.flags, *WITHOUT_STANDARD] if not flag.startswith("-I")]
    versions = [sys.version, *map(version, ("mlx", "nanobind", "ziglang"))]
    sources = sorted(path for path in compiler.SOURCES.iterdir() if path.is_file())
    code = Path(compiler.__file__)  # which puts the command together
    file = object_store.kept([*flags, *versions, code, *sources], make) / "kernels.so"
    return Build(recipe, mlx, file, read_library(file))


def unresolved(library: Library) -> set[str]:
    """The needed names that no library has which this one is linked with, but for Python's and the C++ library's."""
    names = {name for name, where in library.needs.items() if where is None}
    return {name for name in names if not name.startswith(("_Py", "__Py")) and not STANDARD.match(name)}


def test_it_is_an_extension_for_apple_silicon(mac):
    assert (mac.library.processor, mac.library.system) == (ARM64, MACOS)
    assert "_PyInit__gearbx_cpu" in mac.library.exports


def test_mlx_has_every_called_function(mac):
    of_mlx = {name for name, where in mac.library.needs.items() if where == "@rpath/libmlx.dylib"}
    assert len(of_mlx) > 20
    assert of_mlx <= read_library(mac.mlx / "lib" / "libmlx.dylib").exports
    assert unresolved(mac.library) == set()


def test_missing_mlx_function_is_found(mac, tmp_path):
    source = tmp_path / "calls.cpp"
    source.write_text(
        "namespace mlx::core { int no_such_function(); }\n"
        '[[gnu::visibility("default")]] int call() { return mlx::core::no_such_function(); }\n'
    )
    compile_library(replace(mac.recipe, kernels=[source], bindings=[]), tmp_path / "calls.so")
    assert unresolved(read_library(tmp_path / "calls.so")) == {"__ZN3mlx4core16no_such_functionEv"}


def test_arrays_pass_to_and_from_mlx(mac):
    """Which nanobind allows between extensions of one ABI."""
    (core,) = mac.mlx.glob("core.*.so")
    tags = set(NANOBIND.findall(mac.file.read_bytes()))
    assert len(tags) == 1
    assert tags == set(NANOBIND.findall(core.read_bytes()))
