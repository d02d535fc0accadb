"""Real servers in processes of their own, on free ports of loopback, for tests of their clients."""

import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from gearbx_mlx.loading import DEMO_MODEL

PATIENCE = 120  # seconds until a server listens, on a loaded machine


def free_ports(count: int) -> list[int]:
    """Different ports of loopback without a listener.

    They are drawn from below those that the system gives to connections and to listeners at port 0 (Linux: from 32768
    on; macOS: from 49152 on), so that no other test is given one of them before the caller listens.
    """
    drawn = random.SystemRandom().sample(range(10000, 32000), 20 * count)
    return list(itertools.islice(filter(is_free, drawn), count))


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of loopback without a listener."""
    return free_ports(1)[0]


@dataclass(frozen=True)
class Running:
    """A server whose process runs. url: http://127.0.0.1:PORT."""

    url: str
    process: subprocess.Popen
    output: BinaryIO

    def log(self) -> str:
        """Its output so far, of both standard streams."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


@contextlib.contextmanager
def running(command: Sequence[object], port: int, ready: str = "/v1/models") -> Iterator[Running]:
    """A server that listens on the port.

    Args:
        command: starts it.
        ready: a path that it answers once it serves.
    """
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as cache:
        # mlx_lm.server lists the models of the Hub's cache, and fails where there is none.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment)
        server = Running(f"http://127.0.0.1:{port}", process, log)
        try:
            wait_until_ready(server, ready)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def serving(command: Sequence[object], port: int, ready: str = "/v1/models") -> Iterator[str]:
    """The URL of a server while its process runs."""
    with running(command, port, ready) as server:
        yield server.url


def wait_until_ready(server: Running, path: str) -> None:
    """Raises AssertionError, with what the server wrote, if it ends or never listens."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(server.url + path, trust_env=False, timeout=5).status_code < 500:
                return
        time.sleep(0.1)
    raise AssertionError(f"no server: {server.log()[-2000:]}")


def mlx_lm_server(*flags: object, model: Path = DEMO_MODEL) -> contextlib.AbstractContextManager[str]:
    """mlx_lm.server with the demo model: `with mlx_lm_server() as url`."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--host", "127.0.0.1", "--port", port]
    return serving([*command, *flags], port, ready="/health")


def our_process(*flags: object) -> contextlib.AbstractContextManager[Running]:
    """Our server with the demo model, its process and what it writes: `with our_process("--gears", 16) as server`."""
    port = free_port()
    return running([sys.executable, "-m", "gearbx_mlx.server", "--port", port, *flags], port, ready="/health")
