"""Many clients at once: every text is the same as alone, nothing waits, and nothing stays."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import active_memory
from http_server import WORD_PROBLEM, complete, served, text_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def client():
    with served(gears="4,8,16", log_level="ERROR", prompt_cache_size=16) as client:
        yield client


def alone(client, prompt, **body):
    """The text from a server without earlier requests."""
    client.scheduler.prompt_cache.trim_to(n_sequences=0)
    return text_of(client, prompt, **body)


@pytest.mark.parametrize("mode", ["route", "kickdown"])
@pytest.mark.parametrize("end", ["!", " me", " There are 36 roses and 44 tulips."])
def test_a_text_does_not_depend_on_what_was_asked_before(client, mode, end):
    """Not even if it continues an answer of several gears. All requests have one prompt gear here."""
    begin, body = "Of the king and his daughter", {"gearbx": {"mode": mode}}
    text = alone(client, begin + end, **body)
    alone(client, begin + ", who said to the old man: how many apples are 5 + 7 * 12?", **body)
    assert text_of(client, begin + end, **body) == text
    following = begin + end + text + " And"
    assert text_of(client, following, **body) == alone(client, following, **body)


@pytest.mark.parametrize("mode", ["route", "kickdown"])
def test_the_kv_cache_of_a_prompt_is_used_by_the_next_one(client, mode):
    body = {"gearbx": {"mode": mode}, "max_tokens": 4}
    first = complete(client, WORD_PROBLEM + f" In mode {mode},", **body)
    second = complete(client, WORD_PROBLEM + f" In mode {mode}, how many are left?", **body)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - 1 <= cached <= first["usage"]["prompt_tokens"]


def test_a_kept_kv_cache_does_not_hold_the_whole_batch(client):
    prompts = [f"{number}. {WORD_PROBLEM * 6}" for number in range(8)]
    before, had = active_memory(), client.scheduler.prompt_cache.nbytes
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: complete(client, prompt, max_tokens=8, gearbx={"gear": "high"}), prompts))
    kept = client.scheduler.prompt_cache.nbytes - had
    assert kept > 0
    assert active_memory() - before < 1.5 * kept
