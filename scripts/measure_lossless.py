"""Measure what lossless mode saves, and that it loses nothing, for docs/evidence.md.

    python scripts/measure_lossless.py --prompts gsm8k_test.jsonl --json lossless.json
    python scripts/measure_lossless.py --model stories260K --q-group-size 32 --prompts scripts/tales.txt \
        --calibrate scripts/tales_calibrate.txt --top 16

For each prompt, mlx-lm writes a text in the top gear alone, and lossless mode writes it with the curve and with fixed
draft lengths. The script compares the texts token for token and counts the bytes of weights that a token reads. Then it
does the same with mlx-lm's own speculative decoding, where the draft model is a copy of the model in the draft gear.
With --draws it tests whether lossless mode samples from the top gear's distribution.
"""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from rich.progress import track

from gearbx_mlx import Gearbox, Ladder, Monitor, load
from gearbx_mlx.cli.prompts import read_prompts
from gearbx_mlx.decoding.draft_plans import find_rule, read_draft_file
from gearbx_mlx.decoding.lossless_model import LosslessModel
from gearbx_mlx.decoding.wrapper import ModelWrapper, stream_wrapped
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.routing.acceptance import MOST_DRAFTED, FixedLength

EXPECTED_LEAST = 5  # expected draws in a cell of the chi-square test; rarer outcomes share one cell


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Directory. Default: the demo model.")
    parser.add_argument("--prompts", required=True, help="One per line, or JSON Lines such as GSM8K's.")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument(
        "--num-compared",
        type=int,
        help="Compare the curve with its rivals on the first N prompts only. Default: all",
        metavar="N",
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--gears", help="Default: what --calibrate finds best; without it 4,8,16")
    parser.add_argument("--top", default="16", choices=["8", "16"], help="Bits, for --calibrate without --gears.")
    parser.add_argument("--q-group-size", type=int, default=64)
    parser.add_argument("--format", default="planes", help="How gears are stored.")
    parser.add_argument("--kernels", default="native")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="float")
    parser.add_argument("--curve", help="Drafting file. Default: the one that ships for the model.")
    parser.add_argument("--calibrate", metavar="PROMPTS", help="Calibrate on these prompts first, and use the result.")
    parser.add_argument("--lengths", default=",".join(map(str, range(1, MOST_DRAFTED + 1))))
    parser.add_argument("--speculative", default="2,4,6", help="Draft lengths of mlx-lm's own speculative decoding.")
    parser.add_argument(
        "--draws", type=int, default=0, help="Draw two tokens N times on each of ten prompts.", metavar="N"
    )
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--json", help="File to write.")
    return parser.parse_args()


def encode(tokenizer, prompt):
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def calibrated(args):
    """Calibrate as a user does. Returns the path of the drafting file."""
    file = Path(tempfile.mkdtemp()) / "drafting.json"
    command = [sys.executable, "-m", "gearbx_mlx.calibrate", "--mode", "lossless", "--prompts", args.calibrate]
    command += ["--gears", args.gears] if args.gears else ["--top", args.top]
    command += ["--q-group-size", str(args.q_group_size), "--kernels", args.kernels, "--format", args.format]
    command += ["--activations", args.activations, "--max-tokens", str(args.max_tokens), "--out", str(file)]
    subprocess.run(command + (["--model", args.model] if args.model else []), check=True, stdout=sys.stderr)
    return str(file)


