"""What the proxy counts, as Prometheus reads it: who answered and why, what failed, how long the client waited."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import GearbxError

try:
    import prometheus_client as prometheus
except ImportError:
    prometheus = None  # type: ignore[assignment]


class ProxyMetrics:
    """Counters of one proxy. Without `prometheus_client` they count nothing."""

    def __init__(self) -> None:
        if prometheus is None:
            return
        self.registry = registry = prometheus.CollectorRegistry()
        self._answers = prometheus.Counter(
            "gearbx_proxy_answers", "Answers, by server and reason.", ["server", "why"], registry=registry
        )
        self._failures = prometheus.Counter(
            "gearbx_proxy_failures", "Failures of a server.", ["server"], registry=registry
        )
        self._handed_over = prometheus.Counter(
            "gearbx_proxy_handed_over_tokens",
            "Tokens of the small server that the large one went on with.",
            registry=registry,
        )
        self._left = prometheus.Counter("gearbx_proxy_clients_left", "Clients that left too early.", registry=registry)
        self._first = prometheus.Histogram(
            "gearbx_proxy_first_bytes_seconds", "From a request to the first bytes of its answer.", registry=registry
        )
        self._requests = prometheus.Gauge("gearbx_proxy_requests", "Requests at this moment.", registry=registry)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is answered."""
        if prometheus is None:
            yield
            return
        with self._requests.track_inprogress():
            yield

    def answered(self, server: str, why: str, handed_over: int, seconds: float) -> None:
        """The first bytes of an answer went out, so many seconds after the request."""
        if prometheus is not None:
            self._answers.labels(server, why).inc()
            self._handed_over.inc(handed_over)
            self._first.observe(seconds)

    def failed(self, server: str) -> None:
        if prometheus is not None:
            self._failures.labels(server).inc()

    def left(self) -> None:
        if prometheus is not None:
            self._left.inc()

    def text(self) -> bytes:
        """In Prometheus's text format. Raises GearbxError without `prometheus_client`."""
        if prometheus is None:
            raise GearbxError("there are no metrics without prometheus_client; pip install prometheus_client")
        return prometheus.generate_latest(self.registry)
