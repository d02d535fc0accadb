"""Flags of `benchmark`, and the settings that they become: a group for each thing that it measures."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from ...errors import GearbxError
from ...gears.ladder import GROUP_SIZES, Ladder
from ...kernels import KERNELS
from ..device import device_flag
from ..settings import FlagParser, Settings, add_flags, check_choice, flag, settings_of
from ..shares import parse_shares

MOST = 100_000  # trials or tokens: more take days
HEAD = 64  # width of an attention head of the random Llama
GROUP = 64
LEAST_CANCELLED = 20  # requests, so that a fifth are some
MOST_TEXTS = 256
MOST_VECTORS = 16  # that a Metal kernel takes
PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class KernelBenchmark(Settings):
    """Matrix times vector, in every format. rows, cols: of the matrix; megabytes: of weights, read in a trial."""

    what: ClassVar[str] = "kernels"

    rows: int = flag(4096, "Rows of the matrix.", least=1, most=2**20)
    cols: int = flag(4096, "Columns of the matrix.", least=GROUP)
    vectors: int = flag(1, "Vectors in one call.", least=1, most=2**10)
    megabytes: int = flag(256, "Weights read in a trial.", least=1, most=2**20)
    native_only: bool = flag(False, "Leave MLX's own kernels out.")
    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)
    device: str | None = device_flag()

    def __post_init__(self) -> None:
        check_columns(self.cols)
        super().__post_init__()


def check_columns(cols: int) -> None:
    """Raises GearbxError for columns that groups do not divide."""
    if cols < GROUP or cols % GROUP:
        raise GearbxError(f"--cols is {cols}; give a multiple of {GROUP}")


def check_picture(file: str | None) -> None:
    """Raises GearbxError for a picture of another format than png and svg."""
    if file is not None and Path(file).suffix not in PICTURES:
        raise GearbxError(f"--picture {file}: give a file that ends in {' or '.join(PICTURES)}")


@dataclass(frozen=True)
class ThreadBenchmark(Settings):
    """Products on 1, 2, ... all cores. most: None means as many threads as there are cores."""

    what: ClassVar[str] = "threads"

    rows: int = flag(4096, "Rows of the matrix.", least=1, most=2**20)
    cols: int = flag(4096, "Columns of the matrix.", least=GROUP)
    megabytes: int = flag(256, "Weights read in a trial.", least=1, most=2**20)
    most: int | None = flag(None, "Most threads. Default: one for each core", least=1, most=256)
    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)
    picture: str | None = flag(None, "Draw the rows, as .png or .svg.", metavar="FILE", named=True)
    device: str | None = device_flag()

    def __post_init__(self) -> None:
        check_columns(self.cols)
        check_picture(self.picture)
        super().__post_init__()


@dataclass(frozen=True)
class W4A8Benchmark(ThreadBenchmark):
    """AION's Table 2 and cost model: products of 4-bit weights by floats, integers, one by one and by numpy."""

    what: ClassVar[str] = "w4a8"


@dataclass(frozen=True)
class ModelBenchmark(Settings):
    """What is decoded. model: None means a random Llama of `shape`; gears: None means the checkpoint's, or 4,8,16."""

    model: str | None = flag(None, "Local directory or Hub repository. Default: a random Llama of --shape", named=True)
    shape: str = flag("1024x8", "WIDTHxLAYERS of the random Llama.")
    gears: str | None = flag(None, "Bits of the gears. Default: those of a geared checkpoint, or 4,8,16")
    tokens: int = flag(16, "Tokens in a trial.", least=1, most=MOST)
    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)
    device: str | None = device_flag()

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shape(self.shape)
        if self.gears is not None:
            Ladder.parse(self.gears)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Tokens per second of each gear. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "decode"

    context: int = flag(0, "Tokens in the KV cache before the first one. Default: 0", least=0)


