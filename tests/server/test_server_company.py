"""One request does not change the answers to others, not even many at once."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import save_model, tiny_model
from http_server import WORD_PROBLEM, complete, error_of, in_the_making, served, text_of

from gearbx_mlx.server import job

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
def test_failing_sampler_ends_only_its_answer(client, monkeypatch):
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
def test_long_prompts_are_read_in_order(client):
    """The first of many begins its answer first, since none is read within another's reading."""
    started, lock = [], threading.Lock()

    def ask(number):
        time.sleep(0.05 * number)
        body = {"prompt": f"{number} {LONG}", "max_tokens": 2, "stream": True, "gearbx": {"mode": "kickdown"}}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for place, _ in enumerate(response.iter_lines()):
                if place == 0:
                    with lock:
                        started.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert started == sorted(started)


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
def test_text_beyond_context_is_refused_before_tokenization(client, path):
    text = "king " * 300_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    assert "characters" in error_of(client.post(path, json=body))


@pytest.mark.slow
def test_replaced_model_is_released(tmp_path):
    save_model(tiny_model(vocab_size=4096), tmp_path / "other")
    with served(gears="4,16", allow_models=True, **QUIET) as client:
        complete(client, max_tokens=2)
        first = weakref.ref(client.scheduler.provider.served.gearbox)
        complete(client, max_tokens=2, model=str(tmp_path / "other"))
        complete(client, WORD_PROBLEM, max_tokens=2)
        gc.collect()
        assert first() is None
