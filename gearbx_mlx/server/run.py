"""Serve over HTTP: a model in gears, two models, or a proxy between two servers."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..cli import terminal
from ..cli.flags import turns_of
from ..cli.gears import RoutingSettings
from ..errors import GearbxError
from ..routing.pair import LARGE, NAMES, SMALL
from ..serving import is_loopback
from ..serving.listening import Escaping, Server
from ..serving.proxy.app import proxy_application
from ..serving.proxy.route import Between, Rule
from ..serving.proxy.upstream import Upstream, checked_url
from ..serving.web import Guard, host_name
from . import ProxySettings, ServerSettings

API_KEY = "GEARBX_API_KEY"


def run(settings: ServerSettings) -> int:
    """Serve until a signal ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(Escaping())
    logging.basicConfig(level=settings.listen.log_level, handlers=[handler])
    for name in ("httpx", "httpcore"):  # which note requests to servers, and headers of answers, keys among them
        logging.getLogger(name).setLevel(logging.WARNING)
    with serving(settings) as server:
        announce(settings, server)
        try:
            server.wait()
        except KeyboardInterrupt:
            terminal.note("stopping")
    return terminal.INTERRUPTED


def serving(settings: ServerSettings) -> AbstractContextManager[Server]:
    """A server that answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded, a server that cannot be asked.
    """
    guard = guard_of(settings)
    if settings.proxy.wanted:
        address = settings.listen.host, settings.listen.port
        return serving_proxy(settings.proxy, settings.mode, guard, address)
    from . import model  # needs mlx-lm, for which a proxy need not wait

    return model.serving(settings, guard)


@contextmanager
def serving_proxy(
    settings: ProxySettings, routing: RoutingSettings, guard: Guard, address: tuple[str, int]
) -> Iterator[Server]:
    """A proxy that answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, what is not a URL or a key, flags that no pair can have.
    """
    if routing.initial_gear != RoutingSettings().initial_gear:
        raise GearbxError("--initial-gear is for models that are served here; leave it out with --small-server")
    turns, vocabulary = turns_of(routing.thresholds, routing), settings.vocab_size
    rule = Rule(turns.threshold(vocabulary), turns.window, turns.min_duration, vocabulary)
    small, large = (upstream_of(settings, server) for server in (SMALL, LARGE))
    between = Between(small, large, rule, not settings.no_fallback)
    with Server(*address, guard.patience) as server:
        server.serves = f"routing between {small.base} and {large.base}"
        server.start(proxy_application(guard, between))
        yield server


def upstream_of(settings: ProxySettings, server: int) -> Upstream:
    """A server, and how to ask it. Raises GearbxError for what is not a URL."""
    flag = f"{NAMES[server]}_server"
    url = getattr(settings, flag)
    return Upstream(
        NAMES[server],
        checked_url(url, f"--{NAMES[server]}-server"),
        getattr(settings, f"{flag}_model"),
        settings.key(server),
        settings.connect_timeout,
        settings.server_timeout,
    )


def guard_of(settings: ServerSettings) -> Guard:
    """Who may come in. Raises GearbxError where any page could spend keys, or have models loaded."""
    listen, proxy = settings.listen, settings.proxy
    origins = parts(listen.allowed_origins.lower())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+|null", origin):
            raise GearbxError(
                f"--allowed-origins: {origin!a} is not the origin of a page; give one such as https://example.org"
            )
    lends_keys = proxy.wanted and any(proxy.key(server) for server in (SMALL, LARGE))
    if "*" in origins and (lends_keys or listen.allow_models):
        what = "have any model loaded (--allow-models)" if listen.allow_models else "spend the keys of the servers"
        raise GearbxError(f"--allowed-origins *: every page that is opened could {what}; name the origins that may ask")
    hosts = tuple(host_name(host) for host in parts(listen.allowed_hosts))
    if "" in hosts:
        raise GearbxError(
            f"--allowed-hosts {listen.allowed_hosts!a} has what is not the name of a host; give example.org, say"
        )
    key = listen.api_key or os.environ.get(API_KEY) or None
    return Guard(key, origins, listen.max_body_bytes, listen.request_timeout, listen.host, hosts)


def parts(listed: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in listed.split(",") if part.strip())


def announce(settings: ServerSettings, server: Server) -> None:
    """Print where the server listens, what it serves, and who can reach it."""
    terminal.note(f"{server.where}/v1: {server.serves}; the page is at {server.where}/")
    if not is_loopback(settings.listen.host):
        who = "with the key" if guard_of(settings).api_key else "and no key is asked for (--api-key)"
        terminal.note(f"other machines can reach it, {who}")
