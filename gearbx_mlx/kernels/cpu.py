"""The native CPU kernels of this machine: compiled when first needed, kept in the user's cache, tested before use.

The sources in `cpu/` become operations of MLX's own graph. The library's name contains a hash of everything that it
depends on, and one of the compiler: kernels in the cache are used where the compiler has gone. Compiled kernels are
used only if they compute products with known results. If anything goes wrong, `why_not` gives the reason in one line,
and everything runs on MLX's own kernels.
"""

import functools
import importlib.machinery
import importlib.util
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import mlx.core as mx

from ..errors import GearbxWarning
from ..files.user_cache import CacheUnusable, why
from .compiler import (
    Recipe,
    Unavailable,
    compile_library,
    find_compiler,
    hash_compiler,
    hash_recipe,
    make_recipe,
)
from .exact import ExactMatrix
from .library_cache import (
    CachedLibrary,
    find_entries,
    open_entry,
    private_directory,
    remove_abandoned_private,
)

NAME = "_gearbx_cpu"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def while_compiling(files: int, kept: bool) -> AbstractContextManager[Callable[[], None]]:
    """Surrounds a compilation, and gives what is called after each file: a command puts its progress bar here.

    kept: for later processes, too.
    """
    return nullcontext(lambda: None)


def before_waiting() -> None:
    """Called before this process waits for another one's compilation: a command says so here."""


def native() -> ModuleType | None:
    """The compiled kernels (`stack_matvec`, `dense_matvec`, ...), or None; the first call compiles or loads them."""
    return _kernels_or_reason()[0]


def why_not() -> str | None:
    """The reason why there are no native kernels, in one line; None if there are."""
    return _kernels_or_reason()[1]


@functools.cache
def _kernels_or_reason() -> tuple[ModuleType | None, str | None]:
    try:
        return _get_kernels(), None
    except Unavailable as reason:
        return None, str(reason)


def _get_kernels() -> ModuleType:
    """The kernels from the cache, or compiled into it; where the cache cannot be used, compiled for this process."""
    remove_abandoned_private()
    try:
        recipe = make_recipe(find_compiler())
    except Unavailable as reason:
        return _load_kept(str(reason))
    name = library_name(recipe)
    try:
        return _load_cached(recipe, open_entry(name))
    except (CacheUnusable, OSError) as error:
        problem = why(error)
    warnings.warn(f"CPU kernels are compiled for this process alone: {problem}", GearbxWarning, stacklevel=2)
    try:
        library = private_directory() / name
    except OSError:
        raise Unavailable(
            "there is no directory to put the compiled CPU kernels in; set XDG_CACHE_HOME to one"
        ) from None
    _compile(recipe, library, kept=False)
    return check_kernels(_load(library))


def library_name(recipe: Recipe) -> str:
    return f"{NAME}-{hash_recipe(recipe)}-{hash_compiler(recipe)}{SUFFIX}"


def _load_kept(reason: str) -> ModuleType:
    """The kernels in the cache that any compiler made of the same sources.

    Args:
        reason: why nothing can be compiled now.

    Raises:
        Unavailable: with that reason, if there are none.
    """
    try:
        entries = find_entries(f"{NAME}-{hash_recipe(make_recipe([]))}-*{SUFFIX}")
    except (CacheUnusable, OSError) as error:
        raise Unavailable(f"{reason}; the cache cannot be used: {why(error)}") from None
    for entry in entries:
        if entry.is_whole():
            with suppress(Unavailable):
                return check_kernels(_load(entry.library))
    raise Unavailable(reason)


def _load_cached(recipe: Recipe, entry: CachedLibrary) -> ModuleType:
    """The kernels of a cache entry, which is compiled if it is missing or damaged."""
    if kept := _load_whole(entry):
        return kept
    with entry.building(before_waiting) as unfinished:
        if kept := _load_whole(entry):  # another process compiled it in the meantime
            return kept
        _compile(recipe, unfinished, kept=True)
        try:
            check_kernels(_load(unfinished))
        except Unavailable as reason:  # kept, so that kernels that do not work are compiled once
            entry.store_failure(unfinished, str(reason))
            raise
        entry.store(unfinished)
        with suppress(OSError):
            entry.remove_unused()
    return _load(entry.library)


