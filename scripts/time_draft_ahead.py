"""Measure what it costs to queue steps of a draft ahead in lossless mode, for docs/lossless.md.

    python scripts/time_draft_ahead.py --prompts scripts/tales.txt --num-prompts 10 --json ahead.json

The demo model writes the text of every prompt at every depth in turn, and each text is compared with that of depth 0. A
random Llama drafts 8 tokens and verifies them, at every depth in turn: its own entropies would end every draft at once.
Ratios are of the same prompt or trial; the first and the last quarter of them are left out of their range.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from measure_lossless import encode
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.benchmark.decode import random_llama
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.draft_trials import round_times

DEPTHS = (0, 1, 2, 4)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="One per line.")
    parser.add_argument("--num-prompts", type=int, help="Default: all")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shape", default="512x8", help="Of the random Llama: WIDTHxLAYERS.")
    parser.add_argument("--trials", type=int, default=30, help="Of the random Llama.")
    parser.add_argument("--json", help="File to write.")
    return parser.parse_args()


def written(gearbox, tokenizer, prompt, max_tokens, depth):
    """Tokens, steps thrown away, and seconds after the first token."""
    mode = Lossless(cost="bytes", lookup_tokens=0, draft_ahead=depth)
    run = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, gearbox=gearbox, mode=mode)
    responses, begun = [next(run)], time.perf_counter()
    responses += run
    seconds = time.perf_counter() - begun
    return [r.token for r in responses], sum(r.discarded for r in responses), seconds


def time_texts(args):
    """Of the demo model, by depth: steps thrown away per token, and the seconds of each text."""
    model, tokenizer = load()
    gearbox = Gearbox(model, "3,16", format="exact", kernels="native")
    prompts = [list(encode(tokenizer, text)) for text in read_prompts(Path(args.prompts))[: args.num_prompts]]
    for depth in DEPTHS:  # a warm-up
        written(gearbox, tokenizer, prompts[0], 8, depth)
    seconds, discarded, tokens = {depth: [] for depth in DEPTHS}, dict.fromkeys(DEPTHS, 0), 0
    for prompt in track(prompts, "prompts"):
        texts = []
        for depth in DEPTHS:
            text, thrown, spent = written(gearbox, tokenizer, prompt, args.max_tokens, depth)
            texts.append(text)
            seconds[depth].append(spent)
            discarded[depth] += thrown
        assert all(text == texts[0] for text in texts)
        tokens += len(texts[0])
    return {depth: discarded[depth] / tokens for depth in DEPTHS}, seconds


def speeds(seconds):
    """By depth, how many times as fast as depth 0: median, and the middle half of the ratios."""
    found = {depth: np.divide(seconds[0], spent) for depth, spent in seconds.items()}
    return {depth: np.percentile(ratios, (50, 25, 75)).tolist() for depth, ratios in found.items()}


def main():
    args = parse_arguments()
    discarded, seconds = time_texts(args)
    gearbox = Gearbox(random_llama(args.shape), "4,16", kernels="native")
    of_llama = speeds(round_times(gearbox, gearbox.ladder[0], 256, args.trials, depths=DEPTHS))
    of_demo = speeds(seconds)
    print("| queued ahead | thrown away per token | demo model | random Llama |\n| --- | --- | --- | --- |")
    for depth in DEPTHS:
        cells = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in (of_demo[depth], of_llama[depth])]
        print(f"| {depth} | {discarded[depth]:.2f} | {cells[0]} | {cells[1]} |")
    if args.json:
        about = {"date": time.strftime("%Y-%m-%d"), "max_tokens": args.max_tokens, "shape": args.shape}
        results = {"discarded_per_token": discarded, "demo": of_demo, "random_llama": of_llama}
        Path(args.json).write_text(json.dumps(about | results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
