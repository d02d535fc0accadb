from types import SimpleNamespace

import mlx.core as mx
import pytest
from conftest import Clock
from prometheus_client.parser import text_string_to_metric_families

from gearbx_mlx.decoding.response import GearResponse
from gearbx_mlx.server.app import Metrics


def response(gear="low", **fields):
    of_mlx_lm = dict.fromkeys(("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory"), 0)
    plain = {"text": "", "token": 1, "logprobs": mx.zeros(0), "from_draft": False, **of_mlx_lm}
    return GearResponse(**plain | {"gear": gear, "passes": (1, 0), "weight_bytes": 100} | fields)


def read(metrics):
    """Every sample by its name and its labels' values."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_tokens_gears_and_drafts():
    metrics = Metrics()
    for seen in (
        response("low", drafted=4, lookup_drafted=0),
        response("high", shifted=True, from_draft=True, source="draft"),
        response("low", shifted=True, lookup_drafted=2),
        response("low", source="lookup"),
    ):
        metrics.token(seen, 0.01)
    found = read(metrics)
    writers = {"low": 2, "high": 1, "lookup": 1}
    assert {writer: found["gearbx_generated_tokens_total", writer] for writer in writers} == writers
    assert {writer: 4 * found["gearbx_gear_share", writer] for writer in writers} == writers
    assert (found["gearbx_shifts_total",], found["gearbx_weight_bytes_read_total",]) == (2, 400)
    for source, made, kept in (("draft", 4, 1), ("lookup", 2, 1)):
        assert found["gearbx_drafted_tokens_total", source] == made
        assert found["gearbx_accepted_tokens_total", source] == kept
        assert found["gearbx_acceptance_rate", source] == kept / made


def test_requests_and_prompts():
    scheduler = SimpleNamespace(running=1, queued=3)
    metrics = Metrics(scheduler)
    for status in (200, 200, 400):
        metrics.answered("/v1/completions", status)
    metrics.prompt(20, 0)
    metrics.prompt(30, 25)
    found = read(metrics)
    assert found["gearbx_requests_total", "/v1/completions", "200"] == 2
    assert found["gearbx_requests_total", "/v1/completions", "400"] == 1
    names = ("prompts", "prompt_tokens", "prompt_cached_tokens", "prompt_cache_hits")
    assert [found[f"gearbx_{name}_total",] for name in names] == [2, 25, 25, 1]
    assert found["gearbx_requests_waiting",] == 3
    assert found["gearbx_requests_running",] == 1
    scheduler.queued = 1
    assert read(metrics)["gearbx_requests_waiting",] == 1


def test_times_are_histograms():
    metrics = Metrics()
    metrics.token(response(), 0.3, first=True)
    for seconds in (0.001, 0.002, 0.02, 7.0):
        metrics.token(response(), seconds)
    found = read(metrics)
    first, others = "gearbx_time_to_first_token_seconds", "gearbx_time_per_token_seconds"
    assert (found[f"{first}_count",], found[f"{first}_sum",]) == (1, 0.3)
    assert (found[f"{first}_bucket", "0.25"], found[f"{first}_bucket", "0.5"]) == (0, 1)
    buckets = [found[f"{others}_bucket", bound] for bound in ("0.001", "0.0025", "0.01", "0.025", "2.5", "+Inf")]
    assert buckets == [1, 2, 2, 3, 3, 4]
    assert found[f"{others}_sum",] == pytest.approx(7.023)


def test_tokens_per_second_cover_last_ten_seconds():
    clock = Clock()
    metrics = Metrics(clock=clock)
    for _ in range(12):
        clock.now += 1
        for _ in range(20):
            metrics.token(response(), 0.05)
    clock.now += 1
    assert read(metrics)["gearbx_tokens_per_second",] == 20
    clock.now += 5
    assert read(metrics)["gearbx_tokens_per_second",] == 10
    clock.now += 100
    assert read(metrics)["gearbx_tokens_per_second",] == 0
