"""Read by every Python that the tests start: transformers lists its models once, and not in each process.

`import transformers` reads 3,000 files for that list, which takes half a second in each of hundreds of commands.
"""

import os
import pickle
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

MODULE, FUNCTION = "transformers.utils.import_utils", "define_import_structure"


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its results in files of the folder that conftest.py names."""

    def call(*arguments: Any, **named: Any) -> Any:
        key = sha256(repr((arguments, named)).encode()).hexdigest()
        file = Path(os.environ["GEARBX_TEST_LISTS"]) / key
        if not file.exists():
            with NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
                pickle.dump(function(*arguments, **named), unfinished)
            os.replace(unfinished.name, file)
        return pickle.loads(file.read_bytes())

    return call


class Finder:
    """Finds the one module whose function is exchanged."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            setattr(module, FUNCTION, kept(getattr(module, FUNCTION)))

        spec.loader.exec_module = exec_module
        return spec


if Path(os.environ.get("GEARBX_TEST_LISTS", "")).is_dir():
    sys.meta_path.insert(0, Finder)
