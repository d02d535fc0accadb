"""HTTP server of a model in gears, of a pair of models, or of models behind another server."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import anyio

from ..cli import terminal
from ..cli.flags import OtherServerSettings
from ..errors import GearbxError
from . import ServerSettings
from .logprobs import ASSUMED_VOCABULARY, RemoteError
from .others import RemoteServer, RoutedModels, routed_application
from .web import EscapingFormatter, Guard, Server, host_name, is_loopback

LIST_TIMEOUT = 5.0  # seconds to wait for another server's list of models


def run(settings: ServerSettings) -> int:
    """Serve until a signal arrives."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter())
    logging.basicConfig(level=settings.listen.log_level, handlers=[handler])
    for name in ("httpx", "httpcore"):  # they log requests and headers, including keys
        logging.getLogger(name).setLevel(logging.WARNING)
    with serving(settings) as server:
        announce_server(settings, server)
        try:
            server.wait()
        except KeyboardInterrupt:
            terminal.note("stopping")
    return terminal.INTERRUPTED


def serving(settings: ServerSettings) -> AbstractContextManager[Server]:
    """Return a server that answers until its context ends.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded, an invalid server.
    """
    guard = guard_of(settings)
    if settings.others.server is not None:
        return serving_others(settings.others, guard, (settings.listen.host, settings.listen.port))
    from . import model  # imports mlx-lm, which the proxy does not need

    return model.serving_model(settings, guard)


@contextmanager
def serving_others(settings: OtherServerSettings, guard: Guard, address: tuple[str, int]) -> Iterator[Server]:
    """Yield a proxy of another server's models; it answers until the context ends. Raises GearbxError."""
    remote = RemoteServer(settings.server or "", settings.key, settings.server_timeout)
    routed = RoutedModels(remote, settings.models, settings.vocab_size or reported_vocabulary(settings))
    with Server(*address, guard.request_timeout) as server:
        server.description = f"{', '.join(routed.models)} of {remote.shown}"
        server.start(routed_application(guard, routed))
        yield server


def reported_vocabulary(settings: OtherServerSettings) -> int:
    """Return V as the other server lists it for its first model; a large one if it lists none, or does not respond."""
    remote = RemoteServer(settings.server or "", settings.key, min(settings.server_timeout, LIST_TIMEOUT))
    with suppress(RemoteError):
        return anyio.run(remote.model, settings.models[0])[1] or ASSUMED_VOCABULARY
    return ASSUMED_VOCABULARY


def guard_of(settings: ServerSettings) -> Guard:
    """Return the access rules. Raises GearbxError for rules that let any page use keys or load models."""
    listen, others = settings.listen, settings.others
    origins = comma_separated(listen.allowed_origins.lower())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+|null", origin):
            raise GearbxError(f"--allowed-origins: not an origin, got {origin!a}; use one such as https://example.org")
    lends_key = others.server is not None and others.key
    if "*" in origins and (lends_key or listen.allow_models):
        risk = "have any model loaded (--allow-models)" if listen.allow_models else "use the server's key"
        raise GearbxError(f"--allowed-origins: any page could {risk}, got *; use a list of trusted origins")
    hosts = tuple(host_name(host) for host in comma_separated(listen.allowed_hosts))
    if "" in hosts:
        raise GearbxError(
            f"--allowed-hosts: not host names, got {listen.allowed_hosts!a}; use some such as example.org"
        )
    key = listen.api_key or os.environ.get("GEARBX_API_KEY") or None
    return Guard(key, origins, listen.max_body_bytes, listen.request_timeout, listen.host, hosts)


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the nonempty items between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def announce_server(settings: ServerSettings, server: Server) -> None:
    """Print the server's address, its models, and its exposure to other machines."""
    terminal.note(f"{server.url}/v1: {server.description}; the page is at {server.url}/")
    if not is_loopback(settings.listen.host):
        access = "with the key" if guard_of(settings).api_key else "without a key (--api-key sets one)"
        terminal.note(f"other machines can reach it, {access}")
