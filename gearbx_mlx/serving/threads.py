"""The end of a thread that computed with MLX."""

import threading
import time
from pathlib import Path

PATIENCE = 5.0  # seconds
LOOK = 0.001  # seconds
UNSEEN = 0.1  # seconds that a thread has to end where the system does not list threads as files


def join_to_the_end(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread, which is a little later than Python says.

    As it ends, MLX frees what it keeps for each thread, compiled functions say, and takes Python's lock for that. In a
    process that is already exiting this aborts: "terminate called without an active exception".
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    listed = task.parent.exists()
    thread.join()
    if not listed:
        time.sleep(UNSEEN)
    until = time.monotonic() + PATIENCE
    while task.exists() and time.monotonic() < until:
        time.sleep(LOOK)
