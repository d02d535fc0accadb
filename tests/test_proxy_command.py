"""gearbx_mlx server with two URLs: its flags, its process, and one of our own servers behind it."""

import os
import signal
import subprocess
import sys

import httpx
import pytest
from fake_server import chatting, events, fake_server
from http_server import served
from proxies import CHAT, EASY, chunks, proxy, written

from gearbx_mlx.cli.settings import command_settings
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import guard_of

TWO = ("--small-server", "http://127.0.0.1:1", "--large-server", "http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (TWO[:2], "--small-server needs another one beside it; give --large-server too"),
        (TWO[2:], "--large-server needs another one beside it; give --small-server too"),
        ((*TWO, "--model", "x"), "--model is for a model that is served here"),
        ((*TWO, "--gears", "4,8"), "--gears is for a model that is served here"),
        ((*TWO, "--temp", "0.5"), "--temp is for a model that is served here"),
        ((*TWO, "--allow-models"), "--allow-models is for models that are served here"),
        ((*TWO, "--models", "."), "--models is for models that are served here; leave it out with --small-server"),
        ((*TWO, "--keep-alive", "5m"), "--keep-alive is for models that are served here"),
        ((*TWO, "--initial-gear", "large"), "--initial-gear is for models that are served here"),
        ((*TWO, "--thresholds", "1,2"), "two models have one threshold between them"),
        ((*TWO, "--thresholds", "nan"), "the threshold between two models is nan"),
        ((*TWO, "--hysteresis", "1"), "--hysteresis"),
        ((*TWO, "--vocab-size", "1"), "--vocab-size is 1"),
        ((*TWO, "--server-timeout", "nan"), "--server-timeout is nan"),
        (("--small-server", "x", *TWO[2:]), "--small-server 'x' is not an http or https URL"),
        ((*TWO, "--port", "70000"), "--port is 70000"),
        ((*TWO, "--allowed-origins", "example.org"), "'example.org' is not the origin of a page"),
        ((*TWO, "--allowed-origins", "https://example.org/page"), "is not the origin of a page"),
        (("--keep-alive", "soon"), "--keep-alive: 'soon' is not a time; give seconds, 5m or 1h"),
        (("--prompt-cache-bytes", "much"), "--prompt-cache-bytes: 'much' is not a size"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(flags, words, command):
    done = command("server", *flags)
    assert done.status == 2
    assert words in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("own", "keys", "origins"),
    [
        ({}, (), ()),
        ({}, ("GEARBX_LARGE_SERVER_KEY", "GEARBX_API_KEY"), ()),
        ({"allowed_origins": "*"}, ("GEARBX_API_KEY",), ("*",)),
        ({"allowed_origins": "https://a, https://B"}, ("GEARBX_SMALL_SERVER_KEY",), ("https://a", "https://b")),
    ],
)
def test_pages_of_other_origins_have_to_be_named(own, keys, origins, monkeypatch):
    for key in keys:
        monkeypatch.setenv(key, "sk")
    two = {"small_server": "http://127.0.0.1:1", "large_server": "http://127.0.0.1:1"}
    assert guard_of(command_settings(ServerSettings, two | own)).allowed_origins == origins


def test_the_process_says_where_it_is_and_ends_with_a_signal():
    command = [sys.executable, "-m", "gearbx_mlx.server", "--port", "0", "--thresholds", "inf"]
    last = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    with fake_server(chatting(lambda body: events(last))) as fake:
        urls = ["--small-server", fake.url, "--large-server", fake.url]
        with subprocess.Popen([*command, *urls], stderr=subprocess.PIPE, text=True, env=os.environ) as process:
            line = process.stderr.readline()
            where, said = line.split(": ", 1)
            assert said.startswith("routing between ")
            got = httpx.post(f"{where}/chat/completions", json=EASY | {"stream": True}, trust_env=False)
            assert written(got.text) == "x"
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in rest


class TestOurServer:
    """It reports its entropies, so that the bounds meet."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("threshold", "server"), [("12", "small"), ("0.001", "large")])
    def test_is_judged_by_what_it_reports(self, threshold, server):
        body = EASY | {"max_tokens": 16, "stream": True}
        with served(log_level="ERROR") as own:
            where = own.server.where
            direct = own.post(CHAT, json=body).text
            with proxy(where, where, thresholds=threshold) as client:
                got = client.post(CHAT, json=body).text
        first, last = chunks(got)[0]["gearbx"], chunks(got)[-1]["gearbx"]
        assert (first["server"], first["why"]) == (server, "entropy")
        assert first["entropy"][0] == first["entropy"][1]
        assert written(got) == written(direct)
        assert sum(last["gear_tokens"].values()) == 16
