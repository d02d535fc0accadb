"""Whether a cascade of drafts would pay in lossless mode: 3 bits draft for 4 bits, whose tokens 16 bits verify.

    python scripts/measure_cascades.py --prompts gsm8k_test.jsonl --num-prompts 20

Every gear reads the text of the top gear, and its most likely tokens are noted. On this record the script replays
drafts of every fixed length by one low gear, and cascades of every two lengths. Costs are bytes of weights. As in the
calibration, what follows a disagreement is taken from the text.
"""

import argparse
import itertools
import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from measure_lossless import encode
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.routing.acceptance import MOST_DRAFTED

LENGTHS = range(1, MOST_DRAFTED + 1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="One per line, or JSON Lines such as GSM8K's.")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--gears", default="3,4,16", help="Three.")
    return parser.parse_args()


def choices(gearbox, prompt, text):
    """The most likely token of each gear at every place of a text, lowest gear first."""
    found = []
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        logits = gearbox.model(mx.array(prompt + text[:-1])[None], cache=make_prompt_cache(gearbox.model))[0]
        found.append(np.array(mx.argmax(logits[len(prompt) - 1 :], axis=-1)))
    return found


def accepted(agrees, place, length):
    """How many of the next tokens agree, `length` at most."""
    window = agrees[place : place + length]
    return len(window) if window.all() else int(window.argmin())


def one_gear(agrees, length, cost):
    """Cost of a text whose drafts have this length, in passes of the top gear; `cost` is that of a drafted token."""
    place, spent = 0, 0.0
    while place < len(agrees):
        drafted = min(length, len(agrees) - place - 1)
        spent += drafted * cost + 1
        place += accepted(agrees, place, drafted) + 1
    return spent


def cascade(low, mid, lengths, costs):
    """The same where a low gear drafts `lengths[0]` tokens for a mid gear, until that has `lengths[1]` for the top one.

    Args:
        low: where the low gear agrees with the mid one. mid: where the mid gear agrees with the top one.
    """
    place, spent = 0, 0.0
    while place < len(mid):
        room = min(lengths[1], len(mid) - place - 1)
        drafted = 0
        while drafted < room:
            proposed = min(lengths[0], room - drafted - 1)
            spent += proposed * costs[0] + costs[1]
            drafted += accepted(low, place + drafted, proposed) + 1
        spent += 1
        place += accepted(mid, place, drafted) + 1
    return spent


def main():
    args = parse_arguments()
    model, tokenizer = load()
    gearbox = Gearbox(model, args.gears, kernels="native")
    prompts = [list(encode(tokenizer, text)) for text in read_prompts(Path(args.prompts))[: args.num_prompts]]
    records = []
    for prompt in track(prompts, "texts"):
        gearbox.shift(gearbox.ladder.top)
        text = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, args.max_tokens)]
        low, mid, top = choices(gearbox, prompt, text)
        records.append((low == mid, low == top, mid == top))
    read = [gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder]
    costs = [value / read[-1] for value in read[:-1]]
    tokens = sum(len(record[0]) for record in records)

    def best(found):
        lengths, spent = min(found, key=lambda pair: pair[1])
        return {"lengths": lengths, "passes_of_the_top_gear_per_token": spent / tokens}

    result = {
        "gears": args.gears,
        "tokens": tokens,
        "agreement": dict(
            zip(("low with mid", "low with top", "mid with top"), (np.concatenate(x).mean() for x in zip(*records)))
        ),
        "low gear": best((n, sum(one_gear(low, n, costs[0]) for _, low, _ in records)) for n in LENGTHS),
        "mid gear": best((n, sum(one_gear(mid, n, costs[1]) for *_, mid in records)) for n in LENGTHS),
        "cascade": best(
            (pair, sum(cascade(low, mid, pair, costs) for low, _, mid in records))
            for pair in itertools.product(LENGTHS, LENGTHS)
            if pair[0] < pair[1]
        ),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
