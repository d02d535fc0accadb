"""Weights in pages of 2 MB, which a processor finds faster than the usual 4 KB.

A token reads every weight once. On a virtual machine, where each page is looked up in two tables, SmolLM2's tokens in
16 bits take 1.3 times as long from small pages. Linux gives large ones to memory that asks for them before it is first
written (`madvise`, where /sys/kernel/mm/transparent_hugepage/enabled says so). MLX takes an array's memory from
`malloc`; so a piece of the heap that is large enough for the weights asks, and is freed again for them to be put there.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..kernels.dispatch import on_cpu

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGE = 2 << 20  # bytes
ADVICE = 14  # MADV_HUGEPAGE
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of mallopt
NEVER, MOST_MAPPED = (1 << 31) - 1, 65536
# Bytes from which an array is beside the heap: as far as glibc raises that by itself, once such arrays are freed.
LARGE = 32 << 20


@functools.cache
def glibc() -> Any:
    """The functions of glibc; None where another library allocates."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version, library.malloc_trim, library.mallopt  # noqa: B018 - musl has none of them
    except (AttributeError, OSError):
        return None
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = library.malloc_trim.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def system_has_them() -> bool:
    """Whether the system has large pages for memory that asks for them."""
    try:
        return "[never]" not in SYSTEM.read_text(encoding="utf-8")
    except OSError:
        return False


@contextlib.contextmanager
def large_pages(size: int) -> Iterator[None]:
    """In the block, `size` bytes of arrays are put into large pages, where the system has some; else nothing changes.

    Memory that is not needed after all is handed back at the end.
    """
    library = glibc() if on_cpu() and size >= PAGE and system_has_them() else None
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)  # everything comes from the heap
    library.mallopt(M_TRIM_THRESHOLD, NEVER)  # which would shrink at once
    try:
        place = library.malloc(size + 2 * PAGE)  # none under a limit of the process
        if place:
            first = -(-place // PAGE) * PAGE
            library.madvise(first, size, ADVICE)
            library.free(place)
        yield
    finally:
        library.mallopt(M_MMAP_MAX, MOST_MAPPED)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
        library.malloc_trim(0)
