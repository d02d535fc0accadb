"""Measure what rounding activations does to a model's predictions: KL from activations as they are.

For comparison it measures the noise of a model that computes in bfloat16: the same products, with activations and
results rounded to bfloat16.

    python scripts/measure_activations.py TEXTS.jsonl [--model MODEL] [--gears 4,8] [--texts 12]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from gearbx_mlx import Gearbox, load
from gearbx_mlx.formats import native, planes
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.kernels.products import stack_product

TOKENS = 200  # per text


def logprobs(model, tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def in_bfloat16(x: mx.array, *arguments) -> mx.array:
    y = stack_product(x.astype(mx.bfloat16).astype(x.dtype), *arguments)
    return y.astype(mx.bfloat16).astype(x.dtype)


def ways(gearbox: Gearbox) -> Iterator[str]:
    """Make the modules compute in one way after the other, and yield its name; the exact one comes first."""
    modules = [m for m in gearbox.model.modules() if isinstance(m, native.Native)]
    for name in ("float", "int16", "int8"):
        for module in modules:
            module.x_bits = ACTIVATIONS[name]
        yield name
    for module in modules:
        module.x_bits = 0
    native.stack_product = planes.stack_product = in_bfloat16
    yield "bfloat16"
    native.stack_product = planes.stack_product = stack_product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts_file", type=Path, help="JSON lines with question and answer, or text")
    parser.add_argument("--model", help="Default: the demo model")
    parser.add_argument("--gears", default="4,8")
    parser.add_argument("--texts", type=int, default=12)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    lines = [json.loads(line) for line in args.texts_file.read_text().splitlines()[: args.texts]]
    texts = [line.get("text") or f"{line['question']}\n{line['answer']}" for line in lines]
    tokens = [tokenizer.encode(text)[:TOKENS] for text in texts]
    gearbox = Gearbox(model, f"{args.gears},16", kernels="native")
    print("| bits | activations | mean KL | 99 % | same favourite | tokens |\n| --- | --- | --- | --- | --- | --- |")
    for gear in gearbox.ladder:
        if gear.dense:
            continue
        gearbox.shift(gear)
        exact: list[mx.array] = []
        for name in ways(gearbox):
            found = [logprobs(model, text) for text in tokens]
            mx.eval(found)
            exact = exact or found
            kl = np.concatenate([np.array((mx.exp(p) * (p - q)).sum(-1)) for p, q in zip(exact, found)])
            same = np.concatenate([np.array(mx.argmax(p, -1) == mx.argmax(q, -1)) for p, q in zip(exact, found)])
            if name != "float":
                tail = np.quantile(kl, 0.99)
                print(f"| {gear.bits} | {name} | {kl.mean():.1e} | {tail:.1e} | {same.mean():.4f} | {len(kl)} |")


if __name__ == "__main__":
    main()
