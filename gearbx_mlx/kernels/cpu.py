"""Native CPU kernels, compiled on this machine when first needed.

The sources are in `cpu/`. Two ways to make kernels of them are tried in turn (`BUILDS`): operations of MLX's own graph,
built against the headers and the library of the MLX that is installed; and, where that does not work, plain C functions
that are called eagerly. The sources are compiled side by side, into the user's cache; the name of the file is a hash of
everything that the result depends on. Whatever goes wrong is kept as one line: `why_not` where everything then runs on
MLX's own kernels, `why_eager` where the second way is the one that works.
"""

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import mlx.core as mx

from .eager import Library

NAME = "_gearbx_cpu"
SOURCES = Path(__file__).with_name("cpu")
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a vector must get the same bits from each of the loops that the compiler makes of one template.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
# nanobind's domain is that of MLX's own bindings: this is how arrays are passed between the two.
DEFINES = ("-DNB_DOMAIN=mlx", "-DNB_COMPACT_ASSERTIONS")
SECONDS = 300  # for the compiler
# What surrounds a compilation, which takes seconds: a command puts its spinner here.
while_compiling: Callable[[], AbstractContextManager] = nullcontext


class _Unavailable(Exception):
    """The one line that why_not returns."""


@dataclass(frozen=True)
class Recipe:
    """What is compiled, and how: every source by `command`, the objects into one library with `link` added."""

    command: list[str]
    sources: list[Path]
    link: list[str]


@dataclass(frozen=True)
class Build:
    """A way to make kernels: a compiler to a recipe, and how the result is loaded."""

    name: str
    suffix: str
    recipe: Callable[[list[str]], Recipe]
    load: Callable[[Path], "ModuleType | Library"]


def native() -> "ModuleType | Library | None":
    """The compiled kernels (`stack_matvec`, `dense_matvec`, ...), or None; compiles them when first called."""
    return _outcome()[0]


def why_not() -> str | None:
    """Why there are no native kernels, in one line; None if there are."""
    kernels, reason = _outcome()
    return reason if kernels is None else None


def why_eager() -> str | None:
    """Why the kernels are called eagerly and are no operations of MLX's graph; None if they are, or there are none."""
    kernels, reason = _outcome()
    return reason if kernels is not None else None


@functools.cache
def _outcome() -> "tuple[ModuleType | Library | None, str | None]":
    """The kernels that work, and why the first way to make them does not."""
    reasons: list[str] = []
    for build in BUILDS:
        try:
            return _built(build), reasons[0] if reasons else None
        except _Unavailable as reason:
            reasons.append(str(reason))
    return None, reasons[0]


def _built(build: Build) -> "ModuleType | Library":
    recipe = build.recipe(find_compiler())
    name = f"{build.name}-{_key(recipe)}{build.suffix}"
    for directory in _cache_directories():
        file, note = directory / name, directory / f"{name}.why-not"
        try:
            if file.exists():
                try:
                    return _checked(build.load(file))
                except _Unavailable:
                    pass  # a damaged file: made anew
            elif note.exists():
                raise _Unavailable(note.read_text(encoding="utf-8"))
            directory.mkdir(parents=True, exist_ok=True)
            return _made(build, recipe, file, note)
        except OSError:
            continue  # cannot be written to: the next one
    raise _Unavailable("there is no directory to put the compiled CPU kernels in; set XDG_CACHE_HOME to one")


def _made(build: Build, recipe: Recipe, file: Path, note: Path) -> "ModuleType | Library":
    """Compile, check and keep the kernels; of kernels that do not work, the reason, so that they are compiled once."""
    # Beside its place, and moved there whole: another process may be doing the same.
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".building-") as beside:
        unfinished = Path(beside) / file.name
        with while_compiling():
            _compile(recipe, unfinished)
        try:
            _checked(build.load(unfinished))
        except _Unavailable as reason:
            told = Path(beside) / note.name
            told.write_text(str(reason), encoding="utf-8")
            os.replace(told, note)
            raise
        os.replace(unfinished, file)
    return build.load(file)


def find_compiler() -> list[str]:
    """The compiler's command: CXX, or the first of COMPILERS that there is."""
    named = os.environ.get("CXX")
    if named:
        words = shlex.split(named)
        if not words or not shutil.which(words[0]):
            raise _Unavailable(f"CXX is '{named}', and there is no such compiler")
        return words
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        raise _Unavailable("no C++ compiler was found; install g++ or clang, or set CXX")
    return [found]


def graph_recipe(compiler: list[str]) -> Recipe:
    """For operations of MLX's graph."""
    spec = importlib.util.find_spec("nanobind")
    if spec is None or spec.origin is None:
        raise _Unavailable("nanobind is not installed; pip install 'gearbx-mlx[native]'")
    nanobind = Path(spec.origin).parent
    wheel = Path(mx.__file__).parent
    if not (wheel / "include" / "mlx").is_dir():
        raise _Unavailable(f"this MLX has no headers at {wheel / 'include'}")
    include = [
        wheel / "include",
        nanobind / "include",
        nanobind / "ext" / "robin_map" / "include",
        Path(sysconfig.get_path("include")),
    ]
    sources = [*sorted(SOURCES.glob("*.cpp")), nanobind / "src" / "nb_combined.cpp"]
    link = [f"-L{wheel / 'lib'}", "-lmlx", f"-Wl,-rpath,{wheel / 'lib'}"]
    if sys.platform == "darwin":
        link += ["-undefined", "dynamic_lookup"]
    return _recipe(compiler, [*DEFINES, *(f"-I{path}" for path in include)], sources, link)


