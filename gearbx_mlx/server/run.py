"""Serve over HTTP: a model in gears, two models, or models of another server."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..cli import terminal
from ..cli.flags import OtherServerSettings
from ..errors import GearbxError
from . import ServerSettings
from .logprobs import ASSUMED_VOCABULARY
from .others import Other, RoutedModels, routed_application
from .web import Escaping, Guard, Server, host_name, is_loopback


def run(settings: ServerSettings) -> int:
    """Serve until a signal ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(Escaping())
    logging.basicConfig(level=settings.listen.log_level, handlers=[handler])
    for name in ("httpx", "httpcore"):  # which note requests to servers, and headers of answers, keys among them
        logging.getLogger(name).setLevel(logging.WARNING)
    with serving(settings) as server:
        announce_server(settings, server)
        try:
            server.wait()
        except KeyboardInterrupt:
            terminal.note("stopping")
    return terminal.INTERRUPTED


def serving(settings: ServerSettings) -> AbstractContextManager[Server]:
    """Return a server that answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded, a server that cannot be asked.
    """
    guard = guard_of(settings)
    if settings.others.server is not None:
        return serving_others(settings.others, guard, (settings.listen.host, settings.listen.port))
    from . import model  # needs mlx-lm, for which models of another server need not wait

    return model.serving_model(settings, guard)


@contextmanager
def serving_others(settings: OtherServerSettings, guard: Guard, address: tuple[str, int]) -> Iterator[Server]:
    """Pass requests on to one of several models of another server while the context lasts. Raises as `serving`."""
    other = Other(settings.server or "", settings.key, settings.server_timeout)
    routed = RoutedModels(other, settings.models, settings.vocab_size or ASSUMED_VOCABULARY)
    with Server(*address, guard.patience) as server:
        server.serves = f"{', '.join(routed.models)} of {other.shown}"
        server.start(routed_application(guard, routed))
        yield server


def guard_of(settings: ServerSettings) -> Guard:
    """Return who may come in. Raises GearbxError where any page could spend keys, or have models loaded."""
    listen, others = settings.listen, settings.others
    origins = listed_parts(listen.allowed_origins.lower())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+|null", origin):
            raise GearbxError(
                f"--allowed-origins: {origin!a} is not the origin of a page; give one such as https://example.org"
            )
    lends_key = others.server is not None and others.key
    if "*" in origins and (lends_key or listen.allow_models):
        what = "have any model loaded (--allow-models)" if listen.allow_models else "spend the key of the server"
        raise GearbxError(f"--allowed-origins *: every page that is opened could {what}; name the origins that may ask")
    hosts = tuple(host_name(host) for host in listed_parts(listen.allowed_hosts))
    if "" in hosts:
        raise GearbxError(
            f"--allowed-hosts {listen.allowed_hosts!a} has what is not the name of a host; give example.org, say"
        )
    key = listen.api_key or os.environ.get("GEARBX_API_KEY") or None
    return Guard(key, origins, listen.max_body_bytes, listen.request_timeout, listen.host, hosts)


def listed_parts(listed: str) -> tuple[str, ...]:
    """Return what stands between commas."""
    return tuple(part.strip() for part in listed.split(",") if part.strip())


def announce_server(settings: ServerSettings, server: Server) -> None:
    """Print where the server listens, what it serves, and who can reach it."""
    terminal.note(f"{server.where}/v1: {server.serves}; the page is at {server.where}/")
    if not is_loopback(settings.listen.host):
        who = "with the key" if guard_of(settings).api_key else "and no key is asked for (--api-key)"
        terminal.note(f"other machines can reach it, {who}")
