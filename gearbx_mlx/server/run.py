"""Serve over HTTP: a model in gears, two models, or a proxy between two servers."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..cli import terminal
from ..routing.pair import LARGE, SMALL
from ..serving.listening import Escaping, Server
from ..serving.web import Guard
from . import LOCAL, ServerSettings

API_KEY = "GEARBX_API_KEY"


def run(settings: ServerSettings) -> int:
    """Serve until a signal ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(Escaping())
    logging.basicConfig(level=settings.listen.log_level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # which notes every request to a server
    with serving(settings) as server:
        announce(settings, server)
        try:
            server.wait()
        except KeyboardInterrupt:
            terminal.note("stopping")
    return terminal.INTERRUPTED


@contextmanager
def serving(settings: ServerSettings) -> Iterator[Server]:
    """A server that answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded, a server that cannot be asked.
    """
    guard = guard_of(settings)
    if settings.proxy.wanted:
        from . import proxy

        address = settings.listen.host, settings.listen.port
        with proxy.serving(settings.proxy, settings.routing, settings.gate, guard, address) as server:
            yield server
    else:
        from . import model  # needs mlx-lm, for which a proxy need not wait

        with model.serving(settings, guard) as server:
            yield server


def guard_of(settings: ServerSettings) -> Guard:
    """Who may come in."""
    listen = settings.listen
    key = listen.api_key or os.environ.get(API_KEY) or None
    proxy = settings.proxy
    lends_keys = key is None and proxy.wanted and any(proxy.key(server) for server in (SMALL, LARGE))
    allowed = ("" if lends_keys else "*") if listen.allowed_origins is None else listen.allowed_origins
    origins = tuple(origin.strip() for origin in allowed.split(",") if origin.strip())
    return Guard(key, origins, listen.max_body_bytes, listen.request_timeout)


def announce(settings: ServerSettings, server: Server) -> None:
    """Print where the server listens, what it serves, and who can reach it."""
    terminal.note(f"{server.where}/v1: {server.serves}")
    if settings.listen.host not in LOCAL:
        who = "with the key" if guard_of(settings).api_key else "and no key is asked for (--api-key)"
        terminal.note(f"other machines can reach it, {who}")