def _load_whole(entry: CachedLibrary) -> ModuleType | None:
    """The kernels of a cache entry; None if they must be compiled. Raises Unavailable if they never work."""
    if entry.is_whole():
        with suppress(Unavailable):
            kernels = check_kernels(_load(entry.library))
            entry.note_use()
            return kernels
    elif reason := entry.read_failure():
        raise Unavailable(reason)
    return None


def _compile(recipe: Recipe, library: Path, kept: bool) -> None:
    with while_compiling(len(recipe.kernels) + 2, kept) as compiled:  # with the bindings, and what links all
        compile_library(recipe, library, compiled)


def _load(library: Path) -> ModuleType:
    """Import a compiled library. Raises Unavailable if the system cannot load it."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"the compiled CPU kernels cannot be loaded: {str(error).splitlines()[0]}") from None
    return module


def check_kernels(module: ModuleType) -> ModuleType:
    """The module itself, after it has computed known products: bindings of another ABI fail here, not in a model.

    Raises:
        Unavailable: a kernel fails, or gives a wrong result.
    """
    with mx.stream(mx.cpu):
        for compute, expected in known_results(module):
            try:
                right = mx.array_equal(compute(), expected).item()  # small whole numbers: no rounding
            except (TypeError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise Unavailable(
                    f"the compiled CPU kernels do not work with MLX {version('mlx')} and nanobind "
                    f"{version('nanobind')} ({reason}); another version of nanobind may"
                ) from None
            if not right:
                raise Unavailable("the compiled CPU kernels give wrong results")
    return module


def known_results(module: ModuleType) -> list[tuple[Callable[[], mx.array], mx.array]]:
    """Calls of each kind of kernel, with what they must return."""
    x = mx.array([[(i % 7) - 3.0 for i in range(64)]])
    weight = mx.array([[float((i * j) % 16) for i in range(64)] for j in range(3)])
    words = mx.array(
        [[sum((i * j + k) % 16 << 4 * k for k in range(8)) for i in range(8)] for j in range(3)], mx.uint32
    )
    scales, biases = mx.full((3, 1), 0.5), mx.full((3, 1), -2.0)
    codes = mx.dequantize(words, scales, biases, 64, 4)
    dense = (x[:, None] * weight).sum(-1)
    heads, seen = x[None, None], mx.array([[True]])
    whole = mx.dequantize(words, mx.ones((3, 1)), mx.zeros((3, 1)), 64, 4)
    exact = exact_matrix(words, whole.astype(mx.bfloat16))
    stacked = exact.each(lambda array: array[None])
    by_whole = (x[:, None] * whole).sum(-1)
    return [
        (lambda: module.dense_matvec(x, weight), dense),
        (lambda: module.stack_matvec(x, [words], scales, [biases], [4], 64), (x[:, None] * codes).sum(-1)),
        (lambda: module.dense_experts(x, weight[None], mx.array([0])), dense[None]),
        (lambda: module.exact_matvec(x, *exact), by_whole),
        (lambda: module.dense_matvec(x, whole.astype(mx.bfloat16), 16), by_whole),
        (lambda: module.exact_matvec(x, *exact, 16), by_whole),
        (lambda: module.exact_decode(*exact), whole.astype(mx.bfloat16)),
        (lambda: module.exact_experts(x, *stacked, mx.array([0])), by_whole[None]),
        (lambda: module.rms_norm(mx.full((1, 64), 2.0), x[0], 0.0), x),
        (lambda: module.swiglu(mx.zeros_like(x), x), mx.zeros_like(x)),
        (lambda: module.rope(heads, mx.ones(8), False, 1.0, 0), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, True), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, False, seen), heads),
    ]


def exact_matrix(words: mx.array, weight: mx.array) -> ExactMatrix:
    """Exact weights 0 to 15, which are their own codes. Scale 1 and bias 0: code 0 is near zero."""
    one, none = mx.full((3, 1), 0x3F80, mx.uint16), mx.zeros((3, 1), mx.uint16)  # 0x3F80: bf16 of 1
    low = (weight.view(mx.uint16) & 255).astype(mx.uint8)
    offsets = mx.concatenate([mx.array([0]), mx.cumsum((weight == 0).sum(-1))]).astype(mx.uint32)
    return ExactMatrix(words, one, none, low, mx.zeros(3 * 64, mx.uint8), offsets, 64)
