"""gearbx_mlx benchmark: what a model gains on a Mac (mac), and tokens per second of its gears (decode).

Here are the flags of each benchmark; the module with its name measures, and prints and writes the rows.

A trial goes through everything that is compared in turn, and the first trial is not counted: other work on the machine
then slows all of it alike. Compare ratios within a run; times of different runs are not comparable.
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

MAX_TRIALS = 100_000  # trials or tokens: more take days
HEAD_WIDTH = 64  # width of an attention head of the random Llama


def parse_shape(text: str) -> tuple[int, int]:
    """Width and layers of the random Llama.

    Raises:
        GearbxError: what is not of the form WIDTHxLAYERS, or a width that its heads do not divide.
    """
    try:
        width, layers = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape '{text}' is not WIDTHxLAYERS, such as 1024x24") from error
    if width % (4 * HEAD_WIDTH) or width < 4 * HEAD_WIDTH or layers < 1:
        raise GearbxError(f"--shape '{text}': give a width that is a multiple of {4 * HEAD_WIDTH}, and 1 layer or more")
    return width, layers


@dataclass(frozen=True)
class ModelBenchmark(Settings):
    """Says what is decoded. model: None means a random Llama of `shape`; gears: None means its own, or 4,8,16."""

    trials: int = flag(5, "Counted trials.", least=1, most=MAX_TRIALS)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)
    device: str | None = device_flag()
    model: str | None = flag(None, "Local directory or Hub repository. Default: a random Llama of --shape", named=True)
    shape: tuple[int, int] = flag((1024, 8), "WIDTHxLAYERS of the random Llama. Default: 1024x8", parse=parse_shape)
    gears: Ladder | None = flag(
        None, "Bits of the gears. Default: those of a geared checkpoint, or 4,8,16", parse=Ladder.parse
    )
    tokens: int = flag(16, "Tokens in a trial.", least=1, most=MAX_TRIALS)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Tokens per second of each gear. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "decode"

    context: int = flag(0, "Tokens in the KV cache before the first one. Default: 0", least=0, most=10**15)


@dataclass(frozen=True)
class MacBenchmark(Settings):
    """On a Mac: mlx-lm alone and with a draft model, the default, fixed drafts and one gear, in turn; a verdict."""

    what: ClassVar[str] = "mac"

    model: str | None = flag(
        None,
        "An original model of bfloat16 or float16, local directory or Hub repository. Default: the demo model",
        named=True,
    )
    tokens: int = flag(200, "Most tokens of a text.", least=2, most=MAX_TRIALS)
    minutes: float = flag(
        10, "Write no further round of texts that would end later; the first one is written at any speed.", least=0
    )
    own_kernels: bool = flag(
        False, "First compile, check and time our Metal kernels for this model, and keep which of them won."
    )
    json: str = flag(
        "mac.json", "Write everything as JSON; an interrupted run goes on there.", metavar="FILE", named=True
    )
    device: str | None = device_flag()


Benchmark = DecodeBenchmark | MacBenchmark
BENCHMARKS: dict[str, type[Benchmark]] = {kind.what: kind for kind in get_args(Benchmark)}


def main() -> None:
    """Parse the flags, and run the benchmark that they name."""
    start(
        "benchmark",
        lambda: setup_arg_parser().settings(),
        lambda settings: import_module(f".{settings.what}", __name__).run,
    )


class BenchmarkParser(FlagParser):
    """Takes a word, and the flags of the settings that it stands for."""

    def settings(self) -> Benchmark:
        flags = vars(self.parse_args())
        return BENCHMARKS[flags.pop("benchmark")](**flags)


def setup_arg_parser() -> FlagParser:
    parser = BenchmarkParser("benchmark", Benchmark, description="Time the gears of a model on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar=f"{{{','.join(BENCHMARKS)}}}")
    for what, kind in BENCHMARKS.items():
        subparser = commands.add_parser(what, help=kind.__doc__, argument_default=argparse.SUPPRESS)
        subparser.add_rare(add_flags(subparser, kind))
    return parser
