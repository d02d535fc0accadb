"""The pictures of GEARBX section 17, each measured, drawn and tabulated by its own module.

A module has `measure(subject)`, which returns JSON-able data, `draw(data, figure)`, and `table(data)`, which returns
the head and the rows of a table. A new picture is one module and one line in PICTURES.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...errors import GearbxError


@dataclass(frozen=True)
class Picture:
    """A picture: its number in the paper, the name of its module and files, its title and its size in inches."""

    number: int
    name: str
    title: str
    size: tuple[float, float] = (7.2, 3.2)

    @property
    def module(self) -> Any:
        return import_module(f".{self.name}", __name__)


PICTURES = (
    Picture(1, "entropy_signal", "Entropy signal"),
    Picture(2, "memory_by_format", "Memory by format"),
    Picture(3, "forward_latency", "Forward latency"),
    Picture(4, "reconstruction_error", "Reconstruction error"),
    Picture(5, "routing_trace", "Routing trace"),
    Picture(6, "token_time", "Time of a token"),
    Picture(7, "residency", "Residency"),
    Picture(8, "gear_shares", "Gear shares by workload"),
    Picture(9, "bandwidth_model", "Bandwidth model"),
)


def chosen(only: str | None) -> Sequence[Picture]:
    """The pictures with these numbers, commas between; None: all. Raises GearbxError for another number."""
    if only is None:
        return PICTURES
    known = {str(picture.number): picture for picture in PICTURES}
    for number in only.split(","):
        if number.strip() not in known:
            raise GearbxError(f"--only {only}: there is no picture {number.strip()!r}; choose from {','.join(known)}")
    numbers = {number.strip() for number in only.split(",")}
    return [picture for number, picture in known.items() if number in numbers]
