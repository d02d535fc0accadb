"""A server in a process of its own, on a free port of loopback."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from ....errors import GearbxError

PATIENCE = 300.0  # seconds until a server listens: it loads a model before
GRACE = 20.0  # seconds until it has ended
LOOK = 0.05  # seconds

OURS = ("gearbx_mlx.server",)
MLX_LM = ("mlx_lm", "server")


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens. url: http://127.0.0.1:PORT."""

    url: str
    pid: int


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def started(program: tuple[str, ...], *flags: object) -> Iterator[ServerProcess]:
    """A server while its process runs. Raises GearbxError for one that ends or does not listen."""
    port = free_port()
    command = [sys.executable, "-m", *program, "--host", "127.0.0.1", "--port", str(port), *map(str, flags)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=log, stderr=log)
        server = ServerProcess(f"http://127.0.0.1:{port}", process.pid)
        until = time.monotonic() + PATIENCE
        try:
            while not listens(server):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = " ".join(log.read().decode(errors="replace").split())[-500:] or "it said nothing"
                    raise GearbxError(f"{' '.join(program)} does not serve: {said}")
                time.sleep(LOOK)
            yield server
        finally:
            end(process)


def listens(server: ServerProcess) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/health", trust_env=False, timeout=5).is_success
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, by force where it does not end by itself."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
