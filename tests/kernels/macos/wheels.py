"""MLX as a Mac has it: from its wheels for macOS, in the version that is installed here."""

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

WHEELS = "macosx_14_0_arm64"
PARTS = (
    "mlx/include/",
    "mlx/lib/libmlx.dylib",
    "mlx/core.",
)  # what a build needs: the Metal library is seven times that


class Unobtainable(Exception):
    """The wheels cannot be had; the message says which."""


def get_mlx(cache: Path) -> Path:
    """The directory of MLX for macOS, in `cache`: downloaded by pip, from where pip installs, unless it is there.

    Raises:
        Unobtainable: pip cannot find or fetch a wheel.
    """
    number = version("mlx")
    directory = cache / f"mlx-{number}-{sys.implementation.cache_tag}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            for name in ("mlx", "mlx-metal"):
                unpack(download(f"{name}=={number}", Path(made)), Path(made) / "unpacked")
            keep(Path(made) / "unpacked", directory)
    return directory / "mlx"


def keep(unpacked: Path, directory: Path) -> None:
    """Give the directory its name, unless another run has done that meanwhile: theirs has the same files."""
    try:
        unpacked.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def download(requirement: str, directory: Path) -> Path:
    before = set(directory.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", WHEELS, "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unobtainable(f"pip cannot get {requirement} for {WHEELS}")
    return (set(directory.glob("*.whl")) - before).pop()


def unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory, [name for name in file.namelist() if name.startswith(PARTS)])
