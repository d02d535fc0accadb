"""How the server ends: at once, in order, after all its computing threads, with a word for every client."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from http_server import hears_of_the_end
from servers import our_process

from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import serving
from gearbx_mlx.server.scheduler import join_to_the_end

pytestmark = pytest.mark.processes

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.exists(), reason="this system does not list threads as files")
def test_joined_compute_thread_is_gone():
    """Python's own join returns while MLX still frees the thread's arrays: most of these runs would show that."""

    def compute():
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2)(mx.arange(4)))

    for _ in range(100):
        thread = threading.Thread(target=compute)
        thread.start()
        native = thread.native_id
        join_to_the_end(thread)
        assert not (TASKS / str(native)).exists()


def test_ended_server_leaves_no_thread():
    """Neither the one that computes, which has an answer in the making, nor the one that listens."""
    before, said = threading.enumerate(), []
    with serving(command_settings(ServerSettings, {"gears": "4,16", "port": 0, "kernels": "mlx"})) as server:
        body = {"prompt": "Tom has 3 apples. He", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, trust_env=False, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            reader = threading.Thread(target=lambda: said.extend(lines))
            reader.start()
            server.stop()
            reader.join()
    assert "the server is stopping" in "".join(said)
    assert [each for each in threading.enumerate() if each not in before] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stream", [False, True])
def test_every_client_hears_of_a_signal(number, stream):
    """On a busy machine a text may be whole by then: it has many tokens."""
    with our_process("--gears", "4,16", "--kernels", "mlx", "--log-level", "WARNING") as server:
        with ThreadPoolExecutor(4) as pool:
            ended = pool.map(lambda number: hears_of_the_end(server.url, number, stream), range(4))
            time.sleep(1)
            server.process.send_signal(number)
        ended = list(ended)
        assert server.process.wait(60) == 128 + number
        assert server.log().splitlines()[-1] == "stopping"
    assert [said for _, said in ended] == [True] * 4
    assert stream or {status for status, _ in ended} == {503}


@pytest.mark.parametrize("stopped", [1.9, 3.5], ids=["until its patience has just ended", "for longer"])
def test_stopped_server_continues_with_fresh_timeouts(stopped):
    """With Ctrl-Z; the rest of a request comes meanwhile. A signal that ends the server comes while it is stopped."""
    body = b'{"prompt": "Tom has", "max_tokens": 2}'
    with our_process("--gears", "16", "--kernels", "mlx", "--request-timeout", "2") as server:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        with socket.create_connection(address, timeout=30) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
            client.sendall(head + b"%d\r\n\r\n" % len(body) + body[:9])
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTSTP)
            time.sleep(stopped)
            client.sendall(body[9:])
            server.process.send_signal(signal.SIGCONT)
            assert client.recv(65536).split()[1] == b"200"
        server.process.send_signal(signal.SIGTSTP)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(20) == 128 + signal.SIGTERM
