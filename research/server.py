"""Our server beside mlx_lm.server: one client alternates between both, for tokens per second and the first token."""

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import EventSource

from ..bit_selection.sensitivity import CALIBRATION
from ..cli.flags import output_path
from ..cli.terminal import progress_bar
from ..errors import GearbxError, one_line
from ..evaluation.text import read_documents
from ..files.writing import write_text
from ..loading import DEMO_MODEL
from ..telemetry.summary import as_json
from . import ServerBenchmark
from .measuring import Rows, machine_name, print_table, spread_of

COLUMNS = ("part", "kernels", "measure", "value", "spread", "least", "most", "count")

# Clients

PATH = "/v1/completions"
PATIENCE = 600.0  # seconds for an answer


@dataclass(frozen=True)
class ClientRequest:
    """A greedy request."""

    prompt: str
    tokens: int
    stream: bool = False

    @property
    def body(self) -> dict[str, Any]:
        streams = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0.0, **streams}


@dataclass(frozen=True)
class ClientAnswer:
    """An answer. first, seconds: from the request to the first text and to the end; first is None for a whole one.

    processor: seconds of the server's processor, the asking before it included.
    """

    text: str
    tokens: int
    seconds: float
    first: float | None = None
    processor: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of a stream after its first token, or of a whole answer."""
        if self.first is None:
            return self.tokens / self.seconds
        return (self.tokens - 1) / max(self.seconds - self.first, 1e-9)


def check_answer(answer: httpx.Response) -> None:
    """Raises GearbxError with the words of a server that refuses a request."""
    if answer.is_error:
        answer.read()
        raise GearbxError(f"{answer.request.url} answers {answer.status_code}: {' '.join(answer.text.split())[:500]}")


class Client(httpx.Client):
    """Asks one server, a request after the other. Raises GearbxError for what is not an answer."""

    def __init__(self, url: str):
        refusing: dict[str, Any] = {"response": [check_answer]}
        super().__init__(base_url=url, trust_env=False, verify=False, timeout=PATIENCE, event_hooks=refusing)

    def ask(self, asked: ClientRequest) -> ClientAnswer:
        try:
            return self._streamed(asked) if asked.stream else self._whole(asked)
        except httpx.HTTPError as error:
            raise GearbxError(f"{self.base_url}: {type(error).__name__}: {one_line(error)}") from error

    def _whole(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        answer = self.post(PATH, json=asked.body)
        seconds = time.perf_counter() - start
        content = answer.json()
        return ClientAnswer(content["choices"][0]["text"], content["usage"]["completion_tokens"], seconds)

    def _streamed(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        text, tokens, first = "", 0, None
        with self.stream("POST", PATH, json=asked.body) as answer:
            for event in EventSource(answer).iter_sse():
                if event.data == "[DONE]":
                    continue  # to the end of the stream, which keeps the connection
                chunk = event.json()
                if "error" in chunk:
                    raise GearbxError(f"{self.base_url}: {chunk['error']['message']}")
                if written := "".join(choice["text"] for choice in chunk["choices"]):
                    first = time.perf_counter() - start if first is None else first
                    text += written
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        seconds = time.perf_counter() - start
        return ClientAnswer(text, tokens, seconds, seconds if first is None else first)


def prompts(words: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Unlike prompts, one for each number of words, none of which begins as another; the same in every run."""
    place, found = 0, []
    for number, length in enumerate(lengths):
        picked = [words[(place + step) % len(words)] for step in range(length)]
        found.append(" ".join([f"{number}.", *picked]))
        place += length + 1
    return found


# Servers in processes of their own

START_PATIENCE = 300.0  # seconds until a server listens: it loads a model before
GRACE = 20.0  # seconds until it has ended
POLL = 0.05  # seconds

OURS = ("gearbx_mlx.server",)
MLX_LM = ("mlx_lm", "server")


def free_port() -> int:
    """A port of loopback without a listener."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def started(program: tuple[str, ...], *flags: object) -> Iterator[tuple[Client, Any]]:
    """A client of a server, and psutil's view of its process, while that runs.

    Raises:
        GearbxError: a server that ends or does not listen; there is no psutil.
    """
    try:
        view_of = import_module("psutil").Process
    except ImportError as error:
        raise GearbxError("this needs psutil: pip install psutil") from error
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", *program, "--host", "127.0.0.1", "--port", str(port), *map(str, flags)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=log, stderr=log)
        until = time.monotonic() + START_PATIENCE
        try:
            while not listens(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = " ".join(log.read().decode(errors="replace").split())[-500:] or "it said nothing"
                    raise GearbxError(f"{' '.join(program)} does not serve: {said}")
                time.sleep(POLL)
            with Client(url) as client:
                yield client, view_of(process.pid)
        finally:
            end(process)


def listens(url: str) -> bool:
    """Whether a server answers; loopback needs no proxy."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, by force where it does not end by itself."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# What is measured


