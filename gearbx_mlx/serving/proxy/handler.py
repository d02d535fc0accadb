"""The proxy's side towards clients: its paths, and answers of servers on their way out."""

import logging
import time
from contextlib import closing
from typing import Any

from ...routing.pair import NAMES
from ..guarded import GONE, Refused, escaped, not_found
from ..page import Paged
from .between import Between
from .failed import Declined, Failed
from .handed_over import CHAT, TEXT
from .hang_up import on_behalf_of
from .metrics import ProxyMetrics
from .route import Route
from .upstream import Upstream

PATHS = {"/v1/chat/completions": CHAT, "/chat/completions": CHAT, "/v1/completions": TEXT}
METRICS = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("gearbx_mlx.server")


class Proxy(Paged):
    """Answers requests with one of two servers. A subclass has `guard`, `between` and `metrics`."""

    between: Between
    metrics: ProxyMetrics

    def get(self, path: str) -> None:
        if path == "/health":
            self.send_health()
        elif path == "/v1/models":
            self.send_models()
        elif path == "/":
            self.send_page()
        elif path == "/metrics":
            self.send_bytes(self.metrics.text(), METRICS)
        else:
            raise not_found(path)

    def post(self, path: str, body: dict[str, Any]) -> None:
        if path not in PATHS:
            raise not_found(path)
        if not isinstance(body.get("stream"), bool | None):
            raise Refused(400, "stream is neither true nor false", param="stream")
        route, started = Route(self.between, PATHS[path], body), time.perf_counter()
        try:
            with self.metrics.request(), on_behalf_of(self.connection), closing(route.answer()) as parts:
                for part in parts:
                    if started and route.begun:  # before it is sent: whoever has read it finds it counted
                        self.report(route, time.perf_counter() - started)
                        started = 0.0
                    self.send_part(part)
        except Declined as error:
            self.send_declined(error)
        except Failed as error:
            self.count_failures(route)
            self.send_failure(error)
        except GONE:
            self.metrics.left()
            raise

    def send_part(self, part: bytes | dict[str, Any]) -> None:
        """An event of a stream, at once, or a whole answer."""
        if isinstance(part, dict):
            self.send_object(part)
            return
        if not self.answered:
            self.start_events()
        self.wfile.write(part)

    def report(self, route: Route, seconds: float) -> None:
        """Log and count who answers, and why."""
        decision = route.decision
        assert decision is not None
        server = NAMES[decision.server]
        self.metrics.answered(server, decision.why, route.handed_over, seconds)
        self.count_failures(route)
        reason = f" ({escaped(decision.reason)})" if decision.reason else ""
        log.info("the %s server answers: %s%s; %d tokens handed over", server, decision.why, reason, route.handed_over)

    def count_failures(self, route: Route) -> None:
        """Count the servers that failed since the last call."""
        while route.uncounted:
            self.metrics.failed(NAMES[route.uncounted.pop()])

    def send_declined(self, error: Declined) -> None:
        """What a server says of a request that it refuses, as it is."""
        headers = {"Content-Type": error.kind, "Content-Length": str(len(error.body))}
        if error.retry_after:
            headers["Retry-After"] = error.retry_after
        self.start(error.status, headers)
        self.end_headers()
        self.wfile.write(error.body)

    def send_failure(self, error: Failed) -> None:
        """An error of 502; in a stream that has begun an event with it, and no end of the stream."""
        log.warning("%s", escaped(str(error)))
        refused = Refused(502, str(error), "server_error", code="bad_gateway")
        if not self.answered:
            raise refused
        self.send_event(refused.body())

    def send_health(self) -> None:
        """Well while a request can be answered: with `fallback` one server is enough."""
        reasons = {server.name: server.why_not_well() for server in self.between.servers}
        down = sum(reason is not None for reason in reasons.values())
        well = down == 0 or (down == 1 and self.between.fallback)
        status = "ok" if down == 0 else "degraded" if well else "unavailable"
        servers = {
            name: {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
            for name, reason in reasons.items()
        }
        self.send_object({"status": status, "servers": servers}, 200 if well else 503)

    def send_models(self) -> None:
        rows = [row for server in self.between.servers for row in models_of(server)]
        self.send_object({"object": "list", "data": rows})


def models_of(server: Upstream) -> list[dict[str, Any]]:
    """The models that requests reach on a server: the one that it is asked for, or those that it lists."""
    mark = {"object": "model", "gearbx": {"server": server.name}}
    if server.place.model is not None:
        return [{"id": server.place.model, "created": 0, "owned_by": "gearbx-mlx", **mark}]
    try:
        return [row | mark for row in server.models()]
    except Failed as error:
        log.warning("%s", escaped(str(error)))
        return []
