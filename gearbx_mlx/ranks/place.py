"""Which rank of a run this process is, as the environment says: MLX's launcher and MPI's set variables.

There is one run per process, as MLX's group of all ranks is.
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
HOSTFILE_LAYOUT = 'MLX\'s ring takes [["HOST:PORT"], ["HOST:PORT"]], a list of addresses for each rank'

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """This process's rank among `size`. addresses: of each rank, host and port; empty unless MLX's ring is used."""

    rank: int
    size: int
    backend: str
    addresses: tuple[tuple[Address, ...], ...] = ()

    def name_of(self, rank: int) -> str:
        """Return a rank for a message, with its first address."""
        return f"rank {rank} ({host_port(self.addresses[rank][0])})" if self.addresses else f"rank {rank}"


def host_port(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, or None where it runs alone.

    Raises:
        GearbxError: variables that contradict each other, or what is not a hostfile.
    """
    if RANK in environment and environment.get(HOSTFILE):
        addresses = read_hostfile(Path(environment[HOSTFILE]))
        if len(addresses) < 2:
            return None  # mlx.launch -n 1
        rank = rank_number(environment, RANK)
        if rank >= len(addresses):
            raise GearbxError(
                f"{environment[HOSTFILE]}: names {len(addresses)} ranks, and this process is rank {rank} ({RANK}); "
                "start as many processes as the hostfile has ranks, numbered from 0"
            )
        return Place(rank, len(addresses), "ring", addresses)
    if RANK in environment and environment.get(JACCL_DEVICES):
        devices = parsed(Path(environment[JACCL_DEVICES]), "a list of devices for each rank")
        return Place(rank_number(environment, RANK), len(devices), "jaccl")
    for rank_name, size_name in MPI:
        if size_name in environment and rank_number(environment, size_name) > 1:
            return Place(rank_number(environment, rank_name), rank_number(environment, size_name), "mpi")
    return None


def rank_number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises GearbxError for anything else."""
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise GearbxError(f"{name} is {text!r}; it is the number of a rank, from 0, and mlx.launch sets it")
    return int(text)


def read_hostfile(file: Path) -> tuple[tuple[Address, ...], ...]:
    """Return the addresses of each rank. An empty file, which `mlx.launch -n 1` writes, names none.

    Raises:
        GearbxError: no such file, no JSON, or something else than addresses in it.
    """
    content = parsed(file, HOSTFILE_LAYOUT)
    ranks = [entry if isinstance(entry, list) else [None] for entry in content]
    addresses = tuple(tuple(parsed_address(file, text) for text in entry) for entry in ranks)
    for rank, several in enumerate(addresses):
        if not several:
            raise GearbxError(f"{file}: rank {rank} has no address; {HOSTFILE_LAYOUT}")
    flat = [address for several in addresses for address in several]
    twice = next((address for place, address in enumerate(flat) if address in flat[:place]), None)
    if twice is not None:
        raise GearbxError(f"{file}: {host_port(twice)} is there twice; give each rank a port of its own")
    return addresses


def parsed(file: Path, layout: str) -> list:
    """Return the list that a file of JSON has; an empty one for an empty file. Raises GearbxError for another file."""
    try:
        text = file.read_text(encoding="utf-8").strip()
        content = json.loads(text) if text else []
    except OSError as error:
        raise GearbxError(f"{file}: cannot be read ({error.strerror}); name a hostfile in {HOSTFILE}") from error
    except (ValueError, RecursionError) as error:
        raise GearbxError(f"{file}: not JSON; {layout}") from error
    if not isinstance(content, list):
        raise GearbxError(f"{file}: no list; {layout}")
    return content


def parsed_address(file: Path, text: object) -> Address:
    """Host and port. Raises GearbxError for anything else."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise GearbxError(f"{file}: {json.dumps(text)[:60]} is not an address; {HOSTFILE_LAYOUT}")
    return host, int(port)


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
    """Return the run that this process is a rank of; None: it computes alone."""
    return _run
