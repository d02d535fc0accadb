"""The native CPU kernels of this machine, from a wheel, or compiled at first use and kept in the user's cache.

The sources in `cpu/` become operations of MLX's graph. A library's name has a hash of everything it depends on, and a
hash of the compiler: cached kernels work without the compiler. A wheel may contain compiled kernels (`wheel.py`). They
are used unless GEARBX_CPU is `native`. Kernels are used only if they compute known results. After any failure,
`why_not` returns a one-line reason, and MLX's kernels compute everything.

A library is code: any user who can write it can run code as the user who loads it. So the cache must belong to this
user or root, and no other user may write to it or to a directory above it. Then no other user can replace a file
between its check and its loading by name. A SHA-256 beside each library detects truncation. Mapping a truncated
library may crash the process.

A process compiles in a temporary directory. A later process removes it if this one is killed (`files/writing.py`).
"""

import atexit
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from filelock import FileLock, Timeout

from ..errors import GearbxWarning
from ..files.user_cache import CacheUnusable, check_owner, open_cache, why
from ..files.writing import sync, work_directory
from . import wheel
from .bit_planes import pack_mlx_codes
from .compiler import Recipe, Unavailable, compile_library, find_compiler, hash_recipe, instructions, make_recipe
from .exact import ExactMatrix

BUILDING_LOCK = ".lock"
UNUSED = 30 * 86400  # seconds without a use until a library is removed


