"""From the controller's settings to the governor of a gearbox."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..decoding.governor import Governor
from ..decoding.modes import mode_class
from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..machine.readers import OwnMemory, Reader, Scripted, Watch, this_machine
from .controller import ControllerSettings
from .sizes import human_bytes
from .terminal import note


@contextlib.contextmanager
def governor(settings: ControllerSettings, gearbox: Any, verbose: bool, **keywords: Any) -> Iterator[Governor | None]:
    """What caps the gears while the context lasts; None where nothing is to be capped.

    Args:
        verbose: print which readers of this machine work.
        keywords: what a manifest says: `sensitivity`, `bounds`.

    Raises:
        GearbxError: a model that changes no gear, or whose layers cannot be capped or timed.
    """
    if not settings.wanted:
        yield None
        return
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            "the model changes no gear, so nothing can be capped; leave out --target-tps and --watch-machine"
        )
    own = [] if (limit := settings.limit()) is None else [own_memory(limit)]
    with make_watch(settings, own, verbose) as watch:
        yield Governor(gearbox, settings.target_tps, watch=watch, **keywords)


def own_memory(limit: int) -> OwnMemory:
    """Reads this process's memory. Raises GearbxError where the model alone takes more."""
    reader = OwnMemory(limit, mx.get_active_memory)
    if reader.bytes() > limit:
        raise GearbxError(
            f"--max-memory {human_bytes(limit)}: with the model loaded this process has {human_bytes(reader.bytes())}; "
            "give more, or use fewer --gears, --format exact or --residency disk"
        )
    return reader


def make_watch(settings: ControllerSettings, own: Sequence[Reader], verbose: bool) -> Watch:
    """Reads a script, or this machine; prints which readers of this machine work, and why the others do not.

    Args:
        own: readers of this process, which are read in any case.
    """
    if settings.machine is not None:
        return Watch([Scripted.from_file(settings.machine), *own])
    if own and not (settings.watch_machine or settings.target_tps is not None):
        return Watch(own)
    readers, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for reader, reason in absent.items():
        reasons.setdefault(reason, []).append(reader)
    missing = "".join(f"; no {' and '.join(names)} ({reason})" for reason, names in reasons.items())
    if verbose:
        names = [reader.name for reader in readers] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine{missing}")
    return Watch([*readers, *own])


def check_governing(settings: ControllerSettings, mode: str | None, draft_model: str | None) -> None:
    """Raises GearbxError for a mode whose gears cannot be capped, or for tokens that cannot be timed."""
    if not settings.wanted:
        return
    if mode is not None and (reason := mode_class(mode).uncapped):
        raise GearbxError(f"--mode {mode} {reason}; leave out --target-tps and --watch-machine, or use --mode route")
    if draft_model is not None:
        raise GearbxError("with --draft-model tokens come several at a time and cannot be timed; leave it out")
