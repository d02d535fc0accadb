"""The native CPU kernels of this machine: compiled when first needed, kept in the user's cache, tested before use.

The sources in `cpu/` become operations of MLX's own graph. The library's name contains a hash of everything that it
depends on, and one of the compiler: kernels in the cache are used where the compiler has gone. If anything goes wrong,
`why_not` gives the reason in one line, and everything runs on MLX's own kernels.
"""

import functools
import importlib.machinery
import importlib.util
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType

from ..errors import GearbxWarning
from .compiler import (
    Recipe,
    Unavailable,
    compile_library,
    find_compiler,
    hash_compiler,
    hash_recipe,
    make_recipe,
)
from .library_cache import (
    CacheUnusable,
    Entry,
    find_entries,
    open_entry,
    private_directory,
    remove_abandoned_private,
)
from .self_test import check_kernels

NAME = "_gearbx_cpu"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def while_compiling(files: int) -> AbstractContextManager[Callable[[], None]]:
    """Surrounds a compilation, and gives what is called after each file: a command puts its progress bar here."""
    return nullcontext(lambda: None)


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
        problem = _problem(error)
    warnings.warn(f"CPU kernels are compiled for this process alone: {problem}", GearbxWarning, stacklevel=2)
    try:
        library = private_directory() / name
    except OSError:
        raise Unavailable(
            "there is no directory to put the compiled CPU kernels in; set XDG_CACHE_HOME to one"
        ) from None
    _compile(recipe, library)
    return check_kernels(_load(library))


def library_name(recipe: Recipe) -> str:
    return f"{NAME}-{hash_recipe(recipe)}-{hash_compiler(recipe)}{SUFFIX}"


def _problem(error: CacheUnusable | OSError) -> str:
    """Why the cache cannot be used."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}; set XDG_CACHE_HOME to another directory"
    return str(error)


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
        raise Unavailable(f"{reason}; the cache cannot be used: {_problem(error)}") from None
    for entry in entries:
        if entry.is_whole():
            with suppress(Unavailable):
                return check_kernels(_load(entry.library))
    raise Unavailable(reason)


def _load_cached(recipe: Recipe, entry: Entry) -> ModuleType:
    """The kernels of a cache entry, which is compiled if it is missing or damaged."""
    if kept := _load_whole(entry):
        return kept
    with entry.building() as unfinished:
        if kept := _load_whole(entry):  # another process compiled it in the meantime
            return kept
        _compile(recipe, unfinished)
        try:
            check_kernels(_load(unfinished))
        except Unavailable as reason:  # kept, so that kernels that do not work are compiled once
            entry.store_failure(unfinished, str(reason))
            raise
        entry.store(unfinished)
    return _load(entry.library)


def _load_whole(entry: Entry) -> ModuleType | None:
    """The kernels of a cache entry; None if they must be compiled. Raises Unavailable if they never work."""
    if entry.is_whole():
        with suppress(Unavailable):
            return check_kernels(_load(entry.library))
    elif reason := entry.read_failure():
        raise Unavailable(reason)
    return None


def _compile(recipe: Recipe, library: Path) -> None:
    with while_compiling(recipe.runs) as compiled:
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
