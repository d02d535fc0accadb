"""Batches: what sharing a gear costs in mode route, and the speed of mode lossless, for docs/batches.md."""

import json
import statistics
import time
from collections import deque
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, Static, load, stream_generate
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.decoding.mode import vocabulary_of
from gearbx_mlx.decoding.stream import batch_generator
from gearbx_mlx.evaluation.metrics import entropy_of_logprobs, kl_divergence, log_softmax
from gearbx_mlx.evaluation.predictions import next_logprobs
from gearbx_mlx.routing.gates import RUN_AHEAD, Monitor, OneGear, ThresholdGate, policy_named

from .lossless import ASSISTANT, encode
from .studies import HELD_OUT, Found, in_turn, ratios, results_in_turn, spread, study, table_here

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


SPEED_HEAD = ["weights", "texts", "time", "processor time", "drafted", "same texts", "draft", "2 rows", "3 rows"]
CONTEXT, PASSES = 64, 9


def timed(responses):
    """Tokens by sequence, the seconds per token after the first step (clock and processor), and counts."""
    texts: dict[int, list[int]] = {}
    count, drafted, begun = 0, 0, (0.0, 0.0)
    for step in responses:
        count += len(step) if texts else 0
        begun = begun if texts else (time.perf_counter(), time.process_time())
        for response in step:
            texts.setdefault(getattr(response, "uid", 0), []).append(response.token)
            drafted += response.drafted
    clock, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
    return {"texts": texts, "clock": clock / count, "cpu": cpu / count, "drafted": drafted}


def batch(gearbox, tokenizer, prompts, mode, max_tokens):
    """The steps of a batch."""
    generator = batch_generator(gearbox.model, tokenizer, mode=mode, gearbox=gearbox)
    generator.insert(prompts, [max_tokens] * len(prompts))
    while step := generator.next_generated():
        yield step
    generator.close()


def pass_seconds(gearbox, size):
    """Seconds of a step of the draft, and of top steps with one to three rows of each text: medians, taken in turn."""
    cache = [BatchKVCache([0] * size) for _ in gearbox.model.layers]
    mx.eval(gearbox.model(mx.full((size, CONTEXT), 5), cache=cache))

    def one_pass(gear, rows):
        gearbox.shift(gear)
        mx.eval(gearbox.model(mx.full((size, rows), 7), cache=cache))
        for each in cache:
            each.trim(rows)

    kinds = {"draft": ("low", 1), "top": ("high", 1), "2 rows": ("high", 2), "3 rows": ("high", 3)}
    seconds = in_turn({kind: partial(one_pass, *what) for kind, what in kinds.items()}, PASSES)
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def compare(gearbox, tokenizer, prompts, mode, max_tokens, trials):
    """The row of one size."""

    def in_a_batch(mode):
        return timed(batch(gearbox, tokenizer, prompts, mode, max_tokens))

    def alone():
        stream = stream_generate(gearbox.model, tokenizer, prompts[0], max_tokens, mode=mode, gearbox=gearbox)
        return timed([response] for response in stream)

    works = {"top": partial(in_a_batch, Static()), "lossless": partial(in_a_batch, mode)}
    runs = results_in_turn(works | ({"single": alone} if len(prompts) == 1 else {}), trials)
    top, last = runs["top"][-1]["texts"], runs["lossless"][-1]
    same = sum(a == b for a, b in zip(top.values(), last["texts"].values()))
    row = {"size": len(prompts), "identical": same, "drafted": last["drafted"]}
    for name, prefix in (("top", ""), ("single", "to_single_")):
        for unit in ("clock", "cpu") if name in runs else ():
            row[prefix + unit] = ratios(*([run[unit] for run in runs[each]] for each in (name, "lossless")))
    seconds = pass_seconds(gearbox, len(prompts))
    return row | {"passes": {kind: value / seconds["top"] for kind, value in seconds.items() if kind != "top"}}


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


@study("docs/batches.md", minutes=20)
def batch_lossless(
    prompts: Path = ASSISTANT,
    model: str = "smollm2",
    sizes: list[int] = [1, 2, 4, 8],  # noqa: B006 - nothing changes it
    weights: list[str] = ["planes 4,16", "planes 4,8"],  # noqa: B006
    max_tokens: int = 100,
    trials: int = 5,
    draft_length: int | None = None,
) -> Found:
    """Batches in mode lossless beside the same batches in the top gear alone.

    For every size of a batch, both ways write the same prompts in turn;
    a batch of one is also compared with stream_generate. The time of prompts does not count. On a machine that others
    use too, the processor's time strays less than the clock. What a round can save follows from its passes, which are
    timed by themselves: a step of the draft, and verifications of two and three rows of each text, as shares of a step
    of the top gear.

    Args:
        prompts: One per line, or JSON Lines such as GSM8K's.
        weights: Formats and their gears.
        draft_length: As the costs in time say if not given.
    """
    mode = Lossless(draft_length=draft_length) if draft_length else Lossless(cost="time")
    rows, lines = [], []
    for stored in weights:
        form, gears = stored.split()
        loaded, tokenizer = load(model)
        asked = [encode(tokenizer, prompt) for prompt in read_prompts(prompts)]
        gearbox = Gearbox(loaded, gears, format=form)
        for size in sizes:
            given = [asked[place % len(asked)] for place in range(size)]
            row = compare(gearbox, tokenizer, given, mode, max_tokens, trials)
            rows.append({"weights": stored, **row})
            cells = (
                row["drafted"],
                f"{row['identical']} of {size}",
                *(f"{share:.2f}" for share in row["passes"].values()),
            )
            lines.append([stored, size, spread(row["clock"]), spread(row["cpu"]), *cells])
            print(*lines[-1], flush=True)
    return Found({"lossless": table_here(SPEED_HEAD, lines)}, rows)
