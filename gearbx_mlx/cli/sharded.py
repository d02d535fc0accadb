"""A command's settings on one of several ranks: equal on all of them, and nothing that a rank would do by itself."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..errors import GearbxError
from ..gears.attachment import model_fingerprint
from ..gears.gearbox import Gearbox
from ..gears.observer import Observer
from ..ranks.comparison import check_equal
from ..ranks.run import current
from .output import OutputSettings
from .parsers.generate import GenerateSettings
from .settings import flag_of

OWN = ("model", "trace", "summary", "verbose")  # flags that may differ: paths, and what rank 0 alone writes
ALONE = {  # flags of which one process alone can do what they ask for, and why
    "small_model": "two models that take turns run in one process",
    "draft_model": "mlx-lm's draft models run in one process; use --mode lossless",
    "adapter_path": "ranks cannot share adapters; fuse them first (mlx_lm.fuse)",
    "prompt_cache_file": "a file of KV caches has all heads and layers, of which a rank has its own; give the prompt",
    "low_model": "the low gear of another model cannot be divided",
    "target_tps": "the clock and the state of one machine would choose the gears of all",
    "watch_machine": "the clock and the state of one machine would choose the gears of all",
    "machine": "the clock and the state of one machine would choose the gears of all",
    "time_layers": "the clock and the state of one machine would choose the gears of all",
    "auto_bits": "bits are found in one process; convert with them first (gearbx_mlx.convert)",
}


def on_this_rank(settings: GenerateSettings) -> GenerateSettings:
    """The settings of this rank; unchanged where one process runs alone. On other ranks than 0 nothing is written.

    Raises:
        GearbxError: flags or versions that differ between ranks, or flags that ranks cannot have.
    """
    run = current()
    if run is None:
        return settings
    given = values(settings)
    check_equal(run.group, versions() | {flag_of(name): str(given[name]) for name in given if name not in OWN})
    for name, why in ALONE.items():
        if given.get(name):
            raise GearbxError(f"{flag_of(name)} is for one process, and these are {run.place.size} ranks: {why}")
    if settings.input.prompt == "-":
        raise GearbxError("--prompt - reads standard input, which mlx.launch never ends; give the prompt itself")
    return settings if run.place.rank == 0 else replace(settings, output=OutputSettings(verbose=False))


def check_together(gearbox: Gearbox | Observer, tokens: Sequence[int]) -> None:
    """Raises GearbxError for a model, gears or a prompt that are not the same on all ranks."""
    run = current()
    if run is None:
        return
    facts = {
        "the model's fingerprint": model_fingerprint(gearbox.model),
        "the ladder": str(gearbox.ladder),
        "the prompt": hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:32],
    }
    check_equal(run.group, facts)


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
