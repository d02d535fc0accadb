"""A table of the models available without a download, with sizes and gears."""

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

UNBROKEN = 10_000  # columns outside of a terminal, where names stay on one line
NO_MODELS = "no models here; use a Hub name such as --model mlx-community/Llama-3.2-1B-Instruct-bf16 to download one"


@dataclass(frozen=True)
class ModelAtHand:
    """A model by its name for `--model`. size: bytes of weights."""

    name: str
    place: str
    size: int
    gears: str


def run(settings: ListSettings) -> int:
    """Print a table of the models on stdout."""
    models = [*installed_models(), *hub_models(), *models_in(Path(settings.place.directory))]
    rows = [(escaped(each.name), each.place, human_bytes(each.size), each.gears) for each in models]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else UNBROKEN)
    if rows:
        console.print(table_with_head(("model", "place", "weights", "gears"), rows))
    else:
        console.print(NO_MODELS, soft_wrap=True)
    return 0


def installed_models() -> Iterator[ModelAtHand]:
    """Yield SmolLM2 if its package is installed."""
    with suppress(GearbxError):
        yield ModelAtHand(SMOLLM2, "installed", installed_file().stat().st_size, "original: made at the start")


def hub_models() -> Iterator[ModelAtHand]:
    """Yield the models of the Hub's cache in their latest revisions, by name, without data sets."""
    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            for revision in sorted(repo.revisions, key=lambda each: each.last_modified)[-1:]:
                if repo.repo_type == "model":
                    yield from model_in(revision.snapshot_path, repo.repo_id, "Hub cache")


def models_in(directory: Path) -> Iterator[ModelAtHand]:
    """Yield the models in a directory, by name: mlx-lm's folders and GGUF files."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise GearbxError(f"{directory}: cannot be read ({error.strerror}); use another --directory") from error
    for entry in entries:
        with suppress(OSError):  # the file may be another user's, or removed meanwhile
            if entry.suffix == ".gguf" and entry.is_file():
                yield ModelAtHand(str(entry), "GGUF file", entry.stat().st_size, "its own codes")
            elif entry.is_dir():
                yield from model_in(entry, str(entry), "directory")


def model_in(directory: Path, name: str, place: str) -> Iterator[ModelAtHand]:
    """Yield the model of a directory with a configuration and weights."""
    weights = [file for file in directory.glob("*.safetensors") if file.is_file()]
    if weights and os.path.lexists(directory / "config.json"):
        yield ModelAtHand(name, place, sum(file.stat().st_size for file in weights), gears_of(directory))


def gears_of(directory: Path) -> str:
    """Return the stored gears or the bits of a checkpoint; for a damaged file the error, so that others are listed."""
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
