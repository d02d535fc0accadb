"""Our server in this process, for tests that talk to it over HTTP."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import serving

WORD_PROBLEM = "Tom has 5 apples and buys 7 more."
MESSAGES = [{"role": "user", "content": WORD_PROBLEM}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TEMPLATE = (
    "{% if tools %}Tools: {{ tools }}\n<tool_call>{{ '{tool_call.name}' }}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}Answer:"
)


@contextlib.contextmanager
def served(**settings):
    """A client of a server on a free port, with the server as `client.server`."""
    with (
        serving(command_settings(ServerSettings, {"port": 0, **settings})) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        client.server = server
        client.scheduler = server.app.state.service.scheduler
        yield client


def in_the_making(client, waiting=False):
    """How many answers the server says that it computes, or has to compute."""
    lines = client.get("/metrics").text.splitlines()
    names = ["gearbx_requests_running", *(["gearbx_requests_waiting"] if waiting else [])]
    return sum(float(line.split()[1]) for line in lines if line.split()[0] in names)


def is_idle(client, seconds=2.0):
    """Return whether, within some seconds, nothing is computed and nothing waits."""
    deadline = time.monotonic() + seconds
    while in_the_making(client, waiting=True) and time.monotonic() < deadline:
        time.sleep(0.02)
    return in_the_making(client, waiting=True) == 0


def complete(client, prompt=WORD_PROBLEM, **body):
    """A text completion's JSON; a status other than 200 is a failure."""
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(client, prompt=WORD_PROBLEM, **body):
    return complete(client, prompt, **body)["choices"][0]["text"]


def chat(client, content=WORD_PROBLEM, **body):
    messages = body.pop("messages", [{"role": "user", "content": content}])
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 24, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def at_once(ask, items):
    """Call a function for all items at the same time; return what it returns for each."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(ask, items))


def events(client, path, **body):
    """The objects of a stream, which ends with [DONE]."""
    with client.stream("POST", path, json={"stream": True, "max_tokens": 24, **body}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def hears_of_the_end(url, number, stream):
    """Return the status of a long answer, and whether it says that the server stops."""
    body = {"prompt": f"Tom has {number} apples. He", "max_tokens": 4000, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
    return answer.status_code, "the server is stopping" in answer.text


def by_openai(client):
    """OpenAI's client of a server."""
    import openai  # takes a second

    return openai.OpenAI(base_url=f"{client.server.url}/v1", api_key="none", max_retries=0)


def error_of(answer, status=400):
    """The message of an error object."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error["message"]