def run_lossless(gearbox, tokenizer, prompts, texts, max_tokens, rule, draft, label):
    """What lossless mode reads and drafts, and how many of its texts are the top gear's."""
    monitor = Monitor(vocabulary(gearbox.model))
    read = tokens = drafted = accepted = verifications = identical = near_ties = 0
    for prompt, text in zip(track(prompts, label), texts):
        model = LosslessModel(
            gearbox,
            rule,
            draft=draft,
            stop_tokens=tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
        )
        responses = list(stream_wrapped(model, tokenizer, prompt, monitor=monitor, max_tokens=max_tokens))
        identical += [r.token for r in responses] == text
        tokens += len(responses)
        read += sum(r.weight_bytes for r in responses)
        drafted += sum(r.drafted for r in responses)
        accepted += sum(r.from_draft for r in responses)
        verifications += sum(r.passes[-1] for r in responses)
        near_ties += sum(r.near_tie for r in responses)
    top = gearbox.weight_bytes_per_token(gearbox.ladder.top)
    return {
        "identical": identical,
        "texts": len(texts),
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "verifications": verifications,
        "tokens_per_verification": tokens / verifications,
        "near_ties": near_ties,
        "weight_bytes_per_token": read / tokens,
        "times_fewer_bytes": top * tokens / read,
        "times_fewer_bytes_than_original": gearbox.original_bytes_per_token() * tokens / read,
    }


class Counted(ModelWrapper):
    """A model that stays in one gear and counts its passes after the prompt."""

    def __init__(self, gearbox, gear):
        super().__init__(gearbox)
        self.gear = gearbox.ladder.find(gear)
        self.count = 0
        self.after = 0

    def __call__(self, inputs, cache=None, **kwargs):
        self.count += cache[0].offset >= self.after
        return self.run(self.gear, inputs, cache, **kwargs)


def run_speculative(gearbox, drafting_gearbox, draft_bits, tokenizer, prompts, texts, max_tokens, length):
    """mlx-lm's speculative decoding, whose draft model is a copy of the model in the draft gear."""
    top, low = gearbox.ladder.top, drafting_gearbox.ladder.find(draft_bits)
    read = tokens = identical = 0
    for prompt, text in zip(track(prompts, f"mlx-lm speculative, {length}"), texts):
        model, draft = Counted(gearbox, top), Counted(drafting_gearbox, low)
        model.after = draft.after = len(prompt) - 1
        run = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens, draft_model=draft, num_draft_tokens=length)
        out = [response.token for response in run]
        identical += out == text
        tokens += len(out)
        read += model.count * gearbox.weight_bytes_per_token(top)
        read += draft.count * drafting_gearbox.weight_bytes_per_token(low)
    return {
        "identical": identical,
        "weight_bytes_per_token": read / tokens,
        "times_fewer_bytes": gearbox.weight_bytes_per_token(top) * tokens / read,
    }


def chi_square(counts, expected, draws):
    """Compare counts of outcomes with their probabilities. The p-value is Wilson and Hilferty's approximation."""
    common = {outcome: p * draws for outcome, p in expected.items() if p * draws >= EXPECTED_LEAST}
    rest = draws - sum(common.values())
    cells = [(counts.get(outcome, 0), e) for outcome, e in common.items()]
    if rest >= EXPECTED_LEAST:
        cells.append((draws - sum(count for count, _ in cells), rest))
    freedom = len(cells) - 1
    if freedom < 1:
        return None
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return {"statistic": statistic, "freedom": freedom, "p": 1 - statistics.NormalDist().cdf(z)}


def probabilities(logits, temp):
    return mx.softmax(logits.astype(mx.float32) / temp, axis=-1)


def draw_pairs(gearbox, prompt, rule, draft, temp, draws, label):
    """Draw the next two tokens in lossless mode, and compare them with the top gear's own probabilities."""
    model, sampler = gearbox.model, make_sampler(temp)
    gearbox.shift(gearbox.ladder.top)
    begun = make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=begun)
    last = mx.array([[prompt[-1]]])
    first = probabilities(model(last, cache=copy.deepcopy(begun))[0, -1], temp)
    order = mx.argsort(-first)[:64].tolist()
    expected = {}
    for token in order:  # only pairs that are likely enough for a cell of their own
        share = first[token].item()
        if share * draws < EXPECTED_LEAST:
            break
        cache = copy.deepcopy(begun)
        model(last, cache=cache)
        second = probabilities(model(mx.array([[token]]), cache=cache)[0, -1], temp)
        for other in mx.argsort(-second)[:64].tolist():
            expected[token, other] = share * second[other].item()
    counts = Counter()
    for seed in track(range(draws), label):
        mx.random.seed(1_000_003 * seed + len(prompt))
        geared = LosslessModel(gearbox, rule, draft=draft, sampler=sampler, max_tokens=2, prompt_tokens=1)
        cache, token, drawn = copy.deepcopy(begun), last, []
        for _ in range(2):
            logits = geared(token, cache=cache)[:, -1]
            token = sampler(logits - mx.logsumexp(logits, keepdims=True))[None]
            drawn.append(token.item())
        counts[tuple(drawn)] += 1
    return chi_square(counts, expected, draws)


