"""Route requests between two servers."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..cli.flags import turns_of
from ..cli.gate import GateSettings, RoutingSettings
from ..errors import GearbxError
from ..routing.pair import LARGE, NAMES, SMALL
from ..serving.listening import Server
from ..serving.proxy.app import proxy_application
from ..serving.proxy.judging import Rule
from ..serving.proxy.route import Between
from ..serving.proxy.upstream import ServerPlace, Upstream, checked_url
from ..serving.web import Guard
from . import ProxySettings


@contextmanager
def serving(
    settings: ProxySettings, routing: RoutingSettings, gate: GateSettings, guard: Guard, address: tuple[str, int]
) -> Iterator[Server]:
    """A proxy that answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a URL or a key that is none, flags that no pair can have.
    """
    rule = rule_of(settings, routing, gate)
    small, large = (Upstream(place_of(settings, server)) for server in (SMALL, LARGE))
    between = Between(small, large, rule, not settings.no_fallback)
    with Server(*address, guard.patience) as server:
        server.serves = f"routing between {small.place.base} and {large.place.base}"
        try:
            server.start(proxy_application(guard, between))
            yield server
        finally:
            server.stop()


def rule_of(settings: ProxySettings, routing: RoutingSettings, gate: GateSettings) -> Rule:
    """When the large server answers. Raises GearbxError for flags that no pair can have."""
    if routing.initial_gear != RoutingSettings().initial_gear:
        raise GearbxError("--initial-gear is of models that are served here; leave it out with --small-server")
    turns = turns_of(routing.thresholds, gate)
    return Rule(turns.threshold(settings.vocab_size), turns.window, turns.min_duration, settings.vocab_size)


def place_of(settings: ProxySettings, server: int) -> ServerPlace:
    """Where a server is, and how to ask it. Raises GearbxError for a URL that is none."""
    flag = f"{NAMES[server]}_server"
    url = getattr(settings, flag)
    return ServerPlace(
        NAMES[server],
        checked_url(url, f"--{NAMES[server]}-server"),
        getattr(settings, f"{flag}_model"),
        settings.key(server),
        settings.connect_timeout,
        settings.server_timeout,
    )
