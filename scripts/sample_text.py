"""Sample texts from a model, as JSON Lines, where the text that it was trained on is not at hand.

    python scripts/sample_text.py MODEL --prompt "Once upon a time" --out own.jsonl

The texts are sampled at temperature 1 in full precision. So along them the model is exactly as sure as its own
distribution says.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from gearbx_mlx import Gearbox, generate, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="Directory or Hub repository.")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    mx.random.seed(args.seed)
    model, tokenizer = load(args.model)
    gearbox = Gearbox(model, "16")
    sampler = make_sampler(1.0)
    with args.out.open("w", encoding="utf-8") as file:
        for _ in range(args.texts):
            written = generate(
                model, tokenizer, args.prompt, gearbox=gearbox, max_tokens=args.max_tokens, sampler=sampler
            )
            file.write(json.dumps({"text": args.prompt + written}) + "\n")


if __name__ == "__main__":
    main()
