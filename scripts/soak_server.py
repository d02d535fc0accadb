"""Ask a server from many clients for a while: every text has to be the one given alone, and memory must not grow.

python scripts/soak_server.py --clients 16 --seconds 300
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
from pages import table
from rich.progress import Progress

PROMPTS = (
    "Tom has 5 apples and buys 7 more. How many does he have?",
    "Once upon a time there was a king",
    "A baker makes 36 rolls in the morning and half as many in the afternoon. How many rolls does she make?",
    "The old man said to the girl",
)
GREEDY = {"temperature": 0.0, "max_tokens": 48}
SETTINGS: tuple[dict[str, Any], ...] = (  # what depends on no other request
    {"gearbx": {"mode": "lossless"}},
    {"gearbx": {"mode": "static", "gear": "high"}},
    {"gearbx": {"mode": "static", "gear": "low"}, "seed": 1},
    {"gearbx": {"mode": "lossless"}, "temperature": 0.8, "seed": 5},
    {"gearbx": {"mode": "kickdown"}, "seed": 1},
    {"gearbx": {"mode": "route"}, "seed": 1},
)
WARM_UP = 0.25  # of the time, after which memory has to stay


def text_of(url: str, asked: dict[str, Any]) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=GREEDY | asked, timeout=300)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def megabytes(process: subprocess.Popen) -> float:
    """The memory of the server's process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000


def ready(url: str, process: subprocess.Popen) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends."""
    while process.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError("the server has ended")


def soak(url: str, process: subprocess.Popen, clients: int, seconds: float) -> tuple[Counter, float, float]:
    """Counts of answers, and the server's memory after the warm-up and in the end."""
    asked = [{"prompt": prompt} | setting for prompt, setting in itertools.product(PROMPTS, SETTINGS)]
    expected = [text_of(url, each) for each in asked]
    end, counts = time.monotonic() + seconds, Counter[str]()

    def ask(client: int) -> None:
        random = Random(client)
        while time.monotonic() < end:
            place = random.randrange(len(asked))
            try:
                same = text_of(url, asked[place]) == expected[place]
                counts["as alone" if same else f"another text: {asked[place]}"] += 1
            except httpx.HTTPError as error:
                counts[f"error: {error}"] += 1

    before = megabytes(process)
    with Progress() as progress, ThreadPoolExecutor(clients) as pool:
        task, jobs = progress.add_task("", total=seconds), [pool.submit(ask, client) for client in range(clients)]
        while not all(job.done() for job in jobs):
            time.sleep(0.5)
            left = end - time.monotonic()
            progress.update(task, completed=seconds - left, description=f"{counts.total()} answers")
            if left > (1 - WARM_UP) * seconds:
                before = megabytes(process)
    return counts, before, megabytes(process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--model", help="A directory or a Hub repository; the model that ships if not given.")
    parser.add_argument("--port", type=int, default=8093)
    args = parser.parse_args()
    model = ["--model", args.model] if args.model else []
    command = [sys.executable, "-m", "gearbx_mlx.server", *model, "--gears", "4,8,16", "--port", str(args.port)]
    with subprocess.Popen([*command, "--log-level", "ERROR"]) as process:
        try:
            url = f"http://127.0.0.1:{args.port}"
            ready(url, process)
            counts, before, after = soak(url, process, args.clients, args.seconds)
        finally:
            process.terminate()
    print(table(["answers", "count"], counts.most_common()))
    print(f"memory: {before:.0f} MB after the warm-up, {after:.0f} MB in the end ({after / before - 1:+.1%})")
    return int(set(counts) != {"as alone"})


if __name__ == "__main__":
    sys.exit(main())
