"""XFP 6.1 and Table 9: right answers in three seeds, strict and flexible, by format, for docs/codebook.md.

    python scripts/measure_codebook_seeds.py DATA.jsonl --results seeds.json [--page docs/codebook.md]

The demo model writes an answer to each problem of a file in GSM8K's form, sampled at --temp, once with each seed. As in
lm-eval, *strict* compares the number after ####, *flexible* the last number of the text. Runs that `--results` has are
not made again.
"""

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from pages import fill, table

from gearbx_mlx import Gearbox, Static, load, stream_generate
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.evaluation.answers import final_number, number_finished, prompt_of
from gearbx_mlx.evaluation.text import NEXT_PROMPT, read_rows
from gearbx_mlx.files.writing import replacing

GEARS = [("original", 16), ("affine", 4), ("affine", 3), ("codebook", 4), ("codebook", 3), ("codebook-library", 4)]
SEEDS = (1, 2, 3)
LONGEST = 256  # tokens of an answer
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
Rates = dict[str, float]


def last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text.split(NEXT_PROMPT)[0])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def rates(gearbox: Gearbox, tokenizer: object, rows: Sequence[dict[str, str]], gear: str, temp: float) -> Rates:
    """The shares of right answers."""
    strict = flexible = 0
    for row in rows:
        text, sampler = "", make_sampler(temp)
        keywords = {"mode": Static(gear), "gearbox": gearbox, "sampler": sampler}
        for response in stream_generate(gearbox.model, tokenizer, prompt_of(row, []), LONGEST, **keywords):
            text += response.text
            if number_finished(text):
                break
        wanted = final_number(row["answer"])
        strict += final_number(text) == wanted
        flexible += last_number(text) == wanted
    return {"strict": strict / len(rows), "flexible": flexible / len(rows)}


def measure(rows: Sequence[dict[str, str]], file: Path, temp: float) -> dict[str, Rates]:
    """The rates of every run, by its name; those that the file has are taken from it, others written to it."""
    found: dict[str, Rates] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    with progress_bar() as progress:
        for format, bits in progress.track(GEARS, description="gears"):
            model, tokenizer = load()
            ladder, stored = ("4,16", "planes") if format == "original" else (f"{bits},16", format)
            gearbox = Gearbox(model, ladder, format=stored, kernels="native")
            for seed in SEEDS:
                name = f"{format} {bits}, seed {seed}, temp {temp}, {len(rows)} problems"
                if name not in found:
                    mx.random.seed(seed)
                    found[name] = rates(gearbox, tokenizer, rows, "high" if bits == 16 else "low", temp)
                    with replacing(file) as beside:
                        beside.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def seeds_table(found: dict[str, Rates], temp: float, problems: int) -> str:
    lines = []
    for format, bits in GEARS:
        runs = [found[f"{format} {bits}, seed {seed}, temp {temp}, {problems} problems"] for seed in SEEDS]
        cells = []
        for how in ("strict", "flexible"):
            values = [100 * run[how] for run in runs]
            cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        lines.append([format, bits, *cells])
    return table(["weights", "bits", "strict, %", "flexible, %"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Problems, JSON Lines with question and answer.")
    parser.add_argument("--results", type=Path, required=True, help="File that keeps the runs.")
    parser.add_argument("--temp", type=float, default=0.7, help="Default: 0.7")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    rows = read_rows(args.data, ("question", "answer"))
    found = seeds_table(measure(rows, args.results, args.temp), args.temp, len(rows))
    print(found)
    if args.page:
        fill(args.page, {"seeds": lambda: found})


if __name__ == "__main__":
    main()
