"""This process's rank, from the environment variables of MLX's launcher or MPI.

A process takes part in one run, like MLX's global group.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import GearbxError, one_line

RANK, HOSTFILE, JACCL_DEVICES = "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES"
MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
HOSTFILE_LAYOUT = 'use the layout [["HOST:PORT"], ["HOST:PORT"]], with a list of addresses per rank'

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """This process's rank among `size`."""

    rank: int
    size: int
    backend: str
    addresses: tuple[tuple[Address, ...], ...] = ()  # each rank's addresses; empty except with MLX's ring

    def name_of(self, rank: int) -> str:
        """Return a rank's name in messages, with its first address."""
        return f"rank {rank} ({host_port(self.addresses[rank][0])})" if self.addresses else f"rank {rank}"


def host_port(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place; None for a single process.

    Raises:
        GearbxError: contradictory variables, or an invalid hostfile.
    """
    if RANK in environment and environment.get(HOSTFILE):
        addresses = read_hostfile(Path(environment[HOSTFILE]))
        if len(addresses) < 2:
            return None  # mlx.launch -n 1
        rank = rank_number(environment, RANK)
        if rank >= len(addresses):
            raise GearbxError(
                f"{environment[HOSTFILE]}: names {len(addresses)} ranks, and this process is rank {rank} ({RANK}); "
                "use as many processes as the hostfile has ranks, numbered from 0"
            )
        return Place(rank, len(addresses), "ring", addresses)
    if RANK in environment and environment.get(JACCL_DEVICES):
        devices = parsed(JACCL_DEVICES, Path(environment[JACCL_DEVICES]), "use a list of devices per rank")
        return Place(rank_number(environment, RANK), len(devices), "jaccl")
    for rank_name, size_name in MPI:
        if size_name in environment and rank_number(environment, size_name) > 1:
            return Place(rank_number(environment, rank_name), rank_number(environment, size_name), "mpi")
    return None


def rank_number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises GearbxError for other text."""
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise GearbxError(f"{name}: not the number of a rank, got {text!r}; use mlx.launch, or set it from 0")
    return int(text)


def read_hostfile(file: Path) -> tuple[tuple[Address, ...], ...]:
    """Return the addresses of each rank; none for the empty file of `mlx.launch -n 1`.

    Raises:
        GearbxError: a missing file, or one without a JSON list of addresses.
    """
    content = parsed(HOSTFILE, file, HOSTFILE_LAYOUT)
    ranks = [entry if isinstance(entry, list) else [None] for entry in content]
    addresses = tuple(tuple(parsed_address(file, text) for text in entry) for entry in ranks)
    for rank, several in enumerate(addresses):
        if not several:
            raise GearbxError(f"{file}: rank {rank} has no address; {HOSTFILE_LAYOUT}")
    flat = [address for several in addresses for address in several]
    twice = next((address for place, address in enumerate(flat) if address in flat[:place]), None)
    if twice is not None:
        raise GearbxError(f"{file}: duplicate address, got {host_port(twice)}; use a different port for each rank")
    return addresses


def parsed(variable: str, file: Path, layout: str) -> list:
    """Return the list in a variable's JSON file, empty for an empty file. Raises GearbxError for any other file."""
    try:
        text = file.read_text(encoding="utf-8").strip()
        content = json.loads(text) if text else []
    except OSError as error:
        raise GearbxError(f"{file}: cannot be read ({error.strerror}); set {variable} to a readable file") from error
    except (ValueError, RecursionError) as error:
        raise GearbxError(f"{file}: not JSON; {layout}") from error
    if not isinstance(content, list):
        raise GearbxError(f"{file}: no list; {layout}")
    return content


def parsed_address(file: Path, text: object) -> Address:
    """Return host and port. Raises GearbxError for other text."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise GearbxError(f"{file}: not an address, got {json.dumps(text)[:60]}; {HOSTFILE_LAYOUT}")
    return host, int(port)


@dataclass(frozen=True)
class Run:
    """A connected run."""

    place: Place
    group: Any  # all ranks


_run: Run | None = None


def begin(place: Place) -> None:
    """Connect MLX's group. All ranks must connect at once: MLX waits only a few seconds for the others.

    Raises:
        GearbxError: MLX cannot connect.
    """
    import mlx.core as mx  # slow, and unnecessary for a single process

    global _run
    try:
        _run = Run(place, mx.distributed.init(strict=True, backend=place.backend))
    except (RuntimeError, ValueError) as error:
        raise GearbxError(f"MLX cannot connect the ranks ({place.backend}): {one_line(error)}") from error


def current() -> Run | None:
    """Return this process's run; None for a single process."""
    return _run
