"""Time how weights come from a file, with and without a hint to the system about what is read next (AION 4.1).

    python scripts/time_hints.py --directory DIR [--page docs/performance.md]

A file of --megabytes is read cold (the system forgets it first) and warm: through a mapping of the file (mmap), whose
bytes are added up; in pieces into memory that is used again, as gears are streamed; and by mx.load, as checkpoints are.
Each way is tried with no hint and with each hint in turn; a ratio is of times in the same round. The file is removed.
"""

import argparse
import mmap
import os
import statistics
import time
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from pages import fill, table

PIECE = 2**22  # bytes that are read at a time
ARRAYS = 32
ADVICE = {"sequential": "SEQUENTIAL", "willneed": "WILLNEED", "random": "RANDOM"}


def advise_file(descriptor: int, hint: str) -> None:
    if hint in ADVICE:
        os.posix_fadvise(descriptor, 0, 0, getattr(os, f"POSIX_FADV_{ADVICE[hint]}"))


def by_mapping(file: Path, hint: str) -> None:
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if hint in ADVICE:
            mapped.madvise(getattr(mmap, f"MADV_{ADVICE[hint]}"))
        words = np.frombuffer(mapped, np.uint64, count=len(mapped) // 8)
        words.sum()
        del words


def in_pieces(file: Path, hint: str) -> None:
    """hint "next piece": WILLNEED for one piece, while the one before it is read."""
    memory, size = memoryview(bytearray(PIECE)), file.stat().st_size
    descriptor = os.open(file, os.O_RDONLY)
    advise_file(descriptor, hint)
    for begin in range(0, size, PIECE):
        if hint == "next piece":
            os.posix_fadvise(descriptor, begin + PIECE, PIECE, os.POSIX_FADV_WILLNEED)
        os.preadv(descriptor, [memory], begin)
    os.close(descriptor)


def by_mlx(file: Path, hint: str) -> None:
    """MLX opens the file itself, so only WILLNEED can have an effect: it is of the file, and not of who opened it."""
    if hint != "none":
        descriptor = os.open(file, os.O_RDONLY)
        advise_file(descriptor, hint)
        os.close(descriptor)
    mx.eval(mx.load(str(file)))


WAYS = {
    "mmap": (by_mapping, ("none", "sequential", "willneed", "random")),
    "pieces": (in_pieces, ("none", "sequential", "willneed", "random", "next piece")),
    "mx.load": (by_mlx, ("none", "willneed")),
}


def forget(file: Path) -> None:
    """Remove a file from the system's memory."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(file: Path, cold: bool, way) -> float:
    if cold:
        forget(file)
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun


def measure(file: Path, trials: int) -> list[list[object]]:
    """Rows of the table."""
    size, rows = file.stat().st_size, []
    for name, (way, hints) in WAYS.items():
        for cold in (True, False):
            found: dict[str, list[float]] = {hint: [] for hint in hints}
            for hint in hints:
                seconds(file, cold, partial(way, file, hint))  # a warm-up
            for trial in range(trials):
                for hint in hints if trial % 2 else reversed(hints):
                    found[hint].append(seconds(file, cold, partial(way, file, hint)))
            for hint, times in found.items():
                ratios = [plain / one for plain, one in zip(found["none"], times)]
                spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
                speed = f"{size / statistics.median(times) / 1e9:.2f}"
                state = "cold" if cold else "warm"
                rows.append([name, state, hint, speed, f"{statistics.median(ratios):.2f}", spread])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="On the disk that is timed.")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--page", type=Path, help="Where to write the table.")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    file = args.directory / "hints.safetensors"
    part = args.megabytes * 2**20 // ARRAYS
    mx.save_safetensors(str(file), {f"{i}": mx.random.randint(0, 255, (part,)).astype(mx.uint8) for i in range(ARRAYS)})
    try:
        rows = measure(file, args.trials)
    finally:
        file.unlink()
    text = table(["read by", "file", "hint", "GB/s", "times no hint", "spread"], rows)
    print(text)
    if args.page:
        fill(args.page, {"hints": lambda: text})


if __name__ == "__main__":
    main()
