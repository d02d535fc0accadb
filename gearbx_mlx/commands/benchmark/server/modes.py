"""Every mode under several clients at once: each text is the one that is given alone."""

import random
from collections.abc import Sequence
from typing import Any

from .client import Asked, Client, prompts
from .crowd import crowd, each_of
from .process import OURS, started
from .rows import row

CLIENTS, WORDS, TOKENS, EACH = 8, (8, 40), (12, 48), 8
SEED = 3
WARM = {"temperature": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "static, low": {"gearbx": {"mode": "static", "gear": "low"}},
    "static, high": {"gearbx": {"mode": "static", "gear": "high"}},
    "lossless": {"gearbx": {"mode": "lossless"}},
    "route": {"gearbx": {"mode": "route"}, "seed": 7},  # without one its gears are those of its company
    "kickdown": {"gearbx": {"mode": "kickdown"}},
    "static with a seed": {"gearbx": {"mode": "static", "gear": "low"}, "seed": 7, **WARM},
    "lossless with a seed": {"gearbx": {"mode": "lossless"}, "seed": 7, **WARM},
    "route with a seed": {"gearbx": {"mode": "route"}, "seed": 7, **WARM},
    "kickdown with a seed": {"gearbx": {"mode": "kickdown"}, "seed": 7, **WARM},
}


def measure_modes(model: str, kernels: str, words: Sequence[str], each: int = EACH) -> list[dict[str, Any]]:
    """A row for each mode: how many texts are others than those that a server of its own gave one after the other."""
    drawn = random.Random(SEED)
    texts = iter(prompts(words, [drawn.randint(*WORDS) for _ in range(each * len(KINDS))]))
    requests = {
        kind: [Asked(next(texts), drawn.randint(*TOKENS), number % 2 == 0, further) for number in range(each)]
        for kind, further in KINDS.items()
    }
    everything = [asked for several in requests.values() for asked in several]
    flags = "--model", model, "--gears", "4,8,16", "--kernels", kernels
    with started(OURS, *flags) as server, Client(server.url) as client:
        alone = {asked: client.ask(asked).text for asked in everything}
    mixed = drawn.sample(everything, len(everything))
    with started(OURS, *flags) as server:
        outcome = crowd(server.url, CLIENTS, each_of(mixed))
    part = f"every mode, {CLIENTS} clients"
    rows = [row(part, "errors", [len(outcome.errors)], kernels, most=0, count=len(outcome.answers))]
    got = dict(outcome.answers)
    for kind, several in requests.items():
        pairs = [(alone[asked], got[asked].text) for asked in several if asked in got]
        unlike = [texts for texts in pairs if texts[0] != texts[1]]
        found = row(part, f"{kind}: answers unlike the one alone", [len(unlike)], kernels, most=0, count=len(pairs))
        rows.append(found | {"examples": unlike[:4]})
    return rows
