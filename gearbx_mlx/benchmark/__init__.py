"""Flags of gearbx_mlx benchmark: the speedup of a model on a Mac (mac), and the speed of its gears (decode).

The module named like a benchmark measures, prints and writes its rows.

Everything compared alternates within a trial, so that other work on the machine slows all of it alike. The first trial
is not counted. Compare ratios within a run; times of different runs are not comparable.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, get_args

from ..cli.flags import device_flag
from ..cli.parser import FlagParser, add_flags
from ..cli.start import start
from ..errors import GearbxError
from ..gears.ladder import Ladder
from ..settings import Settings, flag

MAX_TRIALS = 100_000  # maximum number of trials or tokens; more take days
HEAD_WIDTH = 64  # width of an attention head of the random Llama


def parse_shape(text: str) -> tuple[int, int]:
    """Parse width and layers of the random Llama.

    Raises:
        GearbxError: text not of the form WIDTHxLAYERS, or a width that its heads do not divide.
    """
    try:
        width, layers = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape: not WIDTHxLAYERS, got '{text}'; use numbers such as 1024x24") from error
    if width % (4 * HEAD_WIDTH) or width < 4 * HEAD_WIDTH or layers < 1:
        raise GearbxError(f"--shape: out of range, got {text}; use a multiple of {4 * HEAD_WIDTH}, and 1 layer or more")
    return width, layers


@dataclass(frozen=True)
class ModelBenchmark(Settings):
    """The decoded model. model: None for a random Llama of `shape`. gears: None for its own, or 4,8,16."""

    trials: int = flag(5, "Counted trials", minimum=1, maximum=MAX_TRIALS)
    json: str | None = flag(None, "File for all rows as JSON", metavar="FILE", named=True)
    device: str | None = device_flag()
    model: str | None = flag(
        None, "Local directory or Hub repository", default_text="a random Llama of --shape", named=True
    )
    shape: tuple[int, int] = flag(
        (1024, 8), "WIDTHxLAYERS of the random Llama", default_text="1024x8", parse=parse_shape
    )
    gears: Ladder | None = flag(
        None, "Bits of the gears", default_text="those of a geared checkpoint, or 4,8,16", parse=Ladder.parse
    )
    tokens: int = flag(16, "Tokens in a trial", minimum=1, maximum=MAX_TRIALS)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Speed of each gear in tokens/s."""

    what: ClassVar[str] = "decode"

    context: int = flag(0, "Tokens in the KV cache before the first one", minimum=0, maximum=10**15)


@dataclass(frozen=True)
class MacBenchmark(Settings):
    """Speedup over mlx-lm on a Mac, of the default and of single gears; about three minutes."""

    what: ClassVar[str] = "mac"

    model: str = flag(
        "mlx-community/Llama-3.2-1B-Instruct-bf16",
        "Original bfloat16 or float16 model: local directory or Hub repository",
        named=True,
    )
    full: bool = flag(False, "Also time fixed draft lengths, mlx-lm's draft models and a 6-bit gear")
    tokens: int = flag(128, "Maximum number of tokens in an output", minimum=2, maximum=MAX_TRIALS)
    minutes: float = flag(0, "Time limit in minutes for more series; the first one is always complete", minimum=0)
    own_kernels: bool = flag(
        False, "First compile, check and time this package's Metal kernels for this model, and keep the faster ones"
    )
    json: str = flag(
        "mac.json", "JSON report to write, or to continue after an interruption", metavar="FILE", named=True
    )
    device: str | None = device_flag()


Benchmark = DecodeBenchmark | MacBenchmark
BENCHMARKS: dict[str, type[Benchmark]] = {kind.what: kind for kind in get_args(Benchmark)}


def main() -> None:
    """Parse the flags, and run their benchmark."""
    start(
        "benchmark",
        lambda: setup_arg_parser().settings(),
        lambda settings: import_module(f".{settings.what}", __name__).run,
    )


class BenchmarkParser(FlagParser):
    """A parser of a benchmark's name and its flags."""

    def settings(self) -> Benchmark:
        flags = vars(self.parse_args())
        return BENCHMARKS[flags.pop("benchmark")](**flags)


def setup_arg_parser() -> FlagParser:
    parser = BenchmarkParser("benchmark", Benchmark, description="Time the gears of a model on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar=f"{{{','.join(BENCHMARKS)}}}")
    for what, kind in BENCHMARKS.items():
        subparser = commands.add_parser(what, help=(kind.__doc__ or "").rstrip("."), argument_default=argparse.SUPPRESS)
        subparser.add_rare(add_flags(subparser, kind))
    return parser
