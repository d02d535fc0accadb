"""List the models that `--model` can name without a download, with their size and their gears."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console

from ..cli.tables import table_with_head
from ..errors import GearbxError, escaped, one_line
from ..files.smollm2 import SMOLLM2, installed_file
from ..gears.manifest import read_manifest
from ..settings import human_bytes
from . import ListSettings

UNBROKEN = 10_000  # columns where no terminal breaks lines: a name stays whole
NO_MODELS = "no models here; --model takes a Hub name such as mlx-community/Llama-3.2-1B-Instruct-bf16 and downloads it"


@dataclass(frozen=True)
class ModelAtHand:
    """A model by the name that `--model` takes. size: bytes of its weights."""

    name: str
    place: str
    size: int
    gears: str


def run(settings: ListSettings) -> int:
    """Print a table of the models, on stdout. Raises GearbxError for a directory that cannot be read."""
    models = [*installed_models(), *hub_models(), *models_in(Path(settings.place.directory))]
    rows = [(escaped(each.name), each.place, human_bytes(each.size), each.gears) for each in models]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else UNBROKEN)
    if rows:
        console.print(table_with_head(("model", "place", "weights", "gears"), rows))
    else:
        console.print(NO_MODELS, soft_wrap=True)
    return 0


def installed_models() -> Iterator[ModelAtHand]:
    """Yield SmolLM2, where its package is installed."""
    with suppress(GearbxError):
        yield ModelAtHand(SMOLLM2, "installed", installed_file().stat().st_size, "original: made at the start")


def hub_models() -> Iterator[ModelAtHand]:
    """Yield the models of the Hub's cache in their latest revision, by name; data sets and others are left out."""
    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            for revision in sorted(repo.revisions, key=lambda each: each.last_modified)[-1:]:
                if repo.repo_type == "model":
                    yield from model_in(revision.snapshot_path, repo.repo_id, "Hub cache")


def models_in(directory: Path) -> Iterator[ModelAtHand]:
    """Yield the models in a directory, by name: folders as mlx-lm has them, and GGUF files."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise GearbxError(f"{directory}: cannot be read ({error.strerror}); give another --directory") from error
    for entry in entries:
        with suppress(OSError):  # of another user, or removed meanwhile
            if entry.suffix == ".gguf" and entry.is_file():
                yield ModelAtHand(str(entry), "GGUF file", entry.stat().st_size, "its own codes")
            elif entry.is_dir():
                yield from model_in(entry, str(entry), "directory")


def model_in(directory: Path, name: str, place: str) -> Iterator[ModelAtHand]:
    """Yield the model of a directory, if it has a configuration and weights."""
    weights = [file for file in directory.glob("*.safetensors") if file.is_file()]
    if weights and os.path.lexists(directory / "config.json"):
        yield ModelAtHand(name, place, sum(file.stat().st_size for file in weights), gears_of(directory))


def gears_of(directory: Path) -> str:
    """Return the gears that a checkpoint stores, or the bits of its codes; gears of an original are made at the start.

    A damaged file is named in the place of gears: the others are listed all the same.
    """
    try:
        manifest = read_manifest(directory)
        config: Any = json.loads((directory / "config.json").read_bytes())
        quantization = config.get("quantization") or config.get("quantization_config") or {}
        bits = quantization.get("bits")
    except (GearbxError, OSError, ValueError, AttributeError) as error:
        return f"damaged: {one_line(error, 60)}"
    if manifest is not None:
        return f"{manifest.ladder} stored, {manifest.format}"
    return f"{bits}-bit codes" if quantization else "original: made at the start"
