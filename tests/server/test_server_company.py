"""One request does not change the answers to others, not even many at once and what they leave in the cache."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import active_memory, save_model, tiny_model
from http_server import WORD_PROBLEM, at_once, complete, error_of, in_the_making, served, text_of

from gearbx_mlx.serving import job

QUIET = {"log_level": "ERROR"}
LONG = "Tom has 5 apples and buys 7 more. " * 30


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", prefill_step_size=16, **QUIET) as client:
        yield client


def beside(client, others, **body):
    """The text of an answer, while a function makes other requests."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(text_of, client, max_tokens=120, **body)
        while not in_the_making(client) and not found.done():
            pass
        others()
        return found.result()


@pytest.mark.slow
def test_a_sampler_that_fails_ends_its_own_answer_alone(client, monkeypatch):
    def broken(tokenizer, **settings):
        def sample(logprobs):
            raise ZeroDivisionError("a bug")

        return sample if settings["temp"] == 0.5 else real(tokenizer, **settings)

    real = job.sampler_for
    alone = text_of(client, max_tokens=120, gearbx={"gear": "high"})
    monkeypatch.setattr(job, "sampler_for", broken)

    def others():
        for _ in range(3):
            body = {"prompt": "x", "temperature": 0.5, "gearbx": {"gear": "high"}}
            error_of(client.post("/v1/completions", json=body), 500)

    assert beside(client, others, gearbx={"gear": "high"}) == alone
    assert len({text_of(client, temperature=1.0, gearbx={"gear": "high"}) for _ in range(3)}) > 1


@pytest.mark.slow
def test_tokens_come_while_a_long_prompt_is_read(client):
    times = {"first": [], "second": []}

    def listen(name, mark, **body):
        body |= {"stream": True, "gearbx": {"mode": "route"}, "seed": 1}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith(mark):
                    times[name].append(time.monotonic())

    thread = threading.Thread(target=listen, args=("first", "data"), kwargs={"prompt": "Once", "max_tokens": 400})
    thread.start()
    while not times["first"]:
        time.sleep(0.001)
    listen("second", ": keepalive", prompt=LONG, max_tokens=1)
    thread.join()
    begun, ended = times["second"][0], times["second"][-1]
    assert sum(begun < moment < ended for moment in times["first"]) > 3


RESERVED = {"chat_template": "x"}, {"tokenize": False}, {"return_tensors": "np"}, {"truncation": True, "max_length": 3}


@pytest.mark.parametrize("arguments", RESERVED, ids=str)
def test_a_client_cannot_bring_its_own_template(client, arguments):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": arguments}
    assert "chat_template_kwargs" in error_of(client.post("/v1/chat/completions", json=body))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_far_beyond_the_context_is_refused_before_it_becomes_tokens(client, path):
    text = "king " * 1_000_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    assert "characters" in error_of(client.post(path, json=body))


@pytest.mark.slow
def test_a_model_that_was_replaced_is_given_up(tmp_path):
    save_model(tiny_model(vocab_size=4096), tmp_path / "other")
    with served(gears="4,16", allow_models=True, **QUIET) as client:
        complete(client, max_tokens=2)
        first = weakref.ref(client.scheduler.provider.served.gearbox)
        complete(client, max_tokens=2, model=str(tmp_path / "other"))
        complete(client, WORD_PROBLEM, max_tokens=2)
        gc.collect()
        assert first() is None


@pytest.fixture(scope="module")
def keeping():
    with served(gears="4,8,16", log_level="ERROR", prompt_cache_size=16) as keeping:
        yield keeping


def alone(keeping, prompt, **body):
    """The text from a server without earlier requests."""
    keeping.scheduler.prompt_cache.trim_to(n_sequences=0)
    return text_of(keeping, prompt, **body)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["route", "kickdown"])
@pytest.mark.parametrize("end", ["!", " me", " There are 36 roses and 44 tulips."])
def test_a_text_does_not_depend_on_what_was_asked_before(keeping, mode, end):
    """Not even if it continues an answer of several gears. All requests have one prompt gear here."""
    begin, body = "Of the king and his daughter", {"gearbx": {"mode": mode}}
    text = alone(keeping, begin + end, **body)
    alone(keeping, begin + ", who said to the old man: how many apples are 5 + 7 * 12?", **body)
    assert text_of(keeping, begin + end, **body) == text
    following = begin + end + text + " And"
    assert text_of(keeping, following, **body) == alone(keeping, following, **body)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["route", "kickdown"])
def test_the_kv_cache_of_a_prompt_is_used_by_the_next_one(keeping, mode):
    body = {"gearbx": {"mode": mode}, "max_tokens": 4}
    first = complete(keeping, WORD_PROBLEM + f" In mode {mode},", **body)
    second = complete(keeping, WORD_PROBLEM + f" In mode {mode}, how many are left?", **body)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - 1 <= cached <= first["usage"]["prompt_tokens"]


@pytest.mark.processes
def test_a_kept_kv_cache_does_not_hold_the_whole_batch(keeping):
    prompts = [f"{number}. {WORD_PROBLEM * 6}" for number in range(8)]
    before, had = active_memory(), keeping.scheduler.prompt_cache.nbytes
    at_once(lambda prompt: complete(keeping, prompt, max_tokens=8, gearbx={"gear": "high"}), prompts)
    kept = keeping.scheduler.prompt_cache.nbytes - had
    assert kept > 0
    assert active_memory() - before < 1.5 * kept
