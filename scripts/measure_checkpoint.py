"""Convert a random model, load the result, and print the figures for docs/performance.md.

It compares the peak memory of the conversion with the sizes of the output and of the largest layer. It compares the
speed of loading gears with that of reading the same files from beginning to end, from the page cache and from the disk.

    python scripts/measure_checkpoint.py --hidden 2048 --layers 6 --folder /tmp        (Linux)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

import gearbx_mlx
from gearbx_mlx.loading import DEMO_MODEL

BLOCK = 1 << 24
PEAK = """
import atexit, runpy
atexit.register(lambda: print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))))
runpy.run_module("gearbx_mlx.convert", run_name="__main__")
"""


def random_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a Llama of random bfloat16 weights, whose largest layer is the head. Returns its directory."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        rms_norm_eps=1e-5,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    path = folder / "original"
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in vars(args).items() if value is not None})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return path


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop(files: list[Path]) -> None:
    """Remove files from the page cache."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> None:
    block = bytearray(BLOCK)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def load(path: Path, gears: list[str]) -> None:
    model, _ = gearbx_mlx.load(path)
    gearbox = gearbx_mlx.Gearbox(model, kernels="native")
    for gear in gears:
        gearbox.shift(gear)
    mx.eval(model.parameters())


def fill(files: list[Path]) -> None:
    """Have MLX read all arrays, and do nothing with them."""
    mx.eval([mx.load(str(file)) for file in files])


def report(path: Path, files: list[Path], gears: list[str], cold: bool, trials: int) -> None:
    works = {"read": lambda: read(files), "fill": lambda: fill(files), "load": lambda: load(path, gears)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(trials):
        for name, work in works.items():
            (drop if cold else read)(files)
            seconds[name].append(timed(work))
            mx.clear_cache()
    size = sum(file.stat().st_size for file in files) / 1e9
    rates = {name: size / statistics.median(spent) for name, spent in seconds.items()}
    lines = [
        f"{' and '.join(gears)}, {'disk' if cold else 'page cache'}: {size:.2f} GB loaded at {rates['load']:.2f} GB/s"
    ]
    for name, meaning in (("read", "over one buffer"), ("fill", "them with mx.load")):
        ratios = [other / spent for other, spent in zip(seconds[name], seconds["load"])]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"{statistics.median(ratios):.2f} ({spread}) of reading {meaning}, {rates[name]:.2f} GB/s")
    print("; ".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--gears", default="4,8,16")
    parser.add_argument("--folder", help="Where to write some gigabytes. Default: the system's temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source, out = random_model(folder, args.hidden, args.layers), folder / "geared"
        shipped = [sys.executable, "-c", PEAK, "--mlx-path", folder / "small"]
        command = [sys.executable, "-c", PEAK, "--model", source, "--mlx-path", out, "--embeddings", "keep"]
        idle, peak = (
            int(subprocess.run(c, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]) * 1024 / 1e9
            for c in (shipped, [*command, "--gears", args.gears])
        )
        base, gears = out / "model.safetensors", out / "gears.safetensors"
        size = sum(file.stat().st_size for file in (base, gears)) / 1e9
        layer = 32000 * args.hidden * 2 / 1e9
        print(
            "conversion: "
            f"peak {peak:.2f} GB, {idle:.2f} GB for the demo model; output {size:.2f} GB, head {layer:.2f} GB"
        )
        for cold in (False, True):
            report(out, [base], ["low"], cold, args.trials)
            report(
                out, [base, gears], ["low", *(["mid"] if args.gears.count(",") > 1 else []), "high"], cold, args.trials
            )


if __name__ == "__main__":
    main()