def run(settings: ServerBenchmark) -> None:
    """Measure, print and write.

    Raises:
        GearbxError: a server that does not start, a file that cannot be written.
    """
    out = None if settings.json is None else output_path(settings.json)
    shared = {"machine": machine_name(), "date": time.strftime("%Y-%m-%d")}
    rows = [row | shared for row in measure(settings)]
    if not rows:
        raise GearbxError("nothing was measured: answers were too short; give more --tokens or --trials")
    print_table([{name: "" if value is None else value for name, value in row.items()} for row in rows], COLUMNS)
    if out is not None:
        write_text(out, as_json({"rows": rows}))


def measure(settings: ServerBenchmark) -> Rows:
    """The rows of our server with each kind of kernels."""
    words = " ".join(read_documents(Path(CALIBRATION))).split()
    rows = Rows()
    for kernels in settings.kernels:
        with progress_bar() as progress:
            trials = measure_rates(settings, kernels, words)
            found = [*progress.track(trials, settings.trials + 1, description=f"trials, {kernels}")][-1]
        rows += [{"part": row["part"], "kernels": kernels, **row} for row in found]
    return rows


def row(
    part: str,
    measure: str,
    values: Sequence[float],
    least: float | None = None,
    most: float | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """The median of some values and their spread; least, most: what is aimed at. count: of what was measured."""
    value = statistics.median(values)
    reached = (least is None or value >= least) and (most is None or value <= most)
    return {
        **{"part": part, "measure": measure, "value": value, "spread": spread_of(values) if len(values) > 1 else None},
        **{"least": least, "most": most, "reached": reached},
        "count": len(values) if count is None else count,
    }


LEAST_RATE, MOST_WAIT = 0.97, 1.05  # times mlx_lm.server's
RATE_WORDS = 60  # of a prompt
LEAST_TOKENS = 8  # of an answer; one that ends sooner says nothing of the speed


def going_on(client: Client, prompt: str, tokens: int) -> ClientAnswer:
    """A stream whose prompt goes on from an answer, so that its KV cache is used."""
    before = client.ask(ClientRequest(prompt, 4))
    return client.ask(ClientRequest(prompt + before.text + " And then?", tokens, stream=True))


PARTS: dict[str, Callable[[Client, str, int], ClientAnswer]] = {
    "whole": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens)),
    "stream": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens, stream=True)),
    "stream, cached prompt": going_on,
}


Pair = tuple[ClientAnswer, ClientAnswer]  # ours, and mlx_lm.server's


def measure_rates(settings: ServerBenchmark, kernels: str, words: Sequence[str]) -> Iterator[Rows]:
    """A list of rows for each trial at its end, the last with all of them: ratios to mlx_lm.server.

    Args:
        words: of the prompts.
    """
    found: dict[str, list[Pair]] = {part: [] for part in PARTS}
    texts = prompts(words, [RATE_WORDS] * (settings.trials + 1) * len(PARTS))
    model = "--model", settings.model or str(DEMO_MODEL)
    ours = started(OURS, *model, "--gears", str(settings.gears), "--mode", "static", "--kernels", kernels)
    with ours as own, started(MLX_LM, *model) as beside:
        sides = own, beside
        for trial in range(settings.trials + 1):
            for part, ask in PARTS.items():
                prompt = texts.pop()
                answers = {}
                for client, process in sides if trial % 2 else sides[::-1]:
                    before = processor_seconds(process)
                    answer = ask(client, prompt, settings.tokens)
                    answers[client] = replace(answer, processor=processor_seconds(process) - before)
                long_enough = all(answer.tokens >= LEAST_TOKENS for answer in answers.values())
                if trial and long_enough:  # the first one is a warm-up
                    found[part].append((answers[own[0]], answers[beside[0]]))
            yield rate_rows(found) if trial else []


def rate_rows(found: dict[str, list[Pair]]) -> Rows:
    rows = []
    for part, pairs in found.items():
        if not pairs:
            continue
        rates = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
        rows.append(row(part, "tokens/s, times mlx_lm.server's", rates, least=LEAST_RATE))
        rows.append(row(part, "tokens/s", [mine.tokens_per_second for mine, _ in pairs]))
        waits = [mine.first / other.first for mine, other in pairs if mine.first and other.first]
        if waits:
            rows.append(row(part, "time to first token, times mlx_lm.server's", waits, most=MOST_WAIT))
            rows.append(row(part, "time to first token, s", [mine.first or 0.0 for mine, _ in pairs]))
        spent, others = (sum(each.processor for each in side) for side in zip(*pairs))
        if others:  # the system counts in hundredths of a second
            rows.append(row(part, "processor time, times mlx_lm.server's", [spent / others], count=len(pairs)))
        same = sum(mine.text == other.text for mine, other in pairs)
        rows.append(row(part, "texts equal to mlx_lm.server's", [same / len(pairs)], count=len(pairs)))
    return rows


def processor_seconds(process: Any) -> float:
    """Processor seconds of a process until now."""
    return float(sum(process.cpu_times()[:2]))
