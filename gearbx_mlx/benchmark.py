"""python -m gearbx_mlx.benchmark: kernels against the read bandwidth, gears against MLX, in one run.

Trials go through everything that is compared in turn, after one that is not counted, so that what else the machine is
doing meets all alike. Ratios within a run can be compared; times of different runs cannot.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich import box
from rich.console import Console

from . import terminal
from .telemetry.files import write_text
from .telemetry.summary import as_json

GIGABYTE, GIBIBYTE = 1e9, 2**30
GROUP = 64
SLOW_TRIALS, SLOW_TOKENS = 2, 2  # of MLX's own kernels
TABLES = {
    "kernels": ("format", "bits", "path", "seconds", "gigabytes_per_second", "bandwidth_ratio", "spread"),
    "decode": (
        *("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "weight_bytes_per_token"),
        *("speedup", "predicted_speedup", "roofline_share", "break_even_tokens"),
    ),
}


@dataclass
class Case:
    """A format on a path: its row, a product of x (1, inputs) with every copy of a matrix, bytes of one, how many."""

    row: dict[str, Any]
    work: Callable[[Any], None]
    size: int
    copies: int


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.benchmark", description="Time kernels and gears on this machine."
    )
    commands = parser.add_subparsers(dest="what", required=True)
    kernels = commands.add_parser("kernels", help="Matrix times vector, for each format, against the read bandwidth.")
    kernels.add_argument("--rows", type=int, default=4096, help="Default: 4096")
    kernels.add_argument("--cols", type=int, default=4096, help="Default: 4096")
    kernels.add_argument("--megabytes", type=int, default=256, help="Weights read in a trial. Default: 256")
    kernels.add_argument("--native-only", action="store_true", help="Leave MLX's own kernels out.")
    decode = commands.add_parser("decode", help="Tokens per second of each gear.")
    decode.add_argument("--model", help="Local directory or Hub repository. Default: a random Llama of --shape")
    decode.add_argument("--shape", default="1024x8", help="WIDTHxLAYERS of the random Llama. Default: 1024x8")
    decode.add_argument("--gears", default="4,8,16", help="Default: 4,8,16")
    decode.add_argument("--tokens", type=int, default=16, help="Tokens in a trial. Default: 16")
    for command in (kernels, decode):
        command.add_argument("--trials", type=int, default=5, help="Counted trials. Default: 5")
        command.add_argument("--json", metavar="FILE", help="Write all rows as JSON.")
    return parser


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def dense_cases(weight: Any, total: int, paths: list[str]) -> Iterator[Case]:
    """Weights as they are. MLX widens half-precision ones whole at every use, which is no kernel to compare with."""
    import mlx.core as mx

    from .kernels.dispatch import dense_product

    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        matrix = weight.astype(dtype)
        copies = [matrix + 0 for _ in range(max(1, total // matrix.nbytes))]
        mx.eval(copies)
        for path in paths if dtype == mx.float32 else [p for p in paths if p == "native"]:
            product = dense_product if path == "native" else lambda x, w: x @ w.T

            def work(x: Any, copies: list = copies, product: Any = product) -> None:
                mx.eval([product(x, w) for w in copies])

            row = {"format": f"dense {str(dtype).rpartition('.')[2]}", "bits": 8 * dtype.size, "path": path}
            yield Case(row, work, matrix.nbytes, len(copies))


def stack_cases(weight: Any, total: int, paths: list[str]) -> Iterator[Case]:
    """Affine weights, which are stacks of one plane, and stacks of several; scales of bfloat16, groups of 64."""
    import mlx.core as mx

    from .formats.planes import split
    from .kernels.dispatch import stack_product
    from .kernels.reference import planes_matmul

    for widths in [(b,) for b in (2, 3, 4, 5, 6, 8)] + [(4, 4), (4, 1, 1, 2)]:
        planes = split(weight.astype(mx.bfloat16), widths, GROUP)
        arrays = [*planes.weights, planes.scales, *{id(b): b for b in planes.biases}.values()]
        size = sum(array.nbytes for array in arrays)
        copies = [
            ([w + 0 for w in planes.weights], planes.scales + 0, [b + 0 for b in planes.biases])
            for _ in range(max(1, total // size))
        ]
        mx.eval(copies)
        for path in paths:
            product = stack_product if path == "native" else planes_matmul

            def work(x: Any, copies: list = copies, product: Any = product, widths: Any = widths) -> None:
                mx.eval([product(x, *arrays, widths, GROUP) for arrays in copies])

            name = "affine" if len(widths) == 1 else "planes " + "+".join(map(str, widths))
            yield Case({"format": name, "bits": sum(widths), "path": path}, work, size, len(copies))


def time_case(case: Case, x: Any, trials: int, read_bandwidth: Callable[[], float]) -> dict[str, Any]:
    """One row: medians over trials, each beside a measurement of the read bandwidth made just before it."""
    case.work(x)  # a warm-up
    speeds, ratios, bandwidths = [], [], []
    for _ in range(trials):
        bandwidths.append(read_bandwidth())
        speeds.append(case.size * case.copies / timed(lambda: case.work(x)) / GIGABYTE)
        ratios.append(speeds[-1] / bandwidths[-1])
    return case.row | {
        "seconds": case.size / statistics.median(speeds) / GIGABYTE,
        "gigabytes_per_second": statistics.median(speeds),
        "bandwidth_ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
        "trials": trials,
    }


def benchmark_kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each format and path.

    Raises:
        GearbxError: no native kernels, with which the read bandwidth is measured.
    """
    import mlx.core as mx
    from rich.progress import Progress, SpinnerColumn, TextColumn

    module = native_module()
    paths = ["native"] if args.native_only else ["native", "mlx"]
    weight = mx.random.normal((args.rows, args.cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((1, args.cols), key=mx.random.key(1))
    words = mx.full((GIBIBYTE // 4,), 1, dtype=mx.uint32)
    mx.eval(weight, x, words)

    def read_bandwidth() -> float:
        return words.nbytes / timed(lambda: module.read_sum(words)) / GIGABYTE

    read_bandwidth()
    shape = {"rows": args.rows, "cols": args.cols, "threads": module.threads()}
    total, rows = args.megabytes * 2**20, []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=terminal.messages, transient=True
    ) as progress:
        task = progress.add_task("")
        for case in chain(dense_cases(weight, total, paths), stack_cases(weight, total, paths)):
            progress.update(task, description=" ".join(map(str, case.row.values())))
            trials = args.trials if case.row["path"] == "native" else min(args.trials, SLOW_TRIALS)
            rows.append(time_case(case, x, trials, read_bandwidth) | shape)
    return rows


def native_module() -> Any:
    """Raises GearbxError where there are no native kernels."""
    from .errors import GearbxError
    from .kernels import cpu

    terminal.show_compiling()
    module = cpu.native()
    if module is None:
        raise GearbxError(f"there are no native kernels to compare with: {cpu.why_not()}")
    return module


def random_llama(shape: str) -> Any:
    """A Llama of WIDTHxLAYERS in bfloat16: MLP 2.75 times as wide, heads of 64, half as many for keys and values.

    Raises:
        GearbxError: a shape that is not of that form.
    """
    import mlx.core as mx
    from mlx_lm.models import llama

    from .errors import GearbxError

    try:
        width, layers = (int(part) for part in shape.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape '{shape}' is not WIDTHxLAYERS, such as 1024x24") from error
    if width % 256 or width < 256 or layers < 1:
        raise GearbxError(f"--shape '{shape}': the width is a multiple of 256, and there is a layer")
    mx.random.seed(0)
    sizes = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode_seconds(model: Any, tokens: int) -> float:
    """Seconds per token of a few greedy tokens after a short prompt."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    token = mx.argmax(model(mx.array([[1, 2, 3]]), cache=cache)[:, -1:], axis=-1)
    mx.eval(token)

    def work() -> None:
        nonlocal token
        for _ in range(tokens):
            token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)

    return timed(work) / tokens


def benchmark_decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each gear on each path; trials go through all of them in turn.

    Raises:
        GearbxError: no native kernels, a shape or ladder that does not exist.
    """
    import mlx.core as mx
    from rich.progress import Progress

    from .gears.cost import break_even_tokens
    from .gears.gearbox import Gearbox
    from .gears.ladder import Ladder
    from .loading import load

    module, ladder = native_module(), Ladder.parse(args.gears)
    words = mx.full((GIBIBYTE // 4,), 1, dtype=mx.uint32)
    mx.eval(words)
    boxes = {
        kernels: Gearbox(load(args.model)[0] if args.model else random_llama(args.shape), ladder, kernels=kernels)
        for kernels in ("native", "mlx")
    }
    cases = [(path, gear) for path in boxes for gear in ladder]
    seconds: dict[tuple, list[float]] = {case: [] for case in cases}
    shifts: dict[tuple, list[float]] = {case: [] for case in cases}
    peaks: dict[tuple, int] = {}
    bandwidths: list[float] = []
    with Progress(console=terminal.messages, transient=True) as progress:
        for number in progress.track(range(args.trials + 1), description="trials"):
            for case in cases:
                path, gear = case
                bandwidths.append(words.nbytes / timed(lambda: module.read_sum(words)) / GIGABYTE)
                shift = boxes[path].shift(gear)
                mx.reset_peak_memory()
                spent = decode_seconds(boxes[path].model, args.tokens if path == "native" else SLOW_TOKENS)
                peaks[case] = mx.get_peak_memory()
                if number:  # the first round is a warm-up
                    seconds[case].append(spent)
                    shifts[case].append(shift)
    median = {case: statistics.median(spent) for case, spent in seconds.items()}
    base = median["mlx", ladder.top]
    return [
        {
            "gear": gear.name,
            "bits": gear.bits,
            "path": path,
            "tokens_per_second": 1 / median[path, gear],
            "ratio": base / median[path, gear],
            "spread": [base / max(spent), base / min(spent)],
            "weight_bytes_per_token": boxes[path].weight_bytes_per_token(gear),
            "speedup": median[path, ladder.top] / median[path, gear],
            "predicted_speedup": boxes[path].predicted_speedup(gear),
            "shift_seconds": statistics.median(shifts[path, gear]),
            "roofline_share": boxes[path].weight_bytes_per_token(gear)
            / (statistics.median(bandwidths) * GIGABYTE)
            / median[path, gear],
            "break_even_tokens": break_even_tokens(
                statistics.median(shifts[path, gear]), median[path, ladder.top], median[path, gear]
            ),
            "peak_memory_bytes": peaks[path, gear],
            "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
            "threads": module.threads(),
            "trials": args.trials,
        }
        for (path, gear), spent in seconds.items()
    ]


def show(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{v:.2f}" for v in value)
    if value is None:
        return "never"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from . import options

    options.check_numbers(args)
    out = options.output_path(args.json) if args.json else None
    rows = benchmark_kernels(args) if args.what == "kernels" else benchmark_decode(args)
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


if __name__ == "__main__":
    main()
