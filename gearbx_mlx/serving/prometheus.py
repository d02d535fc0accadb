"""Metrics in Prometheus's text format. No label has text of a client in it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from .metrics import WINDOW, Metrics


def exposed(metrics: Metrics) -> tuple[bytes, str]:
    """Everything that was counted, in the text format, and its media type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(metrics))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class Families(Collector):
    """Prometheus's families of metrics, all of one moment."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for name, (said, read) in self.metrics.gauges.items():
            yield GaugeMetricFamily(f"gearbx_{name}", said, value=read())
        with self.metrics.lock:
            of_all = of_requests, of_prompts, of_tokens, of_drafts, of_times
            families = [family for of_one in of_all for family in of_one(self.metrics)]
        yield from families


def of_requests(metrics: Metrics) -> Iterator[Metric]:
    answered = CounterMetricFamily("gearbx_requests", "Requests that were answered", labels=["route", "status"])
    for (route, status), count in sorted(metrics.requests.items()):
        answered.add_metric([route, str(status)], count)
    yield answered


def of_prompts(metrics: Metrics) -> Iterator[Metric]:
    for name, said, count in (
        ("prompts", "Prompts", metrics.prompts["prompts"]),
        ("prompt_tokens", "Tokens of prompts that were read", metrics.prompts["read"]),
        ("prompt_cached_tokens", "Tokens of prompts that were in a KV cache", metrics.prompts["cached"]),
        ("prompt_cache_hits", "Prompts whose beginning was in a KV cache", metrics.prompts["hits"]),
    ):
        yield CounterMetricFamily(f"gearbx_{name}", said, value=count)


def of_tokens(metrics: Metrics) -> Iterator[Metric]:
    tally = metrics.tally
    tokens = CounterMetricFamily("gearbx_generated_tokens", "Tokens of answers, by gear", labels=["gear"])
    shares = GaugeMetricFamily("gearbx_gear_share", "Share of a gear in the tokens of answers", labels=["gear"])
    for gear, count in sorted(tally.gear_tokens.items()):
        tokens.add_metric([gear], count)
        shares.add_metric([gear], tally.mean(count))
    yield from (tokens, shares)
    yield CounterMetricFamily("gearbx_shifts", "Tokens in another gear than the one before", value=tally.shifts)
    yield CounterMetricFamily("gearbx_weight_bytes_read", "Bytes of weights read", value=tally.weight_bytes)
    said = f"Tokens of answers per second, over the last {WINDOW} seconds"
    yield GaugeMetricFamily("gearbx_tokens_per_second", said, value=metrics.speed.read())


def of_drafts(metrics: Metrics) -> Iterator[Metric]:
    tally, by = metrics.tally, ["source"]
    proposed = CounterMetricFamily("gearbx_drafted_tokens", "Tokens proposed for verification", labels=by)
    accepted = CounterMetricFamily("gearbx_accepted_tokens", "Proposed tokens that were accepted", labels=by)
    rate = GaugeMetricFamily("gearbx_acceptance_rate", "Share of proposed tokens that was accepted", labels=by)
    for source, made, kept in (
        ("draft", tally.drafted, tally.accepted),
        ("lookup", tally.looked_up, tally.from_lookup),
    ):
        proposed.add_metric([source], made)
        accepted.add_metric([source], kept)
        rate.add_metric([source], kept / made if made else 0.0)
    yield from (proposed, accepted, rate)


def of_times(metrics: Metrics) -> Iterator[Metric]:
    for name, said, times in (
        ("time_to_first_token", "Seconds from a request to its first token", metrics.first),
        ("time_per_token", "Seconds between two tokens of an answer", metrics.others),
    ):
        yield HistogramMetricFamily(f"gearbx_{name}_seconds", said, buckets=times.buckets(), sum_value=times.sum)
