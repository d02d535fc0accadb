"""The files beside the weights: tokenizer, code and configuration."""

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..decoding.draft_plans import DRAFTING
from ..errors import GearbxError
from ..files.reading import shown, unreadable
from ..files.writing import PART
from ..gears.manifest import GEARS_FILE, MANIFEST, ORIGINAL_FILE, PRECISION
from ..loading import read_config
from .converter import BASE_FILE
from .journal import JOURNAL
from .model_card import CARD

REPORT = "selection.json"  # which bits every layer got, and why
OWN = {
    "config.json",
    BASE_FILE,
    GEARS_FILE,
    ORIGINAL_FILE,
    MANIFEST,
    JOURNAL,
    REPORT,
    PRECISION,
    DRAFTING,
    CARD,
}  # what a conversion writes itself


def is_copied(name: str) -> bool:
    """Whether a file of the original is copied: the tokenizer and code, and not what a conversion writes itself."""
    weights = name.endswith((".safetensors", ".safetensors.index.json"))
    return name not in OWN and not weights and any(fnmatch(name, pattern) for pattern in DEFAULT_ALLOW_PATTERNS)


def begin_again(source: Path, work: Path) -> None:
    """Prepare the directory of a conversion that has no journal: remove what an earlier one wrote itself.

    Raises:
        GearbxError: files that are not a conversion's own, such as those of a stopped --restore, which would stay in
            the checkpoint.
    """
    copied = {file.name for file in source.iterdir() if is_copied(file.name)}
    own = [file for file in work.iterdir() if file.name in OWN or file.name.endswith(PART)]
    others = sorted({file.name for file in work.iterdir()} - {file.name for file in own} - copied)
    if others:
        raise GearbxError(f"{work}: has {shown(others[0])}, which is not of this conversion; remove the directory")
    for file in own:
        file.unlink()


def copy_companions(source: Path, work: Path) -> None:
    """Tokenizer and code as they are. An earlier run may have copied some of them in part: all are copied again."""
    for file in source.iterdir():
        if is_copied(file.name):
            beside = work / (file.name + PART)
            beside.write_bytes(content_of(file))
            os.replace(beside, work / file.name)


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
