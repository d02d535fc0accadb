"""The CPU kernels as a Mac would compile them: by its recipe, with its MLX, linked; nothing of it runs here."""

import re
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import object_store
import pytest
import zig

from gearbx_mlx.kernels import compiler
from gearbx_mlx.kernels.compiler import CompileTarget, Recipe, compile_library, make_recipe

from .mach_o import ARM64, Library, read_library
from .wheels import Unobtainable, get_mlx

pytestmark = pytest.mark.native

NOT_CHECKED = "macOS WAS NOT CHECKED"
MACOS = 1  # as Mach-O numbers systems
QUICK = ["-O0", "-g0", "-fno-sanitize=undefined"]  # what nothing runs, need not be fast, or check itself as zig has it
# zig would compile its own C++ library, which takes it a minute. A Mac has one.
WITHOUT_STANDARD = ["-nostdlib++"]
STANDARD = re.compile(r"__Z(NK?|TI|TV)?(N?St|N10__cxxabiv1|n[aw]|d[al])|___(cxa|gxx)_")  # names in that library
NANOBIND = re.compile(rb"nanobind_\w+_v\d+")  # two extensions share types if this is equal in both


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
    try:
        mlx = get_mlx(request.config.cache.mkdir("macos"))
    except Unobtainable as reason:
        pytest.skip(f"{NOT_CHECKED}: {reason}")
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


def test_mlx_has_every_function_that_is_called(mac):
    of_mlx = {name for name, where in mac.library.needs.items() if where == "@rpath/libmlx.dylib"}
    assert len(of_mlx) > 20
    assert of_mlx <= read_library(mac.mlx / "lib" / "libmlx.dylib").exports
    assert unresolved(mac.library) == set()


def test_a_function_that_mlx_lacks_is_found_out(mac, tmp_path):
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
