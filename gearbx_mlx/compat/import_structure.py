"""Import of transformers without a scan of its source.

On import, transformers reads all of its 3,000 source files to map classes to files. This takes a fifth of a second.
Commands keep the result in the user's cache, by path and time of the installed package. An editable installation is
scanned at each import, as its files may change.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from ..errors import GearbxError
from ..files.user_cache import CacheUnusable, cache_entry
from ..files.writing import write_text

SCANNING = "transformers.utils.import_utils"
SCAN = "define_import_structure"
SCAN_NAME = "transformers-"  # prefix of its file in the cache
INSTALLED = ("site-packages", "dist-packages")

Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names of required packages to the modules that need them, and modules to the names that they define."""


class Finder(MetaPathFinder):
    """A finder of the module of transformers that scans; it replaces the scan of all models, once."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != SCANNING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Patching(spec.loader)
        return spec


class Patching(Loader):
    """A loader that runs a module as its own loader does, and then replaces its scan."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        scan = getattr(module, SCAN, None)
        if callable(scan) and module.__file__ is not None:
            setattr(module, SCAN, kept_scan(scan, Path(module.__file__).parents[1] / "models"))


def keep_scan() -> None:
    """Let this process import transformers without a scan, unless it is already imported."""
    if SCANNING not in sys.modules and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def kept_scan(scan: Callable[..., Structure], models: Path) -> Callable[..., Structure]:
    """Return a scan that reads its result for the folder of all models from the cache, and keeps it there."""

    def scanned(module_path: str | Path, prefix: str | None = None) -> Structure:
        folder = Path(module_path)
        if (folder.parent if folder.suffix == ".py" else folder) != models or not {*INSTALLED} & {*models.parts}:
            return scan(module_path, prefix)
        try:
            structure = read_or_make(models, scan)
        except (CacheUnusable, GearbxError, OSError):  # the cache is only for speed
            return scan(module_path, prefix)
        if prefix is None:
            return structure
        return {needs: {f"{prefix}.{name}": names for name, names in of.items()} for needs, of in structure.items()}

    return scanned


def read_or_make(models: Path, scan: Callable[..., Structure]) -> Structure:
    """Return the structure of a folder, from the cache or else from a scan."""
    state = [(str(place), place.stat().st_mtime_ns) for place in (models, models / "__init__.py")]
    place = cache_entry(f"{SCAN_NAME}{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}.json")
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        kept = msgspec.json.decode(place.read_bytes(), type=list[tuple[frozenset[str], dict[str, set[str]]]])
        return dict(kept)
    structure = scan(str(models))
    write_text(place, msgspec.json.encode(list(structure.items())).decode())
    place.chmod(0o600)
    return structure
