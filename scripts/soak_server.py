"""Ask a server from many clients for a while: every text has to be the one given alone, and memory must not grow.

python scripts/soak_server.py --clients 16 --seconds 300
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
from asked_servers import Client, started
from pages import table
from rich.progress import Progress

from gearbx_mlx.errors import GearbxError

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


def text_of(client: Client, asked: dict[str, Any]) -> str:
    answer = client.post("/v1/completions", json=GREEDY | asked)
    return answer.json()["choices"][0]["text"]


def soak(client: Client, memory: Callable[[], float], clients: int, seconds: float) -> tuple[Counter, float, float]:
    """Counts of answers, and the server's memory (MB) after the warm-up and in the end."""
    asked = [{"prompt": prompt} | setting for prompt, setting in itertools.product(PROMPTS, SETTINGS)]
    expected = [text_of(client, each) for each in asked]
    end, counts = time.monotonic() + seconds, Counter[str]()

    def ask(seed: int) -> None:
        random = Random(seed)
        while time.monotonic() < end:
            place = random.randrange(len(asked))
            try:
                same = text_of(client, asked[place]) == expected[place]
                counts["as alone" if same else f"another text: {asked[place]}"] += 1
            except (httpx.HTTPError, GearbxError) as error:
                counts[f"error: {error}"] += 1

    before = memory()
    with Progress() as progress, ThreadPoolExecutor(clients) as pool:
        task, jobs = progress.add_task("", total=seconds), [pool.submit(ask, seed) for seed in range(clients)]
        while not all(job.done() for job in jobs):
            time.sleep(0.5)
            left = end - time.monotonic()
            progress.update(task, completed=seconds - left, description=f"{counts.total()} answers")
            if left > (1 - WARM_UP) * seconds:
                before = memory()
    return counts, before, memory()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--model", help="A directory or a Hub repository; the model that ships if not given.")
    args = parser.parse_args()
    model = ["--model", args.model] if args.model else []
    with started(("gearbx_mlx.server",), *model, "--gears", "4,8,16") as (client, process):
        counts, before, after = soak(client, lambda: process.memory_info().rss / 1e6, args.clients, args.seconds)
    print(table(["answers", "count"], counts.most_common()))
    print(f"memory: {before:.0f} MB after the warm-up, {after:.0f} MB in the end ({after / before - 1:+.1%})")
    return int(set(counts) != {"as alone"})


if __name__ == "__main__":
    sys.exit(main())
