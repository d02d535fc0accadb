"""What tests compile, kept by its inputs: kernels for the CPU harness, and programs over the native kernels.

A compiler takes most of the time of these tests, and its result depends on texts and flags alone. CI keeps the folder
from one run to the next; GEARBX_TEST_OBJECTS names another one.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import platformdirs
from filelock import FileLock

FOLDER = Path(os.environ.get("GEARBX_TEST_OBJECTS") or platformdirs.user_cache_path("gearbx-mlx") / "test-objects")
DAYS = 30  # how long an unused object is kept


def kept(made_of: Iterable[object], make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled from the same inputs, in this session or an earlier one.

    Args:
        made_of: all that the result depends on: texts, flags, the compiler's version; of a path, the file's bytes.
        make: fills an empty folder. Its errors are passed on, and nothing is kept then.
    """
    digest = hashlib.sha256()
    for each in made_of:
        digest.update((each.read_bytes() if isinstance(each, Path) else str(each).encode()) + b"\0")
    folder = FOLDER / digest.hexdigest()[:32]
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = folder.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
    os.utime(folder)
    return folder


def forget_unused() -> None:
    """Remove what no test has used in a month."""
    for folder in FOLDER.glob("*"):
        with suppress(FileNotFoundError):  # another process has renamed or removed it
            if folder.stat().st_mtime < time.time() - DAYS * 86400:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
