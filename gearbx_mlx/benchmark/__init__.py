"""gearbx_mlx benchmark: time the gears of a model on this machine, and on a Mac the Metal kernels too.

Here are the flags of each benchmark; the module with its name measures, and prints and writes the rows.

A trial goes through everything that is compared in turn, and the first trial is not counted: other work on the machine
then slows all of it alike. Compare ratios within a run; times of different runs are not comparable.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, get_args

from ..cli.flags import device_flag
from ..cli.parser import FlagParser, add_flags
from ..cli.start import start
from ..errors import GearbxError, numbers
from ..gears.ladder import GROUP_SIZES, Ladder
from ..settings import Settings, flag

MOST = 100_000  # trials or tokens: more take days
HEAD = 64  # width of an attention head of the random Llama
GROUP = 64
MOST_VECTORS = 16  # that a Metal kernel takes


def parse_shape(text: str) -> tuple[int, int]:
    """Width and layers of the random Llama.

    Raises:
        GearbxError: what is not of the form WIDTHxLAYERS, or a width that its heads do not divide.
    """
    try:
        width, layers = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape '{text}' is not WIDTHxLAYERS, such as 1024x24") from error
    if width % (4 * HEAD) or width < 4 * HEAD or layers < 1:
        raise GearbxError(f"--shape '{text}': give a width that is a multiple of {4 * HEAD}, and 1 layer or more")
    return width, layers


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Rows and columns of matrices, from text such as "4096x4096,14336x4096".

    Raises:
        GearbxError: another form, or columns that groups do not divide.
    """
    try:
        pairs = tuple((int(rows), int(columns)) for rows, columns in (part.split("x") for part in text.split(",")))
    except ValueError as error:
        raise GearbxError(f"--shapes '{text}' is not ROWSxCOLUMNS, such as 4096x4096,14336x4096") from error
    for rows, columns in pairs:
        if not 1 <= rows <= 2**20 or not 1 <= columns <= 2**20 or columns % max(GROUP_SIZES):
            raise GearbxError(
                f"--shapes '{text}': give 1 to {2**20} rows, and columns that are a multiple of {max(GROUP_SIZES)}"
            )
    return pairs


def parse_vectors(text: str) -> tuple[int, ...]:
    """--vectors as numbers. Raises GearbxError for more than a kernel takes, or none."""
    counts = numbers("--vectors", text, int, "1,4,8")
    if not all(1 <= count <= MOST_VECTORS for count in counts):
        raise GearbxError(f"--vectors '{text}': give 1 to {MOST_VECTORS}")
    return counts


@dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """Hold what every benchmark but that of Metal takes."""

    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)
    device: str | None = device_flag()


@dataclass(frozen=True)
class MatrixBenchmark(BenchmarkSettings):
    """Products with one matrix. rows, cols: of the matrix; megabytes: of weights, read in a trial."""

    rows: int = flag(4096, "Rows of the matrix.", least=1, most=2**20)
    cols: int = flag(4096, "Columns of the matrix.", least=GROUP)
    megabytes: int = flag(256, "Weights read in a trial.", least=1, most=2**20)

    def __post_init__(self) -> None:
        if self.cols < GROUP or self.cols % GROUP:
            raise GearbxError(f"--cols is {self.cols}; give a multiple of {GROUP}")
        super().__post_init__()


@dataclass(frozen=True)
class KernelBenchmark(MatrixBenchmark):
    """Matrix times vector, in every format: a part of the Metal benchmark, and a study."""

    vectors: int = flag(1, "Vectors in one call.", least=1, most=2**10)
    native_only: bool = flag(False, "Leave MLX's own kernels out.")


@dataclass(frozen=True)
class ModelBenchmark(BenchmarkSettings):
    """What is decoded. model: None means a random Llama of `shape`; gears: None means the checkpoint's, or 4,8,16."""

    model: str | None = flag(None, "Local directory or Hub repository. Default: a random Llama of --shape", named=True)
    shape: tuple[int, int] = flag((1024, 8), "WIDTHxLAYERS of the random Llama. Default: 1024x8", parse=parse_shape)
    gears: Ladder | None = flag(
        None, "Bits of the gears. Default: those of a geared checkpoint, or 4,8,16", parse=Ladder.parse
    )
    tokens: int = flag(16, "Tokens in a trial.", least=1, most=MOST)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Tokens per second of each gear. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "decode"

    context: int = flag(0, "Tokens in the KV cache before the first one. Default: 0", least=0, most=10**15)


@dataclass(frozen=True)
class MetalBenchmark(Settings):
    """On a Mac: every Metal kernel checked and timed, the gears and modes of a model; one file with all of it."""

    what: ClassVar[str] = "metal"

    check_only: bool = flag(False, "Only compare every kernel with what it stands for.")
    shapes: tuple[tuple[int, int], ...] = flag(
        ((4096, 4096), (14336, 4096), (4096, 14336)),
        "ROWSxCOLUMNS that are timed. Default: 4096x4096,14336x4096,4096x14336",
        parse=parse_shapes,
    )
    vectors: tuple[int, ...] = flag(
        (1, 2, 4, 8), f"Vectors in one call, 1 to {MOST_VECTORS}. Default: 1,2,4,8", parse=parse_vectors
    )
    group_size: int = flag(64, "Group size of the affine weights and planes to check.", choices=GROUP_SIZES)
    megabytes: int = flag(512, "Weights read in a trial; more than the caches have room for.", least=1, most=2**20)
    model: str | None = flag(
        None, "Whose gears and modes are timed: local directory or Hub repository. Default: the demo model", named=True
    )
    gears: Ladder | None = flag(
        None, "Bits of its gears. Default: those of a geared checkpoint, or 4,8,16", parse=Ladder.parse
    )
    tokens: int = flag(64, "Most tokens of a text.", least=1, most=MOST)
    trials: int = flag(7, "Counted trials.", least=1, most=MOST)
    json: str = flag("metal.json", "Write everything as JSON.", metavar="FILE", named=True)


Benchmark = DecodeBenchmark | MetalBenchmark
KINDS: dict[str, type[Benchmark]] = {kind.what: kind for kind in get_args(Benchmark)}


def main() -> None:
    """The command: parse the flags, and run the benchmark that they name."""
    start(
        "benchmark",
        lambda: setup_arg_parser().settings(),
        lambda settings: import_module(f".{settings.what}", __name__).run,
    )


class BenchmarkParser(FlagParser):
    """Takes a word, and the flags of the settings that it stands for."""

    def settings(self) -> Benchmark:
        flags = vars(self.parse_args())
        return KINDS[flags.pop("what")](**flags)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.dest == "what" and value not in KINDS:
            self.refuse_gone(f"benchmark {value}")
        super()._check_value(action, value)


def setup_arg_parser() -> FlagParser:
    parser = BenchmarkParser("benchmark", Benchmark, description="Time the gears of a model on this machine.")
    commands = parser.add_subparsers(dest="what", required=True)
    for what, kind in KINDS.items():
        subparser = commands.add_parser(what, help=kind.__doc__, argument_default=argparse.SUPPRESS)
        subparser.add_rare(add_flags(subparser, kind))
    return parser
