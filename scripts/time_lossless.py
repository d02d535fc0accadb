"""Measure what lossless mode saves in time, on a model larger than the processor's cache, for docs/evidence.md.

    python scripts/time_lossless.py --prompts gsm8k_test.jsonl --activations int8 --bounds 0.7,0.9 --json time.json

The demo model fits into the cache, and a random model accepts no draft. So the demo model is widened as in Net2Net
(Chen, Goodfellow, Shlens 2016, arXiv:1511.05641): every unit becomes --times equal ones, and what reads them divides by
--times. Only the order of sums changes, and there are --times^2 as many weights. So drafts are accepted as in the demo
model, and the time is that of a large one.

For every prompt in turn, the script times the top gear alone, and lossless with every bound on the product of a(H).
Kernels are native, texts greedy; the time of the prompt does not count.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from measure_lossless import encode
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.draft_plans import SHIPPED, read_draft_file
from gearbx_mlx.decoding.lossless_model import LosslessModel
from gearbx_mlx.gears.gearbox import DEFAULT_ACTIVATIONS
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.routing.acceptance import ProductRule

PASSES = 9
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=8, help="Copies of every unit: a power of two. Default: 8")
    parser.add_argument("--prompts", required=True, help="One per line, or JSON Lines such as GSM8K's.")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--curve", default=str(SHIPPED / "4-8-16.json"), help="Of the demo model; says the ladder too.")
    parser.add_argument("--bounds", help="On the product of a(H). Default: the curve's")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=DEFAULT_ACTIVATIONS)
    parser.add_argument("--json", help="File to write.")
    return parser.parse_args()


def widened(model, times):
    """A Llama with tied embeddings that computes the same logits with `times` copies of every unit.

    Division by a power of two is exact, and copies of a group of weights have the same codes, so gears compute the same
    too. The head reads the embedding, which is not divided; the last norm is divided instead.
    """
    args = dataclasses.replace(model.args, **{name: times * getattr(model.args, name) for name in WIDTHS})
    wide = llama.Model(args)
    arrays = []
    for path, array in tree_flatten(model.parameters()):
        if array.ndim == 1 or "embed_tokens" in path:
            array = mx.tile(array, (1,) * (array.ndim - 1) + (times,))
            array = array / times if path == "model.norm.weight" else array
        else:
            array = mx.tile(array, (times, times)) / times
        arrays.append((path, array))
    wide.update(tree_unflatten(arrays))
    mx.eval(wide.parameters())
    return wide


def generated(model, tokenizer, prompt, max_tokens):
    """The tokens, and the seconds per token after the first."""
    begun, tokens = 0.0, []
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens):
        begun = begun or time.perf_counter()
        tokens.append(response.token)
    return tokens, (time.perf_counter() - begun) / max(len(tokens) - 1, 1)


def pass_milliseconds(gearbox, gear, rows):
    """The time of one pass over `rows` tokens after a context of 64: the median of a few."""
    gearbox.shift(gear)
    cache = make_prompt_cache(gearbox.model)
    gearbox.model(mx.arange(1, 65)[None], cache=cache)
    times = []
    for _ in range(PASSES):
        begun = time.perf_counter()
        mx.eval(gearbox.model(mx.arange(1, rows + 1)[None], cache=cache))
        times.append(1000 * (time.perf_counter() - begun))
        trim_prompt_cache(cache, rows)
    return statistics.median(times)


def time_texts(gearbox, narrow, draft, tokenizer, prompts, made, bounds, max_tokens):
    """Time every prompt in the top gear alone, and with drafts to each bound, in turn.

    Returns:
        tokens and seconds of the top gear's texts, the same for each bound, and how many texts are the demo model's.
    """

    def lossless(prompt, bound):
        geared = LosslessModel(
            gearbox,
            ProductRule(made.rule().agreement, bound),
            draft=draft,
            stop_tokens=tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
        )
        return generated(geared, tokenizer, prompt, max_tokens)

    alone, as_demo = [], 0
    drafted = {bound: [] for bound in bounds}
    lossless(prompts[0], bounds[0])  # a warm-up
    for prompt in track(prompts, "timing"):
        gearbox.shift(gearbox.ladder.top)
        alone.append(generated(gearbox.model, tokenizer, prompt, max_tokens))
        as_demo += alone[-1][0] == generated(narrow.model, tokenizer, prompt, max_tokens)[0]
        for bound in bounds:
            drafted[bound].append(lossless(prompt, bound))
    return alone, drafted, as_demo


def compare(alone, runs):
    """Texts with drafts beside those of the top gear alone: how many are identical, and how fast they are."""
    ratios = [before / seconds for (_, before), (_, seconds) in zip(alone, runs)]
    return {
        "identical": sum(tokens == expected for (tokens, _), (expected, _) in zip(runs, alone)),
        "tokens_per_second": 1 / statistics.median(seconds for _, seconds in runs),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def main():
    args = parse_arguments()
    made = read_draft_file(args.curve)
    bounds = [float(part) for part in args.bounds.split(",")] if args.bounds else [made.bound]
    gears = ",".join(map(str, made.gears))
    model, tokenizer = load()
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(Path(args.prompts))[: args.num_prompts]]
    narrow = Gearbox(model, gears, kernels="native")
    gearbox = Gearbox(widened(load()[0], args.times), gears, kernels="native", activations=args.activations)
    top, draft = gearbox.ladder.top, gearbox.ladder.find(made.draft)
    narrow.shift(narrow.ladder.top)
    alone, drafted, as_demo = time_texts(gearbox, narrow, draft, tokenizer, prompts, made, bounds, args.max_tokens)
    result = {
        "times": args.times,
        "parameters": sum(array.size for _, array in tree_flatten(gearbox.model.parameters())),
        "gears": gears,
        "draft_bits": made.draft,
        "activations": args.activations,
        "weight_bytes_top": gearbox.weight_bytes_per_token(top),
        "weight_bytes_draft": gearbox.weight_bytes_per_token(draft),
        "prompts": len(prompts),
        "tokens": sum(len(tokens) for tokens, _ in alone),
        "identical_to_the_demo_model": as_demo,
        "tokens_per_second_top": 1 / statistics.median(seconds for _, seconds in alone),
        "milliseconds": {
            "draft": pass_milliseconds(gearbox, draft, 1),
            **{f"top, {rows} rows": pass_milliseconds(gearbox, top, rows) for rows in (1, 4, 8, 16)},
        },
        "bounds": {bound: compare(alone, runs) for bound, runs in drafted.items()},
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if args.json:
        Path(args.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