def core_recipe(compiler: list[str]) -> Recipe:
    """For plain C functions: all sources but those that know MLX."""
    sources = [file for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith("primitive")]
    return _recipe(compiler, ["-fvisibility=default"], sources, [])


def _recipe(compiler: list[str], options: list[str], sources: list[Path], link: list[str]) -> Recipe:
    if os.name == "nt":
        raise _Unavailable("native CPU kernels are for Linux and macOS")
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = [] if sys.platform == "darwin" else ["-pthread"]
    return Recipe([*compiler, *FLAGS, processor, *threads, *options], sources, link)


def processor_features() -> str:
    """What -march=native depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _key(recipe: Recipe) -> str:
    digest = hashlib.sha256()
    commands = (*recipe.command, *map(str, recipe.sources), *recipe.link)
    for text in (*commands, processor_features(), version("mlx"), _version("nanobind"), sys.version):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cache_directories() -> list[Path]:
    """Where compiled kernels may be put, the best first; the last is for this process and user alone."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        base = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    found = []
    with contextlib.suppress(RuntimeError):  # no home directory
        found.append(Path(base).expanduser() / "gearbx-mlx")
    with contextlib.suppress(OSError):
        found.append(Path(_temporary_directory()))
    return found


@functools.cache
def _temporary_directory() -> str:
    # A new one each time, which nobody else can have prepared: what lies in it is loaded into this process.
    holder = tempfile.TemporaryDirectory(prefix="gearbx-mlx-", ignore_cleanup_errors=True)
    _holders.append(holder)
    return holder.name


_holders: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def _compile(recipe: Recipe, output: Path) -> None:
    """Objects lie beside the output, and are the caller's to remove."""
    objects = [output.with_name(f"{source.stem}.o") for source in recipe.sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*recipe.command, "-c", str(s), "-o", str(o)] for s, o in zip(recipe.sources, objects))
        for _ in pool.map(_run, commands):
            pass
    _run([*recipe.command, "-shared", *map(str, objects), *recipe.link, "-o", str(output)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{command[0]} did not compile the CPU kernels within {SECONDS} s") from None
    except OSError as error:
        raise _Unavailable(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        first = lines[0].strip()[:200] if lines else f"status {done.returncode}"
        raise _Unavailable(f"{Path(command[0]).name} could not compile the CPU kernels: {first}")


def _loaded(file: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(file))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise _Unavailable(f"the compiled CPU kernels cannot be loaded: {str(error).splitlines()[0]}") from None
    return module


def _loaded_core(file: Path) -> Library:
    try:
        return Library(file)
    except (OSError, AttributeError) as error:
        raise _Unavailable(f"the compiled CPU kernels cannot be loaded: {str(error).splitlines()[0]}") from None


def _checked(module: "ModuleType | Library") -> "ModuleType | Library":
    """The module, once it has computed known products: bindings of another ABI fail here and not in a model."""
    x = mx.array([[(i % 7) - 3.0 for i in range(64)]])
    weight = mx.array([[float((i * j) % 16) for i in range(64)] for j in range(3)])
    words = mx.array(
        [[sum((i * j + k) % 16 << 4 * k for k in range(8)) for i in range(8)] for j in range(3)], mx.uint32
    )
    scales, biases = mx.full((3, 1), 0.5), mx.full((3, 1), -2.0)
    with mx.stream(mx.cpu):
        codes = mx.dequantize(words, scales, biases, 64, 4)
        checks: list[tuple[Callable[[], mx.array], mx.array]] = [
            (lambda: module.dense_matvec(x, weight), (x[:, None] * weight).sum(-1)),
            (lambda: module.stack_matvec(x, [words], scales, [biases], [4], 64), (x[:, None] * codes).sum(-1)),
            (lambda: module.dense_experts(x, weight[None], mx.array([0])), (x[:, None] * weight).sum(-1)[None]),
            (lambda: module.rms_norm(mx.full((1, 64), 2.0), x[0], 0.0), x),
            (lambda: module.swiglu(mx.zeros_like(x), x), mx.zeros_like(x)),
        ]
        four = x[None, None]
        seen = mx.array([[True]])
        checks += [
            (lambda: module.rope(four, mx.ones(8), False, 1.0, 0), four),
            (lambda: module.attention(four, four, four, 1.0, True), four),
            (lambda: module.attention(four, four, four, 1.0, False, seen), four),
        ]
        for compute, expected in checks:
            try:
                right = mx.array_equal(compute(), expected).item()  # small whole numbers: no rounding
            except (TypeError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise _Unavailable(
                    f"the compiled CPU kernels do not work with MLX {version('mlx')} and the nanobind that is "
                    f"installed ({reason}); another version of nanobind may"
                ) from None
            if not right:
                raise _Unavailable("the compiled CPU kernels do not compute what they should")
    return module


GRAPH = Build(NAME, sysconfig.get_config_var("EXT_SUFFIX") or ".so", graph_recipe, _loaded)
CORE = Build("_gearbx_core", ".so", core_recipe, _loaded_core)
BUILDS = (GRAPH, CORE)  # in the order that they are tried