@dataclass(frozen=True)
class CachedLibrary:
    """One library of the cache, beside its hash."""

    library: Path

    @property
    def hash_file(self) -> Path:
        return self.library.with_name(f"{self.library.name}.sha256")

    def is_whole(self) -> bool:
        """Return whether the library exists and matches its hash."""
        try:
            return self.hash_file.read_bytes().strip() == hash_file(self.library)
        except OSError:
            return False

    @contextmanager
    def building(self, waiting: Callable[[], None]) -> Iterator[Path]:
        """Yield a path for a new library, in a temporary directory beside the cached ones.

        One process builds at a time. After waiting, a process should check again whether the library is whole.

        Args:
            waiting: called before this process waits for a build by a different one.
        """
        lock = FileLock(self.library.with_name(BUILDING_LOCK), mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        try:
            with work_directory(self.library) as directory:
                yield directory / self.library.name
        finally:
            lock.release()

    def note_use(self) -> None:
        """Record that the library is loaded now, so that `remove_unused` keeps it."""
        with suppress(OSError):  # the cache may be read-only
            os.utime(self.hash_file)

    def remove_unused(self) -> None:
        """Remove libraries that no process has loaded for 30 days, such as earlier versions."""
        oldest = time.time() - UNUSED
        for file in self.library.parent.glob(f"{self.library.name.partition('-')[0]}-*"):
            entry = CachedLibrary(file.with_name(file.name.removesuffix(".sha256")))
            times = [each.stat().st_mtime for each in (entry.hash_file, file) if each.exists()]
            if times and max(times) < oldest:
                file.unlink(missing_ok=True)

    def store(self, unfinished: Path) -> None:
        """Move a library from `building` to its place, and its hash beside it."""
        hashed = unfinished.with_name(self.hash_file.name)
        hashed.write_bytes(hash_file(unfinished))
        replace(unfinished, self.library)
        replace(hashed, self.hash_file)


def open_entry(library: Path) -> CachedLibrary:
    """Return the entry for a library of the cache. Raises CacheUnusable if other users can write to it."""
    entry = CachedLibrary(library)
    for file in (entry.library, entry.hash_file):
        check_owner(file)
    return entry


@functools.cache
def private_directory() -> Path:
    """Return a private directory that is removed when the process ends. Raises OSError if none can be made."""
    directory = tempfile.TemporaryDirectory(prefix="gearbx-cpu-")
    atexit.register(directory.cleanup)
    return Path(directory.name)


def hash_file(file: Path) -> bytes:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def replace(source: Path, target: Path) -> None:
    """Move a file atomically: after a crash, `target` is the whole old file or the whole new one."""
    source.chmod(0o600)  # for any umask, because files that others may write to are never used
    sync(source)
    os.replace(source, target)


MODULE_NAME = "_gearbx_cpu"
LIBCXX = "St3__1"  # part of symbols of libc++, the library of zig and some clangs
LIBRARY_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def while_compiling(files: int, kept: bool) -> AbstractContextManager[Callable[[], None]]:
    """Return a context for a compilation; its value is called after each file. Commands replace it by a progress bar.

    Args:
        files: number of files. kept: whether later processes can use the library.
    """
    return nullcontext(lambda: None)


def before_waiting() -> None:
    """Do nothing before a wait for a different process's compilation; commands replace it by a message."""


def native() -> ModuleType | None:
    """Return the compiled kernels (`stack_matvec`, `dense_matvec`, ...), or None; the first call compiles or loads
    them."""
    return _kernels_or_reason()[0]


def why_not() -> str | None:
    """Return the reason why there are no native kernels, in one line; None if there are."""
    return _kernels_or_reason()[1]


def is_compiled() -> bool:
    """Return whether kernels need no compilation: they are loaded, in a wheel, or whole in the cache."""
    if _kernels_or_reason.cache_info().currsize:
        return native() is not None
    if wheel.library_for(instructions()):
        return True
    try:
        try:
            return open_entry(open_cache() / library_name(make_recipe(find_compiler()))).is_whole()
        except Unavailable:
            return any(entry.is_whole() for entry in _kept())
    except (Unavailable, CacheUnusable, OSError):
        return False


@functools.cache
def _kernels_or_reason() -> tuple[ModuleType | None, str | None]:
    try:
        return _get_kernels(), None
    except Unavailable as reason:
        return None, str(reason)


def _get_kernels() -> ModuleType:
    """Return the kernels from the wheel or cache, otherwise compiled: into the cache, or for this process only."""
    brought = wheel.library_for(instructions())
    if brought is not None:
        return check_kernels(_load(brought))
    try:
        recipe = make_recipe(find_compiler())
    except Unavailable as reason:
        return _load_kept("; ".join(filter(None, (wheel.why_foreign(), str(reason)))))
    name = library_name(recipe)
    try:
        return _load_cached(recipe, open_entry(open_cache() / name))
    except (CacheUnusable, OSError) as error:
        problem = why(error)
    warnings.warn(f"CPU kernels are compiled for this process only: {problem}", GearbxWarning, stacklevel=2)
    try:
        library = private_directory() / name
    except OSError:
        raise Unavailable("no directory for the compiled CPU kernels; set XDG_CACHE_HOME to one") from None
    _compile(recipe, library, kept=False)
    return check_kernels(_load(library))


def library_name(recipe: Recipe) -> str:
    compiler = hashlib.sha256(os.fsencode("\0".join(recipe.compiler))).hexdigest()[:8]
    return f"{MODULE_NAME}-{hash_recipe(recipe)}-{compiler}{LIBRARY_SUFFIX}"


def _load_kept(reason: str) -> ModuleType:
    """Return cached kernels of the same sources, from any compiler.

    Args:
        reason: why kernels cannot be compiled now.

    Raises:
        Unavailable: no such kernels; with `reason`.
    """
    try:
        entries = _kept()
    except (CacheUnusable, OSError) as error:
        raise Unavailable(f"{reason}; the cache cannot be used: {why(error)}") from None
    for entry in entries:
        if entry.is_whole():
            with suppress(Unavailable):
                return check_kernels(_load(entry.library))
    raise Unavailable(reason)


def _kept() -> list[CachedLibrary]:
    """Return cache entries of the same sources, from any compiler, newest first. Raises as `open_cache`."""
    names = f"{MODULE_NAME}-{hash_recipe(make_recipe([]))}-*{LIBRARY_SUFFIX}"
    libraries = sorted(open_cache().glob(names), key=lambda path: path.lstat().st_mtime, reverse=True)
    return [open_entry(library) for library in libraries]


def _load_cached(recipe: Recipe, entry: CachedLibrary) -> ModuleType:
    """Return the kernels of a cache entry, compiled first if it is missing or damaged."""
    if kept := _load_whole(entry):
        return kept
    with entry.building(before_waiting) as unfinished:
        if kept := _load_whole(entry):  # a different process compiled it in the meantime
            return kept
        _compile(recipe, unfinished, kept=True)
        entry.store(unfinished)  # even if the kernels do not work: they are not compiled again
        with suppress(OSError):
            entry.remove_unused()
    return check_kernels(_load(entry.library))


def _load_whole(entry: CachedLibrary) -> ModuleType | None:
    """Return the kernels of a cache entry; None if they must be compiled. Raises Unavailable if they do not work."""
    if not entry.is_whole():
        return None
    kernels = check_kernels(_load(entry.library))
    entry.note_use()
    return kernels


def _compile(recipe: Recipe, library: Path, kept: bool) -> None:
    if foreign := wheel.why_foreign():
        warnings.warn(f"{foreign}: they are compiled here", GearbxWarning, stacklevel=2)
    with while_compiling(len(recipe.kernels) + 2, kept) as compiled:  # plus the bindings and the linker
        compile_library(recipe, library, compiled)


def _load(library: Path) -> ModuleType:
    """Import a compiled library. Raises Unavailable if the system cannot load it."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(library))
    spec = importlib.util.spec_from_loader(MODULE_NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        remedy = "; use g++, or clang++ with MLX's libstdc++" if LIBCXX in first else ""
        raise Unavailable(f"the compiled CPU kernels cannot be loaded: {first}{remedy}") from None
    return module


def check_kernels(module: ModuleType) -> ModuleType:
    """Validate a module on known results, and return it: bindings with the wrong ABI fail here and not in a model.

    Raises:
        Unavailable: a kernel fails, or its result is wrong.
    """
    with mx.stream(mx.cpu):
        for compute, arguments, expected in known_results(module):
            try:
                right = mx.array_equal(compute(*arguments), expected).item()  # small integers are not rounded
            except (TypeError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise Unavailable(
                    f"the compiled CPU kernels do not work with MLX {version('mlx')} and nanobind "
                    f"{version('nanobind')} ({reason}); install a different nanobind"
                ) from None
            if not right:
                raise Unavailable("the compiled CPU kernels give wrong results")
    return module


def known_results(module: ModuleType) -> list[tuple[Callable[..., mx.array], tuple[Any, ...], mx.array]]:
    """Return each kind of kernel with arguments and the expected result."""
    x = mx.array([[(i % 7) - 3.0 for i in range(64)]])
    codes = mx.arange(64) * mx.arange(3)[:, None] % 16
    words, weight, narrow = pack_mlx_codes(codes, 4), codes.astype(mx.float32), codes.astype(mx.bfloat16)
    scales, biases, first = mx.full((3, 1), 0.5), mx.full((3, 1), -2.0), mx.array([0])
    exact, y = exact_matrix(words, narrow), x @ weight.T
    heads, seen = x[None, None], mx.array([[True]])
    return [
        (module.dense_matvec, (x, weight), y),
        (module.dense_matvec, (x, narrow, 16), y),
        (module.dense_experts, (x, weight[None], first), y[None]),
        (module.stack_matvec, (x, [words], scales, [biases], [4], 64), x @ (weight * 0.5 - 2).T),
        (module.exact_matvec, (x, *exact), y),
        (module.exact_matvec, (x, *exact, 16), y),
        (module.exact_decode, tuple(exact), narrow),
        (module.exact_experts, (x, *exact.each(lambda array: array[None]), first), y[None]),
        (module.rms_norm, (mx.full((1, 64), 2.0), x[0], 0.0), x),
        (module.swiglu, (mx.zeros_like(x), x), mx.zeros_like(x)),
        (module.rope, (heads, mx.ones(8), False, 1.0, 0), heads),
        (module.attention, (heads, heads, heads, 1.0, True), heads),
        (module.attention, (heads, heads, heads, 1.0, False, seen), heads),
    ]


def exact_matrix(words: mx.array, weight: mx.array) -> ExactMatrix:
    """Return exact weights 0 to 15 that equal their codes. Scale 1 and bias 0: code 0 is near zero."""
    one, none = mx.full((3, 1), 0x3F80, mx.uint16), mx.zeros((3, 1), mx.uint16)  # 0x3F80: bf16 of 1
    low = (weight.view(mx.uint16) & 255).astype(mx.uint8)
    offsets = mx.concatenate([mx.array([0]), mx.cumsum((weight == 0).sum(-1))]).astype(mx.uint32)
    return ExactMatrix(words, one, none, low, mx.zeros(3 * 64, mx.uint8), offsets, 64)
