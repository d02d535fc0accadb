"""A command's settings on one of several ranks: equal on all of them, and nothing that a rank would do by itself."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..decoding.mode import Mode
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer, model_fingerprint
from ..ranks.agreement import check_equal
from ..ranks.place import current
from .output import OutputSettings
from .parsers.generate import GenerateSettings
from .settings import flag_of

OWN = ("model", "trace", "summary", "verbose")  # a fingerprint says more, or rank 0 alone writes
TEXT = ("prompt", "prefill_response")  # flags that are text, also where a file has that name
PIECE = 1 << 20  # bytes
ALONE = {  # flags of which one process alone can do what they ask for, and why
    "small_model": "two models that take turns run in one process",
    "draft_model": "mlx-lm's draft models run in one process; use --mode lossless",
    "adapter_path": "ranks cannot share adapters; fuse them first (mlx_lm.fuse)",
    "prompt_cache_file": "a file of KV caches has all heads and layers, of which a rank has its own; give the prompt",
    "low_model": "the low gear of another model cannot be divided",
    "target_tps": "the clock and the state of one machine would choose the gears of all",
    "watch_machine": "the clock and the state of one machine would choose the gears of all",
    "machine": "the clock and the state of one machine would choose the gears of all",
    "auto_bits": "bits are found in one process; convert with them first (gearbx_mlx.convert)",
}


def on_this_rank(settings: GenerateSettings) -> GenerateSettings:
    """The settings of this rank; unchanged where one process runs alone. On other ranks than 0 nothing is written.

    Raises:
        GearbxError: flags, files that they name, or versions that differ between ranks, or flags that ranks cannot
            have.
    """
    run = current()
    if run is None:
        return settings
    given = values(settings)
    check_equal(run.group, versions() | flag_facts(given))
    for name, why in ALONE.items():
        if given.get(name):
            raise GearbxError(f"{flag_of(name)} is for one process, and these are {run.place.size} ranks: {why}")
    if settings.input.prompt == "-":
        raise GearbxError("--prompt - reads standard input, which mlx.launch never ends; give the prompt itself")
    return settings if run.place.rank == 0 else replace(settings, output=OutputSettings(verbose=False))


def flag_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """What each flag asks for, by its name. A file counts by its content, wherever it lies on a machine."""
    return {flag_of(name): str(given[name]) if name in TEXT else fact(given[name]) for name in given if name not in OWN}


def fact(value: Any) -> str:
    if not isinstance(value, str | Path) or not os.path.isfile(value):
        return str(value)
    try:
        return f"a file with the digest {file_digest(value)}"
    except OSError:
        return str(value)  # who needs the file says why it cannot be read


def file_digest(path: str | Path) -> str:
    """As `digest`, of a file that may be larger than the memory."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()[:32]


def check_together(gearbox: Gearbox | Observer, mode: Mode, tokens: Sequence[int]) -> None:
    """Compare what decides the order and the size of what ranks tell each other.

    Raises:
        GearbxError: a model, bits of its layers, a mode or a prompt that are not the same on all ranks.
    """
    run = current()
    if run is None:
        return
    text = mode_facts(mode) | {"the prompt": digest(repr(list(tokens)).encode())}
    check_equal(run.group, model_facts(gearbox) | text)


def mode_facts(mode: Mode) -> dict[str, str]:
    """The mode and its settings, of which a file counts by its content."""
    settings = {f"{item.name} of mode {mode.name}": fact(getattr(mode, item.name)) for item in fields(mode)}
    return {"the mode": mode.name} | settings


def model_facts(gearbox: Gearbox | Observer) -> dict[str, str]:
    """The model, and what every gear makes of its layers."""
    facts = {
        "the model's fingerprint": model_fingerprint(gearbox.model),
        "the ladder": str(gearbox.ladder),
        "the bits of the layers": digest(repr([(each.path, each.bits) for each in gearbox.layer_paths()]).encode()),
    }
    if isinstance(gearbox, Gearbox):
        facts |= {"the format": gearbox.format.name, "the group size": str(gearbox.group_size)}
        facts["the type of the activations"] = str(gearbox.compute_dtype)
    return facts


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def values(settings: Any) -> Mapping[str, Any]:
    """Every flag's value, by its field's name."""
    groups = [getattr(settings, item.name) for item in fields(settings)]
    return {item.name: getattr(group, item.name) for group in groups for item in fields(group)}


def versions() -> dict[str, str]:
    """Of what computes; all ranks need the same."""
    names = ("gearbx-mlx", "mlx", "mlx-lm")
    return {f"version of {name}": version_of(name) for name in names} | {"kind of machine": platform.machine()}


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "a source tree"
