"""From the controller's settings to the governor of a gearbox."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..decoding.governor import Governor
from ..decoding.modes import mode_class
from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..machine.readers import this_machine
from ..machine.scripted import Scripted
from ..machine.watch import Watch
from .controller import ControllerSettings
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
    with make_watch(settings.machine, verbose) as watch:
        yield Governor(gearbox, settings.target_tps, watch=watch, time_layers=settings.time_layers, **keywords)


def make_watch(script: str | None, verbose: bool) -> Watch:
    """Reads a script, or this machine; prints which readers of this machine work, and why the others do not."""
    if script is not None:
        return Watch([Scripted.from_file(script)])
    readers, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for reader, reason in absent.items():
        reasons.setdefault(reason, []).append(reader)
    missing = "".join(f"; no {' and '.join(names)} ({reason})" for reason, names in reasons.items())
    if verbose:
        names = [reader.name for reader in readers] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine{missing}")
    return Watch(readers)


def check_governing(settings: ControllerSettings, mode: str | None, draft_model: str | None) -> None:
    """Raises GearbxError for a mode whose gears cannot be capped, or for tokens that cannot be timed."""
    if not settings.wanted:
        return
    if mode is not None and (reason := mode_class(mode).uncapped):
        raise GearbxError(f"--mode {mode} {reason}; leave out --target-tps and --watch-machine, or use --mode route")
    if draft_model is not None:
        raise GearbxError("with --draft-model tokens come several at a time and cannot be timed; leave it out")
