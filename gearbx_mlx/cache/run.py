"""A table of the user's cache by kind, and removal of its entries."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from ..cli.tables import table_with_head
from ..cli.terminal import note
from ..compat.import_structure import SCAN_NAME
from ..errors import GearbxError
from ..files.unpacked import HASHES
from ..files.user_cache import CacheUnusable, chat_history, open_cache
from ..kernels.cpu import BUILDING_LOCK, MODULE_NAME
from ..settings import human_bytes
from . import CACHE_KINDS, UsersCacheSettings

FOLDERS = ("bases", "gears", "heads")  # folders with a file or directory for each entry


@dataclass(frozen=True)
class Kept:
    """A file or directory of the cache. used: time of the last write, or of the last load of a library."""

    path: Path
    kind: str
    size: int
    used: float


def run(settings: UsersCacheSettings) -> int:
    """Remove the requested entries, and print a row for each kind on stdout."""
    try:
        directory = open_cache()
    except CacheUnusable as error:
        raise GearbxError(f"user's cache: {error}") from error
    wanted = settings.cache.empty
    if wanted is not None:
        empty(directory, [wanted] if wanted in CACHE_KINDS else list(CACHE_KINDS))
    found = list(cache_entries(directory))
    rows = [row(kind, [entry for entry in found if entry.kind == kind]) for kind in CACHE_KINDS]
    total = human_bytes(sum(entry.size for entry in found))
    console = Console(highlight=False)
    console.print(table_with_head(("kind", "number", "size", "used"), [each for each in rows if each]))
    console.print(f"{directory}: {total}", soft_wrap=True, markup=False)
    return 0


def cache_entries(directory: Path) -> Iterator[Kept]:
    """Yield the entries of the cache without locks, and the history of chats beside it."""
    with suppress(OSError, RuntimeError):
        history = chat_history()
        yield Kept(history, "history", disk_size(history), history.stat().st_mtime)
    for path in sorted(directory.iterdir()):
        kind = kind_in_cache(path)
        for each in sorted(path.iterdir()) if kind in FOLDERS else [path]:
            if not each.name.endswith(".lock"):
                with suppress(FileNotFoundError):  # another process removed it meanwhile
                    yield Kept(each, kind, disk_size(each), each.stat().st_mtime)


def kind_in_cache(path: Path) -> str:
    """Return the kind of a file or directory at the top of the cache."""
    if path.name.lstrip(".").startswith(MODULE_NAME):
        return "kernels"
    if path.name in FOLDERS and path.is_dir():
        return path.name
    if path.name.startswith(SCAN_NAME):
        return "imports"
    if path.suffix == ".lookup":
        return "lookup"
    if path.suffix == ".json":
        return "times"
    is_model = path.is_dir() and (path.name.startswith((".", HASHES)) or (path / "config.json").exists())
    return "models" if is_model else "other"


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def row(kind: str, found: list[Kept]) -> tuple[str, ...] | None:
    """Return the table row of a kind; None without entries."""
    if not found:
        return None
    days = (time.time() - max(entry.used for entry in found)) / 86400
    used = "today" if days < 1 else f"{days:.0f} days ago"
    return f"{kind}: {CACHE_KINDS[kind]}", str(len(found)), human_bytes(sum(entry.size for entry in found)), used


def empty(directory: Path, kinds: list[str]) -> None:
    """Remove the entries of these kinds, while no process compiles."""
    with FileLock(directory / BUILDING_LOCK, mode=0o600):
        entries = [entry for entry in cache_entries(directory) if entry.kind in kinds]
        for entry in entries:
            try:
                if entry.path.is_dir() and not entry.path.is_symlink():
                    shutil.rmtree(entry.path)
                else:
                    entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise GearbxError(f"{error.filename}: cannot be removed ({error.strerror}); use rm") from error
    for kind in kinds:
        if sizes := [entry.size for entry in entries if entry.kind == kind]:
            note(f"removed {kind}: {len(sizes)}, {human_bytes(sum(sizes))}")
