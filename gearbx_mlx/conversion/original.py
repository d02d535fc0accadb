"""The files of the original: which of them a checkpoint copies, and what it keeps so that all of them come back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..errors import GearbxError
from ..files.reading import LARGEST_JSON, unreadable
from ..gears.manifest import (
    GEARS_FILE,
    MANIFEST,
    ORIGINAL_FILE,
    PRECISION,
    OriginalModel,
    OriginalShard,
    Tensor,
    View,
    file_key,
    header_key,
    is_plain,
    tensor_key,
)
from ..gears.tensor_files import LENGTH, SIZES, ArrayPlace, FileHeader, TensorEntry, hash_bytes, hash_places, header_of
from ..loading import read_config
from .converter import BASE_FILE, TensorFile, find
from .model_card import CARD

REPORT = "selection.json"  # which bits every layer got, and why
# What a conversion writes itself.
DRAFTING = "drafting.json"  # which earlier versions wrote
OWN = {"config.json", BASE_FILE, GEARS_FILE, ORIGINAL_FILE, MANIFEST, REPORT, PRECISION, DRAFTING, CARD}


def is_copied(name: str) -> bool:
    """Whether a file of the original is copied: the tokenizer and code, and not what a conversion writes itself."""
    weights = name.endswith((".safetensors", ".safetensors.index.json"))
    return name not in OWN and not weights and any(fnmatch(name, pattern) for pattern in DEFAULT_ALLOW_PATTERNS)


def copy_companions(source: Path, work: Path) -> None:
    """Tokenizer and code as they are."""
    for file in source.iterdir():
        if is_copied(file.name):
            (work / file.name).write_bytes(content_of(file))


def content_of(file: Path) -> bytes:
    """Raises GearbxError where a file of the original cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def write_config(source: Path, work: Path, quantization: dict[str, Any] | None) -> None:
    """config.json of the original, and how the base is quantized; None: not at all."""
    config = read_config(source)
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    (work / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")


# What comes back

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.npz")
ROOM = 128  # bytes of a header for the entry of one array, without its name
Key = tuple[str, str]  # a shard's name and a tensor's


@dataclass(frozen=True)
class Header:
    """The beginning of a safetensors file: the header as it is, and what it says of each tensor."""

    data: bytes
    entries: dict[str, TensorEntry]

    @property
    def start(self) -> int:
        """Where the data begin."""
        return LENGTH.size + len(self.data)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.start + max((entry.data_offsets[1] for entry in self.entries.values()), default=0)


def places_in(headers: Mapping[str, Header], directory: Path) -> dict[Key, ArrayPlace]:
    """Where each tensor is in the files of a directory. headers: by the name of a file."""
    files = {name: FileHeader(directory / name, header.entries, header.start) for name, header in headers.items()}
    return {(name, tensor): place for name, file in files.items() for tensor, place in file.places.items()}


class OriginalFiles:
    """The files of a model that is converted; they are read and never changed.

    Args:
        directory: of the model.
        progress: called with the bytes of each tensor that was hashed.

    Raises:
        GearbxError: a file that is damaged or cannot be read.
    """

    def __init__(self, directory: Path, progress: Callable[[int], None] = lambda size: None):
        self.directory = directory
        self.shards = {file.name: read_header(file) for file in weights_in(directory)}
        self.places = places_in(self.shards, directory)
        self.hashes: dict[Key, str] = {}
        for key, hash in hash_places(self.places):
            self.hashes[key] = hash
            progress(self.places[key].size)

    @property
    def size(self) -> int:
        """Bytes of the files with weights."""
        return sum(header.size for header in self.shards.values())

    @property
    def others(self) -> tuple[list[Path], list[str]]:
        """The other files that come back, and the names of those that do not: other weights, folders, odd names."""
        kept: list[Path] = []
        lost: list[str] = []
        for file in sorted(self.directory.iterdir()):
            is_weight = any(fnmatch(file.name, pattern) for pattern in WEIGHTS)
            if file.name not in self.shards and not file.name.startswith("."):
                plain = is_plain(file.name) and file.is_file() and not is_weight and file.stat().st_size <= LARGEST_JSON
                kept.append(file) if plain else lost.append(file.name)
        return kept, lost

    def keep(self, views: Mapping[str, View], work: Path) -> OriginalModel:
        """Write what the parameters do not contain into `original.safetensors` of a directory.

        Args:
            views: hash to what it shows of a parameter.

        Raises:
            GearbxError: a file of the original cannot be read.
            OSError: the directory cannot be written.
        """
        others, _ = self.others
        kept = [file for file in others if not is_copied(file.name)]
        keys = [*map(header_key, self.shards), *(file_key(file.name) for file in kept)]
        keys += [tensor_key(*key) for key in self.places]
        out = TensorFile(work / ORIGINAL_FILE, sum(ROOM + 6 * len(key) for key in keys) + ROOM)
        try:
            headers = {name: store(out, header_key(name), header.data) for name, header in self.shards.items()}
            for file in kept:
                store(out, file_key(file.name), content_of(file))
            tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.shards}
            for (shard, name), hash in self.hashes.items():
                tensors[shard][name] = self._kept(shard, name, hash, views, out)
            out.finish()
        finally:
            out.close()
        return OriginalModel(
            shards={name: OriginalShard(headers[name], tensors[name]) for name in self.shards},
            files={file.name: hash_bytes(content_of(file)) for file in others},
            kept=tuple(file.name for file in kept),
        )

    def _kept(self, shard: str, name: str, hash: str, views: Mapping[str, View], out: TensorFile) -> Tensor:
        """One tensor by its pieces; stored as it is where there are none."""
        if hash in views:  # without reading it
            return Tensor(hash, (views[hash],))
        entry, data = self.shards[shard].entries[name], read_place(self.places[shard, name])
        size = SIZES.get(entry.dtype, 1)
        shape = entry.shape if size * np.prod(entry.shape, dtype=int) == len(data) else (len(data) // size,)
        tensor = find(np.frombuffer(data, f"u{size}").reshape(shape), hash, views)
        if not tensor.pieces:
            store(out, tensor_key(shard, name), data)
        return tensor


def weights_in(directory: Path) -> list[Path]:
    """The files of weights that mlx-lm reads."""
    return sorted(directory.glob("model*.safetensors"))


def check_names(directory: Path) -> None:
    """Raises GearbxError for a file of weights that could not come back, for its name; before it is hashed."""
    for file in weights_in(directory):
        if not is_plain(file.name):
            raise GearbxError(
                f"{file}: format exact keeps the names of the weights' files, and this one has a backslash, a control "
                "character or a byte that is not UTF-8; rename it"
            )


def read_header(file: Path) -> Header:
    """Raises GearbxError for a file that is damaged or cannot be read."""
    try:
        _, entries, start = header_of(file)
        with open(file, "rb") as opened:
            opened.seek(LENGTH.size)
            return Header(opened.read(start - LENGTH.size), entries)
    except OSError as error:
        raise unreadable(file, error) from error


def read_place(place: ArrayPlace) -> bytes:
    """Raises GearbxError for a file that cannot be read, or is shorter than it was."""
    try:
        with open(place.file, "rb") as file:
            file.seek(place.begin)
            data = file.read(place.size)
    except OSError as error:
        raise unreadable(place.file, error) from error
    if len(data) != place.size:
        raise GearbxError(f"{place.file}: shorter than its header says; download it again")
    return data


def store(file: TensorFile, key: str, data: bytes) -> str:
    """Append bytes to a file, and return their hash."""
    return file.append_data(key, "U8", (len(data),), np.frombuffer(data, np.uint8))
