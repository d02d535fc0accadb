"""How close the bounds are that k log-probabilities give, and how many gears they decide: the table in docs/servers.md.

The demo model writes; of each token's log-probabilities only the largest k are looked at, in the model's type as of
mlx_lm.server, or in float32 as of llama.cpp.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from gearbx_mlx.cli.gate import Gate
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.route import TelemetryOnly
from gearbx_mlx.decoding.stream import stream_generate
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.gears.gearbox import Observer
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.bounds import BoundedRouting, entropy_bounds, rounding_of
from gearbx_mlx.routing.gates import Monitor, ThresholdGate, default_thresholds

LISTED = (5, 11, 20)
QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "gsm8k_held_out.jsonl"


@dataclass(frozen=True)
class Seen:
    """A token: its entropy in bits, the gear of mode route, and its largest log-probabilities by type."""

    entropy: float
    gear: int
    largest: dict[str, list[float]]


def texts(model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> Iterator[list[Seen]]:
    """The tokens after each prompt."""
    observer = Observer(model)
    for prompt in prompts:
        responses = stream_generate(
            model, tokenizer, prompt, max_tokens, mode=TelemetryOnly(initial_gear="low"), gearbox=observer
        )
        yield [
            Seen(response.entropy, observer.ladder.find(response.gear).index, largest(response.logprobs))
            for response in responses
        ]


def largest(logprobs: mx.array) -> dict[str, list[float]]:
    """The largest log-probabilities, as they are, and as a server in float32 has them."""
    exact = logprobs.astype(mx.float32)
    lists = {"bfloat16": logprobs.astype(mx.bfloat16), "float32": exact - mx.logsumexp(exact)}
    return {name: mx.sort(-values.astype(mx.float32))[: max(LISTED)].tolist() for name, values in lists.items()}


def row(found: Sequence[Sequence[Seen]], size: int, kind: str, listed: int) -> str:
    """A row of the table."""
    widths, outside, agreed, agreed_wrong, decided, wrong = [], 0, 0, 0, 0, 0
    gate = Gate()
    thresholds = default_thresholds(3, size)
    for tokens in found:
        routing = BoundedRouting(
            lambda: Monitor(size, gate.window),
            lambda: ThresholdGate(thresholds, gate.hysteresis, gate.min_gear_duration),
            0,
        )
        for token in tokens:
            logprobs = [-value for value in token.largest[kind][:listed]]
            low, high = entropy_bounds(logprobs, size, rounding_of(logprobs))
            seen = routing.update((low, high))
            widths.append(high - low)
            outside += not low <= token.entropy <= high
            agrees, certain = len(set(seen.gears)) == 1, len(seen.possible) == 1
            agreed += agrees
            agreed_wrong += agrees and seen.gears[0] != token.gear
            decided += certain
            wrong += certain and token.gear not in seen.possible
    total = len(widths)
    figures = (listed, kind, f"{statistics.median(widths):.2f}", outside, f"{agreed / total:.0%}", agreed_wrong)
    return "| " + " | ".join(map(str, (*figures, f"{decided / total:.0%}", wrong))) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=80)
    args = parser.parse_args()
    model, tokenizer = mlx_lm.load(str(DEMO_MODEL))
    prompts = read_prompts(QUESTIONS)[: args.num_prompts]
    found = list(texts(model, tokenizer, prompts, args.max_tokens))
    print(f"{sum(map(len, found))} tokens\n")
    print("| k | type | median width, bits | outside | bounds agree | of them wrong | decided | of them wrong |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("bfloat16", "float32"):
        for listed in LISTED:
            print(row(found, vocabulary(model), kind, listed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
