"""The server's prompt gear, and the KV caches from which texts continue: those of that gear and above."""

import itertools

import pytest
from conftest import active_memory
from http_server import WORD_PROBLEM, at_once, complete, served, text_of

TALE = "A miller had three sons, a mill, a donkey and a cat. One day he"
LOSSLESS, ROUTE, KICKDOWN = ({"mode": mode} for mode in ("lossless", "route", "kickdown"))
LOW, TOP = {"gear": 4}, {"gear": 16}


@pytest.fixture(scope="module")
def kept():
    """A server with the default prompt gear."""
    with served(gears="4,8,16", log_level="ERROR") as client:
        yield client


@pytest.fixture(scope="module")
def in_eight_bits():
    """A server that reads prompts in 8 bits, on a GPU too, except in mode lossless, which is its default."""
    with served(gears="4,8,16", prompt_gear="8", log_level="ERROR") as client:
        yield client


def fresh(client, prompt: str, options: dict) -> str:
    """The text from a server without earlier requests."""
    forget(client)
    return text_of(client, prompt, gearbx=options)


def forget(client) -> None:
    client.scheduler.prompt_cache.trim_to(n_sequences=0)


def unread(client, options: dict, prompt: str = TALE, **further) -> int:
    """How many tokens of a prompt a request had to read."""
    usage = complete(client, prompt, max_tokens=4, gearbx=options, **further)["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def test_every_mode_continues_top_gear_prefix(kept):
    forget(kept)
    assert unread(kept, LOSSLESS) > 10
    assert [unread(kept, options) for options in (LOW, ROUTE, KICKDOWN, TOP, LOSSLESS)] == [1] * 5


def test_top_gear_rereads_lower_gear_tokens(in_eight_bits):
    for first, second, read_again in ((LOW, LOSSLESS, True), (ROUTE, TOP, False), (TOP, ROUTE, False)):
        forget(in_eight_bits)
        whole = unread(in_eight_bits, first)
        assert unread(in_eight_bits, second) == (whole if read_again else 1)


@pytest.mark.some(2)
@pytest.mark.parametrize("before", list(itertools.permutations([LOSSLESS, LOW, ROUTE])), ids=str)
def test_lossless_output_is_independent_of_earlier_requests(in_eight_bits, kept, before):
    expected = fresh(kept, TALE, LOSSLESS)
    forget(in_eight_bits)
    for options in before:
        complete(in_eight_bits, TALE, gearbx=options)
        assert text_of(in_eight_bits, TALE, gearbx=LOSSLESS) == expected
        forget(in_eight_bits)
        complete(in_eight_bits, TALE[:40], gearbx=LOSSLESS)  # so the beginning of the next text is in the top gear


def test_mixed_gear_prefix_is_not_top_gears(in_eight_bits):
    forget(in_eight_bits)
    begun = unread(in_eight_bits, LOSSLESS, TALE)
    longer = f"{TALE} sold the mill, the donkey and the cat."
    assert 1 < unread(in_eight_bits, LOW, longer) < begun  # reads the rest in 8 bits
    assert unread(in_eight_bits, ROUTE, longer) == 1
    assert unread(in_eight_bits, LOSSLESS, longer) > 1
    assert text_of(in_eight_bits, longer, gearbx=LOSSLESS) == fresh(in_eight_bits, longer, LOSSLESS)


def test_seeded_output_is_independent_of_earlier_requests(in_eight_bits):
    forget(in_eight_bits)
    whole = unread(in_eight_bits, LOSSLESS)
    assert unread(in_eight_bits, LOW, seed=1) == whole


@pytest.mark.processes
@pytest.mark.parametrize("mode", [ROUTE, KICKDOWN], ids=str)
@pytest.mark.parametrize("end", ["!", " me", " There are 36 roses and 44 tulips."])
def test_output_is_independent_of_earlier_requests(kept, mode, end):
    """Not even if it continues an answer of several gears. All requests have one prompt gear here."""
    begin = "Of the king and his daughter"
    text = fresh(kept, begin + end, mode)
    fresh(kept, begin + ", who said to the old man: how many apples are 5 + 7 * 12?", mode)
    assert text_of(kept, begin + end, gearbx=mode) == text
    following = begin + end + text + " And"
    assert text_of(kept, following, gearbx=mode) == fresh(kept, following, mode)


@pytest.mark.processes
@pytest.mark.parametrize("mode", [ROUTE, KICKDOWN], ids=str)
def test_prompt_kv_cache_is_reused_by_next(kept, mode):
    forget(kept)
    first, second = (complete(kept, TALE + end, gearbx=mode, max_tokens=4)["usage"] for end in ("", " met a wolf."))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens"] - 1 <= cached <= first["prompt_tokens"]


@pytest.mark.processes
def test_kept_kv_cache_releases_batch(kept):
    forget(kept)
    prompts, before = [f"{number}. {WORD_PROBLEM * 6}" for number in range(8)], active_memory()
    at_once(lambda prompt: complete(kept, prompt, max_tokens=8, gearbx=TOP), prompts)
    assert kept.scheduler.prompt_cache.nbytes > 0
    assert active_memory() - before < 1.5 * kept.scheduler.prompt_cache.nbytes
