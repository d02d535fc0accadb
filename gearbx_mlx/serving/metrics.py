"""What a server counts, for Prometheus: requests, tokens, gears, drafts, times. No label has text of a client in it."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..telemetry.summary import Tally
from ..telemetry.trace import Token

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WINDOW = 10  # seconds over which tokens per second are counted
EXPOSED = CONTENT_TYPE_LATEST

Gauges = Mapping[str, tuple[str, Callable[[], float]]]
"""By name: what it says, and a function that reads it."""


class Speed:
    """Tokens per second over the last whole seconds.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._counts: deque[list[int]] = deque(maxlen=WINDOW + 1)  # (second, tokens)

    def count(self) -> None:
        now = int(self._clock())
        if not self._counts or self._counts[-1][0] != now:
            self._counts.append([now, 0])
        self._counts[-1][1] += 1

    def read(self) -> float:
        now = int(self._clock())
        return sum(count for second, count in list(self._counts) if now - WINDOW <= second < now) / WINDOW


class Metrics:
    """Counts what a server does. Each object counts for itself.

    Args:
        gauges: what is read when Prometheus asks, such as how many requests are waiting.
        clock: seconds that never go back.
    """

    def __init__(self, gauges: Gauges | None = None, clock: Callable[[], float] = time.monotonic):
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "gearbx", "registry": self.registry}
        for name, (said, read) in (gauges or {}).items():
            Gauge(name, said, **own).set_function(read)
        self.requests = Counter("requests", "Requests that were answered", ["route", "status"], **own)
        self.prompts = Counter("prompts", "Prompts", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were read", **own)
        self.cached_tokens = Counter("prompt_cached_tokens", "Tokens of prompts that were in a KV cache", **own)
        self.cache_hits = Counter("prompt_cache_hits", "Prompts whose beginning was in a KV cache", **own)
        self.tokens = Counter("generated_tokens", "Tokens of answers, by gear", ["gear"], **own)
        self.gear_share = Gauge("gear_share", "Share of a gear in the tokens of answers", ["gear"], **own)
        self.shifts = Counter("shifts", "Tokens in another gear than the one before", **own)
        self.weight_bytes = Counter("weight_bytes_read", "Bytes of weights read", **own)
        self.drafted = Counter("drafted_tokens", "Tokens proposed for verification", ["source"], **own)
        self.accepted = Counter("accepted_tokens", "Proposed tokens that were accepted", ["source"], **own)
        acceptance = Gauge("acceptance_rate", "Share of proposed tokens that was accepted", ["source"], **own)
        self.first = Histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token", buckets=FIRST_TOKEN, **own
        )
        self.others = Histogram(
            "time_per_token_seconds", "Seconds between two tokens of an answer", buckets=PER_TOKEN, **own
        )
        self.speed = Speed(clock)
        said = f"Tokens of answers per second, over the last {WINDOW} seconds"
        Gauge("tokens_per_second", said, **own).set_function(self.speed.read)
        self.tally = tally = Tally(defaultdict(int), {})
        acceptance.labels("draft").set_function(lambda: share(tally.accepted, tally.drafted))
        acceptance.labels("lookup").set_function(lambda: share(tally.from_lookup, tally.looked_up))

    def answered(self, route: str, status: int) -> None:
        """Count an answered request.

        Args:
            route: a path that the server has; what a client made up is counted under one name.
            status: of HTTP.
        """
        self.requests.labels(route, str(status)).inc()

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, of which some tokens were in a KV cache."""
        self.prompts.inc()
        self.prompt_tokens.inc(tokens - cached)
        self.cached_tokens.inc(cached)
        self.cache_hits.inc(cached > 0)

    def token(self, response: Token, seconds: float, first: bool = False) -> None:
        """Count a token of an answer.

        Args:
            response: the token's GearResponse.
            seconds: since the token before; since the request, for the first one.
        """
        self.tally.add(response)
        self.tokens.labels(response.gear).inc()
        for gear, count in self.tally.gear_tokens.items():
            self.gear_share.labels(gear).set(self.tally.mean(count))
        self.shifts.inc(response.shifted)
        self.weight_bytes.inc(response.weight_bytes)
        self.drafted.labels("draft").inc(response.drafted)
        self.accepted.labels("draft").inc(response.from_draft)
        self.drafted.labels("lookup").inc(response.looked_up)
        self.accepted.labels("lookup").inc(response.source == "lookup")
        self.speed.count()
        (self.first if first else self.others).observe(seconds)

    def text(self) -> bytes:
        """Everything that was counted, in Prometheus's text format."""
        return generate_latest(self.registry)


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
