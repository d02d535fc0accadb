"""Native CPU kernels, compiled on this machine when first needed.

The sources in `cpu/` become operations of MLX's own graph, built against the headers and the library of the installed
MLX. They are compiled side by side, into the user's cache; the name of the file is a hash of everything that the result
depends on. When something goes wrong, `why_not` gives the reason in one line, and everything runs on MLX's own kernels.
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
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import mlx.core as mx

NAME = "_gearbx_cpu"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
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


def native() -> ModuleType | None:
    """The compiled kernels (`stack_matvec`, `dense_matvec`, ...), or None; compiles them when first called."""
    return _outcome()[0]


def why_not() -> str | None:
    """Why there are no native kernels, in one line; None if there are."""
    return _outcome()[1]


@functools.cache
def _outcome() -> tuple[ModuleType | None, str | None]:
    """The kernels, or why there are none."""
    try:
        return _built(), None
    except _Unavailable as reason:
        return None, str(reason)


def _built() -> ModuleType:
    made_by = recipe(find_compiler())
    name = f"{NAME}-{_key(made_by)}{SUFFIX}"
    for directory in _cache_directories():
        file, note = directory / name, directory / f"{name}.why-not"
        try:
            if file.exists():
                try:
                    return _checked(_loaded(file))
                except _Unavailable:
                    pass  # a damaged file: made anew
            elif note.exists():
                raise _Unavailable(note.read_text(encoding="utf-8"))
            directory.mkdir(parents=True, exist_ok=True)
            return _made(made_by, file, note)
        except OSError:
            continue  # cannot be written to: the next one
    raise _Unavailable("there is no directory to put the compiled CPU kernels in; set XDG_CACHE_HOME to one")


def _made(made_by: Recipe, file: Path, note: Path) -> ModuleType:
    """Compile, check and keep the kernels; of kernels that do not work, the reason, so that they are compiled once."""
    # Beside its place, and moved there whole: another process may be doing the same.
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".building-") as beside:
        unfinished = Path(beside) / file.name
        with while_compiling():
            _compile(made_by, unfinished)
        try:
            _checked(_loaded(unfinished))
        except _Unavailable as reason:
            told = Path(beside) / note.name
            told.write_text(str(reason), encoding="utf-8")
            os.replace(told, note)
            raise
        os.replace(unfinished, file)
    return _loaded(file)


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


def recipe(compiler: list[str]) -> Recipe:
    """For operations of MLX's graph, with this compiler."""
    if os.name == "nt":
        raise _Unavailable("native CPU kernels are for Linux and macOS")
    import nanobind  # a dependency on Linux and macOS alone

    wheel = Path(mx.__file__).parent
    if not (wheel / "include" / "mlx").is_dir():
        raise _Unavailable(f"this MLX has no headers at {wheel / 'include'}")
    nanobind_source = Path(nanobind.source_dir())
    include = [
        wheel / "include",
        nanobind.include_dir(),
        nanobind_source.parent / "ext" / "robin_map" / "include",
        sysconfig.get_path("include"),
    ]
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    link = [f"-L{wheel / 'lib'}", "-lmlx", f"-Wl,-rpath,{wheel / 'lib'}"]
    if sys.platform == "darwin":
        link += ["-undefined", "dynamic_lookup"]
        threads = []
    else:
        threads = ["-pthread"]
    command = [*compiler, *FLAGS, processor, *threads, *DEFINES, *(f"-I{path}" for path in include)]
    return Recipe(command, [*sorted(SOURCES.glob("*.cpp")), nanobind_source / "nb_combined.cpp"], link)


def processor_features() -> str:
    """What -march=native depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _key(made_by: Recipe) -> str:
    digest = hashlib.sha256()
    commands = (*made_by.command, *map(str, made_by.sources), *made_by.link)
    for text in (*commands, processor_features(), version("mlx"), version("nanobind"), sys.version):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


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


def _checked(module: ModuleType) -> ModuleType:
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
