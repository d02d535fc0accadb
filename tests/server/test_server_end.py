"""How the server ends: at once, in order, after all its computing threads, with a word for every client."""

import signal
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


def test_suspended_server_ends_by_signal():
    """With Ctrl-Z; the signal that ends the server comes while it is suspended."""
    with our_process("--gears", "16", "--kernels", "mlx") as server:
        server.process.send_signal(signal.SIGTSTP)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(20) == 128 + signal.SIGTERM
