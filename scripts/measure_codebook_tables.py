"""Measure XFP's tables of weights on a model: A.1 or A.2, B.1 and the break-even of 7.2, for docs/codebook.md.

python scripts/measure_codebook_tables.py --results tables.json --page docs/codebook.md
python scripts/measure_codebook_tables.py --model mixture --second --results second.json --page docs/codebook.md
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from pages import fill, table

from gearbx_mlx import load
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.bit_selection.codebook_selection import kind_of
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.formats import CodebookOptions, codebook, get_format
from gearbx_mlx.formats.codebook import Codebook, nbytes
from gearbx_mlx.formats.codebook_fitting import DEFAULTS, OUTLIER_SIZE
from gearbx_mlx.formats.codebook_quality import Quality, compare, qualities
from gearbx_mlx.gears.discovery import discover

BITS = 3  # XFP's tables are of 3 bits
XFP_OUTLIER = 18  # bytes
XFP_BITS = {3: 32 / 10, 4: 32 / 8}  # per weight: codes in words of table 3.3


def measured(weight: mx.array) -> dict[str, float]:
    """A matrix (O, I): its quality at 3 bits with and without outliers, and its tails."""
    found: Quality = next(q for q in qualities(Codebook(), weight) if q.bits == BITS)
    far = mx.abs(weight.astype(mx.float32) - weight.astype(mx.float32).mean())
    sigma = mx.sqrt(mx.square(far).mean()).item()
    return {
        "bulk": found.bulk_cosine,
        "cosine": found.cosine,
        "ratio": found.bulk_error / max(found.error, 1e-12),
        "beyond": (far > 3 * sigma).mean().item(),
        "max": far.max().item(),
        "max_sigmas": far.max().item() / sigma,
    }


def component_row(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """A row of tables A.1 and B.1, over the layers of a component."""
    gains = [one["cosine"] - one["bulk"] for one in found]
    ratios = [one["ratio"] for one in found]
    return {
        "type": name,
        "layers": len(found),
        "cos_bulk": float(np.mean([one["bulk"] for one in found])),
        "cos_outlier": float(np.mean([one["cosine"] for one in found])),
        "gain_mean": float(np.mean(gains)),
        "gain_max": float(np.max(gains)),
        "ratio_p50": float(np.percentile(ratios, 50)),
        "ratio_p90": float(np.percentile(ratios, 90)),
        "beyond": float(np.mean([one["beyond"] for one in found])),
        "max": max(one["max"] for one in found),
        "max_sigmas": max(one["max_sigmas"] for one in found),
    }


def break_even(bits_low: float, bits_high: float, outlier: int) -> float:
    """The share of outliers at which fewer bits are as large as more bits with a share of 2 % (XFP 7.2)."""
    return DEFAULTS.cap + (bits_high - bits_low) / (8 * outlier)


def break_even_rows(weights: Iterable[mx.array]) -> list[dict[str, Any]]:
    """At the break-even of this format: 3 bits with more outliers beside 4 bits, over all matrices."""
    weights = list(weights)
    wide = sum(weight.shape[0] for weight in weights) / sum(weight.size for weight in weights)  # rows per weight
    sizes = {bits: XFP_BITS[bits] + 16 * 2**bits * wide for bits in XFP_BITS}
    rows = []
    for format in ("codebook", "codebook-library"):
        module = get_format(format)
        low, high = (sizes[3], sizes[4]) if format == "codebook" else (3.0, 4.0)
        share = break_even(low, high, OUTLIER_SIZE)
        for bits, options in ((4, DEFAULTS), (3, DEFAULTS), (3, CodebookOptions(sigma=1.0, cap=share))):
            rows.append(whole_row(type(module)(options=options), bits, weights))
    return rows


def whole_row(format: Any, bits: int, weights: list[mx.array]) -> dict[str, Any]:
    """Bits per weight, squared error and median cosine of a format over matrices."""
    size = off = square = 0.0
    cosines, counted = [], sum(weight.size for weight in weights)
    for weight in weights:
        arrays = format.encode(weight, bits)
        made = codebook.decode(arrays, bits, weight.shape[-1])
        whole = weight.astype(mx.float32)
        size, off = size + nbytes(arrays), off + mx.square(made - whole).sum().item()
        square += mx.square(whole).sum().item()
        cosines.append(compare(whole, made).cosine())
    found = {"effective_bits": 8 * size / counted, "squared_error": off / square}
    return {"format": format.name, "bits": bits} | found | {"cosine": float(np.median(cosines))}


def measure(name: str | None) -> dict[str, Any]:
    model, _ = load(name) if name else load()
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    layers, _ = discover(model, format=Codebook())
    for layer in layers:
        parts[f"{kind_of(layer.path, layer.module)} {layer.path.split('.')[-1]}"].append(measured(layer.module.weight))
    components = [component_row(part, found) for part, found in parts.items()]
    return {
        "machine": machine_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "components": sorted(components, key=lambda row: -row["gain_mean"]),
        "xfp_break_even": break_even(XFP_BITS[3], XFP_BITS[4], XFP_OUTLIER),
        "break_even": break_even_rows(layer.module.weight for layer in layers if layer.module.weight.ndim == 2),
    }


def tables(found: dict[str, Any]) -> dict[str, str]:
    quality = [
        [
            *(row["type"], row["layers"], f"{row['cos_bulk']:.5f}", f"{row['cos_outlier']:.5f}"),
            *(
                f"{row['gain_mean']:+.5f}",
                f"{row['gain_max']:+.5f}",
                f"{row['ratio_p50']:.2f}",
                f"{row['ratio_p90']:.2f}",
            ),
        ]
        for row in found["components"]
    ]
    tails = [
        [row["type"], f"{row['beyond']:.2%}", f"{row['max']:.2f} ({row['max_sigmas']:.0f} sigma)"]
        for row in found["components"]
    ]
    even = [
        [f"`{r['format']}`", r["bits"], f"{r['effective_bits']:.3f}", f"{r['squared_error']:.5f}", f"{r['cosine']:.4f}"]
        for r in found["break_even"]
    ]
    head = ["type", "layers", "cos bulk", "cos outlier", "gain mean", "gain max", "MSE p50", "MSE p90"]
    share = f"With 18 bytes for an outlier, as in XFP: {found['xfp_break_even']:.2%} outliers.\n\n"
    return {
        "table_a1": table(head, quality),
        "table_b1": table(["component", "beyond 3 sigma", "max"], tails),
        "break_even": share + table(["format", "bits", "effective bits", "squared error", "cosine"], even),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Directory. Default: the model that ships.")
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write.")
    parser.add_argument("--second", action="store_true", help="Write table A.2, of a second model, and no other one.")
    parser.add_argument("--page", type=Path, help="Page whose tables are written as well.")
    args = parser.parse_args()
    found = measure(args.model)
    write_text(args.results, json.dumps(found, indent=1) + "\n")
    made = tables(found)
    if args.second:
        made = {"table_a2": made["table_a1"]}
    for name, text in made.items():
        print(f"{name}\n{text}\n")
    if args.page:
        fill(args.page, {name: lambda text=text: text for name, text in made.items()})


if __name__ == "__main__":
    main()
