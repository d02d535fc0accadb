"""The run that this process is a rank of: one per process, as MLX's group of all ranks is."""

from dataclasses import dataclass
from typing import Any

from ..errors import GearbxError, one_line
from .place import Place


@dataclass(frozen=True)
class Run:
    """group: of all ranks, connected."""

    place: Place
    group: Any


_run: Run | None = None


def begin(place: Place) -> None:
    """Connect MLX's group. All ranks do that at once: MLX waits for the others for a few seconds alone.

    Raises:
        GearbxError: MLX cannot.
    """
    import mlx.core as mx  # a command that runs alone does not wait for it here

    global _run
    try:
        _run = Run(place, mx.distributed.init(strict=True, backend=place.backend))
    except (RuntimeError, ValueError) as error:
        raise GearbxError(f"MLX cannot connect the ranks ({place.backend}): {one_line(error)}") from error


def current() -> Run | None:
    """The run that this process is a rank of; None: it is no rank, and computes alone."""
    return _run
