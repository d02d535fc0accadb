"""What sharing a gear costs in mode route, by policy and number of texts: the table of docs/batches.md.

    python scripts/measure_batches.py --page docs/batches.md

Texts are read side by side, a token of each at a time, on KV caches of their own; the gear of a step is what the policy
makes of their wishes, which act two tokens later. Each prediction is compared with the top gear's. A row of a pass has
the same bits in any company (native CPU kernels), so the texts of a step are computed one after the other, and the
bytes of one pass are counted for all of them.
"""

import argparse
import json
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from pages import fill, table
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.texts import vocabulary_of
from gearbx_mlx.evaluation.metrics import entropy_of_logprobs, kl_divergence, log_softmax
from gearbx_mlx.evaluation.policies import ROUTE_DELAY
from gearbx_mlx.evaluation.replay import next_logprobs
from gearbx_mlx.routing.gates import Monitor, OneGear, ThresholdGate, policy_named

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "gsm8k_held_out.jsonl"
GEARS = "4,16"
SIZES = (1, 2, 4, 8)
POLICIES = ("highest", "quantile:0.75", "most", "quantile:0")
HEAD = ("texts", "policy", "share of the top gear", "MB/token", "mean KL", "agreement")


class Reader:
    """A text that is read token by token, and the gears that it wants."""

    def __init__(self, gearbox, tokens, reference, gate):
        self.gearbox, self.tokens, self.reference, self.gate = gearbox, tokens, reference, gate
        self.monitor, self.cache, self.place = Monitor(vocabulary_of(gearbox)), make_prompt_cache(gearbox.model), 0
        self.coming = deque([0] * ROUTE_DELAY)

    def read(self):
        """KL of the next prediction (nats), and whether its best token is the top gear's."""
        found = log_softmax(next_logprobs(self.gearbox.model, [self.tokens[self.place]], self.cache)[0])
        top = log_softmax(self.reference[self.place])
        self.coming.append(self.gate.update(self.monitor.update(float(entropy_of_logprobs(found)))))
        self.place += 1
        return kl_divergence(top, found), top.argmax() == found.argmax()


@dataclass
class Costs:
    """Of all predictions of a policy: numbers of the gears, bytes, KL in nats, agreement with the top gear."""

    gears: list
    weight_bytes: list
    kl: list
    agree: list

    def row(self, texts, policy, top):
        share = statistics.mean(gear == top for gear in self.gears)
        agree, megabytes = statistics.mean(self.agree), statistics.mean(self.weight_bytes) / 1e6
        return texts, policy, f"{share:.1%}", f"{megabytes:.2f}", f"{statistics.mean(self.kl):.2g}", f"{agree:.1%}"


def side_by_side(gearbox, texts, references, size, policy, gate):
    """Costs of reading all texts, `size` of them at a time."""
    costs = Costs([], [], [], [])
    for start in range(0, len(texts), size):
        pairs = list(zip(texts, references))[start : start + size]
        readers = [Reader(gearbox, text, reference, gate()) for text, reference in pairs]
        for _ in range(len(texts[0])):
            gear = gearbox.ladder[policy([reader.coming.popleft() for reader in readers])]
            gearbox.shift(gear)
            for reader in readers:
                kl, agree = reader.read()
                costs.gears.append(gear.index)
                costs.weight_bytes.append(gearbox.weight_bytes_per_token(gear) / len(readers))
                costs.kl.append(float(kl))
                costs.agree.append(bool(agree))
    return costs


def median_entropy(gearbox, references):
    """The median over all tokens of the rolling mean of the top gear's entropies, bits: half of them are above it."""
    means = []
    for reference in references:
        monitor = Monitor(vocabulary_of(gearbox))
        means += [monitor.update(float(entropy_of_logprobs(log_softmax(row)))).mean for row in reference]
    return float(np.median(means))


def read_texts(tokenizer, count, length):
    """The first tokens of questions with their answers."""
    lines = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
    texts = [tokenizer.encode(f"{line['question']}\n{line['answer']}")[:length] for line in lines]
    return [text for text in texts if len(text) == length][:count]


def measure(count, length):
    """The rows of the table."""
    model, tokenizer = load()
    gearbox = Gearbox(model, GEARS, kernels="native", activations="float")
    texts = read_texts(tokenizer, count, length)
    gearbox.shift(gearbox.ladder.top)
    references = [next_logprobs(model, text, make_prompt_cache(model)) for text in texts]
    threshold, top = median_entropy(gearbox, references), gearbox.ladder.top.index
    cases = [(size, name) for size in SIZES for name in (POLICIES if size > 1 else POLICIES[:1])]
    rows = []
    for size, name in track(cases, "reading"):
        policy = policy_named(name)
        found = side_by_side(gearbox, texts, references, size, policy, lambda: ThresholdGate((threshold,)))
        rows.append(found.row(size, name if size > 1 else "(any)", top))
    for size in SIZES:
        found = side_by_side(gearbox, texts, references, size, max, OneGear)
        rows.append(found.row(size, "static, 4 bits", top))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Write the table into this page.")
    parser.add_argument("--texts", type=int, default=16, help="Texts, a multiple of the largest batch.")
    parser.add_argument("--length", type=int, default=96, help="Tokens of a text.")
    args = parser.parse_args()
    made = table(HEAD, measure(args.texts, args.length))
    print(made)
    if args.page is not None:
        fill(args.page, {"sharing": lambda: made})


if __name__ == "__main__":
    main()
