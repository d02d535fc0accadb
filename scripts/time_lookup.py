"""Measure what prompt lookup and costs in time save in lossless mode, for docs/lossless.md.

    python scripts/time_lookup.py --prompts gsm8k_test.jsonl scripts/tales.txt --num-prompts 40 10 --json lookup.json

The demo model answers the prompts, and then prompts that make it repeat itself: a prompt, the model's own answer, and
the prompt again. For every prompt in turn, the top gear alone writes the text, and then lossless mode with costs in
bytes and in time, without lookup and with it. The time of the prompt does not count.
"""

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx_lm
from measure_lossless import encode
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.cli.prompts import read_prompts

MODES = {
    f"{cost}, {name}": Lossless(cost=cost, lookup_tokens=most, draft_ahead=0)
    for cost in ("bytes", "time")
    for name, most in (("no lookup", 0), ("lookup", 15))
}
ALONE = "top gear alone"


@dataclass
class Counted:
    """The sums over all texts. ratios: for each text, the time of the top gear alone over that of this mode."""

    tokens: int = 0
    verifications: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    looked_up: int = 0
    lookup_accepted: int = 0
    weight_bytes: int = 0
    identical: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def add(self, responses):
        for response in responses:
            self.tokens += 1
            self.verifications += response.passes[-1]
            self.drafted += response.drafted
            self.draft_accepted += response.source == "draft"
            self.looked_up += response.looked_up
            self.lookup_accepted += response.source == "lookup"
            self.weight_bytes += response.weight_bytes


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", help="Files: one per line, or JSON Lines as of GSM8K.")
    parser.add_argument("--num-prompts", type=int, nargs="+", help="Of each file. Default: all")
    parser.add_argument("--num-repeated", type=int, default=20, help="Prompts that are repeated.")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--gears", default="3,16")
    parser.add_argument("--format", default="exact")
    parser.add_argument("--json", help="File to write.")
    return parser.parse_args()


def timed(responses):
    """The responses, and the seconds after the first of them: on the wall, and of the processor."""
    found, begun = [], (0.0, 0.0)
    for response in responses:
        if not found:
            begun = time.perf_counter(), time.process_time()
        found.append(response)
    return found, time.perf_counter() - begun[0], time.process_time() - begun[1]


def compare(gearbox, tokenizer, prompts, max_tokens, label):
    """Mode to what it counted, and the texts of the top gear alone."""
    counted, texts = {name: Counted() for name in (ALONE, *MODES)}, []
    for prompt in track(prompts, label):
        gearbox.shift(gearbox.ladder.top)
        run, alone, cpu = timed(mlx_lm.stream_generate(gearbox.model, tokenizer, prompt, max_tokens))
        texts.append([response.token for response in run])
        counted[ALONE].seconds += alone
        counted[ALONE].cpu_seconds += cpu
        for name, mode in MODES.items():
            responses = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, gearbox=gearbox, mode=mode)
            run, seconds, cpu = timed(responses)
            one = counted[name]
            one.add(run)
            one.seconds += seconds
            one.cpu_seconds += cpu
            one.identical += [response.token for response in run] == texts[-1]
            one.ratios.append(alone / seconds)
    return counted, texts


def summed_up(counted, gearbox):
    """Mode to its figures; those of the mode relative to the top gear alone."""
    top, alone = gearbox.weight_bytes_per_token(gearbox.ladder.top), counted[ALONE]
    return {
        name: {key: value for key, value in vars(one).items() if key != "ratios"}
        | {
            "texts": len(one.ratios),
            "passes_per_token": (one.verifications + one.drafted) / one.tokens,
            "verifications_per_token": one.verifications / one.tokens,
            "weight_bytes_per_token": one.weight_bytes / one.tokens,
            "times_fewer_bytes": top * one.tokens / one.weight_bytes,
            "times_as_fast": alone.seconds / one.seconds,
            "times_as_fast_median": statistics.median(one.ratios),
            "times_less_cpu": alone.cpu_seconds / one.cpu_seconds,
        }
        for name, one in counted.items()
        if name != ALONE
    }


def table(results):
    """The figures as a table in Markdown."""
    titles = ("prompts", "costs, lookup", "identical", "passes per token", "times fewer bytes", "drafted (accepted)")
    titles += ("looked up (accepted)", "times as fast", "median", "times less CPU")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for prompts, modes in results.items():
        for name, one in modes.items():
            cells = [prompts, name, f"{one['identical']} of {one['texts']}", f"{one['passes_per_token']:.2f}"]
            cells += [f"{one['times_fewer_bytes']:.2f}", f"{one['drafted']} ({one['draft_accepted']})"]
            cells += [f"{one['looked_up']} ({one['lookup_accepted']})", f"{one['times_as_fast']:.2f}"]
            cells += [f"{one['times_as_fast_median']:.2f}", f"{one['times_less_cpu']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    args = parse_arguments()
    model, tokenizer = load()
    gearbox = Gearbox(model, args.gears, format=args.format, kernels="native")
    counts = args.num_prompts or [None] * len(args.prompts)
    texts = [read_prompts(Path(file))[:count] for file, count in zip(args.prompts, counts, strict=True)]
    prompts = [list(encode(tokenizer, text)) for text in itertools.chain(*texts)]
    for mode in MODES.values():  # a warm-up
        list(stream_generate(model, tokenizer, prompts[0], 8, gearbox=gearbox, mode=mode))
    plain, answers = compare(gearbox, tokenizer, prompts, args.max_tokens, "prompts")
    repeated = [prompt + answer + prompt for prompt, answer in zip(prompts, answers)][: args.num_repeated]
    again, _ = compare(gearbox, tokenizer, repeated, args.max_tokens, "repeated prompts")
    results = {"text": summed_up(plain, gearbox), "repeated": summed_up(again, gearbox)}
    about = {
        "gears": args.gears,
        "format": args.format,
        "max_tokens": args.max_tokens,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(about | results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
