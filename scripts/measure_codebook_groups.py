"""Compare groups of a codebook library along inputs, as here, and along outputs, as XFP has them (3.4).

    python scripts/measure_codebook_groups.py --results groups.json
    python scripts/measure_codebook_groups.py --model DIR --text FILE --group 64 --results groups.json

Every linear layer is replaced by its reconstruction: KL from the original in nats, relative squared error, and bits per
weight with everything that is stored. A library of groups along outputs is that of the transposed matrix. A second run
adds its model to the results; --page docs/codebook.md writes all of them.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pages import fill, table

from gearbx_mlx import load
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.bit_selection.h_process import GarbageCheck
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.formats import GROUPS, CodebookOptions, codebook, codebook_library
from gearbx_mlx.formats.codebook import nbytes
from gearbx_mlx.gears.discovery import discover

HELD_OUT = Path(__file__).parent.parent / "tests" / "data" / "gsm8k_held_out.jsonl"
TEXTS, TOKENS = 16, 160
HEAD = ["model", "groups of", "along", "bits", "effective bits", "squared error", "KL, nats"]


def texts_of(tokenizer: Any, file: Path | None) -> list[list[int]]:
    """Tokens of texts: parts of a file, or held-out problems."""
    if file is None:
        problems = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:TEXTS]]
        return [tokenizer.encode(f"Question: {p['question']}\nAnswer: {p['answer']}") for p in problems]
    tokens = tokenizer.encode(file.read_text(encoding="utf-8")[: 8 * TEXTS * TOKENS])
    return [tokens[i * TOKENS : (i + 1) * TOKENS] for i in range(TEXTS) if len(tokens) >= (i + 1) * TOKENS]


def remade(weight: mx.array, bits: int, options: CodebookOptions, along: str) -> tuple[mx.array, int]:
    """A matrix (O, I) after a library of codebooks, and the bytes that it takes."""
    matrix = weight if along == "inputs" else mx.contiguous(weight.T)
    arrays = codebook_library.encode(matrix, bits, options)
    made = codebook.decode(arrays, bits, matrix.shape[-1])
    return made if along == "inputs" else made.T, nbytes(arrays)


def measure(name: str | None, shown: str, text: Path | None, group: int) -> list[dict[str, Any]]:
    model, tokenizer = load(name) if name else load()
    check = GarbageCheck(model, texts_of(tokenizer, text), written=0)
    layers = [layer for layer in discover(model)[0] if isinstance(layer.module, nn.Linear)]
    own = [layer.module.weight for layer in layers]
    rows = []
    for bits in codebook_library.BITS:
        for along in ("inputs", "outputs"):
            off, square, size = 0.0, 0.0, 0
            for layer, weight in zip(layers, own):
                whole = weight.astype(mx.float32)
                made, stored = remade(whole, bits, CodebookOptions(group=group), along)
                off, square = off + mx.square(made - whole).sum().item(), square + mx.square(whole).sum().item()
                size, layer.module.weight = size + stored, made.astype(weight.dtype)
            effective = 8 * size / sum(weight.size for weight in own)
            found = {"bits": bits, "effective_bits": effective, "squared_error": off / square}
            rows.append({"model": shown, "group": group, "along": along} | found | {"kl": check.divergence(model)})
    return rows


def cells(row: dict[str, Any]) -> list[Any]:
    last = f"{row['effective_bits']:.3f}", f"{row['squared_error']:.5f}", f"{row['kl']:.5f}"
    return [row["model"], row["group"], row["along"], row["bits"], *last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Directory. Default: the model that ships.")
    parser.add_argument("--text", type=Path, help="Default: held-out problems.")
    parser.add_argument("--group", type=int, default=codebook_library.GROUP, choices=GROUPS)
    parser.add_argument("--results", type=Path, required=True, help="JSON file that gets the rows.")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    shown = Path(args.model).name if args.model else "demo"
    before = json.loads(args.results.read_text(encoding="utf-8"))["rows"] if args.results.exists() else []
    kept = [row for row in before if (row["model"], row["group"]) != (shown, args.group)]
    rows = kept + measure(args.model, shown, args.text, args.group)
    made = {"machine": machine_name(), "date": datetime.now(UTC).date().isoformat()}
    write_text(args.results, json.dumps(made | {"rows": rows}, indent=1) + "\n")
    found = table(HEAD, [cells(row) for row in rows])
    print(found)
    if args.page:
        fill(args.page, {"groups": lambda: found})


if __name__ == "__main__":
    main()
