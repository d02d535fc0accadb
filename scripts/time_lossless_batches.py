"""Time batches in mode lossless beside the same batches in the top gear alone, for docs/batches.md.

    python scripts/time_lossless_batches.py --prompts tests/data/gsm8k_held_out.jsonl --page docs/batches.md

The demo model is widened as in time_lossless.py. For every size of a batch, both ways write the same prompts in turn;
a batch of one is also compared with stream_generate. The time of prompts does not count. On a machine that others use
too, `cpu` (the processor's time) strays less than the clock. What a round can save follows from its passes, which are
timed by themselves: a step of the draft, and verifications of two and three rows of each text, as shares of a step of
the top gear.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
from measure_lossless import encode
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache
from pages import fill, table
from time_lossless import widened

from gearbx_mlx import Gearbox, Lossless, Static, load, stream_generate
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.stream import batch_generator
from gearbx_mlx.gears.gearbox import DEFAULT_ACTIVATIONS
from gearbx_mlx.kernels import ACTIVATIONS

HEAD = [
    "weights",
    "texts",
    "time",
    "spread",
    "processor time",
    "spread",
    "drafted",
    "same texts",
    "draft",
    "2 rows",
    "3 rows",
]
CONTEXT, PASSES = 64, 9


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=8, help="Copies of every unit: a power of two. Default: 8")
    parser.add_argument("--prompts", required=True, help="One per line, or JSON Lines such as GSM8K's.")
    parser.add_argument("--sizes", default="1,2,4,8,16", help="Of batches. Default: 1,2,4,8,16")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["exact 3,16", "planes 4,16"],
        help="Formats and their gears. Default: 'exact 3,16', which the mode has by default, and 'planes 4,16'",
    )
    parser.add_argument("--activations", choices=ACTIVATIONS, default=DEFAULT_ACTIVATIONS)
    parser.add_argument("--draft-length", type=int, help="Default: as the costs in time say")
    parser.add_argument("--json", help="File to write.")
    parser.add_argument("--page", type=Path, help="Write the table into this page, after <!-- lossless -->.")
    return parser.parse_args()


def timed(responses):
    """Tokens by sequence, the seconds per token after the first step, on the clock and of the processor, and counts."""
    texts, count, drafted, begun = {}, 0, 0, None
    for step in responses:
        count += len(step) if begun else 0
        begun = begun or (time.perf_counter(), time.process_time())
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


def ratios(before, after, unit):
    """How many times as fast `after` is: the median and the range."""
    values = [one[unit] / other[unit] for one, other in zip(before, after)]
    return {"ratio": statistics.median(values), "spread": [min(values), max(values)]}


def pass_seconds(gearbox, size):
    """Seconds of a step of the draft, and of top steps with one to three rows of each text: medians, taken in turn."""
    cache = [BatchKVCache([0] * size) for _ in gearbox.model.layers]
    mx.eval(gearbox.model(mx.full((size, CONTEXT), 5), cache=cache))
    kinds = {"draft": ("low", 1), "top": ("high", 1), "2 rows": ("high", 2), "3 rows": ("high", 3)}
    times = {kind: [] for kind in kinds}
    for _ in range(PASSES):
        for kind, (gear, rows) in kinds.items():
            gearbox.shift(gear)
            begun = time.perf_counter()
            mx.eval(gearbox.model(mx.full((size, rows), 7), cache=cache))
            times[kind].append(time.perf_counter() - begun)
            for each in cache:
                each.trim(rows)
    return {kind: statistics.median(values) for kind, values in times.items()}


def compare(gearbox, tokenizer, prompts, mode, max_tokens, trials):
    """The row of one size."""
    top, lossless, single = [], [], []
    for trial in range(trials + 1):
        runs = [timed(batch(gearbox, tokenizer, prompts, each, max_tokens)) for each in (Static(), mode)]
        if len(prompts) == 1:
            stream = stream_generate(gearbox.model, tokenizer, prompts[0], max_tokens, mode=mode, gearbox=gearbox)
            runs.append(timed([response] for response in stream))
        if trial:  # the first one is a warm-up
            for place, run in zip((top, lossless, single), runs):
                place.append(run)
    same = sum(a == b for a, b in zip(top[-1]["texts"].values(), lossless[-1]["texts"].values()))
    row = {"size": len(prompts), "identical": same, "drafted": lossless[-1]["drafted"]}
    row |= {unit: ratios(top, lossless, unit) for unit in ("clock", "cpu")}
    seconds = pass_seconds(gearbox, len(prompts))
    row["passes"] = {kind: value / seconds["top"] for kind, value in seconds.items() if kind != "top"}
    return row | ({"to_single_" + unit: ratios(single, lossless, unit) for unit in ("clock", "cpu")} if single else {})


def spread(values):
    return "-".join(f"{value:.2f}" for value in values)


def page_table(rows, place):
    """How many times as fast as the top gear alone, and where and when that was measured."""
    lines = [
        [
            row["weights"],
            row["size"],
            f"{row['clock']['ratio']:.2f}",
            spread(row["clock"]["spread"]),
            f"{row['cpu']['ratio']:.2f}",
            spread(row["cpu"]["spread"]),
            row["drafted"],
            f"{row['identical']} of {row['size']}",
            *(f"{share:.2f}" for share in row["passes"].values()),
        ]
        for row in rows
    ]
    return table(HEAD, lines) + f"\n{place}\n"


def main():
    args = parse_arguments()
    model, tokenizer = load()
    model.set_dtype(mx.bfloat16)  # which format exact stores
    wide = widened(model, args.times)
    mode = Lossless(draft_length=args.draft_length) if args.draft_length else Lossless(cost="time")
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(Path(args.prompts))]
    rows = []
    for weights in args.weights:
        form, gears = weights.split()
        copy = llama.Model(wide.args)  # whose layers the gearbox replaces
        copy.update(wide.parameters())
        gearbox = Gearbox(copy, gears, format=form, kernels="native", activations=args.activations)
        for size in map(int, args.sizes.split(",")):
            given = [prompts[place % len(prompts)] for place in range(size)]
            row = compare(gearbox, tokenizer, given, mode, args.max_tokens, args.trials)
            rows.append({"weights": weights, **row})
            print(json.dumps(rows[-1]), flush=True)
    result = {name: value for name, value in vars(args).items() if name not in ("json", "prompts", "page")}
    result |= {"rows": rows, "date": time.strftime("%Y-%m-%d")}
    result["machine"] = machine_name()
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if args.page:
        fill(args.page, {"lossless": lambda: page_table(rows, f"{result['machine']}, {result['date']}")})


if __name__ == "__main__":
    main()
