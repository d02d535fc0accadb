"""Batches: what sharing a gear costs in mode route, for docs/batches.md."""

import json
from collections import deque
from functools import partial

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.mode import vocabulary_of
from gearbx_mlx.evaluation.predictions import entropy_of_logprobs, kl_divergence, log_softmax, next_logprobs
from gearbx_mlx.routing.gates import RUN_AHEAD, Monitor, OneGear, ThresholdGate, policy_named

from .studies import HELD_OUT, Found, study

GEARS = "4,16"
SIZES = (1, 2, 4, 8)
POLICIES = ("highest", "quantile:0.75", "most", "quantile:0")
HEAD = ("texts", "policy", "share of the top gear", "MB/token", "mean KL", "agreement")


class Reader:
    """A text that is read token by token, and the gears that it wants."""

    def __init__(self, gearbox, tokens, reference, gate):
        self.gearbox, self.tokens, self.reference, self.gate = gearbox, tokens, reference, gate
        self.monitor, self.cache, self.place = Monitor(vocabulary_of(gearbox)), make_prompt_cache(gearbox.model), 0
        self.coming = deque([0] * RUN_AHEAD)

    def read(self):
        """KL of the next prediction (nats), and whether its best token is the top gear's."""
        found = log_softmax(next_logprobs(self.gearbox.model, [self.tokens[self.place]], self.cache)[0])
        top = log_softmax(self.reference[self.place])
        self.coming.append(self.gate.update(self.monitor.update(float(entropy_of_logprobs(found)))))
        self.place += 1
        return kl_divergence(top, found), top.argmax() == found.argmax()


def side_by_side(gearbox, texts, references, size, policy, gate):
    """Share of the top gear, megabytes of a token, KL and agreement where `size` texts are read at a time: as cells."""
    gears, megabytes, predictions = [], [], []
    for start in range(0, len(texts), size):
        pairs = list(zip(texts, references))[start : start + size]
        readers = [Reader(gearbox, text, reference, gate()) for text, reference in pairs]
        for _ in range(len(texts[0])):
            gear = gearbox.ladder[policy([reader.coming.popleft() for reader in readers])]
            gearbox.shift(gear)
            predictions += [reader.read() for reader in readers]
            gears += [gear] * len(readers)
            megabytes += [gearbox.weight_bytes_per_token(gear) / len(readers) / 1e6] * len(readers)
    share = np.mean([gear == gearbox.ladder.top for gear in gears])
    kl, agree = np.mean(predictions, axis=0)
    return f"{share:.1%}", f"{np.mean(megabytes):.2f}", f"{kl:.2g}", f"{agree:.1%}"


def median_entropy(gearbox, references):
    """The median over all tokens of the rolling mean of the top gear's entropies, bits: half of them are above it."""
    means = []
    for reference in references:
        monitor = Monitor(vocabulary_of(gearbox))
        means += [monitor.update(float(entropy_of_logprobs(log_softmax(row)))).mean for row in reference]
    return float(np.median(means))


def read_texts(tokenizer, count, length):
    """The first tokens of questions with their answers."""
    lines = map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines())
    texts = [tokenizer.encode(f"{line['question']}\n{line['answer']}")[:length] for line in lines]
    return [text for text in texts if len(text) == length][:count]


def measure(count, length):
    """The rows of the table."""
    model, tokenizer = load()
    gearbox = Gearbox(model, GEARS, kernels="native", activations="float")
    texts = read_texts(tokenizer, count, length)
    gearbox.shift(gearbox.ladder.top)
    references = [next_logprobs(model, text, make_prompt_cache(model)) for text in texts]
    threshold = median_entropy(gearbox, references)
    cases = [(size, name) for size in SIZES for name in (POLICIES if size > 1 else POLICIES[:1])]
    rows = []
    for size, name in track(cases, "reading"):
        gate = partial(ThresholdGate, (threshold,))
        cells = side_by_side(gearbox, texts, references, size, policy_named(name), gate)
        rows.append([size, name if size > 1 else "(any)", *cells])
    for size in SIZES:
        rows.append([size, "static, 4 bits", *side_by_side(gearbox, texts, references, size, max, OneGear)])
    return rows


@study("docs/batches.md", minutes=3)
def batch_sharing(texts: int = 16, length: int = 96) -> Found:
    """What sharing a gear costs in mode route, by policy and number of texts.

    Texts are read side by side, a token of each at a time, on KV caches of their own. The policy sets the gear of a
    step from their wishes, which act two tokens later. Each prediction is compared with the top gear's. A row of
    a pass has the same bits in any company (native CPU kernels), so the texts of a step are computed one after the
    other, and the bytes of one pass are counted for all of them.

    Args:
        texts: A multiple of the largest batch.
        length: Tokens of a text.
    """
    return Found({"sharing": table(HEAD, measure(texts, length))})
