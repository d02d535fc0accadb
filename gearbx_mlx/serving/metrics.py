"""What a server counts: requests, tokens, gears, drafts, times. In plain numbers, under one lock."""

import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

from ..telemetry.summary import Tally
from ..telemetry.trace import Token

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WINDOW = 10  # seconds over which tokens per second are counted

Gauges = Mapping[str, tuple[str, Callable[[], float]]]
"""By name: what it says, and a function that reads it."""


class Histogram:
    """How many numbers fell below each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and how many numbers are not above them, as Prometheus wants it."""
        total = 0
        below: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, math.inf), self.counts):
            total += count
            below.append(("+Inf" if bound == math.inf else str(bound), total))
        return below


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
        return sum(count for second, count in self._counts if now - WINDOW <= second < now) / WINDOW


class Metrics:
    """Counts what a server does. Its methods may be called from any thread.

    Args:
        gauges: what is read when somebody asks, such as how many requests are waiting.
        clock: seconds that never go back.

    Its attributes are read under `lock`.
    """

    def __init__(self, gauges: Gauges | None = None, clock: Callable[[], float] = time.monotonic):
        self.gauges = dict(gauges or {})
        self.lock = threading.Lock()
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.tally = Tally(defaultdict(int), {})
        self.prompts = {"read": 0, "cached": 0, "prompts": 0, "hits": 0}
        self.speed = Speed(clock)
        self.first, self.others = Histogram(FIRST_TOKEN), Histogram(PER_TOKEN)

    def answered(self, route: str, status: int) -> None:
        """Count an answered request.

        Args:
            route: a path that the server has; what a client made up is counted under one name.
            status: of HTTP.
        """
        with self.lock:
            self.requests[route, status] += 1

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, of which some tokens were in a KV cache."""
        with self.lock:
            self.prompts["prompts"] += 1
            self.prompts["read"] += tokens - cached
            self.prompts["cached"] += cached
            self.prompts["hits"] += cached > 0

    def token(self, response: Token, seconds: float, first: bool = False) -> None:
        """Count a token of an answer.

        Args:
            response: the token's GearResponse.
            seconds: since the token before; since the request, for the first one.
        """
        with self.lock:
            self.tally.add(response)
            self.speed.count()
            (self.first if first else self.others).observe(seconds)
