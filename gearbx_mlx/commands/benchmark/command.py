"""python -m gearbx_mlx.benchmark: kernels against the read bandwidth, gears against MLX, routing against none.

Trials go through everything that is compared in turn, after one that is not counted, so that what else the machine is
doing meets all alike. Ratios within a run can be compared; times of different runs cannot.
"""

import argparse
import platform
import statistics
from typing import Any

from rich import box
from rich.console import Console

from ...cli import terminal
from ...files.writing import write_text
from ...telemetry.summary import as_json

TABLES = {
    "kernels": ("format", "bits", "path", "seconds", "gigabytes_per_second", "bandwidth_ratio", "spread"),
    "decode": (
        *("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "weight_bytes_per_token"),
        *("speedup", "predicted_speedup", "roofline_share", "break_even_tokens"),
    ),
    "routing": ("gear", "bits", "seconds", "seconds_of_mlx_lm", "ratio", "spread"),
}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.benchmark", description="Time kernels and gears on this machine."
    )
    commands = parser.add_subparsers(dest="what", required=True)
    kernels = commands.add_parser("kernels", help="Matrix times vector, for each format, against the read bandwidth.")
    kernels.add_argument("--rows", type=int, default=4096, help="Default: 4096")
    kernels.add_argument("--cols", type=int, default=4096, help="Default: 4096")
    kernels.add_argument("--vectors", type=int, default=1, help="In one call. Default: 1")
    kernels.add_argument("--megabytes", type=int, default=256, help="Weights read in a trial. Default: 256")
    kernels.add_argument("--native-only", action="store_true", help="Leave MLX's own kernels out.")
    decode = commands.add_parser("decode", help="Tokens per second of each gear.")
    decode.add_argument("--context", type=int, default=0, help="Tokens that the KV cache holds before. Default: 0")
    routing = commands.add_parser("routing", help="What entropy, monitor, gate and record add to a token.")
    for command in (decode, routing):
        command.add_argument("--model", help="Local directory or Hub repository. Default: a random Llama of --shape")
        command.add_argument("--shape", default="1024x8", help="WIDTHxLAYERS of the random Llama. Default: 1024x8")
        command.add_argument("--gears", help="Default: those of a geared checkpoint, or 4,8,16")
        command.add_argument("--tokens", type=int, default=16, help="Tokens in a trial. Default: 16")
    for command in (kernels, decode, routing):
        command.add_argument("--trials", type=int, default=5, help="Counted trials. Default: 5")
        command.add_argument("--json", metavar="FILE", help="Write all rows as JSON.")
    return parser


def show(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{v:.2f}" for v in value)
    if value is None:
        return "never"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from ...cli import options

    options.check_numbers(args)
    out = options.output_path(args.json) if args.json else None
    if args.what == "kernels":
        from .kernels import benchmark_kernels as measure
    elif args.what == "decode":
        from .decode import benchmark_decode as measure
    else:
        from .routing import benchmark_routing as measure
    rows = measure(args)
    machine = f"{platform.platform()}, {platform.processor() or platform.machine()}"
    rows = [row | {"machine": machine} for row in rows]
    table = Table(*TABLES[args.what], box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(show(row[name]) for name in TABLES[args.what]))
    Console(width=160).print(table)
    bandwidth = statistics.median(row["read_bandwidth_gigabytes_per_second"] for row in rows)
    print(f"read bandwidth {bandwidth:.1f} GB/s, {rows[0]['threads']} threads, {machine}")
    if out:
        write_text(out, as_json({"rows": rows}))
    return 0


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))