def compare_lengths(args, gearbox, tokenizer, prompts, texts, rule, draft):
    """The rule and fixed lengths of draft on the same prompts, in the same draft gear; nothing without --lengths."""
    lengths = list(map(int, filter(None, args.lengths.split(","))))
    rules = {"curve": rule, **{length: FixedLength(length) for length in lengths}}
    compared = {
        name: run_lossless(gearbox, tokenizer, prompts, texts, args.max_tokens, other, draft, f"compared: {name}")
        for name, other in rules.items()
        if lengths
    }
    result = {"compared": compared.pop("curve", None), "fixed": compared}
    if compared:
        result["best_fixed"] = min(compared, key=lambda length: compared[length]["weight_bytes_per_token"])
    return result


def compare_speculative(args, gearbox, ladder, settings, draft, tokenizer, prompts, texts):
    """mlx-lm's own speculative decoding with a second copy of the model in the draft gear, by length of draft."""
    second = Gearbox(load(args.model)[0], ladder, **settings)
    return {
        length: run_speculative(gearbox, second, draft.bits, tokenizer, prompts, texts, args.max_tokens, length)
        for length in map(int, args.speculative.split(","))
    }


def main():
    args = parse_arguments()
    curve = calibrated(args) if args.calibrate else args.curve
    made = read_draft_file(curve) if curve else None
    ladder = Ladder(made.gears) if made else Ladder.parse(args.gears or "4,8,16")
    settings = {"kernels": args.kernels, "activations": args.activations, "group_size": args.q_group_size}
    settings["format"] = args.format
    model, tokenizer = load(args.model)
    gearbox = Gearbox(model, ladder, **settings)
    top = gearbox.ladder.top
    rule, draft = find_rule(gearbox, curve)
    draft = gearbox.ladder.find(draft) if draft else gearbox.ladder[0]
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(Path(args.prompts))[: args.num_prompts]]
    gearbox.shift(top)
    texts = []
    for prompt in track(prompts, "the top gear alone"):
        texts.append([r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, args.max_tokens)])
    result = {
        "model": args.model or "demo",
        "gears": [gear.bits for gear in ladder],
        "draft_bits": draft.bits,
        "format": args.format,
        "kernels": args.kernels,
        "activations": args.activations,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "date": time.strftime("%Y-%m-%d"),
        "weight_bytes_top": gearbox.weight_bytes_per_token(top),
        "weight_bytes_draft": gearbox.weight_bytes_per_token(draft),
        "bound": getattr(rule, "bound", None),
        "drafting": json.loads(made.text()) if made else None,
        "curve": run_lossless(gearbox, tokenizer, prompts, texts, args.max_tokens, rule, draft, "lossless"),
    }
    prompts, texts = prompts[: args.num_compared], texts[: args.num_compared]
    result |= compare_lengths(args, gearbox, tokenizer, prompts, texts, rule, draft)
    if args.speculative:
        speculative = compare_speculative(args, gearbox, ladder, settings, draft, tokenizer, prompts, texts)
        result["mlx_lm_speculative"] = speculative
    if args.draws:
        result["chi_square"] = [
            draw_pairs(gearbox, prompt, rule, draft, args.temp, args.draws, f"draws, prompt {number}")
            for number, prompt in enumerate(prompts[:10], 1)
        ]
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if args.json:
        Path(args.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
