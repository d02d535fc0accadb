"""Time how long a random Llama's kernels take to be chosen: at a first start, and at a second one (docs/formats.md).

    python scripts/time_tuner.py --shape 1024x32

Both start with the same empty cache, in a directory that is removed afterwards. A choice is compared with the best
candidate of the same measurement.
"""

import argparse
import tempfile
from pathlib import Path

from gearbx_mlx import Gearbox
from gearbx_mlx.benchmark.decode import random_llama
from gearbx_mlx.gears.kernel_choices import measure_gears
from gearbx_mlx.kernels import cpu, tuner
from gearbx_mlx.kernels.tuner import Tuner


def tuner_after_start(shape: str, gears: str) -> Tuner:
    """The tuner of a model whose gears have all been engaged once."""
    gearbox = Gearbox(random_llama(shape), gears, kernels="auto")
    measure_gears(gearbox)
    return gearbox.kernel_choices.tuner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024x32", help="Of the random Llama: WIDTHxLAYERS.")
    parser.add_argument("--gears", default="4,8,16")
    args = parser.parse_args()
    cpu.native()  # in the user's own cache
    with tempfile.TemporaryDirectory() as folder:
        tuner.platformdirs.user_cache_path = lambda *_, **__: Path(folder)
        first, second = (tuner_after_start(args.shape, args.gears) for _ in range(2))
    off = [times[chosen] / min(times.values()) - 1 for chosen, times in first.used.values()]
    print(f"{first.cache.machine}\n{args.shape}, gears {args.gears}: {len(first.used)} kinds of products")
    print(f"measured in {first.seconds:.2f} s, at the second start in {second.seconds:.2f} s")
    print(f"the worst choice takes {max(off):.1%} longer than the best candidate")


if __name__ == "__main__":
    main()
