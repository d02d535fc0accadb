"""Limits of time and memory for what others wrote and this process runs, such as a chat template."""

import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Ends what runs inside when it takes too long or too much memory.

    Args:
        memory: bytes more than the process has now. Linux alone can limit them.

    Raises:
        TimeoutError, MemoryError: from the place where it is then.
    """
    with limited_time(seconds), limited_memory(memory):
        yield


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    in_main = threading.current_thread() is threading.main_thread()  # the only one in which Python runs handlers
    if not in_main or not hasattr(signal, "SIGALRM"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of whoever calls


@contextlib.contextmanager
def limited_memory(memory: int) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource  # which Windows lacks

    used = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory + 1024 * int(used[1]) if used else soft
    limits = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=resource.RLIM_INFINITY), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
