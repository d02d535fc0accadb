"""Ranks of one run on this machine: processes with a hostfile of free ports on loopback, as of `mlx.launch`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import free_ports

PATIENCE = 300.0  # seconds that a run may take on a machine that others use


@dataclass(frozen=True)
class Ended:
    """How a rank ended. seconds: from the start of the run."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def free_addresses(count: int) -> list[list[str]]:
    """Addresses of a hostfile: a free port of loopback for each rank, all different."""
    return [[f"127.0.0.1:{port}"] for port in free_ports(count)]


class Ranks:
    """Ranks that run at the same time: `with Ranks(2, ["-m", "gearbx_mlx.generate"]) as ranks: ranks.wait()`.

    Args:
        count: of the ranks.
        command: what Python runs on every rank.
        each: arguments that only one rank has, by its number.
        hosts: addresses of the ranks, perhaps more or fewer than `count`; free ones if not given.
        environment: variables that replace those of this process, including MLX_RANK and MLX_HOSTFILE.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        *,
        each: Mapping[int, Sequence[str]] | None = None,
        hosts: Any = None,
        environment: Mapping[str, str] | None = None,
    ):
        self._stack = ExitStack()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._hostfile = hostfile = directory / "hosts.json"
        hostfile.write_text(json.dumps(free_addresses(count) if hosts is None else hosts))
        common = os.environ | {"MLX_HOSTFILE": str(hostfile), "GEARBX_TUNE": "0"}
        further = dict(environment or {})
        self._began = time.monotonic()
        names = ((directory / f"{rank}.out", directory / f"{rank}.err") for rank in range(count))
        self._files = [[self._stack.enter_context(name.open("w")) for name in pair] for pair in names]
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command, *(each or {}).get(rank, ())],
                env=common | {"MLX_RANK": str(rank)} | further,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            for rank, (out, err) in enumerate(self._files)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._stack.close()

    def wait(self, seconds: float = PATIENCE) -> list[Ended]:
        """How every rank ended, by rank. Raises subprocess.TimeoutExpired if one does not end in time."""
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes):
            now = self.elapsed()
            if now > seconds:
                left = [rank for rank in range(len(self.processes)) if rank not in ended]
                raise subprocess.TimeoutExpired(f"ranks {left}", seconds, str([self.output(rank) for rank in left]))
            ended |= {r: now for r, p in enumerate(self.processes) if r not in ended and p.poll() is not None}
            time.sleep(0.02)
        statuses = [process.returncode for process in self.processes]
        return [Ended(statuses[rank], *self.output(rank), ended[rank]) for rank in range(len(statuses))]

    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._began

    def output(self, rank: int) -> tuple[str, str]:
        """What a rank has written so far, on stdout and stderr."""
        out, err = (Path(file.name).read_text() for file in self._files[rank])
        return out, err

    def until(self, rank: int, text: str = "", seconds: float = PATIENCE) -> None:
        """Wait until a rank has written a text on stdout or stderr; without one, anything on stdout."""
        while text not in "".join(self.output(rank)) or (not text and not self.output(rank)[0]):
            assert self.elapsed() < seconds, (text, self.output(rank))
            assert self.processes[rank].poll() is None, (text, self.output(rank))
            time.sleep(0.02)

    def until_all_begin(self, seconds: float = PATIENCE) -> None:
        """Wait until each rank has made a file named like the hostfile, followed by the rank's number."""
        names = [f"{self._hostfile}{rank}" for rank in range(len(self.processes))]
        while not all(os.path.exists(name) for name in names):
            assert self.elapsed() < seconds, [self.output(rank) for rank in range(len(names))]
            time.sleep(0.02)


def run_ranks(count: int, command: Sequence[str], **keywords: Any) -> list[Ended]:
    """Run a command on so many ranks to its end; keywords as in `Ranks`."""
    with Ranks(count, command, **keywords) as ranks:
        return ranks.wait()
