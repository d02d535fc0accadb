"""Whether what a benchmark is to allocate fits into memory."""

import os
from importlib import import_module

from ...cli.sizes import human_bytes
from ...errors import GearbxError


def available_memory() -> int:
    """Bytes that new programs can use; without psutil, all of the machine's memory."""
    try:
        psutil = import_module("psutil")  # an optional dependency
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return psutil.virtual_memory().available


def check_memory(needed: float, what: str) -> None:
    """Raises GearbxError where something needs more bytes than there are."""
    available = available_memory()
    if needed > available:
        raise GearbxError(
            f"{what} needs at least {human_bytes(needed)} of memory, and {human_bytes(available)} are available; "
            "give less"
        )
