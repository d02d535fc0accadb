"""XFP's Appendix C: whether four experts choose the bits that all experts choose, for docs/codebook.md.

    python scripts/measure_expert_sample.py mixture [--page docs/codebook.md]

For every stack of routed experts of a model and every floor: the fewest bits whose median cosine reaches the floor,
judged by four evenly spaced experts and by all.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear
from pages import fill, table

from gearbx_mlx import load
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.codebook_quality import EXPERTS_JUDGED, Quality, qualities
from gearbx_mlx.gears.ladder import DENSE

FLOORS = (0.88, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
FORMATS = ("codebook", "codebook-library")


def bits_for(found: Sequence[Quality], floor: float) -> int:
    return next((quality.bits for quality in found if quality.cosine >= floor), DENSE)


def compared(weights: Sequence[mx.array], name: str) -> list[list[str]]:
    """A row for each floor: stacks, those that differ, and the largest difference between the two cosines."""
    format = get_format(name)
    some = [list(qualities(format, weight)) for weight in weights]
    every = [list(qualities(format, weight, len(weight))) for weight in weights]
    off = max(abs(a.cosine - b.cosine) for s, e in zip(some, every) for a, b in zip(s, e))
    rows = []
    for floor in FLOORS:
        pairs = [(bits_for(s, floor), bits_for(e, floor)) for s, e in zip(some, every)]
        under, over = sum(s < e for s, e in pairs), sum(s > e for s, e in pairs)
        chosen = ", ".join(str(bits) for bits in sorted({e for _, e in pairs}))
        rows.append([name, str(floor), chosen, f"{under + over} of {len(pairs)}", str(under), str(over), f"{off:.4f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Folder of a mixture of experts, such as train_mixture.py writes.")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    model, _ = load(args.model)
    weights = [module.weight for _, module in model.named_modules() if isinstance(module, SwitchLinear)]
    if not weights:
        raise SystemExit(f"{args.model} has no routed experts; give a mixture")
    print(f"{len(weights)} stacks of {len(weights[0])} experts, {EXPERTS_JUDGED} of them judged")
    head = ["format", "floor", "bits, by all", "other bits", "too few", "too many", "cosines differ by at most"]
    found = table(head, [row for format in FORMATS for row in compared(weights, format)])
    print(found)
    if args.page:
        fill(args.page, {"expert_sample": lambda: found})


if __name__ == "__main__":
    main()
