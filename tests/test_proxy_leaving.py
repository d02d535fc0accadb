"""A proxy whose client leaves: the request to the server ends at once."""

import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time

import httpx
import pytest
from fake_server import Answer, fake_server
from proxies import CHAT, EASY, LINGERING, STREAM, good, proxy, word, written


@pytest.fixture(scope="module")
def well():
    with fake_server(good("W")) as fake:
        yield fake


def wait_until_counted(client):
    """Raises AssertionError unless the proxy notices within seconds that a client has left."""
    deadline = time.monotonic() + 5
    while "gearbx_proxy_clients_left_total 1.0" not in (text := client.get("/metrics").text):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


class TestTheClientLeaves:
    """The request to the server ends at once: the server's next writes fail."""

    @staticmethod
    def leave_after(client, body, first_bytes):
        address = client.base_url.host, client.base_url.port
        with socket.create_connection(address) as connection:
            request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            connection.sendall(request % (len(body), body))
            if first_bytes:
                assert connection.recv(1)
            else:
                time.sleep(0.3)

    def test_in_the_midst_of_a_stream(self, well):
        stopped = threading.Event()

        def parts():
            try:
                for _ in itertools.count():
                    yield word(b"a")
                    time.sleep(0.02)
            finally:
                stopped.set()

        with (
            fake_server(lambda path, body: Answer(parts(), kind=STREAM)) as small,
            proxy(small.url, well.url, thresholds="inf") as client,
        ):
            self.leave_after(client, b'{"stream": true, "messages": []}', True)
            assert stopped.wait(5)

    @pytest.mark.parametrize("threshold", ["inf", "1"])
    def test_while_the_server_has_not_answered(self, threshold, well):
        """A whole answer sends not even its headers before all of it is written."""
        seen: list[bytes] = []
        left = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))

        def wait_for_end():
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LINGERING)
                while part := connection.recv(65536):
                    seen.append(part)
            left.set()

        thread = threading.Thread(target=wait_for_end, daemon=True)
        thread.start()
        with (
            listener,
            proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", well.url, thresholds=threshold) as client,
        ):
            self.leave_after(client, b'{"messages": []}', False)
            assert left.wait(5)
            assert b"/v1/chat/completions" in b"".join(seen)
            wait_until_counted(client)
            assert "gearbx_proxy_requests 0.0" in client.get("/metrics").text


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A certificate for loopback and its key; httpx trusts it."""
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-out", paths[0], "-keyout", paths[1], "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=paths[0])
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **_: trusting)
    return paths


def test_over_tls_the_client_is_watched_too(certificate, well):
    """TLS has records of its own, which make a socket readable before there is an answer."""
    goes_on = threading.Event()

    def answers(path, body):
        if body and body.get("user") == "waits":
            goes_on.wait(LINGERING)
        return good("T")(path, body)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with fake_server(answers) as safe:
        safe.server.socket = context.wrap_socket(safe.server.socket, server_side=True)
        with proxy(safe.url.replace("http:", "https:"), well.url, thresholds="inf") as client:
            assert written(client.post(CHAT, json=EASY | {"stream": True}).text) == "T0 T1 T2 "
            TestTheClientLeaves.leave_after(client, b'{"user": "waits"}', False)
            wait_until_counted(client)
            goes_on.set()
