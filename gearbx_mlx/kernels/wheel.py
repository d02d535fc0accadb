"""Compiled CPU kernels of a wheel, for machines without a compiler.

    GEARBX_WHEEL=kernels pip wheel --no-deps .

builds such a wheel (`compiler.build_for_wheel`). It has a library for each of several instruction sets, linked with one
MLX, for one version of Python. Because MLX's C++ interface may change, the libraries are loaded only if MLX has the
same minor version and headers. Otherwise kernels are compiled at first use, as in a clone.
"""

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import msgspec

FOLDER = Path(__file__).with_name("brought")  # absent in clones
RECORD = "linked_with.json"
VERSION_HEADER = "version.h"  # differs even between versions with the same interface
TO_MLX = "../../../mlx/lib"  # from the folder, both in site-packages


class LinkedWith(msgspec.Struct):
    """The MLX that the kernels were linked with: its version, and the hash of its headers."""

    mlx: str
    headers: str


def library_for(instructions: str) -> Path | None:
    """Return the library for an instruction set; None without one, or if it was linked with a different MLX."""
    library = FOLDER / f"{instructions}.so"
    return library if library.exists() and not why_foreign() else None


@functools.cache
def why_foreign() -> str:
    """Return why the wheel's kernels do not fit the installed MLX; "" if they do, or the wheel has no kernels.

    Headers take some milliseconds to read, and are compared only if the versions differ.
    """
    try:
        linked = msgspec.json.decode((FOLDER / RECORD).read_bytes(), type=LinkedWith)
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.MsgspecError):
        return "the CPU kernels of this wheel are damaged; install gearbx-mlx again"
    now = version("mlx")
    same_minor = linked.mlx.split(".")[:2] == now.split(".")[:2]
    if linked.mlx == now or (same_minor and linked.headers == hash_headers()):
        return ""
    return f"the CPU kernels of this wheel are for MLX {linked.mlx}, and MLX {now} is installed"


def hash_headers() -> str:
    """Return 24 hexadecimal digits that change with the C++ interface of the installed MLX."""
    digest, include = hashlib.sha256(), Path(mx.__file__).parent / "include"
    for header in sorted(include.rglob("*.h")):
        if header.name != VERSION_HEADER:
            digest.update(header.relative_to(include).as_posix().encode() + b"\0" + header.read_bytes())
    return digest.hexdigest()[:24]


def keep(folder: Path) -> None:
    """Write the record of the installed MLX beside the libraries that were linked with it."""
    (folder / RECORD).write_bytes(msgspec.json.encode(LinkedWith(version("mlx"), hash_headers())))
