"""How the server ends: at once, in order, after all its computing threads."""

import signal
import threading
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from servers import our_process

from gearbx_mlx.serving.scheduler import join_to_the_end

pytestmark = pytest.mark.processes

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.exists(), reason="this system does not list threads as files")
def test_a_thread_that_computed_is_gone_when_it_is_joined():
    """Python's own join returns while MLX still frees the thread's arrays: most of these runs would show that."""

    def compute():
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2)(mx.arange(4)))

    for _ in range(100):
        thread = threading.Thread(target=compute)
        thread.start()
        native = thread.native_id
        join_to_the_end(thread)
        assert not (TASKS / str(native)).exists()


@pytest.mark.parametrize("mode", ["static", "route"])
def test_a_signal_ends_a_server_that_is_answering(mode):
    with our_process("--gears", 16, "--kernels", "mlx", "--mode", mode, "--log-level", "WARNING") as server:
        body = {"prompt": "Tom has 3 apples. He", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = "".join(lines)
        assert server.process.wait(20) == 128 + signal.SIGTERM
        assert "the server is stopping" in rest
        assert server.log().splitlines()[1:] == ["stopping"]