@dataclass(frozen=True)
class TokenBenchmark(ModelBenchmark):
    """Where a token's time goes. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "token"

    context: int = flag(0, "Tokens in the KV cache before the first one. Default: 0", least=0)
    picture: str | None = flag(None, "Draw the rows, as .png or .svg.", metavar="FILE", named=True)

    def __post_init__(self) -> None:
        check_picture(self.picture)
        super().__post_init__()


@dataclass(frozen=True)
class RoutingBenchmark(ModelBenchmark):
    """What routing adds to a token."""

    what: ClassVar[str] = "routing"


@dataclass(frozen=True)
class MixtureBenchmark(ModelBenchmark):
    """Tokens in all gears beside the top gear alone, as measured and as GEARBX 9 predicts."""

    what: ClassVar[str] = "mixture"

    tokens: int = flag(120, "Tokens in a trial.", least=1, most=MOST)
    shares: str = flag("0.55,0.25,0.2", "Of the tokens in each gear, lowest gear first.")
    run: int = flag(10, "Tokens in a gear between two shifts, about.", least=1, most=MOST)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares_of()

    def shares_of(self) -> list[float]:
        """Raises GearbxError for what are no parts of 1."""
        return parse_shares(self.shares)


@dataclass(frozen=True)
class BatchBenchmark(ModelBenchmark):
    """Texts that share passes, in one gear, beside mlx-lm's own batches of the same model."""

    what: ClassVar[str] = "batch"

    batch_size: str = flag("1,4,8", "Numbers of texts, with commas between.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sizes

    @property
    def sizes(self) -> list[int]:
        """Raises GearbxError for what is no list of numbers of texts."""
        try:
            sizes = [int(part) for part in self.batch_size.split(",")]
        except ValueError as error:
            raise GearbxError(f"--batch-size '{self.batch_size}' is not a list of numbers, such as 1,4,8") from error
        if not all(1 <= size <= MOST_TEXTS for size in sizes):
            raise GearbxError(f"--batch-size '{self.batch_size}': give 1 to {MOST_TEXTS}")
        return sizes


@dataclass(frozen=True)
class ServerBenchmark(Settings):
    """Our server beside mlx_lm.server, and under many clients at once. Without --trials, --soak and so on: trials."""

    what: ClassVar[str] = "server"

    model: str | None = flag(None, "Local directory or Hub repository. Default: the demo model", named=True)
    gears: str = flag("16", "Bits of the one gear.")
    kernels: str = flag("native,mlx", "Kernels of our server, with commas between.")
    tokens: int = flag(64, "Tokens of an answer.", least=8, most=MOST)
    trials: int = flag(9, "Counted trials of one client beside mlx_lm.server; 0: none.", least=0, most=MOST)
    soak: int = flag(0, "Seconds of many clients at once; 0: none.", least=0, most=10**6)
    clients: int = flag(16, "Clients at once.", least=1, most=200)
    cancel: int = flag(0, "Requests of which a fifth is cancelled; 0: none.", least=0, most=10**6)
    modes: bool = flag(False, "Every mode under several clients at once.")
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kernels in self.kernels.split(","):
            check_choice("kernels", kernels, KERNELS)
        if 0 < self.cancel < LEAST_CANCELLED:
            raise GearbxError(f"--cancel is {self.cancel}; give {LEAST_CANCELLED} or more, or 0")


@dataclass(frozen=True)
class MetalBenchmark(Settings):
    """On a Mac: every Metal kernel checked and timed, the gears and modes of a model; one file with all of it."""

    what: ClassVar[str] = "metal"

    check_only: bool = flag(False, "Only compare every kernel with what it stands for.")
    shapes: str = flag("4096x4096,14336x4096,4096x14336", "ROWSxCOLUMNS that are timed.")
    vectors: str = flag("1,2,4,8", f"Vectors in one call, 1 to {MOST_VECTORS}.")
    dtype: str = flag("float16", "Type that is timed.", choices=("float16", "bfloat16", "float32"))
    group_size: int = flag(64, "Of affine and planes.", choices=GROUP_SIZES)
    megabytes: int = flag(512, "Weights read in a trial; more than the caches have room for.", least=1, most=2**20)
    model: str | None = flag(
        None, "Whose gears and modes are timed: local directory or Hub repository. Default: the demo model", named=True
    )
    gears: str | None = flag(None, "Bits of its gears. Default: those of a geared checkpoint, or 4,8,16")
    tokens: int = flag(64, "Most tokens of a text.", least=1, most=MOST)
    trials: int = flag(7, "Counted trials.", least=1, most=MOST)
    json: str = flag("metal.json", "Write everything as JSON.", metavar="FILE", named=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shapes(self.shapes)
        parse_vectors(self.vectors)
        if self.gears is not None:
            Ladder.parse(self.gears)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Rows and columns of matrices, from text such as "4096x4096,14336x4096".

    Raises:
        GearbxError: another form, or columns that groups do not divide.
    """
    try:
        pairs = [(int(rows), int(columns)) for rows, columns in (part.split("x") for part in text.split(","))]
    except ValueError as error:
        raise GearbxError(f"--shapes '{text}' is not ROWSxCOLUMNS, such as 4096x4096,14336x4096") from error
    for rows, columns in pairs:
        if not 1 <= rows <= 2**20 or not 1 <= columns <= 2**20 or columns % max(GROUP_SIZES):
            raise GearbxError(
                f"--shapes '{text}': give 1 to {2**20} rows, and columns that are a multiple of {max(GROUP_SIZES)}"
            )
    return pairs


def parse_vectors(text: str) -> list[int]:
    """Numbers of vectors, from text such as "1,2,4,8". Raises GearbxError for what no kernel takes."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise GearbxError(f"--vectors '{text}' is not a list of numbers, such as 1,2,4,8") from error
    if not all(1 <= count <= MOST_VECTORS for count in counts):
        raise GearbxError(f"--vectors '{text}': give 1 to {MOST_VECTORS}")
    return counts


Benchmark = (
    KernelBenchmark
    | ThreadBenchmark
    | W4A8Benchmark
    | DecodeBenchmark
    | TokenBenchmark
    | RoutingBenchmark
    | MixtureBenchmark
    | BatchBenchmark
    | MetalBenchmark
    | ServerBenchmark
)
KINDS: dict[str, type[Benchmark]] = {kind.what: kind for kind in get_args(Benchmark)}


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


def setup_arg_parser() -> argparse.ArgumentParser:
    description = "Time kernels and gears on this machine."
    parser = FlagParser("benchmark", description=description)
    commands = parser.add_subparsers(dest="what", required=True)
    for what, kind in KINDS.items():
        subparser = commands.add_parser(what, help=kind.__doc__, argument_default=argparse.SUPPRESS)
        subparser.add_rare(add_flags(subparser, kind))
    return parser


def parse() -> Benchmark:
    flags = setup_arg_parser().parse_args()
    return settings_of(KINDS[flags.what], flags)
